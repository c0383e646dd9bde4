/* remote.c - experts that are computed elsewhere: what a step hands out and takes back, and a node's side of it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cut.h"
#include "guard.h"

/* ---------------------------------------------------------------- which */

int colibri_remote_open(colibri_session *s) {
  size_t experts = (size_t)s->model->info.experts;
  s->remote = calloc(experts * (size_t)s->model->info.layers, 1);
  s->skip = calloc(experts, 1);
  s->missing = calloc(experts, 1);
  s->wanted = calloc(experts, sizeof *s->wanted);
  s->wanted_rows = calloc(experts, sizeof *s->wanted_rows);
  s->row_numbers = calloc((size_t)s->options.max_rows, sizeof *s->row_numbers);
  s->ranges = calloc((size_t)s->model->info.layers, sizeof *s->ranges);
  return !s->ranges || !s->row_numbers || !s->remote || !s->skip || !s->missing || !s->wanted || !s->wanted_rows;
}

void colibri_remote_close(colibri_session *s) {
  free(s->remote), free(s->skip), free(s->missing), free(s->wanted), free(s->wanted_rows), free(s->row_numbers), free(s->ranges);
}

int colibri_session_remote(colibri_session *s, const uint8_t *remote, colibri_error *err) {
  size_t n = (size_t)s->model->info.experts * (size_t)s->model->info.layers;
  if (s->stage != COLIBRI_STAGE_IDLE) return colibri_fail(err, COLIBRI_ESTATE, "a step is under way: resume it or abandon it first");
  if (remote && !s->options.split_down) return colibri_fail(err, COLIBRI_ESTATE, "experts can be computed elsewhere only in a session with split_down");
  s->has_remote = 0;
  for (size_t i = 0; i < n; i++) s->has_remote |= s->remote[i] = remote && remote[i];
  return COLIBRI_OK;
}

int colibri_session_remote_layers(colibri_session *s, const int32_t (*ranges)[2], int32_t n, colibri_error *err) {
  int32_t layers = s->model->info.layers, before = 0;
  if (s->stage != COLIBRI_STAGE_IDLE) return colibri_fail(err, COLIBRI_ESTATE, "a step is under way: resume it or abandon it first");
  if (n < 0 || n > layers || (n && !ranges)) return colibri_fail(err, COLIBRI_EINVAL, "%d ranges of layers: there can be 0 to %d", n, layers);
  for (int i = 0; i < n; before = ranges[i++][1])
    if (ranges[i][0] < before || ranges[i][1] <= ranges[i][0] || ranges[i][1] > layers)
      return colibri_fail(err, COLIBRI_EINVAL, "layers %d to %d: ranges must ascend, be apart and lie within the model's %d", ranges[i][0], ranges[i][1], layers);
  if (n) memcpy(s->ranges, ranges, sizeof *ranges * (size_t)n);
  s->n_ranges = n;
  return COLIBRI_OK;
}

int colibri_remote_range(const colibri_session *s, int layer) {
  for (int i = 0; i < s->n_ranges; i++)
    if (s->ranges[i][0] == layer) return s->ranges[i][1];
  return 0;
}

int colibri_remote_find(colibri_session *s, int layer) {
  int experts = s->model->info.experts;
  const int32_t *first = s->env.arena.expert_first;
  const uint8_t *remote = s->remote + (size_t)layer * (size_t)experts;
  s->n_wanted = 0;
  for (int e = 0; e < experts; e++) {
    s->missing[e] = remote[e] && first[e + 1] > first[e];
    if (!s->missing[e]) continue;
    s->wanted[s->n_wanted] = e;
    s->wanted_rows[s->n_wanted++] = first[e + 1] - first[e];
  }
  return s->n_wanted;
}

static const colibri_matrix *gate_up_of(const colibri_session *s, int layer) { return &s->model->layers[layer].experts[0].gate_up; }

static int row_bytes(const colibri_session *s, int layer) {
  const colibri_matrix *m = gate_up_of(s, layer);
  return (int)colibri_row_bytes(m->format, m->groups);
}

int64_t colibri_prepared_bytes(const colibri_session *s, int32_t layer) {
  return layer < 0 || layer >= s->model->info.layers ? 0 : row_bytes(s, layer);
}

/* ---------------------------------------------------------------- a step that has been handed out */

/* Experts that are wanted in the layer the step stands in, each at most once. */
static int check_wanted(const colibri_session *s, const int32_t *experts, int32_t n, colibri_error *err) {
  if (s->stage != COLIBRI_STAGE_ROUTED && s->stage != COLIBRI_STAGE_LOCAL) return colibri_fail(err, COLIBRI_ESTATE, "no step waits for experts from elsewhere");
  for (int i = 0; i < n; i++) {
    int wanted = 0;
    for (int k = 0; k < s->n_wanted; k++) wanted |= s->wanted[k] == experts[i];
    if (!wanted) return colibri_fail(err, COLIBRI_EINVAL, "layer %d: expert %d is not wanted from elsewhere", s->layer, experts[i]);
    for (int k = 0; k < i; k++)
      if (experts[k] == experts[i]) return colibri_fail(err, COLIBRI_EINVAL, "layer %d: expert %d is named twice", s->layer, experts[i]);
  }
  return COLIBRI_OK;
}

static int64_t pairs_of(const colibri_session *s, const int32_t *experts, int32_t n) {
  const int32_t *first = s->env.arena.expert_first;
  int64_t pairs = 0;
  for (int i = 0; i < n; i++) pairs += first[experts[i] + 1] - first[experts[i]];
  return pairs;
}

int colibri_remote_state(const colibri_session *s, colibri_remote *out) {
  if (s->stage == COLIBRI_STAGE_IDLE) return COLIBRI_ESTATE;
  if (s->stage == COLIBRI_STAGE_LAYERS) {
    *out = (colibri_remote){.kind = COLIBRI_REMOTE_LAYERS, .layer = s->layer, .end = s->range_end, .n_rows = s->n_rows};
    return COLIBRI_OK;
  }
  *out = (colibri_remote){.kind = COLIBRI_REMOTE_EXPERTS, .layer = s->layer, .end = s->layer + 1, .n_rows = s->n_rows, .n_experts = s->n_wanted,
                          .weighs_input = s->model->router.apply_at == COLIBRI_APPLY_INPUT, .experts = s->wanted, .rows = s->wanted_rows};
  return COLIBRI_OK;
}

int colibri_remote_pack(colibri_session *s, const int32_t *experts, int32_t n, void *rows, int32_t *row_of_pair, float *weights, int32_t *n_rows,
                        colibri_error *err) {
  const colibri_arena *a = &s->env.arena;
  int rc = check_wanted(s, experts, n, err), bytes = row_bytes(s, s->layer);
  if (rc) return rc;
  int32_t *number = s->row_numbers, count = 0;
  memset(number, 0xff, sizeof *number * (size_t)s->n_rows);
  for (int i = 0; i < n; i++)
    for (int pair = a->expert_first[experts[i]]; pair < a->expert_first[experts[i] + 1]; pair++) number[a->pair_row[pair]] = 0;
  for (int row = 0; row < s->n_rows; row++) {
    if (number[row] < 0) continue;
    memcpy((char *)rows + (int64_t)count * bytes, a->act_hidden + (int64_t)row * a->dims.hidden_row_bytes, (size_t)bytes);
    number[row] = count++;
  }
  for (int i = 0; i < n; i++)
    for (int pair = a->expert_first[experts[i]]; pair < a->expert_first[experts[i] + 1]; pair++) {
      *row_of_pair++ = number[a->pair_row[pair]];
      if (weights) *weights++ = a->pair_weight[pair];
    }
  *n_rows = count;
  return COLIBRI_OK;
}

int colibri_remote_put(colibri_session *s, const int32_t *experts, int32_t n, const void *out, uint64_t bytes, colibri_error *err) {
  const colibri_arena *a = &s->env.arena;
  int hidden = s->model->info.hidden, rc = check_wanted(s, experts, n, err);
  if (rc) return rc;
  uint64_t want = (uint64_t)pairs_of(s, experts, n) * (uint64_t)hidden * sizeof(float);
  if (bytes != want)
    return colibri_fail(err, COLIBRI_EINVAL, "layer %d: outputs of %llu bytes for experts whose rows give %llu", s->layer, (unsigned long long)bytes, (unsigned long long)want);
  const char *from = out;
  for (int i = 0; i < n; i++) {
    for (int pair = a->expert_first[experts[i]]; pair < a->expert_first[experts[i] + 1]; pair++, from += sizeof(float) * (size_t)hidden) {
      float *to = a->pair_out + (int64_t)pair * a->dims.hidden_pad;
      memcpy(to, from, sizeof *to * (size_t)hidden);
      memset(to + hidden, 0, sizeof *to * (size_t)(a->dims.hidden_pad - hidden));
      if (isnan(to[0]) && !a->row_error[a->pair_row[pair]]) a->row_error[a->pair_row[pair]] = (uint32_t)s->layer + 1; /* how a node says it: all NaN */
    }
    s->missing[experts[i]] = 0;
  }
  return COLIBRI_OK;
}

float *colibri_remote_x(colibri_session *s, int64_t *stride) {
  *stride = s->env.arena.dims.hidden_pad;
  return s->stage == COLIBRI_STAGE_LAYERS ? s->env.arena.x0 : NULL;
}

int colibri_remote_compute(colibri_session *s, const int32_t *experts, int32_t n, colibri_error *err) {
  int rc = check_wanted(s, experts, n, err);
  if (rc || !n) return rc;
  colibri_guard_enter();
  uint64_t began = colibri_now_ns();
  s->stats.remote_ns += began - s->left_at;
  s->op_began = began;
  memset(s->skip, 1, (size_t)s->model->info.experts);
  for (int i = 0; i < n; i++) s->skip[experts[i]] = 0;
  colibri_session_experts(s, s->layer);
  memset(s->skip, 0, (size_t)s->model->info.experts);
  for (int i = 0; i < n; i++) s->missing[experts[i]] = 0;
  s->left_at = colibri_now_ns();
  colibri_guard_leave();
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- a node's side */

static int check_work(const colibri_session *s, const colibri_expert_work *w, int64_t *pairs, colibri_error *err) {
  const colibri_model_info *i = &s->model->info;
  if (s->stage != COLIBRI_STAGE_IDLE) return colibri_fail(err, COLIBRI_ESTATE, "a step is under way: resume it or abandon it first");
  if (!s->options.split_down) return colibri_fail(err, COLIBRI_ESTATE, "experts run by themselves only in a session with split_down");
  if (w->layer < 0 || w->layer >= i->layers) return colibri_fail(err, COLIBRI_EINVAL, "layer %d is none of the model's %d", w->layer, i->layers);
  if (w->kind < COLIBRI_ROWS_PREPARED || w->kind > COLIBRI_ROWS_BF16) return colibri_fail(err, COLIBRI_EINVAL, "rows of kind %d: it must be 0 to 2", w->kind);
  if (w->n_rows < 1 || w->n_rows > s->options.max_rows)
    return colibri_fail(err, COLIBRI_EINVAL, "%d rows: the session was opened for 1 to %d at once", w->n_rows, s->options.max_rows);
  int experts = s->model->layers[w->layer].router ? i->experts : 1;
  if (w->n_experts < 1 || w->n_experts > experts) return colibri_fail(err, COLIBRI_EINVAL, "%d experts: layer %d has %d", w->n_experts, w->layer, experts);
  *pairs = 0;
  for (int n = 0; n < w->n_experts; n++) {
    if (w->experts[n] < 0 || w->experts[n] >= experts || (n && w->experts[n] <= w->experts[n - 1]))
      return colibri_fail(err, COLIBRI_EINVAL, "expert %d: they must ascend and be below %d", w->experts[n], experts);
    if (w->counts[n] < 1 || w->counts[n] > w->n_rows) return colibri_fail(err, COLIBRI_EINVAL, "expert %d has %d of %d rows", w->experts[n], w->counts[n], w->n_rows);
    *pairs += w->counts[n];
  }
  if (*pairs > (int64_t)s->options.max_rows * i->top_k)
    return colibri_fail(err, COLIBRI_EINVAL, "%lld pairs of a row and an expert: the session was opened for %lld at once", (long long)*pairs, (long long)s->options.max_rows * i->top_k);
  uint64_t width = w->kind == COLIBRI_ROWS_PREPARED ? (uint64_t)row_bytes(s, w->layer) : (uint64_t)i->hidden * (w->kind == COLIBRI_ROWS_F32 ? 4 : 2);
  if (w->rows_bytes != width * (uint64_t)w->n_rows)
    return colibri_fail(err, COLIBRI_EINVAL, "%d rows have %llu bytes, not %llu", w->n_rows, (unsigned long long)width * (unsigned long long)w->n_rows, (unsigned long long)w->rows_bytes);
  for (int64_t p = 0; p < *pairs; p++)
    if (w->row_of_pair[p] < 0 || w->row_of_pair[p] >= w->n_rows)
      return colibri_fail(err, COLIBRI_EINVAL, "pair %lld is of row %d: there are %d", (long long)p, w->row_of_pair[p], w->n_rows);
  return COLIBRI_OK;
}

/* Row r as the experts read it, into the arena. Nonzero if it has a NaN or infinity. */
static int take_row(colibri_session *s, const colibri_expert_work *w, int r) {
  const colibri_matrix *m = gate_up_of(s, w->layer);
  int hidden = s->model->info.hidden;
  char *to = s->env.arena.act_hidden + (int64_t)r * s->env.arena.dims.hidden_row_bytes;
  if (w->kind == COLIBRI_ROWS_PREPARED) {
    int64_t bytes = row_bytes(s, w->layer);
    memcpy(to, (const char *)w->rows + r * bytes, (size_t)bytes);
    return 0;
  }
  float *x = s->env.vector;
  if (w->kind == COLIBRI_ROWS_F32) memcpy(x, (const char *)w->rows + (int64_t)r * hidden * (int64_t)sizeof *x, sizeof *x * (size_t)hidden);
  for (int i = 0; w->kind == COLIBRI_ROWS_BF16 && i < hidden; i++) {
    uint16_t half;
    memcpy(&half, (const char *)w->rows + ((int64_t)r * hidden + i) * (int64_t)sizeof half, sizeof half);
    uint32_t word = (uint32_t)half << 16;
    memcpy(&x[i], &word, sizeof word);
  }
  return s->env.kernels->prepare[m->format](x, m->k, m->groups, 0, m->groups, to);
}

static void take_pairs(colibri_session *s, const colibri_expert_work *w) {
  const colibri_arena *a = &s->env.arena;
  int32_t pair = 0, next = 0;
  for (int e = 0; e < s->model->info.experts; e++) {
    a->expert_first[e] = pair;
    if (next < w->n_experts && w->experts[next] == e) pair += w->counts[next++];
  }
  a->expert_first[s->model->info.experts] = pair;
  memcpy(a->pair_row, w->row_of_pair, sizeof *a->pair_row * (size_t)pair);
  for (int p = 0; p < pair; p++) a->pair_weight[p] = w->weights ? w->weights[p] : 1.0f;
}

static void give_pairs(const colibri_session *s, int64_t pairs, float *out) {
  const colibri_arena *a = &s->env.arena;
  int hidden = s->model->info.hidden;
  for (int64_t p = 0; p < pairs; p++, out += hidden) {
    memcpy(out, a->pair_out + p * a->dims.hidden_pad, sizeof *out * (size_t)hidden);
    for (int i = 0; a->row_error[a->pair_row[p]] && i < hidden; i++) out[i] = NAN;
  }
}

int colibri_experts_run(colibri_session *s, const colibri_expert_work *work, float *out, colibri_error *err) {
  int64_t pairs = 0;
  int rc = check_work(s, work, &pairs, err);
  if (!rc) rc = colibri_session_gather(s, err);
  if (rc) return rc;
  colibri_guard_enter();
  s->n_rows = work->n_rows;
  s->op_began = colibri_now_ns();
  memset(s->env.arena.row_error, 0, sizeof(uint32_t) * (size_t)work->n_rows);
  for (int r = 0; r < work->n_rows; r++)
    if (take_row(s, work, r)) s->env.arena.row_error[r] = (uint32_t)work->layer + 1;
  take_pairs(s, work);
  colibri_session_experts(s, work->layer);
  give_pairs(s, pairs, out);
  colibri_guard_leave();
  return COLIBRI_OK;
}
