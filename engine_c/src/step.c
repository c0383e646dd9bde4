/* step.c - one step: take the batch in, run all layers phase by phase, give the results out. */
#include <math.h>
#include <string.h>

#include "cut.h"
#include "guard.h"

#define INLINE_ROWS 2 /* so few rows are prepared by the front end itself: cheaper than a phase */

/* ---------------------------------------------------------------- checks */

/* A sequence's slot, damping and wish for margins. */
static int check_routing(const colibri_session *s, const colibri_batch *b, int n, colibri_error *err) {
  const colibri_seq *q = &b->seqs[n];
  if (q->slot < -1 || q->slot >= s->options.max_slots)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: slot %d is outside the session's %d (max_slots); -1 is none", n, q->slot, s->options.max_slots);
  if (q->slot >= 0 && s->slot_step[q->slot] == s->step)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: slot %d is another sequence's of this step", n, q->slot);
  if (q->slot >= 0) s->slot_step[q->slot] = s->step;
  if (q->margins < 0 || q->margins > s->options.trace_routes)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: margins is %d, it must be 0%s", n, q->margins,
                        s->options.trace_routes ? " or 1" : " in a session that does not trace_routes");
  if (q->damping < -1 || q->damping >= b->n_dampings)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: damping %d is outside the batch's %d; -1 is none", n, q->damping, b->n_dampings);
  const colibri_damping *p = q->damping < 0 ? NULL : &b->dampings[q->damping];
  if (s->n_ranges && (q->margins || (p && p->kind != COLIBRI_DAMPING_OFF)))
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: no %s while layers are computed elsewhere", n, q->margins ? "margins of routes" : "damping");
  if (!p || p->kind == COLIBRI_DAMPING_OFF || p->scope == COLIBRI_SCOPE_BATCH) return COLIBRI_OK;
  if (q->slot < 0) return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: damping of scope sequence needs a slot", n);
  if (q->start && q->start != s->counts.next[q->slot])
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: slot %d has the routing state of position %d, not %d; begin at 0", n, q->slot, s->counts.next[q->slot], q->start);
  return COLIBRI_OK;
}

static int check_seq(const colibri_session *s, const colibri_batch *b, int n, const int32_t *tokens, const int32_t *blocks, colibri_error *err) {
  const colibri_seq *q = &b->seqs[n];
  const colibri_model_info *i = &s->model->info;
  const colibri_sampling *p = &q->sampling;
  if (q->n_rows < 1 || q->start < 0 || (int64_t)q->start + q->n_rows > i->max_context)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: positions %d..%lld are outside the model's context of %d", n, q->start,
                        (long long)q->start + q->n_rows - 1, i->max_context);
  if (q->n_logits < 0 || q->n_logits > q->n_rows)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: n_logits %d must be 0..%d", n, q->n_logits, q->n_rows);
  if ((int64_t)q->n_blocks * COLIBRI_KV_BLOCK < (int64_t)q->start + q->n_rows || q->n_blocks > s->env.arena.dims.max_blocks)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: %d KV blocks do not fit %lld positions", n, q->n_blocks, (long long)q->start + q->n_rows);
  if (q->n_history < 0 || q->n_history > i->max_context)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: n_history %d must be 0..%d", n, q->n_history, i->max_context);
  for (int r = 0; r < q->n_rows; r++)
    if (tokens[r] < 0 || tokens[r] >= i->vocab)
      return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: token %d is outside the vocabulary of %d", n, tokens[r], i->vocab);
  for (int k = 0; k < q->n_blocks; k++)
    if (blocks[k] < 0 || blocks[k] >= s->options.kv_blocks)
      return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: KV block %d is outside the pool of %d", n, blocks[k], s->options.kv_blocks);
  if (!(p->temperature >= 0 && p->temperature <= 1e6f) || !(p->top_p > 0 && p->top_p <= 1) || !(p->min_p >= 0 && p->min_p < 1) || p->top_k < 0 ||
      !(p->repetition_penalty > 0 && p->repetition_penalty <= 1e6f) || p->top_logprobs < -1 || p->top_logprobs > COLIBRI_MAX_TOP_LOGPROBS)
    return colibri_fail(err, COLIBRI_EINVAL, "sequence %d: a sampling parameter is out of range (colibri.h, colibri_sampling)", n);
  return check_routing(s, b, n, err);
}

static int check_ids(const int32_t *ids, int64_t n, int32_t low, int32_t end, const char *what, colibri_error *err) {
  for (int64_t k = 0; k < n; k++)
    if (ids[k] < low || ids[k] >= end) return colibri_fail(err, COLIBRI_EINVAL, "%s %d is outside the vocabulary of %d", what, ids[k], end);
  return COLIBRI_OK;
}

static int check_batch(colibri_session *s, const colibri_batch *b, colibri_error *err) {
  int64_t rows = 0, blocks = 0, logits = 0, history = 0;
  int rc = COLIBRI_OK;
  if (b->n_seqs < 1 || b->n_seqs > s->options.max_seqs)
    return colibri_fail(err, COLIBRI_EINVAL, "a batch of %d sequences: the session was opened for 1..%d", b->n_seqs, s->options.max_seqs);
  if (b->n_dampings < 0 || b->n_dampings > b->n_seqs || (b->n_dampings && !b->dampings))
    return colibri_fail(err, COLIBRI_EINVAL, "n_dampings is %d, it must be 0..%d (n_seqs), and dampings not NULL", b->n_dampings, b->n_seqs);
  for (int n = 0; n < b->n_dampings && !rc; n++) rc = colibri_damping_check(&b->dampings[n], n, err);
  s->step++;
  for (int n = 0; n < b->n_seqs && !rc; n++) {
    rc = check_seq(s, b, n, b->tokens + rows, b->blocks + blocks, err);
    rows += b->seqs[n].n_rows, blocks += b->seqs[n].n_blocks, logits += b->seqs[n].n_logits, history += b->seqs[n].n_history;
    if (!rc && (rows > s->options.max_rows || logits > s->options.max_logit_rows))
      rc = colibri_fail(err, COLIBRI_EINVAL, "a batch of %lld rows with %lld rows of logits: the session was opened for %d and %d", (long long)rows,
                        (long long)logits, s->options.max_rows, s->options.max_logit_rows);
  }
  if (!rc && history && !b->history) rc = colibri_fail(err, COLIBRI_EINVAL, "n_history is %lld but history is NULL", (long long)history);
  if (!rc && history) rc = check_ids(b->history, history, 0, s->model->info.vocab, "history token", err);
  if (!rc && b->targets) rc = check_ids(b->targets, logits, -1, s->model->info.vocab, "target token", err);
  return rc;
}

/* ---------------------------------------------------------------- taking the batch in */

static void take_rows(const colibri_session *s, const colibri_step_seq *q, int n) {
  const colibri_arena *a = &s->env.arena;
  for (int r = 0; r < q->n_rows; r++) {
    a->positions[q->first_row + r] = q->start + r;
    a->row_seq[q->first_row + r] = n;
  }
  for (int r = 0; r < q->n_logits; r++) a->logit_rows[q->first_logit + r] = q->first_row + q->n_rows - q->n_logits + r;
}

static void take_routing(colibri_session *s, const colibri_batch *b) {
  s->damped = s->margins = 0;
  for (int n = 0; n < b->n_seqs; n++) {
    s->damped |= b->seqs[n].damping >= 0 && b->dampings[b->seqs[n].damping].kind != COLIBRI_DAMPING_OFF;
    s->margins |= b->seqs[n].margins;
  }
  int may_be_given_up = s->has_remote || s->n_ranges;
  if (may_be_given_up && s->damped) colibri_damper_save(&s->damper, b);
  colibri_damper_begin(&s->damper, b);
  colibri_counts_begin(&s->counts, b, may_be_given_up);
}

static void take_batch(colibri_session *s, const colibri_batch *b) {
  colibri_arena *a = &s->env.arena;
  int32_t row = 0, logit = 0, block = 0, history = 0;
  for (int n = 0; n < b->n_seqs; n++) {
    const colibri_seq *q = &b->seqs[n];
    a->seqs[n] = (colibri_step_seq){.first_row = row, .n_rows = q->n_rows, .start = q->start, .first_logit = logit, .n_logits = q->n_logits,
                                    .first_block = block, .first_history = history, .n_history = q->n_history, .sampling = q->sampling};
    take_rows(s, &a->seqs[n], n);
    row += q->n_rows, logit += q->n_logits, block += q->n_blocks, history += q->n_history;
  }
  memcpy(a->tokens, b->tokens, sizeof(int32_t) * (size_t)row);
  memcpy(a->blocks, b->blocks, sizeof(int32_t) * (size_t)block);
  if (history) memcpy(a->history, b->history, sizeof(int32_t) * (size_t)history);
  for (int n = 0; n < logit; n++) a->targets[n] = b->targets ? b->targets[n] : -1;
  memset(a->row_error, 0, sizeof(uint32_t) * (size_t)row);
  take_routing(s, b);
  s->n_seqs = b->n_seqs, s->n_rows = row, s->n_logits = logit;
}

/* cos and sin of each row's angles, in f32 like the reference: angle = position * inv_freq. */
static void fill_rotary(const colibri_session *s) {
  const colibri_model *m = s->model;
  int half = m->rope_dims / 2;
  for (int row = 0; row < s->n_rows; row++) {
    float *c = s->env.arena.cos_sin + (int64_t)row * m->rope_dims;
    for (int i = 0; i < half; i++) {
      float angle = (float)s->env.arena.positions[row] * m->inv_freq[i];
      c[i] = cosf(angle) * m->rope_scale;
      c[half + i] = sinf(angle) * m->rope_scale;
    }
  }
}

/* Numbers the lanes of each node: in the order of active[], the front end's last. */
static void number_places(colibri_session *s) {
  uint32_t count[COLIBRI_MAX_NODES] = {0}, number[256];
  int32_t node[256], lanes = s->n_active + s->options.front_lane;
  s->active[s->n_active] = s->env.lane;
  for (int n = 0; n < lanes; n++) {
    node[n] = atomic_load_explicit(&s->team->lanes[s->active[n]].node, memory_order_relaxed);
    number[n] = node[n] < 0 ? 0 : count[node[n]]++;
  }
  for (int n = 0; n < lanes; n++)
    atomic_store_explicit(&s->team->lanes[s->active[n]].place, node[n] < 0 ? 0 : number[n] << 16 | count[node[n]], memory_order_relaxed);
}

/* Adds what the lanes of this step have counted since the session was opened to the step's statistics; sign -1 takes it off. The front end's own always
 * counts: without a part in the step it still takes over what others leave. */
static void add_homes(colibri_session *s, int sign) {
  for (int n = 0; n <= s->n_active; n++) {
    const colibri_lane *l = &s->team->lanes[s->active[n]];
    s->stats.tasks_homed += (uint32_t)sign * (uint32_t)atomic_load_explicit(&l->homed, memory_order_relaxed);
    s->stats.tasks_local += (uint32_t)sign * (uint32_t)atomic_load_explicit(&l->local, memory_order_relaxed);
  }
}

/* Lanes join here: every READY lane becomes part of the step. */
static void gather_lanes(colibri_session *s) {
  s->n_active = 0;
  for (int lane = 0; lane < s->options.max_lanes; lane++) {
    colibri_lane *l = &s->team->lanes[lane];
    uint32_t ready = COLIBRI_LANE_READY;
    int in = atomic_compare_exchange_strong(&l->state, &ready, COLIBRI_LANE_ACTIVE) || ready == COLIBRI_LANE_ACTIVE;
    atomic_store_explicit(&l->rank, in ? s->n_active : -1, memory_order_relaxed);
    if (in) s->active[s->n_active++] = lane;
  }
  if (s->model->n_nodes < 2) return;
  number_places(s);
  add_homes(s, -1);
}

/* ---------------------------------------------------------------- phases */

/* A phase, or, for very few rows, the same task on this thread. */
static void run_rows(colibri_session *s, int op, int layer, int rows) {
  if (rows > INLINE_ROWS) {
    colibri_phase_run(s, op, layer, colibri_cut_rows(s, rows, 2 * colibri_lanes_of(s)), 0);
    return;
  }
  uint64_t t = colibri_now_ns();
  colibri_phase phase = {.op = op, .layer = layer};
  colibri_task task = {.a0 = 0, .a1 = rows};
  colibri_task_run(&s->env, &phase, &task);
  s->stats.serial_ns += colibri_op_end(s, op) - t;
}

/* All sequences' attention; a batch too large for one task list takes several phases. */
static void run_attention(colibri_session *s, int layer) {
  colibri_attention_cursor c = {0, 0, 0};
  int fused = colibri_one_tile_each(s);
  if (!fused) colibri_phase_run(s, COLIBRI_OP_STORE_KV, layer, colibri_cut_rows(s, s->n_rows, 4 * colibri_lanes_of(s)), 0);
  while (c.seq < s->n_seqs) colibri_phase_run(s, COLIBRI_OP_ATTEND, layer, colibri_cut_attention(s, &c), fused);
}

/* ---------------------------------------------------------------- the router and the dispatcher */

static void note_bad_rows(colibri_session *s, int layer) {
  for (int row = 0; row < s->n_rows; row++)
    if (s->route_bad[row] && !s->env.arena.row_error[row]) s->env.arena.row_error[row] = (uint32_t)layer + 1;
}

/* Puts one more pair into a row's n, which ascend. */
static void insert_pair(int32_t *pairs, int n, int32_t pair) {
  for (; n && pairs[n - 1] > pair; n--) pairs[n] = pairs[n - 1];
  pairs[n] = pair;
}

/* Packs each expert's tokens into a mini-batch: pairs in expert order, rows ascending. */
void colibri_session_dispatch(colibri_session *s, int layer, const int32_t *ids, const float *weights, int rerouted) {
  const colibri_arena *a = &s->env.arena;
  int experts = s->model->info.experts, k = s->model->info.top_k;
  int64_t n = (int64_t)s->n_rows * k;
  memset(s->expert_at, 0, sizeof(int32_t) * (size_t)experts);
  for (int64_t i = 0; i < n; i++) s->expert_at[ids[i]]++;
  if (rerouted != COLIBRI_UNCOUNTED) colibri_counts_queues(&s->counts, layer, s->expert_at, s->n_rows, rerouted);
  int32_t at = 0;
  for (int e = 0; e < experts; e++) {
    int32_t count = s->expert_at[e];
    a->expert_first[e] = s->expert_at[e] = at;
    at += count;
  }
  a->expert_first[experts] = at;
  for (int64_t i = 0; i < n; i++) {
    int32_t pair = s->expert_at[ids[i]]++;
    a->pair_row[pair] = (int32_t)(i / k);
    a->pair_weight[pair] = weights[i];
    if (a->row_pairs) insert_pair(a->row_pairs + i / k * k, (int)(i % k), pair);
  }
}

/* The undamped score of the k-th expert less the next one's. ids are the undamped ones. */
static float margin_of(const float *scores, int experts, int k, const int32_t *ids) {
  float next = -INFINITY;
  for (int e = 0; e < experts; e++) {
    int chosen = 0;
    for (int i = 0; i < k; i++) chosen |= ids[i] == e;
    if (!chosen && scores[e] > next) next = scores[e];
  }
  return scores[ids[k - 1]] - next;
}

static void note_margins(colibri_session *s, const colibri_batch *b, int router_layer, const int32_t *ids) {
  int experts = s->model->info.experts, k = s->model->info.top_k;
  float *margins = s->route_margins + (int64_t)router_layer * s->options.max_rows;
  for (int n = 0, row = 0; n < b->n_seqs; n++)
    for (int r = 0; r < b->seqs[n].n_rows; r++, row++)
      margins[row] = !b->seqs[n].margins || s->route_bad[row] ? NAN : margin_of(s->scores + (int64_t)row * experts, experts, k, ids + (int64_t)row * k);
}

/* What comes after the router's own choice, if some sequence asks for it. Returns how many rows were changed. */
static int damp(colibri_session *s, const colibri_batch *b, int layer, int router_layer, int32_t *ids, float *weights) {
  const colibri_router *r = &s->model->router;
  if (!s->damped && !s->margins) return 0;
  colibri_route_select_scores(r, &s->model->layers[layer].route, s->env.kernels, s->env.arena.gate, r->experts, s->n_rows, s->scores);
  if (s->margins) note_margins(s, b, router_layer, ids);
  if (!s->damped) return 0;
  colibri_damp_rows rows = {.layer = router_layer, .n_rows = s->n_rows, .logits = colibri_router_by_logits(r, &s->model->layers[layer].route),
                            .scores = s->scores, .bad = s->route_bad, .ids = ids, .changed = s->changed};
  int changed = colibri_damp(&s->damper, b, &rows);
  if (changed) /* of all rows at once: those left alone get the bits they have */
    colibri_route_weigh(r, &s->model->layers[layer].route, s->env.kernels, s->env.arena.gate, r->experts, s->n_rows, ids, s->route_bad, weights);
  return changed;
}

static void route(colibri_session *s, const colibri_batch *b, int layer, int *router_layer) {
  uint64_t t = colibri_now_ns();
  const colibri_model_info *i = &s->model->info;
  int64_t at = s->options.trace_routes ? (int64_t)*router_layer * s->options.max_rows * i->top_k : 0;
  int32_t *ids = s->route_ids + at;
  float *weights = s->route_weights + at;
  int rerouted = 0;
  if (s->model->layers[layer].router) {
    colibri_route(&s->model->router, &s->model->layers[layer].route, s->env.kernels, s->env.arena.gate, i->experts, s->n_rows, ids, weights, s->route_bad);
    note_bad_rows(s, layer);
    rerouted = damp(s, b, layer, *router_layer, ids, weights);
    ++*router_layer;
  } else {
    for (int row = 0; row < s->n_rows; row++) ids[row] = 0, weights[row] = 1.0f;
  }
  colibri_session_dispatch(s, layer, ids, weights, rerouted);
  if (s->options.max_slots) colibri_counts_runs(&s->counts, b, layer, ids, i->top_k);
  s->stats.serial_ns += colibri_op_end(s, COLIBRI_OP_ROUTE) - t;
}

/* ---------------------------------------------------------------- the layer loop */

/* Attention, and where the rows go next. */
static void run_to_experts(colibri_session *s, int layer) {
  const colibri_layer *l = &s->model->layers[layer];
  int rows = s->n_rows;
  run_rows(s, COLIBRI_OP_PREPARE_ATTENTION, layer, rows);
  colibri_phase_run(s, COLIBRI_OP_QKV, layer, colibri_cut_matrix(s, &l->qkv, rows), 0);
  run_attention(s, layer);
  run_rows(s, COLIBRI_OP_PREPARE_O, layer, rows);
  colibri_phase_run(s, COLIBRI_OP_O, layer, colibri_cut_matrix(s, &l->o, rows), 0);
  run_rows(s, COLIBRI_OP_PREPARE_MOE, layer, rows);
  route(s, s->batch, layer, &s->router_layer);
}

void colibri_session_experts(colibri_session *s, int layer) {
  int tasks = colibri_cut_gate_up(s, layer);
  if (!tasks) return; /* all are in skip[] */
  colibri_phase_run(s, COLIBRI_OP_GATE_UP, layer, tasks, 0);
  colibri_phase_run(s, COLIBRI_OP_DOWN, layer, colibri_cut_down(s, layer), 0);
}

void colibri_session_combine(colibri_session *s, int layer) {
  if (s->options.split_down) colibri_phase_run(s, COLIBRI_OP_COMBINE, layer, colibri_cut_combine(s), 0);
}

static void run_head(colibri_session *s) {
  int layers = s->model->info.layers, rows = s->n_logits;
  if (!rows) return;
  run_rows(s, COLIBRI_OP_PREPARE_HEAD, layers, rows);
  colibri_phase_run(s, COLIBRI_OP_HEAD, layers, colibri_cut_matrix(s, &s->model->head, rows), 0);
  colibri_phase_run(s, COLIBRI_OP_SAMPLE, layers, colibri_cut_rows(s, rows, 1024), 0);
}

/* A sequence with a bad row is bad from there on: later rows have seen its keys and values. */
static void give_results(const colibri_session *s, colibri_row_result *results, int32_t *seq_status) {
  const colibri_arena *a = &s->env.arena;
  if (s->n_logits) memcpy(results, a->results, sizeof *results * (size_t)s->n_logits);
  for (int n = 0; n < s->n_seqs; n++) {
    const colibri_step_seq *q = &a->seqs[n];
    int32_t status = COLIBRI_OK, error = 0;
    for (int r = 0; r < q->n_rows; r++) {
      int logit = q->first_logit + r - (q->n_rows - q->n_logits);
      if (!error) error = (int32_t)a->row_error[q->first_row + r];
      if (error) status = COLIBRI_ENUMERIC;
      if (r < q->n_rows - q->n_logits) continue;
      if (error) results[logit].status = COLIBRI_ENUMERIC, results[logit].error_layer = error - 1;
      if (results[logit].status) status = COLIBRI_ENUMERIC;
    }
    if (seq_status) seq_status[n] = status;
  }
}

int colibri_session_gather(colibri_session *s, colibri_error *err) {
  memset(&s->stats, 0, sizeof s->stats);
  gather_lanes(s);
  s->stats.lanes = (uint32_t)(s->n_active + s->options.front_lane);
  if (s->stats.lanes) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_ENOLANES, "no worker is ready and the front end has no lane of its own; start workers");
}

static int begin_step(colibri_session *s, const colibri_batch *batch, colibri_error *err) {
  s->began = colibri_now_ns();
  if (s->stage != COLIBRI_STAGE_IDLE) return colibri_fail(err, COLIBRI_ESTATE, "a step is under way: resume it or abandon it first");
  int rc = check_batch(s, batch, err);
  if (!rc) rc = colibri_session_gather(s, err);
  if (rc) return rc;
  take_batch(s, batch);
  fill_rotary(s);
  s->batch = batch;
  s->layer = s->router_layer = 0;
  s->op_began = colibri_now_ns();
  return COLIBRI_OK;
}

static int hand_out(colibri_session *s, int stage, int layers) {
  s->stage = stage;
  s->stats.remote_layers += (uint32_t)layers;
  s->left_at = colibri_now_ns();
  return COLIBRI_NEEDS_REMOTE;
}

/* From s->layer on: to the end, or to where something is wanted from elsewhere. */
static int run_on(colibri_session *s, colibri_row_result *results, int32_t *seq_status) {
  for (; s->layer < s->model->info.layers; s->layer++) {
    s->range_end = colibri_remote_range(s, s->layer);
    if (s->range_end) {
      if (!s->layer) run_rows(s, COLIBRI_OP_PREPARE_ATTENTION, 0, s->n_rows); /* embeds */
      return hand_out(s, COLIBRI_STAGE_LAYERS, s->range_end - s->layer);
    }
    run_to_experts(s, s->layer);
    if (s->has_remote && colibri_remote_find(s, s->layer)) return hand_out(s, COLIBRI_STAGE_ROUTED, 1);
    colibri_session_experts(s, s->layer);
    colibri_session_combine(s, s->layer);
  }
  run_head(s);
  give_results(s, results, seq_status);
  colibri_counts_end(&s->counts);
  if (s->model->n_nodes > 1) add_homes(s, 1);
  s->stats.step_ns = colibri_now_ns() - s->began;
  return COLIBRI_OK;
}

/* The time since the step was handed out is nobody's operation. */
static void take_back(colibri_session *s) {
  s->op_began = colibri_now_ns();
  s->stats.remote_ns += s->op_began - s->left_at;
}

int colibri_step(colibri_session *s, const colibri_batch *batch, colibri_row_result *results, int32_t *seq_status, colibri_step_stats *stats,
                 colibri_error *err) {
  colibri_guard_enter();
  int rc = begin_step(s, batch, err);
  if (!rc) rc = run_on(s, results, seq_status);
  colibri_session_told(s);
  colibri_guard_leave();
  if (!rc && stats) *stats = s->stats;
  return rc;
}

void colibri_session_tell(colibri_session *s, int fd) { s->tell = fd; }

int colibri_step_local(colibri_session *s, colibri_error *err) {
  if (s->stage != COLIBRI_STAGE_ROUTED) return colibri_fail(err, COLIBRI_ESTATE, "no step waits for experts computed here");
  colibri_guard_enter();
  take_back(s);
  for (int i = 0; i < s->n_wanted; i++) s->skip[s->wanted[i]] = 1;
  colibri_session_experts(s, s->layer);
  for (int i = 0; i < s->n_wanted; i++) s->skip[s->wanted[i]] = 0;
  s->stage = COLIBRI_STAGE_LOCAL;
  s->left_at = colibri_now_ns();
  colibri_guard_leave();
  return COLIBRI_OK;
}

/* Layers with a router among those. */
static int count_routers(const colibri_session *s, int first, int end) {
  int n = 0;
  for (int layer = first; layer < end; layer++) n += s->model->layers[layer].router != NULL;
  return n;
}

/* Goes on behind layers that were computed elsewhere. */
static int resume_behind(colibri_session *s, colibri_row_result *results, int32_t *seq_status, colibri_step_stats *stats) {
  const colibri_arena *a = &s->env.arena;
  colibri_guard_enter();
  take_back(s);
  for (int row = 0; row < s->n_rows; row++)
    if (isnan(a->x0[(int64_t)row * a->dims.hidden_pad]) && !a->row_error[row]) a->row_error[row] = (uint32_t)s->range_end; /* in the last of them */
  s->stage = COLIBRI_STAGE_IDLE;
  s->router_layer += count_routers(s, s->layer, s->range_end);
  s->layer = s->range_end;
  int rc = run_on(s, results, seq_status);
  colibri_guard_leave();
  if (!rc && stats) *stats = s->stats;
  return rc;
}

int colibri_step_resume(colibri_session *s, colibri_row_result *results, int32_t *seq_status, colibri_step_stats *stats, colibri_error *err) {
  if (s->stage == COLIBRI_STAGE_IDLE) return colibri_fail(err, COLIBRI_ESTATE, "no step is under way");
  if (s->stage == COLIBRI_STAGE_LAYERS) return resume_behind(s, results, seq_status, stats);
  for (int i = 0; i < s->n_wanted; i++)
    if (s->missing[s->wanted[i]]) return colibri_fail(err, COLIBRI_ESTATE, "layer %d: the outputs of expert %d are missing", s->layer, s->wanted[i]);
  int rc = s->stage == COLIBRI_STAGE_ROUTED ? colibri_step_local(s, err) : COLIBRI_OK;
  if (rc) return rc;
  colibri_guard_enter();
  take_back(s);
  s->stage = COLIBRI_STAGE_IDLE;
  colibri_session_combine(s, s->layer++);
  rc = run_on(s, results, seq_status);
  colibri_guard_leave();
  if (!rc && stats) *stats = s->stats;
  return rc;
}

/* The same batch may be tried again: its sequences' routing states are those it began with, and nothing of it was counted. */
void colibri_step_abandon(colibri_session *s) {
  if (s->stage == COLIBRI_STAGE_IDLE) return;
  s->stage = COLIBRI_STAGE_IDLE;
  if (s->damped) colibri_damper_restore(&s->damper, s->batch);
  colibri_counts_abandon(&s->counts);
}

/* ---------------------------------------------------------------- layers by themselves, for another's step */

static void take_x(colibri_session *s, const float *x) {
  const colibri_arena *a = &s->env.arena;
  int hidden = s->model->info.hidden, pad = a->dims.hidden_pad;
  for (int row = 0; row < s->n_rows; row++, x += hidden) {
    a->tokens[row] = COLIBRI_NO_TOKEN;
    memcpy(a->x0 + (int64_t)row * pad, x, sizeof *x * (size_t)hidden);
    memset(a->x0 + (int64_t)row * pad + hidden, 0, sizeof *x * (size_t)(pad - hidden));
  }
}

static void give_x(const colibri_session *s, float *x) {
  const colibri_arena *a = &s->env.arena;
  int hidden = s->model->info.hidden;
  for (int row = 0; row < s->n_rows; row++, x += hidden) {
    memcpy(x, a->x0 + (int64_t)row * a->dims.hidden_pad, sizeof *x * (size_t)hidden);
    for (int i = 0; a->row_error[row] && i < hidden; i++) x[i] = NAN;
  }
}

/* The batch has been taken in. */
static void run_layers(colibri_session *s, int first, int end, float *x) {
  s->damped = s->margins = s->n_logits = 0;
  for (int n = 0; n < s->n_seqs; n++) s->env.arena.seqs[n].n_logits = 0;
  take_x(s, x);
  s->router_layer = count_routers(s, 0, first);
  for (s->layer = first; s->layer < end; s->layer++) {
    run_to_experts(s, s->layer);
    colibri_session_experts(s, s->layer);
    colibri_session_combine(s, s->layer);
  }
  give_x(s, x);
}

int colibri_layers_run(colibri_session *s, const colibri_batch *batch, int32_t first, int32_t end, float *x, int32_t *seq_status, colibri_error *err) {
  int layers = s->model->info.layers;
  if (first < 0 || end <= first || end > layers)
    return colibri_fail(err, COLIBRI_EINVAL, "layers %d to %d: the model has 0 to %d", first, end, layers);
  colibri_guard_enter();
  int rc = begin_step(s, batch, err);
  if (!rc) run_layers(s, first, end, x);
  if (!rc) give_results(s, NULL, seq_status);
  colibri_guard_leave();
  return rc;
}
