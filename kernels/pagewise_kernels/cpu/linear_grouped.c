// Linear layers with weights in four or eight bits and scales in two steps, as GGUF files have them: a weight is
// (code - zero) * scale * step - least * least_step. Some neighbouring inputs of an output, a group, share the steps, and
// some neighbouring groups, a span, share scale and least.
//
// Inputs are either quantised to eight bits with a scale for each group of a row, or stay in float32, while the weights
// are made float32 panel by panel. In both, the result for a row does not depend on the other rows.
#include "input_groups.h"

// A word has the codes of an output for neighbouring inputs: eight in four bits, of which byte i has that of input i in its
// lower half and that of input i + 4 in its upper, or four in eight bits.
enum { INPUTS = 4 };

// A block of so many rows times NR vectors of outputs is summed in registers.
enum { BLOCK_ROWS = 4 };

// x [rows, groups * group], each row at x_stride. codes [panels][inputs * bits / 32][PANEL]. scales and leasts: float16
// [panels][spans][PANEL]; steps and least_steps [panels][groups][PANEL]. leasts may be NULL: they are zero. The steps may
// be NULL: they are one. bias [outs] or NULL; out [rows, outs]. inputs [rows, groups * group], written first unless exact:
// in eight bits, with input_scales and input_sums, minus the sums, [rows, groups].
struct linear_grouped {
  const float *x;
  const uint32_t *codes;
  const uint16_t *scales, *leasts;
  const int8_t *steps, *least_steps;
  const float *bias;
  float *out;
  int8_t *inputs;
  float *input_scales;
  int32_t *input_sums;
  long bits, zero, exact, rows, groups, group, span, outs, x_stride, next;
};

INLINE floats from_bytes(const int8_t *p) {
  int8_t bytes __attribute__((vector_size(VEC)));
  memcpy(&bytes, p, VEC);
  return __builtin_convertvector(bytes, floats);
}

// The scales of VEC outputs in a group, or the leasts.
INLINE floats scales_of(const uint16_t *scales, const int8_t *steps, long of_span, long of_group) {
  floats found = from_float16(scales + of_span);
  return steps ? found * from_bytes(steps + of_group) : found;
}

// Add to the sums of VEC outputs the products of their codes in eight bits with four inputs of a row.
INLINE ints add_bytes(ints sums, words codes, const int8_t *x) {
#if defined(__AVX512VNNI__)
  int32_t four;
  memcpy(&four, x, 4);
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__x86_64__)
  // Pairs of 16 bits: a sum of two products of codes up to 255 does not fit into these.
  words even = codes & 0x00ff00ff, odd = codes >> 8 & 0x00ff00ff;
  int32_t of_even = (uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16;
  int32_t of_odd = (uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16;
#if VEC == 16
  sums += (ints)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(of_even));
  return sums + (ints)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(of_odd));
#elif VEC == 8
  sums += (ints)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(of_even));
  return sums + (ints)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(of_odd));
#else
  sums += (ints)_mm_madd_epi16((__m128i)even, _mm_set1_epi32(of_even));
  return sums + (ints)_mm_madd_epi16((__m128i)odd, _mm_set1_epi32(of_odd));
#endif
#else
  for (int i = 0; i < INPUTS; i++) sums += (ints)(codes >> 8 * i & 255) * x[i];
  return sums;
#endif
}

// sums [mr][NR] += the codes of a panel's group times the bytes [mr] of rows.
INLINE void add_group(int mr, int bits, long group, const uint32_t *codes, const int8_t *bytes, long stride,
                      ints sums[][NR]) {
  if (bits == 8) {
    for (long k = 0; k < group; k += INPUTS, codes += PANEL)
      for (int n = 0; n < NR; n++) {
        words four = load_words(codes + n * VEC);
        for (int m = 0; m < mr; m++) sums[m][n] = add_bytes(sums[m][n], four, bytes + m * stride + k);
      }
    return;
  }
  partial held[BLOCK_ROWS][NR];
  memset(held, 0, sizeof(held));
  for (long k = 0; k < group; k += 2 * INPUTS, codes += PANEL)
    for (int n = 0; n < NR; n++) {
      words both = load_words(codes + n * VEC), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
      for (int m = 0; m < mr; m++) {
        held[m][n] = add_codes(held[m][n], low, bytes + m * stride + k);
        held[m][n] = add_codes(held[m][n], high, bytes + m * stride + k + INPUTS);
      }
    }
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) sums[m][n] += sum_partial(held[m][n]);
}

INLINE void compute_rows(const struct linear_grouped *a, int mr, int bits, long row, long panel) {
  long ins = a->groups * a->group, spans = a->groups / a->span;
  const uint32_t *codes = a->codes + panel * ins * bits / 32 * PANEL;
  floats totals[BLOCK_ROWS][NR];
  memset(totals, 0, sizeof(totals));
  for (long g = 0; g < a->groups; g++, codes += a->group * bits / 32 * PANEL) {
    long of_group = (panel * a->groups + g) * PANEL, of_span = (panel * spans + g / a->span) * PANEL;
    ints sums[BLOCK_ROWS][NR];
    for (int m = 0; m < mr; m++)
      for (int n = 0; n < NR; n++)
        sums[m][n] = (ints){} + (int32_t)a->zero * a->input_sums[(row + m) * a->groups + g];
    add_group(mr, bits, a->group, codes, a->inputs + row * ins + g * a->group, ins, sums);
    for (int n = 0; n < NR; n++) {
      floats scales = scales_of(a->scales, a->steps, of_span + n * VEC, of_group + n * VEC);
      floats leasts = all(0);
      if (a->leasts) leasts = scales_of(a->leasts, a->least_steps, of_span + n * VEC, of_group + n * VEC);
      for (int m = 0; m < mr; m++) {
        long at = (row + m) * a->groups + g;
        totals[m][n] += __builtin_convertvector(sums[m][n], floats) * (scales * a->input_scales[at]);
        if (a->leasts) totals[m][n] += leasts * (a->input_scales[at] * a->input_sums[at]);
      }
    }
  }
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) {
      long out = panel * PANEL + n * VEC, count = a->outs - out < VEC ? a->outs - out : VEC;
      if (count <= 0) break;
      if (a->bias) totals[m][n] += load_some(a->bias, out, count, 0);
      store_some(a->out, (row + m) * a->outs + out, totals[m][n], count, 0);
    }
}

// An item is ROW_BLOCK rows times one panel.
INLINE void compute_items(struct linear_grouped *a, int bits) {
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK, item;
  while ((item = next_item(&a->next)) < panels * blocks) {
    long row = item / panels * ROW_BLOCK, end = row + ROW_BLOCK < a->rows ? row + ROW_BLOCK : a->rows;
    for (; row + BLOCK_ROWS <= end; row += BLOCK_ROWS) compute_rows(a, BLOCK_ROWS, bits, row, item % panels);
    for (; row + 2 <= end; row += 2) compute_rows(a, 2, bits, row, item % panels);
    if (row < end) compute_rows(a, 1, bits, row, item % panels);
  }
}

static void compute_blocks(void *data) {
  struct linear_grouped *a = data;
  if (a->bits == 4)
    compute_items(a, 4);
  else
    compute_items(a, 8);
}

// panel [group, PANEL] = the weights of a group in float32.
INLINE void unpack(const struct linear_grouped *a, long number, long g, float *panel) {
  long of_group = (number * a->groups + g) * PANEL, of_span = (number * (a->groups / a->span) + g / a->span) * PANEL;
  const uint32_t *codes = a->codes + of_group * (a->group * a->bits / 32);
  for (int n = 0; n < NR; n++) {
    floats scales = scales_of(a->scales, a->steps, of_span + n * VEC, of_group + n * VEC);
    floats leasts = all(0);
    if (a->leasts) leasts = scales_of(a->leasts, a->least_steps, of_span + n * VEC, of_group + n * VEC);
    for (long k = 0; k < a->group; k++) {
      long word = k * a->bits / 32, within = k * a->bits / 4 % 8;
      int shift = a->bits == 8 ? within * 4 : within % 4 * 8 + within / 4 * 4;
      ints code = (ints)(load_words(codes + word * PANEL + n * VEC) >> shift & ((1 << a->bits) - 1));
      store(panel + k * PANEL, n * VEC, __builtin_convertvector(code - (int32_t)a->zero, floats) * scales - leasts, 0);
    }
  }
}

static void compute_exact_blocks(void *data) {
  struct linear_grouped *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK, item;
  while ((item = next_item(&a->next)) < panels * blocks) {
    long first = item / panels * ROW_BLOCK, rows = a->rows - first < ROW_BLOCK ? a->rows - first : ROW_BLOCK;
    long number = item % panels;
    float weights[MOST_GROUP * PANEL], sums[ROW_BLOCK * PANEL];
    for (long g = 0; g < a->groups; g++) {
      unpack(a, number, g, weights);
      const float *inputs = a->x + first * a->x_stride + g * a->group;
      product(rows, PANEL, a->group, inputs, a->x_stride, weights, a->group, sums, PANEL, g > 0);
    }
    for (long r = 0; r < rows; r++)
      for (int n = 0; n < NR; n++) {
        long out = number * PANEL + n * VEC, count = a->outs - out < VEC ? a->outs - out : VEC;
        if (count <= 0) break;
        floats y = load(sums, r * PANEL + n * VEC, 0);
        if (a->bias) y += load_some(a->bias, out, count, 0);
        store_some(a->out, (first + r) * a->outs + out, y, count, 0);
      }
  }
}

static void read_rows(void *data) {
  struct linear_grouped *a = data;
  long row;
  while ((row = next_item(&a->next)) < a->rows)
    for (long g = 0; g < a->groups; g++) {
      long at = row * a->groups + g;
      quantise_inputs(a->x + row * a->x_stride + g * a->group, a->group, a->inputs + at * a->group, a->input_scales + at,
                      a->input_sums + at);
      a->input_sums[at] = -a->input_sums[at];
    }
}

// Below so many weights times rows, or inputs times rows, waking a thread costs more than it saves.
enum { ALONE_PRODUCTS = 1 << 20, ALONE_INPUTS = 1 << 17 };

EXPORT void pagewise_linear_grouped(const float *x, long x_stride, const uint32_t *codes, const uint16_t *scales,
                                    const int8_t *steps, const uint16_t *leasts, const int8_t *least_steps,
                                    const float *bias, float *out, int8_t *inputs, float *input_scales,
                                    int32_t *input_sums, long bits, long zero, long exact, long rows, long groups,
                                    long group, long span, long outs, long threads) {
  struct linear_grouped a = {x, codes, scales, leasts, steps, least_steps, bias, out, inputs, input_scales, input_sums,
                             bits, zero, exact, rows, groups, group, span, outs, x_stride, 0};
  if (!exact) run_team(rows * groups * group < ALONE_INPUTS ? 1 : threads, read_rows, &a);
  a.next = 0;
  run_team(rows * groups * group * outs < ALONE_PRODUCTS ? 1 : threads,
           exact ? compute_exact_blocks : compute_blocks, &a);
}
