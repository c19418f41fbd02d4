// Attention of many query rows that see the same keys and values: these are packed tile by tile for matrix products.
//
// It computes prefills, where the rows are neighbouring tokens, and prefixes that decodes share. Online softmax after
// Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2 (Dao, arXiv 2307.08691).
#pragma once

#include "kv_read.h"

// ``count`` queries: members[0], members[1], ... of the batch, or first, first + 1, ... if members is NULL. They have the
// positions position, position + 1, ... and see nothing behind them; or, if it is negative, they see everything.
struct queries {
  const int64_t *members;
  long first, count, position;
};

INLINE long query_of(const struct queries *q, long i) { return q->members ? q->members[i] : q->first + i; }

// The scores of one row that it does not see, and so do not count: all but low .. high of the first ``count``.
INLINE void hide(float *scores, long low, long high, long count) {
  ints lanes;
  for (int i = 0; i < VEC; i++) lanes[i] = i;
  for (long t = 0; t < count; t += VEC)
    if (t < low || t + VEC > high) {
      ints position = lanes + (int)t;
      floats x = load(scores, t, 0);
      store(scores, t, select((position >= (int)low) & (position < (int)high), x, all(-__builtin_inff())), 0);
    }
}

// Make weights of the scores [rows][count] of at most VEC rows, each at TILE: ``highs`` and ``totals`` [VEC] are raised,
// and ``shrink`` [VEC] is what has been summed with weights relative to the former highs must be multiplied by.
//
// Rows are reduced together, so that the steps of the reductions are those of whole vectors.
INLINE void make_weights(float *scores, long rows, long count, float *highs, float *totals, float *shrink) {
  floats found[VEC];
  for (long r = 0; r < VEC; r++) {
    floats best = all(-__builtin_inff());
    for (long t = 0; r < rows && t < count; t += VEC) best = larger(best, load(scores + r * TILE, t, 0));
    found[r] = best;
  }
  floats before = load(highs, 0, 0), most = larger(before, maxima_of(found));
  // A row that sees nothing yet has weights of zero.
  floats base = select(most == -__builtin_inff(), all(0), most), less = exp2_of(before - base);
  for (long r = 0; r < VEC; r++) {
    floats total = {};
    for (long t = 0; r < rows && t < count; t += VEC) {
      floats weight = exp2_of(load(scores + r * TILE, t, 0) - all(base[r]));
      store(scores + r * TILE, t, weight, 0);
      total += weight;
    }
    found[r] = total;
  }
  store(totals, 0, load(totals, 0, 0) * less + sums_of(found), 0);
  store(highs, 0, most, 0);
  store(shrink, 0, less, 0);
}

// Scores of rows first .. first + rows for the packed keys of positions tile .. tile + count, and their part of the sums.
INLINE void attend_band(const struct attention *a, struct scratch *s, const struct queries *queries, long first, long rows,
                        long tile, long count) {
  long group = a->heads / a->kv_heads, dim = a->dim, value_dim = a->value_dim, width = PANELS(value_dim);
  long causal = queries->position >= 0;
  if (causal) {
    // What none of the rows sees is left out.
    long begin = first_seen(a, queries->position + first / group);
    long end = queries->position + (first + rows - 1) / group + 1;
    count = begin < tile + count ? smaller(count, end - tile) : 0;
    if (count <= 0) return;
  }
  long columns = (count + VEC - 1) / VEC * VEC;
  product(rows, columns, dim, s->q + first * PANELS(dim), PANELS(dim), s->keys, dim, s->scores, TILE, 0);
  if (a->softcap > 0)
    for (long r = 0; r < rows; r++)
      for (long t = 0; t < columns; t += VEC)
        store(s->scores + r * TILE, t, capped(load(s->scores + r * TILE, t, 0), a->softcap), 0);
  for (long r = 0; r < rows; r++) {
    long end = causal ? queries->position + (first + r) / group + 1 : tile + count;
    long begin = causal ? first_seen(a, end - 1) : 0;
    if (begin > tile || end < tile + columns) hide(s->scores + r * TILE, begin - tile, end - tile, columns);
  }
  for (long r = 0; r < rows; r += VEC) {
    float shrink[VEC];
    long n = smaller(VEC, rows - r);
    make_weights(s->scores + r * TILE, n, columns, s->highs + first + r, s->totals + first + r, shrink);
    for (long i = 0; i < n; i++) {
      float *sums = s->sums + (first + r + i) * width;
      if (shrink[i] != 1)
        for (long d = 0; d < value_dim; d += VEC) store(sums, d, load(sums, d, 0) * shrink[i], 0);
    }
  }
  long wide = (value_dim + VEC - 1) / VEC * VEC;
  product(rows, wide, count, s->scores, TILE, s->values, TILE, s->sums + first * width, width, 1);
}

// Leaves in s->sums [rows, PANELS(value_dim)] the weighted sums over context tokens low .. high, with s->highs and
// s->totals: a row for each query and each head of the KV head. At most ROWS rows.
INLINE void attend_tiles(const struct attention *a, struct scratch *s, const struct queries *queries,
                         const int32_t *table, long kv_head, long low, long high, int bf16, int kv) {
  long group = a->heads / a->kv_heads, rows = queries->count * group, dim = a->dim;
  floats factor = all(score_scale(a));
  for (long r = 0; r < rows; r++) {
    const void *q = at(a->q, query_of(queries, r / group) * a->q_token + (kv_head * group + r % group) * a->q_head, bf16);
    for (long d = 0; d < dim; d += VEC)
      store(s->q + r * PANELS(dim), d, load_some(q, d, smaller(VEC, dim - d), bf16) * factor, 0);
  }
  for (long r = 0; r < rows; r += VEC) {
    store(s->highs, r, all(-__builtin_inff()), 0);
    store(s->totals, r, all(0), 0);
  }
  memset(s->sums, 0, rows * PANELS(a->value_dim) * sizeof(float));
  // Of a chunk, tiles lie at multiples of TILE, so that no sum depends on which queries are computed together.
  for (long tile = queries->position < 0 ? low : low / TILE * TILE; tile < high; tile += TILE) {
    long count = smaller(TILE, high - tile), unseen = greater(0, low - tile);
    find_tokens(a, s, unseen, table, kv_head, tile + unseen, tile + count, kv);
    for (long i = 0; i < unseen; i++) {  // their blocks may belong to others by now; no row gives them any weight
      s->key_at[i] = s->key_at[unseen];
      s->value_at[i] = s->value_at[unseen];
      s->scale_at[i] = s->scale_at[unseen];
    }
    const void **keys = s->key_at, **values = s->value_at;
    if (kv >= INT8) keys = widen_tokens(s, keys, a->key_scales, count, dim, kv);
    pack_keys(keys, count, dim, s->keys, dim, type_read(kv));
    if (kv >= INT8) values = widen_tokens(s, values, a->value_scales, count, dim, kv);
    pack_values(values, count, a->value_dim, s->values, TILE, type_read(kv));
    // The scores of a band stay in the first level cache.
    for (long band = 0; band < rows; band += BAND)
      attend_band(a, s, queries, band, smaller(BAND, rows - band), tile, count);
  }
}
