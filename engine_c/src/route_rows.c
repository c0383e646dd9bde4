/* route_rows.c - the router of one layer for rows that come from outside. */
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

int colibri_route_rows(colibri_session *s, int32_t layer, const float *x, int32_t n, int32_t *ids, float *weights, uint8_t *bad, colibri_error *err) {
  const colibri_model_info *i = &s->model->info;
  if (layer < 0 || layer >= i->layers || !s->model->layers[layer].router) return colibri_fail(err, COLIBRI_EINVAL, "layer %d has no router", layer);
  if (n < 1 || n > s->options.max_rows) return colibri_fail(err, COLIBRI_EINVAL, "%d rows: the session was opened for 1..%d", n, s->options.max_rows);
  if (s->model->layers[layer].router_input_scale)
    return colibri_fail(err, COLIBRI_EUNSUPPORTED, "the router of this model reads the residual, which rows after the norm do not have");
  colibri_guard_enter();
  gate_rows(s, &s->model->layers[layer], x, n);
  colibri_route(&s->model->router, &s->model->layers[layer].route, s->env.kernels, s->scores, i->experts, n, ids, weights, bad);
  colibri_guard_leave();
  return COLIBRI_OK;
}
