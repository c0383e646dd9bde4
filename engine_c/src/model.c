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
#define MAX_PLACED_NODES 64 /* bits of a word */

const char *colibri_version(void) { return "0.1.0"; }

/* ---------------------------------------------------------------- parts */

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* A part's place among the others: it starts where the one before ended, at a page. *end becomes its own end. */
static int check_place(const colibri_part *p, int i, int n, uint64_t *end, colibri_error *err) {
  unsigned long long offset = p->offset, bytes = p->bytes, before = *end;
  if (p->node < -1 || p->node >= COLIBRI_MAX_NODES)
    return colibri_fail(err, COLIBRI_EINVAL, "part %d: node %d must be -1 to %d", i, p->node, COLIBRI_MAX_NODES - 1);
  if (offset > before)
    return colibri_fail(err, COLIBRI_EINVAL, "part %d starts at byte %llu: bytes %llu to there are in no part", i, offset, before);
  if (offset < before)
    return colibri_fail(err, COLIBRI_EINVAL, "part %d starts at byte %llu, but the part before it ends at %llu: they overlap", i, offset, before);
  if (!bytes || bytes > (uint64_t)INT64_MAX - offset)
    return colibri_fail(err, COLIBRI_EINVAL, "part %d has %llu bytes, it must have some and end within a file's limits", i, bytes);
  if (i < n - 1 && bytes % page_bytes())
    return colibri_fail(err, COLIBRI_EINVAL, "part %d ends at byte %llu, not at a multiple of the page size %zu; only the last part may", i,
                        offset + bytes, page_bytes());
  *end = p->offset + p->bytes;
  return COLIBRI_OK;
}

/* A part's bytes are in its descriptor's file. */
static int check_file(const colibri_part *p, int i, colibri_error *err) {
  struct stat st;
  if (fstat(p->fd, &st) != 0) return colibri_fail(err, COLIBRI_EIO, "part %d: descriptor %d: %s", i, p->fd, strerror(errno));
  if (!S_ISREG(st.st_mode)) return colibri_fail(err, COLIBRI_EIO, "part %d: descriptor %d is not a regular file", i, p->fd);
  if ((uint64_t)st.st_size < p->offset + p->bytes)
    return colibri_fail(err, COLIBRI_EFORMAT, "part %d reaches to byte %llu, its file has %lld: it is truncated; load the model again", i,
                        (unsigned long long)(p->offset + p->bytes), (long long)st.st_size);
  return COLIBRI_OK;
}

/* Mappings a process may have; 0 if the kernel does not say. */
static long map_limit(void) {
  char text[32] = "";
  int fd = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
  ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  return n > 0 ? atol(text) : 0;
}

/* The first part behind i that does not go on in the same file: parts i..that-1 are one mapping. */
static int run_end(const colibri_part *parts, int i, int n) {
  int end = i + 1;
  while (end < n && parts[end].fd == parts[i].fd) end++;
  return end;
}

static int too_many(int runs, long limit, colibri_error *err) {
  return colibri_fail(err, COLIBRI_ENOMEM, "%d parts need as many mappings, vm.max_map_count allows %ld: raise it (sysctl -w vm.max_map_count=%d) or place larger parts",
                      runs, limit, 2 * runs + 1024);
}

static int check_parts(const colibri_part *parts, int n, uint64_t *bytes, colibri_error *err) {
  int runs = 0, rc = COLIBRI_OK;
  *bytes = 0;
  for (int i = 0; i < n && !rc; i++) rc = check_place(&parts[i], i, n, bytes, err);
  for (int i = 0; i < n && !rc; i++) rc = check_file(&parts[i], i, err);
  for (int i = 0; i < n; i = run_end(parts, i, n)) runs++;
  long limit = map_limit();
  return !rc && limit && runs > 1 && runs >= limit ? too_many(runs, limit, err) : rc;
}

/* ---------------------------------------------------------------- mapping */

/* Address space for size bytes. A huge page or more starts at a multiple of one, so that huge pages in the page cache (memfd, MADV_COLLAPSE) can be mapped as
 * such: 10-18 % of decode speed. NULL and errno. */
static char *reserve(size_t size) {
  size_t page = page_bytes(), align = size < HUGE_PAGE ? page : HUGE_PAGE, used = (size + page - 1) / page * page, all = used + align;
  if (size > SIZE_MAX / 2) return errno = ENOMEM, NULL;
  char *base = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NULL;
  char *aligned = base + (align - (uintptr_t)base % align) % align;
  if (aligned > base) munmap(base, (size_t)(aligned - base));
  munmap(aligned + used, (size_t)(base + all - (aligned + used)));
  return aligned;
}

/* Hints only: a kernel that knows none of them loses nothing but speed. */
static void advise(void *map, size_t size) {
  madvise(map, size, MADV_HUGEPAGE);
  madvise(map, size, MADV_DONTDUMP);
}

/* Maps the parts side by side, shared and read-only. NULL and the sentence. */
static char *map_parts(const colibri_part *parts, int n, size_t size, colibri_error *err) {
  char *map = reserve(size);
  if (!map) {
    colibri_fail(err, COLIBRI_EIO, "mapping %zu bytes: %s", size, strerror(errno));
    return NULL;
  }
  for (int i = 0, runs = 1; i < n; i = run_end(parts, i, n), runs++) {
    const colibri_part *last = &parts[run_end(parts, i, n) - 1];
    size_t bytes = (size_t)(last->offset + last->bytes - parts[i].offset);
    if (mmap(map + parts[i].offset, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, parts[i].fd, (off_t)parts[i].offset) != MAP_FAILED) continue;
    if (errno == ENOMEM && runs > 1) too_many(n, map_limit(), err);
    else colibri_fail(err, COLIBRI_EIO, "mapping %zu bytes: %s", bytes, strerror(errno));
    munmap(map, size);
    return NULL;
  }
  advise(map, size);
  return map;
}

/* ---------------------------------------------------------------- nodes */

/* Fills nodes[] and extents[] from the parts. Nothing has a home with fewer than two nodes: the tables are then left out. */
static int note_nodes(colibri_model *m, const colibri_part *parts, int n, colibri_error *err) {
  uint8_t seen[COLIBRI_MAX_NODES] = {0};
  for (int i = 0; i < n; i++)
    if (parts[i].node >= 0) m->n_nodes += !seen[parts[i].node], seen[parts[i].node] = 1;
  if (m->n_nodes < 2) return COLIBRI_OK;
  m->nodes = calloc((size_t)m->n_nodes, sizeof *m->nodes);
  m->extents = calloc((size_t)n, sizeof *m->extents);
  int many = m->n_nodes > MAX_PLACED_NODES;
  m->copies = many ? NULL : calloc((size_t)m->info.layers * (size_t)m->info.experts, sizeof *m->copies);
  if (!m->nodes || !m->extents || (!many && !m->copies)) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for the nodes of %d parts", n);
  for (int32_t node = 0, at = 0; node < COLIBRI_MAX_NODES; node++)
    if (seen[node]) m->nodes[at++] = node;
  for (int i = 0; i < n; i++) {
    if (!i || parts[i].node != m->extents[m->n_extents - 1].node) m->extents[m->n_extents++].node = parts[i].node;
    m->extents[m->n_extents - 1].end = parts[i].offset + parts[i].bytes;
  }
  return COLIBRI_OK;
}

static int holds(const colibri_model *m, int32_t extent, uint64_t at) {
  return extent < m->n_extents && at < m->extents[extent].end && (!extent || at >= m->extents[extent - 1].end);
}

int32_t colibri_model_node(const colibri_model *m, const char *at, int32_t *hint) {
  uint64_t byte = (uint64_t)(at - (const char *)m->map);
  int32_t low = 0, high = m->n_extents - 1;
  if (holds(m, *hint, byte)) return m->extents[*hint].node;
  if (holds(m, *hint + 1, byte)) return m->extents[++*hint].node;
  while (low < high) {
    int32_t middle = (low + high) / 2;
    if (byte < m->extents[middle].end) high = middle;
    else low = middle + 1;
  }
  *hint = low;
  return m->extents[low].node;
}

/* The bit of a node's number in copies; 0: the model has no such node. */
static uint64_t node_bit(const colibri_model *m, int32_t node) {
  for (int32_t i = 0; i < m->n_nodes; i++)
    if (m->nodes[i] == node) return UINT64_C(1) << i;
  return 0;
}

int colibri_model_place(colibri_model *m, int32_t layer, int32_t expert, const int32_t *nodes, int32_t n, colibri_error *err) {
  uint64_t copies = 0;
  if (m->n_nodes > MAX_PLACED_NODES)
    return colibri_fail(err, COLIBRI_EUNSUPPORTED, "experts are placed on up to %d nodes, the model lies on %d", MAX_PLACED_NODES, m->n_nodes);
  if (!m->copies) return colibri_fail(err, COLIBRI_EINVAL, "the model lies on one node: there is nothing to place");
  if (layer < 0 || layer >= m->info.layers || expert < 0 || expert >= m->info.experts)
    return colibri_fail(err, COLIBRI_EINVAL, "layer %d, expert %d: the model has %d layers of %d experts", layer, expert, m->info.layers, m->info.experts);
  for (int32_t i = 0; i < n; i++) {
    uint64_t bit = node_bit(m, nodes[i]);
    if (!bit) return colibri_fail(err, COLIBRI_EINVAL, "node %d holds nothing of the model", nodes[i]);
    copies |= bit;
  }
  atomic_store_explicit(&m->copies[(int64_t)layer * m->info.experts + expert], copies, memory_order_relaxed);
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- remapping */

/* A part that can take the place of what is mapped. *bytes: in whole pages. */
static int check_remap(const colibri_model *m, const colibri_part *p, size_t *bytes, colibri_error *err) {
  size_t page = page_bytes();
  int whole = p->bytes % page == 0 || p->offset + p->bytes == m->map_bytes;
  if (p->offset % page || !p->bytes || !whole || p->bytes > m->map_bytes || p->offset > m->map_bytes - p->bytes)
    return colibri_fail(err, COLIBRI_EINVAL, "bytes %llu to %llu are not whole pages of the model's %zu bytes", (unsigned long long)p->offset,
                        (unsigned long long)(p->offset + p->bytes), m->map_bytes);
  *bytes = ((size_t)p->bytes + page - 1) / page * page;
  return check_file(p, 0, err);
}

int colibri_model_remap(colibri_model *m, const colibri_part *p, colibri_error *err) {
  size_t bytes = 0;
  int rc = check_remap(m, p, &bytes, err);
  if (rc) return rc;
  char *target = (char *)m->map + p->offset;
  size_t shift = (uintptr_t)target % HUGE_PAGE, room = shift + bytes; /* as far into a huge page as the target is, so that such can be mapped and moved whole */
  char *base = reserve(room < HUGE_PAGE ? HUGE_PAGE : room);
  if (!base) return colibri_fail(err, COLIBRI_ENOMEM, "address space for %zu bytes: %s", bytes, strerror(errno));
  char *fresh = base + shift;
  int now = p->node < 0 ? 0 : MAP_POPULATE;
  int ok = mmap(fresh, bytes, PROT_READ, MAP_SHARED | MAP_FIXED | now, p->fd, (off_t)p->offset) != MAP_FAILED;
  if (ok) {
    advise(fresh, bytes);
    ok = mremap(fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) != MAP_FAILED;
  }
  int why = errno;
  munmap(base, room < HUGE_PAGE ? HUGE_PAGE : room); /* what has moved away is a hole in it */
  return ok ? COLIBRI_OK : colibri_fail(err, COLIBRI_ENOMEM, "mapping %zu bytes anew: %s", bytes, strerror(why));
}

/* ---------------------------------------------------------------- open and close */

/* Opens what the parts, which have been checked, hold: `bytes` in all. */
static int open_checked(const colibri_part *parts, int n, uint64_t bytes, colibri_model **out, colibri_error *err) {
  colibri_model *m = calloc(1, sizeof *m);
  if (!m) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a model");
  colibri_error why = {COLIBRI_EIO, ""};
  char *map = map_parts(parts, n, (size_t)bytes, &why);
  if (!map) {
    free(m);
    return colibri_fail(err, why.code, "%s", why.message);
  }
  int rc = colibri_container_parse(map, (size_t)bytes, m, err);
  m->map = map;
  m->map_bytes = (size_t)bytes;
  if (!rc) rc = note_nodes(m, parts, n, err);
  if (rc) {
    colibri_model_close(m);
    return rc;
  }
  *out = m;
  return COLIBRI_OK;
}

int colibri_model_open_parts(const colibri_part *parts, int32_t n, colibri_model **out, colibri_error *err) {
  uint64_t bytes;
  if (!out) return colibri_fail(err, COLIBRI_EINVAL, "colibri_model_open_parts: out is NULL");
  *out = NULL;
  if (!parts || n < 1) return colibri_fail(err, COLIBRI_EINVAL, "colibri_model_open_parts: a model has at least one part, not %d", n);
  int rc = colibri_isa_ensure(err);
  if (!rc) rc = check_parts(parts, n, &bytes, err);
  return rc ? rc : open_checked(parts, n, bytes, out, err);
}

int colibri_model_open_fd(int fd, colibri_model **out, colibri_error *err) {
  struct stat st;
  if (!out) return colibri_fail(err, COLIBRI_EINVAL, "colibri_model_open_fd: out is NULL");
  *out = NULL;
  int rc = colibri_isa_ensure(err);
  if (rc) return rc;
  if (fstat(fd, &st) != 0) return colibri_fail(err, COLIBRI_EIO, "descriptor %d: %s", fd, strerror(errno));
  if (!S_ISREG(st.st_mode)) return colibri_fail(err, COLIBRI_EIO, "not a regular file; name a .colibri file");
  if (st.st_size == 0) return colibri_fail(err, COLIBRI_EFORMAT, "the file is empty; copy or convert it again");
  colibri_part whole = {.fd = fd, .node = -1, .offset = 0, .bytes = (uint64_t)st.st_size};
  return open_checked(&whole, 1, whole.bytes, out, err);
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
  free(model->nodes);
  free(model->extents);
  free(model->copies);
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
