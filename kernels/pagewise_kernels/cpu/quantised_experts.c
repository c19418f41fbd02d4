// Mixtures of experts with weights in four or eight bits: see grouped_rows.h.
#include "grouped_rows.h"

// The experts of a mixture. Of gate_up [experts], each has first the panels of gate and then those of up; down [experts].
// active [num_active]: the experts that have rows; starts [num_active + 1]: the first row of each. x, out [rows, hidden];
// activated [rows, inner]; inputs [rows, slots], in eight bits or in float32 (``exact``), input_scales and input_sums
// [rows, groups]: scratch for the largest of all weights. An expert makes gate * sigmoid(alpha * gate) * (up + shift) of
// gate and up, where neither is beyond the limit.
struct quantised_experts {
  const struct weight *gate_up, *down;
  const int64_t *active, *starts;
  const float *x;
  float *activated, *out;
  void *inputs;
  float *input_scales;
  int32_t *input_sums;
  float alpha, shift, limit;
  long exact, num_active, hidden, inner, slots, groups, threads, next;
};

// A weight of an active expert.
static struct grouped_weight weight_of(const struct quantised_experts *a, int down, long at) {
  return grouped_weight_of((down ? a->down : a->gate_up) + a->active[at]);
}

// The rows of an active expert.
static struct grouped_rows rows_of(const struct quantised_experts *a, long at) {
  long first = a->starts[at], rows = a->starts[at + 1] - first;
  if (a->exact) return (struct grouped_rows){.floats = (float *)a->inputs + first * a->slots, .rows = rows};
  return (struct grouped_rows){.bytes = (int8_t *)a->inputs + first * a->slots,
                               .scales = a->input_scales + first * a->groups,
                               .sums = a->input_sums + first * a->groups, .rows = rows};
}

// An item is a row of an expert.
INLINE void read_rows(struct quantised_experts *a, int down) {
  long row, at = 0;
  while ((row = next_item(&a->next)) < a->starts[a->num_active]) {
    while (row >= a->starts[at + 1]) at++;  // a thread's items ascend
    struct grouped_weight weight = weight_of(a, down, at);
    struct grouped_rows rows = rows_of(a, at);
    read_row(&weight, (down ? a->activated : a->x) + row * weight.ins, &rows, row - a->starts[at]);
  }
}

static void read_x(void *data) { read_rows(data, 0); }
static void read_activated(void *data) { read_rows(data, 1); }

// to [rows, inner] = the activation of a panel of gate and of up, both [rows, PANEL].
INLINE void activate(const struct quantised_experts *a, const float *bias, long rows, long panel, const float *gates,
                     const float *ups, float *to) {
  floats limit = all(a->limit);
  for (int n = 0; n < NR; n++) {
    long first = panel * PANEL + n * VEC, count = a->inner - first < VEC ? a->inner - first : VEC;
    if (count <= 0) break;
    floats of_gate = all(0), of_up = all(0);
    if (bias) of_gate = load(bias, first, 0), of_up = load(bias, PANELS(a->inner) + first, 0);
    for (long r = 0; r < rows; r++) {
      floats gate = load(gates, r * PANEL + n * VEC, 0) + of_gate, up = load(ups, r * PANEL + n * VEC, 0) + of_up;
      gate = select(gate > limit, limit, gate);
      up = select(up > limit, limit, select(up < -limit, -limit, up));
      store_some(to + r * a->inner, first, swish_of(gate, a->alpha) * (up + a->shift), count, 0);
    }
  }
}

// An item is an expert and PANEL numbers of gate and of up.
static void activate_experts(void *data) {
  struct quantised_experts *a = data;
  long count = PANELS(a->inner) / PANEL;
  for (struct run run = {0, 0}; has_item(&run, &a->next, a->num_active * count, 2 * a->threads); run.item++) {
    long at = run.item / count, panel = run.item % count;
    struct grouped_weight weight = weight_of(a, 0, at);
    struct grouped_rows all_rows = rows_of(a, at);
    for (long row = 0; row < all_rows.rows; row += ROW_BLOCK) {
      float gates[ROW_BLOCK * PANEL], ups[ROW_BLOCK * PANEL];
      long rows = all_rows.rows - row < ROW_BLOCK ? all_rows.rows - row : ROW_BLOCK;
      multiply_panel(&weight, &all_rows, row, rows, panel, gates);
      multiply_panel(&weight, &all_rows, row, rows, count + panel, ups);
      activate(a, weight.bias, rows, panel, gates, ups, a->activated + (a->starts[at] + row) * a->inner);
    }
  }
}

// An item is an expert and PANEL numbers of its output.
static void project_experts(void *data) {
  struct quantised_experts *a = data;
  long count = PANELS(a->hidden) / PANEL;
  for (struct run run = {0, 0}; has_item(&run, &a->next, a->num_active * count, 2 * a->threads); run.item++) {
    long at = run.item / count, panel = run.item % count;
    struct grouped_weight weight = weight_of(a, 1, at);
    struct grouped_rows all_rows = rows_of(a, at);
    for (long row = 0; row < all_rows.rows; row += ROW_BLOCK) {
      float sums[ROW_BLOCK * PANEL];
      long rows = all_rows.rows - row < ROW_BLOCK ? all_rows.rows - row : ROW_BLOCK;
      multiply_panel(&weight, &all_rows, row, rows, panel, sums);
      write_panel(&weight, rows, panel, sums, a->out + (a->starts[at] + row) * a->hidden);
    }
  }
}

EXPORT void pagewise_quantised_experts(const struct weight *gate_up, const struct weight *down, const int64_t *active,
                                     const int64_t *starts, const float *x, float *activated, float *out, void *inputs,
                                     float *input_scales, int32_t *input_sums, float alpha, float shift, float limit,
                                     long exact, long num_active, long hidden, long inner, long slots, long groups,
                                     long threads) {
  struct quantised_experts a = {gate_up, down, active, starts, x, activated, out, inputs, input_scales, input_sums,
                              alpha, shift, limit, exact, num_active, hidden, inner, slots, groups, threads, 0};
  long rows = starts[num_active], products = rows * hidden * inner;
  run_team(rows * hidden < ALONE_INPUTS ? 1 : threads, read_x, &a);
  a.next = 0;
  run_team(2 * products < ALONE_PRODUCTS ? 1 : threads, activate_experts, &a);
  a.next = 0;
  run_team(rows * inner < ALONE_INPUTS ? 1 : threads, read_activated, &a);
  a.next = 0;
  run_team(products < ALONE_PRODUCTS ? 1 : threads, project_experts, &a);
}
