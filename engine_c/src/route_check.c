/* route_check.c - what a router's descriptor may say. */
#include "router.h"

static int check_range(const char *name, int32_t value, int32_t low, int32_t high, colibri_error *err) {
  if (value >= low && value <= high) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EINVAL, "router.%s is %d, outside %d..%d", name, value, low, high);
}

static int check_number(const char *name, float value, float high, colibri_error *err) {
  if (value >= 0 && value <= high) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EINVAL, "router.%s is %g, outside 0..%g", name, (double)value, (double)high);
}

static int check_enums(const colibri_router *r, colibri_error *err) {
  const struct { const char *name; int32_t value, high; } fields[] = {
    {"score", r->score, COLIBRI_SCORE_LOGITS},   {"weight", r->weight, COLIBRI_WEIGHT_SIGMOID_CHOSEN},
    {"renorm", r->renorm, COLIBRI_RENORM_SUM},   {"renorm_way", r->renorm_way, COLIBRI_EPS_CLAMP},
    {"apply_at", r->apply_at, COLIBRI_APPLY_INPUT}, {"input", r->input, COLIBRI_ROUTER_RESIDUAL},
    {"group_metric", r->group_metric, COLIBRI_GROUP_BY_SUM_TOP2}, {"group_mask", r->group_mask, COLIBRI_GROUP_MASK_MINUS_INF},
  };
  int rc = COLIBRI_OK;
  for (size_t i = 0; i < sizeof fields / sizeof *fields && !rc; i++) rc = check_range(fields[i].name, fields[i].value, 0, fields[i].high, err);
  return rc;
}

static int check_groups(const colibri_router *r, colibri_error *err) {
  if (!colibri_router_has_groups(r)) return COLIBRI_OK;
  if (r->experts % r->n_group)
    return colibri_fail(err, COLIBRI_EINVAL, "router.n_group is %d, which does not divide the %d experts", r->n_group, r->experts);
  int size = r->experts / r->n_group;
  int rc = check_range("topk_group", r->topk_group, 1, r->n_group < COLIBRI_MAX_TOP_K ? r->n_group : COLIBRI_MAX_TOP_K, err);
  if (rc) return rc;
  if (r->k > r->topk_group * size)
    return colibri_fail(err, COLIBRI_EINVAL, "router.k is %d, but router.topk_group keeps only %d groups of %d experts", r->k, r->topk_group, size);
  if (r->group_metric == COLIBRI_GROUP_BY_SUM_TOP2 && size < 2)
    return colibri_fail(err, COLIBRI_EINVAL, "router.group_metric is sum_top2, but a group has one expert: use max or fewer groups than router.n_group %d",
                        r->n_group);
  return COLIBRI_OK;
}

/* A number that nothing uses is a mistake of whoever wrote it. */
static int check_unused(const colibri_router *r, colibri_error *err) {
  if (r->renorm == COLIBRI_RENORM_NONE && r->renorm_eps != 0)
    return colibri_fail(err, COLIBRI_EINVAL, "router.renorm_eps is %g though router.renorm is none: leave one out", (double)r->renorm_eps);
  if (r->weight != COLIBRI_WEIGHT_SPARSEMIXER && r->jitter_eps != 0)
    return colibri_fail(err, COLIBRI_EINVAL, "router.jitter_eps is %g though router.weight is not sparsemixer: leave it out", (double)r->jitter_eps);
  if (!colibri_router_has_groups(r) && r->topk_group > 1)
    return colibri_fail(err, COLIBRI_EINVAL, "router.topk_group is %d though there are no groups: say router.n_group or leave it out", r->topk_group);
  return COLIBRI_OK;
}

int colibri_router_check(const colibri_router *r, colibri_error *err) {
  int rc = check_range("experts", r->experts, 1, COLIBRI_MAX_EXPERTS, err);
  if (!rc) rc = check_range("k", r->k, 1, COLIBRI_MAX_TOP_K, err);
  if (!rc && r->k > r->experts)
    rc = colibri_fail(err, COLIBRI_EINVAL, "router.k is %d but there are %d experts", r->k, r->experts);
  if (!rc) rc = check_range("n_group", r->n_group, 0, r->experts, err);
  if (!rc) rc = check_enums(r, err);
  if (!rc) rc = check_groups(r, err);
  if (!rc) rc = check_number("renorm_eps", r->renorm_eps, 1e6f, err);
  if (!rc) rc = check_number("jitter_eps", r->jitter_eps, 1e6f, err);
  if (!rc) rc = check_number("scale", r->scale, 1e6f, err);
  if (!rc && r->scale == 0) rc = colibri_fail(err, COLIBRI_EINVAL, "router.scale is 0: it must be above; 1 changes nothing");
  return rc ? rc : check_unused(r, err);
}
