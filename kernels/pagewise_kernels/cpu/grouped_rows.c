// Products of rows with weights in four or eight bits: see grouped_rows.h.
#include "grouped_rows.h"
#include "input_groups.h"

// The codes of SLOTS slots are read at once. A block of so many rows times NR vectors of outputs is summed in registers.
// From TILE_ROWS rows on, the codes of a group are unpacked once for all rows.
enum { SLOTS = 8, BLOCK_ROWS = 4, TILE_ROWS = VEC == 16 ? 12 : 9 };

// Where a loop over the rows or the vectors of a block stays one, their sums lie in memory.
#define UNROLLED _Pragma("unroll")

// So many bytes ahead, codes are fetched into the first level cache: the processor alone begins too late.
enum { CODES_AHEAD = 4096 };

// Where codes are read from: four bits, numbers in e2m1, eight bits, the lower or the upper halves of eight bits, or a tile
// of codes that have been unpacked to eight bits each.
enum source { FOURS, NUMBERS, EIGHTS, LOWER, UPPER, TILE };

struct grouped_weight grouped_weight_of(const struct weight *w) {
  const void *const *p = w->parts;
  const int64_t *n = w->numbers;
  if (w->kind == INT4_WEIGHT)
    return (struct grouped_weight){
        .kind = n[2] ? E2M1 : INT4, .order = p[0], .codes = p[1], .scales = p[2], .zeros = p[3], .bias = p[4],
        .factor = w->factor, .zero = n[2] ? E2M1_ZERO : SYMMETRIC_ZERO, .ins = w->ins, .outs = w->outs, .groups = n[0],
        .group = n[1], .span = 1};
  return (struct grouped_weight){
      .kind = n[3] == 8 ? STEPS8 : STEPS4, .codes = p[0], .scales = p[1], .steps = p[2], .leasts = p[3],
      .least_steps = p[4], .bias = p[5], .factor = w->factor, .zero = n[4], .ins = w->ins, .outs = w->outs, .groups = n[0],
      .group = n[1], .span = n[2]};
}

// to [group] = the inputs of a group of a row, x [ins], in the order of the slots.
static void read_group(const struct grouped_weight *w, const float *x, long g, float *to) {
  long first = g * w->group;
  if (w->order) {
    for (long k = 0; k < w->group; k++) to[k] = w->order[first + k] < 0 ? 0 : x[w->order[first + k]];
  } else {
    long given = w->ins - first < w->group ? w->ins - first : w->group;
    memcpy(to, x + first, given * sizeof(float));
    memset(to + given, 0, (w->group - given) * sizeof(float));
  }
}

void read_row(const struct grouped_weight *w, const float *x, const struct grouped_rows *to, long row) {
  for (long g = 0; g < w->groups; g++) {
    float copied[MOST_GROUP], scale;
    int32_t sum;
    long at = g * to->rows + row;
    if (to->floats) {
      read_group(w, x, g, to->floats + at * w->group);
      continue;
    }
    int whole = !w->order && (g + 1) * w->group <= w->ins;
    if (!whole) read_group(w, x, g, copied);
    quantise_inputs(whole ? x + g * w->group : copied, w->group, to->bytes + at * w->group, &scale, &sum);
    to->scales[at] = scale * w->factor;
    to->sums[at] = w->zeros || w->leasts ? -sum : -sum * (int32_t)w->zero;
  }
}

// Of each byte of four bits: the double of its number in e2m1, plus E2M1_ZERO.
INLINE words doubled_e2m1(words codes) {
  static const uint8_t table[64] __attribute__((aligned(64))) = {
      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if VEC == 16
  return (words)_mm512_shuffle_epi8(_mm512_load_si512(table), (__m512i)codes);
#elif VEC == 8
  return (words)_mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)table), (__m256i)codes);
#elif defined(__x86_64__)
  return (words)_mm_shuffle_epi8(_mm_load_si128((const __m128i *)table), (__m128i)codes);
#else
  return (words)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#endif
}

// Where the whole codes of a kind are read from.
INLINE int source_of(int kind) { return kind == E2M1 ? NUMBERS : kind == STEPS8 ? EIGHTS : FOURS; }

// Words of codes of an output in so many slots.
INLINE long words_of(int source, long slots) { return source <= NUMBERS ? slots / SLOTS : slots / 4; }

// The codes of SLOTS slots of VEC outputs: bytes of the slots 0 to 3, and of 4 to 7.
INLINE void read_codes(int source, const uint32_t *codes, words *low, words *high) {
  if (source != TILE) __builtin_prefetch((const char *)codes + CODES_AHEAD);
  if (source <= NUMBERS) {
    words both = load_words(codes);
    *low = both & 0x0f0f0f0f, *high = both >> 4 & 0x0f0f0f0f;
    if (source == NUMBERS) *low = doubled_e2m1(*low), *high = doubled_e2m1(*high);
    return;
  }
  if (source != TILE) __builtin_prefetch((const char *)(codes + PANEL) + CODES_AHEAD);
  int shift = source == UPPER ? 4 : 0;
  words bits = (words){} + (source == LOWER || source == UPPER ? 0x0f0f0f0f : 0xffffffff);
  *low = load_words(codes) >> shift & bits, *high = load_words(codes + PANEL) >> shift & bits;
}

// sums [mr][NR] += ``depth`` slots of a panel's codes times bytes [mr] of rows. Without VNNI, the sums of so many slots have
// to fit into 16 bits.
INLINE void add_products(int source, int mr, long depth, const uint32_t *codes, const int8_t *bytes, long stride,
                         ints sums[][NR]) {
#if defined(__AVX512VNNI__)
  ints(*held)[NR] = sums;
#else
  partial held[BLOCK_ROWS][NR];
  memset(held, 0, sizeof(held));
#endif
  for (long k = 0; k < depth; k += SLOTS, codes += words_of(source, SLOTS) * PANEL) {
    words read[2][NR];
    UNROLLED for (int n = 0; n < NR; n++) read_codes(source, codes + n * VEC, &read[0][n], &read[1][n]);
    UNROLLED for (int half = 0; half < 2; half++)
      UNROLLED for (int m = 0; m < mr; m++)
        UNROLLED for (int n = 0; n < NR; n++)
          held[m][n] = add_codes(held[m][n], read[half][n], bytes + m * stride + k + half * SLOTS / 2);
  }
#if !defined(__AVX512VNNI__)
  UNROLLED for (int m = 0; m < mr; m++)
    UNROLLED for (int n = 0; n < NR; n++) sums[m][n] += sum_partial(held[m][n]);
#endif
}

INLINE ints zeros_of(const uint8_t *zeros) {
  uint8_t bytes __attribute__((vector_size(VEC)));
  memcpy(&bytes, zeros, VEC);
  return __builtin_convertvector(bytes, ints);
}

INLINE int has_leasts(const struct grouped_weight *w, int kind) { return kind >= STEPS4 && w->leasts; }

// sums [mr][NR] = minus the zeros of a panel times the sums of a group's inputs, of each row.
INLINE void begin_sums(const struct grouped_weight *w, int kind, int mr, const int32_t *of_inputs, long at,
                       ints sums[][NR]) {
  if (kind == INT4 && w->zeros) {
    UNROLLED for (int n = 0; n < NR; n++) {
      ints zeros = zeros_of(w->zeros + at + n * VEC);
      UNROLLED for (int m = 0; m < mr; m++) sums[m][n] = zeros * of_inputs[m];
    }
  } else {
    UNROLLED for (int m = 0; m < mr; m++)
      UNROLLED for (int n = 0; n < NR; n++) sums[m][n] = (ints){} + (has_leasts(w, kind) ? 0 : of_inputs[m]);
  }
}

// A group of a panel: the index of its steps and zeros, that of its scales, how many groups of its span are left, its
// codes, and its inputs.
struct place {
  long of_group, of_span, left;
  const uint32_t *codes;
  const int8_t *bytes;
  const float *scales;
  const int32_t *sums;
};

// The slots of a group: a constant where it can be.
INLINE long size_of(const struct grouped_weight *w, int kind) { return kind == E2M1 ? E2M1_GROUP : w->group; }

INLINE long words_of_group(const struct grouped_weight *w, int kind) {
  return size_of(w, kind) / (kind == STEPS8 ? 4 : SLOTS) * PANEL;
}

INLINE struct place first_place(const struct grouped_weight *w, const struct grouped_rows *x, int kind, long row,
                                long panel) {
  long spans = kind < STEPS4 ? w->groups : w->groups / w->span, size = size_of(w, kind);
  return (struct place){panel * w->groups * PANEL, panel * spans * PANEL, w->span,
                        w->codes + panel * w->groups * words_of_group(w, kind), x->bytes + row * size, x->scales + row,
                        x->sums + row};
}

INLINE struct place next_place(const struct grouped_weight *w, const struct grouped_rows *x, int kind, struct place p) {
  int next_span = kind < STEPS4 || !--p.left;
  if (next_span) p.of_span += PANEL, p.left = w->span;
  p.of_group += PANEL, p.codes += words_of_group(w, kind);
  p.bytes += x->rows * size_of(w, kind), p.scales += x->rows, p.sums += x->rows;
  return p;
}

// The scales of VEC outputs in a group, or the leasts.
INLINE floats scales_of(int kind, const uint16_t *scales, const int8_t *steps, long of_span, long of_group) {
  floats found = from_float16(scales + of_span);
  if (kind < STEPS4 || !steps) return found;
  int8_t bytes __attribute__((vector_size(VEC)));
  memcpy(&bytes, steps + of_group, VEC);
  return found * __builtin_convertvector(bytes, floats);
}

// The scales of a panel in a group, and its leasts if there are any.
INLINE void read_scales(const struct grouped_weight *w, int kind, const struct place *p, floats *scales, floats *leasts) {
  UNROLLED for (int n = 0; n < NR; n++) {
    long of_group = p->of_group + n * VEC, of_span = p->of_span + n * VEC;
    scales[n] = scales_of(kind, w->scales, w->steps, of_span, of_group);
    if (has_leasts(w, kind)) leasts[n] = scales_of(kind, w->leasts, w->least_steps, of_span, of_group);
  }
}

// So many slots are summed in 16 bits: a product is at most 15 * 127, or 24 * 127 with e2m1, and a number in 16 bits has
// half of a word's products. Groups with steps have at most 32 slots.
INLINE long depth_of(int kind, long group) {
#if defined(__AVX512VNNI__)
  return (void)kind, group;
#else
  return kind == INT4 ? 32 : kind == E2M1 ? 16 : group;
#endif
}

// totals [mr][PANEL] += a group of mr rows from ``row`` on times a panel, whose codes are those of the weight or a tile.
INLINE void add_group(const struct grouped_weight *w, int kind, int tiled, int mr, struct place p, long row,
                      const uint32_t *codes, const floats *scales, const floats *leasts, float *totals) {
  long size = size_of(w, kind);
  const int8_t *bytes = p.bytes + row * size;
  ints sums[BLOCK_ROWS][NR];
  begin_sums(w, kind, mr, p.sums + row, p.of_group, sums);
#if !defined(__AVX512VNNI__)
  if (kind == STEPS8) {
    ints upper[BLOCK_ROWS][NR];
    memset(upper, 0, sizeof(upper));
    add_products(tiled ? TILE : UPPER, mr, size, tiled ? codes + size / 4 * PANEL : codes, bytes, size, upper);
    UNROLLED for (int m = 0; m < mr; m++)
      UNROLLED for (int n = 0; n < NR; n++) sums[m][n] += upper[m][n] * 16;
    add_products(tiled ? TILE : LOWER, mr, size, codes, bytes, size, sums);
  } else
#endif
  {
    int source = tiled ? TILE : source_of(kind);
    long depth = depth_of(kind, size);
    for (long k = 0; k < size; k += depth)
      add_products(source, mr, depth, codes + words_of(source, k) * PANEL, bytes + k, size, sums);
  }
  float of_leasts[BLOCK_ROWS];
  UNROLLED for (int m = 0; m < mr && has_leasts(w, kind); m++) of_leasts[m] = p.scales[row + m] * p.sums[row + m];
  UNROLLED for (int n = 0; n < NR; n++)
    UNROLLED for (int m = 0; m < mr; m++) {
      floats scale = scales[n] * p.scales[row + m], total = load(totals, m * PANEL + n * VEC, 0);
      total += __builtin_convertvector(sums[m][n], floats) * scale;
      if (has_leasts(w, kind)) total += leasts[n] * of_leasts[m];
      store(totals, m * PANEL + n * VEC, total, 0);
    }
}

// sums [mr, PANEL] = rows times a panel, group by group.
INLINE void multiply_rows(const struct grouped_weight *w, const struct grouped_rows *x, int kind, int mr, long row,
                          long panel, float *sums) {
  struct place p = first_place(w, x, kind, row, panel);
  float totals[BLOCK_ROWS * PANEL];
  memset(totals, 0, sizeof(totals));
  for (long g = 0; g < w->groups; g++, p = next_place(w, x, kind, p)) {
    floats scales[NR], leasts[NR];
    read_scales(w, kind, &p, scales, leasts);
    add_group(w, kind, 0, mr, p, 0, p.codes, scales, leasts, totals);
  }
  memcpy(sums, totals, mr * PANEL * sizeof(float));
}

// tile [slots / 4][PANEL] = the codes of a group in eight bits.
INLINE void unpack_codes(int source, long slots, const uint32_t *codes, uint32_t *tile) {
  for (long k = 0; k < slots; k += SLOTS, codes += words_of(source, SLOTS) * PANEL, tile += 2 * PANEL)
    for (int n = 0; n < NR; n++) {
      words low, high;
      read_codes(source, codes + n * VEC, &low, &high);
      memcpy(tile + n * VEC, &low, sizeof(low));
      memcpy(tile + PANEL + n * VEC, &high, sizeof(high));
    }
}

// sums [rows, PANEL] = rows times a panel, group by group, so that memory is read while all rows compute.
INLINE void multiply_tiles(const struct grouped_weight *w, const struct grouped_rows *x, int kind, long first, long rows,
                           long panel, float *sums) {
  uint32_t tile[MOST_GROUP / 4 * PANEL] __attribute__((aligned(64)));
  struct place p = first_place(w, x, kind, first, panel);
  long size = size_of(w, kind);
  memset(sums, 0, rows * PANEL * sizeof(float));
  for (long g = 0; g < w->groups; g++, p = next_place(w, x, kind, p)) {
#if defined(__AVX512VNNI__)
    unpack_codes(source_of(kind), size, p.codes, tile);
#else
    unpack_codes(kind == E2M1 ? NUMBERS : kind == STEPS8 ? LOWER : FOURS, size, p.codes, tile);
    if (kind == STEPS8) unpack_codes(UPPER, size, p.codes, tile + size / 4 * PANEL);
#endif
    floats scales[NR], leasts[NR];
    read_scales(w, kind, &p, scales, leasts);
    long r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS)
      add_group(w, kind, 1, BLOCK_ROWS, p, r, tile, scales, leasts, sums + r * PANEL);
    for (; r + 2 <= rows; r += 2) add_group(w, kind, 1, 2, p, r, tile, scales, leasts, sums + r * PANEL);
    if (r < rows) add_group(w, kind, 1, 1, p, r, tile, scales, leasts, sums + r * PANEL);
  }
}

INLINE void multiply_kind(const struct grouped_weight *w, const struct grouped_rows *x, int kind, long first, long rows,
                          long panel, float *sums) {
  if (rows >= TILE_ROWS) {
    multiply_tiles(w, x, kind, first, rows, panel, sums);
    return;
  }
  long r = 0;
  for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS) multiply_rows(w, x, kind, BLOCK_ROWS, first + r, panel, sums + r * PANEL);
  for (; r + 2 <= rows; r += 2) multiply_rows(w, x, kind, 2, first + r, panel, sums + r * PANEL);
  if (r < rows) multiply_rows(w, x, kind, 1, first + r, panel, sums + r * PANEL);
}

// weights [group, PANEL] = the weights of a group of a panel in float32.
static void unpack_group(const struct grouped_weight *w, long panel, long g, float *weights) {
  long at = (panel * w->groups + g) * PANEL, of_span = (panel * (w->groups / w->span) + g / w->span) * PANEL;
  int source = source_of(w->kind);
  const uint32_t *codes = w->codes + (panel * w->groups + g) * words_of_group(w, w->kind);
  for (int n = 0; n < NR; n++) {
    floats scales = scales_of(w->kind, w->scales, w->steps, of_span + n * VEC, at + n * VEC) * w->factor, leasts = all(0);
    if (w->leasts) leasts = scales_of(w->kind, w->leasts, w->least_steps, of_span + n * VEC, at + n * VEC);
    ints zeros = w->zeros ? zeros_of(w->zeros + at + n * VEC) : (ints){} + (int32_t)w->zero;
    for (long k = 0; k < w->group; k += SLOTS) {
      words read[2];
      read_codes(source, codes + words_of(source, k) * PANEL + n * VEC, &read[0], &read[1]);
      UNROLLED for (int i = 0; i < SLOTS; i++) {
        ints code = (ints)(read[i / 4] >> i % 4 * 8 & 255);
        store(weights + (k + i) * PANEL, n * VEC, __builtin_convertvector(code - zeros, floats) * scales - leasts, 0);
      }
    }
  }
}

static void multiply_exactly(const struct grouped_weight *w, const struct grouped_rows *x, long first, long rows, long panel,
                             float *sums) {
  float weights[MOST_GROUP * PANEL];
  for (long g = 0; g < w->groups; g++) {
    unpack_group(w, panel, g, weights);
    product(rows, PANEL, w->group, x->floats + (g * x->rows + first) * w->group, w->group, weights, w->group, sums, PANEL,
            g > 0);
  }
}

void multiply_panel(const struct grouped_weight *weight, const struct grouped_rows *rows_of, long first, long rows,
                    long panel, float *sums) {
  if (rows_of->floats) {
    multiply_exactly(weight, rows_of, first, rows, panel, sums);
    return;
  }
  // Copies, which no sum that is stored can change, so that the compiler keeps them in registers.
  struct grouped_weight w = *weight;
  const struct grouped_rows x = *rows_of;
  switch (w.kind) {
    case INT4:
      if (w.group == 32) {
        w.group = 32;  // as a constant: these groups are small, so operations before and behind their products count
        multiply_kind(&w, &x, INT4, first, rows, panel, sums);
      } else {
        multiply_kind(&w, &x, INT4, first, rows, panel, sums);
      }
      break;
    case E2M1: multiply_kind(&w, &x, E2M1, first, rows, panel, sums); break;
    case STEPS4: multiply_kind(&w, &x, STEPS4, first, rows, panel, sums); break;
    default: multiply_kind(&w, &x, STEPS8, first, rows, panel, sums);
  }
}
