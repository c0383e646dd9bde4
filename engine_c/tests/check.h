/* check.h - the little that C tests share: counting failures, a generator, and running a test once per instruction set. */
#ifndef COLIBRI_TEST_CHECK_H
#define COLIBRI_TEST_CHECK_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "colibri.h"

static int check_failures;

/* Counts and prints a failure (the first 20) with what the format says about it. */
#define CHECK(condition, ...) \
  do { \
    if (!(condition)) check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (0)

__attribute__((format(printf, 4, 5))) static inline void check_failed(const char *file, int line, const char *condition, const char *format, ...) {
  va_list args;
  if (check_failures++ >= 20) return;
  fprintf(stderr, "%s:%d: %s: ", file, line, condition);
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
}

/* xorshift64*: the same numbers everywhere. */
static uint64_t check_state = 88172645463325252u;
static inline uint32_t check_random(void) {
  check_state ^= check_state >> 12;
  check_state ^= check_state << 25;
  check_state ^= check_state >> 27;
  return (uint32_t)((check_state * UINT64_C(2685821657736338717)) >> 32);
}
static inline float check_uniform(void) { return (float)(check_random() >> 8) * 0x1p-24f; } /* [0, 1) */
/* Roughly normal, mean 0, deviation 1: a sum of 12 uniforms. */
static inline float check_normal(void) {
  float sum = -6;
  for (int i = 0; i < 12; i++) sum += check_uniform();
  return sum;
}

/* Runs test(name) with each instruction set of this CPU selected. */
static inline void check_each_isa(void (*test)(const char *isa)) {
  char names[128], *rest = NULL;
  snprintf(names, sizeof names, "%s", colibri_isa_available());
  for (char *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
    colibri_error err;
    CHECK(colibri_isa_select(name, &err) == COLIBRI_OK, "%s", err.message);
    test(name);
  }
}

static inline int check_result(const char *what) {
  if (check_failures) fprintf(stderr, "%s: %d checks failed\n", what, check_failures);
  return check_failures != 0;
}

#endif
