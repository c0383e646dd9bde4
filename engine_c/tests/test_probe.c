/* test_probe.c - probes say how much they did and when, on every instruction set, and refuse what they cannot do. */
#include <stdlib.h>

#include "check.h"
#include "colibri.h"

#define BYTES (1 << 20)

static char *memory;

static void check_span(const char *what, const char *isa, const colibri_probe *p, uint64_t work) {
  CHECK(p->work == work, "%s on %s: %llu", what, isa, (unsigned long long)p->work);
  CHECK(p->end_ns > p->begin_ns, "%s on %s took no time", what, isa);
}

static void test_memory(const char *isa) {
  colibri_probe p;
  colibri_error err;
  CHECK(colibri_probe_fill(memory, BYTES, &p, &err) == COLIBRI_OK, "%s", err.message);
  check_span("fill", isa, &p, BYTES);
  CHECK(memory[0] && memory[BYTES - 1], "not written");
  CHECK(colibri_probe_read(memory, BYTES, 3, &p, &err) == COLIBRI_OK, "%s", err.message);
  check_span("read", isa, &p, 3 * BYTES);
  CHECK(colibri_probe_read(memory + 64, COLIBRI_PROBE_ALIGN, 1, &p, &err) == COLIBRI_EINVAL, "unaligned");
  CHECK(colibri_probe_read(memory, COLIBRI_PROBE_ALIGN + 64, 1, &p, &err) == COLIBRI_EINVAL, "a part of the unit");
  CHECK(colibri_probe_read(memory, BYTES, 0, &p, &err) == COLIBRI_EINVAL, "no pass");
  CHECK(colibri_probe_fill(memory, 0, &p, &err) == COLIBRI_EINVAL, "nothing to fill");
}

static void test_compute(const char *isa) {
  colibri_probe p;
  colibri_error err;
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    CHECK(colibri_probe_compute(format, 1000000, &p, &err) == COLIBRI_OK, "%s", err.message);
    CHECK(p.work > 0 && p.end_ns - p.begin_ns >= 1000000, "format %d on %s", format, isa);
  }
  CHECK(colibri_probe_compute(COLIBRI_FORMATS, 1, &p, &err) == COLIBRI_EINVAL, "no such format");
}

static void test_route(const char *isa) {
  static const colibri_route_probe good[] = {{8, 2, 16, 0, 10}, {8, 2, 16, 64, 10}, {64, 8, 3, 0, 1}, {1, 1, 1, 0, 1}};
  static const colibri_route_probe bad[] = {{8, 9, 16, 0, 1}, {8, 2, 0, 0, 1}, {8, 2, 16, -1, 1}, {8, 2, 16, 0, 0}, {8, 0, 16, 0, 1}};
  colibri_probe p;
  colibri_error err;
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    CHECK(colibri_probe_route(&good[i], &p, &err) == COLIBRI_OK, "%s", err.message);
    check_span("route", isa, &p, (uint64_t)(good[i].tokens * good[i].calls));
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK(colibri_probe_route(&bad[i], &p, &err) == COLIBRI_EINVAL, "wish %zu was taken", i);
}

static void test(const char *isa) {
  test_memory(isa);
  test_compute(isa);
  test_route(isa);
}

int main(void) {
  memory = aligned_alloc(4096, BYTES);
  if (!memory) return 1;
  check_each_isa(test);
  free(memory);
  return check_result("test_probe");
}
