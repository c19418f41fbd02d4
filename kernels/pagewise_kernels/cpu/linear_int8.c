// Linear layers with weights in eight bits, with a scale for each output, and inputs that are quantised row by row.
//
// The sums are whole numbers: the result for a row depends neither on the other rows nor on the order of the additions,
// and is the same on every processor.
#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The weights of GROUP neighbouring inputs are multiplied and added at once: by one instruction with VNNI, else as pairs
// of 16 bits. A block of MR rows times NR vectors of outputs is summed in registers.
#if defined(__AVX512VNNI__)
enum { GROUP = 4, MR = 6, NR = 4 };
#elif VEC == 16
enum { GROUP = 2, MR = 6, NR = 4 };
#else
enum { GROUP = 2, MR = 4, NR = 2 };
#endif
enum { PANEL = NR * VEC };

// x [rows, in] in float32, each row at x_stride. packed [panels][groups][PANEL][GROUP], zeros behind the last output and
// the last input; scales, offsets [panels * PANEL]: the scale of an output's weights, and 128 times their sum; bias [outs]
// or NULL; out [rows, outs]. inputs [rows][groups][GROUP], row_scales [rows]: the quantised rows, which are written first.
struct linear_int8 {
  const float *x;
  const int8_t *packed;
  const float *scales;
  const int32_t *offsets;
  const float *bias;
  float *out;
  uint8_t *inputs;
  float *row_scales;
  long rows, in, outs, x_stride, groups, threads, next;
};

// What is no number, or is infinite, makes the scale so, and with it the whole result of the row.
static void quantise_row(const struct linear_int8 *a, long row) {
  const float *x = a->x + row * a->x_stride;
  uint8_t *to = a->inputs + row * a->groups * GROUP;
  ints sizes = {};
  for (long k = 0; k < a->in; k += VEC) {
    floats part = a->in - k < VEC ? load_some(x, k, a->in - k, 0) : load(x, k, 0);
    ints size = (ints)part & 0x7fffffff;  // of positive floats, the greater one has the greater bits
    ints where = size > sizes;
    sizes = (where & size) | (~where & sizes);
  }
  int32_t most = 0;
  for (int i = 0; i < VEC; i++) most = sizes[i] > most ? sizes[i] : most;
  float top;
  memcpy(&top, &most, sizeof(top));
  float scale = top == 0 ? 1 : top / 127, inverse = 1 / scale;
  a->row_scales[row] = scale;
  // Adding 1.5 * 2^23 rounds to the nearest whole number, which the lowest bits are then; 128 makes it positive.
  const float shift = 12582912.0f + 128.0f;
  for (long k = 0; k < a->groups * GROUP; k += VEC) {
    long n = a->groups * GROUP - k, given = a->in - k;
    floats part = given >= VEC ? load(x, k, 0) : load_some(x, k, given > 0 ? given : 0, 0);
    floats scaled = part * inverse;  // a statement of its own: fused with the sum, it would round differently
    floats shifted = scaled + shift;
    typedef uint8_t bytes __attribute__((vector_size(VEC)));
    bytes result = __builtin_convertvector((words)shifted & 0xff, bytes);
    memcpy(to + k, &result, n < VEC ? n : VEC);
  }
}

// Add to the sums of VEC outputs the products of their weights [VEC][GROUP] with one group of a row's inputs.
INLINE ints add_products(ints sums, const uint8_t *inputs, const int8_t *weights) {
#if defined(__AVX512VNNI__)
  int32_t group;
  memcpy(&group, inputs, 4);
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(group), _mm512_loadu_si512(weights));
#else
  int32_t pair = inputs[0] | inputs[1] << 16;
#if VEC == 16
  __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights));
  return sums + (ints)_mm512_madd_epi16(wide, _mm512_set1_epi32(pair));
#elif VEC == 8
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)weights));
  return sums + (ints)_mm256_madd_epi16(wide, _mm256_set1_epi32(pair));
#elif defined(__x86_64__)
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)weights));
  return sums + (ints)_mm_madd_epi16(wide, _mm_set1_epi32(pair));
#else
  for (int i = 0; i < VEC; i++) sums[i] += (pair & 0xff) * weights[2 * i] + (pair >> 16) * weights[2 * i + 1];
  return sums;
#endif
#endif
}

INLINE void compute_rows(const struct linear_int8 *a, int mr, long row, long first) {
  const int8_t *weights = a->packed + first * a->groups * GROUP;
  const uint8_t *inputs = a->inputs + row * a->groups * GROUP;
  ints sums[MR][NR];
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) sums[m][n] = (ints){};
  for (long g = 0; g < a->groups; g++, weights += PANEL * GROUP)
    for (int m = 0; m < mr; m++)
      for (int n = 0; n < NR; n++)
        sums[m][n] = add_products(sums[m][n], inputs + (m * a->groups + g) * GROUP, weights + n * VEC * GROUP);
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) {
      long out = first + n * VEC, count = a->outs - out;
      if (count <= 0) break;
      ints offset;
      memcpy(&offset, a->offsets + out, sizeof(offset));
      floats y = __builtin_convertvector(sums[m][n] - offset, floats) * (load(a->scales, out, 0) * a->row_scales[row + m]);
      if (count > VEC) count = VEC;
      if (a->bias) y += load_some(a->bias, out, count, 0);
      store_some(a->out, (row + m) * a->outs + out, y, count, 0);
    }
}

// An item is ROW_BLOCK rows times one panel.
enum { ROW_BLOCK = 96 };

static void compute_blocks(void *data) {
  struct linear_int8 *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for (struct run run = {0, 0}; has_item(&run, &a->next, panels * blocks, a->threads); run.item++) {
    long row = run.item / panels * ROW_BLOCK, end = row + ROW_BLOCK < a->rows ? row + ROW_BLOCK : a->rows;
    long first = run.item % panels * PANEL;
    for (; row + MR <= end; row += MR) compute_rows(a, MR, row, first);
    for (; row + 2 <= end; row += 2) compute_rows(a, 2, row, first);
    if (row < end) compute_rows(a, 1, row, first);
  }
}

static void quantise_rows(void *data) {
  struct linear_int8 *a = data;
  long row;
  while ((row = next_item(&a->next)) < a->rows) quantise_row(a, row);
}

// Below so many weights times rows, or inputs times rows, waking a thread costs more than it saves.
enum { ALONE_PRODUCTS = 1 << 20, ALONE_INPUTS = 1 << 17 };

EXPORT void pagewise_linear_int8(const float *x, long x_stride, const int8_t *packed, const float *scales,
                                 const int32_t *offsets, const float *bias, float *out, uint8_t *inputs,
                                 float *row_scales, long rows, long in, long outs, long threads) {
  struct linear_int8 a = {x, packed, scales, offsets, bias, out, inputs, row_scales, rows, in, outs, x_stride,
                          (in + GROUP - 1) / GROUP, threads, 0};
  run_team(rows * in < ALONE_INPUTS ? 1 : threads, quantise_rows, &a);
  a.next = 0;
  run_team(rows * in * outs < ALONE_PRODUCTS ? 1 : threads, compute_blocks, &a);
}

EXPORT long pagewise_int8_panel(void) { return PANEL; }
EXPORT long pagewise_int8_group(void) { return GROUP; }
