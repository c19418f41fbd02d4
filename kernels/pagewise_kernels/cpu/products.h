// Small matrix products in float32, whose right side lies packed in panels, and what packs keys and values.
#pragma once

#include "vectors.h"

// A block of MR rows times NR vectors is summed in registers: of 32, or of 16 on x86 without AVX-512.
#if VEC == 16 || defined(__aarch64__)
#define MR 6
#define NR 4
#else
#define MR 6
#define NR 2
#endif
enum { PANEL = NR * VEC };

#define PANELS(n) (((n) + PANEL - 1) / PANEL * PANEL)

// So many steps of the depth ahead, the right side is fetched into the second level cache: 0 where it lies in caches.
#ifndef AHEAD
#define AHEAD 0
#endif

// c[m][n] (+)= sum over k of a[m][k] * b[k][n], for mr rows and nr vectors of columns; b is one panel.
INLINE void product_block(int mr, int nr, long depth, const float *a, long lda, const float *b, float *c, long ldc,
                          int add) {
  floats sums[MR][NR];
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < nr; n++) sums[m][n] = add ? load(c + m * ldc, n * VEC, 0) : all(0);
  for (long k = 0; k < depth; k++) {
    floats right[NR];
    if (AHEAD && mr > 1)
      for (int n = 0; n < nr * VEC; n += 16) __builtin_prefetch(b + (k + AHEAD) * PANEL + n, 0, 2);
    for (int n = 0; n < nr; n++) right[n] = load(b + k * PANEL, n * VEC, 0);
    for (int m = 0; m < mr; m++) {
      floats left = all(a[m * lda + k]);
      for (int n = 0; n < nr; n++) sums[m][n] += left * right[n];
    }
  }
  for (int m = 0; m < mr; m++)
    for (int n = 0; n < nr; n++) store(c + m * ldc, n * VEC, sums[m][n], 0);
}

INLINE void product_rows(int nr, long rows, long depth, const float *a, long lda, const float *b, float *c, long ldc,
                         int add) {
  long m = 0;
  for (; m + MR <= rows; m += MR) product_block(MR, nr, depth, a + m * lda, lda, b, c + m * ldc, ldc, add);
  a += m * lda, c += m * ldc;
  switch (rows - m) {
    case 5: product_block(5, nr, depth, a, lda, b, c, ldc, add); break;
    case 4: product_block(4, nr, depth, a, lda, b, c, ldc, add); break;
    case 3: product_block(3, nr, depth, a, lda, b, c, ldc, add); break;
    case 2: product_block(2, nr, depth, a, lda, b, c, ldc, add); break;
    case 1: product_block(1, nr, depth, a, lda, b, c, ldc, add); break;
  }
}

INLINE void product_of(long rows, long columns, long depth, const float *a, long lda, const float *b, long panel_depth,
                    float *c, long ldc, int add) {
  for (long n = 0; n < columns; n += PANEL, b += panel_depth * PANEL) {
    switch ((columns - n) / VEC) {
      case 1: product_rows(1, rows, depth, a, lda, b, c + n, ldc, add); break;
#if NR > 2
      case 2: product_rows(2, rows, depth, a, lda, b, c + n, ldc, add); break;
      case 3: product_rows(3, rows, depth, a, lda, b, c + n, ldc, add); break;
#endif
      default: product_rows(NR, rows, depth, a, lda, b, c + n, ldc, add);
    }
  }
}

// c [rows, columns] (+)= a [rows, depth] b [depth, columns]: columns is a multiple of VEC, and b has a panel of
// [panel_depth, PANEL] for each PANEL columns.
static void product(long rows, long columns, long depth, const float *a, long lda, const float *b, long panel_depth,
                    float *c, long ldc, int add) {
  // A constant ``add``: as a variable it would make loads with masks of each block, which cost 6% at a depth of 64.
  if (add)
    product_of(rows, columns, depth, a, lda, b, panel_depth, c, ldc, 1);
  else
    product_of(rows, columns, depth, a, lda, b, panel_depth, c, ldc, 0);
}

// Of so many rows and one panel, what belongs to DEPTH_BLOCK inputs fits into the second level cache.
enum { ROW_BLOCK = 96, DEPTH_BLOCK = 1024 };

// out [rows, count] = x [rows, in] times a panel [in, PANEL], plus bias [count] unless it is NULL: at most ROW_BLOCK rows.
INLINE void rows_by_panel(long rows, long count, long in, const float *x, long x_stride, const float *panel,
                          const float *bias, float *out, long out_stride) {
  long columns = (count + VEC - 1) / VEC * VEC;
  // Whole vectors are stored. Where these would reach over the end of a row, they go to a block of their own first.
  float own[ROW_BLOCK * PANEL];
  int direct = columns == count;
  float *to = direct ? out : own;
  long stride = direct ? out_stride : PANEL;
  if (bias)
    for (long r = 0; r < rows; r++) memcpy(to + r * stride, bias, count * sizeof(float));
  for (long k = 0; k < in; k += DEPTH_BLOCK) {
    long depth = in - k < DEPTH_BLOCK ? in - k : DEPTH_BLOCK;
    product(rows, columns, depth, x + k, x_stride, panel + k * PANEL, depth, to, stride, k || bias);
  }
  if (!direct)
    for (long r = 0; r < rows; r++) memcpy(out + r * out_stride, own + r * PANEL, count * sizeof(float));
}

// Transpose VEC vectors: interleaving the first half of them with the second, log2(VEC) times, does it.
INLINE void transpose(floats *x) {
  for (int step = 1; step < VEC; step *= 2) {
    floats y[VEC];
    for (int i = 0; i < VEC / 2; i++) {
      y[2 * i] = low_halves(x[i], x[i + VEC / 2]);
      y[2 * i + 1] = high_halves(x[i], x[i + VEC / 2]);
    }
    for (int i = 0; i < VEC; i++) x[i] = y[i];
  }
}

// Return the maxima of VEC vectors in one, likewise.
INLINE floats maxima_of(floats *x) {
  for (int count = VEC; count > 1; count /= 2)
    for (int i = 0; i < count / 2; i++)
      x[i] = larger(low_halves(x[i], x[i + count / 2]), high_halves(x[i], x[i + count / 2]));
  return x[0];
}

// Pack n keys, of which m elements are left, as VEC columns. ``n`` and ``m`` are VEC and constants where they can be: then
// everything stays in registers.
INLINE void pack_columns(const void **keys, long d, long n, long m, float *column, int bf16) {
  floats x[VEC];
  for (long i = 0; i < VEC; i++)
    x[i] = i >= n ? all(0) : m == VEC ? load(keys[i], d, bf16) : load_some(keys[i], d, m, bf16);
  transpose(x);
  for (long i = 0; i < m; i++) store(column + (d + i) * PANEL, 0, x[i], 0);
}

// Pack keys [count][dim], found at ``keys``, as the right side [dim, count] of a product. Columns up to the next multiple
// of VEC become zeros.
INLINE void pack_keys(const void **keys, long count, long dim, float *packed, long panel_depth, int bf16) {
  for (long t = 0; t < count; t += VEC) {
    float *column = packed + t / PANEL * panel_depth * PANEL + t % PANEL;
    long n = count - t < VEC ? count - t : VEC, d = 0;
    for (; d + VEC <= dim && n == VEC; d += VEC) pack_columns(keys + t, d, VEC, VEC, column, bf16);
    for (; d < dim; d += VEC) pack_columns(keys + t, d, n, dim - d < VEC ? dim - d : VEC, column, bf16);
  }
}

// Pack values [count][dim] as the right side [count, dim] of a product.
INLINE void pack_values(const void **values, long count, long dim, float *packed, long panel_depth, int bf16) {
  for (long d = 0; d < dim; d += VEC) {
    float *to = packed + d / PANEL * panel_depth * PANEL + d % PANEL;
    if (dim - d >= VEC)
      for (long t = 0; t < count; t++) store(to + t * PANEL, 0, load(values[t], d, bf16), 0);
    else
      for (long t = 0; t < count; t++) store(to + t * PANEL, 0, load_some(values[t], d, dim - d, bf16), 0);
  }
}
