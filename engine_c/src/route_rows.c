/* route_rows.c - the router of one layer, and its whole block of experts, for rows that come from outside. */
#include <math.h>
#include <string.h>

#include "guard.h"
#include "session.h"

/* As many rows as the lane's scratch holds at once. */
static int32_t rows_at_once(const colibri_session *s) {
  int32_t room = COLIBRI_PRODUCT_FLOATS / s->env.arena.dims.hidden_pad;
  return room < 1 ? 1 : room;
}

static void gate_rows(colibri_session *s, const colibri_layer *layer, const float *x, int32_t n) {
  const colibri_model_info *i = &s->model->info;
  int32_t stride = s->env.arena.dims.hidden_pad, most = rows_at_once(s);
  float *padded = COLIBRI_PRODUCT_FLOATS < stride ? s->env.vector : s->env.product;
  for (int32_t row = 0; row < n; row += most) {
    int32_t count = n - row < most ? n - row : most;
    for (int32_t r = 0; r < count; r++) memcpy(padded + (int64_t)r * stride, x + (int64_t)(row + r) * i->hidden, sizeof *x * (size_t)i->hidden);
    s->env.kernels->gate(layer->router, layer->route.bias, i->experts, i->hidden, padded, stride, count, s->scores + (int64_t)row * i->experts);
  }
}

/* A layer whose router, if it has one, needs no more than normed rows. */
static int check_layer(const colibri_session *s, int32_t layer, colibri_error *err) {
  if (s->stage != COLIBRI_STAGE_IDLE) return colibri_fail(err, COLIBRI_ESTATE, "a step is under way: resume it or abandon it first");
  if (layer < 0 || layer >= s->model->info.layers) return colibri_fail(err, COLIBRI_EINVAL, "layer %d is none of the model's %d", layer, s->model->info.layers);
  if (!s->model->layers[layer].router_input_scale) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EUNSUPPORTED, "the router of this model reads the residual, which rows after the norm do not have");
}

int colibri_route_rows(colibri_session *s, int32_t layer, const float *x, int32_t n, int32_t *ids, float *weights, uint8_t *bad, colibri_error *err) {
  const colibri_model_info *i = &s->model->info;
  int rc = check_layer(s, layer, err);
  if (rc) return rc;
  if (!s->model->layers[layer].router) return colibri_fail(err, COLIBRI_EINVAL, "layer %d has no router", layer);
  if (n < 1 || n > s->options.max_rows) return colibri_fail(err, COLIBRI_EINVAL, "%d rows: the session was opened for 1..%d", n, s->options.max_rows);
  colibri_guard_enter();
  gate_rows(s, &s->model->layers[layer], x, n);
  colibri_route(&s->model->router, &s->model->layers[layer].route, s->env.kernels, s->scores, i->experts, n, ids, weights, bad);
  colibri_guard_leave();
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- the block of experts */

/* Rows as the experts read them, and where they go: a dense layer has one expert. */
static void route_block(colibri_session *s, int32_t layer, const float *x, int32_t n) {
  const colibri_layer *l = &s->model->layers[layer];
  const colibri_model_info *i = &s->model->info;
  const colibri_matrix *m = &l->experts[0].gate_up;
  const colibri_arena *a = &s->env.arena;
  if (l->router) {
    gate_rows(s, l, x, n);
    colibri_route(&s->model->router, &l->route, s->env.kernels, s->scores, i->experts, n, s->route_ids, s->route_weights, s->route_bad);
  }
  for (int32_t row = 0; row < n; row++) {
    if (!l->router) s->route_ids[row] = 0, s->route_weights[row] = 1.0f;
    int bad = s->env.kernels->prepare[m->format](x + (int64_t)row * i->hidden, m->k, m->groups, 0, m->groups, a->act_hidden + (int64_t)row * a->dims.hidden_row_bytes);
    a->row_error[row] = bad || (l->router && s->route_bad[row]) ? (uint32_t)layer + 1 : 0;
  }
}

/* One piece, at most max_rows. */
static void run_block(colibri_session *s, int32_t layer, float *x, int32_t n) {
  const colibri_arena *a = &s->env.arena;
  int32_t hidden = s->model->info.hidden, pad = a->dims.hidden_pad;
  s->n_rows = n;
  s->op_began = colibri_now_ns();
  route_block(s, layer, x, n);
  colibri_session_dispatch(s, layer, s->route_ids, s->route_weights, COLIBRI_UNCOUNTED);
  memset(a->x1, 0, sizeof *a->x1 * (size_t)n * (size_t)pad); /* no residual */
  colibri_session_experts(s, layer);
  colibri_session_combine(s, layer);
  for (int32_t row = 0; row < n; row++, x += hidden) {
    memcpy(x, a->x0 + (int64_t)row * pad, sizeof *x * (size_t)hidden);
    for (int32_t j = 0; a->row_error[row] && j < hidden; j++) x[j] = NAN;
  }
}

int colibri_moe_run(colibri_session *s, int32_t layer, float *x, int32_t n, int32_t *ids, float *weights, colibri_error *err) {
  int32_t hidden = s->model->info.hidden, k = s->model->info.top_k, most = s->options.max_rows;
  int rc = check_layer(s, layer, err);
  if (!rc && n < 1) rc = colibri_fail(err, COLIBRI_EINVAL, "%d rows: there must be one at least", n);
  if (!rc) rc = colibri_session_gather(s, err);
  if (rc) return rc;
  colibri_guard_enter();
  for (int32_t row = 0; row < n; row += most) {
    int32_t count = n - row < most ? n - row : most;
    run_block(s, layer, x + (int64_t)row * hidden, count);
    if (ids) memcpy(ids + (int64_t)row * k, s->route_ids, sizeof *ids * (size_t)count * (size_t)k);
    if (weights) memcpy(weights + (int64_t)row * k, s->route_weights, sizeof *weights * (size_t)count * (size_t)k);
  }
  colibri_guard_leave();
  return COLIBRI_OK;
}
