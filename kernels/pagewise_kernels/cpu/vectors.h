// Vectors of VEC floats by the compiler's vector extensions, float32 and bfloat16 in memory, and threads.
//
// VEC is given by the build: as many floats as a register of the target has. All arithmetic is in float32. ``bf16`` is a
// constant wherever it is passed, so that each kernel is compiled once for each type.
#pragma once

#include <stdint.h>
#include <string.h>

#include "visible.h"

#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(VEC * 4)));
typedef int32_t ints __attribute__((vector_size(VEC * 4)));
typedef uint32_t words __attribute__((vector_size(VEC * 4)));
typedef uint16_t halves __attribute__((vector_size(VEC * 2)));

// Not a sum with zeros, which the compiler would have to add: zero plus minus zero is zero.
INLINE floats all(float x) {
  floats y;
  for (int i = 0; i < VEC; i++) y[i] = x;
  return y;
}

INLINE floats select(ints where, floats yes, floats no) {
  return (floats)((where & (ints)yes) | (~where & (ints)no));
}

INLINE floats larger(floats a, floats b) { return select(a > b, a, b); }

INLINE floats widen(halves x) { return (floats)(__builtin_convertvector(x, words) << 16); }

// Round to the nearest bfloat16, ties to even. What is no number stays none.
INLINE halves narrow(floats x) {
  words bits = (words)x;
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words is_nan = (words)(x != x);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), halves);
}

// The n values at index i of an array of float32 or bfloat16; beyond them zeros.
INLINE floats load_some(const void *p, long i, long n, int bf16) {
  if (bf16) {
    halves x = {};
    memcpy(&x, (const uint16_t *)p + i, n * 2);
    return widen(x);
  }
  floats x = {};
  memcpy(&x, (const float *)p + i, n * 4);
  return x;
}

INLINE void store_some(void *p, long i, floats x, long n, int bf16) {
  if (bf16) {
    halves y = narrow(x);
    memcpy((uint16_t *)p + i, &y, n * 2);
  } else {
    memcpy((float *)p + i, &x, n * 4);
  }
}

INLINE floats load(const void *p, long i, int bf16) { return load_some(p, i, VEC, bf16); }
INLINE void store(void *p, long i, floats x, int bf16) { store_some(p, i, x, VEC, bf16); }

INLINE const void *at(const void *p, long i, int bf16) { return (const char *)p + i * (bf16 ? 2 : 4); }

// What the type in memory makes of x.
INLINE floats rounded(floats x, int bf16) { return bf16 ? widen(narrow(x)) : x; }

INLINE float sum_of(floats x) {
  float total = 0;
  for (int i = 0; i < VEC; i++) total += x[i];
  return total;
}

INLINE float max_of(floats x) {
  float most = x[0];
  for (int i = 1; i < VEC; i++) most = x[i] > most ? x[i] : most;
  return most;
}

INLINE floats low_halves(floats a, floats b) {  // a0 b0 a1 b1 ...
#if VEC == 16
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif VEC == 8
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

INLINE floats high_halves(floats a, floats b) {
#if VEC == 16
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif VEC == 8
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Return the sums of VEC vectors in one: transposing and adding, with half the vectors left after each step.
INLINE floats sums_of(floats *x) {
  for (int count = VEC; count > 1; count /= 2)
    for (int i = 0; i < count / 2; i++)
      x[i] = low_halves(x[i], x[i + count / 2]) + high_halves(x[i], x[i + count / 2]);
  return x[0];
}

// 2^x for x up to 127, 0 up to -127, and no number for what is none. The polynomial is that of Cephes' exp2f: its error is 2
// units in the last place.
INLINE floats exp2_of(floats x) {
  floats bounded = larger(all(-127.0f), x);  // in this order, what is no number stays none
  // Adding 1.5 * 2^23 rounds to a whole number, which the lowest bits are then; with 127, it is the exponent of 2^whole.
  const float shift = 12582912.0f + 127.0f;
  floats shifted = bounded + shift;
  floats f = bounded - (shifted - shift);
  floats p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  return p * (floats)((words)shifted << 23);
}

INLINE float exp2_one(float x) { return exp2_of(all(x))[0]; }

#define LOG2E 1.4426950408889634f

// x · sigmoid(alpha · x).
INLINE floats swish_of(floats x, float alpha) {
  floats power = x * (alpha * -LOG2E);
  floats grown = exp2_of(select(power > 126.0f, all(126.0f), power));
  return select(power > 126.0f, all(0), x / (1.0f + grown));
}

// silu(gate) · up, where silu is rounded as transformers does.
INLINE floats silu_mul_of(floats gate, floats up, int bf16) { return rounded(swish_of(gate, 1.0f), bf16) * up; }

// Run body(data) on so many threads of the team (team.c).
void run_team(long threads, void (*body)(void *), void *data);

// The next piece of work, for whichever thread asks.
INLINE long next_item(long *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// Neighbouring pieces of work, item up to end, of which a thread does one after the other.
struct run {
  long item, end;
};

// Whether a thread has a piece of work: the next one of its run, or else of a new run, which has the share of one of
// ``threads`` in what is left of ``count`` pieces. So a thread reads most of its weights in order, as the processor
// expects when it fetches ahead, and the last runs are short. ``threads``, at least 1, may be larger than their number where
// pieces take unequal times: then runs are shorter.
INLINE int has_item(struct run *run, long *next, long count, long threads) {
  if (run->item < run->end) return 1;
  long taken;
  run->item = __atomic_load_n(next, __ATOMIC_RELAXED);
  do {
    if (run->item >= count) return 0;
    taken = (count - run->item + threads - 1) / threads;
  } while (!__atomic_compare_exchange_n(next, &run->item, run->item + taken, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  run->end = run->item + taken;
  return 1;
}
