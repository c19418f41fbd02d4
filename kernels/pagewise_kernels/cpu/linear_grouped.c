// Linear layers with weights in four or eight bits, of which groups of inputs share scales: see grouped_rows.h.
//
// Inputs are either quantised, or stay in float32, while the weights are made float32 group by group. In both, the result
// for a row does not depend on the other rows.
#include "grouped_rows.h"

// x [rows, ins], each row at x_stride; out [rows, outs].
struct linear_grouped {
  struct grouped_weight weight;
  struct grouped_rows rows;
  const float *x;
  float *out;
  long x_stride, threads, next;
};

static void read_rows(void *data) {
  struct linear_grouped *a = data;
  long row;
  while ((row = next_item(&a->next)) < a->rows.rows) read_row(&a->weight, a->x + row * a->x_stride, &a->rows, row);
}

// An item is ROW_BLOCK rows times one panel.
static void compute(void *data) {
  struct linear_grouped *a = data;
  const struct grouped_weight *w = &a->weight;
  long panels = (w->outs + PANEL - 1) / PANEL, blocks = (a->rows.rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for (struct run run = {0, 0}; has_item(&run, &a->next, panels * blocks, a->threads); run.item++) {
    long first = run.item / panels * ROW_BLOCK, panel = run.item % panels;
    long rows = a->rows.rows - first < ROW_BLOCK ? a->rows.rows - first : ROW_BLOCK;
    float sums[ROW_BLOCK * PANEL];
    multiply_panel(w, &a->rows, first, rows, panel, sums);
    write_panel(w, rows, panel, sums, a->out + first * w->outs);
  }
}

// inputs [rows, slots] in eight bits, or in float32 if exact; input_scales, input_sums [rows, groups]: scratch.
EXPORT void pagewise_linear_grouped(const float *x, long x_stride, const struct weight *weight, float *out, void *inputs,
                                    float *input_scales, int32_t *input_sums, long exact, long rows, long threads) {
  struct linear_grouped a = {grouped_weight_of(weight),
                             {exact ? 0 : inputs, input_scales, input_sums, exact ? inputs : 0, rows},
                             x, out, x_stride, threads, 0};
  long given = rows * a.weight.ins;
  run_team(given < ALONE_INPUTS ? 1 : threads, read_rows, &a);
  a.next = 0;
  run_team(given * a.weight.outs < ALONE_PRODUCTS ? 1 : threads, compute, &a);
}
