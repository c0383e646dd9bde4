/* damping.c - the policies of damping.h. */
#include "damping.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

/* ---------------------------------------------------------------- opening */

int colibri_damper_open(colibri_damper *d, int experts, int k, int layers, int max_rows, int max_seqs, int max_slots) {
  size_t states = (size_t)(max_slots + 1) * (size_t)(layers ? layers : 1), e = (size_t)experts;
  *d = (colibri_damper){.experts = experts, .k = k, .layers = layers, .max_slots = max_slots};
  d->penalty = calloc(states * e, sizeof *d->penalty);
  d->uses = calloc(states * e, sizeof *d->uses);
  d->pairs = calloc(states, sizeof *d->pairs);
  d->changed_pairs = calloc(states, sizeof *d->changed_pairs);
  d->step_pairs = calloc((size_t)max_seqs, sizeof *d->step_pairs);
  d->step_changed = calloc((size_t)max_seqs, sizeof *d->step_changed);
  d->rows = calloc((size_t)max_rows, sizeof *d->rows);
  d->own = calloc((size_t)max_rows * (size_t)k, sizeof *d->own);
  d->queue = calloc(e, sizeof *d->queue);
  if (d->penalty && d->uses && d->pairs && d->changed_pairs && d->step_pairs && d->step_changed && d->rows && d->own && d->queue) return COLIBRI_OK;
  colibri_damper_close(d);
  return COLIBRI_ENOMEM;
}

void colibri_damper_close(colibri_damper *d) {
  void *all[] = {d->penalty, d->uses, d->pairs, d->changed_pairs, d->step_pairs, d->step_changed, d->rows, d->own, d->queue};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  memset(d, 0, sizeof *d);
}

/* ---------------------------------------------------------------- checks */

int colibri_damping_check(const colibri_damping *p, int index, colibri_error *err) {
  struct { const char *name; double value, low, high; } limits[] = {
      {"kind", p->kind, COLIBRI_DAMPING_OFF, COLIBRI_DAMPING_REUSE},
      {"scope", p->scope, p->kind == COLIBRI_DAMPING_REUSE ? COLIBRI_SCOPE_BATCH : COLIBRI_SCOPE_SEQUENCE, COLIBRI_SCOPE_BATCH},
      {"threshold", p->threshold, 0, 1e6},
      {"growth", (double)p->growth, 1, 1000},
      {"decay", (double)p->decay, 0, 1},
      {"capacity_factor", (double)p->capacity_factor, 1, 1e6},
      {"margin", (double)p->margin, 0, 1e6},
      {"max_rerouted", (double)p->max_rerouted, 0, 1},
  };
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
    if (!(limits[i].value >= limits[i].low && limits[i].value <= limits[i].high))
      return colibri_fail(err, COLIBRI_EINVAL, "damping %d: %s is %g, it must be %g to %g%s", index, limits[i].name, limits[i].value, limits[i].low,
                          limits[i].high, i == 1 && p->kind == COLIBRI_DAMPING_REUSE ? " (reuse exists in scope batch only)" : "");
  return COLIBRI_OK;
}

void colibri_damper_begin(colibri_damper *d, const colibri_batch *b) {
  size_t states = (size_t)d->layers, values = states * (size_t)d->experts;
  for (int n = 0; n < b->n_dampings; n++) d->step_pairs[n] = d->step_changed[n] = 0;
  if (b->rerouted) memset(b->rerouted, 0, sizeof *b->rerouted * (size_t)b->n_seqs);
  for (int n = 0; n < b->n_seqs; n++) {
    size_t slot = (size_t)b->seqs[n].slot;
    if (b->seqs[n].slot < 0 || b->seqs[n].start) continue;
    memset(d->penalty + slot * values, 0, sizeof *d->penalty * values);
    memset(d->uses + slot * values, 0, sizeof *d->uses * values);
    memset(d->pairs + slot * states, 0, sizeof *d->pairs * states);
    memset(d->changed_pairs + slot * states, 0, sizeof *d->changed_pairs * states);
  }
}

/* ---------------------------------------------------------------- one row */

static int has(const int32_t *ids, int k, int e) {
  for (int i = 0; i < k; i++)
    if (ids[i] == e) return 1;
  return 0;
}

/* Whether place i of a row, whose own choice was own[], may go to e. */
static int may_take(const colibri_damper *d, const float *scores, const int32_t *own, const int32_t *ids, int i, int e, float margin) {
  return e == own[i] ? ids[i] != e : !has(own, d->k, e) && !has(ids, d->k, e) && scores[own[i]] - scores[e] <= margin;
}

/* By descending score, ties to the lower index. */
static void sort_row(const float *scores, int32_t *ids, int k) {
  for (int i = 1; i < k; i++) {
    int32_t e = ids[i];
    int j = i;
    for (; j && (scores[ids[j - 1]] < scores[e] || (scores[ids[j - 1]] == scores[e] && ids[j - 1] > e)); j--) ids[j] = ids[j - 1];
    ids[j] = e;
  }
}

static void count_row(const colibri_damper *d, const int32_t *ids, int by) {
  for (int i = 0; i < d->k; i++) d->queue[ids[i]] += by;
}

/* ---------------------------------------------------------------- heat: penalties in the order of the tokens */

/* Exchanges places while that raises the row's scores less penalties. */
static int swap_penalised(const colibri_damper *d, const float *scores, const float *penalty, const int32_t *own, int32_t *ids, float margin) {
  int changed = 0;
  for (int swaps = 0; swaps < d->k; swaps++) {
    float gain = 0;
    int place = -1, to = -1;
    for (int i = 0; i < d->k; i++) {
      float here = scores[ids[i]] - penalty[ids[i]];
      for (int e = 0; e < d->experts; e++) {
        if (penalty[e] >= penalty[ids[i]] || !(scores[e] - penalty[e] - here > gain)) continue;
        if (ids[i] == own[i] && may_take(d, scores, own, ids, i, e, margin)) gain = scores[e] - penalty[e] - here, place = i, to = e;
      }
    }
    if (place < 0) break;
    ids[place] = to;
    changed = 1;
  }
  return changed;
}

static void heat_update(const colibri_damper *d, const colibri_damping *p, const int32_t *ids, float *penalty, int32_t *uses) {
  for (int e = 0; e < d->experts; e++) {
    if (has(ids, d->k, e)) {
      if (++uses[e] > p->threshold) penalty[e] = fminf(penalty[e] > 0 ? penalty[e] * p->growth : 0.25f * p->margin, p->margin);
    } else {
      uses[e] = 0;
      penalty[e] *= p->decay;
    }
  }
}

/* ---------------------------------------------------------------- rows in order: scope sequence, and heat */

/* Whether one more of `pairs` (this one included) may be changed. */
static int within_budget(const colibri_damping *p, uint64_t pairs, uint64_t changed) {
  return (double)(changed + 1) <= (double)p->max_rerouted * (double)pairs;
}

/* Capacity in scope sequence: experts whose share of the recent tokens would pass the bound. penalty[] holds the weighted uses. */
static int swap_full(const colibri_damper *d, const colibri_damping *p, const float *scores, const float *use, const int32_t *own, int32_t *ids) {
  float sum = 0;
  int changed = 0;
  for (int e = 0; e < d->experts; e++) sum += use[e];
  float bound = p->capacity_factor * (sum + (float)d->k) / (float)d->experts;
  for (int i = d->k - 1; i >= 0; i--) {
    if (use[ids[i]] + 1 <= bound) continue;
    int to = -1;
    for (int e = 0; e < d->experts; e++)
      if (use[e] + 1 <= bound && (to < 0 || scores[e] > scores[to]) && may_take(d, scores, own, ids, i, e, p->margin)) to = e;
    if (to < 0) continue;
    ids[i] = to;
    changed = 1;
  }
  return changed;
}

/* One row by the state `at` (slot and layer, or scope BATCH's). Returns whether it was changed. */
static int damp_row(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int row, size_t at, int allowed) {
  const float *scores = r->scores + (size_t)row * (size_t)d->experts;
  int32_t *ids = r->ids + row * d->k, *own = d->own;
  float *penalty = d->penalty + at * (size_t)d->experts;
  memcpy(own, ids, sizeof *own * (size_t)d->k);
  int changed = 0;
  if (p->kind == COLIBRI_DAMPING_HEAT) {
    if (allowed) changed = swap_penalised(d, scores, penalty, own, ids, p->margin);
    heat_update(d, p, ids, penalty, d->uses + at * (size_t)d->experts);
  } else {
    if (allowed) changed = swap_full(d, p, scores, penalty, own, ids);
    for (int e = 0; e < d->experts; e++) penalty[e] = penalty[e] * p->decay + (float)has(ids, d->k, e);
  }
  if (changed) sort_row(scores, ids, d->k);
  return r->changed[row] = (uint8_t)changed;
}

static void damp_sequence(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int slot, int first, int n) {
  size_t at = (size_t)slot * (size_t)d->layers + (size_t)r->layer;
  for (int row = first; row < first + n; row++) {
    if (r->bad[row]) continue;
    d->pairs[at]++;
    d->changed_pairs[at] += (uint32_t)damp_row(d, p, r, row, at, within_budget(p, d->pairs[at], d->changed_pairs[at]));
  }
}

/* ---------------------------------------------------------------- scope batch */

/* The rows of every sequence with damping `index`, in order, into d->rows. */
static int gather_rows(colibri_damper *d, const colibri_batch *b, const colibri_damp_rows *r, int index) {
  int n = 0;
  for (int q = 0, row = 0; q < b->n_seqs; row += b->seqs[q++].n_rows)
    for (int i = 0; i < b->seqs[q].n_rows && b->seqs[q].damping == index; i++)
      if (!r->bad[row + i]) d->rows[n++] = row + i;
  return n;
}

typedef struct move { int row, place, to; float loss; } move;

/* The move away from an expert for which `from` holds, to one for which `to` holds, that loses least. */
static move best_move(const colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int n, const uint8_t *from, const uint8_t *to, int fresh) {
  move best = {-1, 0, 0, INFINITY};
  for (int m = 0; m < n; m++) {
    int row = d->rows[m];
    const float *scores = r->scores + (size_t)row * (size_t)d->experts;
    const int32_t *own = d->own + (size_t)row * (size_t)d->k, *ids = r->ids + row * d->k;
    if (!fresh && !r->changed[row]) continue;
    for (int i = 0; i < d->k; i++) {
      if (!from[ids[i]]) continue;
      for (int e = 0; e < d->experts; e++)
        if (to[e] && scores[ids[i]] - scores[e] < best.loss && may_take(d, scores, own, ids, i, e, p->margin))
          best = (move){row, i, e, scores[ids[i]] - scores[e]};
    }
  }
  return best;
}

static int is_own(const colibri_damper *d, const colibri_damp_rows *r, int row) {
  return !memcmp(d->own + (size_t)row * (size_t)d->k, r->ids + row * d->k, sizeof *d->own * (size_t)d->k);
}

static void make_move(colibri_damper *d, const colibri_damp_rows *r, move m, uint64_t *changed) {
  int32_t *id = &r->ids[m.row * d->k + m.place];
  d->queue[*id]--, d->queue[m.to]++;
  *id = m.to;
  int now = !is_own(d, r, m.row);
  *changed += (uint64_t)now - r->changed[m.row];
  r->changed[m.row] = (uint8_t)now;
}

/* Moves tokens from experts over the bound to experts below it, those first that lose least. */
static void damp_capacity(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int n, uint64_t pairs, uint64_t *changed) {
  uint8_t over[1024], room[1024];
  double mean = (double)r->n_rows * d->k / d->experts, bound = fmax(ceil(mean), floor((double)p->capacity_factor * mean));
  for (;;) {
    for (int e = 0; e < d->experts; e++) over[e] = d->queue[e] > bound, room[e] = d->queue[e] < bound;
    move m = best_move(d, p, r, n, over, room, within_budget(p, pairs, *changed));
    if (m.row < 0) return;
    make_move(d, r, m, changed);
  }
}

/* Empties experts that have few tokens, if all of them can go to others that have some. */
static void damp_reuse(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int n, uint64_t pairs, uint64_t *changed) {
  uint8_t from[1024], to[1024], tried[1024] = {0};
  for (;;) {
    int least = -1;
    for (int e = 0; e < d->experts; e++)
      if (!tried[e] && d->queue[e] && (least < 0 || d->queue[e] < d->queue[least])) least = e;
    if (least < 0) return;
    tried[least] = 1;
    for (int e = 0; e < d->experts; e++) from[e] = e == least, to[e] = e != least && d->queue[e];
    move made[64];
    int count = 0, want = d->queue[least];
    while (count < want && want <= 64) {
      move m = best_move(d, p, r, n, from, to, within_budget(p, pairs, *changed));
      if (m.row < 0) break;
      make_move(d, r, m, changed);
      made[count++] = m;
    }
    if (count == want) continue;
    while (count--) made[count].to = least, make_move(d, r, made[count], changed);
  }
}

static void damp_batch(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int index, int n) {
  uint64_t *pairs = &d->step_pairs[index], *changed = &d->step_changed[index];
  *pairs += (uint64_t)n;
  if (p->kind == COLIBRI_DAMPING_HEAT) {
    size_t at = (size_t)d->max_slots * (size_t)d->layers + (size_t)r->layer;
    for (int m = 0; m < n; m++) *changed += (uint64_t)damp_row(d, p, r, d->rows[m], at, within_budget(p, *pairs, *changed));
    return;
  }
  memset(d->queue, 0, sizeof *d->queue * (size_t)d->experts);
  for (int row = 0; row < r->n_rows; row++) count_row(d, r->ids + row * d->k, 1);
  memcpy(d->own, r->ids, sizeof *d->own * (size_t)r->n_rows * (size_t)d->k);
  if (p->kind == COLIBRI_DAMPING_CAPACITY)
    damp_capacity(d, p, r, n, *pairs, changed);
  else
    damp_reuse(d, p, r, n, *pairs, changed);
  for (int m = 0; m < n; m++)
    if (r->changed[d->rows[m]]) sort_row(r->scores + (size_t)d->rows[m] * (size_t)d->experts, r->ids + d->rows[m] * d->k, d->k);
}

/* ---------------------------------------------------------------- a layer */

int colibri_damp(colibri_damper *d, const colibri_batch *b, const colibri_damp_rows *r) {
  memset(r->changed, 0, (size_t)r->n_rows);
  for (int index = 0; index < b->n_dampings; index++) {
    const colibri_damping *p = &b->dampings[index];
    if (p->kind == COLIBRI_DAMPING_OFF) continue;
    if (p->scope == COLIBRI_SCOPE_BATCH) {
      damp_batch(d, p, r, index, gather_rows(d, b, r, index));
      continue;
    }
    for (int q = 0, row = 0; q < b->n_seqs; row += b->seqs[q++].n_rows)
      if (b->seqs[q].damping == index) damp_sequence(d, p, r, b->seqs[q].slot, row, b->seqs[q].n_rows);
  }
  int changed = 0;
  for (int q = 0, row = 0; q < b->n_seqs; q++) {
    int of_seq = 0;
    for (int i = 0; i < b->seqs[q].n_rows; i++) of_seq += r->changed[row++];
    if (b->rerouted) b->rerouted[q] += of_seq;
    changed += of_seq;
  }
  return changed;
}
