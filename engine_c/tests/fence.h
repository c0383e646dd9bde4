/* fence.h - memory between two inaccessible pages, so that a kernel that reads or writes a byte too far faults; and bitwise comparison. */
#ifndef COLIBRI_TEST_FENCE_H
#define COLIBRI_TEST_FENCE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "kernels.h"

#define FENCE_PAGE ((size_t)sysconf(_SC_PAGESIZE)) /* up to 64 KiB on Arm */
#define FENCE_MAX 512

static struct fence {
  char *map;
  size_t bytes;
} fences[FENCE_MAX];
static int fence_count;

/* `bytes` of memory that end at an inaccessible page (at_end) or start behind one, filled with 0xA5. Its alignment is then whatever `bytes` leaves or
 * a whole page. */
static inline void *fence_bytes(size_t bytes, int at_end) {
  size_t room = (bytes + FENCE_PAGE - 1) / FENCE_PAGE * FENCE_PAGE;
  char *map = mmap(NULL, room + 2 * FENCE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED || fence_count == FENCE_MAX || mprotect(map, FENCE_PAGE, PROT_NONE) || mprotect(map + FENCE_PAGE + room, FENCE_PAGE, PROT_NONE)) {
    fprintf(stderr, "fence: out of memory or fences\n");
    exit(2);
  }
  fences[fence_count++] = (struct fence){map, room + 2 * FENCE_PAGE};
  char *p = map + FENCE_PAGE + (at_end ? room - bytes : 0);
  memset(p, 0xA5, bytes);
  return p;
}
/* At a random one of the two fences. */
static inline float *fence_floats(size_t n) { return fence_bytes(n * sizeof(float), (int)(check_random() & 1)); }

static inline void fence_release(void) {
  while (fence_count) {
    fence_count--;
    munmap(fences[fence_count].map, fences[fence_count].bytes);
  }
}

static inline int random_int(int lo, int hi) { return lo + (int)(check_random() % (uint32_t)(hi - lo + 1)); }

/* Values of several kinds: ordinary; over the whole range of exponents; tiny, subnormals among them; mostly zeros of both signs. */
enum value_kind { VALUES_NORMAL, VALUES_WIDE, VALUES_TINY, VALUES_ZERO, VALUE_KINDS };
static inline void fill_floats(float *x, size_t n, int kind) {
  for (size_t i = 0; i < n; i++) {
    uint32_t u = check_random();
    float wide;
    u = (u & 0x807fffffu) | (64u + (u >> 23 & 127)) << 23; /* 2^-63 .. 2^63 */
    memcpy(&wide, &u, sizeof wide);
    switch (kind) {
      case VALUES_NORMAL: x[i] = check_normal(); break;
      case VALUES_WIDE: x[i] = wide; break;
      case VALUES_TINY: x[i] = check_normal() * (u & 1 ? 0x1p-126f : 0x1p-140f); break;
      default: x[i] = (u & 7) ? (u & 8 ? -0.0f : 0.0f) : check_normal(); break;
    }
  }
}
/* A NaN or infinity of either sign; some of the NaNs would turn into an infinity or a number if rounded to bf16 like other values. */
static inline float not_finite(void) {
  static const uint32_t bits[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0x7fffffff, 0xffffffff, 0x7f800000, 0xff800000};
  float x;
  memcpy(&x, &bits[check_random() % 7], sizeof x);
  return x;
}
static inline float *random_floats(size_t n, int kind) {
  float *x = fence_floats(n);
  fill_floats(x, n, kind);
  return x;
}

/* Index of the first float whose bits differ (any NaN equals any other), or -1. */
static inline long first_difference(const float *a, const float *b, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (memcmp(&a[i], &b[i], sizeof *a) && !(a[i] != a[i] && b[i] != b[i])) return (long)i;
  return -1;
}

#define CHECK_SAME(got, want, n, ...) \
  do { \
    long at_ = first_difference(got, want, (size_t)(n)); \
    if (at_ >= 0) { \
      char what_[160]; \
      snprintf(what_, sizeof what_, __VA_ARGS__); \
      CHECK(at_ < 0, "%s: element %ld is %a, generic has %a", what_, at_, (double)(got)[at_], (double)(want)[at_]); \
    } \
  } while (0)

#endif
