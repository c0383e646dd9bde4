/* model.h - a parsed container: scalars and const pointers into the mapping (internal). */
#ifndef COLIBRI_MODEL_H
#define COLIBRI_MODEL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

/* A packed matrix [n, k]: panels = ceil(n/32), groups = ceil(k/32). data is NULL where the model has no such tensor. */
typedef struct colibri_matrix {
  const char *data;
  int32_t format, n, k, panels, groups;
} colibri_matrix;

typedef struct colibri_expert {
  colibri_matrix gate_up;  /* panels = 2 * ceil(ffn/32), 16 neurons each; n = 2 * ffn, k = hidden */
  colibri_matrix down;     /* [hidden, ffn] */
} colibri_expert;

typedef colibri_router_desc colibri_router;

/* A router's vectors in one layer, [experts]; NULL: none. */
typedef struct colibri_router_layer {
  const float *bias;         /* of the logits: the gate adds it */
  const float *select_bias;  /* of the scores in selection only */
  const float *expert_scale; /* of the weights */
} colibri_router_layer;

typedef struct colibri_layer {
  const float *attn_norm, *ffn_norm;  /* [hidden] */
  const float *qkv_bias;              /* [(heads + 2 kv_heads) head_dim] or NULL */
  const float *q_norm, *k_norm;       /* [head_dim] or NULL */
  const float *router;                /* [experts, hidden] or NULL: expert 0, weight 1 */
  const float *router_input_scale;    /* [hidden] or NULL: the router's own norm of the residual stream, else it reads what the experts read */
  colibri_router_layer route;         /* what else its router has */
  colibri_matrix qkv, o;
  const colibri_expert *experts;      /* [experts] */
} colibri_layer;

/* Bytes of the container up to `end`, from the end of the extent before, lie on `node`; -1: on none in particular. */
typedef struct colibri_extent {
  uint64_t end;
  int32_t node;
} colibri_extent;

struct colibri_model {
  colibri_model_info info;
  colibri_router router;
  int32_t rope_dims, rope_interleaved;
  float rope_scale;
  const float *inv_freq;     /* [rope_dims / 2] */
  const float *final_norm;   /* [hidden] */
  colibri_matrix embed, head; /* head is embed's copy of pointers when tied */
  colibri_layer *layers;     /* [layers] */
  colibri_expert *experts;   /* [layers * experts], behind layers[].experts */
  uint32_t descriptor_crc;   /* identifies the model to a worker that attaches */
  void *map;                 /* the mapping: munmap(map, map_bytes) */
  size_t map_bytes;
  colibri_extent *extents;   /* [n_extents], ascending, neighbours on different nodes; NULL with fewer than two nodes */
  int32_t n_extents;
  int32_t *nodes;            /* [n_nodes] ascending */
  int32_t n_nodes;           /* of the parts; below 2 nothing has a home */
  _Atomic uint64_t *copies;  /* [layers * experts] bit i: a copy lies on nodes[i]; 0: as the extents say. NULL with fewer than 2 nodes or more than 64 */
};

/* The container parser proper: fills *m (no mapping is made or owned, pointers go into `data`). On failure nothing is left allocated. */
int colibri_container_parse(const void *data, size_t size, colibri_model *m, colibri_error *err);
/* Frees what colibri_container_parse allocated. */
void colibri_container_release(colibri_model *m);

/* The node that holds the byte `at` points to, or -1. The model has two nodes or more. `hint` is the extent to look at first, then the one found: what
 * is asked for in a row lies mostly in one extent or the next. */
int32_t colibri_model_node(const colibri_model *m, const char *at, int32_t *hint);

/* The nodes that hold copies of an expert, bit i for nodes[i]; 0: the extents say where it lies. */
static inline uint64_t colibri_model_copies(const colibri_model *m, int layer, int expert) {
  return m->copies ? atomic_load_explicit(&m->copies[(int64_t)layer * m->info.experts + expert], memory_order_relaxed) : 0;
}

/* Writes a sentence and returns code; err may be NULL. */
int colibri_fail(colibri_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Dequantises row `row` of a packed matrix: out [k]. */
void colibri_matrix_row(const colibri_matrix *m, int32_t row, float *out);

#endif
