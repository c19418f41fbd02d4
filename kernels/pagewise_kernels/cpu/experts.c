// Mixtures of experts in float32: an expert multiplies the rows of all tokens that chose it by its packed weights at once.

// As in linear.c: most experts have a row or a few.
#define AHEAD (VEC == 8 ? 256 : 0)
#include "products.h"

// Of elementwise.c and router.c.
void pagewise_rms_norm(const void *x, long x_stride, void *residual, const void *weight, void *out, long rows, long size,
                       float eps, int bf16, long threads);
void pagewise_route(const float *x, long x_stride, const float *packed, const float *bias, const float *correction,
                    float *logits, float *weights, int64_t *chosen, long tokens, long hidden, long experts, long top_k,
                    long groups, long top_groups, long normalise, float scale, long threads);

// What an expert makes of gate and up: gate * sigmoid(alpha * gate) * (up + shift), where neither is beyond the limit.
struct activation {
  float alpha, shift, limit;
};

// A pair is a token and an expert that it chose; pairs are in the order of experts, and of one expert in that of tokens.
struct experts {
  // x [tokens, hidden], each row at x_stride; gate_up [experts][panels of inner][hidden][HALF of gate, HALF of up]; down
  // [experts][panels of hidden][inner][PANEL]; weights [tokens, top_k].
  const float *x, *gate_up, *down, *weights;
  // gate_up_bias [experts][panels of inner][HALF, HALF] and down_bias [experts, hidden], or NULL.
  const float *gate_up_bias, *down_bias;
  struct activation activation;
  // starts [experts + 1]: the first pair of each expert. active [experts]: the experts that have pairs. place [tokens,
  // top_k]: the pair of each choice.
  int64_t *starts, *active, *place;
  // rows [pairs, hidden]: of x first, and then the outputs of the experts. activated [pairs, inner].
  float *rows, *activated, *out;
  long tokens, top_k, hidden, inner, num_active, threads, next;
};

enum { HALF = PANEL / 2 };

static long pieces(long columns, long size) { return (columns + size - 1) / size; }

INLINE floats activation_of(floats gate, floats up, struct activation with) {
  floats limit = all(with.limit);
  gate = select(gate > limit, limit, gate);
  up = select(up > limit, limit, select(up < -limit, -limit, up));
  return swish_of(gate, with.alpha) * (up + with.shift);
}

// An item is an expert, HALF numbers of gate and as many of up.
static void activate(void *data) {
  struct experts *a = data;
  long count = pieces(a->inner, HALF), size = a->hidden * PANEL;
  for (struct run run = {0, 0}; has_item(&run, &a->next, a->num_active * count, 2 * a->threads); run.item++) {
    long expert = a->active[run.item / count], first = run.item % count * HALF, last = a->starts[expert + 1];
    long columns = a->inner - first < HALF ? a->inner - first : HALF, panel = expert * count + run.item % count;
    for (long pair = a->starts[expert]; pair < last; pair += ROW_BLOCK) {
      float both[ROW_BLOCK * PANEL];
      long rows = last - pair < ROW_BLOCK ? last - pair : ROW_BLOCK;
      rows_by_panel(rows, PANEL, a->hidden, a->rows + pair * a->hidden, a->hidden, a->gate_up + panel * size,
                    a->gate_up_bias ? a->gate_up_bias + panel * PANEL : 0, both, PANEL);
      for (long r = 0; r < rows; r++)
        for (long i = 0; i < columns; i += VEC) {
          floats gate = load(both, r * PANEL + i, 0), up = load(both, r * PANEL + HALF + i, 0);
          floats value = activation_of(gate, up, a->activation);
          store_some(a->activated + (pair + r) * a->inner, first + i, value, columns - i < VEC ? columns - i : VEC, 0);
        }
    }
  }
}

// An item is an expert and PANEL numbers of its output.
static void project(void *data) {
  struct experts *a = data;
  long count = pieces(a->hidden, PANEL);
  for (struct run run = {0, 0}; has_item(&run, &a->next, a->num_active * count, 2 * a->threads); run.item++) {
    long expert = a->active[run.item / count], first = run.item % count * PANEL, last = a->starts[expert + 1];
    long columns = a->hidden - first < PANEL ? a->hidden - first : PANEL;
    const float *panel = a->down + (expert * count + run.item % count) * a->inner * PANEL;
    const float *bias = a->down_bias ? a->down_bias + expert * a->hidden + first : 0;
    for (long pair = a->starts[expert]; pair < last; pair += ROW_BLOCK) {
      long rows = last - pair < ROW_BLOCK ? last - pair : ROW_BLOCK;
      rows_by_panel(rows, columns, a->inner, a->activated + pair * a->inner, a->inner, panel, bias,
                    a->rows + pair * a->hidden + first, a->hidden);
    }
  }
}

// An item is a token: its sum has the order of its choices, whatever other tokens there are.
static void add_up(void *data) {
  struct experts *a = data;
  long token;
  while ((token = next_item(&a->next)) < a->tokens) {
    const int64_t *place = a->place + token * a->top_k;
    const float *weights = a->weights + token * a->top_k;
    for (long i = 0; i < a->hidden; i += VEC) {
      long n = a->hidden - i < VEC ? a->hidden - i : VEC;
      floats sum = {};
      for (long k = 0; k < a->top_k; k++) sum += load_some(a->rows + place[k] * a->hidden, i, n, 0) * weights[k];
      store_some(a->out + token * a->hidden, i, sum, n, 0);
    }
  }
}

// Below so many products of a phase, waking a thread costs more than it saves.
enum { ALONE_EXPERTS = 1 << 19 };

static void run_phase(struct experts *a, void (*phase)(void *), long products) {
  a->next = 0;
  run_team(products < ALONE_EXPERTS ? 1 : a->threads, phase, a);
}

// chosen [tokens, top_k]: numbers of experts. scratch: int64 [2 * experts + 1 + pairs], then float [pairs * (hidden +
// inner)]. Returns -1 if a number is of no expert, and else 0.
EXPORT int pagewise_experts(const float *x, long x_stride, const float *gate_up, const float *gate_up_bias,
                            const float *down, const float *down_bias, float alpha, float shift, float limit,
                            const int64_t *chosen, const float *weights, void *scratch, float *out, long tokens,
                            long top_k, long num_experts, long hidden, long inner, long threads) {
  long pairs = tokens * top_k;
  int64_t *starts = scratch, *active = starts + num_experts + 1, *place = active + num_experts;
  float *rows = (float *)(place + pairs), *activated = rows + pairs * hidden;
  struct experts a = {x, gate_up, down, weights, gate_up_bias, down_bias, {alpha, shift, limit}, starts, active, place,
                      rows, activated, out, tokens, top_k, hidden, inner, 0, threads, 0};
  memset(starts, 0, (num_experts + 1) * sizeof(int64_t));
  for (long i = 0; i < pairs; i++) {
    if (chosen[i] < 0 || chosen[i] >= num_experts) return -1;
    starts[chosen[i] + 1]++;
  }
  for (long expert = 0; expert < num_experts; expert++) {
    if (starts[expert + 1]) active[a.num_active++] = expert;
    starts[expert + 1] += starts[expert];
  }
  for (long i = 0; i < pairs; i++) {
    place[i] = starts[chosen[i]]++;
    memcpy(rows + place[i] * hidden, x + i / top_k * x_stride, hidden * sizeof(float));
  }
  // Each start has moved to that of the next expert.
  memmove(starts + 1, starts, num_experts * sizeof(int64_t));
  starts[0] = 0;
  run_phase(&a, activate, pairs * 2 * inner * hidden);
  run_phase(&a, project, pairs * inner * hidden);
  run_phase(&a, add_up, pairs * hidden);
  return 0;
}

// A whole mixture: a norm with a residual, as pagewise_rms_norm says, whose weight is ``norm``, or NULL for none; then its
// router and its experts. scratch: int64 [pairs], that of pagewise_experts, and float [tokens * (hidden + experts) + pairs].
EXPORT void pagewise_mixture(const float *x, long x_stride, float *residual, const float *norm, float eps,
                             const float *packed, const float *bias, const float *correction, const float *gate_up,
                             const float *gate_up_bias, const float *down, const float *down_bias, float alpha, float shift,
                             float limit, int64_t *scratch, float *out, long tokens, long top_k, long groups,
                             long top_groups, long normalise, float scale, long num_experts, long hidden, long inner,
                             long threads) {
  long pairs = tokens * top_k;
  int64_t *own = scratch + pairs;
  float *normed = (float *)(own + 2 * num_experts + 1 + pairs) + pairs * (hidden + inner);
  float *logits = normed + tokens * hidden, *weights = logits + tokens * num_experts;
  if (norm) {
    pagewise_rms_norm(x, x_stride, residual, norm, normed, tokens, hidden, eps, 0, threads);
    x = normed;
    x_stride = hidden;
  }
  pagewise_route(x, x_stride, packed, bias, correction, logits, weights, scratch, tokens, hidden, num_experts, top_k, groups,
                 top_groups, normalise, scale, threads);
  pagewise_experts(x, x_stride, gate_up, gate_up_bias, down, down_bias, alpha, shift, limit, scratch, weights, own, out,
                   tokens, top_k, num_experts, hidden, inner, threads);
}
