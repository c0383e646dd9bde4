/* telemetry.c - counting, and reading the counts from another thread. */
#include "telemetry.h"

#include <stdlib.h>
#include <string.h>

#include "model.h"

/* Where the arrays are in colibri_telemetry, and how many values a layer has in each. */
typedef struct part { uint64_t **at; int64_t per_layer; } part;
#define PARTS 13

static void list_parts(colibri_telemetry *t, int experts, part *parts) {
  part all[PARTS] = {{&t->tokens, experts},    {&t->active, experts},       {&t->steps, 1},          {&t->rows, 1},     {&t->row_squares, 1}, {&t->queue_squares, 1}, {&t->queue_longest, 1},
                     {&t->longest_squares, 1}, {&t->queue_max, 1},          {&t->active_experts, 1}, {&t->rerouted, 1}, {&t->repeats, 1},       {&t->runs, COLIBRI_RUN_BUCKETS}};
  memcpy(parts, all, sizeof all);
}

int colibri_counts_open(colibri_counts *c, int layers, int experts, int max_slots) {
  part parts[PARTS];
  size_t runs = (size_t)max_slots * (size_t)layers + 1, slots = (size_t)max_slots + 1;
  *c = (colibri_counts){.layers = layers, .experts = experts, .max_slots = max_slots};
  c->last = calloc(runs, sizeof *c->last), c->last_kept = calloc(runs, sizeof *c->last);
  c->next = calloc(slots, sizeof *c->next), c->next_kept = calloc(slots, sizeof *c->next);
  int ok = c->last && c->last_kept && c->next && c->next_kept;
  for (int own = 0; own < 2; own++) {
    list_parts(own ? &c->own : &c->all, experts, parts);
    for (int i = 0; i < PARTS; i++) ok &= (*parts[i].at = calloc((size_t)(layers * parts[i].per_layer), sizeof(uint64_t))) != NULL;
  }
  c->to = c->all;
  if (ok) return COLIBRI_OK;
  colibri_counts_close(c);
  return COLIBRI_ENOMEM;
}

void colibri_counts_close(colibri_counts *c) {
  part parts[PARTS];
  for (int own = 0; own < 2; own++) {
    list_parts(own ? &c->own : &c->all, c->experts, parts);
    for (int i = 0; i < PARTS; i++) free(*parts[i].at);
  }
  free(c->last), free(c->last_kept);
  free(c->next), free(c->next_kept);
  memset(c, 0, sizeof *c);
}

static inline void add(uint64_t *to, uint64_t n) { __atomic_store_n(to, *to + n, __ATOMIC_RELAXED); }

/* ---------------------------------------------------------------- counting */

static void end_run(colibri_counts *c, int layer, int32_t length) {
  int bucket = length ? 31 - __builtin_clz((unsigned)length) : 0;
  if (length) add(&c->to.runs[layer * COLIBRI_RUN_BUCKETS + (bucket < COLIBRI_RUN_BUCKETS ? bucket : COLIBRI_RUN_BUCKETS - 1)], 1);
}

/* All counts go from one to the other. Stores are relaxed: `all` is read meanwhile. */
static void copy_counts(colibri_counts *c, colibri_telemetry from, colibri_telemetry to) {
  part have[PARTS], want[PARTS];
  list_parts(&from, c->experts, have), list_parts(&to, c->experts, want);
  for (int i = 0; i < PARTS; i++) {
    const uint64_t *source = *have[i].at;
    uint64_t *target = *want[i].at;
    for (int64_t n = 0; n < c->layers * have[i].per_layer; n++) __atomic_store_n(&target[n], source[n], __ATOMIC_RELAXED);
  }
}

static void keep_runs(colibri_counts *c, int back) {
  size_t runs = (size_t)c->max_slots * (size_t)c->layers * sizeof *c->last, slots = (size_t)c->max_slots * sizeof *c->next;
  memcpy(back ? c->last : c->last_kept, back ? c->last_kept : c->last, runs);
  memcpy(back ? c->next : c->next_kept, back ? c->next_kept : c->next, slots);
}

void colibri_counts_end(colibri_counts *c) {
  if (c->pending) copy_counts(c, c->own, c->all);
  c->pending = 0;
  c->to = c->all;
}

void colibri_counts_abandon(colibri_counts *c) {
  if (c->pending) keep_runs(c, 1);
  c->pending = 0;
  c->to = c->all;
}

void colibri_counts_begin(colibri_counts *c, const colibri_batch *b, int pending) {
  c->pending = pending;
  c->to = pending ? c->own : c->all;
  if (pending) copy_counts(c, c->all, c->own), keep_runs(c, 0);
  for (int n = 0; n < b->n_seqs; n++) {
    const colibri_seq *q = &b->seqs[n];
    if (q->slot < 0) continue;
    int goes_on = q->start && q->start == c->next[q->slot];
    c->next[q->slot] = q->start + q->n_rows;
    if (goes_on) continue;
    colibri_run *last = c->last + (int64_t)q->slot * c->layers;
    for (int layer = 0; layer < c->layers; layer++) end_run(c, layer, last[layer].length), last[layer].length = 0;
  }
}

void colibri_counts_queues(colibri_counts *c, int layer, const int32_t *queue, int rows, int rerouted) {
  uint64_t squares = 0, longest = 0, active = 0;
  uint64_t *tokens = c->to.tokens + (int64_t)layer * c->experts, *steps = c->to.active + (int64_t)layer * c->experts;
  for (int e = 0; e < c->experts; e++) {
    uint64_t n = (uint64_t)queue[e];
    if (!n) continue;
    add(&tokens[e], n), add(&steps[e], 1);
    squares += n * n, active++;
    longest = n > longest ? n : longest;
  }
  add(&c->to.steps[layer], 1), add(&c->to.rows[layer], (uint64_t)rows);
  add(&c->to.row_squares[layer], (uint64_t)rows * (uint64_t)rows);
  add(&c->to.queue_squares[layer], squares);
  add(&c->to.queue_longest[layer], longest), add(&c->to.longest_squares[layer], longest * longest);
  if (longest > c->to.queue_max[layer]) __atomic_store_n(&c->to.queue_max[layer], longest, __ATOMIC_RELAXED);
  add(&c->to.active_experts[layer], active);
  if (rerouted) add(&c->to.rerouted[layer], (uint64_t)rerouted);
}

void colibri_counts_runs(colibri_counts *c, const colibri_batch *b, int layer, const int32_t *ids, int k) {
  uint64_t repeats = 0;
  for (int n = 0; n < b->n_seqs; ids += (int64_t)b->seqs[n++].n_rows * k) {
    if (b->seqs[n].slot < 0) continue;
    colibri_run run = c->last[(int64_t)b->seqs[n].slot * c->layers + layer];
    for (int r = 0; r < b->seqs[n].n_rows; r++) {
      int32_t first = ids[(int64_t)r * k];
      if (run.length && run.expert == first) {
        run.length += run.length < INT32_MAX, repeats++;
      } else {
        end_run(c, layer, run.length);
        run = (colibri_run){first, 1};
      }
    }
    c->last[(int64_t)b->seqs[n].slot * c->layers + layer] = run;
  }
  if (repeats) add(&c->to.repeats[layer], repeats);
}

/* ---------------------------------------------------------------- reading */

int colibri_counts_read(const colibri_counts *c, const colibri_telemetry *into, colibri_error *err) {
  colibri_telemetry from = c->all, to = *into;
  part have[PARTS], want[PARTS];
  if (into->layers != c->layers || into->experts != c->experts)
    return colibri_fail(err, COLIBRI_EINVAL, "telemetry is of %d layers and %d experts, there is room for %d and %d", c->layers, c->experts, into->layers, into->experts);
  list_parts(&from, c->experts, have), list_parts(&to, c->experts, want);
  for (int i = 0; i < PARTS; i++)
    for (int64_t n = 0; *want[i].at && n < c->layers * want[i].per_layer; n++) (*want[i].at)[n] = __atomic_load_n(&(*have[i].at)[n], __ATOMIC_RELAXED);
  return COLIBRI_OK;
}
