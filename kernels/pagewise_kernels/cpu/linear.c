// Linear layers in float32, whose weights lie packed in panels of PANEL outputs.

// With AVX2 it takes a third of the time of a product with 16 rows away; a single row reads in order as fast as the memory
// gives. With AVX-512 it is of no use, and of harm with 4 rows.
#define AHEAD (VEC == 8 ? 256 : 0)
#include "products.h"

// x [rows, in], each row at x_stride; packed [panels][in][PANEL], zeros behind the last output; bias [outs] or NULL; out
// [rows, outs].
struct linear {
  const float *x, *packed, *bias;
  float *out;
  long rows, in, outs, x_stride, next;
};

// An item is ROW_BLOCK rows times one panel. Of both, what belongs to DEPTH_BLOCK inputs fits into the second level cache.
enum { ROW_BLOCK = 96, DEPTH_BLOCK = 1024 };

static void compute_block(const struct linear *a, long row, long rows, long first) {
  long count = a->outs - first < PANEL ? a->outs - first : PANEL, columns = (count + VEC - 1) / VEC * VEC;
  // Whole vectors are stored. Where these would reach over the end of a row, they go to a block of their own first.
  float own[ROW_BLOCK * PANEL];
  int direct = columns == count;
  float *out = direct ? a->out + row * a->outs + first : own;
  long stride = direct ? a->outs : PANEL;
  if (a->bias)
    for (long r = 0; r < rows; r++) memcpy(out + r * stride, a->bias + first, count * sizeof(float));
  for (long k = 0; k < a->in; k += DEPTH_BLOCK) {
    long depth = a->in - k < DEPTH_BLOCK ? a->in - k : DEPTH_BLOCK;
    const float *panel = a->packed + first * a->in + k * PANEL;
    product(rows, columns, depth, a->x + row * a->x_stride + k, a->x_stride, panel, depth, out, stride, k || a->bias);
  }
  if (!direct)
    for (long r = 0; r < rows; r++)
      memcpy(a->out + (row + r) * a->outs + first, own + r * PANEL, count * sizeof(float));
}

static void compute_blocks(void *data) {
  struct linear *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK, item;
  while ((item = next_item(&a->next)) < panels * blocks) {
    long row = item / panels * ROW_BLOCK, rows = a->rows - row < ROW_BLOCK ? a->rows - row : ROW_BLOCK;
    compute_block(a, row, rows, item % panels * PANEL);
  }
}

// Below so many weights times rows, waking a thread costs more than it saves.
enum { ALONE_LINEAR = 1 << 19 };

EXPORT void pagewise_linear(const float *x, long x_stride, const float *packed, const float *bias, float *out, long rows,
                            long in, long outs, long threads, parallel_fn parallel) {
  struct linear a = {x, packed, bias, out, rows, in, outs, x_stride, 0};
  run_team(parallel, rows * in * outs < ALONE_LINEAR ? 1 : threads, compute_blocks, &a);
}

EXPORT long pagewise_panel(void) { return PANEL; }
