// Decoder layers of Llama's structure, any number of them as one call, so that a step does not go back to Python between
// operations of some microseconds. Operations and results are the same as by single calls.
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

// Half of a decoder layer. norm [hidden]: of an RMSNorm with eps before the first of two linear layers. attention: the pool
// and the shape of attention between them; NULL: the half is a gated MLP.
struct half_layer {
  const float *norm;
  float eps;
  struct weight first, second;
  const struct attention *attention;
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

// Bytes that hold the quantised inputs of either linear layer.
static long quantised_bytes(const struct half_layer *l, long rows) {
  return greater(scratch_of(&l->first, rows), scratch_of(&l->second, rows));
}

// Bytes of scratch for rows: the results between the operations, and quantised inputs of one linear layer. Halves have it
// one after the other.
EXPORT long pagewise_half_layers_scratch(const struct half_layer *halves, long count, long rows) {
  long most = 0;
  for (const struct half_layer *l = halves; l < halves + count; l++) {
    long floats_of_row[] = {l->first.ins, l->first.outs, l->second.ins}, bytes = quantised_bytes(l, rows);
    for (int i = 0; i < 3; i++) bytes += whole_lines(floats_of_row[i] * rows * sizeof(float));
    most = greater(most, bytes);
  }
  return most;
}

// Attention of qkv [rows, heads + 2 kv_heads, dim] to out. ``layer`` has the pool and the shape, ``step`` the arguments that
// a step's layers share. Returns as pagewise_attend.
static int attend(const struct attention *layer, const struct attention *step, const float *cos, const float *sin,
                  float *qkv, float *out, long threads) {
  struct attention a = *layer;
  // From the slots up to the members of prefixes, all is of the step.
  memcpy(&a.slots, &step->slots, offsetof(struct attention, heads) - offsetof(struct attention, slots));
  if (a.window || a.attention_chunk) a.prefixes = 0;  // windows of equal lengths begin at different tokens
  a.q = qkv, a.k = qkv + a.heads * a.dim, a.v = qkv + (a.heads + a.kv_heads) * a.dim, a.out = out;
  a.q_token = a.k_token = a.v_token = (a.heads + 2 * a.kv_heads) * a.dim;
  a.q_head = a.k_head = a.v_head = a.dim;
  a.cos = cos, a.sin = sin, a.threads = threads;
  return pagewise_attend(&a);
}

// Halves of decoder layers, one behind the other. residual [rows, hidden]: each half adds to it the result of the half
// before, and the first one ``added``, unless that is NULL. out [rows, hidden]: the result of the last half. Returns as
// pagewise_attend.
EXPORT int pagewise_half_layers(const struct half_layer *halves, long count, const struct attention *step, const float *cos,
                                const float *sin, float *residual, const float *added, float *out, char *scratch, long rows,
                                long threads) {
  for (const struct half_layer *l = halves; l < halves + count; l++) {
    char *quantised = scratch, *rest = scratch + quantised_bytes(l, rows);
    float *normed = take(&rest, l->first.ins * rows * sizeof(float));
    float *first = take(&rest, l->first.outs * rows * sizeof(float));
    float *between = take(&rest, l->second.ins * rows * sizeof(float));
    pagewise_rms_norm(added ? added : residual, l->first.ins, added ? residual : NULL, l->norm, normed, rows, l->first.ins,
                      l->eps, 0, threads);
    multiply(&l->first, normed, first, quantised, rows, threads);
    if (!l->attention) {
      pagewise_silu_mul(first, l->first.outs, between, rows, l->second.ins, 0, threads);
    } else if (attend(l->attention, step, cos, sin, first, between, threads)) {
      return -1;
    }
    multiply(&l->second, between, out, quantised, rows, threads);
    added = out;
  }
  return 0;
}

EXPORT long pagewise_sizeof_half_layer(void) { return sizeof(struct half_layer); }
