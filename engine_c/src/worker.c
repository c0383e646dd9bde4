/* worker.c - a lane's process: attach to the segments, then wait, claim, compute until asked to leave. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "guard.h"
#include "session.h"

struct colibri_worker {
  const colibri_model *model;
  colibri_team *team;
  char *arena;
  uint64_t arena_bytes;
  int borrowed;  /* the segments are a session's own mapping */
};

static void *map_segment(int fd, uint64_t bytes, const char *what, colibri_error *err) {
  struct stat st;
  if (fstat(fd, &st)) {
    colibri_fail(err, COLIBRI_EIO, "the %s segment cannot be read: %s", what, strerror(errno));
    return NULL;
  }
  if ((uint64_t)st.st_size < bytes) {
    colibri_fail(err, COLIBRI_EFORMAT, "the %s segment has %lld bytes, %llu are needed", what, (long long)st.st_size, (unsigned long long)bytes);
    return NULL;
  }
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p != MAP_FAILED) return p;
  colibri_fail(err, COLIBRI_EIO, "the %s segment cannot be mapped: %s", what, strerror(errno));
  return NULL;
}

static int check_team(const colibri_worker *w, colibri_error *err) {
  const colibri_team *t = w->team;
  colibri_arena layout;
  if (t->magic != COLIBRI_TEAM_MAGIC || t->abi != COLIBRI_ABI_VERSION)
    return colibri_fail(err, COLIBRI_EFORMAT, "the team segment is not one of this version of the engine (%s); start front end and workers from one installation",
                        colibri_version());
  if (t->model_crc != w->model->descriptor_crc || t->model_bytes != w->model->info.file_bytes)
    return colibri_fail(err, COLIBRI_EFORMAT, "the team was made for another model than the one this worker opened");
  if (!colibri_arena_layout(w->model, &t->options, NULL, &layout) || layout.bytes != t->arena_bytes)
    return colibri_fail(err, COLIBRI_EFORMAT, "the team segment and the model disagree on the arena's layout");
  return colibri_isa_select(t->isa, err);
}

int colibri_worker_attach(const colibri_model *model, int team_fd, int arena_fd, colibri_worker **out, colibri_error *err) {
  int rc;
  *out = NULL;
  colibri_worker *w = calloc(1, sizeof *w);
  if (!w) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a worker");
  w->model = model;
  rc = COLIBRI_EFORMAT;
  w->team = map_segment(team_fd, sizeof *w->team, "team", err);
  if (!w->team) goto fail;
  rc = check_team(w, err);
  if (rc) goto fail;
  rc = COLIBRI_EFORMAT;
  w->arena_bytes = w->team->arena_bytes;
  w->arena = map_segment(arena_fd, w->arena_bytes, "arena", err);
  if (!w->arena) goto fail;
  *out = w;
  return COLIBRI_OK;
fail:
  colibri_worker_detach(w);
  return rc;
}

int colibri_worker_attach_session(colibri_session *session, colibri_worker **out, colibri_error *err) {
  colibri_worker *w = *out = calloc(1, sizeof *w);
  if (!w) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a worker");
  *w = (colibri_worker){session->model, session->team, session->arena_map, session->arena_bytes, 1};
  return COLIBRI_OK;
}

void colibri_worker_detach(colibri_worker *w) {
  if (!w) return;
  if (w->arena && !w->borrowed) munmap(w->arena, w->arena_bytes);
  if (w->team && !w->borrowed) munmap(w->team, sizeof *w->team);
  free(w);
}

static int pin(int cpu, colibri_error *err) {
  cpu_set_t set;
  if (cpu < 0) return COLIBRI_OK;
  if (cpu >= CPU_SETSIZE) return colibri_fail(err, COLIBRI_EINVAL, "CPU %d is beyond this build's limit of %d", cpu, CPU_SETSIZE);
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (!sched_setaffinity(0, sizeof set, &set)) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EIO, "the lane cannot be pinned to CPU %d: %s; choose CPUs this process may use", cpu, strerror(errno));
}

/* Waits until the generation is no longer `seen` or the lane is to leave: spins, yields, sleeps. Returns the generation. */
static uint64_t wait_for_phase(colibri_team *team, colibri_lane *lane, uint64_t seen) {
  uint64_t start = 0, limit = (uint64_t)team->options.spin_us * 1000, g;
  for (unsigned spins = 0;; spins++) {
    g = atomic_load_explicit(&team->generation, memory_order_acquire);
    if (g != seen || atomic_load_explicit(&lane->state, memory_order_relaxed) == COLIBRI_LANE_LEAVING) return g;
    colibri_cpu_relax();
    if (spins % 256 != 255) continue;
    uint64_t now = colibri_now_ns();
    if (!start) start = now;
    if (now - start > 20000) sched_yield(); /* somebody else may need this CPU to let us go on */
    if (now - start < limit) continue;
    atomic_store(&lane->sleeping, 1); /* sequentially consistent: the front end publishes, then looks here */
    uint32_t wakes = atomic_load(&team->wakes);
    if (atomic_load(&team->generation) == seen && atomic_load(&lane->state) != COLIBRI_LANE_LEAVING) colibri_team_sleep(team, wakes);
    atomic_store(&lane->sleeping, 0);
    start = 0;
  }
}

static void run_phase(colibri_lane_env *env, uint64_t g) {
  colibri_team *team = env->team;
  int rank = atomic_load_explicit(&team->lanes[env->lane].rank, memory_order_relaxed);
  colibri_phase phase = colibri_phase_load(&team->phases[g & 1]);
  if (atomic_load_explicit(&team->generation, memory_order_relaxed) != g || rank < 0) return;
  colibri_guard_enter();
  colibri_lane_work(env, g, &phase, rank);
  colibri_guard_leave();
}

int colibri_worker_run(colibri_worker *w, int lane, int cpu, colibri_error *err) {
  colibri_lane_env env;
  uint32_t empty = COLIBRI_LANE_EMPTY;
  if (lane < 0 || lane >= w->team->options.max_lanes)
    return colibri_fail(err, COLIBRI_EINVAL, "lane %d is not one of the team's %d", lane, w->team->options.max_lanes);
  int rc = pin(cpu, err);
  if (!rc) rc = colibri_lane_env_open(&env, w->model, w->team, w->arena, lane, err);
  if (rc) return rc;
  colibri_lane *self = &w->team->lanes[lane];
  env.epoch = atomic_load(&self->epoch);
  uint64_t seen = atomic_load(&w->team->generation);
  if (!atomic_compare_exchange_strong(&self->state, &empty, COLIBRI_LANE_READY)) {
    colibri_lane_env_close(&env);
    return colibri_fail(err, COLIBRI_ESTATE, "lane %d is in use", lane);
  }
  for (;;) {
    uint64_t g = wait_for_phase(w->team, self, seen);
    if (atomic_load(&self->state) == COLIBRI_LANE_LEAVING) break;
    run_phase(&env, g);
    seen = g;
  }
  atomic_store(&self->rank, -1);
  atomic_store(&self->state, COLIBRI_LANE_EMPTY);
  colibri_lane_env_close(&env);
  return COLIBRI_OK;
}
