/* damp_scores.c - damping by itself, of scores given by the caller. */
#include <stdlib.h>

#include "damping.h"
#include "model.h"

/* What one call runs. */
typedef struct trial {
  const colibri_damping *damping;
  const float *scores;
  int experts, k, logits, rows; /* rows: of the largest step */
  const uint8_t *pinned;
  int32_t *ids;
  uint8_t *changed, *bad;  /* bad [rows] */
  colibri_seq *seqs;       /* [rows] */
  colibri_damper damper;
} trial;

static int check_shape(int experts, int k, const int32_t *steps, int n_steps, int *rows, colibri_error *err) {
  if (experts < 1 || experts > COLIBRI_MAX_EXPERTS || k < 1 || k > experts || k > COLIBRI_MAX_TOP_K)
    return colibri_fail(err, COLIBRI_EINVAL, "top %d of %d experts: there may be 1..%d of 1..%d", k, experts, COLIBRI_MAX_TOP_K, COLIBRI_MAX_EXPERTS);
  *rows = 1;
  for (int i = 0; i < n_steps; i++) {
    if (steps[i] < 1 || steps[i] > 65536) return colibri_fail(err, COLIBRI_EINVAL, "step %d: %d tokens, there may be 1..65536", i, steps[i]);
    if (steps[i] > *rows) *rows = steps[i];
  }
  return COLIBRI_OK;
}

/* Tokens first .. first + n - 1 as one step. */
static void run_step(trial *t, int64_t first, int n) {
  int whole = t->damping->scope == COLIBRI_SCOPE_SEQUENCE;
  colibri_batch batch = {.n_seqs = whole ? 1 : n, .n_dampings = 1, .seqs = t->seqs, .dampings = t->damping};
  for (int i = 0; i < batch.n_seqs; i++)
    t->seqs[i] = (colibri_seq){.n_rows = whole ? n : 1, .start = (int32_t)first, .slot = whole ? 0 : -1, .damping = t->pinned && t->pinned[first + i] ? -1 : 0};
  const float *scores = t->scores + first * t->experts;
  int32_t *ids = t->ids + first * t->k;
  t->damper.kernels->top_k(scores, t->experts, t->experts, n, t->k, ids, t->bad);
  colibri_damper_begin(&t->damper, &batch);
  colibri_damp(&t->damper, &batch, &(colibri_damp_rows){.n_rows = n, .logits = t->logits, .scores = scores, .bad = t->bad, .ids = ids, .changed = t->changed + first});
}

int colibri_damp_scores(const colibri_damping *damping, const float *scores, int experts, int k, int logits, const int32_t *steps, int n_steps,
                        const uint8_t *pinned, int32_t *ids, uint8_t *changed, colibri_error *err) {
  trial t = {.damping = damping, .scores = scores, .experts = experts, .k = k, .logits = logits, .pinned = pinned, .ids = ids, .changed = changed};
  int rc = colibri_damping_check(damping, 0, err);
  if (!rc) rc = check_shape(experts, k, steps, n_steps, &t.rows, err);
  if (!rc && pinned && damping->scope == COLIBRI_SCOPE_SEQUENCE) rc = colibri_fail(err, COLIBRI_EINVAL, "pinned tokens exist in scope batch only");
  if (!rc) rc = colibri_isa_ensure(err);
  if (rc) return rc;
  t.bad = malloc((size_t)t.rows);
  t.seqs = malloc(sizeof *t.seqs * (size_t)t.rows);
  rc = COLIBRI_ENOMEM;
  if (t.bad && t.seqs) rc = colibri_damper_open(&t.damper, experts, k, 1, t.rows, t.rows, 1);
  if (rc) colibri_fail(err, rc, "no memory for %d tokens of %d experts", t.rows, experts);
  int64_t first = 0;
  for (int i = 0; i < n_steps && !rc; i++) run_step(&t, first, steps[i]), first += steps[i];
  colibri_damper_close(&t.damper);
  free(t.seqs);
  free(t.bad);
  return rc;
}
