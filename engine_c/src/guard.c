/* guard.c - the C library's calls for memory, in a program linked with this: each looks first whether its thread may. glibc only, and not under a sanitizer,
 * which brings calls of its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "guard.h"

#ifndef COLIBRI_GUARD
typedef int colibri_guard_is_off; /* a file of no declarations is not C */
#else

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local int depth;

void colibri_guard_enter(void) { depth++; }
void colibri_guard_leave(void) { depth--; }

/* Writes and ends without memory of its own. */
static void say(const char *text) {
  ssize_t n = write(STDERR_FILENO, text, strlen(text));
  (void)n;
}

static void check(const char *call) {
  if (!depth) return;
  depth = 0;
  say("colibri guard: ");
  say(call);
  say(" within a step or a task\n");
  abort();
}

#define SHOWN __attribute__((visibility("default")))

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *p, size_t size);
extern void *__libc_memalign(size_t align, size_t size);
extern void __libc_free(void *p);

SHOWN void *malloc(size_t size) { return check("malloc"), __libc_malloc(size); }
SHOWN void *calloc(size_t count, size_t size) { return check("calloc"), __libc_calloc(count, size); }
SHOWN void *realloc(void *p, size_t size) { return check("realloc"), __libc_realloc(p, size); }
SHOWN void free(void *p) { check("free"), __libc_free(p); }
SHOWN void *memalign(size_t align, size_t size) { return check("memalign"), __libc_memalign(align, size); }
SHOWN void *aligned_alloc(size_t align, size_t size) { return check("aligned_alloc"), __libc_memalign(align, size); }

SHOWN int posix_memalign(void **out, size_t align, size_t size) {
  check("posix_memalign");
  *out = __libc_memalign(align, size);
  return *out ? 0 : ENOMEM;
}

SHOWN void *mmap(void *at, size_t size, int prot, int flags, int fd, off_t offset) {
  check("mmap");
  return (void *)syscall(SYS_mmap, at, size, prot, flags, fd, offset);
}

SHOWN int munmap(void *at, size_t size) {
  check("munmap");
  return (int)syscall(SYS_munmap, at, size);
}

#endif
