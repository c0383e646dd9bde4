/* team.c - claiming, doing, waiting: the lanes' side of the protocol described in team.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t colibri_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void colibri_team_sleep(colibri_team *team, uint32_t wakes) { syscall(SYS_futex, &team->wakes, FUTEX_WAIT, wakes, NULL, NULL, 0); }

void colibri_team_wake(colibri_team *team) {
  atomic_fetch_add(&team->wakes, 1);
  syscall(SYS_futex, &team->wakes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* 1 if a task with this claim word may be taken in generation g: not yet claimed in g, or held by a process that is dead. */
static int is_free(const colibri_team *team, uint64_t g, uint64_t word) {
  if (colibri_claim_generation(word) != g) return colibri_claim_generation(word) < g;
  if (colibri_claim_state(word) != CLAIM_TAKEN) return 0;
  uint32_t epoch = atomic_load_explicit(&team->lanes[colibri_claim_lane(word)].epoch, memory_order_acquire);
  return colibri_claim_epoch(word) != (epoch & 255);
}

/* Only the lane itself writes its counters. */
static void count_home(colibri_lane *lane, int home) {
  if (home < 0) return;
  uint64_t local = home == atomic_load_explicit(&lane->node, memory_order_relaxed);
  atomic_store_explicit(&lane->homed, atomic_load_explicit(&lane->homed, memory_order_relaxed) + 1, memory_order_relaxed);
  atomic_store_explicit(&lane->local, atomic_load_explicit(&lane->local, memory_order_relaxed) + local, memory_order_relaxed);
}

static void mark_done(colibri_lane_env *env, uint64_t g, int t) {
  colibri_lane *lane = &env->team->lanes[env->lane];
  uint64_t done = atomic_load_explicit(&lane->done, memory_order_relaxed);
  done = done >> 16 == g ? done + 1 : (g << 16 | 1);
  atomic_store_explicit(&env->team->claims[t].word, colibri_claim_word(g, env->epoch, env->lane, CLAIM_DONE), memory_order_release);
  atomic_store_explicit(&lane->done, done, memory_order_release);
  atomic_fetch_add_explicit(&lane->tasks, 1, memory_order_relaxed);
}

int colibri_lane_take(colibri_lane_env *env, uint64_t g, const colibri_phase *phase, int t) {
  colibri_claim *claim = &env->team->claims[t];
  uint64_t word = atomic_load_explicit(&claim->word, memory_order_acquire);
  if (!is_free(env->team, g, word)) return 0;
  if (!atomic_compare_exchange_strong_explicit(&claim->word, &word, colibri_claim_word(g, env->epoch, env->lane, CLAIM_TAKEN),
                                               memory_order_acq_rel, memory_order_relaxed))
    return 0;
  colibri_task task = env->team->tasks[t]; /* stable: the phase is open as long as this task is not done */
  env->after = t + 1 < phase->n_tasks ? &env->team->tasks[t + 1] : NULL;
  colibri_task_run(env, phase, &task);
  env->after = NULL;
  if (phase->homed) count_home(&env->team->lanes[env->lane], atomic_load_explicit(&env->team->homes[t], memory_order_relaxed));
  mark_done(env, g, t);
  return 1;
}

#define ANY_HOME (-2)

/* Takes what is free from task `start` on to the end of the list and round again; of one home, or of any. */
static int sweep(colibri_lane_env *env, uint64_t g, const colibri_phase *phase, int start, int home) {
  int n = phase->n_tasks, ran = 0;
  for (int i = 0, t = start; i < n; i++, t = t + 1 < n ? t + 1 : 0)
    if (home == ANY_HOME || home == atomic_load_explicit(&env->team->homes[t], memory_order_relaxed)) ran += colibri_lane_take(env, g, phase, t);
  return ran;
}

/* The task after `skip` others of this home. */
static int home_task(const colibri_team *team, int n, int home, int skip) {
  for (int t = 0; t < n; t++)
    if (home == atomic_load_explicit(&team->homes[t], memory_order_relaxed) && !skip--) return t;
  return 0;
}

/* The tasks at home on the lane's node, its own share of them first. */
static int work_at_home(colibri_lane_env *env, uint64_t g, const colibri_phase *phase) {
  const colibri_lane *lane = &env->team->lanes[env->lane];
  int node = atomic_load_explicit(&lane->node, memory_order_relaxed), n = phase->n_tasks, count = 0;
  uint32_t place = atomic_load_explicit(&lane->place, memory_order_relaxed), lanes = place & 0xffff;
  if (node < 0 || !lanes) return 0;
  for (int t = 0; t < n; t++) count += node == atomic_load_explicit(&env->team->homes[t], memory_order_relaxed);
  if (!count) return 0;
  return sweep(env, g, phase, home_task(env->team, n, node, (int)((place >> 16) * (uint32_t)count / lanes)), node);
}

int colibri_lane_work(colibri_lane_env *env, uint64_t g, const colibri_phase *phase, int rank) {
  int ran = phase->homed ? work_at_home(env, g, phase) : 0;
  return ran + sweep(env, g, phase, (int)((int64_t)(rank % phase->n_lanes) * phase->n_tasks / phase->n_lanes), ANY_HOME);
}
