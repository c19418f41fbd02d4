// Keys and values in four bits: 16 levels for each GROUP numbers of a token and head, from a zero on by a step.
//
// A record has the codes of GROUP numbers, the first half of them in the low bits of its bytes and the second half in the
// high ones, and behind them step and zero in bfloat16. So the scales of a token lie in the cache line of its codes.
#pragma once

#include "kv_int8.h"

enum { GROUP = 32, RECORD = GROUP / 2 + 4 };

typedef uint8_t codes __attribute__((vector_size(VEC)));

INLINE float widen_one(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}

INLINE uint16_t narrow_one(float x) { return narrow(all(x))[0]; }

// Write x [dim]. All numbers of a group with a NaN or an infinite number are read as NaN.
INLINE void store_int4(const float *x, long dim, uint8_t *to) {
  for (long start = 0; start < dim; start += GROUP, x += GROUP, to += RECORD) {
    floats least = load(x, 0, 0), most = least, doubt = least - least;
    for (long d = VEC; d < GROUP; d += VEC) {
      floats y = load(x, d, 0);
      least = select(y < least, y, least);
      most = larger(most, y);
      doubt += y - y;
    }
    float doubts = sum_of(doubt);
    uint16_t zero_bits = narrow_one(-max_of(-least));
    float zero = widen_one(zero_bits);
    uint16_t step_bits = doubts == doubts ? narrow_one((max_of(most) - zero) / 15) : 0x7fc0;
    float step = widen_one(step_bits);
    // The zero may have been rounded up, above a group of equal numbers.
    if (step < 1e-37f) step_bits = 0;
    float inverse = step_bits ? 1 / step : 0;
    for (long d = 0; d < GROUP / 2; d += VEC) {
      ints code[2];
      for (int half = 0; half < 2; half++) {
        floats scaled = (load(x, half * GROUP / 2 + d, 0) - zero) * inverse;
        scaled = select(scaled > 15.0f, all(15.0f), larger(all(0), scaled));
        // Adding 1.5 * 2^23 rounds to the nearest whole number, which the lowest bits are then.
        code[half] = (ints)(words)(scaled + 12582912.0f) & 15;
      }
      codes result = __builtin_convertvector(code[0] | code[1] << 4, codes);
      memcpy(to + d, &result, VEC);
    }
    memcpy(to + GROUP / 2, &step_bits, 2);
    memcpy(to + GROUP / 2 + 2, &zero_bits, 2);
  }
}

// The VEC numbers at index i of the records at p.
INLINE floats load_int4(const uint8_t *p, long i) {
  const uint8_t *record = p + i / GROUP * RECORD;
  long within = i % GROUP;
  codes packed;
  memcpy(&packed, record + within % (GROUP / 2), VEC);
  ints both = __builtin_convertvector(packed, ints);
  uint16_t bits[2];
  memcpy(bits, record + GROUP / 2, sizeof(bits));
  ints code = within < GROUP / 2 ? both & 15 : both >> 4;
  return __builtin_convertvector(code, floats) * widen_one(bits[0]) + widen_one(bits[1]);
}
