/* test_parts.c - a container opened from parts is the container, wherever its bytes lie; parts that do not make one are refused with the reason. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>

#include "model.h"
#include "parts.h"

static const random_shape shape = {.layers = 2, .hidden = 160, .heads = 6, .kv_heads = 2, .head_dim = 24, .ffn = 224, .experts = 4, .top_k = 2,
                                   .vocab = 259, .context = 256, .format = COLIBRI_INT8};

/* ---------------------------------------------------------------- what is accepted */

static int same_bytes(const colibri_model *a, const colibri_model *b) {
  return a->map_bytes == b->map_bytes && !memcmp(a->map, b->map, a->map_bytes) && a->descriptor_crc == b->descriptor_crc &&
         !memcmp(&a->info, &b->info, sizeof a->info);
}

/* The node of every page, asked for in order, backwards and at random, is the one it was dealt to. */
static void check_nodes(const colibri_model *m, const dealt *d) {
  int32_t hint = 0;
  for (int round = 0; round < 3; round++)
    for (int i = 0; i < d->n; i++) {
      const colibri_part *p = &d->parts[round == 0 ? i : round == 1 ? d->n - 1 - i : (int)(check_random() % (uint32_t)d->n)];
      const char *first = (const char *)m->map + p->offset, *last = first + p->bytes - 1;
      int32_t found[2] = {colibri_model_node(m, first, &hint), colibri_model_node(m, last, &hint)};
      CHECK(found[0] == p->node && found[1] == p->node, "bytes of node %d are found on %d and %d", p->node, found[0], found[1]);
    }
}

static void test_dealt(int whole, const colibri_model *want) {
  for (uint32_t seed = 1; seed <= 6; seed++)
    for (int nodes = 1; nodes <= NODES; nodes++) {
      dealt d = deal(whole, nodes, deal_at_random, &seed);
      colibri_model *m = deal_open(&d);
      CHECK(same_bytes(m, want), "%d nodes, seed %u: another model", nodes, seed);
      CHECK((uintptr_t)m->map % (2u << 20) == 0 || m->map_bytes < 2u << 20, "the mapping does not start at a huge page");
      CHECK(nodes > 1 ? m->n_nodes == nodes && m->nodes[nodes - 1] == node_numbers[nodes - 1] : m->n_nodes < 2, "%d nodes are %d", nodes, m->n_nodes);
      if (nodes > 1) check_nodes(m, &d);
      deal_close(&d); /* the mapping stays */
      CHECK(same_bytes(m, want), "the model went with its descriptors");
      colibri_model_close(m);
    }
}

/* A copy on each node: the one a worker opens is all on its own, and nothing has a home. */
static void test_replica(int whole, const colibri_model *want) {
  colibri_part part = {.fd = whole, .node = 3, .offset = 0, .bytes = want->info.file_bytes};
  colibri_model *m = NULL;
  CHECK(!colibri_model_open_parts(&part, 1, &m, NULL) && same_bytes(m, want) && m->n_nodes == 1 && !m->extents, "a part that is all");
  colibri_model_close(m);
}

static void test_sealed(int whole, const colibri_model *want) {
  uint32_t seed = 9;
  dealt d = deal(whole, 2, deal_at_random, &seed);
  for (int i = 0; i < 2; i++) CHECK(!fcntl(d.fds[i], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL), "seal: %s", strerror(errno));
  colibri_model *m = deal_open(&d);
  CHECK(same_bytes(m, want), "sealed memory files: another model");
  colibri_model_close(m);
  deal_close(&d);
}

/* ---------------------------------------------------------------- what is refused */

static void refuse(const colibri_part *parts, int n, int code, const char *word) {
  colibri_error err = {0, ""};
  colibri_model *m = NULL;
  int rc = colibri_model_open_parts(parts, n, &m, &err);
  CHECK(rc == code && err.code == code && !m && strstr(err.message, word), "%d (\"%s\"), wanted %d with \"%s\"", rc, err.message, code, word);
  CHECK(colibri_model_open_parts(parts, n, &m, NULL) == code, "another answer without room for the sentence");
  colibri_model_close(m);
}

static void test_refusals(int whole, uint64_t size) {
  colibri_part all = {.fd = whole, .node = -1, .offset = 0, .bytes = size}, two[2] = {all, all};
  int pipes[2], empty = memfd_create("empty", MFD_CLOEXEC);
  if (pipe(pipes) || empty < 0) exit(2);
  refuse(NULL, 1, COLIBRI_EINVAL, "at least one part");
  refuse(&all, 0, COLIBRI_EINVAL, "at least one part");
  refuse(&(colibri_part){whole, -2, 0, size}, 1, COLIBRI_EINVAL, "node -2");
  refuse(&(colibri_part){whole, COLIBRI_MAX_NODES, 0, size}, 1, COLIBRI_EINVAL, "node 1024");
  refuse(&(colibri_part){whole, 0, PAGE, size - PAGE}, 1, COLIBRI_EINVAL, "bytes 0 to there are in no part");
  refuse(&(colibri_part){whole, 0, 0, 0}, 1, COLIBRI_EINVAL, "0 bytes");
  refuse(&(colibri_part){whole, 0, 0, UINT64_MAX}, 1, COLIBRI_EINVAL, "limits");
  refuse(&(colibri_part){whole, 0, 0, size + 1}, 1, COLIBRI_EFORMAT, "truncated");
  refuse(&(colibri_part){whole, 0, 0, size - 1}, 1, COLIBRI_EFORMAT, "truncated");
  refuse(&(colibri_part){empty, 0, 0, size}, 1, COLIBRI_EFORMAT, "truncated");
  refuse(&(colibri_part){pipes[0], 0, 0, size}, 1, COLIBRI_EIO, "regular file");
  refuse(&(colibri_part){-1, 0, 0, size}, 1, COLIBRI_EIO, "descriptor -1");
  two[0].bytes = PAGE, two[1].offset = 2 * PAGE, two[1].bytes = size - 2 * PAGE;
  refuse(two, 2, COLIBRI_EINVAL, "bytes 4096 to there are in no part");
  two[0].bytes = 3 * PAGE;
  refuse(two, 2, COLIBRI_EINVAL, "overlap");
  two[0].bytes = 2 * PAGE - 1, two[1].offset = 2 * PAGE - 1, two[1].bytes = size - 2 * PAGE + 1;
  refuse(two, 2, COLIBRI_EINVAL, "page size");
  close(empty), close(pipes[0]), close(pipes[1]);
}

/* More parts than the kernel maps: refused before anything is mapped, with the limit's name. */
static void test_too_many(void) {
  FILE *file = fopen("/proc/sys/vm/max_map_count", "r");
  long limit = 0;
  if (!file || fscanf(file, "%ld", &limit) != 1 || limit < 1 || limit > 1 << 20) {
    printf("parts: too many of them left out: /proc/sys/vm/max_map_count is %ld\n", limit);
    if (file) fclose(file);
    return;
  }
  fclose(file);
  int n = (int)limit + 10, fds[2] = {memfd_create("even", MFD_CLOEXEC), memfd_create("odd", MFD_CLOEXEC)};
  colibri_part *parts = calloc((size_t)n, sizeof *parts);
  if (!parts || ftruncate(fds[0], (off_t)n * PAGE) || ftruncate(fds[1], (off_t)n * PAGE)) exit(2);
  for (int i = 0; i < n; i++) parts[i] = (colibri_part){.fd = fds[i % 2], .node = i % 2, .offset = (uint64_t)i * PAGE, .bytes = PAGE};
  refuse(parts, n, COLIBRI_ENOMEM, "vm.max_map_count");
  for (int i = 0; i < n; i++) parts[i].fd = fds[0]; /* one mapping: only the header is wrong */
  refuse(parts, n, COLIBRI_EFORMAT, "magic");
  free(parts);
  close(fds[0]), close(fds[1]);
}

int main(void) {
  int whole = random_model_fd(&shape, 5);
  colibri_model *want = NULL;
  if (colibri_model_open_fd(whole, &want, NULL)) return 2;
  test_dealt(whole, want);
  test_replica(whole, want);
  test_sealed(whole, want);
  test_refusals(whole, want->info.file_bytes);
  test_too_many();
  colibri_model_close(want);
  close(whole);
  return check_result("parts");
}
