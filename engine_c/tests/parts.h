/* parts.h - a container dealt to pretended NUMA nodes: one sparse memfd a node, as placement makes them. No real node is needed. */
#ifndef COLIBRI_TEST_PARTS_H
#define COLIBRI_TEST_PARTS_H

#include "check.h"
#include "random_model.h"

#define NODES 4
#define PAGE 4096u

static const int32_t node_numbers[NODES] = {0, 2, 3, 7};

typedef struct dealt {
  colibri_part *parts; /* [n] */
  int n;
  int fds[NODES];
} dealt;

/* Which of `nodes` nodes (an index) the page at a byte goes to. */
typedef int (*deal_rule)(uint64_t byte, int nodes, const void *data);

static inline void deal_page(dealt *d, int whole, uint64_t at, uint64_t size, int node) {
  char page[PAGE];
  ssize_t n = pread(whole, page, PAGE, (off_t)at);
  if (n <= 0 || pwrite(d->fds[node], page, (size_t)n, (off_t)at) != n) exit(2);
  if (d->n && d->parts[d->n - 1].node == node_numbers[node]) {
    d->parts[d->n - 1].bytes += (uint64_t)n;
    return;
  }
  d->parts[d->n++] = (colibri_part){.fd = d->fds[node], .node = node_numbers[node], .offset = at, .bytes = at + PAGE < size ? PAGE : size - at};
}

static inline dealt deal(int whole, int nodes, deal_rule rule, const void *data) {
  uint64_t size = (uint64_t)lseek(whole, 0, SEEK_END);
  dealt d = {.parts = calloc(size / PAGE + 1, sizeof *d.parts)};
  if (!d.parts) exit(2);
  for (int i = 0; i < nodes; i++) {
    d.fds[i] = memfd_create("node", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (d.fds[i] < 0 || ftruncate(d.fds[i], (off_t)size)) exit(2);
  }
  for (int i = nodes; i < NODES; i++) d.fds[i] = -1;
  for (uint64_t at = 0; at < size; at += PAGE) deal_page(&d, whole, at, size, rule(at, nodes, data));
  return d;
}

/* Runs of 1 to 8 pages, at random; data: uint32_t seed. */
static inline int deal_at_random(uint64_t byte, int nodes, const void *data) {
  static uint32_t left, node, state;
  if (!byte) left = 0, state = *(const uint32_t *)data * 2654435761u + 1;
  if (!left--) {
    state = state * 1664525u + 1013904223u;
    left = state >> 20 & 7;
    node = (state >> 24) % (uint32_t)nodes;
  }
  return (int)node;
}

static inline void deal_close(dealt *d) {
  for (int i = 0; i < NODES; i++)
    if (d->fds[i] >= 0) close(d->fds[i]);
  free(d->parts);
}

static inline colibri_model *deal_open(const dealt *d) {
  colibri_error err;
  colibri_model *model = NULL;
  if (!colibri_model_open_parts(d->parts, d->n, &model, &err)) return model;
  fprintf(stderr, "parts: %s\n", err.message);
  exit(2);
}

#endif
