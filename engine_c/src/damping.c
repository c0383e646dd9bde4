/* damping.c - the policies of damping.h. */
#include "damping.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

/* ---------------------------------------------------------------- opening */

/* The arrays: where each pointer is, and its elements. */
typedef struct array { void *at; size_t count, size; } array;
#define ARRAYS 22

static void list_arrays(colibri_damper *d, size_t max_rows, size_t max_seqs, array *arrays) {
  size_t states = (size_t)d->max_slots * (size_t)d->layers, e = (size_t)d->experts, pairs = max_rows * (size_t)d->k;
  size_t saved = d->max_slots ? max_seqs * (size_t)d->layers : 0;
#define ARRAY(name, n) {&d->name, n, sizeof *d->name}
  array all[ARRAYS] = {ARRAY(heat, states * e), ARRAY(pairs, states), ARRAY(changed_pairs, states), ARRAY(saved_heat, saved * e), ARRAY(saved_pairs, 2 * saved),
                       ARRAY(step_pairs, max_seqs), ARRAY(step_changed, max_seqs),
                       ARRAY(rows, max_rows), ARRAY(own, pairs), ARRAY(values, max_rows * e), ARRAY(queue, e), ARRAY(cost, max_rows + 2), ARRAY(price, e),
                       ARRAY(loss, e * e), ARRAY(mover, e * e), ARRAY(block, max_rows * e), ARRAY(best_to, e), ARRAY(best_cost, e), ARRAY(loose, e), ARRAY(stale, e), ARRAY(head, e), ARRAY(next, 3 * pairs)};
#undef ARRAY
  memcpy(arrays, all, sizeof all);
}

/* Pointers are stored through memcpy: they are of many types. */
static int open_arrays(const array *arrays) {
  int ok = 1;
  for (int i = 0; i < ARRAYS; i++) {
    void *p = calloc(arrays[i].count + 1, arrays[i].size);
    memcpy(arrays[i].at, &p, sizeof p);
    ok &= p != NULL;
  }
  return ok;
}

int colibri_damper_open(colibri_damper *d, int experts, int k, int layers, int max_rows, int max_seqs, int max_slots) {
  array arrays[ARRAYS];
  *d = (colibri_damper){.kernels = colibri_kernels_get(), .experts = experts, .k = k, .layers = layers, .max_slots = max_slots};
  list_arrays(d, (size_t)max_rows, (size_t)max_seqs, arrays);
  if (!open_arrays(arrays)) {
    colibri_damper_close(d);
    return COLIBRI_ENOMEM;
  }
  d->before = d->next + (size_t)max_rows * (size_t)k;
  d->target = d->before + (size_t)max_rows * (size_t)k;
  return COLIBRI_OK;
}

void colibri_damper_close(colibri_damper *d) {
  array arrays[ARRAYS];
  list_arrays(d, 0, 0, arrays);
  for (int i = 0; i < ARRAYS; i++) {
    void *p;
    memcpy(&p, arrays[i].at, sizeof p);
    free(p);
  }
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
  size_t layers = (size_t)d->layers, values = layers * (size_t)d->experts;
  for (int n = 0; n < b->n_dampings; n++) d->step_pairs[n] = d->step_changed[n] = 0;
  if (b->rerouted) memset(b->rerouted, 0, sizeof *b->rerouted * (size_t)b->n_seqs);
  for (int n = 0; n < b->n_seqs && b->n_dampings; n++) {
    size_t slot = (size_t)b->seqs[n].slot;
    if (b->seqs[n].slot < 0 || b->seqs[n].start) continue;
    memset(d->heat + slot * values, 0, sizeof *d->heat * values);
    memset(d->pairs + slot * layers, 0, sizeof *d->pairs * layers);
    memset(d->changed_pairs + slot * layers, 0, sizeof *d->changed_pairs * layers);
  }
}

/* One array's part of a slot, to or from where sequence n's is saved. */
static void move_state(void *slot, void *saved, size_t bytes, int back) {
  if (back) memcpy(slot, saved, bytes);
  else memcpy(saved, slot, bytes);
}

/* States of sequences that go on. One that begins anew is cleared when it does so again. */
static void move_states(colibri_damper *d, const colibri_batch *b, int back) {
  size_t layers = (size_t)d->layers, values = layers * (size_t)d->experts;
  for (int n = 0; n < b->n_seqs; n++) {
    size_t slot = (size_t)b->seqs[n].slot, at = (size_t)n;
    if (b->seqs[n].slot < 0 || b->seqs[n].damping < 0 || !b->seqs[n].start) continue;
    move_state(d->heat + slot * values, d->saved_heat + at * values, sizeof *d->heat * values, back);
    move_state(d->pairs + slot * layers, d->saved_pairs + 2 * at * layers, sizeof *d->pairs * layers, back);
    move_state(d->changed_pairs + slot * layers, d->saved_pairs + (2 * at + 1) * layers, sizeof *d->pairs * layers, back);
  }
}

void colibri_damper_save(colibri_damper *d, const colibri_batch *b) { move_states(d, b, 0); }
void colibri_damper_restore(colibri_damper *d, const colibri_batch *b) { move_states(d, b, 1); }

/* ---------------------------------------------------------------- rows */

/* By descending score, ties to the lower index. */
static void sort_row(const float *scores, int32_t *ids, int k) {
  for (int i = 1; i < k; i++) {
    int32_t e = ids[i];
    int j = i;
    for (; j && (scores[ids[j - 1]] < scores[e] || (scores[ids[j - 1]] == scores[e] && ids[j - 1] > e)); j--) ids[j] = ids[j - 1];
    ids[j] = e;
  }
}

/* What weights are proportional to, at least 0. */
static void find_weights(const colibri_damper *d, const float *scores, int top, int logits, float *w) {
  float base = logits ? scores[top] : INFINITY;
  for (int e = 0; e < d->experts && !logits; e++)
    if (scores[e] > -INFINITY && scores[e] < base) base = scores[e];
  for (int e = 0; e < d->experts; e++) w[e] = scores[e] - base;
  if (logits) d->kernels->exp(w, d->experts);
  for (int e = 0; e < d->experts; e++) w[e] = fmaxf(w[e], 0);
}

void colibri_damp_members(colibri_damper *d, const colibri_damp_rows *r, int n) {
  for (int m = 0; m < n; m++) {
    const float *scores = r->scores + (size_t)d->rows[m] * (size_t)d->experts;
    int32_t *own = d->own + m * d->k;
    float *w = d->values + (size_t)m * (size_t)d->experts, sum = 0;
    memcpy(own, r->ids + d->rows[m] * d->k, sizeof *own * (size_t)d->k);
    find_weights(d, scores, own[0], r->logits, w);
    for (int i = 0; i < d->k; i++) sum += w[own[i]];
    float inverse = sum > 0 ? 1.0f / sum : 0;
    for (int e = 0; e < d->experts; e++) w[e] *= inverse, w[e] *= w[e];
  }
}

/* ---------------------------------------------------------------- scope sequence */

/* HEAT: what an expert costs that has been used so much. Returns whether any costs something. */
static int find_prices(const colibri_damper *d, const colibri_damping *p, const float *heat) {
  int any = 0;
  for (int e = 0; e < d->experts; e++) any |= heat[e] > (float)p->threshold;
  if (!any) return 0;
  float rate = (float)(log((double)p->growth) * (1 - (double)p->decay));
  for (int e = 0; e < d->experts; e++) d->price[e] = rate * fmaxf(heat[e] - (float)p->threshold, 0);
  d->kernels->exp(d->price, d->experts);
  for (int e = 0; e < d->experts; e++) d->price[e] = fminf(d->price[e] - 1, COLIBRI_DAMP_ANY_LOSS);
  return 1;
}

/* CAPACITY: any price for an expert that one more use would bring above the bound. Returns whether there is one. */
static int find_bounds(const colibri_damper *d, const colibri_damping *p, const float *heat) {
  float sum = (float)d->k;
  for (int e = 0; e < d->experts; e++) sum += heat[e];
  float bound = p->capacity_factor * (sum / (float)d->experts);
  int any = 0;
  for (int e = 0; e < d->experts; e++) d->price[e] = heat[e] + 1 > bound ? COLIBRI_DAMP_ANY_LOSS : 0, any |= d->price[e] > 0;
  return any;
}

/* Exchanges places while that saves more than it loses, the exchange first that is best; equals: lowest place, then lowest expert. */
static int exchange(const colibri_damper *d, const float *scores, int32_t *ids, float margin) {
  int changed = 0;
  for (int n = 0; n < d->k; n++) {
    float most = 0;
    int place = -1, to = -1;
    for (int i = 0; i < d->k; i++)
      for (int e = 0; e < d->experts && ids[i] == d->own[i]; e++) {
        float gain = d->price[ids[i]] - d->price[e] - (d->values[ids[i]] - d->values[e]);
        if (gain > most && colibri_damp_may(d, scores, d->own, ids, i, e, margin)) most = gain, place = i, to = e;
      }
    if (place < 0) break;
    ids[place] = to;
    changed = 1;
  }
  return changed;
}

static void count_use(const colibri_damper *d, const colibri_damping *p, const int32_t *ids, float *heat) {
  int in_a_row = p->kind == COLIBRI_DAMPING_HEAT;
  for (int e = 0; e < d->experts; e++) {
    int used = colibri_damp_has(ids, d->k, e);
    heat[e] = (used && in_a_row ? heat[e] : heat[e] * p->decay) + (float)used;
  }
}

static void damp_sequence(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int slot, int first, int n) {
  size_t at = (size_t)slot * (size_t)d->layers + (size_t)r->layer;
  float *heat = d->heat + at * (size_t)d->experts;
  for (int row = first; row < first + n; row++) {
    const float *scores = r->scores + (size_t)row * (size_t)d->experts;
    int32_t *ids = r->ids + row * d->k;
    if (r->bad[row]) continue;
    d->pairs[at]++;
    int within = colibri_damp_within(p, d->pairs[at], d->changed_pairs[at]);
    if (within && (p->kind == COLIBRI_DAMPING_HEAT ? find_prices(d, p, heat) : find_bounds(d, p, heat))) {
      d->rows[0] = row;
      colibri_damp_members(d, r, 1);
      if (exchange(d, scores, ids, p->margin)) {
        sort_row(scores, ids, d->k);
        r->changed[row] = 1;
        d->changed_pairs[at]++;
      }
    }
    count_use(d, p, ids, heat);
  }
}

/* ---------------------------------------------------------------- a layer */

/* The rows of every sequence with damping `index`, in order, into d->rows. */
static int gather_rows(colibri_damper *d, const colibri_batch *b, const colibri_damp_rows *r, int index) {
  int n = 0;
  for (int q = 0, row = 0; q < b->n_seqs; row += b->seqs[q++].n_rows)
    for (int i = 0; i < b->seqs[q].n_rows && b->seqs[q].damping == index; i++)
      if (!r->bad[row + i]) d->rows[n++] = row + i;
  return n;
}

static void damp_step(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int index, int n) {
  d->step_pairs[index] += (uint64_t)n;
  memset(d->queue, 0, sizeof *d->queue * (size_t)d->experts);
  for (int64_t i = 0; i < (int64_t)r->n_rows * d->k; i++) d->queue[r->ids[i]]++;
  colibri_damp_members(d, r, n);
  colibri_damp_batch(d, p, r, n, d->step_pairs[index], &d->step_changed[index]);
  for (int m = 0; m < n; m++)
    if (r->changed[d->rows[m]]) sort_row(r->scores + (size_t)d->rows[m] * (size_t)d->experts, r->ids + d->rows[m] * d->k, d->k);
}

int colibri_damp(colibri_damper *d, const colibri_batch *b, const colibri_damp_rows *r) {
  memset(r->changed, 0, (size_t)r->n_rows);
  for (int index = 0; index < b->n_dampings; index++) {
    const colibri_damping *p = &b->dampings[index];
    if (p->kind == COLIBRI_DAMPING_OFF) continue;
    if (p->scope == COLIBRI_SCOPE_BATCH) {
      damp_step(d, p, r, index, gather_rows(d, b, r, index));
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
