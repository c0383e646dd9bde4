/* damping.h - fewer tokens for experts that get too many (internal).
 *
 * The router has chosen each row's top k; damping exchanges some of these experts for others. A choice keeps to three rules whatever the policy:
 *   - a place (one of a row's k) goes from its own expert a only to an expert b that the row had not chosen, with score[a] - score[b] <= margin;
 *   - at most max_rerouted of the pairs (row, layer) seen so far are changed: SEQUENCE, of the layer's along the sequence; BATCH, of the step's;
 *   - a row without damping, or with a NaN, is left alone. In scope BATCH its experts count as taken all the same.
 */
#ifndef COLIBRI_DAMPING_H
#define COLIBRI_DAMPING_H

#include <stdint.h>

#include "colibri.h"

/* State and scratch of one session's damping, sized when it is opened. */
typedef struct colibri_damper {
  int32_t experts, k, layers, max_slots; /* layers: those with a router */
  /* state of the sequences in slots, then one more: scope BATCH's, which lasts from step to step */
  float *penalty;          /* [max_slots + 1][layers][experts] */
  int32_t *uses;           /* [max_slots + 1][layers][experts] HEAT: in a row */
  uint32_t *pairs, *changed_pairs; /* [max_slots + 1][layers] rows routed, and those of them changed */
  /* the running step */
  uint64_t *step_pairs, *step_changed; /* [max_seqs] the same by damping, scope BATCH */
  /* scratch of a layer */
  int32_t *rows;           /* [max_rows] rows that are weighed against each other */
  int32_t *own;            /* [max_rows][k] the experts they had chosen, by place */
  int32_t *queue;          /* [experts] tokens that each has */
} colibri_damper;

/* Rows of one layer: what was chosen, and by what. */
typedef struct colibri_damp_rows {
  int32_t layer;           /* 0..layers-1 */
  int32_t n_rows;
  const float *scores;     /* [n_rows, experts] what selection compares; -INFINITY: cannot be had */
  const uint8_t *bad;      /* [n_rows] */
  int32_t *ids;            /* [n_rows, k] by descending score, before and after */
  uint8_t *changed;        /* [n_rows] out: 1 for rows whose experts are others now */
} colibri_damp_rows;

/* 0, or COLIBRI_ENOMEM with nothing left allocated. max_slots may be 0. */
int colibri_damper_open(colibri_damper *d, int experts, int k, int layers, int max_rows, int max_seqs, int max_slots);
void colibri_damper_close(colibri_damper *d);

/* Checks a damping's fields; `index` is for the sentence. COLIBRI_EINVAL. */
int colibri_damping_check(const colibri_damping *damping, int index, colibri_error *err);
/* Begins a step: forgets the state of slots whose sequence starts anew. The batch has been checked. */
void colibri_damper_begin(colibri_damper *d, const colibri_batch *batch);
/* Damps one layer's rows; adds to batch->rerouted. Returns how many were changed. */
int colibri_damp(colibri_damper *d, const colibri_batch *batch, const colibri_damp_rows *rows);

#endif
