/* test_remote.c - steps that are done in part by another session: handed out, packed, put, computed here after all, abandoned; bits stay. */
#include "team_run.h"

#include <math.h>

#define ROWS 23 /* of two sequences */
#define PAIRS (ROWS * 3)

static random_shape shape = {.layers = 3, .hidden = 72, .heads = 4, .kv_heads = 2, .head_dim = 24, .ffn = 56, .experts = 6, .top_k = 3,
                             .vocab = 131, .context = 64, .window = 0, .format = COLIBRI_INT8};

static const int32_t lengths[2] = {19, 4};

/* A prompt of each of two sequences, and what came of it. */
typedef struct work {
  colibri_seq seqs[2];
  int32_t tokens[ROWS], blocks[3], targets[2], status[2], rerouted[2];
  colibri_row_result results[2];
  colibri_step_stats stats;
  colibri_batch batch;
} work;

static work *work_make(work *w) {
  memset(w, 0, sizeof *w);
  for (int i = 0; i < 2; i++)
    w->seqs[i] = (colibri_seq){.n_rows = lengths[i], .n_logits = 1, .n_blocks = 2 - i, .slot = -1, .damping = -1,
                               .sampling = {.top_p = 1, .repetition_penalty = 1}};
  for (int i = 0; i < ROWS; i++) w->tokens[i] = (i * 37 + 5) % shape.vocab;
  for (int i = 0; i < 3; i++) w->blocks[i] = 2 - i;
  w->targets[0] = w->targets[1] = -1;
  w->batch = (colibri_batch){.n_seqs = 2, .seqs = w->seqs, .tokens = w->tokens, .blocks = w->blocks, .targets = w->targets, .rerouted = w->rerouted};
  return w;
}

static colibri_session *open_session(const colibri_model *model, int split_down) {
  return run_open(model, (colibri_session_options){.max_rows = 32, .max_seqs = 4, .max_logit_rows = 4, .kv_blocks = 4, .kv_format = COLIBRI_KV_F32,
                                                   .front_lane = 1, .split_down = split_down});
}

static int begin(colibri_session *s, work *w, colibri_error *err) { return colibri_step(s, &w->batch, w->results, w->status, &w->stats, err); }

static int resume(colibri_session *s, work *w, colibri_error *err) { return colibri_step_resume(s, w->results, w->status, &w->stats, err); }

static uint64_t logits_of(const colibri_session *s) { return run_mix(14695981039346656037u, colibri_session_logits(s), sizeof(float) * 2 * (size_t)shape.vocab); }

static uint64_t computed_here(colibri_session *s) {
  work w;
  colibri_error err;
  CHECK(!colibri_session_remote(s, NULL, &err) && !begin(s, work_make(&w), &err), "%s", err.message);
  return logits_of(s);
}

static void declare(colibri_session *s, int every) {
  uint8_t remote[3 * 6];
  colibri_error err;
  for (int i = 0; i < 3 * 6; i++) remote[i] = i % every == 0;
  CHECK(!colibri_session_remote(s, remote, &err), "%s", err.message);
}

/* ---------------------------------------------------------------- experts */

/* Has n experts computed by the other session and puts what it gives, from an address that is a multiple of nothing. */
static void fetch(colibri_session *s, colibri_session *node, const colibri_remote *state, const int32_t *experts, const int32_t *counts, int n) {
  static char rows[ROWS * 4096], answer[PAIRS * 72 * sizeof(float) + 1];
  static float out[PAIRS * 72];
  int32_t row_of_pair[PAIRS], n_rows = -1, pairs = 0;
  float weights[PAIRS];
  colibri_error err;
  int64_t width = colibri_prepared_bytes(s, state->layer);
  CHECK(width > 0 && width <= 4096, "a prepared row of %lld bytes", (long long)width);
  CHECK(!colibri_remote_pack(s, experts, n, rows, row_of_pair, weights, &n_rows, &err), "%s", err.message);
  for (int i = 0; i < n; i++) {
    for (int k = 1; k < counts[i]; k++) CHECK(row_of_pair[pairs + k] > row_of_pair[pairs + k - 1], "expert %d: rows must ascend", experts[i]);
    pairs += counts[i];
  }
  CHECK(n_rows >= 1 && n_rows <= ROWS && n_rows <= pairs, "%d rows of %d pairs", n_rows, pairs);
  colibri_expert_work asked = {.layer = state->layer, .kind = COLIBRI_ROWS_PREPARED, .n_experts = n, .n_rows = n_rows, .experts = experts,
                               .counts = counts, .rows = rows, .rows_bytes = (uint64_t)(width * n_rows), .row_of_pair = row_of_pair};
  CHECK(!colibri_experts_run(node, &asked, out, &err), "%s", err.message);
  uint64_t bytes = (uint64_t)pairs * 72 * sizeof(float);
  memcpy(answer + 1, out, bytes);
  CHECK(colibri_remote_put(s, experts, n, answer + 1, bytes - 4, &err) == COLIBRI_EINVAL, "too few bytes");
  CHECK(!colibri_remote_put(s, experts, n, answer + 1, bytes, &err), "%s", err.message);
}

/* One layer: the first expert by one message, the others by another, the last computed here; local ones before, between, or by resuming. */
static void do_layer(colibri_session *s, colibri_session *node, work *w, int how) {
  colibri_remote state;
  colibri_error err;
  CHECK(!colibri_remote_state(s, &state), "a step waits");
  CHECK(state.kind == COLIBRI_REMOTE_EXPERTS && state.end == state.layer + 1 && state.n_rows == ROWS, "layer %d", state.layer);
  for (int i = 1; i < state.n_experts; i++) CHECK(state.experts[i] > state.experts[i - 1], "experts must ascend");
  if (how == 0) CHECK(!colibri_step_local(s, &err), "%s", err.message);
  if (how == 0) CHECK(colibri_step_local(s, &err) == COLIBRI_ESTATE, "done before");
  CHECK(resume(s, w, &err) == COLIBRI_ESTATE, "outputs are missing");
  int last = state.n_experts - 1;
  fetch(s, node, &state, state.experts, state.rows, last ? 1 : 0 + (last == 0));
  if (how == 1) CHECK(!colibri_step_local(s, &err), "%s", err.message);
  if (last > 1) fetch(s, node, &state, state.experts + 1, state.rows + 1, last - 1);
  if (last) CHECK(!colibri_remote_compute(s, &state.experts[last], 1, &err), "%s", err.message);
}

static void test_bits(const colibri_model *model) {
  colibri_session *s = open_session(model, 1), *node = open_session(model, 1), *plain = open_session(model, 0);
  uint64_t want = computed_here(s);
  CHECK(want == computed_here(plain), "keeping outputs apart changes no bit");
  for (int every = 1; every <= 3; every++)
    for (int how = 0; how < 3; how++) {
      work w;
      colibri_error err = {0, ""};
      int layers = 0, rc = 0;
      declare(s, every);
      for (rc = begin(s, work_make(&w), &err); rc == COLIBRI_NEEDS_REMOTE && layers < 9; rc = resume(s, &w, &err), layers++) do_layer(s, node, &w, how);
      CHECK(!rc && layers == shape.layers, "%d layers, then %d: %s", layers, rc, err.message);
      CHECK(logits_of(s) == want, "each %d. expert elsewhere, way %d: other bits", every, how);
      CHECK(!w.status[0] && !w.status[1] && w.results[0].status == COLIBRI_OK, "status");
    }
  CHECK(computed_here(s) == want, "and none again");
  colibri_session_close(plain), colibri_session_close(node), colibri_session_close(s);
}

/* A node says by NaN that a row was bad: that sequence ends, the other does not notice. */
static void test_bad_row(const colibri_model *model) {
  colibri_session *s = open_session(model, 1), *node = open_session(model, 1);
  static float nan[PAIRS * 72];
  static char rows[ROWS * 4096];
  int32_t row_of_pair[PAIRS], n_rows;
  colibri_remote state;
  colibri_error err;
  work w;
  for (int i = 0; i < PAIRS * 72; i++) nan[i] = NAN;
  declare(s, 1);
  int rc = begin(s, work_make(&w), &err);
  CHECK(rc == COLIBRI_NEEDS_REMOTE && !colibri_remote_state(s, &state), "%s", err.message);
  int at = -1, row = -1; /* an expert with rows of the first sequence only */
  for (int i = 0; i < state.n_experts; i++) {
    CHECK(!colibri_remote_pack(s, &state.experts[i], 1, rows, row_of_pair, NULL, &n_rows, &err), "%s", err.message);
    if (at < 0) at = i, row = n_rows;
  }
  CHECK(row > 0 && !colibri_remote_put(s, &state.experts[at], 1, nan, (uint64_t)state.rows[at] * 72 * sizeof(float), &err), "%s", err.message);
  for (int i = 0; i < state.n_experts; i++)
    if (i != at) CHECK(!colibri_remote_compute(s, &state.experts[i], 1, &err), "%s", err.message);
  while ((rc = resume(s, &w, &err)) == COLIBRI_NEEDS_REMOTE) {
    colibri_remote_state(s, &state);
    CHECK(!colibri_remote_compute(s, state.experts, state.n_experts, &err), "%s", err.message);
  }
  CHECK(!rc, "%s", err.message);
  CHECK(w.status[0] != COLIBRI_OK || w.status[1] != COLIBRI_OK, "a row was bad, and nobody heard of it");
  colibri_session_close(node), colibri_session_close(s);
}

static void test_refusals(const colibri_model *model) {
  colibri_session *s = open_session(model, 1), *plain = open_session(model, 0);
  colibri_error err;
  colibri_remote state;
  work w;
  float out[72];
  uint8_t all[3 * 6];
  int32_t unknown = 5, n_rows, row_of_pair[PAIRS];
  memset(all, 1, sizeof all);
  CHECK(colibri_session_remote(plain, all, &err) == COLIBRI_ESTATE, "needs split_down");
  CHECK(colibri_remote_state(s, &state) == COLIBRI_ESTATE, "no step waits");
  CHECK(colibri_remote_put(s, &unknown, 1, out, sizeof out, &err) == COLIBRI_ESTATE, "no step waits");
  CHECK(colibri_remote_compute(s, &unknown, 1, &err) == COLIBRI_ESTATE, "no step waits");
  CHECK(colibri_step_local(s, &err) == COLIBRI_ESTATE, "no step waits");
  CHECK(resume(s, work_make(&w), &err) == COLIBRI_ESTATE, "no step waits");
  colibri_step_abandon(s);
  memset(all, 0, sizeof all);
  all[0] = all[1] = all[2] = 1; /* of layer 0; experts 3 to 5 are here */
  CHECK(!colibri_session_remote(s, all, &err), "%s", err.message);
  CHECK(begin(s, &w, &err) == COLIBRI_NEEDS_REMOTE && !colibri_remote_state(s, &state), "%s", err.message);
  CHECK(colibri_session_remote(s, NULL, &err) == COLIBRI_ESTATE, "a step is under way");
  CHECK(colibri_session_remote_layers(s, NULL, 0, &err) == COLIBRI_ESTATE, "a step is under way");
  CHECK(begin(s, &w, &err) == COLIBRI_ESTATE, "a step is under way");
  CHECK(colibri_remote_put(s, &unknown, 1, out, sizeof out, &err) == COLIBRI_EINVAL && strstr(err.message, "expert 5"), "%s", err.message);
  int32_t twice[2] = {state.experts[0], state.experts[0]};
  CHECK(colibri_remote_pack(s, twice, 2, out, row_of_pair, NULL, &n_rows, &err) == COLIBRI_EINVAL && strstr(err.message, "twice"), "%s", err.message);
  CHECK(colibri_remote_compute(s, twice, 2, &err) == COLIBRI_EINVAL, "%s", err.message);
  colibri_step_abandon(s);
  CHECK(colibri_remote_state(s, &state) == COLIBRI_ESTATE, "abandoned");
  CHECK(computed_here(s) == computed_here(plain), "an abandoned step leaves nothing behind");
  colibri_session_close(plain), colibri_session_close(s);
}

/* ---------------------------------------------------------------- a node's side */

static int ask(colibri_session *s, colibri_expert_work asked, float *out, colibri_error *err) { return colibri_experts_run(s, &asked, out, err); }

static void test_experts_run(colibri_model *model) {
  colibri_session *s = open_session(model, 1), *plain = open_session(model, 0);
  static float rows[2 * 72], out[4 * 72], again[4 * 72];
  static char odd[sizeof rows + 1];
  int32_t experts[2] = {1, 4}, counts[2] = {2, 1}, row_of_pair[3] = {0, 1, 1}, beyond[3] = {0, 1, 2}, down[2] = {4, 1}, none[2] = {0, 3};
  colibri_error err;
  for (int i = 0; i < 2 * 72; i++) rows[i] = check_normal();
  memcpy(odd + 1, rows, sizeof rows);
  colibri_expert_work good = {.layer = 1, .kind = COLIBRI_ROWS_F32, .n_experts = 2, .n_rows = 2, .experts = experts, .counts = counts, .rows = rows,
                              .rows_bytes = sizeof rows, .row_of_pair = row_of_pair}, bad;
  CHECK(!ask(s, good, out, &err), "%s", err.message);
  bad = good, bad.rows = odd + 1;
  CHECK(!ask(s, bad, again, &err) && !memcmp(out, again, 3 * 72 * sizeof *out), "rows at an odd address: %s", err.message);
  bad.kind = COLIBRI_ROWS_BF16, bad.rows_bytes /= 2;
  CHECK(!ask(s, bad, again, &err), "bf16 at an odd address: %s", err.message);
  CHECK(ask(plain, good, again, &err) == COLIBRI_ESTATE, "needs split_down");
#define REFUSED(word, change) \
  do { \
    bad = good, change; \
    CHECK(ask(s, bad, again, &err) == COLIBRI_EINVAL && strstr(err.message, word), "%s", err.message); \
  } while (0)
  REFUSED("layer 3", bad.layer = 3);
  REFUSED("layer -1", bad.layer = -1);
  REFUSED("kind 3", bad.kind = 3);
  REFUSED("0 rows", bad.n_rows = 0);
  REFUSED("7 experts", bad.n_experts = 7);
  REFUSED("expert 1: they must ascend", bad.experts = down);
  REFUSED("0 of 2 rows", bad.counts = none);
  REFUSED("not 4", bad.rows_bytes = 4);
  REFUSED("pair 2 is of row 2", bad.row_of_pair = beyond);
  const float *router = model->layers[1].router;
  ((colibri_layer *)model->layers)[1].router = NULL; /* a dense layer has one expert */
  REFUSED("2 experts: layer 1 has 1", bad.n_experts = 2);
  REFUSED("expert 1: they must ascend and be below 1", bad.n_experts = 1);
  experts[0] = 0, bad.n_experts = 1;
  CHECK(!ask(s, bad, again, &err), "%s", err.message);
  ((colibri_layer *)model->layers)[1].router = router, experts[0] = 1;
  rows[72] = INFINITY;
  CHECK(!ask(s, good, again, &err) && !memcmp(out, again, 72 * sizeof *out) && isnan(again[72]) && isnan(again[3 * 72 - 1]), "a bad row spoils itself alone");
  colibri_session_close(plain), colibri_session_close(s);
}

/* ---------------------------------------------------------------- layers */

static void test_layers(const colibri_model *model) {
  colibri_session *s = open_session(model, 1), *node = open_session(model, 1);
  uint64_t want = computed_here(s);
  colibri_error err = {0, ""};
  colibri_remote state;
  work w;
  int64_t stride;
  static const int32_t ranges[][2] = {{0, 1}, {1, 3}, {0, 3}}, wrong[][2] = {{2, 4}, {2, 2}, {-1, 1}};
  for (int i = 0; i < 3; i++) CHECK(colibri_session_remote_layers(s, &wrong[i], 1, &err) == COLIBRI_EINVAL, "range %d", i);
  CHECK(colibri_session_remote_layers(s, ranges, 4, &err) == COLIBRI_EINVAL, "more than layers");
  CHECK(!colibri_remote_x(s, &stride), "no step stands before layers");
  for (int i = 0; i < 3; i++) {
    int handed = 0, rc;
    CHECK(!colibri_session_remote_layers(s, &ranges[i], 1, &err), "%s", err.message);
    declare(s, 1 + (i == 1)); /* and experts too, where layers are left */
    for (rc = begin(s, work_make(&w), &err); rc == COLIBRI_NEEDS_REMOTE; rc = resume(s, &w, &err)) {
      colibri_remote_state(s, &state);
      if (state.kind == COLIBRI_REMOTE_EXPERTS) {
        CHECK(!colibri_remote_compute(s, state.experts, state.n_experts, &err), "%s", err.message);
        continue;
      }
      static float x[ROWS * 72];
      int32_t status[2];
      float *theirs = colibri_remote_x(s, &stride);
      CHECK(theirs && state.layer == ranges[i][0] && state.end == ranges[i][1] && state.n_rows == ROWS, "layers %d to %d", state.layer, state.end);
      for (int r = 0; r < ROWS; r++) memcpy(x + r * 72, theirs + r * stride, sizeof(float) * 72);
      CHECK(!colibri_layers_run(node, &w.batch, state.layer, state.end, x, status, &err), "%s", err.message);
      for (int r = 0; r < ROWS; r++) memcpy(theirs + r * stride, x + r * 72, sizeof(float) * 72);
      handed++;
    }
    CHECK(!rc && handed == 1 && logits_of(s) == want, "layers %d to %d elsewhere, handed out %d times: %s", ranges[i][0], ranges[i][1], handed, err.message);
  }
  colibri_session_close(node), colibri_session_close(s);
}

static void test_all(const char *isa) {
  static const int formats[] = {COLIBRI_F32, COLIBRI_BF16, COLIBRI_INT8, COLIBRI_INT4};
  for (int i = 0; i < 4; i++) {
    shape.format = formats[i];
    colibri_model *model = run_model(&shape, 5);
    int before = check_failures;
    test_bits(model);
    test_bad_row(model);
    test_refusals(model);
    test_experts_run(model);
    test_layers(model);
    CHECK(before == check_failures, "%s, format %d", isa, formats[i]);
    colibri_model_close(model);
  }
}

int main(void) {
  check_each_isa(test_all);
  return check_result("test_remote");
}
