// Inputs in eight bits, with a scale for each group of a row, their products with unsigned codes of weights, and scales in
// float16.
#pragma once

#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

INLINE words load_words(const uint32_t *p) {
  words x;
  memcpy(&x, p, sizeof(x));
  return x;
}

INLINE floats from_float16(const uint16_t *p) {
#if defined(__F16C__) || defined(__aarch64__)
  _Float16 x __attribute__((vector_size(VEC * 2)));
  memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, floats);
#else
  halves x;
  memcpy(&x, p, sizeof(x));
  words bits = __builtin_convertvector(x, words);
  // The exponent of float32 is biased by 112 more.
  floats size = (floats)((bits & 0x7fff) << 13) * 5.192296858534828e33f;
  return (floats)((words)size | (bits & 0x8000) << 16);
#endif
}

// Quantise a group of inputs to eight bits: ``scale`` is the value of one, ``sum`` the sum of the bytes.
//
// A NaN or an infinite input makes the scale NaN or infinite, and with it the whole result of the row.
INLINE void quantise_inputs(const float *x, long group, int8_t *to, float *scale, int32_t *sum) {
  ints sizes = {}, sums = {};
  for (long k = 0; k < group; k += VEC) {
    ints size = (ints)load(x, k, 0) & 0x7fffffff;  // of positive floats, the greater one has the greater bits
    ints where = size > sizes;
    sizes = (where & size) | (~where & sizes);
  }
  int32_t most = 0;
  for (int i = 0; i < VEC; i++) most = sizes[i] > most ? sizes[i] : most;
  float top;
  memcpy(&top, &most, sizeof(top));
  *scale = top == 0 ? 1 : top / 127;
  float inverse = 1 / *scale;
  const float shift = 12582912.0f;  // adding it rounds to the nearest whole number, which the lowest bits are then
  for (long k = 0; k < group; k += VEC) {
    floats scaled = load(x, k, 0) * inverse;  // a statement of its own: fused with the sum, it would round differently
    ints whole = (ints)(scaled + shift) - 0x4b400000;
    int8_t bytes __attribute__((vector_size(VEC))) = __builtin_convertvector(whole & 0xff, __typeof__(bytes));
    memcpy(to + k, &bytes, sizeof(bytes));
    sums += __builtin_convertvector(bytes, ints);  // of NaN, arbitrary bytes, whose sum fits
  }
  *sum = 0;
  for (int i = 0; i < VEC; i++) *sum += sums[i];
}

// Sums in 16 bits, or with VNNI in 32, of pairs or groups of four neighbouring inputs of each output.
#if defined(__AVX512VNNI__)
typedef ints partial;
#elif defined(__aarch64__)
typedef struct {
  int16x8_t low, high;
} partial;
#else
typedef int16_t partial __attribute__((vector_size(VEC * 4)));
#endif

// Add to the sums of VEC outputs the products of their codes, four in a word, with four inputs of a row.
INLINE partial add_codes(partial sums, words codes, const int8_t *inputs) {
  int32_t four;
  memcpy(&four, inputs, 4);
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif VEC == 16
  return sums + (partial)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(four));
#elif VEC == 8
  return sums + (partial)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(four));
#elif defined(__x86_64__)
  return sums + (partial)_mm_maddubs_epi16((__m128i)codes, _mm_set1_epi32(four));
#else
  int8x16_t left = (int8x16_t)codes, right = vreinterpretq_s8_s32(vdupq_n_s32(four));
  sums.low = vmlal_s8(sums.low, vget_low_s8(left), vget_low_s8(right));
  sums.high = vmlal_high_s8(sums.high, left, right);
  return sums;
#endif
}

INLINE ints sum_partial(partial sums) {
#if defined(__AVX512VNNI__)
  return sums;
#elif VEC == 16
  return (ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif VEC == 8
  return (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#elif defined(__x86_64__)
  return (ints)_mm_madd_epi16((__m128i)sums, _mm_set1_epi16(1));
#else
  return (ints)vpaddq_s32(vpaddlq_s16(sums.low), vpaddlq_s16(sums.high));
#endif
}
