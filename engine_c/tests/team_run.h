/* team_run.h - what the tests of a team share: a run of five sequences through every kind of batch, and lanes as threads and as processes.
 *
 * A run's hash covers every logit and every reported number of each sequence, so that two runs agree only if they agree bit by bit. */
#ifndef COLIBRI_TEST_TEAM_RUN_H
#define COLIBRI_TEST_TEAM_RUN_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"
#include "random_model.h"
#include "session.h"

#define SEQS 5
#define DECODES 12
#define LANES 4

static const int run_prompts[SEQS] = {37, 1, 70, 16, 5};

/* Options of a session as these tests want it; front_lane, hang_ms, split_down and trace_routes are what differs. */
static inline colibri_session_options run_options(int front_lane) {
  return (colibri_session_options){.max_rows = 160, .max_seqs = 8, .max_logit_rows = 8, .kv_blocks = 64, .kv_format = COLIBRI_KV_BF16,
                                   .max_lanes = LANES, .front_lane = front_lane, .spin_us = 200};
}

static inline colibri_session *run_open(const colibri_model *model, colibri_session_options options) {
  colibri_error err;
  colibri_session *s = NULL;
  if (!colibri_session_open(model, &options, &s, &err)) return s;
  fprintf(stderr, "session: %s\n", err.message);
  exit(2);
}

/* FNV-1a. */
static inline uint64_t run_mix(uint64_t hash, const void *data, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t word;
    memcpy(&word, (const char *)data + i, 4);
    hash = (hash ^ word) * UINT64_C(1099511628211);
  }
  return hash;
}

/* How a run's sequences are damped: sequence i has slot i and dampings[of[i]]; of[i] -1: none. */
typedef struct run_damping {
  const colibri_damping *dampings;
  int32_t n, of[SEQS];
} run_damping;

typedef struct run {
  const run_damping *how;           /* NULL: no slots, no damping */
  uint64_t rerouted[SEQS];
  int position[SEQS], token[SEQS];
  int32_t said[SEQS][DECODES + 1];  /* tokens sampled, for the repetition penalty */
  uint64_t hash[SEQS];
  uint32_t rerun, lost, lanes, homed, local; /* sums of the steps' statistics; lanes: most */
} run;

/* Every way to sample comes by. */
static const colibri_sampling run_sampling[SEQS] = {
    {.top_p = 1, .repetition_penalty = 1},
    {.temperature = 0.8f, .top_p = 0.9f, .repetition_penalty = 1, .seed = 1},
    {.temperature = 1.1f, .top_p = 1, .min_p = 0.02f, .top_k = 20, .repetition_penalty = 1, .top_logprobs = COLIBRI_MAX_TOP_LOGPROBS, .seed = 2},
    {.temperature = 0.7f, .top_p = 0.95f, .min_p = 0.01f, .top_k = 50, .repetition_penalty = 1.3f, .top_logprobs = 3, .seed = 3},
    {.top_p = 1, .repetition_penalty = 1, .top_logprobs = -1},
};

/* Takes a sequence's row of results and of logits into the run. */
static inline void run_note(run *r, int i, const colibri_row_result *row, const float *logits, int vocab) {
  CHECK(row->status == COLIBRI_OK, "sequence %d: row status %d", i, row->status);
  r->token[i] = row->token;
  if (r->position[i] - run_prompts[i] <= DECODES) r->said[i][r->position[i] - run_prompts[i]] = row->token;
  r->hash[i] = run_mix(r->hash[i], logits, sizeof(float) * (size_t)vocab);
  r->hash[i] = run_mix(r->hash[i], &row->token, offsetof(colibri_row_result, reserved) - offsetof(colibri_row_result, token));
  r->hash[i] = run_mix(r->hash[i], row->top_tokens, 4 * (size_t)row->n_top);
  r->hash[i] = run_mix(r->hash[i], row->top_logprobs, 4 * (size_t)row->n_top);
}

/* The batch's index of sequence i's damping, which is put into the batch's if it is not there yet. index [of the run's] + 1 of those that are. */
static inline int32_t run_damping_of(const run_damping *how, int i, int32_t *index, colibri_damping *dampings, int *n) {
  if (!*n) memset(index, 0, sizeof *index * SEQS);
  if (!how || how->of[i] < 0) return -1;
  if (!index[how->of[i]]) dampings[(*n)++] = how->dampings[how->of[i]], index[how->of[i]] = *n;
  return index[how->of[i]] - 1;
}

/* One step in which sequence i runs rows[i] tokens (0: not in it). */
static inline void run_step_of(colibri_session *s, run *r, const int *rows) {
  colibri_seq seqs[SEQS];
  colibri_row_result results[SEQS];
  colibri_step_stats stats;
  colibri_error err;
  int32_t tokens[SEQS * 80], blocks[SEQS * 8], history[SEQS * (DECODES + 1)], targets[SEQS], who[SEQS], all[SEQS];
  int32_t index[SEQS], rerouted[SEQS];
  colibri_damping dampings[SEQS];
  int n_dampings = 0;
  int n = 0, t = 0, b = 0, h = 0, l = 0, vocab = s->model->info.vocab;
  for (int i = 0; i < SEQS; i++) {
    if (!rows[i]) continue;
    int end = r->position[i] + rows[i], last = end >= run_prompts[i], said = r->position[i] - run_prompts[i] + 1;
    if (run_sampling[i].repetition_penalty == 1.0f || said < 0) said = 0;
    seqs[n] = (colibri_seq){.n_rows = rows[i], .start = r->position[i], .n_logits = last, .n_blocks = (end + 15) / 16, .n_history = said, .slot = r->how ? i : -1, .damping = run_damping_of(r->how, i, index, dampings, &n_dampings),
                            .sampling = run_sampling[i]};
    for (int k = r->position[i]; k < end; k++) tokens[t++] = k < run_prompts[i] ? (k * 31 + i * 7 + 3) % vocab : r->token[i];
    for (int k = 0; k < seqs[n].n_blocks; k++) blocks[b++] = (k * SEQS + i) * 7 % 61; /* scattered over the pool, no two alike */
    for (int k = 0; k < said; k++) history[h++] = r->said[i][k];
    if (last) targets[l++] = i % 2 ? end % vocab : -1;
    r->position[i] = end;
    all[n] = i;
    who[n++] = last ? i : -1;
  }
  colibri_batch batch = {.n_seqs = n, .seqs = seqs, .tokens = tokens, .blocks = blocks, .history = history, .targets = targets, .dampings = dampings,
                         .n_dampings = n_dampings, .rerouted = rerouted};
  if (colibri_step(s, &batch, results, NULL, &stats, &err)) {
    CHECK(0, "step: %s", err.message);
    return;
  }
  r->rerun += stats.tasks_rerun, r->lost += stats.lanes_lost, r->homed += stats.tasks_homed, r->local += stats.tasks_local;
  if (stats.lanes > r->lanes) r->lanes = stats.lanes;
  for (int k = 0; k < n; k++) r->rerouted[all[k]] += (uint64_t)rerouted[k];
  for (int k = 0, row = 0; k < n; k++)
    if (who[k] >= 0) run_note(r, who[k], &results[row], colibri_session_logits(s) + (int64_t)row * vocab, vocab), row++;
}

/* Prefills in chunks, each sequence decoding as soon as it can, then decodes on: every kind of mixed batch comes by. */
static inline run run_damped(colibri_session *s, int chunk, const run_damping *how) {
  run r = {.how = how};
  int left = 1;
  while (left) {
    int rows[SEQS];
    left = 0;
    for (int i = 0; i < SEQS; i++) {
      int to_do = run_prompts[i] - r.position[i];
      rows[i] = to_do > chunk ? chunk : to_do > 0 ? to_do : r.position[i] < run_prompts[i] + DECODES;
      left |= rows[i];
    }
    if (left) run_step_of(s, &r, rows);
  }
  return r;
}

static inline run run_all(colibri_session *s, int chunk) { return run_damped(s, chunk, NULL); }

static inline void run_compare(const run *want, const run *got, const char *what) {
  for (int i = 0; i < SEQS; i++) CHECK(want->hash[i] == got->hash[i] && want->token[i] == got->token[i], "%s: sequence %d differs", what, i);
}

/* ---------------------------------------------------------------- lanes as threads */

typedef struct lane_thread { pthread_t thread; colibri_worker *worker; int lane; } lane_thread;

static inline void *lane_main(void *p) {
  lane_thread *t = p;
  colibri_error err;
  int rc = colibri_worker_run(t->worker, t->lane, -1, &err);
  CHECK(!rc, "lane %d: %s", t->lane, err.message);
  return NULL;
}

static inline void wait_state(colibri_session *s, int lane, int low) {
  while (colibri_lane_get_state(s, lane) < low) sched_yield();
}

static inline void threads_start(colibri_session *s, colibri_worker *w, lane_thread *t, int n) {
  for (int i = 0; i < n; i++) {
    t[i] = (lane_thread){.worker = w, .lane = i};
    colibri_lane_bind(s, i, getpid(), -1, NULL);
    pthread_create(&t[i].thread, NULL, lane_main, &t[i]);
    wait_state(s, i, COLIBRI_LANE_READY);
  }
}

static inline void threads_stop(colibri_session *s, lane_thread *t, int n) {
  for (int i = 0; i < n; i++) colibri_lane_leave(s, t[i].lane);
  for (int i = 0; i < n; i++) pthread_join(t[i].thread, NULL);
}

static inline colibri_worker *attach_threads(colibri_session *s) {
  colibri_worker *w = NULL;
  if (colibri_worker_attach_session(s, &w, NULL)) exit(2);
  return w;
}

/* ---------------------------------------------------------------- lanes as processes */

/* A child that runs a lane. Its binding comes before it takes the lane, which binding resets. */
static inline pid_t process_start(const colibri_model *model, colibri_session *s, int lane) {
  colibri_error err = {0, ""};
  int gate[2];
  char byte = 0;
  if (pipe(gate)) exit(2);
  pid_t pid = fork();
  if (!pid) {
    colibri_worker *w = NULL;
    close(gate[1]);
    if (read(gate[0], &byte, 1) != 1) _exit(3);
    if (colibri_worker_attach(model, colibri_session_team_fd(s), colibri_session_arena_fd(s), &w, &err)) _exit(5);
    _exit(colibri_worker_run(w, lane, -1, &err) ? 4 : 0);
  }
  int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
  CHECK(!colibri_lane_bind(s, lane, pid, pidfd, &err), "bind: %s", err.message);
  close(pidfd);
  if (write(gate[1], &byte, 1) != 1) exit(2);
  close(gate[0]), close(gate[1]);
  wait_state(s, lane, COLIBRI_LANE_READY);
  return pid;
}

/* 1 if the child has ended; it is not reaped. */
static inline int process_ended(pid_t pid) {
  siginfo_t info = {0};
  return !waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) && info.si_pid == pid;
}

/* Kills lane after lane and starts it again, at no particular moment. */
typedef struct killer { const colibri_model *model; colibri_session *s; pid_t *pids; int signal; atomic_int stop; _Atomic int kills; } killer;

static inline void *killer_main(void *p) {
  killer *k = p;
  int status;
  for (int lane = 0; !atomic_load(&k->stop); lane = (lane + 1) % 2, atomic_fetch_add(&k->kills, 1)) {
    for (int i = 0; i < 300 + 37 * (k->kills % 11); i++) sched_yield();
    kill(k->pids[lane], k->signal);
    for (int i = 0; k->signal == SIGSTOP && i < 200; i++) { /* held a task: the front end kills it; else nobody misses it and we do */
      if (process_ended(k->pids[lane])) break;
      usleep(1000);
    }
    kill(k->pids[lane], SIGKILL);
    if (waitpid(k->pids[lane], &status, 0) < 0) return NULL;
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "lane %d ended by itself (status %d)", lane, status);
    colibri_lane_dead(k->s, lane);
    k->pids[lane] = process_start(k->model, k->s, lane);
  }
  return NULL;
}

/* Runs while two lanes die over and over, until a death has met a lane with a task. */
static inline void run_deaths(const colibri_model *model, colibri_session *s, const run *want, int signal, int rounds) {
  pid_t pids[2] = {process_start(model, s, 0), process_start(model, s, 1)};
  killer k = {.model = model, .s = s, .pids = pids, .signal = signal};
  pthread_t thread;
  pthread_create(&thread, NULL, killer_main, &k);
  time_t deadline = time(NULL) + 60;
  uint32_t rerun = 0;
  for (int round = 0; (round < rounds || k.kills < 2 || !rerun) && time(NULL) < deadline; round++) {
    run got = run_all(s, 7 + 5 * (round % 9));
    rerun += got.rerun;
    run_compare(want, &got, signal == SIGSTOP ? "stopped lanes" : "killed lanes");
    if (check_failures) break;
  }
  CHECK(rerun > 0, "no death ever met a lane with a task: the test has shown nothing");
  atomic_store(&k.stop, 1);
  pthread_join(thread, NULL);
  for (int i = 0; i < 2; i++) {
    kill(pids[i], SIGKILL);
    waitpid(pids[i], NULL, 0);
  }
}

/* ---------------------------------------------------------------- models */

static inline colibri_model *run_model(const random_shape *shape, uint32_t seed) {
  colibri_error err;
  colibri_model *model = NULL;
  int fd = random_model_fd(shape, seed);
  if (colibri_model_open_fd(fd, &model, &err)) {
    fprintf(stderr, "model: %s\n", err.message);
    exit(2);
  }
  close(fd);
  return model;
}

#endif
