/* team.h - how the front end and the lanes share work: the control segment (internal).
 *
 * A step is a row of phases, a phase a list of independent tasks. The front end fills tasks[] and the phase descriptor, then bumps `generation`
 * (the publication: release store). A lane that sees the new generation claims tasks by compare-and-swap on their claim words, computes, marks them
 * done. Every task word carries its generation, so nothing is reset between phases, and the lane and its epoch, so that the front end knows what a dead
 * lane held. Tasks write only slots of their own and read nothing written in the same phase: running one twice is harmless.
 *
 * Why a slow lane cannot disturb a later phase: it claims task t for generation g only if t's word is older than g. While phase g is open that is right;
 * once it is closed, every t < n_tasks(g) has been done with a generation >= g, so the swap fails. n_tasks is read from the descriptor slot g & 1, which is
 * rewritten only for g + 2, and the generation is read again afterwards. The order in which a lane goes through t < n_tasks(g) does not matter to this.
 *
 * With weights on two nodes or more, homes[] names the node of each task's weights, and a lane tries the tasks of its own node first. A late lane may read homes
 * already written for the next phase, and places (a lane's number within its node) of the next step: both are relaxed atomics and decide on the order
 * alone. Who holds a claim reads the home of its own task, which is stable like the task itself.
 *
 * Only a process known to be dead has its tasks run again by others. */
#ifndef COLIBRI_TEAM_H
#define COLIBRI_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#include "arena.h"

#define COLIBRI_TEAM_MAGIC UINT64_C(0x4d41455449524243) /* "CBRITEAM" */
#define COLIBRI_MAX_TASKS 4096

/* a0..a1: rows (GATE_UP and split DOWN: pairs; SAMPLE: logit rows). b0..b1: panels (GATE_UP: pairs of panels; ATTEND: b0 is the KV head;
 * COMBINE: groups of 32 columns). e: expert or sequence. */
typedef struct colibri_task { int32_t a0, a1, b0, b1, e; } colibri_task;

typedef struct colibri_phase {
  int32_t op, layer, n_tasks, n_lanes;
  int32_t fused_kv;  /* ATTEND: each task also stores the K and V of its rows (one task holds all rows of a sequence and KV head) */
  int32_t homed;     /* some tasks have a home node: homes[] is written */
} colibri_phase;

/* The published phase. A late reader may see a mixture of two, which is why it reads the generation again: whoever sees a word of phase g + 2 (acquire) also
 * sees a generation above g, which was stored before it (release). */
typedef struct colibri_phase_slot { _Atomic uint64_t what, shares; } colibri_phase_slot;

static inline void colibri_phase_store(colibri_phase_slot *slot, const colibri_phase *p) {
  uint64_t what = (uint64_t)(uint32_t)p->layer << 32 | (uint64_t)(p->homed & 1) << 17 | (uint64_t)(p->fused_kv & 1) << 16 | (uint64_t)p->op;
  atomic_store_explicit(&slot->what, what, memory_order_release);
  atomic_store_explicit(&slot->shares, (uint64_t)(uint32_t)p->n_lanes << 32 | (uint32_t)p->n_tasks, memory_order_release);
}

static inline colibri_phase colibri_phase_load(const colibri_phase_slot *slot) {
  uint64_t what = atomic_load_explicit(&slot->what, memory_order_acquire), shares = atomic_load_explicit(&slot->shares, memory_order_acquire);
  return (colibri_phase){.op = (int32_t)(what & 0xffff), .layer = (int32_t)(what >> 32), .n_tasks = (int32_t)(shares & 0xffffffff),
                         .n_lanes = (int32_t)(shares >> 32), .fused_kv = (int32_t)(what >> 16 & 1),
                         .homed = (int32_t)(what >> 17 & 1)};
}

typedef struct colibri_lane {
  /* written by the front end, but state also by its lane */
  _Alignas(128) _Atomic uint32_t state;  /* enum colibri_lane_state */
  _Atomic uint32_t epoch;                /* counts the processes that had this lane */
  _Atomic int32_t rank;                  /* place among the lanes of this step; -1: not in it */
  _Atomic uint32_t sleeping;             /* waits on the futex */
  _Atomic int32_t node;                  /* where it runs; -1: unknown */
  _Atomic uint32_t place;                /* number << 16 | count: among the lanes of this step on its node */
  /* written by the lane */
  _Alignas(128) _Atomic uint64_t done;   /* generation << 16 | tasks done in it */
  _Atomic uint64_t tasks;                /* tasks done since it attached */
  _Atomic uint64_t homed, local;         /* tasks with a home node done by whoever had this lane; those whose home is its node */
} colibri_lane;

typedef struct colibri_claim { _Alignas(64) _Atomic uint64_t word; } colibri_claim;

typedef struct colibri_team {
  uint64_t magic;
  uint32_t abi, model_crc;
  uint64_t model_bytes, arena_bytes;
  colibri_session_options options;
  char isa[16];
  _Alignas(128) _Atomic uint64_t generation; /* of the newest phase */
  _Alignas(128) _Atomic uint32_t wakes;      /* the futex word: counts wake-ups */
  _Alignas(128) colibri_phase_slot phases[2]; /* [generation & 1] */
  colibri_lane lanes[256];                   /* workers' lanes, then at index max_lanes the front end's */
  colibri_claim claims[COLIBRI_MAX_TASKS];
  _Alignas(128) colibri_task tasks[COLIBRI_MAX_TASKS];
  _Alignas(128) _Atomic int16_t homes[COLIBRI_MAX_TASKS]; /* the node of a task's weights, -1: none; written if the phase is homed */
} colibri_team;

/* Claim word: generation 44 bits | epoch 8 | lane 8 | state 4. */
enum { CLAIM_TAKEN = 1, CLAIM_DONE = 2 };
static inline uint64_t colibri_claim_word(uint64_t generation, uint32_t epoch, int lane, int state) {
  return generation << 20 | (uint64_t)(epoch & 255) << 12 | (uint64_t)lane << 4 | (uint64_t)state;
}
static inline uint64_t colibri_claim_generation(uint64_t word) { return word >> 20; }
static inline uint32_t colibri_claim_epoch(uint64_t word) { return word >> 12 & 255; }
static inline int colibri_claim_lane(uint64_t word) { return (int)(word >> 4 & 255); }
static inline int colibri_claim_state(uint64_t word) { return (int)(word & 15); }

/* What a thread needs to run tasks: views of the segments and memory of its own. */
typedef struct colibri_lane_env {
  const colibri_model *model;
  const colibri_kernels *kernels;
  colibri_team *team;
  colibri_arena arena;
  int lane;
  uint32_t epoch;
  const colibri_task *after; /* of the task that runs, the one this lane most likely takes next: whose weights are worth fetching; or NULL */
  const void **rows;   /* [max_rows] activation row pointers */
  float *product;      /* [PRODUCT_FLOATS] a tile of a matrix product */
  float *vector;       /* [max(hidden_pad, att_pad)] */
  float *queries;      /* [queries_per_task * head_dim] */
  float *attend;       /* COLIBRI_ATTEND_SCRATCH */
  int32_t *window;     /* [2 * queries_per_task] first and last positions */
  float **pointers;    /* [2 * queries_per_task] query and output vectors */
  void *sampler;
  void *block;         /* the one allocation all of these live in */
} colibri_lane_env;

#define COLIBRI_PRODUCT_FLOATS 65536
#define COLIBRI_QUERY_TILE 64  /* query vectors an attention task aims at */

/* Rows of one attention task: about COLIBRI_QUERY_TILE query vectors. */
static inline int colibri_attend_rows(const colibri_model_info *i) {
  int group = i->heads / i->kv_heads;
  return group >= COLIBRI_QUERY_TILE ? 1 : COLIBRI_QUERY_TILE / group;
}

/* Gives env its own memory. COLIBRI_ENOMEM. */
int colibri_lane_env_open(colibri_lane_env *env, const colibri_model *model, colibri_team *team, char *arena, int lane, colibri_error *err);
void colibri_lane_env_close(colibri_lane_env *env);

/* Runs one task (tasks.c). */
void colibri_task_run(colibri_lane_env *env, const colibri_phase *phase, const colibri_task *task);

/* Claims and runs tasks of `phase` (generation g) until none is free: first those at home on the lane's node, then all others; of both the lane's own
 * share first, then the others'. Returns how many it ran. */
int colibri_lane_work(colibri_lane_env *env, uint64_t g, const colibri_phase *phase, int rank);
/* Claims task t if it is free, or held by a dead lane, and runs it. Returns 1 if it did. */
int colibri_lane_take(colibri_lane_env *env, uint64_t g, const colibri_phase *phase, int t);

/* Sleeping without a lost wake-up: read `wakes`, then look whether there is something to do, then sleep while `wakes` is still what was read. Who
 * gives something to do stores it first and then wakes all. */
void colibri_team_sleep(colibri_team *team, uint32_t wakes);
void colibri_team_wake(colibri_team *team);

static inline void colibri_cpu_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}
uint64_t colibri_now_ns(void);

#endif
