/* test_team.c - a step's bits are the same for every number of lanes, for lanes that join, leave, die or hang, and for every chunking.
 *
 * Lanes are threads of this process (which ThreadSanitizer follows) and forked processes (which can be killed). */
#include "team_run.h"

static const random_shape shape = {.layers = 3, .hidden = 96, .heads = 6, .kv_heads = 2, .head_dim = 24, .ffn = 112, .experts = 5, .top_k = 2,
                                   .vocab = 259, .context = 256, .window = 19, .format = COLIBRI_INT8};

static void test_threads(const colibri_model *model, const run *want) {
  for (int n = 1; n <= LANES; n++)
    for (int front = 0; front <= 1; front++) {
      colibri_session *s = run_open(model, run_options(front));
      colibri_worker *w = attach_threads(s);
      lane_thread lanes[LANES];
      threads_start(s, w, lanes, n);
      run got = run_all(s, 3 + 11 * n);
      run_compare(want, &got, "threads");
      CHECK(got.lanes == (uint32_t)(n + front), "%u lanes took part, not %d", got.lanes, n + front);
      threads_stop(s, lanes, n);
      colibri_worker_detach(w);
      colibri_session_close(s);
    }
}

/* One lane joins and leaves over and over while steps run. */
typedef struct churn { colibri_session *s; colibri_worker *w; atomic_int stop; int rounds; } churn;

static void *churn_main(void *p) {
  churn *c = p;
  while (!atomic_load(&c->stop)) {
    lane_thread t[1];
    threads_start(c->s, c->w, t, 1);
    for (int i = 0; i < 200; i++) sched_yield();
    threads_stop(c->s, t, 1);
    c->rounds++;
  }
  return NULL;
}

static void test_churn(const colibri_model *model, const run *want) {
  colibri_session *s = run_open(model, run_options(1));
  colibri_worker *w = attach_threads(s);
  churn c = {.s = s, .w = w};
  pthread_t thread;
  pthread_create(&thread, NULL, churn_main, &c);
  for (int round = 0; round < 4; round++) {
    run got = run_all(s, 5 + 9 * round);
    run_compare(want, &got, "lanes that join and leave");
  }
  atomic_store(&c.stop, 1);
  pthread_join(thread, NULL);
  CHECK(c.rounds > 0, "no lane ever joined");
  colibri_worker_detach(w);
  colibri_session_close(s);
}

#ifndef __SANITIZE_THREAD__ /* which does not follow a fork of a threaded process */

static void test_deaths(const colibri_model *model, const run *want, int signal, int rounds) {
  colibri_session_options options = run_options(1);
  options.hang_ms = signal == SIGSTOP ? 60 : 0;
  colibri_session *s = run_open(model, options);
  run_deaths(model, s, want, signal, rounds);
  colibri_session_close(s);
}

/* The front end has no lane and its only worker dies while computing: the step is finished all the same, the next one is refused. */
static void test_last_lane_dies(const colibri_model *model, const run *want) {
  colibri_session *s = run_open(model, run_options(0));
  colibri_error err;
  pid_t pid = process_start(model, s, 0);
  run got = run_all(s, 16);
  run_compare(want, &got, "one process");
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  colibri_lane_dead(s, 0);
  colibri_seq seq = {.n_rows = 1, .n_logits = 1, .n_blocks = 1, .slot = -1, .damping = -1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
  int32_t token = 1, block = 0;
  colibri_row_result result;
  colibri_batch batch = {.n_seqs = 1, .seqs = &seq, .tokens = &token, .blocks = &block};
  CHECK(colibri_step(s, &batch, &result, NULL, NULL, &err) == COLIBRI_ENOLANES, "a step without lanes was not refused");
  colibri_session_close(s);
}

#endif

int main(void) {
  colibri_model *model = run_model(&shape, 5);
  colibri_session *s = run_open(model, run_options(1));
  run want = run_all(s, 80);
  for (int chunk = 1; chunk < 40; chunk += 6) {
    run got = run_all(s, chunk);
    run_compare(&want, &got, "chunks");
  }
  colibri_session_close(s);
  test_threads(model, &want);
  test_churn(model, &want);
#ifdef __SANITIZE_THREAD__
  printf("team: lanes as processes left out: ThreadSanitizer does not follow them\n");
#else
  test_deaths(model, &want, SIGKILL, 12);
  test_deaths(model, &want, SIGSTOP, 3);
  test_last_lane_dies(model, &want);
#endif
  colibri_model_close(model);
  return check_result("team");
}
