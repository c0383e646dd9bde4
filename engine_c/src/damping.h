/* damping.h - fewer tokens for experts that get too many (internal).
 *
 * The router has chosen each row's top k; damping exchanges some of these experts for others. Whatever the policy:
 *   - a place (one of a row's k) goes from its own expert a only to an expert b that the row had not chosen, with score[a] - score[b] <= margin;
 *   - at most max_rerouted of the pairs (row, layer) seen so far are changed: SEQUENCE, of the layer's along the sequence; BATCH, of the step's;
 *   - a row without damping, or with a NaN, is left alone. In scope BATCH its experts count as taken all the same.
 *
 * What a row loses when a place goes from a to b is w[a]^2 - w[b]^2, with w[e] the weight that e has, or would have beside the row's own choice: exp(score)
 * over the sum of that of the chosen (of scores that are no logits: what they are above the row's least). The square is what the expert's part in the output
 * counts for; on a trained model it costs less perplexity for the same balance than the weight itself, the probability or the logit (docs/balance.md).
 * What an exchange saves is price[a] - price[b]; one is made while that is more than the loss, the best first.
 *
 *   HEAT, SEQUENCE      heat[e] + 1 for a use, heat[e] * decay for a token without; price = growth^((heat - threshold) (1 - decay)) - 1 above the
 *                       threshold, else 0: heat (1 - decay) is 1 for an expert that all recent tokens have used.
 *   HEAT, BATCH         the n-th token of a queue has the price growth^(n / share - 1) - 1, share = rows * k / experts: what queues are with perfect balance.
 *   CAPACITY, SEQUENCE  heat[e] * decay for each token, + 1 for a use; any price where heat[e] + 1 > capacity_factor * (sum of heat + k) / experts.
 *   CAPACITY, BATCH     any price for tokens beyond max(ceil(share), floor(capacity_factor * share)).
 *   REUSE, BATCH        experts are emptied, the one that loses least first, if all its tokens can go to experts that keep theirs.
 *
 * HEAT and CAPACITY of scope BATCH look through no more pairs for a layer's best moves than COLIBRI_DAMP_WORK says: long steps whose tokens all want
 * the same, and may go anywhere, keep the moves made until then. What is given up depends on the step alone.
 */
#ifndef COLIBRI_DAMPING_H
#define COLIBRI_DAMPING_H

#include "kernels.h"

#define COLIBRI_DAMP_ANY_LOSS 16.0f /* a price above every loss: a place loses at most 1 */
/* Pairs looked at again: some tens of nanoseconds for each pair and expert, so that damping stays a small part of the experts' work. Steps of some dozen
 * rows stay far below. */
#define COLIBRI_DAMP_WORK(rows, k, experts) (65536 + 4 * (int64_t)(rows) * (k) * (experts))

/* State and scratch of one session's damping, sized when it is opened. */
typedef struct colibri_damper {
  const colibri_kernels *kernels;
  int32_t experts, k, layers, max_slots; /* layers: those with a router */
  /* state of the sequences in slots */
  float *heat;             /* [max_slots][layers][experts] */
  uint32_t *pairs, *changed_pairs; /* [max_slots][layers] rows routed, and those of them changed */
  /* what a step that may be abandoned began with, by sequence */
  float *saved_heat;       /* [max_seqs][layers][experts]; nothing without slots */
  uint32_t *saved_pairs;   /* [max_seqs][2][layers] pairs, changed_pairs */
  /* the running step: the same by damping, scope BATCH */
  uint64_t *step_pairs, *step_changed; /* [max_seqs] */
  /* scratch of a layer */
  int32_t *rows;           /* [max_rows] rows that are weighed against each other: the members */
  int32_t *own;            /* [max_rows][k] by member, the experts they had chosen, by place */
  float *values;           /* [max_rows][experts] by member: what an expert is worth to it, 0..1 */
  int32_t *queue;          /* [experts] tokens that each has */
  float *cost;             /* [max_rows + 2] price of a queue's n-th token, rising with n */
  float *price;            /* [experts] of another use; REUSE: of giving the expert up */
  /* the cheapest move from one expert to another: what it loses, INFINITY if there is none, and the pair (member * k + place) that would move */
  float *loss;             /* [experts][experts] */
  int32_t *mover;          /* [experts][experts] */
  int32_t *best_to;        /* [experts] the cheapest expert to move to, price and loss together, */
  float *best_cost;        /* [experts] and these; if loose, only a lower bound of what the cheapest costs */
  uint8_t *loose;          /* [experts] */
  float *block;            /* [max_rows][experts] by member: INFINITY for experts that it had chosen or has now, else 0 */
  uint8_t *stale;          /* [experts] */
  int32_t *head;           /* [experts] first pair of each, of the members' */
  int32_t *next, *before;  /* [max_rows][k] by pair; -1: none */
  int32_t *target;         /* [max_rows][k] by pair: where it would go */
} colibri_damper;

/* Rows of one layer: what was chosen, and by what. */
typedef struct colibri_damp_rows {
  int32_t layer;           /* 0..layers-1 */
  int32_t n_rows;
  int32_t logits;          /* the scores are logits; else they are what weights are made of */
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
/* Saves the states of the sequences of a step that is about to begin; gives them back, as if it had not. */
void colibri_damper_save(colibri_damper *d, const colibri_batch *batch);
void colibri_damper_restore(colibri_damper *d, const colibri_batch *batch);
/* Damps one layer's rows; adds to batch->rerouted. Returns how many were changed. */
int colibri_damp(colibri_damper *d, const colibri_batch *batch, const colibri_damp_rows *rows);

/* ---------------------------------------------------------------- its parts */

/* Takes the first n of d->rows as members: d->own and d->values. */
void colibri_damp_members(colibri_damper *d, const colibri_damp_rows *r, int n);
/* Damps the members against each other. damping_batch.c */
void colibri_damp_batch(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int n, uint64_t pairs, uint64_t *changed);

static inline int colibri_damp_has(const int32_t *ids, int k, int e) {
  for (int i = 0; i < k; i++)
    if (ids[i] == e) return 1;
  return 0;
}

/* Whether place i of a row, whose own choice was own[], may go to e. */
static inline int colibri_damp_may(const colibri_damper *d, const float *scores, const int32_t *own, const int32_t *ids, int i, int e, float margin) {
  return e == own[i] ? ids[i] != e : scores[own[i]] - scores[e] <= margin && !colibri_damp_has(own, d->k, e) && !colibri_damp_has(ids, d->k, e);
}

/* Whether one more of `pairs` may be changed. */
static inline int colibri_damp_within(const colibri_damping *p, uint64_t pairs, uint64_t changed) {
  return (double)(changed + 1) <= (double)p->max_rerouted * (double)pairs;
}

#endif
