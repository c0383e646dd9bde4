/* router.c - gate logits to experts and weights.
 *
 * Softmax is monotonic, so selecting on logits selects on probabilities; and softmax over the chosen logits equals softmax over all, top-k,
 * renormalise. Both are why one selection serves every family that has no selection bias. */
#include "router.h"

#include <stdbool.h>
#include <string.h>

#define FAST_EXPERTS 16 /* what kernels->top2_softmax takes */

/* Logits of the chosen less the largest, which is the first: [n, k]. k is a constant where it matters. */
static inline __attribute__((always_inline)) void gather(const int k, const float *z, int ld, int n, const int32_t *restrict ids,
                                                         float *restrict depth) {
  for (int t = 0; t < n; t++, z += ld, ids += k, depth += k) {
    float top = z[ids[0]];
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

/* The same with the sum over all experts. */
static void normalise_over_all(const colibri_router *r, const colibri_kernels *kernels, const float *z, int ld, int n, const int32_t *ids,
                               const uint8_t *bad, float *weights) {
  for (int t = 0; t < n; t++, z += ld, ids += r->k, weights += r->k) {
    float inverse = bad[t] ? 0 : 1.0f / kernels->sum_exp(z, r->experts, z[ids[0]]);
    for (int i = 0; i < r->k; i++) weights[i] = bad[t] ? 0 : weights[i] * inverse;
  }
}

static void apply_scale(const colibri_router *r, int n, float *weights) {
  if (r->scale != 1.0f)
    for (int64_t i = 0; i < (int64_t)n * r->k; i++) weights[i] *= r->scale;
}

/* Top 8 is the common one. */
void colibri_route_weigh(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                         const int32_t *ids, const uint8_t *bad, float *weights) {
  (void)layer;
  if (r->k == 8)
    gather(8, z, ld, n, ids, weights);
  else
    gather(r->k, z, ld, n, ids, weights);
  kernels->exp(weights, n * r->k);
  if (r->weight == COLIBRI_WEIGHT_SCORE)
    normalise_over_all(r, kernels, z, ld, n, ids, bad, weights);
  else if (r->k == 8)
    normalise(8, n, bad, weights);
  else
    normalise(r->k, n, bad, weights);
  apply_scale(r, n, weights);
}

void colibri_route_select_scores(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld,
                                 int n, float *scores) {
  (void)layer, (void)kernels;
  for (int t = 0; t < n; t++) memcpy(scores + (ptrdiff_t)t * r->experts, z + (ptrdiff_t)t * ld, sizeof *z * (size_t)r->experts);
}

/* True if the fast path took all tokens; false (nothing promised of the outputs) if one of them holds a NaN or infinity. */
static bool route_fast(const colibri_router *r, const colibri_kernels *kernels, const float *z, int ld, int n, int32_t *ids, float *weights) {
  return r->k == 2 && r->experts >= 2 && r->experts <= FAST_EXPERTS && r->weight == COLIBRI_WEIGHT_SOFTMAX_CHOSEN &&
         kernels->top2_softmax(z, ld, r->experts, n, ids, weights) < 0;
}

void colibri_route(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                   int32_t *ids, float *weights, uint8_t *bad) {
  if (route_fast(r, kernels, z, ld, n, ids, weights)) {
    memset(bad, 0, (size_t)n);
    apply_scale(r, n, weights);
  } else {
    kernels->top_k(z, ld, r->experts, n, r->k, ids, bad);
    colibri_route_weigh(r, layer, kernels, z, ld, n, ids, bad, weights);
  }
}
