/* router.h - gate logits to experts and weights (internal). Formulas: docs/container.md, "router". */
#ifndef COLIBRI_ROUTER_H
#define COLIBRI_ROUTER_H

#include "kernels.h"
#include "model.h"

/* Routes n tokens: z [n, ld] gate logits (f32, ld >= experts; the logit bias is in them) -> ids, weights [n, k], by descending selection score, ties to
 * the lower index. bad [n]: set to 1 for a token with a NaN or infinite logit, whose ids are then 0..k-1 and weights 0; else 0. Allocates nothing. Takes
 * kernels->top2_softmax for k == 2, experts <= 16, softmax over the chosen, and kernels->top_k and exp otherwise; both agree bitwise. */
void colibri_route(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                   int32_t *ids, float *weights, uint8_t *bad);

/* What selection compares: scores [n, experts]. The logits themselves where selecting on them is selecting on scores, else the score with its
 * selection bias. Experts in groups that are left out: -inf. Nothing is promised for a token with a NaN or infinite logit. */
void colibri_route_select_scores(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld,
                                 int n, float *scores);

/* The weights [n, k] of given experts, ids [n, k] by descending selection score: for colibri_route's own choice its own weights, bit by bit. Bad tokens
 * get 0. */
void colibri_route_weigh(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                         const int32_t *ids, const uint8_t *bad, float *weights);

#endif
