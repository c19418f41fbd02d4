// Linear layers with weights in four bits: codes from 0 to 15, minus a zero, times a scale for each group of inputs of an
// output. Codes become numbers in registers.
//
// Inputs are either quantised, to eight bits with a scale for each group of a row: then the sum of a group is a whole
// number. Or they stay in float32, and the weights are made float32 panel by panel. In both, the result for a row does
// not depend on the other rows.
#include "input_groups.h"

// A word has CODES codes of an output: byte i has that of input i in its lower half and that of input i + 4 in its upper.
// CHUNK inputs are summed in 16 bits; it divides a group.
enum { CODES = 8, CHUNK = 32, SYMMETRIC_ZERO = 8 };

// A block of so many rows times NR vectors of outputs is summed in registers.
enum { BLOCK_ROWS = 4 };

// x [rows, given], each row at x_stride. A slot is an input of the packed weights, of which there are groups * group;
// order [slots]: the input in x of each slot, -1: a zero; NULL: the inputs in their order, and zeros. codes
// [panels][slots / CODES][PANEL]; scales [panels][groups][PANEL]: float16, to be multiplied by factor; zeros likewise, or
// NULL: SYMMETRIC_ZERO; bias [outs] or NULL; out [rows, outs]. inputs [rows, slots], written first: in float32 if exact,
// else in eight bits, with input_scales, the scales times factor, and input_sums, minus the sums, [rows, groups].
struct linear_int4 {
  const float *x;
  const int32_t *order;
  const uint32_t *codes;
  const uint16_t *scales;
  const uint8_t *zeros;
  const float *bias;
  float factor, *out;
  void *inputs;
  float *input_scales;
  int32_t *input_sums;
  long exact, rows, given, groups, group, outs, x_stride, next;
};

INLINE ints zeros_of(const uint8_t *zeros) {
  uint8_t bytes __attribute__((vector_size(VEC)));
  memcpy(&bytes, zeros, VEC);
  return __builtin_convertvector(bytes, ints);
}

// The inputs of a group of a row, in the order of the slots.
INLINE void read_group(const struct linear_int4 *a, long row, long first, float *to) {
  const float *x = a->x + row * a->x_stride;
  if (a->order) {
    for (long k = 0; k < a->group; k++) to[k] = a->order[first + k] < 0 ? 0 : x[a->order[first + k]];
  } else {
    long given = a->given - first < a->group ? a->given - first : a->group;
    memcpy(to, x + first, given * sizeof(float));
    memset(to + given, 0, (a->group - given) * sizeof(float));
  }
}

INLINE void quantise_group(const struct linear_int4 *a, long row, long g) {
  float x[MOST_GROUP], scale;
  int32_t sum;
  read_group(a, row, g * a->group, x);
  quantise_inputs(x, a->group, (int8_t *)a->inputs + (row * a->groups + g) * a->group, &scale, &sum);
  a->input_scales[row * a->groups + g] = scale * a->factor;
  a->input_sums[row * a->groups + g] = -sum;
}

// sums [mr][NR] += ``depth`` slots of a panel's codes times bytes [mr] of rows. A code is at most 15, so that in 16 bits
// the sum of CHUNK inputs fits.
INLINE void add_slots(int mr, long depth, const uint32_t *codes, const int8_t *bytes, long stride, ints sums[][NR]) {
  partial held[BLOCK_ROWS][NR];
  memset(held, 0, sizeof(held));
  for (long k = 0; k < depth; k += CODES, codes += PANEL)
    for (int n = 0; n < NR; n++) {
      words both = load_words(codes + n * VEC), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
      for (int m = 0; m < mr; m++) {
        held[m][n] = add_codes(held[m][n], low, bytes + m * stride + k);
        held[m][n] = add_codes(held[m][n], high, bytes + m * stride + k + CODES / 2);
      }
    }
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) sums[m][n] += sum_partial(held[m][n]);
}

INLINE void compute_rows(const struct linear_int4 *a, int mr, long row, long panel) {
  long slots = a->groups * a->group;
  const uint32_t *codes = a->codes + panel * slots / CODES * PANEL;
  floats totals[BLOCK_ROWS][NR];
  memset(totals, 0, sizeof(totals));
  for (long g = 0; g < a->groups; g++, codes += a->group / CODES * PANEL) {
    long at = (panel * a->groups + g) * PANEL;
    const int8_t *bytes = (const int8_t *)a->inputs + row * slots + g * a->group;
    ints sums[BLOCK_ROWS][NR];
    for (int n = 0; n < NR; n++) {
      ints zeros = a->zeros ? zeros_of(a->zeros + at + n * VEC) : (ints){} + SYMMETRIC_ZERO;
      for (int m = 0; m < mr; m++) sums[m][n] = zeros * a->input_sums[(row + m) * a->groups + g];
    }
#if defined(__AVX512VNNI__)
    add_slots(mr, a->group, codes, bytes, slots, sums);
#else
    for (long k = 0; k < a->group; k += CHUNK) add_slots(mr, CHUNK, codes + k / CODES * PANEL, bytes + k, slots, sums);
#endif
    for (int n = 0; n < NR; n++) {
      floats scales = from_float16(a->scales + at + n * VEC);
      for (int m = 0; m < mr; m++) {
        floats scale = scales * a->input_scales[(row + m) * a->groups + g];
        totals[m][n] += __builtin_convertvector(sums[m][n], floats) * scale;
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
static void compute_blocks(void *data) {
  struct linear_int4 *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK, item;
  while ((item = next_item(&a->next)) < panels * blocks) {
    long row = item / panels * ROW_BLOCK, end = row + ROW_BLOCK < a->rows ? row + ROW_BLOCK : a->rows;
    for (; row + BLOCK_ROWS <= end; row += BLOCK_ROWS) compute_rows(a, BLOCK_ROWS, row, item % panels);
    for (; row + 2 <= end; row += 2) compute_rows(a, 2, row, item % panels);
    if (row < end) compute_rows(a, 1, row, item % panels);
  }
}

// panel [group, PANEL] = the weights of a group in float32.
INLINE void unpack(const struct linear_int4 *a, long number, long g, float *panel) {
  long at = (number * a->groups + g) * PANEL;
  const uint32_t *codes = a->codes + at / CODES * a->group;
  for (int n = 0; n < NR; n++) {
    floats scales = from_float16(a->scales + at + n * VEC) * a->factor;
    ints zeros = a->zeros ? zeros_of(a->zeros + at + n * VEC) : (ints){} + SYMMETRIC_ZERO;
    for (long k = 0; k < a->group; k += CODES) {
      words left = load_words(codes + k / CODES * PANEL + n * VEC);
      for (int i = 0; i < CODES; i++) {
        ints code = (ints)(left >> (i % 4 * 8 + i / 4 * 4) & 15);
        store(panel + (k + i) * PANEL, n * VEC, __builtin_convertvector(code - zeros, floats) * scales, 0);
      }
    }
  }
}

static void compute_exact_blocks(void *data) {
  struct linear_int4 *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK, item;
  while ((item = next_item(&a->next)) < panels * blocks) {
    long first = item / panels * ROW_BLOCK, rows = a->rows - first < ROW_BLOCK ? a->rows - first : ROW_BLOCK;
    long number = item % panels, slots = a->groups * a->group;
    float weights[MOST_GROUP * PANEL], sums[ROW_BLOCK * PANEL];
    for (long g = 0; g < a->groups; g++) {
      unpack(a, number, g, weights);
      const float *inputs = (const float *)a->inputs + first * slots + g * a->group;
      product(rows, PANEL, a->group, inputs, slots, weights, a->group, sums, PANEL, g > 0);
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
  struct linear_int4 *a = data;
  long row;
  while ((row = next_item(&a->next)) < a->rows)
    for (long g = 0; g < a->groups; g++) {
      if (a->exact)
        read_group(a, row, g * a->group, (float *)a->inputs + (row * a->groups + g) * a->group);
      else
        quantise_group(a, row, g);
    }
}

// Below so many weights times rows, or inputs times rows, waking a thread costs more than it saves.
enum { ALONE_PRODUCTS = 1 << 20, ALONE_INPUTS = 1 << 17 };

EXPORT void pagewise_linear_int4(const float *x, long x_stride, const int32_t *order, const uint32_t *codes,
                                 const uint16_t *scales, const uint8_t *zeros, const float *bias, float factor,
                                 float *out, void *inputs, float *input_scales, int32_t *input_sums, long exact,
                                 long rows, long given, long groups, long group, long outs, long threads,
                                 parallel_fn parallel) {
  struct linear_int4 a = {x, order, codes, scales, zeros, bias, factor, out, inputs, input_scales, input_sums,
                          exact, rows, given, groups, group, outs, x_stride, 0};
  run_team(parallel, rows * given < ALONE_INPUTS ? 1 : threads, read_rows, &a);
  a.next = 0;
  run_team(parallel, rows * given * outs < ALONE_PRODUCTS ? 1 : threads, exact ? compute_exact_blocks : compute_blocks, &a);
}
