// The router of a mixture of experts in float32: a score for each expert, the best experts of each token, and the weights of
// their outputs.
#include "vectors.h"

// Of linear.c.
void pagewise_linear(const float *x, long x_stride, const float *packed, const float *bias, float *out, long rows, long in,
                     long outs, long threads);

struct router {
  // logits [tokens, experts]; weights and chosen [tokens, top_k].
  const float *logits;
  // correction [experts] is added to sigmoids for the choice alone. NULL: scores are a softmax.
  const float *correction;
  float *weights;
  int64_t *chosen;
  long tokens, experts, top_k, groups, top_groups, normalise;
  float scale;
  long next;
};

static long whole(long count) { return (count + VEC - 1) / VEC * VEC; }

INLINE floats sigmoid_of(floats x) {
  floats power = x * -LOG2E;
  return select(power > 126.0f, all(0), 1.0f / (1.0f + exp2_of(select(power > 126.0f, all(126.0f), power))));
}

// Take the largest of the scores away, the first one of equals, and return its index. If none of them is a number, that
// is ``otherwise``.
INLINE long take_largest(float *scores, long experts, long otherwise) {
  floats best = all(-__builtin_inff());
  for (long i = 0; i < experts; i += VEC) best = larger(load(scores, i, 0), best);
  float most = max_of(best);
  for (long i = 0; i < experts; i++)
    if (scores[i] == most) {
      scores[i] = -__builtin_inff();
      return i;
    }
  return otherwise;
}

// Leave the scores of the best groups; a group is as good as the sum of its two best scores.
INLINE void keep_best_groups(const struct router *a, float *scores) {
  long size = a->experts / a->groups;
  float sums[a->groups];
  for (long g = 0; g < a->groups; g++) {
    float first = -__builtin_inff(), second = first;
    for (long i = g * size; i < (g + 1) * size; i++) {
      float score = scores[i], below = score < first ? score : first;
      first = score > first ? score : first;
      second = below > second ? below : second;
    }
    sums[g] = first + second;
  }
  for (long worse = a->top_groups; worse < a->groups; worse++) {
    long least = 0;
    for (long g = 1; g < a->groups; g++)
      if (sums[g] <= sums[least]) least = g;
    sums[least] = __builtin_inff();
    for (long i = least * size; i < (least + 1) * size; i++) scores[i] = -__builtin_inff();
  }
}

// Scores for the choice: logits, whose order that of a softmax is, or the sigmoids of logits and their correction.
INLINE void score(const struct router *a, const float *logits, float *scores) {
  for (long i = 0; i < a->experts; i += VEC) {
    long n = a->experts - i < VEC ? a->experts - i : VEC;
    floats x = load_some(logits, i, n, 0);
    if (a->correction) x = sigmoid_of(x) + load_some(a->correction, i, n, 0);
    store(scores, i, x, 0);
  }
  for (long i = a->experts; i < whole(a->experts); i++) scores[i] = -__builtin_inff();
}

// The sum over all experts of what softmax divides by, whose largest logit is ``most``.
INLINE float softmax_sum(const struct router *a, const float *logits, float most) {
  float total = 0;
  for (long i = 0; i < a->experts; i += VEC) {
    long n = a->experts - i < VEC ? a->experts - i : VEC;
    floats grown = exp2_of((load_some(logits, i, n, 0) - most) * LOG2E);
    for (long k = 0; k < n; k++) total += grown[k];
  }
  return total;
}

// An item is a token.
static void choose(void *data) {
  struct router *a = data;
  long token;
  while ((token = next_item(&a->next)) < a->tokens) {
    const float *logits = a->logits + token * a->experts;
    float scores[whole(a->experts)], *weights = a->weights + token * a->top_k;
    int64_t *chosen = a->chosen + token * a->top_k;
    score(a, logits, scores);
    if (a->groups > 1) keep_best_groups(a, scores);
    for (long k = 0; k < a->top_k; k++) chosen[k] = take_largest(scores, a->experts, k);
    float sum = a->correction ? 1e-20f : 0;  // as in transformers, for scores that are all zero
    for (long k = 0; k < a->top_k; k++) {
      float logit = logits[chosen[k]];
      weights[k] = a->correction ? sigmoid_of(all(logit))[0] : exp2_one((logit - logits[chosen[0]]) * LOG2E);
      sum += weights[k];
    }
    if (!a->normalise) sum = a->correction ? 1 : softmax_sum(a, logits, logits[chosen[0]]);
    for (long k = 0; k < a->top_k; k++) weights[k] = weights[k] / sum * a->scale;
  }
}

// Below so many scores, waking a thread costs more than it saves.
enum { ALONE_ROUTER = 1 << 15 };

// x [tokens, hidden], each row at x_stride; packed, bias: as in linear.c. Writes logits, weights and chosen. The stack holds the
// scores of a token.
EXPORT void pagewise_route(const float *x, long x_stride, const float *packed, const float *bias, const float *correction,
                           float *logits, float *weights, int64_t *chosen, long tokens, long hidden,
                           long experts, long top_k, long groups, long top_groups, long normalise,
                           float scale, long threads) {
  struct router a = {logits, correction, weights, chosen, tokens, experts, top_k, groups, top_groups, normalise,
                     scale, 0};
  pagewise_linear(x, x_stride, packed, bias, logits, tokens, hidden, experts, threads);
  run_team(tokens * experts < ALONE_ROUTER ? 1 : threads, choose, &a);
}
