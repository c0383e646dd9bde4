/* session.h - the front end's side of a team (internal). */
#ifndef COLIBRI_SESSION_H
#define COLIBRI_SESSION_H

#include <pthread.h>

#include "damping.h"
#include "router.h"
#include "team.h"
#include "telemetry.h"

/* A lane's process: pidfd -1: none. hung_ms: how long it had held a phase up when it was killed for that, 0: it was not; op, layer: that phase. */
typedef struct colibri_lane_process { int pid, pidfd; int32_t hung_ms, op, layer; } colibri_lane_process;

struct colibri_session {
  const colibri_model *model;
  colibri_session_options options;
  int team_fd, arena_fd;
  colibri_team *team;
  char *arena_map;
  uint64_t arena_bytes;
  colibri_lane_env env;      /* the front end's own lane, index max_lanes */
  pthread_mutex_t lock;      /* guards processes[]; never held while computing */
  colibri_lane_process *processes; /* [max_lanes] */
  /* the running step; owned by the stepping thread */
  int active[256];           /* lanes of this step; then, with two nodes or more, the front end's */
  int n_active;              /* workers' lanes in active[] */
  int32_t n_rows, n_logits, n_seqs;
  uint64_t generation;
  int homed;                 /* the task list being written has a task with a home */
  uint64_t *copies;          /* [experts] of the experts at work in the phase being cut: colibri_model_copies */
  int64_t node_work[64], node_lanes[64]; /* by index of the model's nodes: work and lanes in a phase with replicated experts (cut.c) */
  int32_t extent;            /* where colibri_model_node found the last byte it was asked for */
  int tell;                  /* eventfd that has yet to be written to in this step, or -1 */
  uint64_t op_began;         /* when the operation before ended */
  colibri_step_stats stats;
  /* routing */
  int32_t *route_ids;        /* [max_rows * top_k], or [router_layers][max_rows][top_k] when traced */
  float *route_weights;
  uint8_t *route_bad;        /* [max_rows] */
  float *route_margins;      /* [router_layers][max_rows] when traced, else NULL */
  int32_t *expert_at;        /* [experts] counts, then write cursors of the dispatcher */
  float *scores;             /* [max_rows][experts] what selection compares, where damping or margins ask for it */
  uint8_t *changed;          /* [max_rows] rows whose experts damping changed */
  uint32_t *slot_step;       /* [max_slots] the last step (its number) that used the slot */
  uint32_t step;             /* number of the step, from 1 on */
  int damped, margins;       /* some sequence of the step is damped; wants margins */
  colibri_damper damper;
  colibri_counts counts;
  /* a step that is done in part elsewhere (remote.c) */
  uint8_t *remote;           /* [layers][experts] 1: computed elsewhere */
  int has_remote;
  uint8_t *skip;             /* [experts] 1: not in the phase being cut; all 0 but while remote.c works */
  int32_t *wanted, *wanted_rows; /* [experts] remote experts that have rows in the layer the step stands in, ascending, and how many */
  uint8_t *missing;          /* [experts] those whose outputs are not there yet */
  int n_wanted;
  int32_t (*ranges)[2];      /* [layers] of which n_ranges are layers computed elsewhere: first and end */
  int n_ranges, range_end;   /* range_end: of the range the step stands before */
  int32_t *row_numbers;      /* [max_rows] of rows being packed */
  const colibri_batch *batch; /* of the running step */
  int layer, router_layer;   /* where it is */
  int stage;                 /* enum colibri_stage */
  uint64_t began, left_at;   /* when the step began; when it was last handed out */
};

enum colibri_stage {
  COLIBRI_STAGE_IDLE = 0,
  COLIBRI_STAGE_ROUTED = 1,  /* handed out: nothing of the layer's experts is done */
  COLIBRI_STAGE_LOCAL = 2,   /* handed out: the experts that are computed here are done */
  COLIBRI_STAGE_LAYERS = 3   /* stands before layers computed elsewhere */
};

/* Looks whether processes of active lanes have ended; their lanes get a new epoch. Returns how many were found dead. */
int colibri_session_reap(colibri_session *s);
/* Kills the processes of active lanes that hold a task of generation g, which is `phase`, and have held it up for `ms`. */
void colibri_session_kill_holders(colibri_session *s, uint64_t g, const colibri_phase *phase, int32_t ms);

/* A worker whose lanes are threads of this process: it uses the session's own mappings, so that ThreadSanitizer, which goes by addresses, sees how
 * the lanes synchronise (worker.c). */
int colibri_worker_attach_session(colibri_session *session, colibri_worker **out, colibri_error *err);

/* Writes to tell, if that has yet to be done. */
void colibri_session_told(colibri_session *s);
/* Ends an operation of the step: what has passed since the one before is its time. Returns the time now. */
uint64_t colibri_op_end(colibri_session *s, int op);
/* Makes every READY lane part of what is run next. COLIBRI_ENOLANES if there is none, nor one of the front end's. */
int colibri_session_gather(colibri_session *s, colibri_error *err);
/* Packs each expert's rows into a mini-batch: expert_first, pair_row, pair_weight (row_pairs) of the arena. ids, weights [n_rows, top_k]. rerouted: rows that
 * damping changed, for the telemetry; COLIBRI_UNCOUNTED leaves it alone. */
#define COLIBRI_UNCOUNTED (-1)
void colibri_session_dispatch(colibri_session *s, int layer, const int32_t *ids, const float *weights, int rerouted);
/* The experts' phases, without those in skip[]. */
void colibri_session_experts(colibri_session *s, int layer);
/* Makes x0 of x1 and the outputs, where the down products have not. */
void colibri_session_combine(colibri_session *s, int layer);
/* Sets up wanted[] and missing[] of a layer that has been routed. Returns how many experts are wanted from elsewhere. */
int colibri_remote_find(colibri_session *s, int layer);
/* The end of the range of layers computed elsewhere that begins with this one; 0: none does. */
int colibri_remote_range(const colibri_session *s, int layer);
/* Memory of remote.c. Nonzero if there is none. */
int colibri_remote_open(colibri_session *s);
void colibri_remote_close(colibri_session *s);

/* Publishes a phase of the tasks already written to team->tasks, works on it and waits until all are done. */
void colibri_phase_run(colibri_session *s, int op, int layer, int n_tasks, int fused_kv);

#endif
