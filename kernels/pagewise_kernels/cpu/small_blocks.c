// Blocks of keys and values in eight or four bits, for tiers that hold fewer bits than the pool.
//
// A block is ``vectors`` keys and values of ``dim`` numbers, one after the other whatever the layout of the pool. In eight
// bits a vector is followed by its scale, in four it consists of records (kv_int4.h).
#include <math.h>

#include "kv_read.h"

INLINE long small_bytes(long dim, int bits) { return bits == 8 ? dim + 4 : bytes_of(dim, INT4); }

// Loads and stores of n values, at most VEC: whole vectors are not copied by a call.
INLINE floats load_up_to(const void *p, long i, long n, int bf16) {
  return n >= VEC ? load(p, i, bf16) : load_some(p, i, n, bf16);
}

INLINE void store_up_to(void *p, long i, floats x, long n, int bf16) {
  if (n >= VEC)
    store(p, i, x, bf16);
  else
    store_some(p, i, x, n, bf16);
}

// Make ``x`` [dim] of a vector in ``bits``.
INLINE void read_small(const uint8_t *from, long dim, int bits, float *x) {
  float scale = 1;
  if (bits == 8) memcpy(&scale, from + dim, sizeof(scale));
  for (long d = 0; d < dim; d += VEC) {
    if (bits == 4) {
      store(x, d, load_int4(from, d), 0);
    } else {
      bytes y = {};
      if (dim - d >= VEC)
        memcpy(&y, from + d, VEC);
      else
        memcpy(&y, from + d, dim - d);
      store_up_to(x, d, __builtin_convertvector(y, floats) * scale, dim - d, 0);
    }
  }
}

INLINE void shrink(const char *from, uint8_t *to, long vectors, long dim, int bits, int bf16, float *error) {
  double squares = 0, errors = 0;
  for (long v = 0; v < vectors; v++) {
    float x[MAX_KEY], back[MAX_KEY], scale;
    floats square = {}, wrong = {};
    for (long d = 0; d < dim; d += VEC)
      store_up_to(x, d, load_up_to(from, v * dim + d, dim - d, bf16), dim - d, 0);
    uint8_t *small = to + v * small_bytes(dim, bits);
    if (bits == 4) {
      store_int4(x, dim, small);
    } else {
      store_int8(x, dim, (int8_t *)small, &scale);
      memcpy(small + dim, &scale, sizeof(scale));
    }
    read_small(small, dim, bits, back);
    for (long d = 0; d < dim; d += VEC) {
      floats y = load_up_to(x, d, dim - d, 0);
      floats by = y - rounded(load_up_to(back, d, dim - d, 0), bf16);
      square += y * y;
      wrong += by * by;
    }
    squares += sum_of(square);
    errors += sum_of(wrong);
  }
  // Squares beyond the range of a float would make any error seem small.
  *error = errors == 0 ? 0 : isfinite(squares) ? (float)sqrt(errors / squares) : NAN;
}

// Write ``blocks`` blocks of float32 or bfloat16, ``from_stride`` bytes apart, in ``bits`` to blocks ``to_stride`` bytes
// apart. ``error`` [blocks]: the root mean square of the rounding errors, relative to that of the block's numbers.
EXPORT void pagewise_shrink(const char *from, long from_stride, uint8_t *to, long to_stride, long blocks, long vectors,
                            long dim, int bits, int bf16, float *error) {
  for (long b = 0; b < blocks; b++, from += from_stride, to += to_stride)
    if (bits == 8 && bf16)
      shrink(from, to, vectors, dim, 8, 1, error + b);
    else if (bits == 8)
      shrink(from, to, vectors, dim, 8, 0, error + b);
    else if (bf16)
      shrink(from, to, vectors, dim, 4, 1, error + b);
    else
      shrink(from, to, vectors, dim, 4, 0, error + b);
}

INLINE void widen_block(const uint8_t *from, char *to, long vectors, long dim, int bits, int bf16) {
  for (long v = 0; v < vectors; v++) {
    float x[MAX_KEY];
    read_small(from + v * small_bytes(dim, bits), dim, bits, x);
    for (long d = 0; d < dim; d += VEC)
      store_up_to(to, v * dim + d, load_up_to(x, d, dim - d, 0), dim - d, bf16);
  }
}

// Write blocks in ``bits`` back as float32 or bfloat16; see ``pagewise_shrink``.
EXPORT void pagewise_widen(const uint8_t *from, long from_stride, char *to, long to_stride, long blocks, long vectors,
                           long dim, int bits, int bf16) {
  for (long b = 0; b < blocks; b++, from += from_stride, to += to_stride)
    if (bits == 8)
      widen_block(from, to, vectors, dim, 8, bf16);
    else
      widen_block(from, to, vectors, dim, 4, bf16);
}
