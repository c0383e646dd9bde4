/* test_guard.c - no step and no task takes or gives back memory: the guard (guard.h) ends whoever does.
 *
 * First the guard itself is seen to work, call by call, in children of this process. */
#include "team_run.h"

#include "guard.h"
#include "parts.h"

#ifdef COLIBRI_GUARD

/* ---------------------------------------------------------------- the guard */

static void *volatile kept; /* so that the compiler leaves the calls in */

static void call_malloc(void) { kept = malloc(10); }
static void call_calloc(void) { kept = calloc(3, 10); }
static void call_realloc(void) { kept = realloc(kept, 100); }
static void call_free(void) { free(kept); }
static void call_aligned_alloc(void) { kept = aligned_alloc(64, 64); }
static void call_posix_memalign(void) {
  void *p;
  if (!posix_memalign(&p, 64, 64)) kept = p;
}
static void call_mmap(void) { kept = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }
static void call_munmap(void) { munmap(kept, 4096); }
static void call_in_libc(void) { kept = strdup("a copy"); } /* its malloc is the C library's own call */

/* Runs call in a child within the guard: what it wrote into text, and its status. */
static int child_status(void (*call)(void), char *text, size_t room) {
  int to[2], status = 0;
  if (pipe(to)) exit(2);
  kept = malloc(10);
  pid_t pid = fork();
  if (!pid) {
    dup2(to[1], STDERR_FILENO);
    colibri_guard_enter();
    call();
    _exit(0);
  }
  close(to[1]);
  size_t at = 0;
  for (ssize_t n; at < room - 1 && (n = read(to[0], text + at, room - 1 - at)) > 0;) at += (size_t)n;
  text[at] = 0;
  close(to[0]);
  waitpid(pid, &status, 0);
  free(kept);
  return status;
}

static void test_the_guard(void) {
  struct { const char *name; void (*call)(void); } calls[] = {
      {"malloc", call_malloc}, {"calloc", call_calloc}, {"realloc", call_realloc}, {"free", call_free}, {"aligned_alloc", call_aligned_alloc},
      {"posix_memalign", call_posix_memalign}, {"mmap", call_mmap}, {"munmap", call_munmap}, {"malloc", call_in_libc},
  };
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    char text[4096] = "";
    int status = child_status(calls[i].call, text, sizeof text);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && strstr(text, calls[i].name), "%s is not caught (status %d): %s", calls[i].name, status, text);
  }
  colibri_guard_enter(), colibri_guard_enter();
  colibri_guard_leave(), colibri_guard_leave();
  free(malloc(10)); /* outside again */
}

#endif

/* ---------------------------------------------------------------- steps */

static const random_shape shapes[] = {
    {.layers = 2, .hidden = 224, .heads = 6, .kv_heads = 3, .head_dim = 24, .ffn = 352, .experts = 5, .top_k = 2, .vocab = 291, .context = 256, .window = 19,
     .format = COLIBRI_INT4},
    {.layers = 2, .hidden = 96, .heads = 4, .kv_heads = 1, .head_dim = 40, .ffn = 64, .experts = 40, .top_k = 8, .vocab = 259, .context = 256, .format = COLIBRI_BF16},
    {.layers = 1, .hidden = 96, .heads = 4, .kv_heads = 4, .head_dim = 32, .ffn = 160, .experts = 1, .top_k = 1, .vocab = 259, .context = 256, .format = COLIBRI_F32},
};

/* Prefill, decode, mixed batches and every way to sample (team_run.h), with lanes as threads of this process, whose tasks the guard sees; a lane that dies is a
 * process, whose tasks it need not see. A step that is refused counts too. */
static void run_guarded(const colibri_model *m, int split, int trace, int nodes) {
  colibri_session_options options = run_options(1);
  options.split_down = split, options.trace_routes = trace;
  colibri_session *s = run_open(m, options);
  colibri_worker *w = attach_threads(s);
  lane_thread lanes[LANES];
  for (int i = 0; nodes > 1 && i <= LANES; i++) colibri_lane_place(s, i, node_numbers[i % nodes]);
  threads_start(s, w, lanes, 2);
  run want = run_all(s, 80);
  for (int chunk = 1; chunk < 80; chunk += 13) {
    run got = run_all(s, chunk);
    run_compare(&want, &got, "guarded steps");
  }
  colibri_batch nothing = {.n_seqs = 0};
  colibri_error err;
  CHECK(colibri_step(s, &nothing, NULL, NULL, NULL, &err) == COLIBRI_EINVAL, "an empty batch was run");
  threads_stop(s, lanes, 2);
  colibri_worker_detach(w);
  colibri_session_close(s);
}

#ifndef __SANITIZE_THREAD__
static void run_with_deaths(const colibri_model *m) {
  colibri_session_options options = run_options(1);
  colibri_session *s = run_open(m, options);
  run want = run_all(s, 80);
  run_deaths(m, s, &want, SIGKILL, 3);
  colibri_session_close(s);
}
#endif

int main(void) {
#ifdef COLIBRI_GUARD
  test_the_guard();
#else
  printf("guard: built without COLIBRI_GUARD (a sanitizer has an allocator of its own): steps run unguarded\n");
#endif
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    uint32_t seed = 3;
    int whole = random_model_fd(&shapes[i], 11);
    dealt d = deal(whole, 3, deal_at_random, &seed);
    colibri_model *plain = NULL, *placed = deal_open(&d);
    if (colibri_model_open_fd(whole, &plain, NULL)) return 2;
    for (int split = 0; split <= 1; split++) {
      run_guarded(plain, split, split, 1);
      run_guarded(placed, split, 1 - split, 3);
    }
#ifndef __SANITIZE_THREAD__
    run_with_deaths(placed);
#endif
    colibri_model_close(plain);
    colibri_model_close(placed);
    deal_close(&d);
    close(whole);
  }
  return check_result("guard");
}
