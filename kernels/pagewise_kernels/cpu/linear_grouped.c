// Linear layers with weights in four or eight bits, of which groups of inputs share scales: see grouped_rows.h.
//
// Inputs are either quantised, or stay in float32, while the weights are made float32 panel by panel. In both, the result
// for a row does not depend on the other rows.
#include "grouped_rows.h"

// x [rows, ins], each row at x_stride; out [rows, outs]. rows: the rows of x, quantised first; or, if exact, ``inputs``, whose
// rows are at input_stride: x in float32 in the order of the slots.
struct linear_grouped {
  struct grouped_weight weight;
  struct grouped_rows rows;
  const float *x;
  float *out, *inputs;
  long x_stride, input_stride, threads, next;
};

static void quantise(void *data) {
  struct linear_grouped *a = data;
  long row;
  while ((row = next_item(&a->next)) < a->rows.rows) quantise_row(&a->weight, a->x + row * a->x_stride, &a->rows, row);
}

static void read_rows(void *data) {
  struct linear_grouped *a = data;
  long row;
  while ((row = next_item(&a->next)) < a->rows.rows)
    for (long g = 0; g < a->weight.groups; g++)
      read_group(&a->weight, a->x + row * a->x_stride, g, a->inputs + row * a->input_stride + g * a->weight.group);
}

// An item is ROW_BLOCK rows times one panel.
INLINE void compute_items(struct linear_grouped *a, int exact) {
  const struct grouped_weight *w = &a->weight;
  long panels = (w->outs + PANEL - 1) / PANEL, blocks = (a->rows.rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for (struct run run = {0, 0}; has_item(&run, &a->next, panels * blocks, a->threads); run.item++) {
    long first = run.item / panels * ROW_BLOCK, panel = run.item % panels;
    long rows = a->rows.rows - first < ROW_BLOCK ? a->rows.rows - first : ROW_BLOCK;
    float sums[ROW_BLOCK * PANEL];
    if (exact) {
      float weights[MOST_GROUP * PANEL];
      for (long g = 0; g < w->groups; g++) {
        unpack_group(w, panel, g, weights);
        product(rows, PANEL, w->group, a->inputs + first * a->input_stride + g * w->group, a->input_stride, weights,
                w->group, sums, PANEL, g > 0);
      }
    } else {
      multiply_panel(w, &a->rows, first, rows, panel, sums);
    }
    write_panel(w, rows, panel, sums, a->out + first * w->outs);
  }
}

static void compute(void *data) { compute_items(data, 0); }
static void compute_exact(void *data) { compute_items(data, 1); }

// Below so many weights times rows, or inputs times rows, waking a thread costs more than it saves.
enum { ALONE_PRODUCTS = 1 << 20, ALONE_INPUTS = 1 << 17 };

static void compute_linear(struct linear_grouped *a, void (*first)(void *), int exact) {
  long inputs = a->rows.rows * a->weight.ins;
  if (first) run_team(inputs < ALONE_INPUTS ? 1 : a->threads, first, a);
  a->next = 0;
  run_team(inputs * a->weight.outs < ALONE_PRODUCTS ? 1 : a->threads, exact ? compute_exact : compute, a);
}

// inputs: in float32 [rows, slots] if exact, else in eight bits; input_scales, input_sums [groups, rows].
EXPORT void pagewise_linear_int4(const float *x, long x_stride, const int32_t *order, const uint32_t *codes,
                                 const uint16_t *scales, const uint8_t *zeros, const float *bias, float factor,
                                 float *out, void *inputs, float *input_scales, int32_t *input_sums, long e2m1,
                                 long exact, long rows, long given, long groups, long group, long outs, long threads) {
  struct linear_grouped a = {
      {.kind = e2m1 ? E2M1 : INT4, .order = order, .codes = codes, .scales = scales, .zeros = zeros, .bias = bias,
       .factor = factor, .zero = e2m1 ? E2M1_ZERO : SYMMETRIC_ZERO, .ins = given, .outs = outs, .groups = groups,
       .group = group, .span = 1},
      {inputs, input_scales, input_sums, rows}, x, out, inputs, x_stride, groups * group, threads, 0};
  compute_linear(&a, exact ? read_rows : quantise, exact);
}

// inputs: in eight bits [groups, rows, group] unless exact; input_scales, input_sums [groups, rows].
EXPORT void pagewise_linear_grouped(const float *x, long x_stride, const uint32_t *codes, const uint16_t *scales,
                                    const int8_t *steps, const uint16_t *leasts, const int8_t *least_steps,
                                    const float *bias, float *out, int8_t *inputs, float *input_scales,
                                    int32_t *input_sums, long bits, long zero, long exact, long rows, long groups,
                                    long group, long span, long outs, long threads) {
  struct linear_grouped a = {
      {.kind = bits == 8 ? STEPS8 : STEPS4, .codes = codes, .scales = scales, .leasts = leasts, .steps = steps,
       .least_steps = least_steps, .bias = bias, .factor = 1, .zero = zero, .ins = groups * group, .outs = outs,
       .groups = groups, .group = group, .span = span},
      {inputs, input_scales, input_sums, rows}, x, out, (float *)x, x_stride, x_stride, threads, 0};
  compute_linear(&a, exact ? 0 : quantise, exact);
}
