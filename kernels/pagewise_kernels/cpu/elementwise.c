// RMSNorm, with or without adding to a residual before, and SiLU times up: one pass over each row.
#include "vectors.h"

struct rows {
  const void *x;
  void *residual, *out;
  const void *weight;
  long rows, size, x_stride;
  float eps;
  int bf16;
  long threads;
  long counter;
};

// Below so many values, waking a thread costs more than it saves.
enum { ALONE_NORM = 1 << 17, ALONE_SILU = 1 << 16, ROWS_AT_ONCE = 8 };

// out = weight * rounded(x / sqrt(mean(x^2) + eps)), rounded as transformers does; with a residual, x is added to it
// first, and its sum is what is normalised.
INLINE void norm_row(const struct rows *a, long row, int bf16) {
  const void *x = at(a->x, row * a->x_stride, bf16);
  void *residual = a->residual ? (void *)at(a->residual, row * a->size, bf16) : 0;
  void *out = (void *)at(a->out, row * a->size, bf16);
  floats squares = {}, more = {};
  const void *source = residual ? residual : x;
  for (long i = 0; i < a->size; i += VEC) {
    long n = a->size - i < VEC ? a->size - i : VEC;
    floats value = n == VEC ? load(x, i, bf16) : load_some(x, i, n, bf16);
    if (residual) {
      floats old = n == VEC ? load(residual, i, bf16) : load_some(residual, i, n, bf16);
      value = rounded(value + old, bf16);
      if (n == VEC)
        store(residual, i, value, bf16);
      else
        store_some(residual, i, value, n, bf16);
    }
    if (i & VEC)
      more += value * value;
    else
      squares += value * value;
  }
  float scale = 1.0f / __builtin_sqrtf(sum_of(squares + more) / a->size + a->eps);
  for (long i = 0; i < a->size; i += VEC) {
    long n = a->size - i < VEC ? a->size - i : VEC;
    if (n == VEC)
      store(out, i, load(a->weight, i, bf16) * rounded(load(source, i, bf16) * scale, bf16), bf16);
    else
      store_some(out, i, load_some(a->weight, i, n, bf16) * rounded(load_some(source, i, n, bf16) * scale, bf16), n, bf16);
  }
}

INLINE void silu_row(const struct rows *a, long row, int bf16) {
  const void *gate = at(a->x, row * a->x_stride, bf16), *up = at(gate, a->size, bf16);
  void *out = (void *)at(a->out, row * a->size, bf16);
  long i = 0;
  for (; i + VEC <= a->size; i += VEC) store(out, i, silu_mul_of(load(gate, i, bf16), load(up, i, bf16), bf16), bf16);
  long n = a->size - i;
  if (n)
    store_some(out, i, silu_mul_of(load_some(gate, i, n, bf16), load_some(up, i, n, bf16), bf16), n, bf16);
}

#define TEAM_BODY(name, row_kernel)                                                           \
  static void name(void *data) {                                                              \
    struct rows *a = data;                                                                    \
    long start;                                                                               \
    while ((start = next_item(&a->counter) * ROWS_AT_ONCE) < a->rows) {                       \
      long stop = start + ROWS_AT_ONCE < a->rows ? start + ROWS_AT_ONCE : a->rows;            \
      for (long row = start; row < stop; row++) {                                             \
        if (a->bf16)                                                                          \
          row_kernel(a, row, 1);                                                              \
        else                                                                                  \
          row_kernel(a, row, 0);                                                              \
      }                                                                                       \
    }                                                                                         \
  }

TEAM_BODY(norm_rows, norm_row)
TEAM_BODY(silu_rows, silu_row)

EXPORT void pagewise_rms_norm(const void *x, long x_stride, void *residual, const void *weight, void *out, long rows,
                              long size, float eps, int bf16, long threads) {
  struct rows a = {x, residual, out, weight, rows, size, x_stride, eps, bf16, threads, 0};
  run_team(rows * size < ALONE_NORM ? 1 : threads, norm_rows, &a);
}

EXPORT void pagewise_silu_mul(const void *gate_up, long stride, void *out, long rows, long size, int bf16, long threads) {
  struct rows a = {gate_up, 0, out, 0, rows, size, stride, 0, bf16, threads, 0};
  run_team(rows * size < ALONE_SILU ? 1 : threads, silu_rows, &a);
}
