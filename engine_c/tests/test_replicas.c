/* test_replicas.c - experts that move and have copies: homes follow them, work is shared out evenly, and no bit changes, also while it happens.
 *
 * Nodes are pretended: memory files with node numbers. */
#include "team_run.h"

#include "cut.h"
#include "parts.h"

static const random_shape shape = {.layers = 2, .hidden = 224, .heads = 6, .kv_heads = 3, .head_dim = 24, .ffn = 352, .experts = 5, .top_k = 2,
                                   .vocab = 291, .context = 256, .window = 19, .format = COLIBRI_INT8};

/* Everything on the first node but the last byte's page: the experts are where model_place says. */
static int deal_first(uint64_t byte, int nodes, const void *data) {
  uint64_t size = *(const uint64_t *)data, pages = (size + PAGE - 1) / PAGE, left = pages - 1 - byte / PAGE;
  return left < (uint64_t)nodes - 1 ? nodes - 1 - (int)left : 0;
}

typedef struct placed_model { dealt parts; colibri_model *model; int whole; } placed_model;

static placed_model open_placed(int nodes) {
  placed_model p = {.whole = random_model_fd(&shape, 7)};
  uint64_t size = (uint64_t)lseek(p.whole, 0, SEEK_END);
  p.parts = deal(p.whole, nodes, deal_first, &size);
  p.model = deal_open(&p.parts);
  return p;
}

static void close_placed(placed_model *p) {
  colibri_model_close(p->model);
  deal_close(&p->parts);
  close(p->whole);
}

static void place(colibri_model *m, int layer, int expert, const int32_t *nodes, int n) {
  colibri_error err;
  CHECK(!colibri_model_place(m, layer, expert, nodes, n, &err), "layer %d, expert %d: %s", layer, expert, err.message);
}

/* ---------------------------------------------------------------- homes */

/* Work of each node in the list just cut. */
static void sum_homes(const colibri_session *s, int n, int64_t *work) {
  memset(work, 0, NODES * sizeof *work);
  for (int t = 0; t < n; t++)
    for (int i = 0; i < NODES; i++) {
      const colibri_task *task = &s->team->tasks[t];
      if (atomic_load(&s->team->homes[t]) == node_numbers[i]) work[i] += (int64_t)(8 + task->a1 - task->a0) * (task->b1 - task->b0);
    }
}

/* Every active expert's units come exactly once, whatever the order. */
static void check_cover(const colibri_session *s, int n, int units, const char *what) {
  const int32_t *first = s->env.arena.expert_first;
  for (int e = 0; e < shape.experts; e++) {
    int at = 0, rows = first[e + 1] - first[e];
    for (int t = 0; t < n; t++) {
      const colibri_task *task = &s->team->tasks[t];
      if (task->e != e) continue;
      CHECK(task->b0 == at && task->b1 > at && task->a0 == first[e] && task->a1 == first[e + 1], "%s: expert %d, units %d to %d behind %d", what, e,
            task->b0, task->b1, at);
      at = task->b1;
    }
    CHECK(at == (rows ? units : 0), "%s: expert %d has %d of %d units", what, e, at, units);
  }
}

/* Lanes: how many on each node, the front end's own on the last of them. */
static colibri_session *session_on(colibri_model *m, const int *lanes, int nodes) {
  colibri_session_options options = run_options(1);
  options.split_down = 1;
  colibri_session *s = run_open(m, options);
  s->n_active = 0;
  for (int i = 0; i < nodes; i++)
    for (int k = 0; k < lanes[i]; k++) {
      colibri_lane_place(s, s->n_active, node_numbers[i]);
      s->active[s->n_active] = s->n_active, s->n_active++;
    }
  s->env.lane = s->active[--s->n_active];
  return s;
}

static void set_rows(colibri_session *s, const int *rows) {
  int32_t at = 0;
  for (int e = 0; e < shape.experts; e++) s->env.arena.expert_first[e] = at, at += rows[e];
  s->env.arena.expert_first[shape.experts] = at;
}

/* A moved expert's tasks are at home where it was moved to, and back when that is taken back. */
static void test_moved(void) {
  placed_model p = open_placed(3);
  colibri_session *s = session_on(p.model, (int[]){1, 1, 2}, 3);
  int64_t work[NODES];
  set_rows(s, (int[]){0, 6, 0, 0, 3});
  for (int on = 0; on < 3; on++) {
    place(p.model, 0, 1, &node_numbers[on], 1);
    for (int down = 0; down <= 1; down++) {
      int n = down ? colibri_cut_down(s, 0) : colibri_cut_gate_up(s, 0), units = down ? 7 : 11;
      sum_homes(s, n, work);
      CHECK(work[on] == 14 * units + (on ? 0 : 11 * units), "moved to node %d, it has %lld to do", node_numbers[on], (long long)work[on]);
      check_cover(s, n, units, "moved");
    }
  }
  place(p.model, 0, 1, NULL, 0);
  sum_homes(s, colibri_cut_gate_up(s, 0), work);
  CHECK(work[0] == 25 * 11, "taken back, the first node has %lld to do", (long long)work[0]);
  sum_homes(s, colibri_cut_gate_up(s, 1), work);
  CHECK(work[0] == 25 * 11, "the other layer never changed, but its first node has %lld to do", (long long)work[0]);
  s->n_active = 0, s->env.lane = LANES;
  colibri_session_close(s);
  close_placed(&p);
}

/* An expert with a copy on each node goes where there is least to do: nodes differ by at most one of its pieces, by their lanes. */
static void test_even(const int *lanes, const int *rows, int nodes) {
  placed_model p = open_placed(nodes);
  colibri_session *s = session_on(p.model, lanes, nodes);
  int64_t work[NODES], largest = 0;
  for (int e = 0; e < shape.experts; e++) place(p.model, 0, e, &node_numbers[e % nodes], 1);
  place(p.model, 0, 0, node_numbers, nodes);
  set_rows(s, rows);
  int n = colibri_cut_gate_up(s, 0);
  check_cover(s, n, 11, "even");
  sum_homes(s, n, work);
  for (int t = 0; t < n; t++) {
    const colibri_task *task = &s->team->tasks[t];
    int64_t own = (int64_t)(8 + task->a1 - task->a0) * (task->b1 - task->b0);
    if (task->e == 0 && own > largest) largest = own;
  }
  for (int a = 0; a < nodes; a++)
    for (int b = 0; b < nodes; b++) {
      int fed = 0; /* node a took a piece of the copy: then b would not have been done with it sooner */
      for (int t = 0; t < n; t++) fed |= s->team->tasks[t].e == 0 && atomic_load(&s->team->homes[t]) == node_numbers[a];
      if (fed) CHECK(work[a] * lanes[b] <= (work[b] + largest) * lanes[a], "node %d has %lld to do for %d lanes, node %d %lld for %d", a, (long long)work[a],
                     lanes[a], b, (long long)work[b], lanes[b]);
    }
  s->n_active = 0, s->env.lane = LANES;
  colibri_session_close(s);
  close_placed(&p);
}

/* With nothing else to do, many phases of one small piece go to each copy as often; a node without lanes gets none. */
static void test_turns(void) {
  placed_model p = open_placed(4);
  colibri_session *s = session_on(p.model, (int[]){1, 1, 0, 1}, 4);
  int seen[NODES] = {0};
  place(p.model, 0, 2, node_numbers, 4);
  set_rows(s, (int[]){0, 0, 1, 0, 0});
  for (int phase = 0; phase < 400; phase++) {
    s->generation++;
    CHECK(colibri_cut_gate_up(s, 0) >= 4, "fewer pieces than copies");
    for (int i = 0; i < NODES; i++) seen[i] += atomic_load(&s->team->homes[0]) == node_numbers[i];
  }
  CHECK(!seen[2] && seen[0] >= 100 && seen[1] >= 100 && seen[3] >= 100, "first pieces by node: %d, %d, %d, %d", seen[0], seen[1], seen[2], seen[3]);
  s->n_active = 0, s->env.lane = LANES;
  colibri_session_close(s);
  close_placed(&p);
}

/* ---------------------------------------------------------------- while steps run */

typedef struct mover { colibri_model *model; int whole, nodes; _Atomic int stop, moves; } mover;

/* A descriptor of the container's size that holds the bytes of one expert, the same or, to see that it is read, others. */
static int copy_expert(const colibri_model *m, int layer, int expert, int whole, uint64_t *offset, uint64_t *bytes, char flip) {
  const colibri_expert *x = &m->layers[layer].experts[expert];
  uint64_t end = (uint64_t)(x->down.data - (const char *)m->map) + (uint64_t)x->down.panels * (uint64_t)x->down.groups * (uint64_t)colibri_block_bytes(x->down.format);
  *offset = (uint64_t)(x->gate_up.data - (const char *)m->map), *bytes = (end + PAGE - 1) / PAGE * PAGE - *offset;
  if (*offset + *bytes > m->map_bytes) *bytes = m->map_bytes - *offset;
  int fd = memfd_create("copy", MFD_CLOEXEC);
  char *data = malloc(*bytes);
  if (fd < 0 || !data || ftruncate(fd, (off_t)m->map_bytes) || pread(whole, data, *bytes, (off_t)*offset) != (ssize_t)*bytes) exit(2);
  for (uint64_t i = 0; i < *bytes; i++) data[i] = (char)(data[i] ^ flip);
  if (pwrite(fd, data, *bytes, (off_t)*offset) != (ssize_t)*bytes) exit(2);
  free(data);
  return fd;
}

static void *keep_moving(void *argument) {
  mover *mv = argument;
  for (uint32_t dice = 1; !atomic_load(&mv->stop); mv->moves++) {
    uint64_t offset, bytes;
    int32_t on[NODES];
    dice = dice * 1664525u + 1013904223u;
    int layer = dice >> 30 & 1, expert = (int)((dice >> 20) % 5), n = (int)((dice >> 10) % (unsigned)(mv->nodes + 1));
    for (int i = 0; i < n; i++) on[i] = node_numbers[(i + (int)(dice >> 5)) % mv->nodes];
    int fd = copy_expert(mv->model, layer, expert, mv->whole, &offset, &bytes, 0);
    colibri_error err;
    CHECK(!colibri_model_remap(mv->model, &(colibri_part){.fd = fd, .node = 3, .offset = offset, .bytes = bytes}, &err), "remap: %s", err.message);
    place(mv->model, layer, expert, on, n);
    close(fd);
    sched_yield();
  }
  return NULL;
}

/* Experts get new pages and new homes all the while, and every bit stays. */
static void test_bits(int front, int n) {
  placed_model p = open_placed(3);
  colibri_session_options options = run_options(front);
  options.split_down = 1;
  colibri_session *plain = run_open(p.model, options);
  if (!front) plain->options.front_lane = 1; /* nobody else computes in it */
  run want = run_all(plain, 23);
  colibri_session_close(plain);
  colibri_session *s = run_open(p.model, options);
  colibri_worker *w = attach_threads(s);
  lane_thread lanes[LANES];
  for (int i = 0; i <= LANES; i++) colibri_lane_place(s, i, node_numbers[i % 3]);
  threads_start(s, w, lanes, n);
  mover mv = {.model = p.model, .whole = p.whole, .nodes = 3};
  pthread_t thread;
  if (pthread_create(&thread, NULL, keep_moving, &mv)) exit(2);
  int rounds = 0;
  for (; rounds < 3 || (mv.moves < 200 && rounds < 60); rounds++) {
    run got = run_all(s, 7 + 5 * rounds);
    run_compare(&want, &got, "while experts move");
  }
  atomic_store(&mv.stop, 1);
  pthread_join(thread, NULL);
  CHECK(mv.moves > 10, "only %d moves in %d rounds", (int)mv.moves, rounds);
  threads_stop(s, lanes, n);
  colibri_worker_detach(w);
  colibri_session_close(s);
  close_placed(&p);
}

/* ---------------------------------------------------------------- remapping */

static void test_remap(void) {
  placed_model p = open_placed(2);
  colibri_error err;
  uint64_t offset, bytes;
  int fd = copy_expert(p.model, 1, 3, p.whole, &offset, &bytes, 0x55);
  const char *at = p.model->layers[1].experts[3].gate_up.data, was = *at, before = at[-1];
  colibri_part part = {.fd = fd, .node = 0, .offset = offset, .bytes = bytes};
  CHECK(!colibri_model_remap(p.model, &part, &err), "remap: %s", err.message);
  CHECK(*at == (char)(was ^ 0x55) && at[-1] == before, "the bytes read are not the new ones");
  colibri_part wrong[] = {part, part, part, part, part, part};
  wrong[0].offset++, wrong[1].bytes--, wrong[2].bytes = 0, wrong[3].offset = (p.model->map_bytes / PAGE + 1) * PAGE, wrong[4].bytes = (uint64_t)-(int64_t)PAGE, wrong[5].fd = -1;
  for (int i = 0; i < 6; i++) {
    int rc = colibri_model_remap(p.model, &wrong[i], &err);
    CHECK(rc == (i < 5 ? COLIBRI_EINVAL : COLIBRI_EIO), "wrong part %d: %d", i, rc);
    CHECK(*at == (char)(was ^ 0x55), "wrong part %d changed the mapping", i);
  }
  CHECK(!ftruncate(fd, (off_t)offset), "ftruncate");
  int empty = memfd_create("empty", MFD_CLOEXEC);
  part.fd = empty;
  CHECK(colibri_model_remap(p.model, &part, &err) == COLIBRI_EFORMAT, "a file too short was taken");
  close(empty);
  close(fd);
  close_placed(&p);
}

static void test_refusals(void) {
  placed_model p = open_placed(2);
  colibri_error err;
  const int32_t unknown = 900, known = node_numbers[1];
  CHECK(colibri_model_place(p.model, 2, 0, &known, 1, &err) == COLIBRI_EINVAL, "a layer there is not");
  CHECK(colibri_model_place(p.model, -1, 0, &known, 1, &err) == COLIBRI_EINVAL, "a layer below zero");
  CHECK(colibri_model_place(p.model, 0, 5, &known, 1, &err) == COLIBRI_EINVAL, "an expert there is not");
  CHECK(colibri_model_place(p.model, 0, 0, &unknown, 1, &err) == COLIBRI_EINVAL && strstr(err.message, "900"), "a node there is not");
  colibri_model *whole = NULL;
  CHECK(!colibri_model_open_fd(p.whole, &whole, &err), "open: %s", err.message);
  CHECK(colibri_model_place(whole, 0, 0, &known, 1, &err) == COLIBRI_EINVAL && strstr(err.message, "one node"), "a model on one node");
  colibri_model_close(whole);
  close_placed(&p);
}

int main(void) {
  test_moved();
  test_even((int[]){1, 1, 0, 0}, (int[]){9, 4, 0, 2, 1}, 2);
  test_even((int[]){1, 2, 0, 0}, (int[]){3, 40, 0, 20, 1}, 2);
  test_even((int[]){1, 1, 1, 1}, (int[]){64, 4, 8, 2, 1}, 4);
  test_even((int[]){2, 1, 1, 1}, (int[]){1, 0, 0, 0, 0}, 4);
  test_turns();
  test_remap();
  test_refusals();
  test_bits(1, 0);
  test_bits(1, 3);
  test_bits(0, 4);
  return check_result("replicas");
}
