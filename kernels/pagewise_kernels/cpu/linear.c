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
  long rows, in, outs, x_stride, threads, next;
};

// An item is ROW_BLOCK rows times one panel.
static void compute_blocks(void *data) {
  struct linear *a = data;
  long panels = (a->outs + PANEL - 1) / PANEL, blocks = (a->rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for (struct run run = {0, 0}; has_item(&run, &a->next, panels * blocks, a->threads); run.item++) {
    long row = run.item / panels * ROW_BLOCK, rows = a->rows - row < ROW_BLOCK ? a->rows - row : ROW_BLOCK;
    long first = run.item % panels * PANEL, count = a->outs - first < PANEL ? a->outs - first : PANEL;
    rows_by_panel(rows, count, a->in, a->x + row * a->x_stride, a->x_stride, a->packed + first * a->in,
                  a->bias ? a->bias + first : 0, a->out + row * a->outs + first, a->outs);
  }
}

// Below so many weights times rows, waking a thread costs more than it saves.
enum { ALONE_LINEAR = 1 << 19 };

EXPORT void pagewise_linear(const float *x, long x_stride, const float *packed, const float *bias, float *out, long rows,
                            long in, long outs, long threads) {
  struct linear a = {x, packed, bias, out, rows, in, outs, x_stride, threads, 0};
  run_team(rows * in * outs < ALONE_LINEAR ? 1 : threads, compute_blocks, &a);
}

EXPORT long pagewise_panel(void) { return PANEL; }
