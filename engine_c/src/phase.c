/* phase.c - the front end's side of a phase: publish, work along, wait, take over from the dead. */
#include <sched.h>
#include <unistd.h>

#include "session.h"

#define CHECK_NS 500000u /* how often a waiting front end looks for dead processes */
#define FEW_ROWS 64 /* with more, all phases are long */

static void publish(colibri_session *s, const colibri_phase *phase) {
  colibri_team *t = s->team;
  int asleep = 0;
  s->generation++;
  colibri_phase_store(&t->phases[s->generation & 1], phase);
  atomic_store(&t->generation, s->generation); /* sequentially consistent: then look who sleeps */
  for (int i = 0; i < s->n_active; i++) asleep |= (int)atomic_load(&t->lanes[s->active[i]].sleeping);
  if (asleep) colibri_team_wake(t);
}

static uint64_t done_in(const colibri_lane *lane, uint64_t g) {
  uint64_t done = atomic_load_explicit(&lane->done, memory_order_acquire);
  return done >> 16 == g ? done & 0xffff : 0;
}

/* The quick check: every lane counts what it has done on a cache line of its own. Lanes that die may take counts with them. */
static int counts_complete(const colibri_session *s, uint64_t g, int n_tasks) {
  uint64_t sum = done_in(&s->team->lanes[s->env.lane], g);
  for (int i = 0; i < s->n_active; i++) sum += done_in(&s->team->lanes[s->active[i]], g);
  return sum >= (uint64_t)n_tasks;
}

/* The slow check, by claim words. Runs what is free, which is what dead lanes left. Returns tasks still held by live lanes. */
static int settle(colibri_session *s, uint64_t g, const colibri_phase *phase) {
  int held = 0;
  for (int t = 0; t < phase->n_tasks; t++) {
    if (colibri_lane_take(&s->env, g, phase, t)) { s->stats.tasks_rerun++; continue; }
    uint64_t word = atomic_load_explicit(&s->team->claims[t].word, memory_order_acquire);
    held += !(colibri_claim_generation(word) == g && colibri_claim_state(word) == CLAIM_DONE);
  }
  return held;
}

static void wait_done(colibri_session *s, uint64_t g, const colibri_phase *phase) {
  uint64_t start = 0, checked = 0, hang = (uint64_t)s->options.hang_ms * 1000000u;
  for (unsigned spins = 0; !counts_complete(s, g, phase->n_tasks); spins++) {
    colibri_cpu_relax();
    if (spins % 64 != 63) continue;
    uint64_t now = colibri_now_ns();
    if (!start) start = checked = now;
    if (now - start > 20000) sched_yield();
    if (now - checked < CHECK_NS) continue;
    checked = now;
    s->stats.lanes_lost += (uint32_t)colibri_session_reap(s);
    if (!settle(s, g, phase)) return;
    if (hang && now - start > hang) colibri_session_kill_holders(s, g, phase, (int32_t)((now - start) / 1000000u));
  }
}

void colibri_session_told(colibri_session *s) {
  const uint64_t one = 1;
  if (s->tell < 0) return;
  if (write(s->tell, &one, sizeof one) != sizeof one) { /* full: its reader has yet to see the last writes */ }
  s->tell = -1;
}

uint64_t colibri_op_end(colibri_session *s, int op) {
  uint64_t now = colibri_now_ns();
  s->stats.op_ns[op] += now - s->op_began;
  return s->op_began = now;
}

void colibri_phase_run(colibri_session *s, int op, int layer, int n_tasks, int fused_kv) {
  colibri_phase phase = {.op = op, .layer = layer, .n_tasks = n_tasks, .n_lanes = s->n_active + s->options.front_lane, .fused_kv = fused_kv, .homed = s->homed};
  if (!phase.n_lanes) phase.n_lanes = 1; /* every worker left: the front end finishes the step itself */
  s->homed = 0;
  s->stats.phases++;
  s->stats.tasks += (uint32_t)n_tasks;
  publish(s, &phase);
  if (op == COLIBRI_OP_GATE_UP || s->n_rows > FEW_ROWS) colibri_session_told(s);
  if (s->options.front_lane) colibri_lane_work(&s->env, s->generation, &phase, s->n_active);
  uint64_t t = colibri_now_ns();
  wait_done(s, s->generation, &phase);
  s->stats.wait_ns += colibri_op_end(s, op) - t;
}
