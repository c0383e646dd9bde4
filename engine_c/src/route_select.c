/* route_select.c - which experts: scores, groups of experts, the k best. */
#include <math.h>
#include <string.h>

#include "router.h"

#define BLOCK 16 /* tokens at a time, on the stack */

typedef struct block_scratch {
  float choice[BLOCK * COLIBRI_MAX_EXPERTS]; /* what selection compares, [tokens, experts] */
  float metric[BLOCK * COLIBRI_MAX_EXPERTS]; /* of groups, [tokens, n_group] */
  int32_t kept[BLOCK * COLIBRI_MAX_TOP_K];   /* groups, [tokens, topk_group] */
} block_scratch;

static int group_size(const colibri_router *r) { return r->experts / r->n_group; }

/* A group left out counts as 0, and there may be experts below: it must not simply be forgotten. */
static bool mask_can_win(const colibri_router *r, const colibri_router_layer *layer) {
  return r->group_mask == COLIBRI_GROUP_MASK_ZERO && !colibri_router_by_logits(r, layer) && (layer->select_bias || r->score == COLIBRI_SCORE_LOGITS);
}

/* choice [n, experts] of n tokens, no group left out yet; bad [n] for logits that are not finite. */
static void score_all(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                      float *choice, uint8_t *bad) {
  int score = colibri_router_by_logits(r, layer) ? COLIBRI_SCORE_LOGITS : r->score;
  kernels->scores(score, z, ld, r->experts, n, choice, bad);
  for (int t = 0; layer->select_bias && t < n; t++)
    kernels->add(choice + (ptrdiff_t)t * r->experts, layer->select_bias, r->experts, choice + (ptrdiff_t)t * r->experts);
}

static void sort_ascending(int32_t *x, int n) {
  for (int i = 1; i < n; i++) {
    int32_t value = x[i];
    int at = i;
    for (; at && x[at - 1] > value; at--) x[at] = x[at - 1];
    x[at] = value;
  }
}

/* kept [n, topk_group]: the best groups of each token, ascending. n <= BLOCK. Marks tokens as bad where a metric is not finite. */
static void keep_groups(const colibri_router *r, const colibri_kernels *kernels, int n, block_scratch *s, uint8_t *bad) {
  uint8_t overflow[BLOCK];
  kernels->group_best(s->choice, group_size(r), r->n_group, n, r->group_metric == COLIBRI_GROUP_BY_SUM_TOP2, s->metric);
  kernels->top_k(s->metric, r->n_group, r->n_group, n, r->topk_group, s->kept, overflow);
  for (int t = 0; t < n; t++) {
    bad[t] |= overflow[t];
    sort_ascending(s->kept + t * r->topk_group, r->topk_group);
  }
}

/* Puts `value` where a token's group is left out. */
static void mask(const colibri_router *r, const int32_t *kept, float value, float *choice) {
  int size = group_size(r), next = 0;
  for (int g = 0; g < r->n_group; g++) {
    bool keep = next < r->topk_group && kept[next] == g;
    next += keep;
    for (int e = 0; e < size && !keep; e++) choice[g * size + e] = value;
  }
}

/* Rows of kept experts only, [n, topk_group * size], in the place of rows of all: every piece moves down or stays. */
static void compact(const colibri_router *r, int n, block_scratch *s) {
  int size = group_size(r);
  float *to = s->choice;
  for (int t = 0; t < n; t++)
    for (int i = 0; i < r->topk_group; i++, to += size)
      memmove(to, s->choice + (ptrdiff_t)t * r->experts + (ptrdiff_t)s->kept[t * r->topk_group + i] * size, sizeof *to * (size_t)size);
}

/* Numbers among a token's kept experts to numbers among all; ascending groups keep the order of ties. */
static void expand(const colibri_router *r, const int32_t *kept, int32_t *ids) {
  int size = group_size(r);
  for (int i = 0; i < r->k; i++) ids[i] = kept[ids[i] / size] * size + ids[i] % size;
}

static void select_in_groups(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, int n, block_scratch *s,
                             int32_t *ids, uint8_t *bad, uint8_t *poisoned) {
  int width = r->experts;
  keep_groups(r, kernels, n, s, poisoned);
  if (mask_can_win(r, layer)) {
    for (int t = 0; t < n; t++) mask(r, s->kept + t * r->topk_group, 0, s->choice + (ptrdiff_t)t * r->experts);
    kernels->top_k(s->choice, width, width, n, r->k, ids, bad);
    return;
  }
  compact(r, n, s);
  width = r->topk_group * group_size(r);
  kernels->top_k(s->choice, width, width, n, r->k, ids, bad);
  for (int t = 0; t < n; t++) expand(r, s->kept + t * r->topk_group, ids + t * r->k);
}

/* n <= BLOCK tokens. */
static void select_block(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                         block_scratch *s, int32_t *ids, uint8_t *bad) {
  uint8_t poisoned[BLOCK] = {0};
  score_all(r, layer, kernels, z, ld, n, s->choice, poisoned);
  if (colibri_router_has_groups(r))
    select_in_groups(r, layer, kernels, n, s, ids, bad, poisoned);
  else
    kernels->top_k(s->choice, r->experts, r->experts, n, r->k, ids, bad);
  for (int t = 0; t < n; t++) {
    bad[t] |= poisoned[t];
    for (int i = 0; bad[t] && i < r->k; i++) ids[t * r->k + i] = i;
  }
}

void colibri_route_select(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld, int n,
                          int32_t *ids, uint8_t *bad) {
  if (colibri_router_by_logits(r, layer) && !colibri_router_has_groups(r)) {
    kernels->top_k(z, ld, r->experts, n, r->k, ids, bad);
    return;
  }
  block_scratch s;
  for (int t = 0; t < n; t += BLOCK)
    select_block(r, layer, kernels, z + (ptrdiff_t)t * ld, ld, n - t < BLOCK ? n - t : BLOCK, &s, ids + (ptrdiff_t)t * r->k, bad + t);
}

/* Overwrites the scores of experts in groups that are left out; n <= BLOCK. */
static void leave_out_groups(const colibri_router *r, const colibri_kernels *kernels, int n, float left_out, float *scores) {
  block_scratch s;
  uint8_t bad[BLOCK];
  memcpy(s.choice, scores, sizeof *scores * (size_t)n * (size_t)r->experts);
  keep_groups(r, kernels, n, &s, bad);
  for (int t = 0; t < n; t++) mask(r, s.kept + t * r->topk_group, left_out, scores + (ptrdiff_t)t * r->experts);
}

void colibri_route_select_scores(const colibri_router *r, const colibri_router_layer *layer, const colibri_kernels *kernels, const float *z, int ld,
                                 int n, float *scores) {
  uint8_t bad[BLOCK];
  float left_out = mask_can_win(r, layer) ? 0 : -INFINITY;
  for (int t = 0; t < n; t += BLOCK, z += (ptrdiff_t)BLOCK * ld, scores += (ptrdiff_t)BLOCK * r->experts) {
    int count = n - t < BLOCK ? n - t : BLOCK;
    score_all(r, layer, kernels, z, ld, count, scores, bad);
    if (colibri_router_has_groups(r)) leave_out_groups(r, kernels, count, left_out, scores);
  }
}
