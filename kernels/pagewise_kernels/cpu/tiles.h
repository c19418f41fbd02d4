// Attention of many query rows that see the same keys and values: these are packed tile by tile for matrix products.
//
// It computes prefills, where the rows are neighbouring tokens, and prefixes that decodes share. Online softmax after
// Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2 (Dao, arXiv 2307.08691).
#pragma once

#include "attention.h"

// ``count`` queries: members[0], members[1], ... of the batch, or first, first + 1, ... if members is NULL. They have the
// positions position, position + 1, ... and see nothing behind them; or, if it is negative, they see everything.
struct queries {
  const int64_t *members;
  long first, count, position;
};

INLINE long query_of(const struct queries *q, long i) { return q->members ? q->members[i] : q->first + i; }

// Weights of one row from its scores [count], of which it sees low .. high: returns their sum, and raises ``most``.
INLINE float weights_of(float *scores, long low, long high, long count, float softcap, float *most) {
  floats best = all(*most);
  ints lanes;
  for (int i = 0; i < VEC; i++) lanes[i] = i;
  // Vectors that the row sees only in part, or not at all, are masked.
  for (long t = 0; t < count; t += VEC) {
    floats x = capped(load(scores, t, 0), softcap);
    if (t < low || t + VEC > high) {
      ints position = lanes + (int)t;
      x = select((position >= (int)low) & (position < (int)high), x, all(-__builtin_inff()));
    }
    store(scores, t, x, 0);
    best = larger(best, x);
  }
  *most = max_of(best);
  float base = *most == -__builtin_inff() ? 0 : *most;
  floats total = {};
  for (long t = 0; t < count; t += VEC) {
    floats weight = exp2_of(load(scores, t, 0) - base);
    store(scores, t, weight, 0);
    total += weight;
  }
  return sum_of(total);
}

// Leaves in s->sums [rows, PANELS(dim)] the weighted sums over context tokens low .. high, with s->highs and s->totals: a
// row for each query and each head of the KV head. At most ROWS rows.
INLINE void attend_tiles(const struct attention *a, struct scratch *s, const struct queries *queries,
                         const int32_t *table, long kv_head, long low, long high, int bf16) {
  long group = a->heads / a->kv_heads, rows = queries->count * group, dim = a->dim, width = PANELS(dim);
  floats factor = all(score_scale(a));
  for (long r = 0; r < rows; r++) {
    const void *q = at(a->q, query_of(queries, r / group) * a->q_token + (kv_head * group + r % group) * a->q_head, bf16);
    for (long d = 0; d < dim; d += VEC)
      store(s->q + r * width, d, load_some(q, d, smaller(VEC, dim - d), bf16) * factor, 0);
    s->highs[r] = -__builtin_inff();
    s->totals[r] = 0;
  }
  memset(s->sums, 0, rows * width * sizeof(float));
  for (long tile = low; tile < high; tile += TILE) {
    long count = smaller(TILE, high - tile), columns = (count + VEC - 1) / VEC * VEC;
    find_tokens(a, table, kv_head, tile, tile + count, s->key_at, s->value_at, bf16);
    pack_keys(s->key_at, count, dim, s->keys, dim, bf16);
    product(rows, columns, dim, s->q, width, s->keys, dim, s->scores, TILE, 0);
    for (long r = 0; r < rows; r++) {
      long end = queries->position < 0 ? high : queries->position + r / group + 1;
      long begin = a->window && queries->position >= 0 ? greater(low, end - a->window) : low;
      float before = s->highs[r], most = before;
      float total = weights_of(s->scores + r * TILE, begin - tile, end - tile, columns, a->softcap, &most);
      if (most != before) {
        float shrink = before == -__builtin_inff() ? 0 : exp2_one(before - most);
        s->totals[r] *= shrink;
        for (long d = 0; d < dim; d += VEC) store(s->sums + r * width, d, load(s->sums + r * width, d, 0) * shrink, 0);
      }
      s->highs[r] = most;
      s->totals[r] += total;
    }
    pack_values(s->value_at, count, dim, s->values, TILE, bf16);
    product(rows, (dim + VEC - 1) / VEC * VEC, count, s->scores, TILE, s->values, TILE, s->sums, width, 1);
  }
}
