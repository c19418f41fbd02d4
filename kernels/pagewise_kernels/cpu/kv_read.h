// Keys and values of the pool, read as floats whatever type they have there.
#pragma once

#include "kv_int4.h"

// Bytes of a key or value of ``dim`` numbers.
INLINE long bytes_of(long dim, int kv) { return kv == INT4 ? dim / GROUP * RECORD : dim * size_of(kv); }

// The VEC numbers at index i of the key or value at p + offset; in eight bits without its scale.
INLINE floats load_kv(const void *p, long offset, long i, int kv) {
  if (kv == INT4) return load_int4((const uint8_t *)p + offset, i);
  if (kv != INT8) return load(p, offset + i, kv);
  bytes x;
  memcpy(&x, (const int8_t *)p + offset + i, VEC);
  return __builtin_convertvector(x, floats);
}

// Make floats of the keys or values in eight or four bits at s->key_at or s->value_at, ``tokens``; returns where they are.
// ``scales``: of keys or values in eight bits.
INLINE const void **widen_tokens(struct scratch *s, const void **tokens, const float *scales, long count, long dim, int kv) {
  long width = (dim + VEC - 1) / VEC * VEC;
  for (long t = 0; t < count; t++) {
    float *to = s->wide + t * width, scale = kv == INT8 ? scales[s->scale_at[t]] : 1;
    s->wide_at[t] = to;
    long d = 0;
    for (; d + VEC <= dim; d += VEC) store(to, d, load_kv(tokens[t], 0, d, kv) * scale, 0);
    if (d < dim) {
      bytes x = {};
      memcpy(&x, (const int8_t *)tokens[t] + d, dim - d);
      store(to, d, __builtin_convertvector(x, floats) * scale, 0);
    }
  }
  return s->wide_at;
}
