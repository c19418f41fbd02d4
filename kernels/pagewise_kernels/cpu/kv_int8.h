// Keys and values in eight bits: whole numbers up to 127, times a scale for each token and head.
//
// They become floats where they are read, so that queries and weights are not rounded. Where a token is read for one query,
// its scales multiply scores and weights instead of its key and value.
#pragma once

#include "attention.h"

typedef int8_t bytes __attribute__((vector_size(VEC)));

// Write x [dim] and its scale. What is no number, or is infinite, makes the scale so, and with it all that is read.
INLINE void store_int8(const float *x, long dim, int8_t *to, float *scale) {
  ints sizes = {};
  for (long d = 0; d < dim; d += VEC) {
    ints size = (ints)load_some(x, d, smaller(VEC, dim - d), 0) & 0x7fffffff;
    ints where = size > sizes;  // of positive floats, the greater one has the greater bits
    sizes = (where & size) | (~where & sizes);
  }
  int32_t most = 0;
  for (int i = 0; i < VEC; i++) most = sizes[i] > most ? sizes[i] : most;
  float top;
  memcpy(&top, &most, sizeof(top));
  *scale = top / 127;
  float inverse = top == 0 ? 0 : 127 / top;
  // Adding 1.5 * 2^23 rounds to the nearest whole number, which the lowest bits are then.
  for (long d = 0; d < dim; d += VEC) {
    floats scaled = load_some(x, d, smaller(VEC, dim - d), 0) * inverse;
    words shifted = (words)(scaled + 12582912.0f);
    bytes result = __builtin_convertvector((ints)shifted, bytes);
    memcpy(to + d, &result, smaller(VEC, dim - d));
  }
}
