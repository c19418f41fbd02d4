// One token of recurrent layers in float32: a convolution over the last tokens, the gated delta rule or the update of
// Mamba-2, and a norm with a gate.
//
// The states of a sequence lie in the pages of a block, which may be anywhere, and a state may begin and end within a page.
// They are read from one block and written to another one, or the same. So nothing is gathered before and scattered after.
#include <math.h>

#include "vectors.h"

struct recurrence {
  // projected [sequences, row_stride]; *_from: the places of the inputs of the convolution [channels], of the gate
  // [heads, value], of the decay and of beta [heads] in a row.
  const float *projected;
  const int32_t *conv_from, *gate_from, *decay_from, *beta_from;
  // conv_weight [channels, width]; conv_bias [channels] or NULL; rate and dt_bias [heads]; skip [heads], NULL: the gated
  // delta rule; norm_weight [heads, value], NULL: the gate alone.
  const float *conv_weight, *conv_bias, *rate, *dt_bias, *skip, *norm_weight;
  // read, written [sequences, pages_per_block]: indices of pages in memory. A conv state [channels, kept] lies at byte
  // conv_start of a block; a state, [heads, key, value] of the delta rule and [heads, value, key] of Mamba-2, at state_start.
  char *memory;
  const int32_t *read, *written;
  // convolved [sequences, channels]: of the delta rule queries and keys [key_heads, key] and values [heads, value]; of
  // Mamba-2 values, keys and queries. out [sequences, heads, value].
  float *convolved, *out;
  int64_t row_stride, num_pages, page_bytes, pages_per_block, conv_start, state_start;
  int64_t sequences, channels, width, kept, heads, key_heads, key, value, norm_size, gate_first;
  float beta_scale, eps;
  int64_t threads;
  parallel_fn parallel;
  int64_t next;
};

// Channels of an item of the convolution.
enum { CHANNELS = 128 };
// Below so many values of states, waking a thread costs more than it saves.
enum { ALONE_STATES = 1 << 15 };
// Added to squares of queries and keys.
#define TINY 1e-6f

INLINE float softplus_of(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

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

// The address of ``size`` bytes at the byte ``at`` of a block; NULL: they do not lie in one page.
INLINE void *in_page(const struct recurrence *a, const int32_t *pages, long at, long size) {
  long within = at % a->page_bytes;
  return within + size > a->page_bytes ? 0 : a->memory + (int64_t)pages[at / a->page_bytes] * a->page_bytes + within;
}

// ``load_some`` and ``store_some`` whose usual case is a whole vector.
INLINE floats load_up_to(const float *p, long i, long n) { return n >= VEC ? load(p, i, 0) : load_some(p, i, n, 0); }

INLINE void store_up_to(float *p, long i, floats x, long n) {
  if (n >= VEC)
    store(p, i, x, 0);
  else
    store_some(p, i, x, n, 0);
}

// The channels' new states, and their sums of products in out: ``kept`` and ``width`` are constants where they can be.
INLINE void convolve(long count, long kept, long width, const float *restrict old, const float *restrict row,
                     const int32_t *restrict from, const float *restrict weight, float *restrict new, float *restrict out) {
  for (long c = 0; c < count; c++) {
    float x = row[from[c]], sum = x * weight[c * width + width - 1];
    for (long i = 1; i < width; i++) sum += old[c * kept + kept - i] * weight[c * width + width - 1 - i];
    for (long i = 0; i < kept - 1; i++) new[c * kept + i] = old[c * kept + i + 1];
    new[c * kept + kept - 1] = x;
    out[c] = sum;
  }
}

static void convolve_all(void *data) {
  struct recurrence *a = data;
  long blocks = (a->channels + CHANNELS - 1) / CHANNELS, item;
  float old[CHANNELS * a->kept], new[CHANNELS * a->kept];
  while ((item = next_item(&a->next)) < a->sequences * blocks) {
    long sequence = item / blocks, first = item % blocks * CHANNELS;
    long count = a->channels - first < CHANNELS ? a->channels - first : CHANNELS;
    long at = a->conv_start + first * a->kept * 4, size = count * a->kept * 4;
    const float *row = a->projected + sequence * a->row_stride, *weight = a->conv_weight + first * a->width;
    const int32_t *from = a->conv_from + first;
    float *out = a->convolved + sequence * a->channels + first;
    copy_in_pages(a, a->read + sequence * a->pages_per_block, at, old, size, 0);
    if (a->kept == 4 && a->width == 4)
      convolve(count, 4, 4, old, row, from, weight, new, out);
    else if (a->kept == 3 && a->width == 4)
      convolve(count, 3, 4, old, row, from, weight, new, out);
    else
      convolve(count, a->kept, a->width, old, row, from, weight, new, out);
    copy_in_pages(a, a->written + sequence * a->pages_per_block, at, new, size, 1);
    for (long c = 0; c < count; c += VEC) {
      floats x = load_up_to(out, c, count - c);
      if (a->conv_bias) x += load_up_to(a->conv_bias, first + c, count - c);
      store_up_to(out, c, swish_of(x, 1.0f), count - c);
    }
  }
}

// to = x times scale over its length.
INLINE void scaled_to_length(const float *x, long size, float scale, float *to) {
  floats squares = {};
  for (long i = 0; i < size; i += VEC) {
    floats some = load_up_to(x, i, size - i);
    squares += some * some;
  }
  scale /= __builtin_sqrtf(sum_of(squares) + TINY);
  for (long i = 0; i < size; i++) to[i] = x[i] * scale;
}

// With S the state after its decay: delta = beta (v - S^T k), S += k delta^T, out = S^T q. This is done for ``vectors`` of
// columns, of which the last has n values, with one pass over the old state that gives both products with it.
INLINE void delta_columns(int vectors, long n, long key, long value, const float *old, float *new, const float *q,
                          const float *k, float qk, const float *v, float decay, float beta, float *out) {
  floats with_k[vectors], with_q[vectors];
  for (int j = 0; j < vectors; j++) with_k[j] = with_q[j] = (floats){};
  for (long i = 0; i < key; i++)
    for (int j = 0; j < vectors; j++) {
      floats s = load_some(old + i * value, j * VEC, n, 0);
      with_k[j] += k[i] * s;
      with_q[j] += q[i] * s;
    }
  for (int j = 0; j < vectors; j++) {
    with_k[j] = beta * (load_some(v, j * VEC, n, 0) - decay * with_k[j]);
    store_some(out, j * VEC, decay * with_q[j] + qk * with_k[j], n, 0);
  }
  for (long i = 0; i < key; i++)
    for (int j = 0; j < vectors; j++) {
      floats s = load_some(old + i * value, j * VEC, n, 0);
      store_some(new + i * value, j * VEC, decay * s + k[i] * with_k[j], n, 0);
    }
}

enum { COLUMNS = 4 };

static void delta_head(const struct recurrence *a, long sequence, long head, const float *old, float *new) {
  const float *row = a->projected + sequence * a->row_stride;
  const float *q = a->convolved + sequence * a->channels + head / (a->heads / a->key_heads) * a->key;
  const float *v = a->convolved + sequence * a->channels + 2 * a->key_heads * a->key + head * a->value;
  float *out = a->out + (sequence * a->heads + head) * a->value;
  float query[a->key], key[a->key], qk = 0;
  scaled_to_length(q, a->key, 1.0f / __builtin_sqrtf(a->key), query);
  scaled_to_length(q + a->key_heads * a->key, a->key, 1.0f, key);
  for (long i = 0; i < a->key; i++) qk += query[i] * key[i];
  float decay = expf(a->rate[head] * softplus_of(row[a->decay_from[head]] + a->dt_bias[head]));
  float beta = a->beta_scale / (1.0f + expf(-row[a->beta_from[head]]));
  long i = 0;
  for (; i + COLUMNS * VEC <= a->value; i += COLUMNS * VEC)
    delta_columns(COLUMNS, VEC, a->key, a->value, old + i, new + i, query, key, qk, v + i, decay, beta, out + i);
  for (; i + VEC <= a->value; i += VEC)
    delta_columns(1, VEC, a->key, a->value, old + i, new + i, query, key, qk, v + i, decay, beta, out + i);
  if (i < a->value)
    delta_columns(1, a->value - i, a->key, a->value, old + i, new + i, query, key, qk, v + i, decay, beta, out + i);
}

// S = decay S + x b^T, out = S c + skip x.
static void mamba_head(const struct recurrence *a, long sequence, long head, const float *old, float *new) {
  const float *row = a->projected + sequence * a->row_stride, *values = a->convolved + sequence * a->channels;
  const float *x = values + head * a->value;
  const float *b = values + a->heads * a->value + head / (a->heads / a->key_heads) * a->key;
  const float *c = b + a->key_heads * a->key;
  float *out = a->out + (sequence * a->heads + head) * a->value;
  float dt = softplus_of(row[a->decay_from[head]] + a->dt_bias[head]), decay = expf(a->rate[head] * dt);
  long whole = a->key / VEC * VEC, rest = a->key - whole;
  for (long p = 0; p < a->value; p += VEC) {
    long count = a->value - p < VEC ? a->value - p : VEC;
    floats sums[VEC] = {};
    for (long r = 0; r < count; r++) {
      const float *from = old + (p + r) * a->key;
      float *to = new + (p + r) * a->key, given = dt * x[p + r];
      floats sum = {};
      for (long i = 0; i < whole; i += VEC) {
        floats s = decay * load(from, i, 0) + given * load(b, i, 0);
        store(to, i, s, 0);
        sum += s * load(c, i, 0);
      }
      if (rest) {
        floats s = decay * load_some(from, whole, rest, 0) + given * load_some(b, whole, rest, 0);
        store_some(to, whole, s, rest, 0);
        sum += s * load_some(c, whole, rest, 0);
      }
      sums[r] = sum;
    }
    store_up_to(out, p, sums_of(sums) + a->skip[head] * load_up_to(x, p, count), count);
  }
}

static void update_states(void *data) {
  struct recurrence *a = data;
  long values = a->key * a->value, size = values * 4, item;
  float copied[values];  // of a state that lies in two pages
  while ((item = next_item(&a->next)) < a->sequences * a->heads) {
    long sequence = item / a->heads, head = item % a->heads, at = a->state_start + head * size;
    const int32_t *read = a->read + sequence * a->pages_per_block, *written = a->written + sequence * a->pages_per_block;
    const float *in = in_page(a, read, at, size), *old = in ? in : copied;
    float *to = in_page(a, written, at, size), *new = to ? to : copied;
    if (!in) copy_in_pages(a, read, at, copied, size, 0);
    if (a->skip)
      mamba_head(a, sequence, head, old, new);
    else
      delta_head(a, sequence, head, old, new);
    if (!to) copy_in_pages(a, written, at, copied, size, 1);
  }
}

static void gate_outputs(void *data) {
  struct recurrence *a = data;
  long size = a->norm_size, inner = a->heads * a->value, groups = inner / size, item;
  while ((item = next_item(&a->next)) < a->sequences * groups) {
    long sequence = item / groups, first = item % groups * size;
    const float *row = a->projected + sequence * a->row_stride;
    float *out = a->out + sequence * inner + first, gates[size];
    floats squares = {};
    for (long i = 0; i < size; i++) gates[i] = row[a->gate_from[first + i]];
    for (long i = 0; i < size; i += VEC) {
      floats x = load_up_to(out, i, size - i), gate = swish_of(load_up_to(gates, i, size - i), 1.0f);
      store_up_to(gates, i, gate, size - i);
      if (a->gate_first) x *= gate;
      squares += x * x;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / size + a->eps);
    for (long i = 0; i < size; i += VEC) {
      floats x = load_up_to(out, i, size - i) * load_up_to(gates, i, size - i);
      if (a->norm_weight) x *= scale * load_up_to(a->norm_weight, first + i, size - i);
      store_up_to(out, i, x, size - i);
    }
  }
}

// Return 0; or 1 if a page does not exist, and then nothing was computed.
EXPORT int pagewise_recur(struct recurrence *a) {
  for (long i = 0; i < a->sequences * a->pages_per_block; i++)
    if (a->read[i] < 0 || a->read[i] >= a->num_pages || a->written[i] < 0 || a->written[i] >= a->num_pages) return 1;
  long threads = a->sequences * a->heads * a->key * a->value < ALONE_STATES ? 1 : a->threads;
  void (*bodies[])(void *) = {convolve_all, update_states, gate_outputs};
  for (int i = 0; i < 3; i++) {
    a->next = 0;
    run_team(a->parallel, threads, bodies[i], a);
  }
  return 0;
}

EXPORT long pagewise_sizeof_recurrence(void) { return sizeof(struct recurrence); }
