// The arguments of paged attention, as pagewise_kernels/cpu/attention.py lays them out, and what its files share.
#pragma once

#include "products.h"

// A prefill chunk: queries offset .. offset + size of the batch, of a sequence's tokens from position start on.
struct chunk {
  int64_t offset, row, start, size;
};

// The decodes members[begin .. begin + count] have the same blocks in their first ``tokens`` tokens.
struct prefix {
  int64_t begin, count, tokens;
};

// Strides are in elements; that of the last dimension is 1.
struct attention {
  // q [tokens, heads, dim], k [tokens, kv_heads, dim], v [tokens, kv_heads, value_dim], out [tokens, heads, value_dim]
  // contiguous
  void *q;
  const void *k, *v;
  void *out;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  // keys [blocks, block_size, kv_heads, dim] and values [..., value_dim]. Where value_dim is not dim, they are latents: a
  // value is a part of its key, and is not written.
  void *keys, *values;
  int64_t key_block, key_slot, key_head, value_block, value_slot, value_head;
  // of keys and values in eight bits, the scales [blocks, block_size, kv_heads]; else NULL
  float *key_scales, *value_scales;
  int64_t scale_block, scale_slot, scale_head;
  // slots [tokens] of the pool; tables [rows, table_stride]; decodes come first in the batch
  const int64_t *slots;
  const int32_t *tables;
  int64_t table_stride, block_size, tokens, decodes, chunks, prefixes;
  const int64_t *rows, *lengths;  // of decodes: row of the tables, context with the new token
  const struct chunk *chunk;
  const struct prefix *prefix;
  const int64_t *members;
  int64_t heads, kv_heads, dim, value_dim;
  int64_t bf16;
  int64_t window, attention_chunk;  // 0: none; at most one of them
  float scale, softcap;  // softcap 0: none
  // rotation by cos and sin [tokens, dim] before anything else, or NULL; before it a norm of each head by
  // head_norm [heads + kv_heads, dim], or NULL
  const void *cos, *sin, *head_norm;
  float norm_eps;
  int32_t int4;  // whether keys and values are in four bits, whose strides are in bytes
  const float *sinks;  // [heads]: logits that weigh like scores of tokens without values, or NULL
  int64_t threads;
};

enum {
  MAX_DIM = 512,  // of values, and of keys but for those of latents
  MAX_KEY = 640,
  ROWS = 192,   // query rows that share packed keys and values
  BAND = 48,    // of them, so many are computed at once: a multiple of MR and of VEC
  TILE = 128,   // tokens of the context that are packed at once
  PIECE = 512,  // context tokens of one decode item; longer contexts are merged from several parts
  SCORES = 32768,
};

// What a thread works with. It lies in the thread's own memory, and so lives as long as the thread.
struct scratch {
  float q[ROWS * MAX_KEY];
  float sums[ROWS * PANELS(MAX_DIM)];
  float scores[SCORES];
  float highs[ROWS], totals[ROWS];
  float keys[MAX_KEY * PANELS(TILE)];
  float values[TILE * PANELS(MAX_DIM)];
  const void *key_at[PIECE + VEC], *value_at[PIECE + VEC];
  // of keys and values in eight bits the index of a token's scales; in eight and four bits floats of a tile
  long scale_at[PIECE + VEC];
  float wide[TILE * MAX_DIM];
  const void *wide_at[TILE];
} __attribute__((aligned(64)));

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long greater(long a, long b) { return a > b ? a : b; }

// The first token that the query at a position sees.
INLINE long first_seen(const struct attention *a, long position) {
  if (a->attention_chunk) return position / a->attention_chunk * a->attention_chunk;
  return a->window ? greater(0, position + 1 - a->window) : 0;
}

// The type of the pool, which is a constant too wherever it is passed: 0 is float32, 1 bfloat16.
enum { INT8 = 2, INT4 = 3 };

INLINE long size_of(int kv) { return kv >= INT8 ? 1 : kv ? 2 : 4; }

// The type in which kernels read packed keys and values: eight and four bits are converted to floats before.
INLINE int type_read(int kv) { return kv >= INT8 ? 0 : kv; }

// Find the keys and values of one head at positions start .. stop of a sequence, and put them at s->key_at[i] and so on.
INLINE void find_tokens(const struct attention *a, struct scratch *s, long i, const int32_t *table, long head, long start,
                        long stop, int kv) {
  while (start < stop) {
    long block = table[start / a->block_size], offset = start % a->block_size;
    long n = smaller(a->block_size - offset, stop - start);
    long key = block * a->key_block + offset * a->key_slot + head * a->key_head;
    long value = block * a->value_block + offset * a->value_slot + head * a->value_head;
    long scale = block * a->scale_block + offset * a->scale_slot + head * a->scale_head;
    for (long t = 0; t < n; t++, i++) {
      s->key_at[i] = (const char *)a->keys + (key + t * a->key_slot) * size_of(kv);
      s->value_at[i] = (const char *)a->values + (value + t * a->value_slot) * size_of(kv);
      if (kv == INT8) s->scale_at[i] = scale + t * a->scale_slot;
    }
    start += n;
  }
}

// What scores are multiplied by when they are products, so that exp2 gives the weights. With a softcap c,
// c * tanh(s / c) = c - 2 c / (exp(2 s / c) + 1), for which the product is scaled to the exponent of 2.
INLINE float score_scale(const struct attention *a) {
  return a->softcap > 0 ? a->scale * 2 * LOG2E / a->softcap : a->scale * LOG2E;
}

// The sum of the weights of a row of head ``head``, with the weight of its sink, relative to ``high``. It is counted when
// all parts of a context are together. The bound is that of exp2; relative to such a sink the context has no weight.
INLINE float with_sink(const struct attention *a, long head, float high, float total) {
  if (!a->sinks) return total;
  float above = a->sinks[head] * LOG2E - high;
  return total + exp2_one(above < 126.0f ? above : 126.0f);
}

INLINE floats capped(floats x, float softcap) {
  if (!(softcap > 0)) return x;
  floats grown = exp2_of(select(x > 126.0f, all(126.0f), x));
  return softcap * LOG2E * (1.0f - 2.0f / (grown + 1.0f));
}
