// What recurrent layers read and write: rows of projections, states in pages, and convolutions over the last tokens.
#pragma once

#include <math.h>

#include "vectors.h"

enum { ALONE, SILU, SIGMOID };

struct recurrence {
  // projected [rows, row_stride], in float32 or bfloat16; *_from: the places of the inputs of the convolution [channels],
  // of what they are multiplied by [channels] or NULL, of the gate [inner], of the decay [heads] or, if it differs by key,
  // [heads, key], and of beta [heads] in a row. outputs [rows, inner] have the type of the projections.
  const void *projected;
  const int32_t *conv_from, *times_from, *gate_from, *decay_from, *beta_from;
  // conv_weight [width, channels]; conv_bias [channels] or NULL; rate [heads]; dt_bias as decay_from; skip [heads], NULL:
  // the gated delta rule; norm_weight [inner], NULL: the gate alone. Mamba-2's steps dt lie in [dt_least, dt_most], but not
  // those of single tokens behind others: transformers does so.
  const float *conv_weight, *conv_bias, *rate, *dt_bias, *skip, *norm_weight;
  // read, written [sequences, pages_per_block]: indices of pages in memory; read is NULL if the sequences begin, and written
  // if new states are not wanted. A conv state [channels, kept] lies at byte conv_start of a block; a state in float32,
  // [heads, key, value] of the delta rule and [heads, value, key] of Mamba-2, at state_start. rows [sequences, tokens]: the
  // rows of the tokens.
  char *memory;
  const int32_t *read, *written;
  const int64_t *rows;
  // convolved [sequences, tokens, channels]: of the delta rule queries and keys [key_heads, key] and values [heads, value];
  // of Mamba-2 values, keys and queries. Results before the gate take the place of the values.
  float *convolved;
  void *outputs;
  int64_t num_rows, row_stride, num_pages, page_bytes, pages_per_block, conv_start, state_start;
  int64_t sequences, tokens, channels, width, kept, conv_silu, heads, key_heads, key, value, decay_by_key;
  int64_t inner, values_from, norm_size, gate, gate_first, bf16;
  float beta_scale, eps, dt_least, dt_most;
  int64_t threads;
  int64_t next;
};

// Copy ``size`` bytes from or to the byte ``at`` of a block.
INLINE void copy_in_pages(const struct recurrence *a, const int32_t *pages, long at, void *p, long size, int put) {
  for (char *here = p; size > 0;) {
    long within = at % a->page_bytes, part = a->page_bytes - within < size ? a->page_bytes - within : size;
    char *there = a->memory + (int64_t)pages[at / a->page_bytes] * a->page_bytes + within;
    if (put)
      memcpy(there, here, part);
    else
      memcpy(here, there, part);
    here += part, at += part, size -= part;
  }
}

// The address of ``size`` bytes at the byte ``at`` of a block; NULL: they do not lie one behind the other in memory.
INLINE void *in_pages(const struct recurrence *a, const int32_t *pages, long at, long size) {
  long first = at / a->page_bytes, last = (at + size - 1) / a->page_bytes;
  for (long i = first; i < last; i++)
    if (pages[i] + 1 != pages[i + 1]) return 0;
  return a->memory + (int64_t)pages[first] * a->page_bytes + at % a->page_bytes;
}

// ``load_some`` and ``store_some`` whose usual case is a whole vector.
INLINE floats load_up_to(const void *p, long i, long n, int bf16) {
  return n >= VEC ? load(p, i, bf16) : load_some(p, i, n, bf16);
}

INLINE void store_up_to(void *p, long i, floats x, long n, int bf16) {
  if (n >= VEC)
    store(p, i, x, bf16);
  else
    store_some(p, i, x, n, bf16);
}

INLINE float value_at(const void *p, long i, int bf16) {
  if (!bf16) return ((const float *)p)[i];
  union { uint32_t bits; float value; } x = {(uint32_t)((const uint16_t *)p)[i] << 16};
  return x.value;
}

// Whether ``count`` places follow each other.
INLINE int are_neighbours(const int32_t *from, long count) {
  int apart = 0;
  for (long i = 0; i < count; i++) apart |= from[i] ^ (from[0] + (int32_t)i);
  return !apart;
}

// Up to a vector of n values of a row, at the places from[i], from[i + 1], ...; ``neighbours``: these follow each other.
INLINE floats load_places(const void *row, const int32_t *from, long i, long n, int neighbours, int bf16) {
  if (neighbours) return load_up_to(row, from[0] + i, n, bf16);
  floats x = {};
  for (long j = 0; j < (n < VEC ? n : VEC); j++) x[j] = value_at(row, from[i + j], bf16);
  return x;
}

INLINE const void *row_of(const struct recurrence *a, long token, int bf16) {
  return at(a->projected, a->rows[token] * a->row_stride, bf16);
}

// Channels of an item of the convolution, and tokens that it computes before the next ones.
enum { CHANNELS = 128, STRETCH = 32 };

// A conv state [count, kept] to lines [kept, CHANNELS], or back.
INLINE void turn_state(void *state, float *lines, long count, long kept, int back, int bf16) {
  for (long c = 0; c < count; c++)
    for (long i = 0; i < kept; i++) {
      float *here = lines + i * CHANNELS + c;
      if (!back)
        *here = value_at(state, c * kept + i, bf16);
      else if (bf16)
        memcpy((uint16_t *)state + c * kept + i, (const uint16_t *)here + 1, 2);  // no other bit is set
      else
        ((float *)state)[c * kept + i] = *here;
    }
}

INLINE void turn_any_state(void *state, float *lines, long count, long kept, int back, int bf16) {
  switch (kept) {  // constants, so that loops become vectors
    case 4: turn_state(state, lines, count, 4, back, bf16); break;
    case 3: turn_state(state, lines, count, 3, back, bf16); break;
    default: turn_state(state, lines, count, kept, back, bf16);
  }
}

// The convolution of channels first .. first + count of a sequence.
INLINE void convolve(const struct recurrence *a, long sequence, long first, long count, int bf16) {
  const int32_t *from = a->conv_from + first, *times = a->times_from ? a->times_from + first : 0;
  int neighbours = are_neighbours(from, count), times_neighbours = times && are_neighbours(times, count);
  long kept = a->kept, at_byte = a->conv_start + first * kept * (bf16 ? 2 : 4), size = count * kept * (bf16 ? 2 : 4);
  float lines[(kept + STRETCH) * CHANNELS], state[CHANNELS * kept];
  if (a->read) {
    copy_in_pages(a, a->read + sequence * a->pages_per_block, at_byte, state, size, 0);
    turn_any_state(state, lines, count, kept, 0, bf16);
  } else {
    memset(lines, 0, kept * CHANNELS * 4);
  }
  for (long done = 0; done < a->tokens; done += STRETCH) {
    long tokens = a->tokens - done < STRETCH ? a->tokens - done : STRETCH, token = sequence * a->tokens + done;
    for (long t = 0; t < tokens; t++) {
      const void *row = row_of(a, token + t, bf16);
      for (long c = 0; c < count; c += VEC) {
        floats x = load_places(row, from, c, count - c, neighbours, bf16);
        if (times) x = rounded(x * load_places(row, times, c, count - c, times_neighbours, bf16), bf16);
        store(lines + (kept + t) * CHANNELS, c, x, 0);
      }
    }
    for (long c = 0; c < count; c += VEC)
      for (long t = 0; t < tokens; t++) {
        const float *weight = a->conv_weight + (a->width - 1) * a->channels + first, *line = lines + (kept + t) * CHANNELS;
        floats sum = load(line, c, 0) * load_up_to(weight, c, count - c, 0);
        for (long i = 1; i < a->width; i++)
          sum += load(line - i * CHANNELS, c, 0) * load_up_to(weight - i * a->channels, c, count - c, 0);
        if (a->conv_bias) sum += load_up_to(a->conv_bias + first, c, count - c, 0);
        if (a->conv_silu) sum = swish_of(sum, 1.0f);
        store_up_to(a->convolved + (token + t) * a->channels + first, c, sum, count - c, 0);
      }
    memmove(lines, lines + tokens * CHANNELS, kept * CHANNELS * 4);
  }
  if (!a->written) return;
  turn_any_state(state, lines, count, kept, 1, bf16);
  copy_in_pages(a, a->written + sequence * a->pages_per_block, at_byte, state, size, 1);
}

INLINE void convolve_items(struct recurrence *a, int bf16) {
  long blocks = (a->channels + CHANNELS - 1) / CHANNELS, item;
  while ((item = next_item(&a->next)) < a->sequences * blocks) {
    long first = item % blocks * CHANNELS;
    convolve(a, item / blocks, first, a->channels - first < CHANNELS ? a->channels - first : CHANNELS, bf16);
  }
}

static void convolve_all(void *data) {
  struct recurrence *a = data;
  if (a->bf16)
    convolve_items(a, 1);
  else
    convolve_items(a, 0);
}
