/* route_weigh.c - the weights of chosen experts.
 *
 * Softmax over the chosen logits equals softmax over all, top-k, renormalise: one way serves most families. */
#include <math.h>
#include <string.h>

#include "router.h"

#define TINY 0x1p-60f /* a sum of weights below which f32 scores have lost, or will soon lose, their last bits */

/* ---------------------------------------------------------------- softmax over the chosen */

/* Logits of the chosen less the largest: [n, k]. k is a constant where it matters; sorted: the first is the largest. */
static inline __attribute__((always_inline)) void gather_depth(const int k, const bool sorted, const float *z, int ld, int n,
                                                               const int32_t *restrict ids, float *restrict depth) {
  for (int t = 0; t < n; t++, z += ld, ids += k, depth += k) {
    float top = z[ids[0]];
    for (int i = 1; i < k && !sorted; i++) top = z[ids[i]] > top ? z[ids[i]] : top;
    for (int i = 0; i < k; i++) depth[i] = z[ids[i]] - top;
  }
}

/* Exponentials [n, k] to weights: times 1 / their sum. Bad tokens get 0. */
static inline __attribute__((always_inline)) void normalise(const int k, int n, const uint8_t *restrict bad, float *restrict weights) {
  for (int t = 0; t < n; t++, weights += k) {
    float sum = 0;
    for (int i = 0; i < k; i++) sum += weights[i];
    float inverse = 1.0f / sum;
    for (int i = 0; i < k; i++) weights[i] *= inverse;
    if (__builtin_expect(bad[t], 0)) memset(weights, 0, (size_t)k * sizeof *weights);
  }
}

/* Top 8 is the common one. */
static void softmax_chosen(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                           const int32_t *ids, const uint8_t *bad, float *weights) {
  bool sorted = colibri_router_by_logits(r, layer);
  if (r->k == 8 && sorted)
    gather_depth(8, true, z, ld, n, ids, weights);
  else
    gather_depth(r->k, sorted, z, ld, n, ids, weights);
  kernels->exp(weights, n * r->k);
  if (r->k == 8)
    normalise(8, n, bad, weights);
  else
    normalise(r->k, n, bad, weights);
}

/* ---------------------------------------------------------------- scores of the chosen */

/* Probabilities among all experts. */
static void softmax_all(const colibri_router *r, const colibri_kernels *kernels, const float *z, int ld, int n, const int32_t *ids, const uint8_t *bad,
                        float *weights) {
  for (int t = 0; t < n; t++, z += ld, ids += r->k, weights += r->k) {
    if (bad[t]) continue;
    float top = z[kernels->argmax(z, r->experts)], inverse = 1.0f / kernels->sum_exp(z, r->experts, top);
    for (int i = 0; i < r->k; i++) weights[i] = z[ids[i]] - top;
    kernels->exp(weights, r->k);
    for (int i = 0; i < r->k; i++) weights[i] *= inverse;
  }
}

/* A score that looks at one logit alone. */
static void score_each(int score, int k, const colibri_kernels *kernels, const float *z, int ld, int n, const int32_t *ids, float *weights) {
  uint8_t ignored;
  for (int t = 0; t < n; t++)
    for (int i = 0; i < k; i++) weights[t * k + i] = z[(ptrdiff_t)t * ld + ids[t * k + i]];
  kernels->scores(score, weights, (ptrdiff_t)n * k, n * k, 1, weights, &ignored);
}

/* ---------------------------------------------------------------- sparsemixer */

/* left with -inf wherever a logit is too far below `chosen`: by more than 2 jitter_eps of the larger of its magnitude and `chosen`. Returns the largest
 * that stays. An expert above the chosen one stays: damping may have given it up. */
static float keep_near(const colibri_router *r, const float *z, const float *left, float chosen, float *kept) {
  float top = -INFINITY, most = 2 * r->jitter_eps;
  for (int e = 0; e < r->experts; e++) {
    float size = fabsf(z[e]) > chosen ? fabsf(z[e]) : chosen;
    kept[e] = chosen - z[e] > most * size ? -INFINITY : left[e];
    top = kept[e] > top ? kept[e] : top;
  }
  return top;
}

static void sparsemixer(const colibri_router *r, const colibri_kernels *kernels, const float *z, const int32_t *ids, float *weights) {
  float left[COLIBRI_MAX_EXPERTS], kept[COLIBRI_MAX_EXPERTS], sums[COLIBRI_MAX_TOP_K];
  memcpy(left, z, sizeof *z * (size_t)r->experts);
  for (int i = 0; i < r->k; i++) {
    float chosen = z[ids[i]], top = keep_near(r, z, left, chosen, kept);
    weights[i] = chosen - top;
    sums[i] = kernels->sum_exp(kept, r->experts, top);
    left[ids[i]] = -INFINITY;
  }
  kernels->exp(weights, r->k);
  for (int i = 0; i < r->k; i++) weights[i] /= sums[i];
}

/* ---------------------------------------------------------------- renormalisation and scale */

/* Weights whose scores all but underflow, divided by their sum: by the logits themselves. So far down sigmoid(z) is exp(z), and sqrt(softplus(z)) is
 * exp(z / 2). */
static __attribute__((cold, noinline)) void renormalise_tiny(const colibri_router *r, const float *z, const int32_t *ids, float *weights) {
  float top = z[ids[0]], sum = 0, slope = r->weight == COLIBRI_WEIGHT_SCORE && r->score == COLIBRI_SCORE_SQRT_SOFTPLUS ? 0.5f : 1.0f;
  for (int i = 1; i < r->k; i++) top = z[ids[i]] > top ? z[ids[i]] : top;
  for (int i = 0; i < r->k; i++) sum += weights[i] = colibri_expf(slope * (z[ids[i]] - top));
  for (int i = 0; i < r->k; i++) weights[i] /= sum;
}

static void renormalise(const colibri_router *r, const float *z, int ld, int n, const int32_t *ids, const uint8_t *bad, float *weights) {
  bool logits = r->weight == COLIBRI_WEIGHT_SCORE && r->score == COLIBRI_SCORE_LOGITS;
  for (int t = 0; t < n; t++, z += ld, ids += r->k, weights += r->k) {
    if (bad[t]) continue;
    float sum = 0;
    for (int i = 0; i < r->k; i++) sum += weights[i];
    if (sum < TINY && r->renorm_eps == 0 && !logits) {
      renormalise_tiny(r, z, ids, weights);
      continue;
    }
    if (r->renorm_way == COLIBRI_EPS_ADD) sum += r->renorm_eps;
    else sum = r->renorm_eps > sum ? r->renorm_eps : sum;
    for (int i = 0; i < r->k; i++) weights[i] = sum == 0 ? 0 : weights[i] / sum; /* raw logits that cancel out weigh nothing */
  }
}

void colibri_route_scale(const colibri_router *r, const colibri_router_layer *layer, int n, const int32_t *ids, float *weights) {
  int64_t pairs = (int64_t)n * r->k;
  if (r->scale != 1.0f)
    for (int64_t i = 0; i < pairs; i++) weights[i] *= r->scale;
  if (layer->expert_scale)
    for (int64_t i = 0; i < pairs; i++) weights[i] *= layer->expert_scale[ids[i]];
}

/* ---------------------------------------------------------------- all kinds */

static void weigh(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                  const int32_t *ids, const uint8_t *bad, float *weights) {
  switch (r->weight) {
    case COLIBRI_WEIGHT_SOFTMAX_CHOSEN: softmax_chosen(r, layer, kernels, z, ld, n, ids, bad, weights); return;
    case COLIBRI_WEIGHT_SIGMOID_CHOSEN: score_each(COLIBRI_SCORE_SIGMOID, r->k, kernels, z, ld, n, ids, weights); return;
    case COLIBRI_WEIGHT_SPARSEMIXER:
      for (int t = 0; t < n; t++)
        if (!bad[t]) sparsemixer(r, kernels, z + (ptrdiff_t)t * ld, ids + (ptrdiff_t)t * r->k, weights + (ptrdiff_t)t * r->k);
      return;
    default: break;
  }
  if (r->score == COLIBRI_SCORE_SOFTMAX_ALL)
    softmax_all(r, kernels, z, ld, n, ids, bad, weights);
  else
    score_each(r->score, r->k, kernels, z, ld, n, ids, weights);
}

void colibri_route_weigh(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                         const int32_t *ids, const uint8_t *bad, float *weights) {
  if (colibri_router_softmax_chosen(r)) {
    softmax_chosen(r, layer, kernels, z, ld, n, ids, bad, weights);
  } else {
    weigh(r, layer, kernels, z, ld, n, ids, bad, weights);
    for (int t = 0; t < n; t++)
      if (bad[t]) memset(weights + (ptrdiff_t)t * r->k, 0, sizeof *weights * (size_t)r->k);
    if (r->renorm == COLIBRI_RENORM_SUM) renormalise(r, z, ld, n, ids, bad, weights);
  }
  colibri_route_scale(r, layer, n, ids, weights);
}
