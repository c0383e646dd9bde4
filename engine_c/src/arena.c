/* arena.c - layout of the shared activations and the KV pool. */
#include "arena.h"

#include <string.h>

typedef struct cursor { char *base; uint64_t at; int overflow; } cursor;

/* Takes count * size bytes at a multiple of align. */
static void *take_aligned(cursor *c, uint64_t count, uint64_t size, uint64_t align) {
  uint64_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes) || bytes > (UINT64_C(1) << 46)) { c->overflow = 1; return NULL; }
  c->at = (c->at + align - 1) / align * align;
  void *p = c->base ? c->base + c->at : NULL;
  c->at += bytes;
  return p;
}

/* The same, 64-byte aligned; large parts on a page of their own. */
static void *take(cursor *c, uint64_t count, uint64_t size) { return take_aligned(c, count, size, size && count >= 65536 / size ? 4096 : 64); }

/* Where a KV head's region starts: whole pages, so that a memory policy can be set for it, and whole huge pages where it has some. */
static int64_t head_align(int64_t bytes) { return bytes >= 2 << 20 ? 2 << 20 : 4096; }

static int32_t groups_of(int64_t k) { return (int32_t)((k + COLIBRI_GROUP - 1) / COLIBRI_GROUP); }

/* Bytes of a prepared row in the widest of the formats the model uses. */
static int32_t widest_row(const colibri_model_info *i, int32_t groups) {
  int64_t bytes = colibri_row_bytes(i->expert_format, groups);
  int64_t backbone = colibri_row_bytes(i->backbone_format, groups), head = colibri_row_bytes(i->head_format, groups);
  if (backbone > bytes) bytes = backbone;
  if (head > bytes) bytes = head;
  return (int32_t)bytes;
}

static void fill_dims(const colibri_model_info *i, const colibri_session_options *o, colibri_dims *d) {
  int64_t element = o->kv_format == COLIBRI_KV_F32 ? 4 : 2;
  d->q_width = i->heads * i->head_dim;
  d->hidden_groups = groups_of(i->hidden);
  d->att_groups = groups_of(d->q_width);
  d->ffn_groups = groups_of(i->ffn);
  d->hidden_pad = d->hidden_groups * COLIBRI_GROUP;
  d->att_pad = d->att_groups * COLIBRI_GROUP;
  d->qkv_pad = groups_of((int64_t)(i->heads + 2 * i->kv_heads) * i->head_dim) * COLIBRI_GROUP;
  d->hidden_row_bytes = widest_row(i, d->hidden_groups);
  d->att_row_bytes = widest_row(i, d->att_groups);
  d->ffn_row_bytes = widest_row(i, d->ffn_groups);
  d->max_blocks = (i->max_context + COLIBRI_KV_BLOCK - 1) / COLIBRI_KV_BLOCK;
  d->kv_part_bytes = (COLIBRI_KV_BLOCK * element * i->head_dim + 63) / 64 * 64;
  d->kv_block_bytes = 2 * d->kv_part_bytes;
  d->kv_layer_bytes = d->kv_block_bytes * o->kv_blocks;
  int64_t head = d->kv_layer_bytes * i->layers, align = head_align(head);
  d->kv_head_bytes = (head + align - 1) / align * align;
}

uint64_t colibri_arena_layout(const colibri_model *model, const colibri_session_options *o, char *base, colibri_arena *a) {
  const colibri_model_info *i = &model->info;
  cursor c = {base, 0, 0};
  uint64_t rows = (uint64_t)o->max_rows, seqs = (uint64_t)o->max_seqs, logit_rows = (uint64_t)o->max_logit_rows;
  uint64_t pairs = rows * (uint64_t)i->top_k;
  memset(a, 0, sizeof *a);
  fill_dims(i, o, &a->dims);
  const colibri_dims *d = &a->dims;
  a->base = base;
  a->seqs = take(&c, seqs, sizeof *a->seqs);
  a->tokens = take(&c, rows, sizeof *a->tokens);
  a->positions = take(&c, rows, sizeof *a->positions);
  a->row_seq = take(&c, rows, sizeof *a->row_seq);
  a->logit_rows = take(&c, logit_rows, sizeof *a->logit_rows);
  a->targets = take(&c, logit_rows, sizeof *a->targets);
  a->blocks = take(&c, seqs * (uint64_t)d->max_blocks, sizeof *a->blocks);
  a->history = take(&c, seqs * (uint64_t)i->max_context, sizeof *a->history);
  a->cos_sin = take(&c, rows * (uint64_t)model->rope_dims, sizeof *a->cos_sin);
  a->x0 = take(&c, rows * (uint64_t)d->hidden_pad, sizeof *a->x0);
  a->x1 = take(&c, rows * (uint64_t)d->hidden_pad, sizeof *a->x1);
  a->qkv = take(&c, rows * (uint64_t)d->qkv_pad, sizeof *a->qkv);
  a->att = take(&c, rows * (uint64_t)d->att_pad, sizeof *a->att);
  a->act_hidden = take(&c, rows, (uint64_t)d->hidden_row_bytes);
  a->act_att = take(&c, rows, (uint64_t)d->att_row_bytes);
  a->gate = take(&c, rows * (uint64_t)i->experts, sizeof *a->gate);
  a->expert_first = take(&c, (uint64_t)i->experts + 1, sizeof *a->expert_first);
  a->pair_row = take(&c, pairs, sizeof *a->pair_row);
  a->pair_weight = take(&c, pairs, sizeof *a->pair_weight);
  a->act_ffn = take(&c, pairs, (uint64_t)d->ffn_row_bytes);
  a->row_pairs = o->split_down ? take(&c, pairs, sizeof *a->row_pairs) : NULL;
  a->pair_out = o->split_down ? take(&c, pairs * (uint64_t)d->hidden_pad, sizeof *a->pair_out) : NULL;
  a->logits = take(&c, logit_rows * (uint64_t)i->vocab, sizeof *a->logits);
  a->results = take(&c, logit_rows, sizeof *a->results);
  a->row_error = take(&c, rows, sizeof *a->row_error);
  a->kv = take_aligned(&c, (uint64_t)i->kv_heads, (uint64_t)d->kv_head_bytes, (uint64_t)head_align(d->kv_head_bytes));
  a->bytes = (c.at + 4095) / 4096 * 4096;
  return c.overflow ? 0 : a->bytes;
}
