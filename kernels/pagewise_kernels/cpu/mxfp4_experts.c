// Mixtures of experts in float32 with weights in MXFP4, as gpt-oss has them: with biases, and a gate with limits.
//
// A weight is a code of four bits (e2m1) times a power of two that 32 inputs of an output share. Codes lie in memory and
// become numbers in registers; the products are those of the dequantised weights, in the order of experts.c.
#define AHEAD 0
#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CODES = 8, BLOCK = 32, UNPACKED = 64 };

// Weights [panels][in / CODES][PANEL], CODES inputs of an output in a word, the first in its lowest bits; scales
// [panels][in / BLOCK][PANEL]: exponents plus 127; bias [outs].
struct packed {
  const uint32_t *codes;
  const uint8_t *scales;
  const float *bias;
};

struct mxfp4 {
  // Of gate_up, each expert has first the panels of gate and then those of up.
  struct packed gate_up, down;
  // active [num_active]: the experts that have rows. starts [num_active + 1]: the first row of each.
  const int64_t *active, *starts;
  // x, out [rows, hidden]; activated [rows, inner].
  const float *x;
  float *activated, *out;
  float limit, alpha;
  long num_active, hidden, inner, threads, next;
};

// The numbers that the lowest four bits of each word stand for.
INLINE floats numbers_of(words codes) {
#if VEC == 16
  const floats numbers = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  return (floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)numbers);
#else
#if VEC == 8
  const floats numbers = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  floats size = (floats)_mm256_permutevar8x32_ps((__m256)numbers, (__m256i)codes);
#else
  // From 1 on, the bits are an exponent and a half; below, they count halves.
  ints low = (ints)(codes & 7);
  floats size = select(low < 2, __builtin_convertvector(low, floats) * 0.5f, (floats)((low << 22) + (126 << 23)));
#endif
  return (floats)((words)size | (codes << 28 & 0x80000000u));
#endif
}

// 2^(scale - 127); the lowest one becomes 0.
INLINE floats powers_of(const uint8_t *scales) {
  uint8_t bytes __attribute__((vector_size(VEC)));
  memcpy(&bytes, scales, VEC);
  return (floats)(__builtin_convertvector(bytes, words) << 23);
}

INLINE words load_words(const uint32_t *p) {
  words x;
  memcpy(&x, p, sizeof(x));
  return x;
}

// sums [rows, PANEL] = x [mr, in] times a panel, whose weights stay in registers.
INLINE void few_rows(int mr, long in, const float *x, long x_stride, const uint32_t *codes, const uint8_t *scales,
                     float *sums) {
  floats held[MR][NR];
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) held[m][n] = all(0);
  for (long k = 0; k < in; k += BLOCK, scales += PANEL) {
    floats powers[NR];
    for (int n = 0; n < NR; n++) powers[n] = powers_of(scales + n * VEC);
    for (int g = 0; g < BLOCK / CODES; g++, codes += PANEL)
      for (int n = 0; n < NR; n++) {
        words left = load_words(codes + n * VEC);
        for (int i = 0; i < CODES; i++) {
          floats weights = numbers_of(left >> 4 * i) * powers[n];
          for (int m = 0; m < mr; m++) held[m][n] += weights * x[m * x_stride + k + g * CODES + i];
        }
      }
  }
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) store(sums + m * PANEL, n * VEC, held[m][n], 0);
}

// panel [depth, PANEL] = its weights in float32.
INLINE void unpack(long depth, const uint32_t *codes, const uint8_t *scales, float *panel) {
  for (long k = 0; k < depth; k += CODES, codes += PANEL)
    for (int n = 0; n < NR; n++) {
      floats powers = powers_of(scales + k / BLOCK * PANEL + n * VEC);
      words left = load_words(codes + n * VEC);
      for (int i = 0; i < CODES; i++) store(panel + (k + i) * PANEL, n * VEC, numbers_of(left >> 4 * i) * powers, 0);
    }
}

// sums [rows, PANEL] = x [rows, in] times a panel: at most ROW_BLOCK rows.
INLINE void packed_rows(long rows, long in, const float *x, long x_stride, const struct packed *weights, long panel,
                        float *sums) {
  const uint32_t *codes = weights->codes + panel * (in / CODES) * PANEL;
  const uint8_t *scales = weights->scales + panel * (in / BLOCK) * PANEL;
#ifndef NOFEW
  switch (rows) {
    case 1: few_rows(1, in, x, x_stride, codes, scales, sums); return;
    case 2: few_rows(2, in, x, x_stride, codes, scales, sums); return;
    case 3: few_rows(3, in, x, x_stride, codes, scales, sums); return;
    case 4: few_rows(4, in, x, x_stride, codes, scales, sums); return;
  }
#endif
  for (long k = 0; k < in; k += UNPACKED) {
    float unpacked[UNPACKED * PANEL];
    long depth = in - k < UNPACKED ? in - k : UNPACKED;
    unpack(depth, codes + k / CODES * PANEL, scales + k / BLOCK * PANEL, unpacked);
    product(rows, PANEL, depth, x + k, x_stride, unpacked, depth, sums, PANEL, k > 0);
  }
}

INLINE floats at_most(floats x, float limit) { return select(x > limit, all(limit), x); }

// gate · sigmoid(alpha · gate) · (up + 1), where gate is at most ``limit`` and up between it and its negative.
INLINE floats gated(const struct mxfp4 *a, floats gate, floats up) {
  gate = at_most(gate, a->limit);
  up = -at_most(-at_most(up, a->limit), a->limit);
  return gate / (1.0f + exp2_of(at_most(gate * (-a->alpha * LOG2E), 126.0f))) * (up + 1.0f);
}

static long panels(long columns) { return (columns + PANEL - 1) / PANEL; }

// An item is an expert and PANEL numbers of gate and of up.
static void activate(void *data) {
  struct mxfp4 *a = data;
  long count = panels(a->inner);
  for (struct run run = {0, 0}; has_item(&run, &a->next, a->num_active * count, 2 * a->threads); run.item++) {
    long at = run.item / count, panel = run.item % count, first = panel * PANEL, last = a->starts[at + 1];
    long expert = a->active[at], columns = a->inner - first < PANEL ? a->inner - first : PANEL;
    const float *bias = a->gate_up.bias + expert * 2 * a->inner + first;
    for (long row = a->starts[at]; row < last; row += ROW_BLOCK) {
      float gates[ROW_BLOCK * PANEL], ups[ROW_BLOCK * PANEL];
      long rows = last - row < ROW_BLOCK ? last - row : ROW_BLOCK;
      const float *x = a->x + row * a->hidden;
      packed_rows(rows, a->hidden, x, a->hidden, &a->gate_up, expert * 2 * count + panel, gates);
      packed_rows(rows, a->hidden, x, a->hidden, &a->gate_up, (expert * 2 + 1) * count + panel, ups);
      for (long r = 0; r < rows; r++)
        for (long i = 0; i < columns; i += VEC) {
          long n = columns - i < VEC ? columns - i : VEC;
          floats gate = load(gates, r * PANEL + i, 0) + load_some(bias, i, n, 0);
          floats up = load(ups, r * PANEL + i, 0) + load_some(bias, a->inner + i, n, 0);
          store_some(a->activated + (row + r) * a->inner, first + i, gated(a, gate, up), n, 0);
        }
    }
  }
}

// An item is an expert and PANEL numbers of its output.
static void project(void *data) {
  struct mxfp4 *a = data;
  long count = panels(a->hidden);
  for (struct run run = {0, 0}; has_item(&run, &a->next, a->num_active * count, 2 * a->threads); run.item++) {
    long at = run.item / count, panel = run.item % count, first = panel * PANEL, last = a->starts[at + 1];
    long expert = a->active[at], columns = a->hidden - first < PANEL ? a->hidden - first : PANEL;
    const float *bias = a->down.bias + expert * a->hidden + first;
    for (long row = a->starts[at]; row < last; row += ROW_BLOCK) {
      float sums[ROW_BLOCK * PANEL];
      long rows = last - row < ROW_BLOCK ? last - row : ROW_BLOCK;
      packed_rows(rows, a->inner, a->activated + row * a->inner, a->inner, &a->down, expert * count + panel, sums);
      for (long r = 0; r < rows; r++)
        for (long i = 0; i < columns; i += VEC) {
          long n = columns - i < VEC ? columns - i : VEC;
          floats y = load(sums, r * PANEL + i, 0) + load_some(bias, i, n, 0);
          store_some(a->out + (row + r) * a->hidden, first + i, y, n, 0);
        }
    }
  }
}

// Below so many products of a phase, waking a thread costs more than it saves.
enum { ALONE_MXFP4 = 1 << 19 };

// x, out [rows, hidden]; activated [rows, inner]: scratch. hidden and inner are multiples of BLOCK.
EXPORT void pagewise_mxfp4_experts(const float *x, const int64_t *active, const int64_t *starts,
                                   const uint32_t *gate_up, const uint8_t *gate_up_scales, const float *gate_up_bias,
                                   const uint32_t *down, const uint8_t *down_scales, const float *down_bias,
                                   float limit, float alpha, float *activated, float *out, long num_active, long hidden,
                                   long inner, long threads) {
  struct mxfp4 a = {{gate_up, gate_up_scales, gate_up_bias}, {down, down_scales, down_bias}, active, starts, x,
                    activated, out, limit, alpha, num_active, hidden, inner, threads, 0};
  long products = starts[num_active] * hidden * inner;
  run_team(2 * products < ALONE_MXFP4 ? 1 : threads, activate, &a);
  a.next = 0;
  run_team(products < ALONE_MXFP4 ? 1 : threads, project, &a);
}
