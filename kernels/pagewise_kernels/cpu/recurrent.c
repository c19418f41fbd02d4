// Tokens of recurrent layers: a convolution over the last tokens, the gated delta rule (with one decay of a head, or one of
// each key as in KDA) or the update of Mamba-2, and a norm with a gate. Short convolutions have no state but that of the
// convolution.
//
// The states of a sequence lie in the pages of a block, which may be anywhere, and a state may begin and end within a page.
// They are read from one block and written to another one, or the same. So nothing is gathered before and scattered after.
// Tokens are computed one after the other, and each column of a state (of Mamba-2, each row) stays in the first level cache
// meanwhile. So what a token gives does not depend on which tokens are computed together, to the last bit.
#include "recurrent.h"

// Below so many values of states, waking a thread costs more than it saves.
enum { ALONE_STATES = 1 << 15 };
// Added to squares of queries and keys.
#define TINY 1e-6f

// log(1 + e^x): the larger one of x and 0, and log(1 + y) with y = e^-|x|, which is twice the artanh of y / (2 + y).
INLINE floats softplus_of(floats x) {
  floats size = larger(x, -x), y = exp2_of(size * -LOG2E), z = y / (2.0f + y), squared = z * z;
  floats p = squared * (1.0f / 15) + 1.0f / 13;
  p = p * squared + 1.0f / 11;
  p = p * squared + 1.0f / 9;
  p = p * squared + 1.0f / 7;
  p = p * squared + 1.0f / 5;
  p = p * squared + 1.0f / 3;
  p = p * squared + 1.0f;
  return select(x > 0, x, all(0)) + 2.0f * z * p;
}

// to = x times scale over its length.
INLINE void scaled_to_length(const float *x, long size, float scale, float *to) {
  floats squares = {};
  for (long i = 0; i < size; i += VEC) {
    floats some = load_up_to(x, i, size - i, 0);
    squares += some * some;
  }
  scale /= __builtin_sqrtf(sum_of(squares) + TINY);
  for (long i = 0; i < size; i++) to[i] = x[i] * scale;
}

// Columns that are computed at once, in vectors: of a chunk, and of a single token, which reads its state from memory, where
// longer reads are faster. And tokens for which a column stays in registers and the nearest cache.
enum { COLUMNS = VEC == 16 ? 4 : 2, ALONE_COLUMNS = VEC == 4 ? 4 : 8, TILE = 16 };

// What tokens of a tile do to the state of a head: by token, its decay, key, and key and query times the decay [4, key]; beta,
// and the product of query and key.
struct tile {
  float *vectors, *beta, *query_key;
  long count;
};

// With S the state after its decay: delta = beta (v - S^T k), S += k delta^T, out = S^T q. This is done for ``vectors`` of
// columns, of which the last has n values. One pass over the state adds what a token gives and gives both products of the next
// token with it. The values of tokens, at ``stride``, become outputs.
INLINE void delta_columns(int vectors, long n, const struct tile *tile, long key, long value, const float *old, float *new,
                          float *values, long stride) {
  floats with_k[vectors], with_q[vectors], delta[vectors];
  const float *by_token = tile->vectors;
  for (int j = 0; j < vectors; j++) with_k[j] = with_q[j] = (floats){};
  for (long i = 0; i < key; i++)
    for (int j = 0; j < vectors; j++) {
      floats s = load_some(old + i * value, j * VEC, n, 0);
      with_k[j] += by_token[2 * key + i] * s;
      with_q[j] += by_token[3 * key + i] * s;
    }
  for (long t = 0; t < tile->count; t++, by_token += 4 * key, values += stride, old = new) {
    const float *decay = by_token, *k = by_token + key, *next = by_token + 4 * key;
    for (int j = 0; j < vectors; j++) {
      delta[j] = tile->beta[t] * (load_some(values, j * VEC, n, 0) - with_k[j]);
      store_some(values, j * VEC, with_q[j] + tile->query_key[t] * delta[j], n, 0);
      with_k[j] = with_q[j] = (floats){};
    }
    int last = t + 1 == tile->count;
    for (long i = 0; last && i < key; i++)
      for (int j = 0; j < vectors; j++) {
        floats s = decay[i] * load_some(old + i * value, j * VEC, n, 0) + k[i] * delta[j];
        store_some(new + i * value, j * VEC, s, n, 0);
      }
    for (long i = 0; !last && i < key; i++)
      for (int j = 0; j < vectors; j++) {
        floats s = decay[i] * load_some(old + i * value, j * VEC, n, 0) + k[i] * delta[j];
        store_some(new + i * value, j * VEC, s, n, 0);
        with_k[j] += next[2 * key + i] * s;
        with_q[j] += next[3 * key + i] * s;
      }
  }
}

// The decays of a head for a token: ``to`` [key].
INLINE void find_decays(const struct recurrence *a, const void *row, long head, float *to, int bf16) {
  long key = a->key;
  float rate = a->rate[head] * LOG2E;
  if (a->decay_by_key) {
    const int32_t *from = a->decay_from + head * key;
    int neighbours = are_neighbours(from, key);
    for (long i = 0; i < key; i += VEC) {
      floats x = load_places(row, from, i, key - i, neighbours, bf16) + load_up_to(a->dt_bias + head * key, i, key - i, 0);
      store_up_to(to, i, exp2_of(rate * softplus_of(x)), key - i, 0);
    }
  } else {
    float decay = exp2_of(rate * softplus_of(all(value_at(row, a->decay_from[head], bf16) + a->dt_bias[head])))[0];
    for (long i = 0; i < key; i++) to[i] = decay;
  }
}

INLINE void delta_head(const struct recurrence *a, long sequence, long head, const float *old, float *new, int columns,
                       int bf16) {
  long size = a->key, stride = a->channels;
  float vectors[TILE * 4 * size], query[size], beta[TILE], query_key[TILE];
  for (long done = 0; done < a->tokens; done += TILE, old = new) {
    long token = sequence * a->tokens + done, i = 0;
    struct tile tile = {vectors, beta, query_key, a->tokens - done < TILE ? a->tokens - done : TILE};
    float *first = a->convolved + token * stride, *values = first + 2 * a->key_heads * size + head * a->value;
    for (long t = 0; t < tile.count; t++) {
      const void *row = row_of(a, token + t, bf16);
      const float *q = first + t * stride + head / (a->heads / a->key_heads) * size;
      float *decay = vectors + t * 4 * size, *key = decay + size, sum = 0;
      scaled_to_length(q, size, 1.0f / __builtin_sqrtf(size), query);
      scaled_to_length(q + a->key_heads * size, size, 1.0f, key);
      find_decays(a, row, head, decay, bf16);
      for (long j = 0; j < size; j++) {
        sum += query[j] * key[j];
        decay[2 * size + j] = key[j] * decay[j];
        decay[3 * size + j] = query[j] * decay[j];
      }
      query_key[t] = sum;
      beta[t] = a->beta_scale / (1.0f + expf(-value_at(row, a->beta_from[head], bf16)));
    }
    for (; i + columns * VEC <= a->value; i += columns * VEC)
      delta_columns(columns, VEC, &tile, size, a->value, old + i, new + i, values + i, stride);
    for (; i + VEC <= a->value; i += VEC)
      delta_columns(1, VEC, &tile, size, a->value, old + i, new + i, values + i, stride);
    if (i < a->value) delta_columns(1, a->value - i, &tile, size, a->value, old + i, new + i, values + i, stride);
  }
}

// A row of a state: to = decay * from + given * b; return the sums of its products with c.
INLINE floats mamba_row(long key, const float *from, float *to, float decay, float given, const float *b, const float *c) {
  long whole = key / VEC * VEC, rest = key - whole;
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
  return sum;
}

// S = decay S + x b^T, out = S c + skip x. Sums are reduced VEC at a time: of one token in VEC rows, or of a row's tokens.
INLINE void mamba_head(const struct recurrence *a, long sequence, long head, const float *old, float *new, int bf16) {
  long key = a->key, value = a->value, stride = a->channels;
  long to_b = a->heads * value + head / (a->heads / a->key_heads) * key, to_c = to_b + a->key_heads * key;
  for (long done = 0; done < a->tokens; done += VEC, old = new) {
    long token = sequence * a->tokens + done, count = a->tokens - done < VEC ? a->tokens - done : VEC;
    float *first = a->convolved + token * stride, *x = first + head * value;
    floats dt = {};
    for (long t = 0; t < count; t++)
      dt[t] = value_at(row_of(a, token + t, bf16), a->decay_from[head], bf16) + a->dt_bias[head];
    dt = softplus_of(dt);
    if (a->tokens > 1 || !a->read) {
      dt = select(dt < a->dt_least, all(a->dt_least), dt);
      dt = select(dt > a->dt_most, all(a->dt_most), dt);
    }
    floats decay = exp2_of(a->rate[head] * LOG2E * dt);
    for (long p = 0; count == 1 && p < value; p += VEC) {
      long rows = value - p < VEC ? value - p : VEC;
      floats sums[VEC] = {};
      for (long r = p; r < p + rows; r++)
        sums[r - p] = mamba_row(key, old + r * key, new + r * key, decay[0], dt[0] * x[r], first + to_b, first + to_c);
      store_up_to(x, p, sums_of(sums) + a->skip[head] * load_up_to(x, p, rows, 0), rows, 0);
    }
    for (long p = 0; count > 1 && p < value; p++) {
      const float *from = old + p * key;
      floats sums[VEC] = {}, given = {};
      for (long t = 0; t < count; t++) given[t] = x[t * stride + p];
      floats steps = dt * given;
      for (long t = 0; t < count; t++, from = new + p * key)
        sums[t] = mamba_row(key, from, new + p * key, decay[t], steps[t], first + t * stride + to_b,
                            first + t * stride + to_c);
      floats out = sums_of(sums) + a->skip[head] * given;
      for (long t = 0; t < count; t++) x[t * stride + p] = out[t];
    }
  }
}

INLINE void update_items(struct recurrence *a, int bf16) {
  long values = a->key * a->value, size = values * 4, item;
  float copied[values];  // of a state that lies in pages apart
  while ((item = next_item(&a->next)) < a->sequences * a->heads) {
    long sequence = item / a->heads, head = item % a->heads, at = a->state_start + head * size;
    const int32_t *read = a->read ? a->read + sequence * a->pages_per_block : 0;
    const int32_t *written = a->written ? a->written + sequence * a->pages_per_block : 0;
    float *to = written ? in_pages(a, written, at, size) : 0, *new = to ? to : copied;
    const float *in = read ? in_pages(a, read, at, size) : 0, *old = in ? in : copied;
    if (!read)
      memset(copied, 0, size);
    else if (!in)
      copy_in_pages(a, read, at, copied, size, 0);
    if (a->skip)
      mamba_head(a, sequence, head, old, new, bf16);
    else if (a->tokens == 1 && a->value % (ALONE_COLUMNS * VEC) == 0)
      delta_head(a, sequence, head, old, new, ALONE_COLUMNS, bf16);
    else
      delta_head(a, sequence, head, old, new, COLUMNS, bf16);
    if (written && !to) copy_in_pages(a, written, at, copied, size, 1);
  }
}

static void update_states(void *data) {
  struct recurrence *a = data;
  if (a->bf16)
    update_items(a, 1);
  else
    update_items(a, 0);
}

INLINE floats gate_of(const struct recurrence *a, floats x) {
  if (a->gate == SILU) return swish_of(x, 1.0f);
  return a->gate == SIGMOID ? 1.0f / (1.0f + exp2_of(larger(all(-87.0f), x) * -LOG2E)) : x;
}

INLINE void gate_items(struct recurrence *a, int bf16) {
  long size = a->norm_size, token;
  float gates[size];
  while ((token = next_item(&a->next)) < a->sequences * a->tokens) {
    const void *row = row_of(a, token, bf16);
    void *to = (void *)at(a->outputs, a->rows[token] * a->inner, bf16);
    for (long first = 0; first < a->inner; first += size) {
      float *out = a->convolved + token * a->channels + a->values_from + first;
      int neighbours = are_neighbours(a->gate_from + first, size);
      floats squares = {};
      for (long i = 0; i < size; i += VEC) {
        floats x = load_up_to(out, i, size - i, 0);
        floats gate = gate_of(a, load_places(row, a->gate_from + first, i, size - i, neighbours, bf16));
        store_up_to(gates, i, gate, size - i, 0);
        if (a->gate_first) x *= gate;
        squares += x * x;
      }
      float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / size + a->eps);
      for (long i = 0; i < size; i += VEC) {
        floats x = load_up_to(out, i, size - i, 0) * load_up_to(gates, i, size - i, 0);
        if (a->norm_weight) x *= scale * load_up_to(a->norm_weight, first + i, size - i, 0);
        store_up_to(to, first + i, x, size - i, bf16);
      }
    }
  }
}

static void gate_outputs(void *data) {
  struct recurrence *a = data;
  if (a->bf16)
    gate_items(a, 1);
  else
    gate_items(a, 0);
}

// Return 0; or, if nothing was computed, 1: a page does not exist, or 2: a row.
EXPORT int pagewise_recur(struct recurrence *a) {
  for (long i = 0; i < a->sequences * a->pages_per_block; i++)
    if ((a->read && (a->read[i] < 0 || a->read[i] >= a->num_pages)) ||
        (a->written && (a->written[i] < 0 || a->written[i] >= a->num_pages)))
      return 1;
  for (long i = 0; i < a->sequences * a->tokens; i++)
    if (a->rows[i] < 0 || a->rows[i] >= a->num_rows) return 2;
  long values = a->sequences * a->tokens * (a->heads ? a->heads * a->key * a->value : a->channels * a->width);
  void (*bodies[])(void *) = {convolve_all, update_states, gate_outputs};
  for (int i = 0; i < 3; i++) {
    if (i == 1 && !a->heads) continue;
    a->next = 0;
    run_team(values < ALONE_STATES ? 1 : a->threads, bodies[i], a);
  }
  return 0;
}

EXPORT long pagewise_sizeof_recurrence(void) { return sizeof(struct recurrence); }
