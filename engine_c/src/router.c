/* router.c - gate logits to experts and weights: the whole of it. */
#include "router.h"

#include <string.h>

#define FAST_EXPERTS 16 /* what kernels->top2_softmax takes */

/* ---------------------------------------------------------------- routing */

/* Whether kernels->top2_softmax may do it: Mixtral's router and its like. */
static inline bool is_fast(const colibri_router *r, const colibri_router_layer *layer) {
  return r->k == 2 && r->experts >= 2 && r->experts <= FAST_EXPERTS && colibri_router_softmax_chosen(r) && !layer->select_bias &&
         !colibri_router_has_groups(r);
}

/* Tokens whose weights overflow (sums of raw logits near 0, a bias or factor of such size) are bad too. */
static void refuse_overflow(int k, int n, int32_t *ids, float *weights, uint8_t *bad) {
  for (int t = 0; t < n; t++, ids += k, weights += k) {
    float sum = 0; /* of differences with themselves: 0 or NaN */
    for (int i = 0; i < k; i++) sum += weights[i] - weights[i];
    if (sum == 0) continue;
    bad[t] = 1;
    for (int i = 0; i < k; i++) ids[i] = i, weights[i] = 0;
  }
}

static __attribute__((noinline)) void route_any(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z,
                                                int ld, int n, int32_t *ids, float *weights, uint8_t *bad) {
  colibri_route_select(r, layer, kernels, z, ld, n, ids, bad);
  colibri_route_weigh(r, layer, kernels, z, ld, n, ids, bad, weights);
  if (!colibri_router_softmax_chosen(r) || layer->expert_scale) refuse_overflow(r->k, n, ids, weights, bad);
}

/* What comes before and after the kernel is a fifth of it for 16 tokens: nothing is done twice, nothing called that need not be. */
void colibri_route(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                   int32_t *ids, float *weights, uint8_t *bad) {
  if (!is_fast(r, layer) || kernels->top2_softmax(z, ld, r->experts, n, ids, weights) >= 0) {
    route_any(r, layer, kernels, z, ld, n, ids, weights, bad);
    return;
  }
  if (n == 16) memset(bad, 0, 16); /* two stores */
  else memset(bad, 0, (size_t)n);
  if (r->scale != 1.0f || layer->expert_scale) {
    colibri_route_scale(r, layer, n, ids, weights);
    refuse_overflow(2, n, ids, weights, bad);
  }
}

/* ---------------------------------------------------------------- for others */

int colibri_route_logits(const colibri_router_desc *desc, const float *select_bias, const float *expert_scale, const float *z, int ld, int n,
                         int32_t *ids, float *weights, uint8_t *bad, colibri_error *err) {
  if (!desc || (n > 0 && (!z || !ids || !weights || !bad)))
    return colibri_fail(err, COLIBRI_EINVAL, "colibri_route_logits: the descriptor, z, ids, weights or bad is NULL");
  int rc = colibri_router_check(desc, err);
  if (!rc && (ld < desc->experts || n < 0))
    rc = colibri_fail(err, COLIBRI_EINVAL, "colibri_route_logits: %d rows of %d logits do not hold %d experts", n, ld, desc->experts);
  if (!rc) rc = colibri_isa_ensure(err);
  if (rc) return rc;
  colibri_router_layer layer = {.select_bias = select_bias, .expert_scale = expert_scale};
  colibri_route(desc, &layer, colibri_kernels_get(), z, ld, n, ids, weights, bad);
  return COLIBRI_OK;
}
