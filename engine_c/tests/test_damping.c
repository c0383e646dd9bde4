/* test_damping.c - damping within steps: what it must leave alone, what it must not depend on, and its counts, read meanwhile by another thread. */
#include "team_run.h"

#include <math.h>

#define BASE {.growth = 1.3f, .decay = 0.9f, .capacity_factor = 1.25f, .margin = 100, .max_rerouted = 1, .threshold = 1
static const colibri_damping heat_sequence = BASE, .kind = COLIBRI_DAMPING_HEAT, .scope = COLIBRI_SCOPE_SEQUENCE};
static const colibri_damping capacity_sequence = BASE, .kind = COLIBRI_DAMPING_CAPACITY, .scope = COLIBRI_SCOPE_SEQUENCE};
static const colibri_damping heat_batch = BASE, .kind = COLIBRI_DAMPING_HEAT, .scope = COLIBRI_SCOPE_BATCH};
static const colibri_damping capacity_batch = BASE, .kind = COLIBRI_DAMPING_CAPACITY, .scope = COLIBRI_SCOPE_BATCH};
static const colibri_damping reuse_batch = BASE, .kind = COLIBRI_DAMPING_REUSE, .scope = COLIBRI_SCOPE_BATCH};

static const random_shape shape = {.layers = 3, .hidden = 96, .heads = 4, .kv_heads = 2, .head_dim = 24, .ffn = 64, .experts = 8, .top_k = 2, .vocab = 259,
                                   .context = 256, .format = COLIBRI_INT8};

/* ---------------------------------------------------------------- reading while steps run */

typedef struct reader { const colibri_session *s; _Atomic int stop; uint64_t reads; } reader;

static uint64_t sum(const uint64_t *counts, int n) {
  uint64_t total = 0;
  for (int i = 0; i < n; i++) total += counts[i];
  return total;
}

/* Counts only grow. */
static void *read_on(void *p) {
  reader *r = p;
  uint64_t tokens[3 * 8], steps[3], before = 0;
  colibri_telemetry into = {.layers = 3, .experts = 8, .tokens = tokens, .steps = steps};
  while (!atomic_load(&r->stop)) {
    CHECK(!colibri_session_telemetry(r->s, &into, NULL), "telemetry is refused");
    uint64_t now = sum(tokens, 3 * 8);
    CHECK(now >= before, "counts went from %llu to %llu", (unsigned long long)before, (unsigned long long)now);
    before = now;
    r->reads++;
  }
  return NULL;
}

/* ---------------------------------------------------------------- what steps give */

/* All sequences by the same damping, or but for those that have none. */
static run_damping with(const colibri_damping *damping, int undamped) {
  run_damping how = {.dampings = damping, .n = 1};
  for (int i = 0; i < SEQS; i++) how.of[i] = undamped >> i & 1 ? -1 : 0;
  return how;
}

static void some_were_rerouted(const run *r, int i, const char *what) { CHECK(r->rerouted[i] > 0, "%s: sequence %d: nothing was changed, the test shows nothing", what, i); }

/* Scope sequence: the same with every cut of the prompts, in other company, again with the same slots. */
static void scope_sequence(colibri_session *s, const colibri_damping *damping, const run *plain, const char *what) {
  run_damping all = with(damping, 0), some = with(damping, 10);
  run want = run_damped(s, 80, &all);
  for (int i = 0; i < SEQS; i++) {
    if (run_prompts[i] > 10) some_were_rerouted(&want, i, what);
    CHECK(!want.rerouted[i] || want.hash[i] != plain->hash[i], "%s: sequence %d was changed but its logits were not", what, i);
  }
  for (int chunk = 1; chunk < 80; chunk += 11) {
    run got = run_damped(s, chunk, &all);
    run_compare(&want, &got, what);
    for (int i = 0; i < SEQS; i++) CHECK(got.rerouted[i] == want.rerouted[i], "%s: sequence %d: other counts", what, i);
    got = run_damped(s, chunk, &some);
    for (int i = 0; i < SEQS; i++) {
      const run *as = 10 >> i & 1 ? plain : &want;
      CHECK(got.hash[i] == as->hash[i], "%s, chunks of %d: sequence %d differs beside others", what, chunk, i);
    }
  }
}

/* Scope batch: undamped sequences beside damped ones are as ever. */
static void scope_batch(colibri_session *s, const colibri_damping *damping, const run *plain, const char *what) {
  run_damping some = with(damping, 10);
  for (int chunk = 2; chunk < 80; chunk += 25) {
    run got = run_damped(s, chunk, &some);
    some_were_rerouted(&got, 2, what);
    CHECK(got.hash[1] == plain->hash[1] && got.hash[3] == plain->hash[3], "%s: a sequence without damping is not as ever", what);
    CHECK(got.rerouted[1] == 0 && got.rerouted[3] == 0, "%s: a sequence without damping was changed", what);
  }
}

/* Damping that may change nothing: the bits of an engine without it. */
static void off(colibri_session *s, const run *plain) {
  colibri_damping kinds[] = {heat_batch, heat_batch, heat_sequence, capacity_batch, reuse_batch};
  kinds[0].kind = COLIBRI_DAMPING_OFF;
  kinds[1].margin = 0, kinds[2].max_rerouted = 0, kinds[3].max_rerouted = 0, kinds[4].margin = 0;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    run_damping all = with(&kinds[i], 0);
    run got = run_damped(s, 30, &all);
    run_compare(plain, &got, "damping that may change nothing");
  }
}

/* Several dampings in one batch. */
static void together(colibri_session *s, const run *plain) {
  const colibri_damping three[] = {heat_sequence, capacity_batch, reuse_batch};
  run_damping how = {three, 3, {0, -1, 1, 2, 0}};
  run_damping alone = with(&heat_sequence, 0);
  run want = run_damped(s, 80, &alone), got = run_damped(s, 13, &how);
  CHECK(got.hash[0] == want.hash[0] && got.hash[4] == want.hash[4] && got.hash[1] == plain->hash[1], "dampings disturb each other");
}

/* What was counted fits together. */
static void counts(const colibri_session *s) {
  uint64_t tokens[24], active[24], steps[3], rows[3], squares[3], longest[3], most[3], in_use[3], rerouted[3], repeats[3], runs[3 * COLIBRI_RUN_BUCKETS];
  colibri_telemetry into = {.layers = 3, .experts = 8, .tokens = tokens, .active = active, .steps = steps, .rows = rows, .queue_squares = squares,
                            .queue_longest = longest, .queue_max = most, .active_experts = in_use, .rerouted = rerouted, .repeats = repeats, .runs = runs};
  colibri_error err;
  CHECK(!colibri_session_telemetry(s, &into, &err), "%s", err.message);
  for (int l = 0; l < 3; l++) {
    CHECK(sum(tokens + 8 * l, 8) == 2 * rows[l], "layer %d: tokens of all experts are not top_k times the rows", l);
    CHECK(sum(active + 8 * l, 8) == in_use[l], "layer %d: active experts", l);
    CHECK(squares[l] * 8 * steps[l] >= sum(tokens + 8 * l, 8) * sum(tokens + 8 * l, 8), "layer %d: squares are less than their mean allows", l);
    CHECK(longest[l] <= most[l] * steps[l] && steps[l] == steps[0] && rerouted[l] > 0 && repeats[l] > 0, "layer %d: queues", l);
    CHECK(sum(runs + COLIBRI_RUN_BUCKETS * l, COLIBRI_RUN_BUCKETS) > 0, "layer %d: no run ended", l);
  }
  into.experts = 9;
  CHECK(colibri_session_telemetry(s, &into, &err) == COLIBRI_EINVAL && strstr(err.message, "8 experts"), "%s", err.message);
}

/* ---------------------------------------------------------------- refusals */

static void refuse(colibri_session *s, colibri_seq seq, const colibri_damping *damping, int n, const char *says) {
  int32_t token = 1, block = 0;
  colibri_seq seqs[2] = {seq, seq};
  int32_t tokens[2] = {token, token}, blocks[2] = {block, block};
  colibri_batch batch = {.n_seqs = n, .n_dampings = damping ? 1 : 0, .seqs = seqs, .tokens = tokens, .blocks = blocks, .dampings = damping};
  colibri_row_result results[2];
  colibri_error err = {0, ""};
  int rc = colibri_step(s, &batch, results, NULL, NULL, &err);
  CHECK(rc == COLIBRI_EINVAL && strstr(err.message, says), "want a refusal that names %s, got %d: %s", says, rc, err.message);
}

static void refusals(colibri_session *s) {
  const colibri_seq good = {.n_rows = 1, .n_blocks = 1, .slot = -1, .damping = -1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
  colibri_seq q = good;
  q.slot = SEQS, refuse(s, q, NULL, 1, "slot 5");
  q.slot = -2, refuse(s, q, NULL, 1, "slot -2");
  q.slot = 1, refuse(s, q, NULL, 2, "slot 1 is another");
  q = good, q.damping = 0, refuse(s, q, NULL, 1, "damping 0");
  q.damping = 1, refuse(s, q, &heat_batch, 1, "damping 1");
  q.damping = 0, refuse(s, q, &heat_sequence, 1, "needs a slot");
  q.slot = 0, q.start = 3, refuse(s, q, &heat_sequence, 1, "begin at 0");
  q = good, q.margins = 1, refuse(s, q, NULL, 1, "margins");
  struct { const char *name; size_t at; float value; } fields[] = {
      {"growth", offsetof(colibri_damping, growth), 0.9f},           {"growth", offsetof(colibri_damping, growth), NAN},
      {"decay", offsetof(colibri_damping, decay), 1.1f},             {"capacity_factor", offsetof(colibri_damping, capacity_factor), 0.5f},
      {"margin", offsetof(colibri_damping, margin), -1},             {"margin", offsetof(colibri_damping, margin), INFINITY},
      {"max_rerouted", offsetof(colibri_damping, max_rerouted), 2},
  };
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    colibri_damping bad = heat_batch;
    memcpy((char *)&bad + fields[i].at, &fields[i].value, sizeof(float));
    refuse(s, good, &bad, 1, fields[i].name);
  }
  colibri_damping bad = heat_batch;
  bad.kind = 4, refuse(s, good, &bad, 1, "kind");
  bad = heat_batch, bad.scope = 2, refuse(s, good, &bad, 1, "scope");
  bad = reuse_batch, bad.scope = COLIBRI_SCOPE_SEQUENCE, refuse(s, good, &bad, 1, "scope");
  bad = heat_batch, bad.threshold = -1, refuse(s, good, &bad, 1, "threshold");
}

/* ---------------------------------------------------------------- runs */

static void run_everything(const colibri_model *m, int lanes, int split) {
  colibri_session_options options = run_options(1);
  options.max_slots = SEQS, options.split_down = split;
  colibri_session *s = run_open(m, options);
  colibri_worker *w = attach_threads(s);
  lane_thread threads[LANES];
  reader r = {.s = s};
  pthread_t reading;
  threads_start(s, w, threads, lanes);
  pthread_create(&reading, NULL, read_on, &r);
  run plain = run_all(s, 80);
  scope_sequence(s, &heat_sequence, &plain, "heat along a sequence");
  scope_sequence(s, &capacity_sequence, &plain, "capacity along a sequence");
  scope_batch(s, &heat_batch, &plain, "heat in a step");
  scope_batch(s, &capacity_batch, &plain, "capacity in a step");
  scope_batch(s, &reuse_batch, &plain, "reuse");
  off(s, &plain);
  together(s, &plain);
  refusals(s);
  atomic_store(&r.stop, 1);
  pthread_join(reading, NULL);
  CHECK(r.reads > 0, "nothing was read while steps ran");
  counts(s);
  threads_stop(s, threads, lanes);
  colibri_worker_detach(w);
  colibri_session_close(s);
}

/* Lanes and placement change no bit of a damped run either. */
static void lanes_make_no_difference(const colibri_model *m) {
  run_damping all = with(&heat_sequence, 0);
  run want = {0};
  for (int lanes = 0; lanes <= 2; lanes += 2)
    for (int split = 0; split <= 1; split++) {
      colibri_session_options options = run_options(1);
      options.max_slots = SEQS, options.split_down = split;
      colibri_session *s = run_open(m, options);
      colibri_worker *w = attach_threads(s);
      lane_thread threads[LANES];
      threads_start(s, w, threads, lanes);
      run got = run_damped(s, 20, &all);
      if (lanes || split) run_compare(&want, &got, "damped, with other lanes");
      else want = got;
      threads_stop(s, threads, lanes);
      colibri_worker_detach(w);
      colibri_session_close(s);
    }
}

int main(void) {
  colibri_model *m = run_model(&shape, 21);
  run_everything(m, 0, 0);
  run_everything(m, 2, 1);
  lanes_make_no_difference(m);
  colibri_model_close(m);
  return check_result("damping");
}
