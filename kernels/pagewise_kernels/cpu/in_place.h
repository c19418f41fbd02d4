// Attention of one query to keys and values where they lie in the pool, for decodes: nothing is copied or transposed.
//
// The context comes in tiles that fit into the first level cache, and all heads look at a tile before the next one, so
// that memory is read in order whichever of tokens and heads comes first in the pool. Scores of the whole piece are kept,
// so that the softmax is taken once.
#pragma once

#include "kv_read.h"

enum { NEAR = 16, LINE = PIECE + VEC };

// Ask for what the next tile will read, into the second level cache. The processor's own prefetchers follow neither block
// tables nor the short runs of one head; this doubled the speed on memory that no cache holds.
INLINE void fetch(const void **tokens, long offset, long count, long dim, int kv) {
  for (long t = 0; t < count; t++)
    for (long d = 0; d < bytes_of(dim, kv); d += 64)
      __builtin_prefetch((const char *)tokens[t] + offset * size_of(kv) + d, 0, 1);
}

// Multiply scores or weights [rows, count], each row at LINE, by the scales of their tokens: those of keys and values in
// eight bits, which were read without them.
INLINE void apply_scales(float *scores, long rows, const float *scales, const long *scale_at, long count) {
  for (long t = 0; t < count; t += VEC) {
    floats scale;
    for (int i = 0; i < VEC; i++) scale[i] = scales[scale_at[t + i]];
    for (long r = 0; r < rows; r++) store(scores + r * LINE, t, load(scores + r * LINE, t, 0) * scale, 0);
  }
}

// Scores of ``rows`` query rows q [rows, vectors * VEC] and VEC keys each.
INLINE void scores_in_place(int vectors, long rows, const float *q, const void **keys, long offset, long count,
                            float *scores, int kv) {
  for (long t = 0; t < count; t += VEC)
    for (long r = 0; r < rows; r++) {
      floats x[VEC];
      for (int i = 0; i < VEC; i++) {
        x[i] = load_kv(keys[t + i], offset, 0, kv) * load(q + r * vectors * VEC, 0, 0);
        for (int d = 1; d < vectors; d++)
          x[i] += load_kv(keys[t + i], offset, d * VEC, kv) * load(q + r * vectors * VEC, d * VEC, 0);
      }
      store(scores + r * LINE, t, sums_of(x), 0);
    }
}

// sums [rows, dim] += weights [rows, count] * values from index ``first`` on: ``rows`` is 1 or 2, and ``vectors`` of dim
// are held in registers.
INLINE void values_in_place(int rows, int vectors, long dim, const float *weights, const void **values, long offset,
                            long first, long count, float *sums, int kv) {
  floats held[2][4];
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < vectors; d++) held[r][d] = load(sums + r * dim, d * VEC, 0);
  for (long t = 0; t < count; t++) {
    for (int d = 0; d < vectors; d++) {
      floats v = load_kv(values[t], offset, first + d * VEC, kv);
      for (int r = 0; r < rows; r++) held[r][d] += weights[r * LINE + t] * v;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < vectors; d++) store(sums + r * dim, d * VEC, held[r][d], 0);
}

INLINE void all_values_in_place(long rows, long dim, const float *weights, const void **values, long offset, long count,
                                float *sums, int kv) {
  for (long d = 0; d < dim;) {
    long r = 0;
    if (dim - d >= 4 * VEC) {
      for (; r + 2 <= rows; r += 2)
        values_in_place(2, 4, dim, weights + r * LINE, values, offset, d, count, sums + r * dim + d, kv);
      if (r < rows) values_in_place(1, 4, dim, weights + r * LINE, values, offset, d, count, sums + r * dim + d, kv);
      d += 4 * VEC;
    } else {
      for (; r < rows; r++)
        values_in_place(1, 1, dim, weights + r * LINE, values, offset, d, count, sums + r * dim + d, kv);
      d += VEC;
    }
  }
}

// The softmax's weights of a piece, in place of its scores [count]; returns their sum.
INLINE float piece_weights(float *scores, long count, float softcap, float *most) {
  floats best = all(-__builtin_inff());
  for (long t = count; t % VEC; t++) scores[t] = -__builtin_inff();
  for (long t = 0; t < count; t += VEC) {
    floats x = load(scores, t, 0);
    if (softcap > 0) {
      // What follows the last score stays without weight.
      x = select(x == -__builtin_inff(), x, capped(x, softcap));
      store(scores, t, x, 0);
    }
    best = larger(best, x);
  }
  *most = max_of(best);
  floats total = {};
  for (long t = 0; t < count; t += VEC) {
    floats weight = exp2_of(load(scores, t, 0) - *most);
    store(scores, t, weight, 0);
    total += weight;
  }
  return sum_of(total);
}

// Leaves in s->sums [rows, dim], s->highs and s->totals what the heads of the KV heads first .. last make of context
// tokens low .. high, at most PIECE of them. dim is a multiple of VEC; there are at most SCORES / LINE rows.
INLINE void attend_in_place(const struct attention *a, struct scratch *s, long query, const int32_t *table, long first,
                            long last, long low, long high, int bf16, int kv) {
  long group = a->heads / a->kv_heads, dim = a->dim, count = high - low;
  floats factor = all(score_scale(a));
  for (long r = 0; r < (last - first) * group; r++)
    for (long d = 0; d < dim; d += VEC) {
      const void *q = at(a->q, query * a->q_token + (first * group + r) * a->q_head, bf16);
      store(s->q + r * dim, d, load(q, d, bf16) * factor, 0);
    }
  find_tokens(a, s, 0, table, first, low, high, kv);
  // Loads of whole vectors of tokens see the last one again.
  for (long t = count; t % VEC; t++) {
    s->key_at[t] = s->key_at[count - 1];
    s->scale_at[t] = s->scale_at[count - 1];
  }
  for (long t = 0; t < count; t += NEAR)
    for (long head = first; head < last; head++) {
      long row = (head - first) * group, n = smaller(NEAR, count - t), offset = (head - first) * a->key_head;
      float *scores = s->scores + row * LINE + t;
      if (t + n < count)
        fetch(s->key_at + t + n, offset, smaller(NEAR, count - t - n), dim, kv);
      else
        fetch(s->value_at, (head - first) * a->value_head, smaller(NEAR, count), dim, kv);
      switch (dim / VEC) {
        case 4: scores_in_place(4, group, s->q + row * dim, s->key_at + t, offset, n, scores, kv); break;
        case 8: scores_in_place(8, group, s->q + row * dim, s->key_at + t, offset, n, scores, kv); break;
        default: scores_in_place(dim / VEC, group, s->q + row * dim, s->key_at + t, offset, n, scores, kv);
      }
      if (kv == INT8) apply_scales(scores, group, a->key_scales + (head - first) * a->scale_head, s->scale_at + t, n);
    }
  for (long r = 0; r < (last - first) * group; r++)
    s->totals[r] = piece_weights(s->scores + r * LINE, count, a->softcap, s->highs + r);
  memset(s->sums, 0, (last - first) * group * dim * sizeof(float));
  for (long t = 0; t < count; t += NEAR)
    for (long head = first; head < last; head++) {
      long row = (head - first) * group, n = smaller(NEAR, count - t), offset = (head - first) * a->value_head;
      float *weights = s->scores + row * LINE + t;
      fetch(s->value_at + t + n, offset, smaller(NEAR, count - t - n), dim, kv);
      if (kv == INT8) apply_scales(weights, group, a->value_scales + (head - first) * a->scale_head, s->scale_at + t, n);
      all_values_in_place(group, dim, weights, s->value_at + t, offset, n, s->sums + row * dim, kv);
    }
}
