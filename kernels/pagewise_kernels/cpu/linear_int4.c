// Linear layers with weights in four bits: codes from 0 to 15, minus a zero, times a scale for each group of inputs of an
// output. Codes become numbers in registers.
//
// With ``e2m1``, codes are numbers of four bits with a sign, two bits of exponent and one of mantissa instead, whose
// doubles plus E2M1_ZERO are the codes that are computed.
//
// Inputs are either quantised, to eight bits with a scale for each group of a row: then the sum of a group is a whole
// number. Or they stay in float32, and the weights are made float32 panel by panel. In both, the result for a row does
// not depend on the other rows.
#include "input_groups.h"

// A word has CODES codes of an output: byte i has that of input i in its lower half and that of input i + 4 in its upper.
// CHUNK inputs are summed in 16 bits; it divides a group.
enum { CODES = 8, CHUNK = 32, E2M1_CHUNK = 16, SYMMETRIC_ZERO = 8, E2M1_ZERO = 12 };

// A block of so many rows times NR vectors of outputs is summed in registers. From TILE_ROWS rows on, the codes of a group
// are unpacked once for all rows, and a block has MR rows where the registers hold their sums.
#if VEC == 16
enum { BLOCK_ROWS = 4, TILE_BLOCK = MR, TILE_ROWS = 8 };
#else
enum { BLOCK_ROWS = 4, TILE_BLOCK = 4, TILE_ROWS = 8 };
#endif

// Where a loop over the rows or the vectors of a block stays one, their sums lie in memory.
#define UNROLLED _Pragma("unroll")

// So many bytes ahead, codes are fetched into the first level cache: the processor alone begins too late.
enum { CODES_AHEAD = 4096 };

// x [rows, given], each row at x_stride. A slot is an input of the packed weights, of which there are groups * group;
// order [slots]: the input in x of each slot, -1: a zero; NULL: the inputs in their order, and zeros. codes
// [panels][slots / CODES][PANEL]; scales [panels][groups][PANEL]: float16, to be multiplied by factor; zeros likewise, or
// NULL: SYMMETRIC_ZERO; bias [outs] or NULL; out [rows, outs]. inputs, written first: in float32 [rows, slots] if exact,
// else in eight bits [groups, rows, group], so that the rows of a group do not lie in the same lines of the cache, with
// input_scales, the scales times factor, and input_sums, minus the sums, which are multiplied by the zero where it is the
// same for all weights, both [groups, rows].
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
  long e2m1, exact, rows, given, groups, group, outs, x_stride, next;
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

INLINE int32_t common_zero(const struct linear_int4 *a) { return a->e2m1 ? E2M1_ZERO : SYMMETRIC_ZERO; }

INLINE void quantise_group(const struct linear_int4 *a, long row, long g) {
  float x[MOST_GROUP], scale;
  int32_t sum;
  read_group(a, row, g * a->group, x);
  long at = g * a->rows + row;
  quantise_inputs(x, a->group, (int8_t *)a->inputs + at * a->group, &scale, &sum);
  a->input_scales[at] = scale * a->factor;
  a->input_sums[at] = a->zeros ? -sum : -sum * common_zero(a);
}

// Of each byte of four bits: the double of its number in e2m1, plus E2M1_ZERO.
INLINE words doubled_e2m1(words codes) {
  static const uint8_t table[64] __attribute__((aligned(64))) = {
      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if VEC == 16
  return (words)_mm512_shuffle_epi8(_mm512_load_si512(table), (__m512i)codes);
#elif VEC == 8
  return (words)_mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)table), (__m256i)codes);
#elif defined(__x86_64__)
  return (words)_mm_shuffle_epi8(_mm_load_si128((const __m128i *)table), (__m128i)codes);
#else
  return (words)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#endif
}

INLINE ints zero_of(const struct linear_int4 *a, long at) {
  return a->zeros ? zeros_of(a->zeros + at) : (ints){} + common_zero(a);
}

// sums [mr][NR] = the sums of a group's inputs of rows, times the zeros of a panel, minus.
INLINE void begin_sums(const struct linear_int4 *a, int mr, long row, long g, long at, ints sums[][NR]) {
  const int32_t *of_inputs = a->input_sums + g * a->rows + row;
  if (a->zeros) {
    UNROLLED for (int n = 0; n < NR; n++) {
      ints zeros = zeros_of(a->zeros + at + n * VEC);
      UNROLLED for (int m = 0; m < mr; m++) sums[m][n] = zeros * of_inputs[m];
    }
  } else {
    UNROLLED for (int m = 0; m < mr; m++)
      UNROLLED for (int n = 0; n < NR; n++) sums[m][n] = (ints){} + of_inputs[m];
  }
}

// Unpack a word of each of VEC outputs: the bytes of the inputs 0 to 3, then of 4 to 7.
INLINE void unpack_words(int e2m1, const uint32_t *codes, words *low, words *high) {
  __builtin_prefetch((const char *)codes + CODES_AHEAD);
  words both = load_words(codes);
  *low = both & 0x0f0f0f0f, *high = both >> 4 & 0x0f0f0f0f;
  if (e2m1) *low = doubled_e2m1(*low), *high = doubled_e2m1(*high);
}

// sums [mr][NR] += ``depth`` slots of a panel's codes times bytes [mr] of rows. A code is at most 15, so that in 16 bits
// the sum of CHUNK inputs fits; with e2m1 it is at most 24, so that the sum of E2M1_CHUNK inputs does.
INLINE void add_slots(int e2m1, int mr, long depth, const uint32_t *codes, const int8_t *bytes, long stride, ints sums[][NR]) {
  partial held[BLOCK_ROWS][NR];
  memset(held, 0, sizeof(held));
  for (long k = 0; k < depth; k += CODES, codes += PANEL)
    for (int n = 0; n < NR; n++) {
      words low, high;
      unpack_words(e2m1, codes + n * VEC, &low, &high);
      for (int m = 0; m < mr; m++) {
        held[m][n] = add_codes(held[m][n], low, bytes + m * stride + k);
        held[m][n] = add_codes(held[m][n], high, bytes + m * stride + k + CODES / 2);
      }
    }
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) sums[m][n] += sum_partial(held[m][n]);
}

// totals [mr][NR] = rows times a panel, without the bias.
INLINE void sum_rows_of(const struct linear_int4 *a, int e2m1, int mr, long row, long panel, floats totals[][NR]) {
  long slots = a->groups * a->group;
  const uint32_t *codes = a->codes + panel * slots / CODES * PANEL;
  memset(totals, 0, mr * NR * sizeof(floats));
  for (long g = 0; g < a->groups; g++, codes += a->group / CODES * PANEL) {
    long at = (panel * a->groups + g) * PANEL;
    const int8_t *bytes = (const int8_t *)a->inputs + (g * a->rows + row) * a->group;
    ints sums[BLOCK_ROWS][NR];
    begin_sums(a, mr, row, g, at, sums);
#if defined(__AVX512VNNI__)
    add_slots(e2m1, mr, a->group, codes, bytes, a->group, sums);
#else
    long chunk = e2m1 ? E2M1_CHUNK : CHUNK;
    for (long k = 0; k < a->group; k += chunk)
      add_slots(e2m1, mr, chunk, codes + k / CODES * PANEL, bytes + k, a->group, sums);
#endif
    for (int n = 0; n < NR; n++) {
      floats scales = from_float16(a->scales + at + n * VEC);
      for (int m = 0; m < mr; m++) {
        floats scale = scales * a->input_scales[g * a->rows + row + m];
        totals[m][n] += __builtin_convertvector(sums[m][n], floats) * scale;
      }
    }
  }
}

INLINE void sum_rows(const struct linear_int4 *a, int mr, long row, long panel, floats totals[][NR]) {
  if (a->e2m1)
    sum_rows_of(a, 1, mr, row, panel, totals);
  else
    sum_rows_of(a, 0, mr, row, panel, totals);
}

// out = totals [rows][PANEL] of a panel, plus the bias.
INLINE void write_totals(const struct linear_int4 *a, long row, long rows, long panel, const float *totals) {
  for (long r = 0; r < rows; r++)
    for (int n = 0; n < NR; n++) {
      long out = panel * PANEL + n * VEC, count = a->outs - out < VEC ? a->outs - out : VEC;
      if (count <= 0) break;
      floats y = load(totals, r * PANEL + n * VEC, 0);
      if (a->bias) y += load_some(a->bias, out, count, 0);
      store_some(a->out, (row + r) * a->outs + out, y, count, 0);
    }
}

INLINE void compute_rows(const struct linear_int4 *a, int mr, long row, long panel) {
  floats totals[BLOCK_ROWS][NR];
  sum_rows(a, mr, row, panel, totals);
  write_totals(a, row, mr, panel, (const float *)totals);
}

// sums [mr][NR] += ``depth`` slots of a tile [depth / 4][NR] times bytes [mr] of rows; ``depth`` as in add_slots.
INLINE void add_tile(int mr, long depth, const words *tile, const int8_t *bytes, long stride, ints sums[][NR]) {
#if defined(__AVX512VNNI__)
  for (long k = 0; k < depth; k += 4, tile += NR)
    UNROLLED for (int m = 0; m < mr; m++)
      UNROLLED for (int n = 0; n < NR; n++) sums[m][n] = add_codes(sums[m][n], tile[n], bytes + m * stride + k);
#else
  partial held[TILE_BLOCK][NR];
  memset(held, 0, sizeof(held));
  for (long k = 0; k < depth; k += 4, tile += NR)
    UNROLLED for (int m = 0; m < mr; m++)
      UNROLLED for (int n = 0; n < NR; n++) held[m][n] = add_codes(held[m][n], tile[n], bytes + m * stride + k);
  UNROLLED for (int m = 0; m < mr; m++)
    UNROLLED for (int n = 0; n < NR; n++) sums[m][n] += sum_partial(held[m][n]);
#endif
}

// totals [mr][PANEL] += a group of mr rows times its tile.
INLINE void add_group(const struct linear_int4 *a, int mr, long row, long g, long at, const words *tile, float *totals) {
  long depth = a->group;
  const int8_t *bytes = (const int8_t *)a->inputs + (g * a->rows + row) * a->group;
  ints sums[TILE_BLOCK][NR];
  begin_sums(a, mr, row, g, at, sums);
#if !defined(__AVX512VNNI__)
  depth = a->e2m1 ? E2M1_CHUNK : CHUNK;
#endif
  for (long k = 0; k < a->group; k += depth) add_tile(mr, depth, tile + k / 4 * NR, bytes + k, a->group, sums);
  UNROLLED for (int n = 0; n < NR; n++) {
    floats scales = from_float16(a->scales + at + n * VEC);
    UNROLLED for (int m = 0; m < mr; m++) {
      floats scale = scales * a->input_scales[g * a->rows + row + m], total = load(totals, m * PANEL + n * VEC, 0);
      total += __builtin_convertvector(sums[m][n], floats) * scale;
      store(totals, m * PANEL + n * VEC, total, 0);
    }
  }
}

// The product of TILE_ROWS to ROW_BLOCK rows with a panel: group by group, so that memory is read while all rows compute.
static void compute_tiles(const struct linear_int4 *a, long first, long rows, long panel) {
  words tile[MOST_GROUP / 4 * NR];
  float totals[ROW_BLOCK * PANEL];
  memset(totals, 0, rows * PANEL * sizeof(float));
  const uint32_t *codes = a->codes + panel * a->groups * a->group / CODES * PANEL;
  for (long g = 0; g < a->groups; g++) {
    for (long k = 0; k < a->group; k += CODES, codes += PANEL)
      for (int n = 0; n < NR; n++) {
        words *to = tile + k / 4 * NR + n;
        if (a->e2m1)
          unpack_words(1, codes + n * VEC, to, to + NR);
        else
          unpack_words(0, codes + n * VEC, to, to + NR);
      }
    long r = 0, at = (panel * a->groups + g) * PANEL;
    for (; r + TILE_BLOCK <= rows; r += TILE_BLOCK) add_group(a, TILE_BLOCK, first + r, g, at, tile, totals + r * PANEL);
    for (; r + 2 <= rows; r += 2) add_group(a, 2, first + r, g, at, tile, totals + r * PANEL);
    if (r < rows) add_group(a, 1, first + r, g, at, tile, totals + r * PANEL);
  }
  write_totals(a, first, rows, panel, totals);
}

// An item is ROW_BLOCK rows times one panel.
static void compute_blocks(void *data) {
  struct linear_int4 *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK, item;
  while ((item = next_item(&a->next)) < panels * blocks) {
    long row = item / panels * ROW_BLOCK, end = row + ROW_BLOCK < a->rows ? row + ROW_BLOCK : a->rows;
    if (end - row >= TILE_ROWS) {
      compute_tiles(a, row, end - row, item % panels);
      continue;
    }
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
    ints zeros = zero_of(a, at + n * VEC);
    for (long k = 0; k < a->group; k += CODES) {
      words left = load_words(codes + k / CODES * PANEL + n * VEC);
      for (int i = 0; i < CODES; i++) {
        words four = left >> (i % 4 * 8 + i / 4 * 4) & 15;
        ints code = (ints)(a->e2m1 ? doubled_e2m1(four) & 255 : four);
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
    write_totals(a, first, rows, number, sums);
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
                                 float *out, void *inputs, float *input_scales, int32_t *input_sums, long e2m1,
                                 long exact, long rows, long given, long groups, long group, long outs, long threads) {
  struct linear_int4 a = {x, order, codes, scales, zeros, bias, factor, out, inputs, input_scales, input_sums,
                          e2m1, exact, rows, given, groups, group, outs, x_stride, 0};
  run_team(rows * given < ALONE_INPUTS ? 1 : threads, read_rows, &a);
  a.next = 0;
  run_team(rows * given * outs < ALONE_PRODUCTS ? 1 : threads, exact ? compute_exact_blocks : compute_blocks, &a);
}

// A weight of an expert, in the layout of linear_int4. bias: NULL, or [panels][PANEL].
struct int4_weight {
  const int32_t *order;
  const uint32_t *codes;
  const uint16_t *scales;
  const uint8_t *zeros;
  const float *bias;
  long groups, group, e2m1;
};

// The experts of a mixture. Of gate_up [experts], each has first the panels of gate and then those of up; down [experts].
// factors [2, experts]. active [num_active]: the experts that have rows; starts [num_active + 1]: the first row of each.
// x, out [rows, hidden]; activated [rows, inner]; inputs [rows, slots], input_scales and input_sums [rows, groups]: scratch
// for the largest of all weights. An expert makes gate * sigmoid(alpha * gate) * (up + shift) of gate and up, where neither
// is beyond the limit.
struct int4_experts {
  const struct int4_weight *gate_up, *down;
  const float *factors;
  const int64_t *active, *starts;
  const float *x;
  float *activated, *out;
  int8_t *inputs;
  float *input_scales;
  int32_t *input_sums;
  float alpha, shift, limit;
  long num_active, experts, hidden, inner, slots, groups, next;
};

// The linear layer of an active expert, for its rows.
static struct linear_int4 layer_of(const struct int4_experts *a, int down, long at) {
  long expert = a->active[at], first = a->starts[at], ins = down ? a->inner : a->hidden;
  const struct int4_weight *w = (down ? a->down : a->gate_up) + expert;
  return (struct linear_int4){
      (down ? a->activated : a->x) + first * ins, w->order, w->codes, w->scales, w->zeros, down ? w->bias : 0,
      a->factors[down * a->experts + expert], a->out + first * a->hidden, a->inputs + first * a->slots,
      a->input_scales + first * a->groups, a->input_sums + first * a->groups, w->e2m1, 0, a->starts[at + 1] - first, ins,
      w->groups, w->group, a->hidden, ins, 0};
}

// An item is a row of an expert.
INLINE void quantise_rows(struct int4_experts *a, int down) {
  long row, at = 0;
  while ((row = next_item(&a->next)) < a->starts[a->num_active]) {
    while (row >= a->starts[at + 1]) at++;  // a thread's items ascend
    struct linear_int4 layer = layer_of(a, down, at);
    for (long g = 0; g < layer.groups; g++) quantise_group(&layer, row - a->starts[at], g);
  }
}

static void quantise_x(void *data) { quantise_rows(data, 0); }
static void quantise_activated(void *data) { quantise_rows(data, 1); }

INLINE void activate_rows(const struct int4_experts *a, const struct linear_int4 *layer, const float *bias, int mr, long row,
                          long panel, float *to) {
  long gates = (a->inner + PANEL - 1) / PANEL;
  floats gate[BLOCK_ROWS][NR], up[BLOCK_ROWS][NR], limit = all(a->limit);
  sum_rows(layer, mr, row, panel, gate);
  sum_rows(layer, mr, row, gates + panel, up);
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < NR; n++) {
      long out = panel * PANEL + n * VEC, count = a->inner - out < VEC ? a->inner - out : VEC;
      if (count <= 0) break;
      floats g = gate[m][n], u = up[m][n];
      if (bias) g += load(bias + out, 0, 0), u += load(bias + gates * PANEL + out, 0, 0);
      g = select(g > limit, limit, g);
      u = select(u > limit, limit, select(u < -limit, -limit, u));
      store_some(to + (row + m) * a->inner, out, swish_of(g, a->alpha) * (u + a->shift), count, 0);
    }
}

// An item is an expert and PANEL numbers of gate and of up.
static void activate_experts(void *data) {
  struct int4_experts *a = data;
  long item, count = (a->inner + PANEL - 1) / PANEL;
  while ((item = next_item(&a->next)) < a->num_active * count) {
    long at = item / count, panel = item % count, row = 0;
    struct linear_int4 layer = layer_of(a, 0, at);
    const float *bias = a->gate_up[a->active[at]].bias;
    float *to = a->activated + a->starts[at] * a->inner;
    for (; row + BLOCK_ROWS <= layer.rows; row += BLOCK_ROWS) activate_rows(a, &layer, bias, BLOCK_ROWS, row, panel, to);
    for (; row + 2 <= layer.rows; row += 2) activate_rows(a, &layer, bias, 2, row, panel, to);
    if (row < layer.rows) activate_rows(a, &layer, bias, 1, row, panel, to);
  }
}

// An item is an expert and PANEL numbers of its output.
static void project_experts(void *data) {
  struct int4_experts *a = data;
  long item, count = (a->hidden + PANEL - 1) / PANEL;
  while ((item = next_item(&a->next)) < a->num_active * count) {
    struct linear_int4 layer = layer_of(a, 1, item / count);
    long row = 0, panel = item % count;
    for (; row + BLOCK_ROWS <= layer.rows; row += BLOCK_ROWS) compute_rows(&layer, BLOCK_ROWS, row, panel);
    for (; row + 2 <= layer.rows; row += 2) compute_rows(&layer, 2, row, panel);
    if (row < layer.rows) compute_rows(&layer, 1, row, panel);
  }
}

EXPORT void pagewise_int4_experts(const struct int4_weight *gate_up, const struct int4_weight *down,
                                  const float *factors, const int64_t *active, const int64_t *starts, const float *x,
                                  float *activated, float *out, int8_t *inputs, float *input_scales,
                                  int32_t *input_sums, float alpha, float shift, float limit, long num_active,
                                  long experts, long hidden, long inner, long slots, long groups, long threads) {
  struct int4_experts a = {gate_up, down, factors, active, starts, x, activated, out, inputs, input_scales, input_sums,
                           alpha, shift, limit, num_active, experts, hidden, inner, slots, groups, 0};
  long rows = starts[num_active], products = rows * hidden * inner;
  run_team(rows * hidden < ALONE_INPUTS ? 1 : threads, quantise_x, &a);
  a.next = 0;
  run_team(2 * products < ALONE_PRODUCTS ? 1 : threads, activate_experts, &a);
  a.next = 0;
  run_team(rows * inner < ALONE_INPUTS ? 1 : threads, quantise_activated, &a);
  a.next = 0;
  run_team(products < ALONE_PRODUCTS ? 1 : threads, project_experts, &a);
}
