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
  colibri_task_run(env, phase, &task);
  mark_done(env, g, t);
  return 1;
}

int colibri_lane_work(colibri_lane_env *env, uint64_t g, const colibri_phase *phase, int rank) {
  int n = phase->n_tasks, lanes = phase->n_lanes, ran = 0;
  for (int i = 0; i < lanes; i++) {
    int share = (rank + i) % lanes;
    int first = (int)((int64_t)share * n / lanes), end = (int)((int64_t)(share + 1) * n / lanes);
    for (int t = first; t < end; t++) ran += colibri_lane_take(env, g, phase, t);
  }
  return ran;
}
