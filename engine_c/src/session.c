/* session.c - opening and closing a team, and the life of its lanes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---------------------------------------------------------------- options and segments */

static int check_options(const colibri_session_options *o, colibri_error *err) {
  struct { const char *name; int64_t value, low, high; } limits[] = {
      {"max_rows", o->max_rows, 1, 65536},
      {"max_seqs", o->max_seqs, 1, 4096},
      {"max_logit_rows", o->max_logit_rows, 1, o->max_rows},
      {"kv_blocks", o->kv_blocks, 1, 1 << 28},
      {"kv_format", o->kv_format, COLIBRI_KV_F32, COLIBRI_KV_BF16},
      {"max_lanes", o->max_lanes, 0, 255},
      {"front_lane", o->front_lane, 0, 1},
      {"spin_us", o->spin_us, 0, 1000000},
      {"hang_ms", o->hang_ms, 0, 3600000},
      {"trace_routes", o->trace_routes, 0, 1},
      {"split_down", o->split_down, 0, 1},
      {"max_slots", o->max_slots, 0, 65536},
  };
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
    if (limits[i].value < limits[i].low || limits[i].value > limits[i].high)
      return colibri_fail(err, COLIBRI_EINVAL, "session option %s is %lld, it must be %lld to %lld", limits[i].name, (long long)limits[i].value,
                          (long long)limits[i].low, (long long)limits[i].high);
  return COLIBRI_OK;
}

uint64_t colibri_session_bytes(const colibri_model *model, const colibri_session_options *options) {
  colibri_arena layout;
  if (check_options(options, NULL)) return 0;
  uint64_t bytes = colibri_arena_layout(model, options, NULL, &layout);
  return bytes ? bytes + sizeof(colibri_team) : 0;
}

/* A memfd of fixed size, mapped. */
static void *make_segment(const char *name, uint64_t bytes, int *fd, colibri_error *err) {
  *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd < 0 || ftruncate(*fd, (off_t)bytes) || fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
    colibri_fail(err, COLIBRI_EIO, "shared memory of %llu bytes cannot be made: %s", (unsigned long long)bytes, strerror(errno));
    return NULL;
  }
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  if (p != MAP_FAILED) return p;
  colibri_fail(err, COLIBRI_ENOMEM, "shared memory of %llu bytes cannot be mapped: %s", (unsigned long long)bytes, strerror(errno));
  return NULL;
}

static void fill_team(colibri_session *s) {
  colibri_team *t = s->team;
  t->abi = COLIBRI_ABI_VERSION;
  t->model_crc = s->model->descriptor_crc;
  t->model_bytes = s->model->info.file_bytes;
  t->arena_bytes = s->arena_bytes;
  t->options = s->options;
  strncpy(t->isa, colibri_isa_name(), sizeof t->isa - 1);
  for (int i = 0; i <= s->options.max_lanes; i++) {
    atomic_init(&t->lanes[i].rank, -1);
    atomic_init(&t->lanes[i].node, -1);
  }
  atomic_init(&t->generation, 0);
  t->magic = COLIBRI_TEAM_MAGIC;
}

/* Zeroed memory on a cache line of its own: the router's vectors store whole lines. */
static void *zeroed(size_t count, size_t size) {
  size_t bytes = (count * size + 63) / 64 * 64;
  void *p = aligned_alloc(64, bytes);
  return p ? memset(p, 0, bytes) : NULL;
}

static int alloc_routing(colibri_session *s, colibri_error *err) {
  const colibri_model_info *i = &s->model->info;
  size_t layers = s->options.trace_routes && i->router_layers ? (size_t)i->router_layers : 1;
  size_t rows = (size_t)s->options.max_rows, slots = (size_t)s->options.max_slots, n = layers * rows * (size_t)i->top_k;
  s->route_ids = zeroed(n, sizeof *s->route_ids);
  s->route_weights = zeroed(n, sizeof *s->route_weights);
  s->route_bad = calloc((size_t)s->options.max_rows, 1);
  s->expert_at = calloc((size_t)i->experts, sizeof *s->expert_at);
  s->copies = calloc((size_t)i->experts, sizeof *s->copies);
  s->route_margins = s->options.trace_routes ? calloc(layers * rows, sizeof *s->route_margins) : NULL;
  s->scores = zeroed(rows * (size_t)i->experts, sizeof *s->scores);
  s->changed = calloc(rows, 1);
  s->slot_step = calloc(slots + 1, sizeof *s->slot_step);
  s->processes = calloc((size_t)s->options.max_lanes + 1, sizeof *s->processes);
  int lacks = colibri_damper_open(&s->damper, i->experts, i->top_k, i->router_layers, s->options.max_rows, s->options.max_seqs, s->options.max_slots);
  lacks |= colibri_counts_open(&s->counts, i->layers, i->experts, s->options.max_slots);
  lacks |= s->options.trace_routes && !s->route_margins;
  lacks |= colibri_remote_open(s);
  if (lacks || !s->route_ids || !s->route_weights || !s->route_bad || !s->scores || !s->changed || !s->slot_step || !s->expert_at || !s->copies || !s->processes)
    return colibri_fail(err, COLIBRI_ENOMEM, "no memory for the session's routing tables");
  for (int l = 0; l < s->options.max_lanes; l++) s->processes[l].pidfd = -1;
  return COLIBRI_OK;
}

int colibri_session_open(const colibri_model *model, const colibri_session_options *options, colibri_session **out, colibri_error *err) {
  colibri_arena layout;
  *out = NULL;
  int rc = check_options(options, err);
  if (!rc) rc = colibri_isa_select(NULL, err);
  if (rc) return rc;
  colibri_session *s = calloc(1, sizeof *s);
  if (!s) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a session");
  s->model = model;
  s->options = *options;
  s->team_fd = s->arena_fd = s->tell = -1;
  pthread_mutex_init(&s->lock, NULL);
  rc = alloc_routing(s, err);
  if (rc) goto fail;
  s->arena_bytes = colibri_arena_layout(model, options, NULL, &layout);
  rc = COLIBRI_ENOMEM;
  if (!s->arena_bytes) {
    colibri_fail(err, rc, "the session's options need more memory than can be addressed; lower kv_blocks, max_rows or max_seqs");
    goto fail;
  }
  s->team = make_segment("colibri-team", sizeof *s->team, &s->team_fd, err);
  if (!s->team) goto fail;
  s->arena_map = make_segment("colibri-arena", s->arena_bytes, &s->arena_fd, err);
  if (!s->arena_map) goto fail;
  fill_team(s);
  rc = colibri_lane_env_open(&s->env, model, s->team, s->arena_map, options->max_lanes, err);
  if (rc) goto fail;
  *out = s;
  return COLIBRI_OK;
fail:
  colibri_session_close(s);
  return rc;
}

void colibri_session_close(colibri_session *s) {
  if (!s) return;
  colibri_lane_env_close(&s->env);
  if (s->arena_map) munmap(s->arena_map, s->arena_bytes);
  if (s->team) munmap(s->team, sizeof *s->team);
  if (s->arena_fd >= 0) close(s->arena_fd);
  if (s->team_fd >= 0) close(s->team_fd);
  for (int l = 0; s->processes && l < s->options.max_lanes; l++)
    if (s->processes[l].pidfd >= 0) close(s->processes[l].pidfd);
  free(s->processes);
  colibri_counts_close(&s->counts);
  colibri_remote_close(s);
  colibri_damper_close(&s->damper);
  free(s->slot_step);
  free(s->changed);
  free(s->scores);
  free(s->expert_at);
  free(s->copies);
  free(s->route_margins);
  free(s->route_bad);
  free(s->route_weights);
  free(s->route_ids);
  pthread_mutex_destroy(&s->lock);
  free(s);
}

int colibri_session_team_fd(const colibri_session *s) { return s->team_fd; }
int colibri_session_arena_fd(const colibri_session *s) { return s->arena_fd; }
const float *colibri_session_logits(const colibri_session *s) { return s->env.arena.logits; }

int colibri_session_kv_range(const colibri_session *s, int kv_head, uint64_t *offset, uint64_t *bytes) {
  if (kv_head < 0 || kv_head >= s->model->info.kv_heads) return COLIBRI_EINVAL;
  *offset = (uint64_t)(colibri_arena_kv(&s->env.arena, 0, kv_head) - s->arena_map);
  *bytes = (uint64_t)s->env.arena.dims.kv_head_bytes;
  return COLIBRI_OK;
}

int colibri_session_routes(const colibri_session *s, int32_t *experts, float *weights, float *margins, int64_t count, colibri_error *err) {
  const colibri_model_info *i = &s->model->info;
  int64_t row = (int64_t)s->n_rows * i->top_k, stride = (int64_t)s->options.max_rows * i->top_k;
  if (!s->options.trace_routes) return colibri_fail(err, COLIBRI_ESTATE, "the session keeps no routes; open it with trace_routes = 1");
  if (s->n_ranges) return colibri_fail(err, COLIBRI_ESTATE, "routes are not known while layers are computed elsewhere");
  if (count < i->router_layers * row)
    return colibri_fail(err, COLIBRI_EINVAL, "routes need room for %lld entries, there is room for %lld", (long long)(i->router_layers * row), (long long)count);
  for (int l = 0; l < i->router_layers; l++) {
    if (experts) memcpy(experts + l * row, s->route_ids + l * stride, sizeof(int32_t) * (size_t)row);
    if (weights) memcpy(weights + l * row, s->route_weights + l * stride, sizeof(float) * (size_t)row);
    if (margins) memcpy(margins + l * (int64_t)s->n_rows, s->route_margins + l * (int64_t)s->options.max_rows, sizeof(float) * (size_t)s->n_rows);
  }
  return COLIBRI_OK;
}

int colibri_session_expert_counts(const colibri_session *s, uint64_t *counts, int64_t count, colibri_error *err) {
  const colibri_model_info *i = &s->model->info;
  int64_t n = (int64_t)i->layers * i->experts;
  if (count < n) return colibri_fail(err, COLIBRI_EINVAL, "expert counts need room for %lld entries, there is room for %lld", (long long)n, (long long)count);
  return colibri_session_telemetry(s, &(colibri_telemetry){.layers = i->layers, .experts = i->experts, .tokens = counts}, err);
}

int colibri_session_telemetry(const colibri_session *s, const colibri_telemetry *into, colibri_error *err) { return colibri_counts_read(&s->counts, into, err); }

/* ---------------------------------------------------------------- lanes */

static int has_lane(const colibri_session *s, int lane) { return lane >= 0 && lane < s->options.max_lanes; }

/* Forgets the process of a lane: whatever it holds may be taken. Call with the lock. */
static void bury(colibri_session *s, int lane, enum colibri_lane_state state) {
  colibri_lane *l = &s->team->lanes[lane];
  if (s->processes[lane].pidfd >= 0) close(s->processes[lane].pidfd);
  s->processes[lane].pidfd = -1;
  atomic_store(&l->rank, -1);
  atomic_store(&l->sleeping, 0);
  atomic_store(&l->state, state);
  atomic_fetch_add(&l->epoch, 1);
}

int colibri_lane_bind(colibri_session *s, int lane, int pid, int pidfd, colibri_error *err) {
  if (!has_lane(s, lane)) return colibri_fail(err, COLIBRI_EINVAL, "lane %d is not one of the session's %d", lane, s->options.max_lanes);
  int copy = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
  if (pidfd >= 0 && copy < 0) return colibri_fail(err, COLIBRI_EIO, "the pidfd of process %d cannot be duplicated: %s", pid, strerror(errno));
  pthread_mutex_lock(&s->lock);
  uint32_t state = atomic_load(&s->team->lanes[lane].state);
  int ok = state == COLIBRI_LANE_EMPTY || state == COLIBRI_LANE_DEAD;
  if (ok) {
    bury(s, lane, COLIBRI_LANE_EMPTY);
    atomic_store(&s->team->lanes[lane].tasks, 0);
    s->processes[lane] = (colibri_lane_process){.pid = pid, .pidfd = copy};
  }
  pthread_mutex_unlock(&s->lock);
  if (ok) return COLIBRI_OK;
  if (copy >= 0) close(copy);
  return colibri_fail(err, COLIBRI_ESTATE, "lane %d is in use (state %u); it must leave or die first", lane, state);
}

int colibri_lane_leave(colibri_session *s, int lane) {
  if (!has_lane(s, lane)) return COLIBRI_EINVAL;
  _Atomic uint32_t *state = &s->team->lanes[lane].state;
  uint32_t from = COLIBRI_LANE_READY;
  if (!atomic_compare_exchange_strong(state, &from, COLIBRI_LANE_LEAVING) && from == COLIBRI_LANE_ACTIVE)
    atomic_compare_exchange_strong(state, &from, COLIBRI_LANE_LEAVING);
  colibri_team_wake(s->team);
  return COLIBRI_OK;
}

int colibri_lane_dead(colibri_session *s, int lane) {
  if (!has_lane(s, lane)) return COLIBRI_EINVAL;
  pthread_mutex_lock(&s->lock);
  bury(s, lane, COLIBRI_LANE_EMPTY);
  pthread_mutex_unlock(&s->lock);
  return COLIBRI_OK;
}

int colibri_lane_get_state(const colibri_session *s, int lane) {
  return has_lane(s, lane) ? (int)atomic_load(&s->team->lanes[lane].state) : COLIBRI_EINVAL;
}

uint64_t colibri_lane_tasks(const colibri_session *s, int lane) {
  return has_lane(s, lane) ? atomic_load_explicit(&s->team->lanes[lane].tasks, memory_order_relaxed) : 0;
}

static int has_any_lane(const colibri_session *s, int lane) { return has_lane(s, lane) || lane == s->options.max_lanes; }

int colibri_lane_place(colibri_session *s, int lane, int node) {
  if (!has_any_lane(s, lane) || node < -1 || node >= COLIBRI_MAX_NODES) return COLIBRI_EINVAL;
  atomic_store_explicit(&s->team->lanes[lane].node, node, memory_order_relaxed);
  return COLIBRI_OK;
}

uint64_t colibri_lane_homed(const colibri_session *s, int lane) {
  return has_any_lane(s, lane) ? atomic_load_explicit(&s->team->lanes[lane].homed, memory_order_relaxed) : 0;
}

uint64_t colibri_lane_local(const colibri_session *s, int lane) {
  return has_any_lane(s, lane) ? atomic_load_explicit(&s->team->lanes[lane].local, memory_order_relaxed) : 0;
}

int colibri_session_reap(colibri_session *s) {
  int dead = 0;
  pthread_mutex_lock(&s->lock);
  for (int i = 0; i < s->n_active; i++) {
    int lane = s->active[i];
    struct pollfd p = {.fd = s->processes[lane].pidfd, .events = POLLIN};
    if (p.fd < 0 || poll(&p, 1, 0) <= 0) continue;
    bury(s, lane, COLIBRI_LANE_DEAD);
    dead++;
  }
  pthread_mutex_unlock(&s->lock);
  return dead;
}

int colibri_lane_hung(colibri_session *s, int lane, int32_t *operation, int32_t *layer) {
  if (!has_lane(s, lane)) return 0;
  pthread_mutex_lock(&s->lock);
  colibri_lane_process process = s->processes[lane];
  pthread_mutex_unlock(&s->lock);
  if (operation) *operation = process.op;
  if (layer) *layer = process.layer;
  return process.hung_ms;
}

/* Call with the lock. */
static void kill_hung(colibri_session *s, int lane, const colibri_phase *phase, int32_t ms) {
  colibri_lane_process *p = &s->processes[lane];
  if (p->pidfd < 0) return;
  syscall(SYS_pidfd_send_signal, p->pidfd, SIGKILL, NULL, 0);
  if (p->hung_ms) return;
  p->hung_ms = ms;
  p->op = phase->op;
  p->layer = phase->layer;
}

void colibri_session_kill_holders(colibri_session *s, uint64_t g, const colibri_phase *phase, int32_t ms) {
  pthread_mutex_lock(&s->lock);
  for (int t = 0; t < phase->n_tasks; t++) {
    uint64_t word = atomic_load(&s->team->claims[t].word);
    int lane = colibri_claim_lane(word);
    if (colibri_claim_generation(word) != g || colibri_claim_state(word) != CLAIM_TAKEN || lane >= s->options.max_lanes) continue;
    if (colibri_claim_epoch(word) == (atomic_load(&s->team->lanes[lane].epoch) & 255)) kill_hung(s, lane, phase, ms);
  }
  pthread_mutex_unlock(&s->lock);
}
