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
