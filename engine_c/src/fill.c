/* fill.c - copies a piece of a file into memory that is first put on huge pages. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
#define HUGE_PAGE (UINT64_C(2) << 20)

/* Puts what whole huge pages there are between begin and end on such while they are empty: in a partial one the rest would take memory for nothing.
 * One page of each is touched, which decides the node. 0 or an errno. */
static int make_huge(char *base, uint64_t begin, uint64_t end) {
  uint64_t first = (begin + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, last = end / HUGE_PAGE * HUGE_PAGE;
  if (last <= first) return 0;
  for (uint64_t at = first; at < last; at += HUGE_PAGE) *(volatile char *)(base + at) = 0;
  return madvise(base + first, (size_t)(last - first), MADV_COLLAPSE) ? errno : 0;
}

int colibri_fill(int file, void *base, uint64_t begin, uint64_t end, int *unhuge, colibri_error *err) {
  if (!base || !unhuge || begin > end) return colibri_fail(err, COLIBRI_EINVAL, "colibri_fill: nowhere to copy to, or an end before the begin");
  *unhuge = make_huge(base, begin, end);
  for (uint64_t at = begin; at < end;) {
    ssize_t got = pread(file, (char *)base + at, (size_t)(end - at), (off_t)at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return colibri_fail(err, COLIBRI_EIO, "the file can't be read at byte %llu: %s", (unsigned long long)at, strerror(errno));
    if (got == 0) return colibri_fail(err, COLIBRI_EIO, "the file became shorter while it was read: it ends at byte %llu", (unsigned long long)at);
    at += (uint64_t)got;
  }
  return COLIBRI_OK;
}
