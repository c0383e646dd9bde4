/* telemetry.h - what the router and the dispatcher count (internal). One thread writes, any reads: relaxed 64-bit stores. */
#ifndef COLIBRI_TELEMETRY_H
#define COLIBRI_TELEMETRY_H

#include <stdint.h>

#include "colibri.h"

/* The last first expert of a sequence in one layer, and how many tokens in a row have had it; run 0: none yet. */
typedef struct colibri_run { int32_t expert, length; } colibri_run;

typedef struct colibri_counts {
  int32_t layers, experts, max_slots;
  colibri_telemetry all;   /* the arrays of colibri.h, all there: what is read */
  /* the stepping thread's own */
  colibri_telemetry own;   /* as many: with the counts of a step that may yet be given up */
  colibri_telemetry to;    /* where is counted: one of the two */
  int pending;             /* it is `own`, and a step is under way */
  colibri_run *last, *last_kept; /* [max_slots][layers] now, and as they were before that step */
  int32_t *next, *next_kept;     /* [max_slots] position the slot's sequence goes on at */
} colibri_counts;

/* 0, or COLIBRI_ENOMEM with nothing left allocated. */
int colibri_counts_open(colibri_counts *c, int layers, int experts, int max_slots);
void colibri_counts_close(colibri_counts *c);
/* Begins a step: ends the runs of slots that are made anew, or whose sequence does not go on where it was. pending: the step may be given up, so
 * nobody reads what is counted of it before colibri_counts_end. */
void colibri_counts_begin(colibri_counts *c, const colibri_batch *batch, int pending);
/* The step is done. */
void colibri_counts_end(colibri_counts *c);
/* A pending step is given up: it was never counted. */
void colibri_counts_abandon(colibri_counts *c);
/* Counts one layer's queues: queue [experts] tokens of each, `rerouted` of the `rows` rows changed by damping. */
void colibri_counts_queues(colibri_counts *c, int layer, const int32_t *queue, int rows, int rerouted);
/* Counts one layer's runs: ids [rows, k]. */
void colibri_counts_runs(colibri_counts *c, const colibri_batch *batch, int layer, const int32_t *ids, int k);

/* colibri_session_telemetry. Any thread. */
int colibri_counts_read(const colibri_counts *c, const colibri_telemetry *into, colibri_error *err);

#endif
