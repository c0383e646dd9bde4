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
  *c = (colibri_counts){.layers = layers, .experts = experts, .max_slots = max_slots};
  list_parts(&c->all, experts, parts);
  c->last = calloc((size_t)max_slots * (size_t)layers + 1, sizeof *c->last);
  c->next = calloc((size_t)max_slots + 1, sizeof *c->next);
  int ok = c->last && c->next;
  for (int i = 0; i < PARTS; i++) ok &= (*parts[i].at = calloc((size_t)(layers * parts[i].per_layer), sizeof(uint64_t))) != NULL;
  if (ok) return COLIBRI_OK;
  colibri_counts_close(c);
  return COLIBRI_ENOMEM;
}

void colibri_counts_close(colibri_counts *c) {
  part parts[PARTS];
  list_parts(&c->all, c->experts, parts);
  for (int i = 0; i < PARTS; i++) free(*parts[i].at);
  free(c->last);
  free(c->next);
  memset(c, 0, sizeof *c);
}

static inline void add(uint64_t *to, uint64_t n) { __atomic_store_n(to, *to + n, __ATOMIC_RELAXED); }

/* ---------------------------------------------------------------- counting */

static void end_run(colibri_counts *c, int layer, int32_t length) {
  int bucket = length ? 31 - __builtin_clz((unsigned)length) : 0;
  if (length) add(&c->all.runs[layer * COLIBRI_RUN_BUCKETS + (bucket < COLIBRI_RUN_BUCKETS ? bucket : COLIBRI_RUN_BUCKETS - 1)], 1);
}

void colibri_counts_begin(colibri_counts *c, const colibri_batch *b) {
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
  uint64_t *tokens = c->all.tokens + (int64_t)layer * c->experts, *steps = c->all.active + (int64_t)layer * c->experts;
  for (int e = 0; e < c->experts; e++) {
    uint64_t n = (uint64_t)queue[e];
    if (!n) continue;
    add(&tokens[e], n), add(&steps[e], 1);
    squares += n * n, active++;
    longest = n > longest ? n : longest;
  }
  add(&c->all.steps[layer], 1), add(&c->all.rows[layer], (uint64_t)rows);
  add(&c->all.row_squares[layer], (uint64_t)rows * (uint64_t)rows);
  add(&c->all.queue_squares[layer], squares);
  add(&c->all.queue_longest[layer], longest), add(&c->all.longest_squares[layer], longest * longest);
  if (longest > c->all.queue_max[layer]) __atomic_store_n(&c->all.queue_max[layer], longest, __ATOMIC_RELAXED);
  add(&c->all.active_experts[layer], active);
  if (rerouted) add(&c->all.rerouted[layer], (uint64_t)rerouted);
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
  if (repeats) add(&c->all.repeats[layer], repeats);
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
