/* test_placement.c - where weights lie and where lanes run decides on who computes what, and never on a bit of the result.
 *
 * Nodes are pretended: memory files with node numbers. */
#include "team_run.h"

#include "cut.h"
#include "parts.h"

static const random_shape shape = {.layers = 2, .hidden = 224, .heads = 6, .kv_heads = 3, .head_dim = 24, .ffn = 352, .experts = 5, .top_k = 2,
                                   .vocab = 291, .context = 256, .window = 19, .format = COLIBRI_INT4};
#ifdef __SANITIZE_THREAD__
#define FORMAT_STEP 3 /* what ThreadSanitizer looks at is the same for all: the first and the last */
#else
#define FORMAT_STEP 1
#endif
static const char *const format_names[] = {"f32", "bf16", "int8", "int4"};

/* ---------------------------------------------------------------- bits */

static run run_once(const colibri_model *model, int split, int node, int chunk) {
  colibri_session_options options = run_options(1);
  options.split_down = split;
  colibri_session *s = run_open(model, options);
  CHECK(!colibri_lane_place(s, LANES, node), "the front end's lane is not placed");
  run r = run_all(s, chunk);
  CHECK(r.homed == colibri_lane_homed(s, LANES) && r.local == colibri_lane_local(s, LANES), "the steps and the lane count differently");
  colibri_session_close(s);
  return r;
}

/* One lane on each node in turn: the same tasks have a home each time, and each is local once. */
static void test_one_lane(int format, const colibri_model *m, const run *want, int nodes) {
  for (int split = 0; split <= 1; split++) {
    uint32_t local = 0, homed = 0;
    for (int node = -1; node < nodes; node++) {
      run got = run_once(m, split, node < 0 ? -1 : node_numbers[node], 23);
      run_compare(want, &got, format_names[format]);
      CHECK(node >= 0 || !got.local, "%u tasks are local to a lane that is nowhere", got.local);
      CHECK(node <= 0 || got.homed == homed, "%u tasks have a home, then %u", homed, got.homed);
      CHECK((nodes > 1) == (got.homed > 0), "%s on %d nodes: %u tasks have a home", format_names[format], nodes, got.homed);
      homed = got.homed, local += got.local;
    }
    CHECK(local == homed, "of %u tasks with a home %u were at home", homed, local);
  }
}

/* Lanes here and there: on the model's nodes, on one that holds nothing, and unknown. */
static void test_lanes(const colibri_model *m, const run *want, int nodes, int split, int n) {
  colibri_session_options options = run_options(n % 2);
  options.split_down = split;
  colibri_session *s = run_open(m, options);
  colibri_worker *w = attach_threads(s);
  lane_thread lanes[LANES];
  for (int i = 0; i <= LANES; i++) colibri_lane_place(s, i, i == 2 ? 900 : i == 3 ? -1 : node_numbers[i % nodes]);
  threads_start(s, w, lanes, n);
  run got = run_all(s, 5 + 13 * n);
  run_compare(want, &got, split ? "lanes on nodes, split" : "lanes on nodes");
  uint64_t homed = 0, local = 0;
  for (int i = 0; i <= LANES; i++) homed += colibri_lane_homed(s, i), local += colibri_lane_local(s, i);
  CHECK(homed == got.homed && local == got.local, "lanes count %llu and %llu tasks, steps %u and %u", (unsigned long long)homed,
        (unsigned long long)local, got.homed, got.local);
  threads_stop(s, lanes, n);
  colibri_worker_detach(w);
  colibri_session_close(s);
}

static void test_format(int format) {
  random_shape own = shape;
  own.format = format;
  int whole = random_model_fd(&own, 7);
  colibri_model *plain = NULL;
  if (colibri_model_open_fd(whole, &plain, NULL)) exit(2);
  run want = run_once(plain, 0, -1, 80), split = run_once(plain, 1, -1, 80);
  run_compare(&want, &split, "split down products");
  for (int nodes = 1; nodes <= NODES; nodes++) {
    uint32_t seed = (uint32_t)(nodes + 10 * format);
    dealt d = deal(whole, nodes, deal_at_random, &seed);
    colibri_model *m = deal_open(&d);
    test_one_lane(format, m, &want, nodes);
    for (int n = 1; n <= LANES; n++) test_lanes(m, &want, nodes, (n + nodes) % 2, n);
    colibri_model_close(m);
    deal_close(&d);
  }
  colibri_model_close(plain);
  close(whole);
}

/* ---------------------------------------------------------------- pieces */

/* Deals the pages of every matrix as placement by rows does: cut at units * i / nodes, a page going where its middle does. data: the plain model. */
static int deal_by_rows(uint64_t byte, int nodes, const void *data) {
  const colibri_model *m = data;
  const colibri_matrix *all[] = {&m->layers[0].qkv, &m->layers[0].o, &m->layers[0].experts[0].gate_up, &m->layers[0].experts[0].down,
                                 &m->layers[0].experts[1].gate_up, &m->layers[0].experts[1].down, &m->head};
  int tail = 0; /* for a page whose middle is in no matrix */
  for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
    int width = k == 2 || k == 4 ? 2 : 1, units = all[k]->panels / width;
    int64_t unit = (int64_t)all[k]->groups * colibri_block_bytes(all[k]->format) * width;
    int64_t at = (const char *)m->map + byte - all[k]->data + PAGE / 2;
    if (at >= units * unit && at - PAGE / 2 < units * unit) tail = nodes - 1;
    if (at < 0 || at >= units * unit) continue;
    int node = nodes - 1;
    while (node && at < (int64_t)units * node / nodes * unit) node--;
    return node;
  }
  return tail;
}

/* Every piece of a spread matrix lies between two of the cuts, and its home is the node there. */
static void check_pieces(const colibri_session *s, int n, int units, int nodes, const char *what) {
  int spread = 0;
  for (int t = 0; t < n; t++) {
    const colibri_task *task = &s->team->tasks[t];
    int node = nodes - 1, home = atomic_load(&s->team->homes[t]);
    while (node && task->b0 < units * node / nodes) node--;
    CHECK(task->b1 <= (int)((int64_t)units * (node + 1) / nodes), "%s: panels %d to %d lie on two of %d nodes", what, task->b0, task->b1, nodes);
    CHECK(home == node_numbers[node], "%s: panels %d to %d of %d are at home on %d, not %d", what, task->b0, task->b1, units, home, node_numbers[node]);
    spread |= 1 << node;
  }
  CHECK(spread == (1 << nodes) - 1, "%s: not every node has a piece", what);
}

static void test_pieces(int format) {
  random_shape own = shape;
  own.format = format, own.ffn = 416, own.hidden = 288, own.layers = 1, own.experts = 2; /* 26 panels of gate/up, 9 of down: no power of two */
  int whole = random_model_fd(&own, 3);
  colibri_model *plain = NULL;
  if (colibri_model_open_fd(whole, &plain, NULL)) exit(2);
  for (int nodes = 2; nodes <= NODES; nodes++) {
    dealt d = deal(whole, nodes, deal_by_rows, plain);
    colibri_model *m = deal_open(&d);
    const colibri_layer *layer = &m->layers[0];
    for (int split = 0; split <= 1; split++) {
      colibri_session_options options = run_options(1);
      options.split_down = split;
      colibri_session *s = run_open(m, options);
      run r = run_all(s, 40);
      CHECK(r.homed > 0, "nothing has a home");
      for (int lanes = 0; lanes <= LANES; lanes++) {
        s->n_active = lanes;
        check_pieces(s, colibri_cut_matrix(s, &layer->qkv, 5), layer->qkv.panels, nodes, "qkv");
        check_pieces(s, colibri_cut_matrix(s, &layer->o, 100), layer->o.panels, nodes, "o");
        check_pieces(s, colibri_cut_matrix(s, &m->head, 1), m->head.panels, nodes, "head");
        check_pieces(s, colibri_cut_gate_up(s, 0), layer->experts[0].gate_up.panels / 2, nodes, "gate_up");
        check_pieces(s, colibri_cut_down(s, 0), layer->experts[0].down.panels, nodes, "down");
      }
      s->n_active = 0;
      colibri_session_close(s);
    }
    colibri_model_close(m);
    deal_close(&d);
  }
  colibri_model_close(plain);
  close(whole);
}

/* ---------------------------------------------------------------- order */

static const float *order_base;
static int order_stride, order_seen[64], order_n;

static int note_row(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  (void)k_valid, (void)groups, (void)g0, (void)g1, (void)row;
  order_seen[order_n++] = (int)((x - order_base) / order_stride);
  return 0;
}

/* Publishes n tasks of a row each, with these homes, and lets the front end's lane do them all: order_seen are the rows as they came. */
static void work_on(colibri_session *s, int n, const int *homes, int rank, int lanes) {
  colibri_phase phase = {.op = COLIBRI_OP_PREPARE_O, .n_tasks = n, .n_lanes = lanes, .homed = homes != NULL};
  for (int t = 0; t < n; t++) {
    s->team->tasks[t] = (colibri_task){.a0 = t, .a1 = t + 1};
    atomic_store(&s->team->homes[t], (int16_t)(homes ? homes[t] : 0));
  }
  s->generation++;
  colibri_phase_store(&s->team->phases[s->generation & 1], &phase);
  atomic_store(&s->team->generation, s->generation);
  order_n = 0;
  CHECK(colibri_lane_work(&s->env, s->generation, &phase, rank) == n, "not all %d tasks were done", n);
}

static void check_order(const int *want, int n, const char *what) {
  for (int i = 0; i < n; i++) CHECK(order_seen[i] == want[i], "%s: task %d came as number %d, not %d", what, order_seen[i], i, want[i]);
}

/* The second of three lanes on node 2, which runs the fourth of four lanes: its share of node 2's tasks, the others of node 2, then all from its own
 * share of the list on. */
static void test_order(void) {
  colibri_model *model = run_model(&shape, 5);
  colibri_session *s = run_open(model, run_options(1));
  colibri_kernels recording = *s->env.kernels;
  const colibri_kernels *real = s->env.kernels;
  colibri_lane *self = &s->team->lanes[LANES];
  int homes[8] = {2, 0, 2, -1, 2, 2, 0, 2};
  recording.prepare[model->layers[0].o.format] = note_row;
  s->env.kernels = &recording;
  order_base = s->env.arena.att, order_stride = s->env.arena.dims.att_pad;
  atomic_store(&self->place, 1u << 16 | 3u);
  colibri_lane_place(s, LANES, 2);
  work_on(s, 8, homes, 3, 4);
  check_order((const int[]){2, 4, 5, 7, 0, 6, 1, 3}, 8, "on its node");
  work_on(s, 8, NULL, 3, 4);
  check_order((const int[]){6, 7, 0, 1, 2, 3, 4, 5}, 8, "without homes");
  colibri_lane_place(s, LANES, 5);
  work_on(s, 8, homes, 1, 4);
  check_order((const int[]){2, 3, 4, 5, 6, 7, 0, 1}, 8, "on a node without tasks");
  colibri_lane_place(s, LANES, -1);
  work_on(s, 8, homes, 9, 4); /* a rank of a larger step: taken as one of these lanes' */
  check_order((const int[]){2, 3, 4, 5, 6, 7, 0, 1}, 8, "nowhere");
  s->env.kernels = real;
  colibri_session_close(s);
  colibri_model_close(model);
}

/* Lanes are numbered within their node when a step gathers them. */
static void test_numbers(void) {
  uint32_t seed = 4;
  int whole = random_model_fd(&shape, 5), at[LANES + 1] = {2, 0, 2, -1, 2}, want[LANES + 1][2] = {{0, 3}, {0, 1}, {1, 3}, {0, 0}, {2, 3}};
  dealt d = deal(whole, 2, deal_at_random, &seed);
  colibri_model *m = deal_open(&d);
  colibri_session *s = run_open(m, run_options(1));
  colibri_worker *w = attach_threads(s);
  lane_thread lanes[LANES];
  for (int i = 0; i <= LANES; i++) CHECK(!colibri_lane_place(s, i, at[i]), "lane %d is not placed", i);
  threads_start(s, w, lanes, LANES);
  run_all(s, 80);
  for (int i = 0; i <= LANES; i++) {
    uint32_t place = atomic_load(&s->team->lanes[i].place);
    CHECK(place >> 16 == (uint32_t)want[i][0] && (place & 0xffff) == (uint32_t)want[i][1], "lane %d is number %u of %u", i, place >> 16, place & 0xffff);
  }
  CHECK(colibri_lane_place(s, LANES + 1, 0) == COLIBRI_EINVAL && colibri_lane_place(s, -1, 0) == COLIBRI_EINVAL, "a lane there is not was placed");
  CHECK(colibri_lane_place(s, 0, -2) == COLIBRI_EINVAL && colibri_lane_place(s, 0, COLIBRI_MAX_NODES) == COLIBRI_EINVAL, "a node there is not was taken");
  threads_stop(s, lanes, LANES);
  colibri_worker_detach(w);
  colibri_session_close(s);
  colibri_model_close(m);
  deal_close(&d);
  close(whole);
}

/* ---------------------------------------------------------------- keys and values */

/* A KV head's range holds that head's keys and values and nothing else: what a step writes changes in every range, and outside of them only before. */
static void test_kv_ranges(int kv_blocks) {
  colibri_model *model = run_model(&shape, 5);
  colibri_session_options options = run_options(1);
  options.kv_blocks = kv_blocks;
  colibri_session *s = run_open(model, options);
  uint64_t offset, bytes, end = 0;
  run_all(s, 80);
  for (int head = 0; head < shape.kv_heads; head++) {
    CHECK(!colibri_session_kv_range(s, head, &offset, &bytes), "head %d has no range", head);
    CHECK(offset % (bytes >= 2u << 20 ? 2u << 20 : PAGE) == 0 && bytes % PAGE == 0, "head %d: %llu bytes at %llu", head, (unsigned long long)bytes,
          (unsigned long long)offset);
    CHECK(!end || offset == end, "head %d starts at %llu, the one before ends at %llu", head, (unsigned long long)offset, (unsigned long long)end);
    end = offset + bytes;
    uint64_t used = 0;
    for (uint64_t i = 0; i < bytes; i++) used += s->arena_map[offset + i] != 0;
    CHECK(used > 1000, "head %d has written %llu bytes into its range", head, (unsigned long long)used);
  }
  CHECK(end <= s->arena_bytes, "the ranges end at %llu, behind the arena", (unsigned long long)end);
  CHECK(colibri_session_kv_range(s, -1, &offset, &bytes) == COLIBRI_EINVAL && colibri_session_kv_range(s, shape.kv_heads, &offset, &bytes) == COLIBRI_EINVAL,
        "a head there is not has a range");
  colibri_session_close(s);
  colibri_model_close(model);
}

/* ---------------------------------------------------------------- deaths */

#ifndef __SANITIZE_THREAD__
static void test_deaths(void) {
  uint32_t seed = 21;
  int whole = random_model_fd(&shape, 7);
  dealt d = deal(whole, 3, deal_at_random, &seed);
  colibri_model *m = deal_open(&d);
  run want = run_once(m, 0, -1, 80);
  colibri_session_options options = run_options(1);
  options.split_down = 1;
  colibri_session *s = run_open(m, options);
  for (int i = 0; i <= LANES; i++) colibri_lane_place(s, i, node_numbers[i % 3]);
  run_deaths(m, s, &want, SIGKILL, 8);
  colibri_session_close(s);
  colibri_model_close(m);
  deal_close(&d);
  close(whole);
}
#endif

int main(void) {
  for (int format = 0; format < COLIBRI_FORMATS; format += FORMAT_STEP) test_format(format);
  test_pieces(COLIBRI_F32);  /* a panel is whole pages */
  test_pieces(COLIBRI_INT8); /* cuts are rounded to pages */
  test_order();
  test_numbers();
  test_kv_ranges(64);
  test_kv_ranges(2000);
#ifdef __SANITIZE_THREAD__
  printf("placement: lanes as processes left out: ThreadSanitizer does not follow them\n");
#else
  test_deaths();
#endif
  return check_result("placement");
}
