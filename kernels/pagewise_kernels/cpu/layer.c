// The two halves of a decoder layer of Llama's structure, each as one call, so that a step does not go back to Python
// between a dozen operations of some microseconds. Operations and results are the same as by single calls.
#include <stddef.h>

#include "attention.h"
#include "weight.h"

// Of linear.c, linear_int8.c, elementwise.c and attention.c.
void pagewise_linear(const float *x, long x_stride, const float *packed, const float *bias, float *out, long rows, long in,
                     long outs, long threads);
void pagewise_linear_int8(const float *x, long x_stride, const int8_t *packed, const float *scales, const int32_t *offsets,
                          const float *bias, float *out, uint8_t *inputs, float *row_scales, long rows, long in, long outs,
                          long threads);
void pagewise_rms_norm(const void *x, long x_stride, void *residual, const void *weight, void *out, long rows, long size,
                       float eps, int bf16, long threads);
void pagewise_silu_mul(const void *gate_up, long stride, void *out, long rows, long size, int bf16, long threads);
int pagewise_attend(const struct attention *a);

// norm [hidden]: of an RMSNorm with eps before the first of two linear layers.
struct half_layer {
  const float *norm;
  float eps;
  struct weight first, second;
};

// Groups and slots of the quantised inputs of a row, which have a scale and a sum for each group.
static long groups_of(const struct weight *w) { return w->kind == FLOAT32 ? 0 : w->numbers[0]; }
static long slots_of(const struct weight *w) { return w->kind == FLOAT32 ? 0 : w->numbers[0] * w->numbers[1]; }

static long whole_lines(long bytes) { return (bytes + 63) / 64 * 64; }

static void *take(char **scratch, long bytes) {
  void *taken = *scratch;
  *scratch += whole_lines(bytes);
  return taken;
}

static long scratch_of(const struct weight *w, long rows) {
  return whole_lines(slots_of(w) * rows) + 2 * whole_lines(groups_of(w) * rows * sizeof(float));
}

// out [rows, outs] = x [rows, ins] times the weight.
static void multiply(const struct weight *w, const float *x, float *out, char *scratch, long rows, long threads) {
  void *inputs = take(&scratch, slots_of(w) * rows);
  float *scales = take(&scratch, groups_of(w) * rows * sizeof(float));
  int32_t *sums = take(&scratch, groups_of(w) * rows * sizeof(float));
  const void *const *p = w->parts;
  switch (w->kind) {
    case FLOAT32:
      pagewise_linear(x, w->ins, p[0], p[1], out, rows, w->ins, w->outs, threads);
      break;
    case INT8_WEIGHT:
      pagewise_linear_int8(x, w->ins, p[0], p[1], p[2], p[3], out, inputs, scales, rows, w->ins, w->outs, threads);
      break;
    default:
      pagewise_linear_grouped(x, w->ins, w, out, inputs, scales, sums, 0, rows, threads);
  }
}

// Bytes of scratch for rows: the results between the operations, and quantised inputs of one linear layer.
EXPORT long pagewise_half_layer_scratch(const struct half_layer *l, long rows) {
  long quantised = greater(scratch_of(&l->first, rows), scratch_of(&l->second, rows));
  return quantised + whole_lines(l->first.ins * rows * sizeof(float)) + whole_lines(l->first.outs * rows * sizeof(float)) +
         whole_lines(l->second.ins * rows * sizeof(float));
}

// Add x to the residual, unless that is NULL; out [rows, outs of first] = the linear layer ``first`` of its norm.
static float *project_norm(const struct half_layer *l, const float *x, float *residual, char **scratch, char *quantised,
                           long rows, long threads) {
  float *normed = take(scratch, l->first.ins * rows * sizeof(float));
  float *out = take(scratch, l->first.outs * rows * sizeof(float));
  pagewise_rms_norm(x, l->first.ins, residual, l->norm, normed, rows, l->first.ins, l->eps, 0, threads);
  multiply(&l->first, normed, out, quantised, rows, threads);
  return out;
}

static char *behind_quantised(const struct half_layer *l, char *scratch, long rows) {
  return scratch + greater(scratch_of(&l->first, rows), scratch_of(&l->second, rows));
}

// Attention, with ``first`` for Q, K and V. ``layer`` has the pool and the shape, ``step`` the arguments that a step's layers share.
// Returns as pagewise_attend.
EXPORT int pagewise_attention_half(const struct half_layer *l, const struct attention *layer, const struct attention *step,
                                   const float *cos, const float *sin, const float *x, float *residual, float *out,
                                   char *scratch, long rows, long threads) {
  char *quantised = scratch;
  scratch = behind_quantised(l, scratch, rows);
  float *qkv = project_norm(l, x, residual, &scratch, quantised, rows, threads);
  float *attended = take(&scratch, l->second.ins * rows * sizeof(float));
  struct attention a = *layer;
  // From the slots up to the members of prefixes, all is of the step.
  memcpy(&a.slots, &step->slots, offsetof(struct attention, heads) - offsetof(struct attention, slots));
  if (a.window || a.attention_chunk) a.prefixes = 0;  // windows of equal lengths begin at different tokens
  a.q = qkv, a.k = qkv + a.heads * a.dim, a.v = qkv + (a.heads + a.kv_heads) * a.dim, a.out = attended;
  a.q_token = a.k_token = a.v_token = l->first.outs;
  a.q_head = a.k_head = a.v_head = a.dim;
  a.cos = cos, a.sin = sin, a.threads = threads;
  if (pagewise_attend(&a)) return -1;
  multiply(&l->second, attended, out, quantised, rows, threads);
  return 0;
}

// The gated MLP, with ``first`` for gate and up.
EXPORT void pagewise_mlp_half(const struct half_layer *l, const float *x, float *residual, float *out, char *scratch,
                              long rows, long threads) {
  char *quantised = scratch;
  scratch = behind_quantised(l, scratch, rows);
  float *gate_up = project_norm(l, x, residual, &scratch, quantised, rows, threads);
  float *activated = take(&scratch, l->second.ins * rows * sizeof(float));
  pagewise_silu_mul(gate_up, l->first.outs, activated, rows, l->second.ins, 0, threads);
  multiply(&l->second, activated, out, quantised, rows, threads);
}

EXPORT long pagewise_sizeof_half_layer(void) { return sizeof(struct half_layer); }
