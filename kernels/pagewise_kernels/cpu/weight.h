// A linear layer of any kind, as Python describes it: ``WeightArguments`` of library.py.
#pragma once

#include <stdint.h>

enum weight_kind { FLOAT32, INT8_WEIGHT, INT4_WEIGHT, GROUPED_WEIGHT };

// parts: of FLOAT32 and INT8_WEIGHT in the order of the arguments of their operations, of others as ``grouped_weight_of``
// reads them. The first two numbers are the number and the size of groups of inputs, except of FLOAT32.
struct weight {
  int64_t kind, ins, outs;
  const void *parts[6];
  int64_t numbers[5];
  float factor;
};

// Of linear_grouped.c: the product of rows with a weight of the last two kinds.
void pagewise_linear_grouped(const float *x, long x_stride, const struct weight *weight, float *out, void *inputs,
                             float *input_scales, int32_t *input_sums, long exact, long rows, long threads);
