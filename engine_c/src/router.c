/* router.c - gate logits to experts and weights.
 *
 * Softmax is monotonic, so selecting on logits selects on probabilities; and softmax over the chosen logits equals softmax over all, top-k,
 * renormalise. Both are why one selection serves every family that has no selection bias. */
#include "router.h"

#include <stdbool.h>
#include <string.h>

#define FAST_EXPERTS 16 /* what kernels->top2_softmax takes */

/* The weights [n, k] of n tokens' experts, ids [n, k]; 0 for a bad token. ids[0] has a token's largest logit. */
static void weigh(const colibri_router *r, const colibri_kernels *kernels, const float *z, int ld, int n, const int32_t *ids, float *weights,
                  const uint8_t *bad) {
  int k = r->k;
  for (int t = 0; t < n; t++) {
    const float *row = z + (int64_t)t * ld;
    float top = row[ids[t * k]];
    for (int i = t * k; i < (t + 1) * k; i++) weights[i] = row[ids[i]] - top;
  }
  kernels->exp(weights, n * k);
  for (int t = 0; t < n; t++, weights += k) {
    const float *row = z + (int64_t)t * ld;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += weights[i];
    if (r->weight == COLIBRI_WEIGHT_SCORE && !bad[t]) sum = kernels->sum_exp(row, r->experts, row[ids[t * k]]);
    float inverse = 1.0f / sum;
    for (int i = 0; i < k; i++) weights[i] = bad[t] ? 0 : weights[i] * inverse;
  }
}

/* True if the fast path took all tokens; false (nothing promised of the outputs) if one of them holds a NaN or infinity. */
static bool route_fast(const colibri_router *r, const colibri_kernels *kernels, const float *z, int ld, int n, int32_t *ids, float *weights) {
  return r->k == 2 && r->experts >= 2 && r->experts <= FAST_EXPERTS && r->weight == COLIBRI_WEIGHT_SOFTMAX_CHOSEN &&
         kernels->top2_softmax(z, ld, r->experts, n, ids, weights) < 0;
}

void colibri_route(const colibri_router *r, const colibri_kernels *kernels, const float *z, int ld, int n, int32_t *ids, float *weights,
                   uint8_t *bad) {
  if (route_fast(r, kernels, z, ld, n, ids, weights)) {
    memset(bad, 0, (size_t)n);
  } else {
    kernels->top_k(z, ld, r->experts, n, r->k, ids, bad);
    weigh(r, kernels, z, ld, n, ids, weights, bad);
  }
  if (r->scale != 1.0f)
    for (int64_t i = 0; i < (int64_t)n * r->k; i++) weights[i] *= r->scale;
}
