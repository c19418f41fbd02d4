// One layer of a step: norm and rotation of the new queries and keys, KV write, attention over block tables.
//
// The work is cut into items that threads take one after the other. How it is cut depends on nothing but the sequences
// themselves, except for which heads an item has, and heads do not mix: so a result does not depend on the number of
// threads, nor on what else is in the batch, unless a prefix is shared.
#include <stdlib.h>

#include "in_place.h"
#include "tiles.h"

enum kind { PREFILL, SHARED, DECODE };

// Queries first .. first + count of a chunk, of a prefix's members, or one decode, on KV heads head .. last_head, and
// context tokens low .. high. ``index``: the chunk or prefix. ``part``: of the result of each decode, or -1: all of it.
struct item {
  enum kind kind;
  long index, first, count, head, last_head, low, high, part;
};

// ``items`` is NULL when they are only counted. ``begin`` [decodes]: where the context begins that a decode has for
// itself. ``first_part``, ``num_parts`` [decodes]: of its result. ``unfinished`` [decodes]: items that compute parts.
struct step {
  const struct attention *a;
  struct item *items;
  long num_items, next, next_token;
  long *begin, *first_part, *num_parts, *unfinished;
  float *sums, *highs, *totals;  // of parts: [parts, heads, value_dim] and [parts, heads]
};

static _Thread_local struct scratch scratch;

static long pieces_of(long tokens) { return (tokens + PIECE - 1) / PIECE; }

static void add_item(struct step *step, struct item item) {
  if (step->items) step->items[step->num_items] = item;
  step->num_items++;
}

// ---- norm, rotation, KV write ----------------------------------------------------------------------------------

INLINE void rotate(float *x, const void *cos, const void *sin, long token, long dim, int bf16) {
  long half = dim / 2;
  for (long d = 0; d < half; d += VEC) {
    long n = smaller(VEC, half - d);
    floats c = load_some(cos, token * dim + d, n, bf16), s = load_some(sin, token * dim + d, n, bf16);
    floats low = load_some(x, d, n, 0), high = load_some(x, half + d, n, 0);
    store_some(x, d, low * c - high * s, n, 0);
    store_some(x, half + d, high * c + low * s, n, 0);
  }
}

// Make the query or key ``to`` of ``from`` [dim].
INLINE void new_head(const struct attention *a, const void *from, void *to, long token, long head, int bf16, int to_bf16) {
  float x[MAX_KEY];
  long dim = a->dim;
  floats squares = {};
  for (long d = 0; d < dim; d += VEC) {
    floats value = load_some(from, d, smaller(VEC, dim - d), bf16);
    squares += value * value;
    store_some(x, d, value, smaller(VEC, dim - d), 0);
  }
  if (a->head_norm) {
    float factor = 1.0f / __builtin_sqrtf(sum_of(squares) / dim + a->norm_eps);
    for (long d = 0; d < dim; d += VEC) {
      long n = smaller(VEC, dim - d);
      floats value = rounded(load_some(x, d, n, 0) * factor, bf16) * load_some(a->head_norm, head * dim + d, n, bf16);
      store_some(x, d, rounded(value, bf16), n, 0);
    }
  }
  if (a->cos) rotate(x, a->cos, a->sin, token, dim, bf16);
  for (long d = 0; d < dim; d += VEC) {
    long n = smaller(VEC, dim - d);
    store_some(to, d, load_some(x, d, n, 0), n, to_bf16);
  }
}

INLINE void write_token(const struct attention *a, long token, int bf16, int kv) {
  if (a->cos || a->head_norm)
    for (long head = 0; head < a->heads; head++) {
      void *q = (void *)at(a->q, token * a->q_token + head * a->q_head, bf16);
      new_head(a, q, q, token, head, bf16, bf16);
    }
  long block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
  for (long head = 0; head < a->kv_heads; head++) {
    long key_at = block * a->key_block + offset * a->key_slot + head * a->key_head;
    long value_at = block * a->value_block + offset * a->value_slot + head * a->value_head;
    void *key = (char *)a->keys + key_at * size_of(kv), *value = (char *)a->values + value_at * size_of(kv);
    const void *k = at(a->k, token * a->k_token + head * a->k_head, bf16);
    const void *v = at(a->v, token * a->v_token + head * a->v_head, bf16);
    if (kv >= INT8) {
      long scale = block * a->scale_block + offset * a->scale_slot + head * a->scale_head;
      float x[MAX_KEY];
      new_head(a, k, x, token, a->heads + head, bf16, 0);
      if (kv == INT4)
        store_int4(x, a->dim, key);
      else
        store_int8(x, a->dim, key, a->key_scales + scale);
      for (long d = 0; d < a->dim; d += VEC) {
        long n = smaller(VEC, a->dim - d);
        store_some(x, d, load_some(v, d, n, bf16), n, 0);
      }
      if (kv == INT4)
        store_int4(x, a->dim, value);
      else
        store_int8(x, a->dim, value, a->value_scales + scale);
    } else {
      new_head(a, k, key, token, a->heads + head, bf16, bf16);
      if (a->value_dim == a->dim) memcpy(value, v, a->dim * size_of(kv));
    }
  }
}

// Call a function with the types of the model and of the pool as constants; in fewer bits, the first one is not hot.
#define BY_TYPE(a, function, ...)               \
  do {                                          \
    if ((a)->int4)                              \
      function(__VA_ARGS__, (a)->bf16, INT4);   \
    else if ((a)->key_scales)                   \
      function(__VA_ARGS__, (a)->bf16, INT8);   \
    else if ((a)->bf16)                         \
      function(__VA_ARGS__, 1, 1);              \
    else                                        \
      function(__VA_ARGS__, 0, 0);              \
  } while (0)

static void write_tokens(void *data) {
  struct step *step = data;
  const struct attention *a = step->a;
  long start;
  while ((start = 8 * next_item(&step->next_token)) < a->tokens)
    for (long token = start; token < smaller(start + 8, a->tokens); token++) BY_TYPE(a, write_token, a, token);
}

// ---- the items -------------------------------------------------------------------------------------------------

// How many queries an item of a prefill has: fewer where all threads need work. That changes no result, because rows do not
// mix, and the tiles of the context are the same for all.
static long queries_of_item(const struct attention *a) {
  long group = a->heads / a->kv_heads, most = ROWS / group;
  while (most > 1 && most * group > BAND) {
    long items = 0;
    for (long c = 0; c < a->chunks; c++) items += (a->chunk[c].size + most - 1) / most * a->kv_heads;
    if (items >= 4 * a->threads) break;
    most = (most + 1) / 2;
  }
  return most;
}

static void plan_prefills(struct step *step) {
  const struct attention *a = step->a;
  long most = queries_of_item(a);
  for (long c = 0; c < a->chunks; c++) {
    const struct chunk *chunk = &a->chunk[c];
    // The queries at the end have the most to do, and come first.
    for (long tile = (chunk->size - 1) / most; tile >= 0; tile--)
      for (long head = 0; head < a->kv_heads; head++) {
        long first = tile * most, count = smaller(most, chunk->size - first), position = chunk->start + first;
        long low = first_seen(a, position);
        add_item(step, (struct item){PREFILL, c, first, count, head, head + 1, low, position + count, -1});
      }
  }
}

static void plan_shared(struct step *step) {
  const struct attention *a = step->a;
  long most = ROWS / (a->heads / a->kv_heads);
  for (long p = 0; p < a->prefixes; p++)
    for (long first = 0; first < a->prefix[p].count; first += most)
      for (long part = 0; part < pieces_of(a->prefix[p].tokens); part++)
        for (long head = 0; head < a->kv_heads; head++) {
          long low = part * PIECE, high = smaller(low + PIECE, a->prefix[p].tokens);
          long count = smaller(most, a->prefix[p].count - first);
          add_item(step, (struct item){SHARED, p, first, count, head, head + 1, low, high, part});
        }
}

static void plan_decodes(struct step *step) {
  const struct attention *a = step->a;
  long group = a->heads / a->kv_heads, heads = a->kv_heads;
  // With few sequences, threads share their heads.
  while (heads > 1 && (a->decodes * (a->kv_heads / heads) < 4 * a->threads || heads * group > SCORES / LINE))
    heads = (heads + 1) / 2;
  for (long query = 0; query < a->decodes; query++) {
    long shared = step->num_parts[query] - pieces_of(a->lengths[query] - step->begin[query]);
    long low = step->begin[query];
    for (long part = shared; low < a->lengths[query]; part++, low += PIECE)
      for (long head = 0; head < a->kv_heads; head += heads) {
        long high = smaller(low + PIECE, a->lengths[query]), last = smaller(head + heads, a->kv_heads);
        long stored = step->num_parts[query] > 1 ? part : -1;
        add_item(step, (struct item){DECODE, query, query, 1, head, last, low, high, stored});
        if (step->items) step->unfinished[query]++;
      }
  }
}

// Where each decode's own context begins, and how many parts its result has; returns the number of all parts.
static long plan_parts(struct step *step) {
  const struct attention *a = step->a;
  for (long query = 0; query < a->decodes; query++)
    step->begin[query] = first_seen(a, a->lengths[query] - 1);
  for (long p = 0; p < a->prefixes; p++)
    for (long i = 0; i < a->prefix[p].count; i++) {
      long query = a->members[a->prefix[p].begin + i];
      step->begin[query] = a->prefix[p].tokens;
      step->num_parts[query] = pieces_of(a->prefix[p].tokens);
      step->unfinished[query] = step->num_parts[query] * a->kv_heads;
    }
  long parts = 0;
  for (long query = 0; query < a->decodes; query++) {
    step->num_parts[query] += pieces_of(a->lengths[query] - step->begin[query]);
    step->first_part[query] = parts;
    if (step->num_parts[query] > 1) parts += step->num_parts[query];
  }
  return parts;
}

// ---- their results ---------------------------------------------------------------------------------------------

INLINE void merge_parts(const struct step *step, long query, int bf16) {
  const struct attention *a = step->a;
  long first = step->first_part[query], count = step->num_parts[query], dim = a->value_dim;
  for (long head = 0; head < a->heads; head++) {
    float high = -__builtin_inff(), total = 0;
    for (long p = first; p < first + count; p++) {
      float other = step->highs[p * a->heads + head];
      high = other > high ? other : high;
    }
    for (long p = first; p < first + count; p++)
      total += step->totals[p * a->heads + head] * exp2_one(step->highs[p * a->heads + head] - high);
    total = with_sink(a, head, high, total);
    for (long d = 0; d < dim; d += VEC) {
      floats sum = {};
      long n = smaller(VEC, dim - d);
      for (long p = first; p < first + count; p++) {
        float weight = exp2_one(step->highs[p * a->heads + head] - high);
        sum += load_some(step->sums, (p * a->heads + head) * dim + d, n, 0) * weight;
      }
      store_some(a->out, (query * a->heads + head) * dim + d, sum / total, n, bf16);
    }
  }
}

// Bring the result of rows of one query, on heads from ``head`` on, from s->sums + row * width to where it belongs.
INLINE void store_rows(struct step *step, const struct scratch *s, long query, long head, long row, long rows, long width,
                       long part, int bf16) {
  const struct attention *a = step->a;
  for (long r = 0; r < rows; r++) {
    const float *sums = s->sums + (row + r) * width;
    long to = (query * a->heads + head + r) * a->value_dim;
    if (part >= 0) {
      long stored = (step->first_part[query] + part) * a->heads + head + r;
      step->highs[stored] = s->highs[row + r];
      step->totals[stored] = s->totals[row + r];
      memcpy(step->sums + stored * a->value_dim, sums, a->value_dim * sizeof(float));
      continue;
    }
    floats factor = all(1.0f / with_sink(a, head + r, s->highs[row + r], s->totals[row + r]));
    for (long d = 0; d < a->value_dim; d += VEC) {
      long n = smaller(VEC, a->value_dim - d);
      store_some(a->out, to + d, load_some(sums, d, n, 0) * factor, n, bf16);
    }
  }
}

// Whoever computes the last part of a result merges all of them.
static void finish_part(struct step *step, long query) {
  if (__atomic_sub_fetch(&step->unfinished[query], 1, __ATOMIC_ACQ_REL)) return;
  if (step->a->bf16)
    merge_parts(step, query, 1);
  else
    merge_parts(step, query, 0);
}

enum { MOST_ROWS_IN_PLACE = 8 };

INLINE void compute_item(struct step *step, const struct item *item, int bf16, int kv) {
  const struct attention *a = step->a;
  struct scratch *s = &scratch;
  long group = a->heads / a->kv_heads;
  if (item->kind == DECODE && a->dim == a->value_dim && a->dim % VEC == 0 && group <= MOST_ROWS_IN_PLACE) {
    const int32_t *table = a->tables + a->rows[item->index] * a->table_stride;
    attend_in_place(a, s, item->index, table, item->head, item->last_head, item->low, item->high, bf16, kv);
    long rows = (item->last_head - item->head) * group;
    store_rows(step, s, item->index, item->head * group, 0, rows, a->dim, item->part, bf16);
  } else {
    const int64_t *members = item->kind == SHARED ? a->members + a->prefix[item->index].begin + item->first : 0;
    long first = item->first, position = -1, row;
    if (item->kind == PREFILL) {
      first += a->chunk[item->index].offset;
      position = a->chunk[item->index].start + item->first;
      row = a->chunk[item->index].row;
    } else {
      row = a->rows[members ? members[0] : first];
    }
    struct queries queries = {members, first, item->count, position};
    const int32_t *table = a->tables + row * a->table_stride;
    for (long head = item->head; head < item->last_head; head++) {
      attend_tiles(a, s, &queries, table, head, item->low, item->high, bf16, kv);
      for (long i = 0; i < item->count; i++)
        store_rows(step, s, query_of(&queries, i), head * group, i * group, group, PANELS(a->value_dim), item->part, bf16);
    }
    if (item->kind == SHARED)
      for (long i = 0; i < item->count; i++) finish_part(step, members[i]);
  }
  if (item->kind == DECODE && item->part >= 0) finish_part(step, item->index);
}

static void compute_items(void *data) {
  struct step *step = data;
  long i;
  while ((i = next_item(&step->next)) < step->num_items) BY_TYPE(step->a, compute_item, step, &step->items[i]);
}

static void plan_items(struct step *step) {
  step->num_items = 0;
  plan_prefills(step);
  plan_shared(step);
  plan_decodes(step);
}

// Below so many values that are written, or products that are summed, waking a thread costs more than it saves.
enum { ALONE_WRITE = 1 << 16, ALONE_ATTEND = 1 << 18 };

static long num_products(const struct step *step) {
  long tokens = 0;
  for (long i = 0; i < step->num_items; i++) {
    const struct item *item = &step->items[i];
    tokens += item->count * (item->last_head - item->head) * (item->high - item->low);
  }
  return tokens * (step->a->heads / step->a->kv_heads) * (step->a->dim + step->a->value_dim);
}

// Returns 0, or -1 if there is no memory.
EXPORT int pagewise_attend(const struct attention *a) {
  struct step step = {.a = a};
  long *counts = calloc(4 * a->decodes + 1, sizeof(long));
  if (!counts) return -1;
  step.begin = counts;
  step.first_part = counts + a->decodes;
  step.num_parts = counts + 2 * a->decodes;
  step.unfinished = counts + 3 * a->decodes;
  long parts = plan_parts(&step);
  plan_items(&step);
  step.items = malloc(step.num_items * sizeof(struct item) + 1);
  step.sums = malloc(parts * a->heads * (a->value_dim + 2) * sizeof(float) + 1);
  int failed = !step.items || !step.sums;
  if (!failed) {
    step.highs = step.sums + parts * a->heads * a->value_dim;
    step.totals = step.highs + parts * a->heads;
    plan_items(&step);
    // All of them before any attention: the queries of a chunk see its other tokens.
    long written = a->tokens * (a->heads + 2 * a->kv_heads) * a->dim;
    run_team(written < ALONE_WRITE ? 1 : a->threads, write_tokens, &step);
    run_team(num_products(&step) < ALONE_ATTEND ? 1 : a->threads, compute_items, &step);
  }
  free(step.sums);
  free(step.items);
  free(counts);
  return failed ? -1 : 0;
}

EXPORT long pagewise_sizeof_attention(void) { return sizeof(struct attention); }
