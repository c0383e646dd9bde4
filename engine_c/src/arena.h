/* arena.h - the shared memory a step computes in: layout and typed views (internal).
 *
 * The layout is a pure function of the model and the session's options, so the front end and every worker compute the same one; offsets, never
 * pointers, are what the processes share. Everything is sized at open: nothing grows on the token path. */
#ifndef COLIBRI_ARENA_H
#define COLIBRI_ARENA_H

#include "kernels.h"
#include "model.h"

/* One sequence of the running step, as the tasks need it. */
typedef struct colibri_step_seq {
  int32_t first_row, n_rows;     /* rows of the step */
  int32_t start;                 /* position of first_row */
  int32_t first_logit, n_logits; /* logit rows of the step; they are the sequence's last n_logits rows */
  int32_t first_block;           /* into arena.blocks */
  int32_t first_history, n_history; /* into arena.history */
  colibri_sampling sampling;
} colibri_step_seq;

#define COLIBRI_NO_TOKEN (-1)

/* Sizes that follow from model and options. */
typedef struct colibri_dims {
  int32_t hidden_pad, q_width, qkv_pad, att_pad;  /* row strides in floats; multiples of 32 but q_width = heads * head_dim */
  int32_t hidden_groups, att_groups, ffn_groups;  /* 32-column groups */
  int32_t ffn_row_bytes, hidden_row_bytes, att_row_bytes; /* prepared activation rows, largest format in use */
  int32_t max_blocks;                             /* block table entries a sequence can have */
  int64_t kv_part_bytes;                          /* one KV head's K (or V) in one block */
  int64_t kv_block_bytes;                         /* one KV head's K and V in one block */
  int64_t kv_layer_bytes;                         /* one KV head's blocks of one layer */
  int64_t kv_head_bytes;                          /* one KV head's layers; from one head's region to the next */
} colibri_dims;

typedef struct colibri_arena {
  colibri_dims dims;
  char *base;
  uint64_t bytes;
  /* the step, written by the front end before its first phase */
  colibri_step_seq *seqs;   /* [max_seqs] */
  int32_t *tokens, *positions, *row_seq; /* [max_rows]; tokens COLIBRI_NO_TOKEN: x0 is there already */
  int32_t *logit_rows;      /* [max_logit_rows] row of each logit row */
  int32_t *targets;         /* [max_logit_rows] */
  int32_t *blocks;          /* [max_seqs * max_blocks] */
  int32_t *history;         /* [max_seqs * max_context] */
  float *cos_sin;           /* [max_rows][rope_dims] */
  /* activations; one writer per slot and phase */
  float *x0, *x1;           /* [max_rows][hidden_pad] the residual stream before and after attention */
  float *qkv;               /* [max_rows][qkv_pad] */
  float *att;               /* [max_rows][att_pad] */
  char *act_hidden;         /* [max_rows][hidden_row_bytes] prepared rows of width hidden */
  char *act_att;            /* [max_rows][att_row_bytes] */
  float *gate;              /* [max_rows][experts] gate logits */
  /* the mini-batches: pairs (row, expert) in expert order, rows ascending within an expert */
  int32_t *expert_first;    /* [experts + 1] */
  int32_t *pair_row;        /* [max_rows * top_k] */
  float *pair_weight;       /* [max_rows * top_k] */
  char *act_ffn;            /* [max_rows * top_k][ffn_row_bytes] hidden activations, prepared */
  int32_t *row_pairs;       /* [max_rows][top_k] a row's pairs, ascending: by expert; NULL unless split_down */
  float *pair_out;          /* [max_rows * top_k][hidden_pad] outputs of the experts, not weighted; NULL unless split_down */
  float *logits;            /* [max_logit_rows][vocab] */
  colibri_row_result *results; /* [max_logit_rows] */
  uint32_t *row_error;      /* [max_rows] 0, or 1 + the layer that met a NaN or infinity; accessed atomically */
  char *kv;                 /* [kv_heads][layers][kv_blocks][K, V]: a head's region can be put on a node */
} colibri_arena;

/* Lays the arena out over base (NULL: only sizes). Returns 0 bytes on overflow. */
uint64_t colibri_arena_layout(const colibri_model *model, const colibri_session_options *options, char *base, colibri_arena *arena);

/* Base of one KV head's blocks of a layer. */
static inline char *colibri_arena_kv(const colibri_arena *a, int layer, int kv_head) {
  return a->kv + kv_head * a->dims.kv_head_bytes + layer * a->dims.kv_layer_bytes;
}

#endif
