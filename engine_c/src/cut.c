/* cut.c - phases cut into tasks, each with the node its weights lie on. */
#include "cut.h"

#include <string.h>

#define ROW_BLOCK_BYTES 400000 /* activations one matrix task keeps in cache (measured) */
#define SMALL_MATRIX_BYTES 262144 /* weights a lane streams in one piece; more is cut in two so that a late lane can be helped */
#define NO_HOME (-1)

/* ---------------------------------------------------------------- tasks and homes */

int colibri_lanes_of(const colibri_session *s) {
  int lanes = s->n_active + s->options.front_lane;
  return lanes ? lanes : 1;
}

static int placed(const colibri_session *s) { return s->model->n_nodes > 1; }

static void put_task(colibri_session *s, int t, colibri_task task, int home) {
  s->team->tasks[t] = task;
  if (!placed(s)) return;
  atomic_store_explicit(&s->team->homes[t], (int16_t)home, memory_order_relaxed);
  s->homed |= home != NO_HOME;
}

static int64_t panel_bytes(const colibri_matrix *m) { return (int64_t)m->groups * colibri_block_bytes(m->format); }

static int node_of(colibri_session *s, const char *at) { return placed(s) ? colibri_model_node(s->model, at, &s->extent) : NO_HOME; }

/* The node of the middle of panels b0..b1. */
static int home_of(colibri_session *s, const colibri_matrix *m, int b0, int b1) { return node_of(s, m->data + (b0 + b1) * panel_bytes(m) / 2); }

/* 1 if the matrix does not lie on one node: by the middles of its first and last node's share, as the page at either end may be a neighbour's. */
static int is_spread(colibri_session *s, const colibri_matrix *m) {
  int share = m->panels / s->model->n_nodes;
  return home_of(s, m, 0, share) != home_of(s, m, m->panels - share, m->panels);
}

/* The node of a KV head: heads are dealt to the nodes in order. */
static int head_home(const colibri_session *s, int head) {
  return placed(s) ? s->model->nodes[(int64_t)head * s->model->n_nodes / s->model->info.kv_heads] : NO_HOME;
}

/* ---------------------------------------------------------------- how many pieces */

static int at_most(int64_t n, int64_t limit) { return (int)(n < limit ? n : limit); }

/* How many pieces a run over `units` panels of `bytes` in all is cut into: one a lane if small, else two. */
static int pieces(const colibri_session *s, int units, int64_t bytes) {
  int lanes = colibri_lanes_of(s);
  return at_most(bytes > (int64_t)lanes * SMALL_MATRIX_BYTES ? 2 * lanes : lanes, units);
}

/* A matrix cut at i * units / nodes has pieces that lie on one node each if their number is a multiple of the nodes'. */
static int whole_nodes(colibri_session *s, const colibri_matrix *m, int cuts, int units) {
  int nodes = s->model->n_nodes;
  if (!placed(s) || units < nodes || !is_spread(s, m)) return cuts;
  return at_most((cuts + nodes - 1) / nodes * nodes, units / nodes * nodes);
}

static int part_of(int64_t whole, int i, int n) { return (int)(whole * i / n); }

int colibri_cut_rows(colibri_session *s, int rows, int n) {
  n = at_most(n, rows);
  for (int t = 0; t < n; t++) put_task(s, t, (colibri_task){.a0 = part_of(rows, t, n), .a1 = part_of(rows, t + 1, n)}, NO_HOME);
  return n;
}

int colibri_cut_matrix(colibri_session *s, const colibri_matrix *m, int rows) {
  int64_t row_bytes = colibri_row_bytes(m->format, m->groups);
  int block = at_most(ROW_BLOCK_BYTES / row_bytes > 8 ? ROW_BLOCK_BYTES / row_bytes : 8, rows);
  int blocks = (rows + block - 1) / block;
  int cuts = whole_nodes(s, m, pieces(s, m->panels, m->panels * panel_bytes(m)), m->panels);
  while (blocks > 1 && blocks * cuts > COLIBRI_MAX_TASKS) blocks--;
  for (int c = 0, t = 0; c < cuts; c++) {
    int b0 = part_of(m->panels, c, cuts), b1 = part_of(m->panels, c + 1, cuts), home = home_of(s, m, b0, b1);
    for (int r = 0; r < blocks; r++, t++) put_task(s, t, (colibri_task){part_of(rows, r, blocks), part_of(rows, r + 1, blocks), b0, b1, 0}, home);
  }
  return blocks * cuts;
}

/* ---------------------------------------------------------------- attention */

int colibri_one_tile_each(const colibri_session *s) {
  int tile = colibri_attend_rows(&s->model->info);
  for (int n = 0; n < s->n_seqs; n++)
    if (s->env.arena.seqs[n].n_rows > tile) return 0;
  return 1;
}

int colibri_cut_attention(colibri_session *s, colibri_attention_cursor *c) {
  const colibri_arena *a = &s->env.arena;
  int tile = colibri_attend_rows(&s->model->info), t = 0;
  while (c->seq < s->n_seqs && t < COLIBRI_MAX_TASKS) {
    const colibri_step_seq *q = &a->seqs[c->seq];
    int first = q->first_row + c->row, rows = at_most(q->n_rows - c->row, tile);
    put_task(s, t++, (colibri_task){first, first + rows, c->head, c->head + 1, c->seq}, head_home(s, c->head));
    c->row += rows;
    if (c->row < q->n_rows) continue;
    c->row = 0;
    if (++c->head == s->model->info.kv_heads) c->head = 0, c->seq++;
  }
  return t;
}

/* ---------------------------------------------------------------- experts */

static const colibri_matrix *gate_up_of(const colibri_expert *x) { return &x->gate_up; }
static const colibri_matrix *down_of(const colibri_expert *x) { return &x->down; }

/* A phase of the experts' products. */
typedef struct expert_phase {
  int width;             /* a unit is so many panels, which no cut divides */
  int fits;              /* the list has room for each expert's pieces rounded up to the nodes */
  int replicated;        /* some expert at work has copies on several nodes */
  int64_t want, total;   /* pieces; work, of which each expert's is 8 + rows */
} expert_phase;

/* 1 if an expert has rows in the phase being cut. */
static int at_work(const colibri_session *s, int e) {
  const int32_t *first = s->env.arena.expert_first;
  return first[e + 1] > first[e] && !s->skip[e];
}

static int bits(uint64_t word) { return __builtin_popcountll(word); }

/* The index of a node among the model's, -1 if it is not one. */
static int node_index(const colibri_session *s, int node) {
  for (int i = 0; i < s->model->n_nodes; i++)
    if (s->model->nodes[i] == node) return i;
  return -1;
}

/* No work yet on any node, and how many lanes each has. */
static void clear_nodes(colibri_session *s) {
  memset(s->node_work, 0, sizeof s->node_work);
  memset(s->node_lanes, 0, sizeof s->node_lanes);
  for (int n = 0; n < s->n_active + s->options.front_lane; n++) {
    int at = node_index(s, atomic_load_explicit(&s->team->lanes[s->active[n]].node, memory_order_relaxed));
    if (at >= 0) s->node_lanes[at]++;
  }
}

/* Of the nodes in `copies` the one that is done first if it gets `work` more, by its lanes; one without lanes only if all are. Of equal ones each has its turn. */
static int least_busy(const colibri_session *s, uint64_t copies, int64_t work) {
  int nodes = s->model->n_nodes, best = -1;
  for (int k = 0, i = (int)(s->generation % (uint64_t)nodes); k < nodes; k++, i = i + 1 < nodes ? i + 1 : 0) {
    if (!(copies >> i & 1)) continue;
    if (best < 0 || (s->node_work[i] + work) * s->node_lanes[best] < (s->node_work[best] + work) * s->node_lanes[i]) best = i;
  }
  return best;
}

/* The pieces of one expert's product, from task t on. Returns the next task's number. */
static int put_expert(colibri_session *s, const expert_phase *p, int e, const colibri_matrix *m, int t) {
  const int32_t *first = s->env.arena.expert_first;
  uint64_t copies = s->copies[e];
  int rows = first[e + 1] - first[e], units = m->panels / p->width;
  int cuts = (int)(((8 + rows) * p->want + p->total / 2) / p->total);
  if (p->fits && cuts < bits(copies)) cuts = bits(copies);
  cuts = at_most(cuts < 1 ? 1 : cuts, units);
  if (p->fits && !copies) cuts = whole_nodes(s, m, cuts, units);
  for (int c = 0; c < cuts; c++, t++) {
    int b0 = part_of(units, c, cuts), b1 = part_of(units, c + 1, cuts);
    int64_t work = (int64_t)(8 + rows) * (b1 - b0) * p->width * panel_bytes(m);
    int at = copies ? least_busy(s, copies, work) : -1, home = copies ? s->model->nodes[at] : home_of(s, m, b0 * p->width, b1 * p->width);
    if (p->replicated && !copies) at = node_index(s, home);
    if (p->replicated && at >= 0) s->node_work[at] += work;
    put_task(s, t, (colibri_task){first[e], first[e + 1], b0, b1, e}, home);
  }
  return t;
}

/* One product of each expert that has rows. Those with copies on several nodes come last: by then it is known what each node has to do anyway. */
static int cut_experts(colibri_session *s, int layer, const colibri_matrix *(*matrix)(const colibri_expert *), int width) {
  const int32_t *first = s->env.arena.expert_first;
  int experts = s->model->info.experts, active = 0, t = 0;
  expert_phase p = {.width = width, .want = 2 * colibri_lanes_of(s)};
  for (int e = 0; e < experts; e++) {
    if (!at_work(s, e)) continue;
    active++;
    p.total += 8 + first[e + 1] - first[e];
    s->copies[e] = colibri_model_copies(s->model, layer, e); /* once: it may change at any time */
    p.replicated |= bits(s->copies[e]) > 1;
  }
  p.fits = p.want + (int64_t)active * s->model->n_nodes <= COLIBRI_MAX_TASKS;
  if (p.replicated) clear_nodes(s);
  for (int late = 0; late <= p.replicated; late++)
    for (int e = 0; e < experts; e++)
      if (at_work(s, e) && (bits(s->copies[e]) > 1) == late) t = put_expert(s, &p, e, matrix(&s->model->layers[layer].experts[e]), t);
  return t;
}

int colibri_cut_gate_up(colibri_session *s, int layer) { return cut_experts(s, layer, gate_up_of, 2); }

/* Pieces that every expert adds to have a home if the first and the last expert at work agree on it: then weights are cut by rows, not by experts. */
static int cut_down_together(colibri_session *s, int layer) {
  const colibri_arena *a = &s->env.arena;
  const colibri_expert *x = s->model->layers[layer].experts;
  int first = 0, last = s->model->info.experts - 1;
  while (a->expert_first[first + 1] == a->expert_first[first]) first++;
  while (a->expert_first[last + 1] == a->expert_first[last]) last--;
  const colibri_matrix *m = &x[first].down;
  int cuts = whole_nodes(s, m, pieces(s, m->panels, m->panels * panel_bytes(m) * s->model->info.top_k), m->panels);
  for (int c = 0; c < cuts; c++) {
    int b0 = part_of(m->panels, c, cuts), b1 = part_of(m->panels, c + 1, cuts), home = home_of(s, m, b0, b1);
    put_task(s, c, (colibri_task){0, s->n_rows, b0, b1, 0}, home == home_of(s, &x[last].down, b0, b1) ? home : NO_HOME);
  }
  return cuts;
}

int colibri_cut_down(colibri_session *s, int layer) {
  return s->options.split_down ? cut_experts(s, layer, down_of, 1) : cut_down_together(s, layer);
}

int colibri_cut_combine(colibri_session *s) {
  int want = 2 * colibri_lanes_of(s), groups = s->env.arena.dims.hidden_groups, blocks = at_most(want, s->n_rows);
  int cuts = at_most((want + blocks - 1) / blocks, groups);
  for (int r = 0, t = 0; r < blocks; r++)
    for (int c = 0; c < cuts; c++, t++)
      put_task(s, t, (colibri_task){part_of(s->n_rows, r, blocks), part_of(s->n_rows, r + 1, blocks), part_of(groups, c, cuts), part_of(groups, c + 1, cuts), 0},
               NO_HOME);
  return blocks * cuts;
}
