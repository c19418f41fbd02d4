// Products of rows with weights in four or eight bits, of which a group of inputs of an output shares a scale.
//
// Rows are quantised to eight bits, with a scale for each group of a row, so that the sum of a group is a whole number.
// The result for a row does not depend on the other rows.
#pragma once

#include "products.h"
#include "weight.h"

enum { MOST_GROUP = 128 };

// Below so many weights times rows, or inputs times rows, waking a thread costs more than it saves.
enum { ALONE_PRODUCTS = 1 << 20, ALONE_INPUTS = 1 << 17 };

// Weights are (code - zero) * scale, or in the last two kinds also code * scale - least.
//
// INT4: codes from 0 to 15. E2M1: numbers of four bits with a sign, two bits of exponent and one of mantissa, whose doubles
// plus E2M1_ZERO are the codes that are computed. STEPS4 and STEPS8: codes from 0 to 15 and from 0 to 255, whose scales
// and leasts may have two factors, one for a span of groups and one for a group.
enum kind { INT4, E2M1, STEPS4, STEPS8 };

enum { SYMMETRIC_ZERO = 8, E2M1_ZERO = 12, E2M1_GROUP = 16 };

// The weights of a linear layer. A slot is an input of the packed weights, of which there are groups * group; order
// [slots]: the input of each slot, -1: a zero; NULL: the inputs in their order, and zeros. codes [panels][words][PANEL]: a
// word has the codes of an output, eight in four bits, of which byte i has that of slot i in its lower half and that of
// slot i + 4 in its upper, or four in eight bits. scales, leasts: float16 [panels][groups / span][PANEL]; those of INT4
// and E2M1 to be multiplied by ``factor``, with a span of one. leasts NULL: there are none; with leasts, ``zero`` is 0.
// steps, least_steps [panels][groups][PANEL]: the second factors; NULL: they are one. zeros [panels][groups][PANEL]; NULL:
// ``zero`` is that of all weights. bias [outs] or NULL.
struct grouped_weight {
  long kind;
  const int32_t *order;
  const uint32_t *codes;
  const uint16_t *scales, *leasts;
  const int8_t *steps, *least_steps;
  const uint8_t *zeros;
  const float *bias;
  float factor;
  long zero, ins, outs, groups, group, span;
};

// The weights of a layer of the kinds INT4_WEIGHT and GROUPED_WEIGHT.
struct grouped_weight grouped_weight_of(const struct weight *w);

// Rows as the product with one weight reads them, quantised or in float32. bytes [groups, rows, group], so that the rows of
// a group do not lie in the same lines of the cache; scales, sums [groups, rows]: the scales times ``factor``, and minus
// the sums, which are multiplied by the zero where it is that of all weights. floats [groups, rows, group] instead, or NULL.
struct grouped_rows {
  int8_t *bytes;
  float *scales;
  int32_t *sums;
  float *floats;
  long rows;
};

// Read row number ``row``, x [ins], and quantise it unless rows are in float32. A NaN or an infinite input makes the whole
// result of the row so.
void read_row(const struct grouped_weight *w, const float *x, const struct grouped_rows *to, long row);

// sums [rows, PANEL] = rows ``first`` and so on, at most ROW_BLOCK, times a panel, without the bias.
void multiply_panel(const struct grouped_weight *w, const struct grouped_rows *x, long first, long rows, long panel,
                    float *sums);

// out [rows, outs] = sums [rows, PANEL] of a panel, plus the bias.
INLINE void write_panel(const struct grouped_weight *w, long rows, long panel, const float *sums, float *out) {
  for (long r = 0; r < rows; r++)
    for (int n = 0; n < NR; n++) {
      long first = panel * PANEL + n * VEC, count = w->outs - first < VEC ? w->outs - first : VEC;
      if (count <= 0) break;
      floats y = load(sums, r * PANEL + n * VEC, 0);
      if (w->bias) y += load_some(w->bias, first, count, 0);
      store_some(out, r * w->outs + first, y, count, 0);
    }
}
