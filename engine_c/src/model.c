/* model.c - opens a container as a read-only mapping. */
#define _GNU_SOURCE
#include "model.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels.h"

#define HUGE_PAGE ((size_t)2 << 20)

const char *colibri_version(void) { return "0.1.0"; }

/* ---------------------------------------------------------------- mapping */

/* Maps size bytes of fd shared and read-only. Files of a huge page or more start at a multiple of one, so that huge pages in the page
 * cache (memfd, MADV_COLLAPSE) can be mapped as such: 10-18 % of decode speed. MAP_FAILED as mmap. */
static void *map_file(int fd, size_t size) {
  if (size < HUGE_PAGE || size > SIZE_MAX / 2) return mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
  size_t reserved = size + HUGE_PAGE;
  char *base = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return MAP_FAILED;
  char *aligned = base + (HUGE_PAGE - (uintptr_t)base % HUGE_PAGE) % HUGE_PAGE;
  char *map = mmap(aligned, size, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
  if (map == MAP_FAILED) {
    int saved = errno;
    munmap(base, reserved);
    errno = saved;
    return MAP_FAILED;
  }
  size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (size + page - 1) / page * page;
  if (aligned > base) munmap(base, (size_t)(aligned - base));
  if (aligned + used < base + reserved) munmap(aligned + used, (size_t)(base + reserved - (aligned + used)));
  return map;
}

/* Hints only: a kernel that knows none of them loses nothing but speed. */
static void advise(void *map, size_t size) {
  madvise(map, size, MADV_HUGEPAGE);
  madvise(map, size, MADV_DONTDUMP);
}

/* ---------------------------------------------------------------- open and close */

int colibri_model_open_fd(int fd, colibri_model **out, colibri_error *err) {
  struct stat st;
  if (!out) return colibri_fail(err, COLIBRI_EINVAL, "colibri_model_open_fd: out is NULL");
  *out = NULL;
  int rc = colibri_isa_ensure(err);
  if (rc) return rc;
  if (fstat(fd, &st) != 0) return colibri_fail(err, COLIBRI_EIO, "descriptor %d: %s", fd, strerror(errno));
  if (!S_ISREG(st.st_mode)) return colibri_fail(err, COLIBRI_EIO, "not a regular file; name a .colibri file");
  if (st.st_size == 0) return colibri_fail(err, COLIBRI_EFORMAT, "the file is empty; copy or convert it again");
  colibri_model *m = calloc(1, sizeof *m);
  if (!m) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a model");
  size_t size = (size_t)st.st_size;
  void *map = map_file(fd, size);
  if (map == MAP_FAILED) {
    int saved = errno;
    free(m);
    return colibri_fail(err, COLIBRI_EIO, "mapping %zu bytes: %s", size, strerror(saved));
  }
  advise(map, size);
  rc = colibri_container_parse(map, size, m, err);
  if (rc) {
    munmap(map, size);
    free(m);
    return rc;
  }
  m->map = map;
  m->map_bytes = size;
  *out = m;
  return COLIBRI_OK;
}

/* Puts the file's name (its end, if long) before the sentence. */
static int name_file(const char *path, int rc, colibri_error *err) {
  if (!err) return rc;
  colibri_error inner = *err;
  size_t n = strlen(path), most = 60;
  return colibri_fail(err, rc, "%s%s: %s", n > most ? "..." : "", n > most ? path + n - most : path, inner.message);
}

int colibri_model_open(const char *path, colibri_model **out, colibri_error *err) {
  if (!out || !path) return colibri_fail(err, COLIBRI_EINVAL, "colibri_model_open: path or out is NULL");
  *out = NULL;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO is refused, not waited for */
  if (fd < 0) return name_file(path, colibri_fail(err, COLIBRI_EIO, "%s", strerror(errno)), err);
  int rc = colibri_model_open_fd(fd, out, err);
  close(fd);
  return rc ? name_file(path, rc, err) : COLIBRI_OK;
}

int colibri_model_check(const void *data, size_t size, colibri_error *err) {
  colibri_model m;
  if (!data) return colibri_fail(err, COLIBRI_EINVAL, "colibri_model_check: data is NULL");
  int rc = colibri_container_parse(data, size, &m, err);
  if (!rc) colibri_container_release(&m);
  return rc;
}

void colibri_model_close(colibri_model *model) {
  if (!model) return;
  colibri_container_release(model);
  munmap(model->map, model->map_bytes);
  free(model);
}

const colibri_model_info *colibri_model_get_info(const colibri_model *model) { return &model->info; }

/* ---------------------------------------------------------------- one row of a packed matrix */

static float int4_at(const unsigned char *block, int r, int c) {
  int byte = block[64 + (c / 8) * 128 + r * 4 + c % 4];
  return (float)((c % 8 < 4 ? byte & 15 : byte >> 4) - 8);
}

/* Element (r, c) of a block; r * 4 covers h * 64 + lane * 4 of docs/container.md, as r = 16 h + lane. */
static float block_at(const unsigned char *block, int format, int r, int c) {
  uint16_t half, scale;
  float f;
  memcpy(&scale, block + 2 * r, sizeof scale);
  switch (format) {
    case COLIBRI_F32: memcpy(&f, block + c * 128 + r * 4, sizeof f); return f;
    case COLIBRI_BF16: memcpy(&half, block + c / 2 * 128 + r * 4 + c % 2 * 2, sizeof half); return colibri_bf16_to_f32(half);
    case COLIBRI_INT8: return colibri_f16_to_f32(scale) * (float)(int8_t)block[64 + c / 4 * 128 + r * 4 + c % 4];
    default: return colibri_f16_to_f32(scale) * int4_at(block, r, c);
  }
}

void colibri_matrix_row(const colibri_matrix *m, int32_t row, float *out) {
  int64_t bytes = colibri_block_bytes(m->format);
  const unsigned char *panel = (const unsigned char *)m->data + (int64_t)(row / COLIBRI_PANEL) * m->groups * bytes;
  for (int32_t k = 0; k < m->k; k++) out[k] = block_at(panel + k / COLIBRI_GROUP * bytes, m->format, row % COLIBRI_PANEL, k % COLIBRI_GROUP);
}
