/* test_team.c - a step's bits are the same for every number of lanes, for lanes that join, leave, die or hang, and for every chunking.
 *
 * Lanes are threads of this process (which ThreadSanitizer follows) and forked processes (which can be killed). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "random_model.h"
#include "session.h"

#define SEQS 5
#define DECODES 12
#define LANES 4

static int failures;
#define CHECK(ok, ...) do { if (!(ok)) { failures++; fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); fprintf(stderr, __VA_ARGS__); fputc('\n', stderr); } } while (0)

static const random_shape shape = {.layers = 3, .hidden = 96, .heads = 6, .kv_heads = 2, .head_dim = 24, .ffn = 112, .experts = 5, .top_k = 2,
                                   .vocab = 259, .context = 256, .window = 19, .format = COLIBRI_INT8};
static const int prompts[SEQS] = {37, 1, 70, 16, 5};

static colibri_session *open_session(const colibri_model *model, int front_lane, int hang_ms) {
  colibri_error err;
  colibri_session *s = NULL;
  colibri_session_options o = {.max_rows = 160, .max_seqs = 8, .max_logit_rows = 8, .kv_blocks = 64, .kv_format = COLIBRI_KV_BF16, .max_lanes = LANES,
                               .front_lane = front_lane, .spin_us = 200, .hang_ms = hang_ms, .trace_routes = 0};
  if (colibri_session_open(model, &o, &s, &err)) {
    fprintf(stderr, "session: %s\n", err.message);
    exit(2);
  }
  return s;
}

/* FNV-1a over the logits' bits. */
static uint64_t mix(uint64_t hash, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &x[i], 4);
    hash = (hash ^ bits) * UINT64_C(1099511628211);
  }
  return hash;
}

typedef struct run { int position[SEQS], token[SEQS]; uint64_t hash[SEQS]; uint32_t rerun, lost, lanes; } run;

/* One step in which sequence i runs rows[i] tokens (0: not in it). */
static void step(colibri_session *s, run *r, const int *rows) {
  colibri_seq seqs[SEQS];
  colibri_row_result results[SEQS];
  colibri_step_stats stats;
  colibri_error err;
  int32_t tokens[SEQS * 80], blocks[SEQS * 8], who[SEQS];
  int n = 0, t = 0, b = 0;
  for (int i = 0; i < SEQS; i++) {
    if (!rows[i]) continue;
    int end = r->position[i] + rows[i], last = end >= prompts[i];
    seqs[n] = (colibri_seq){.n_rows = rows[i], .start = r->position[i], .n_logits = last, .n_blocks = (end + 15) / 16,
                            .sampling = {.temperature = i % 2 ? 0.8f : 0, .top_p = 0.9f, .repetition_penalty = 1, .seed = (uint64_t)i}};
    for (int k = r->position[i]; k < end; k++) tokens[t++] = k < prompts[i] ? (k * 31 + i * 7 + 3) % shape.vocab : r->token[i];
    for (int k = 0; k < seqs[n].n_blocks; k++) blocks[b++] = (k * SEQS + i) * 7 % 61; /* scattered over the pool, no two alike */
    r->position[i] = end;
    who[n++] = last ? i : -1;
  }
  colibri_batch batch = {.n_seqs = n, .seqs = seqs, .tokens = tokens, .blocks = blocks};
  if (colibri_step(s, &batch, results, NULL, &stats, &err)) {
    CHECK(0, "step: %s", err.message);
    return;
  }
  r->rerun += stats.tasks_rerun, r->lost += stats.lanes_lost;
  if (stats.lanes > r->lanes) r->lanes = stats.lanes;
  for (int k = 0, l = 0; k < n; k++) {
    if (who[k] < 0) continue;
    CHECK(results[l].status == COLIBRI_OK, "row status %d", results[l].status);
    r->token[who[k]] = results[l].token;
    r->hash[who[k]] = mix(r->hash[who[k]], colibri_session_logits(s) + (int64_t)l * shape.vocab, shape.vocab);
    l++;
  }
}

/* Prefills in chunks, each sequence decoding as soon as it can, then decodes on: every kind of mixed batch comes by. */
static run run_all(colibri_session *s, int chunk) {
  run r = {0};
  int left = 1;
  while (left) {
    int rows[SEQS];
    left = 0;
    for (int i = 0; i < SEQS; i++) {
      int to_do = prompts[i] - r.position[i];
      rows[i] = to_do > chunk ? chunk : to_do > 0 ? to_do : r.position[i] < prompts[i] + DECODES;
      left |= rows[i];
    }
    if (left) step(s, &r, rows);
  }
  return r;
}

static void compare(const run *want, const run *got, const char *what) {
  for (int i = 0; i < SEQS; i++) CHECK(want->hash[i] == got->hash[i] && want->token[i] == got->token[i], "%s: sequence %d differs", what, i);
}

/* ---------------------------------------------------------------- lanes as threads */

typedef struct lane_thread { pthread_t thread; colibri_worker *worker; int lane; } lane_thread;

static void *lane_main(void *p) {
  lane_thread *t = p;
  colibri_error err;
  int rc = colibri_worker_run(t->worker, t->lane, -1, &err);
  CHECK(!rc, "lane %d: %s", t->lane, err.message);
  return NULL;
}

static void wait_state(colibri_session *s, int lane, int low) {
  while (colibri_lane_get_state(s, lane) < low) sched_yield();
}

static void threads_start(colibri_session *s, colibri_worker *w, lane_thread *t, int n) {
  for (int i = 0; i < n; i++) {
    t[i] = (lane_thread){.worker = w, .lane = i};
    colibri_lane_bind(s, i, getpid(), -1, NULL);
    pthread_create(&t[i].thread, NULL, lane_main, &t[i]);
    wait_state(s, i, COLIBRI_LANE_READY);
  }
}

static void threads_stop(colibri_session *s, lane_thread *t, int n) {
  for (int i = 0; i < n; i++) colibri_lane_leave(s, t[i].lane);
  for (int i = 0; i < n; i++) pthread_join(t[i].thread, NULL);
}

static colibri_worker *attach_threads(colibri_session *s) {
  colibri_worker *w = NULL;
  if (colibri_worker_attach_session(s, &w, NULL)) exit(2);
  return w;
}

static void test_threads(const colibri_model *model, const run *want) {
  for (int n = 1; n <= LANES; n++)
    for (int front = 0; front <= 1; front++) {
      colibri_session *s = open_session(model, front, 0);
      colibri_worker *w = attach_threads(s);
      lane_thread lanes[LANES];
      threads_start(s, w, lanes, n);
      run got = run_all(s, 3 + 11 * n);
      compare(want, &got, "threads");
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
  colibri_session *s = open_session(model, 1, 0);
  colibri_worker *w = attach_threads(s);
  churn c = {.s = s, .w = w};
  pthread_t thread;
  pthread_create(&thread, NULL, churn_main, &c);
  for (int round = 0; round < 4; round++) {
    run got = run_all(s, 5 + 9 * round);
    compare(want, &got, "lanes that join and leave");
  }
  atomic_store(&c.stop, 1);
  pthread_join(thread, NULL);
  CHECK(c.rounds > 0, "no lane ever joined");
  colibri_worker_detach(w);
  colibri_session_close(s);
}

/* ---------------------------------------------------------------- lanes as processes */

#ifndef __SANITIZE_THREAD__ /* which does not follow a fork of a threaded process */

static colibri_worker *attach(const colibri_model *model, colibri_session *s) {
  colibri_worker *w = NULL;
  colibri_error err;
  if (colibri_worker_attach(model, colibri_session_team_fd(s), colibri_session_arena_fd(s), &w, &err)) {
    fprintf(stderr, "attach: %s\n", err.message);
    exit(2);
  }
  return w;
}

static pid_t process_start(const colibri_model *model, colibri_session *s, int lane) {
  colibri_error err = {0, ""};
  /* the child waits for its binding: bind resets the lane, so it must come before the child takes it */
  int gate[2];
  char byte = 0;
  if (pipe(gate)) exit(2);
  pid_t pid = fork();
  if (!pid) {
    close(gate[1]);
    if (read(gate[0], &byte, 1) != 1) _exit(3);
    colibri_worker *w = attach(model, s);
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
static int ended(pid_t pid) {
  siginfo_t info = {0};
  return !waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) && info.si_pid == pid;
}

typedef struct killer { const colibri_model *model; colibri_session *s; pid_t *pids; int signal; atomic_int stop; _Atomic int kills; } killer;

/* Kills lane after lane and starts it again, at no particular moment. */
static void *killer_main(void *p) {
  killer *k = p;
  for (int lane = 0; !atomic_load(&k->stop); lane = (lane + 1) % 2, atomic_fetch_add(&k->kills, 1)) {
    for (int i = 0; i < 300 + 37 * (k->kills % 11); i++) sched_yield();
    kill(k->pids[lane], k->signal);
    for (int i = 0; k->signal == SIGSTOP && i < 200; i++) { /* held a task: the front end kills it; else nobody misses it and we do */
      if (ended(k->pids[lane])) break;
      usleep(1000);
    }
    kill(k->pids[lane], SIGKILL);
    if (waitpid(k->pids[lane], NULL, 0) < 0) return NULL;
    colibri_lane_dead(k->s, lane);
    k->pids[lane] = process_start(k->model, k->s, lane);
  }
  return NULL;
}

static void test_deaths(const colibri_model *model, const run *want, int signal, int rounds) {
  colibri_session *s = open_session(model, 1, signal == SIGSTOP ? 60 : 0);
  pid_t pids[2] = {process_start(model, s, 0), process_start(model, s, 1)};
  killer k = {.model = model, .s = s, .pids = pids, .signal = signal};
  pthread_t thread;
  pthread_create(&thread, NULL, killer_main, &k);
  time_t deadline = time(NULL) + 60;
  uint32_t rerun = 0;
  for (int round = 0; (round < rounds || k.kills < 2 || !rerun) && time(NULL) < deadline; round++) {
    run got = run_all(s, 7 + 5 * (round % 9));
    rerun += got.rerun;
    compare(want, &got, signal == SIGSTOP ? "stopped lanes" : "killed lanes");
    if (failures) break;
  }
  CHECK(rerun > 0, "no death ever met a lane with a task: the test has shown nothing");
  atomic_store(&k.stop, 1);
  pthread_join(thread, NULL);
  for (int i = 0; i < 2; i++) {
    kill(pids[i], SIGKILL);
    waitpid(pids[i], NULL, 0);
  }
  colibri_session_close(s);
}

/* The front end has no lane and its only worker dies while computing: the step is finished all the same, the next one is refused. */
static void test_last_lane_dies(const colibri_model *model, const run *want) {
  colibri_session *s = open_session(model, 0, 0);
  colibri_error err;
  pid_t pid = process_start(model, s, 0);
  run got = run_all(s, 16);
  compare(want, &got, "one process");
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
  colibri_lane_dead(s, 0);
  colibri_seq seq = {.n_rows = 1, .n_logits = 1, .n_blocks = 1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
  int32_t token = 1, block = 0;
  colibri_row_result result;
  colibri_batch batch = {.n_seqs = 1, .seqs = &seq, .tokens = &token, .blocks = &block};
  CHECK(colibri_step(s, &batch, &result, NULL, NULL, &err) == COLIBRI_ENOLANES, "a step without lanes was not refused");
  colibri_session_close(s);
}

#endif

int main(void) {
  colibri_error err;
  colibri_model *model = NULL;
  int fd = random_model_fd(&shape, 5);
  if (colibri_model_open_fd(fd, &model, &err)) {
    fprintf(stderr, "model: %s\n", err.message);
    return 2;
  }
  close(fd);
  colibri_session *s = open_session(model, 1, 0);
  run want = run_all(s, 80);
  for (int chunk = 1; chunk < 40; chunk += 6) {
    run got = run_all(s, chunk);
    compare(&want, &got, "chunks");
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
  if (!failures) printf("team: ok\n");
  return failures != 0;
}
