/* router.c - gate logits to experts and weights.
 *
 * Softmax is monotonic, so selecting on logits selects on probabilities; and softmax over the chosen logits equals softmax over all, top-k,
 * renormalise. Both are why one selection serves every family that has no selection bias. */
#include "router.h"

#include <stdbool.h>
#include <string.h>

#define FAST_EXPERTS 16 /* what kernels->top2_softmax takes */

static bool all_finite(const float *z, int n) {
  uint32_t bad = 0;
  for (int i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, z + i, sizeof bits);
    bad |= (bits & 0x7f800000u) == 0x7f800000u;
  }
  return !bad;
}

/* ids [k] of the largest of z [n], descending. A later equal goes behind an earlier one, so ties keep the lower index first. */
static void select_top(const float *z, int n, int k, int32_t *ids) {
  float chosen[COLIBRI_MAX_TOP_K];
  int count = 0;
  for (int e = 0; e < n; e++) {
    if (count == k && !(z[e] > chosen[k - 1])) continue;
    int i = count < k ? count++ : k - 1;
    for (; i > 0 && z[e] > chosen[i - 1]; i--) {
      chosen[i] = chosen[i - 1];
      ids[i] = ids[i - 1];
    }
    chosen[i] = z[e];
    ids[i] = e;
  }
}

/* weights [k] of the chosen; ids[0] has the largest logit. */
static void weigh(const colibri_router *r, const colibri_kernels *kernels, const float *z, const int32_t *ids, float *weights) {
  float top = z[ids[0]], sum = 0;
  for (int i = 0; i < r->k; i++) {
    weights[i] = colibri_expf(z[ids[i]] - top);
    sum += weights[i];
  }
  if (r->weight == COLIBRI_WEIGHT_SCORE) sum = kernels->sum_exp(z, r->experts, top);
  for (int i = 0; i < r->k; i++) weights[i] /= sum;
}

static bool route_one(const colibri_router *r, const colibri_kernels *kernels, const float *z, int32_t *ids, float *weights) {
  if (all_finite(z, r->experts)) {
    select_top(z, r->experts, r->k, ids);
    weigh(r, kernels, z, ids, weights);
    return true;
  }
  for (int i = 0; i < r->k; i++) {
    ids[i] = i;
    weights[i] = 0;
  }
  return false;
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
    for (int64_t t = 0; t < n; t++) bad[t] = !route_one(r, kernels, z + t * ld, ids + t * r->k, weights + t * r->k);
  }
  if (r->scale != 1.0f)
    for (int64_t i = 0; i < (int64_t)n * r->k; i++) weights[i] *= r->scale;
}
