/* router.h - gate logits to experts and weights (internal). Formulas: docs/container.md, "Router". */
#ifndef COLIBRI_ROUTER_H
#define COLIBRI_ROUTER_H

#include <stdbool.h>

#include "kernels.h"
#include "model.h"

/* ---------------------------------------------------------------- the whole (router.c) */

/* Routes n tokens: z [n, ld] gate logits (f32, ld >= experts; the logit bias is in them) -> ids, weights [n, k], by descending selection score, ties to
 * the lower index. bad [n]: set to 1 for a token with a NaN or infinite logit, or whose scores or weights are not finite (a bias of such size); its ids are
 * then 0..k-1 and its weights 0; else 0. Allocates nothing. The descriptor has passed colibri_router_check. */
void colibri_route(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                   int32_t *ids, float *weights, uint8_t *bad);

/* Whether a descriptor makes sense: COLIBRI_EINVAL and a sentence that names the field ("router.k"), and the remedy where
 * it is not plain. route_check.c */
int colibri_router_check(const colibri_router *r, colibri_error *err);

/* ---------------------------------------------------------------- its parts */

/* What selection compares: scores [n, experts]. The logits themselves where selecting on them is selecting on scores, else the score with its
 * selection bias. Experts in groups that are left out: -inf (0 where the descriptor masks with zero and others can be below). Nothing is promised for a token
 * with a NaN or infinite logit. route_select.c */
void colibri_route_select_scores(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld,
                                 int n, float *scores);

/* ids [n, k] and bad [n] as colibri_route gives them, but for weights that are not finite. route_select.c */
void colibri_route_select(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                          int32_t *ids, uint8_t *bad);

/* The weights [n, k] of given experts, ids [n, k] by descending selection score: for colibri_route's own choice its own weights, bit by bit. Bad tokens
 * get 0. route_weigh.c */
void colibri_route_weigh(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                         const int32_t *ids, const uint8_t *bad, float *weights);

/* The last part of that: times the descriptor's scale and the layer's expert_scale. */
void colibri_route_scale(const colibri_router *r, const colibri_router_layer *layer, int n, const int32_t *ids, float *weights);

static inline bool colibri_router_has_groups(const colibri_router *r) { return r->n_group > 1; }

/* Selecting on logits is selecting on scores: all scores rise with the logit, and a group's largest score is its largest logit's. Logits never tie where
 * scores saturate. Not if a bias is added to the scores, if groups are compared by sums, or if a group left out counts as 0 among logits. */
static inline bool colibri_router_by_logits(const colibri_router *r, const colibri_router_layer *layer) {
  if (layer->select_bias) return false;
  if (!colibri_router_has_groups(r)) return true;
  return r->group_metric == COLIBRI_GROUP_BY_MAX && (r->score != COLIBRI_SCORE_LOGITS || r->group_mask == COLIBRI_GROUP_MASK_MINUS_INF);
}

/* The weights are a softmax over the chosen experts' logits: also what probabilities become when they are divided by their sum. */
static inline bool colibri_router_softmax_chosen(const colibri_router *r) {
  if (r->weight == COLIBRI_WEIGHT_SOFTMAX_CHOSEN) return r->renorm == COLIBRI_RENORM_NONE;
  return r->weight == COLIBRI_WEIGHT_SCORE && r->score == COLIBRI_SCORE_SOFTMAX_ALL && r->renorm == COLIBRI_RENORM_SUM && r->renorm_eps == 0;
}

#endif
