/* tasks.c - what a task of each phase computes.
 *
 * Every function here reads what earlier phases wrote and writes slots that no other task of the phase writes, in full, from scratch: it may be
 * run again at any time before the phase ends. None allocates. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "sampler.h"
#include "team.h"

#define ROW_TILE 512 /* rows of one matrix product at most: bounds the product buffer */

static void mark_bad(colibri_lane_env *env, int row, int layer) {
  _Atomic uint32_t *slot = (_Atomic uint32_t *)&env->arena.row_error[row];
  uint32_t none = 0;
  atomic_compare_exchange_strong_explicit(slot, &none, (uint32_t)layer + 1, memory_order_relaxed, memory_order_relaxed);
}

/* Row pointers of n prepared rows that lie one after another. */
static void point_rows(colibri_lane_env *env, const char *first, int64_t row_bytes, int n) {
  for (int i = 0; i < n; i++) env->rows[i] = first + i * row_bytes;
}

static void prepare_row(colibri_lane_env *env, const colibri_matrix *m, const float *x, void *row, int mark_row, int layer) {
  if (env->kernels->prepare[m->format](x, m->k, m->groups, 0, m->groups, row)) mark_bad(env, mark_row, layer);
}

static const char *panel_at(const colibri_matrix *m, int panel) {
  return m->data + panel * (int64_t)m->groups * colibri_block_bytes(m->format);
}

/* Where the next task starts in the matrix of this one. */
static const char *panel_after(const colibri_lane_env *env, const colibri_matrix *m) { return env->after ? panel_at(m, env->after->b0) : NULL; }

/* ---------------------------------------------------------------- attention */

static void prepare_attention(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_model_info *i = &env->model->info;
  const colibri_layer *layer = &env->model->layers[p->layer];
  for (int row = t->a0; row < t->a1; row++) {
    float *x = a->x0 + (int64_t)row * a->dims.hidden_pad;
    if (p->layer == 0 && a->tokens[row] != COLIBRI_NO_TOKEN) {
      colibri_matrix_row(&env->model->embed, a->tokens[row], x);
      memset(x + i->hidden, 0, sizeof(float) * (size_t)(a->dims.hidden_pad - i->hidden));
    }
    env->kernels->rmsnorm(x, layer->attn_norm, i->norm_eps, i->hidden, env->vector);
    prepare_row(env, &layer->qkv, env->vector, a->act_hidden + (int64_t)row * a->dims.hidden_row_bytes, row, p->layer);
  }
}

static void qkv(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_layer *layer = &env->model->layers[p->layer];
  int n = t->a1 - t->a0, first = 32 * t->b0, end = 32 * t->b1 < layer->qkv.n ? 32 * t->b1 : layer->qkv.n;
  float *out = a->qkv + (int64_t)t->a0 * a->dims.qkv_pad + first;
  point_rows(env, a->act_hidden + (int64_t)t->a0 * a->dims.hidden_row_bytes, a->dims.hidden_row_bytes, n);
  env->kernels->gemm[layer->qkv.format](panel_at(&layer->qkv, t->b0), t->b1 - t->b0, layer->qkv.groups, env->rows, n, out, a->dims.qkv_pad,
                                        panel_after(env, &layer->qkv));
  if (!layer->qkv_bias) return;
  for (int r = 0; r < n; r++) {
    float *y = out + (int64_t)r * a->dims.qkv_pad;
    env->kernels->add(y, layer->qkv_bias + first, end - first, y);
  }
}

/* Normalises (if the model does), rotates and scales one head's vector from src into dst. */
static void place_head(colibri_lane_env *env, const float *src, const float *norm, int row, float scale, float *dst) {
  const colibri_model *m = env->model;
  size_t bytes = sizeof(float) * (size_t)m->info.head_dim;
  if (norm) env->kernels->rmsnorm(src, norm, m->info.norm_eps, m->info.head_dim, dst);
  else memcpy(dst, src, bytes);
  env->kernels->rope(dst, env->arena.cos_sin + (int64_t)row * m->rope_dims, m->rope_dims, m->info.head_dim, m->rope_interleaved, scale);
}

static void store_kv_row(colibri_lane_env *env, int layer, int row, int kv_head) {
  const colibri_arena *a = &env->arena;
  const colibri_model_info *i = &env->model->info;
  const colibri_step_seq *s = &a->seqs[a->row_seq[row]];
  const float *k = a->qkv + (int64_t)row * a->dims.qkv_pad + a->dims.q_width + kv_head * i->head_dim;
  const float *v = k + (int64_t)i->kv_heads * i->head_dim;
  int position = a->positions[row];
  char *block = colibri_arena_kv(a, layer, kv_head) +
                a->blocks[s->first_block + position / COLIBRI_KV_BLOCK] * a->dims.kv_block_bytes;
  place_head(env, k, env->model->layers[layer].k_norm, row, 1.0f, env->vector);
  env->kernels->store_kv(env->vector, v, i->head_dim, env->team->options.kv_format, position % COLIBRI_KV_BLOCK, block,
                         block + a->dims.kv_part_bytes);
}

static void store_kv(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  for (int row = t->a0; row < t->a1; row++)
    for (int head = 0; head < env->model->info.kv_heads; head++) store_kv_row(env, p->layer, row, head);
}

static void attend(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_model_info *i = &env->model->info;
  const colibri_step_seq *s = &a->seqs[t->e];
  int group = i->heads / i->kv_heads, nq = (t->a1 - t->a0) * group;
  float **q = env->pointers, **out = env->pointers + nq;
  int32_t *first = env->window, *last = env->window + nq;
  for (int row = t->a0, n = 0; row < t->a1; row++) {
    int position = a->positions[row];
    if (p->fused_kv) store_kv_row(env, p->layer, row, t->b0);
    for (int g = 0; g < group; g++, n++) {
      int64_t at = ((int64_t)t->b0 * group + g) * i->head_dim;
      q[n] = env->queries + (int64_t)n * i->head_dim;
      out[n] = a->att + (int64_t)row * a->dims.att_pad + at;
      last[n] = position;
      first[n] = i->sliding_window && position >= i->sliding_window ? position - i->sliding_window + 1 : 0;
      place_head(env, a->qkv + (int64_t)row * a->dims.qkv_pad + at, env->model->layers[p->layer].q_norm, row, i->attention_scale, q[n]);
    }
  }
  colibri_attend call = {
      .q = (const float *const *)q, .out = out, .first = first, .last = last, .nq = nq, .head_dim = i->head_dim,
      .kv_format = env->team->options.kv_format, .kv = colibri_arena_kv(a, p->layer, t->b0), .block_stride = a->dims.kv_block_bytes,
      .v_offset = a->dims.kv_part_bytes, .blocks = a->blocks + s->first_block, .scratch = env->attend};
  env->kernels->attend(&call);
}

static void prepare_o(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_matrix *o = &env->model->layers[p->layer].o;
  for (int row = t->a0; row < t->a1; row++)
    prepare_row(env, o, a->att + (int64_t)row * a->dims.att_pad, a->act_att + (int64_t)row * a->dims.att_row_bytes, row, p->layer);
}

static void project_o(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_matrix *o = &env->model->layers[p->layer].o;
  int n = t->a1 - t->a0, stride = a->dims.hidden_pad;
  int64_t at = (int64_t)t->a0 * stride + 32 * t->b0;
  point_rows(env, a->act_att + (int64_t)t->a0 * a->dims.att_row_bytes, a->dims.att_row_bytes, n);
  env->kernels->gemm[o->format](panel_at(o, t->b0), t->b1 - t->b0, o->groups, env->rows, n, a->x1 + at, stride, panel_after(env, o));
  for (int r = 0; r < n; r++, at += stride) env->kernels->add(a->x1 + at, a->x0 + at, 32 * (t->b1 - t->b0), a->x1 + at);
}

/* ---------------------------------------------------------------- experts */

/* Normed rows that are at hand at the same time: the gate is faster for several. */
#define MOE_ROWS 16

/* Gate logits of rows row.. of n, normed [n, hidden_pad] being what the experts read. Where the router has a norm of its own, normed is used up. */
static void gate_rows(const colibri_lane_env *env, const colibri_layer *layer, int row, int n, float *normed) {
  const colibri_arena *a = &env->arena;
  const colibri_model_info *i = &env->model->info;
  int stride = a->dims.hidden_pad;
  for (int r = 0; layer->router_input_scale && r < n; r++)
    env->kernels->rmsnorm(a->x1 + (int64_t)(row + r) * stride, layer->router_input_scale, i->norm_eps, i->hidden, normed + (int64_t)r * stride);
  env->kernels->gate(layer->router, layer->route.bias, i->experts, i->hidden, normed, stride, n, a->gate + (int64_t)row * i->experts);
}

static void prepare_moe(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_model_info *i = &env->model->info;
  const colibri_layer *layer = &env->model->layers[p->layer];
  int stride = a->dims.hidden_pad, room = COLIBRI_PRODUCT_FLOATS / stride, most = room < 1 ? 1 : room < MOE_ROWS ? room : MOE_ROWS;
  float *normed = room < 1 ? env->vector : env->product;
  for (int row = t->a0; row < t->a1; row += most) {
    int n = t->a1 - row < most ? t->a1 - row : most;
    for (int r = 0; r < n; r++) {
      float *x = normed + (int64_t)r * stride;
      env->kernels->rmsnorm(a->x1 + (int64_t)(row + r) * stride, layer->ffn_norm, i->norm_eps, i->hidden, x);
      prepare_row(env, &layer->experts[0].gate_up, x, a->act_hidden + (int64_t)(row + r) * a->dims.hidden_row_bytes, row + r, p->layer);
    }
    if (layer->router) gate_rows(env, layer, row, n, normed);
  }
}

/* Rows of products times their pairs' weights, where a weight multiplies what an expert reads: the products are linear in it. */
static void weigh_input(const colibri_lane_env *env, int pair, int n, int width, float *product) {
  for (int r = 0; r < n; r++)
    for (int j = 0; j < width; j++) product[(int64_t)r * width + j] *= env->arena.pair_weight[pair + r];
}

/* What multiplies an expert's output. */
static float output_weight(const colibri_lane_env *env, int pair) {
  return env->model->router.apply_at == COLIBRI_APPLY_INPUT ? 1.0f : env->arena.pair_weight[pair];
}

/* The panel of gate_up that is read after panels 2 b0 .. 2 b of a task. */
static const char *gate_up_next(const colibri_lane_env *env, const colibri_phase *p, const colibri_task *t, const colibri_expert *x, int b) {
  if (b < t->b1) return panel_at(&x->gate_up, 2 * b);
  return env->after ? panel_at(&env->model->layers[p->layer].experts[env->after->e].gate_up, 2 * env->after->b0) : NULL;
}

/* Hidden activations of pairs a0..a1 for neurons 32 b0 .. 32 b1: two panels give 32 neurons, one quantisation group, prepared on the spot. */
static void gate_up(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_expert *x = &env->model->layers[p->layer].experts[t->e];
  int32_t ffn = x->down.k;
  for (int r0 = t->a0; r0 < t->a1; r0 += ROW_TILE) {
    int n = t->a1 - r0 < ROW_TILE ? t->a1 - r0 : ROW_TILE;
    int step = COLIBRI_PRODUCT_FLOATS / (96 * n); /* 64 floats of product and 32 of hidden activation a row and pair of panels */
    if (step > 8) step = 8;
    for (int r = 0; r < n; r++) env->rows[r] = a->act_hidden + (int64_t)a->pair_row[r0 + r] * a->dims.hidden_row_bytes;
    for (int b = t->b0; b < t->b1; b += step) {
      int pairs = t->b1 - b < step ? t->b1 - b : step;
      float *hidden = env->product + (int64_t)n * 64 * pairs;
      env->kernels->gemm[x->gate_up.format](panel_at(&x->gate_up, 2 * b), 2 * pairs, x->gate_up.groups, env->rows, n, env->product, 64 * pairs,
                                            gate_up_next(env, p, t, x, b + pairs));
      if (env->model->router.apply_at == COLIBRI_APPLY_INPUT) weigh_input(env, r0, n, 64 * pairs, env->product);
      env->kernels->silu_mul(env->product, 64 * pairs, n, 2 * pairs, hidden, 32 * pairs);
      int valid = ffn - 32 * b < 32 * pairs ? ffn - 32 * b : 32 * pairs;
      for (int r = 0; r < n; r++)
        if (env->kernels->prepare[x->down.format](hidden + (int64_t)r * 32 * pairs, valid, x->down.groups, b, b + pairs,
                                                  a->act_ffn + (int64_t)(r0 + r) * a->dims.ffn_row_bytes))
          mark_bad(env, a->pair_row[r0 + r], p->layer);
    }
  }
}

/* The panel of down that is read after panels b0..b of expert e in a task: the expert's next, or the next expert's first. */
static const char *down_next(const colibri_lane_env *env, const colibri_phase *p, const colibri_task *t, int e, int b) {
  const colibri_expert *experts = env->model->layers[p->layer].experts;
  const int32_t *first = env->arena.expert_first;
  if (b < t->b1) return panel_at(&experts[e].down, b);
  while (++e < env->model->info.experts)
    if (first[e + 1] > first[e]) return panel_at(&experts[e].down, t->b0);
  return NULL;
}

/* Output columns of panels b0..b1 for all rows: residual plus the experts' weighted outputs in ascending expert order. The task owns these
 * columns, so the sum needs no second phase. */
static void down(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_layer *layer = &env->model->layers[p->layer];
  int stride = a->dims.hidden_pad, width = 32 * (t->b1 - t->b0);
  for (int row = t->a0; row < t->a1; row++) {
    int64_t at = (int64_t)row * stride + 32 * t->b0;
    memcpy(a->x0 + at, a->x1 + at, sizeof(float) * (size_t)width);
  }
  for (int e = 0; e < env->model->info.experts; e++) {
    const colibri_matrix *m = &layer->experts[e].down;
    for (int r0 = a->expert_first[e]; r0 < a->expert_first[e + 1]; r0 += ROW_TILE) {
      int left = a->expert_first[e + 1] - r0, n = left < ROW_TILE ? left : ROW_TILE;
      int step = COLIBRI_PRODUCT_FLOATS / (32 * n);
      point_rows(env, a->act_ffn + (int64_t)r0 * a->dims.ffn_row_bytes, a->dims.ffn_row_bytes, n);
      for (int b = t->b0; b < t->b1; b += step) {
        int panels = t->b1 - b < step ? t->b1 - b : step;
        env->kernels->gemm[m->format](panel_at(m, b), panels, m->groups, env->rows, n, env->product, 32 * panels, down_next(env, p, t, e, b + panels));
        for (int r = 0; r < n; r++)
          env->kernels->axpy(output_weight(env, r0 + r), env->product + (int64_t)r * 32 * panels, 32 * panels,
                             a->x0 + (int64_t)a->pair_row[r0 + r] * stride + 32 * b);
      }
    }
  }
}

/* One expert's part of that, for panels b0..b1 of its pairs a0..a1: the products, not yet weighted. */
static void down_split(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_matrix *m = &env->model->layers[p->layer].experts[t->e].down;
  int stride = a->dims.hidden_pad;
  for (int r0 = t->a0; r0 < t->a1; r0 += ROW_TILE) {
    int n = t->a1 - r0 < ROW_TILE ? t->a1 - r0 : ROW_TILE;
    point_rows(env, a->act_ffn + (int64_t)r0 * a->dims.ffn_row_bytes, a->dims.ffn_row_bytes, n);
    env->kernels->gemm[m->format](panel_at(m, t->b0), t->b1 - t->b0, m->groups, env->rows, n, a->pair_out + (int64_t)r0 * stride + 32 * t->b0, stride,
                                  env->after ? panel_at(&env->model->layers[p->layer].experts[env->after->e].down, env->after->b0) : NULL);
  }
}

/* The rest of it, for columns 32 b0 .. 32 b1: the same sum in the same order. */
static void combine(colibri_lane_env *env, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  int stride = a->dims.hidden_pad, width = 32 * (t->b1 - t->b0), k = env->model->info.top_k;
  for (int row = t->a0; row < t->a1; row++) {
    int64_t at = (int64_t)row * stride + 32 * t->b0;
    memcpy(a->x0 + at, a->x1 + at, sizeof(float) * (size_t)width);
    for (int i = 0; i < k; i++) {
      int32_t pair = a->row_pairs[row * (int64_t)k + i];
      env->kernels->axpy(output_weight(env, pair), a->pair_out + (int64_t)pair * stride + 32 * t->b0, width, a->x0 + at);
    }
  }
}

/* ---------------------------------------------------------------- head */

static void prepare_head(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_model *m = env->model;
  for (int n = t->a0; n < t->a1; n++) {
    int row = a->logit_rows[n];
    env->kernels->rmsnorm(a->x0 + (int64_t)row * a->dims.hidden_pad, m->final_norm, m->info.norm_eps, m->info.hidden, env->vector);
    prepare_row(env, &m->head, env->vector, a->act_hidden + (int64_t)n * a->dims.hidden_row_bytes, row, p->layer);
  }
}

static void head(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_matrix *m = &env->model->head;
  int64_t vocab = m->n;
  int n = t->a1 - t->a0, whole = (int)(vocab / 32) < t->b1 ? (int)(vocab / 32) : t->b1, tail = (int)(vocab - 32 * (int64_t)whole);
  float *out = a->logits + t->a0 * vocab;
  (void)p;
  point_rows(env, a->act_hidden + (int64_t)t->a0 * a->dims.hidden_row_bytes, a->dims.hidden_row_bytes, n);
  env->kernels->gemm[m->format](panel_at(m, t->b0), whole - t->b0, m->groups, env->rows, n, out + 32 * t->b0, vocab, panel_after(env, m));
  if (whole == t->b1) return;
  for (int r0 = 0; r0 < n; r0 += ROW_TILE) { /* the last panel reaches beyond the vocabulary: through the product buffer */
    int rows = n - r0 < ROW_TILE ? n - r0 : ROW_TILE;
    env->kernels->gemm[m->format](panel_at(m, whole), 1, m->groups, env->rows + r0, rows, env->product, 32, NULL);
    for (int r = 0; r < rows; r++)
      memcpy(out + (r0 + r) * vocab + 32 * (int64_t)whole, env->product + 32 * (int64_t)r, sizeof(float) * (size_t)tail);
  }
}

static void sample(colibri_lane_env *env, const colibri_phase *p, const colibri_task *t) {
  const colibri_arena *a = &env->arena;
  const colibri_model_info *i = &env->model->info;
  for (int n = t->a0; n < t->a1; n++) {
    int row = a->logit_rows[n];
    const colibri_step_seq *s = &a->seqs[a->row_seq[row]];
    colibri_sample(env->kernels, a->logits + (int64_t)n * i->vocab, i->vocab, &s->sampling, (int64_t)a->positions[row] + 1,
                   a->history + s->first_history, s->n_history, a->targets[n], p->layer, env->sampler, &a->results[n]);
  }
}

/* ---------------------------------------------------------------- operations */

const char *colibri_operation_name(int operation) {
  static const char *const names[COLIBRI_OPS] = {"prepare_attention", "qkv", "store_kv", "attend", "prepare_o", "o", "prepare_moe", "route", "gate_up",
                                                 "down", "combine", "prepare_head", "head", "sample"};
  return operation >= 0 && operation < COLIBRI_OPS ? names[operation] : NULL;
}

/* All but COLIBRI_OP_ROUTE, which the front end does. */
void colibri_task_run(colibri_lane_env *env, const colibri_phase *phase, const colibri_task *task) {
  switch (phase->op) {
    case COLIBRI_OP_PREPARE_ATTENTION: prepare_attention(env, phase, task); break;
    case COLIBRI_OP_QKV: qkv(env, phase, task); break;
    case COLIBRI_OP_STORE_KV: store_kv(env, phase, task); break;
    case COLIBRI_OP_ATTEND: attend(env, phase, task); break;
    case COLIBRI_OP_PREPARE_O: prepare_o(env, phase, task); break;
    case COLIBRI_OP_O: project_o(env, phase, task); break;
    case COLIBRI_OP_PREPARE_MOE: prepare_moe(env, phase, task); break;
    case COLIBRI_OP_GATE_UP: gate_up(env, phase, task); break;
    case COLIBRI_OP_DOWN: env->team->options.split_down ? down_split(env, phase, task) : down(env, phase, task); break;
    case COLIBRI_OP_COMBINE: combine(env, task); break;
    case COLIBRI_OP_PREPARE_HEAD: prepare_head(env, phase, task); break;
    case COLIBRI_OP_HEAD: head(env, phase, task); break;
    case COLIBRI_OP_SAMPLE: sample(env, phase, task); break;
    default: assert(!"an unknown operation"); break;
  }
}

/* ---------------------------------------------------------------- a lane */

static size_t align64(size_t n) { return (n + 63) / 64 * 64; }

int colibri_lane_env_open(colibri_lane_env *env, const colibri_model *model, colibri_team *team, char *arena, int lane, colibri_error *err) {
  const colibri_model_info *i = &model->info;
  size_t group = (size_t)(i->heads / i->kv_heads), nq = (size_t)colibri_attend_rows(i) * group;
  memset(env, 0, sizeof *env);
  env->model = model;
  env->kernels = colibri_kernels_get();
  env->team = team;
  env->lane = lane;
  colibri_arena_layout(model, &team->options, arena, &env->arena);
  const colibri_dims *d = &env->arena.dims;
  size_t widest = (size_t)(d->hidden_pad > d->att_pad ? d->hidden_pad : d->att_pad);
  if (widest < (size_t)i->head_dim) widest = (size_t)i->head_dim;
  size_t rows = align64(sizeof(void *) * (size_t)team->options.max_rows), product = sizeof(float) * COLIBRI_PRODUCT_FLOATS;
  size_t vector = align64(sizeof(float) * widest), queries = align64(sizeof(float) * nq * (size_t)i->head_dim);
  size_t scratch = align64(sizeof(float) * (size_t)COLIBRI_ATTEND_SCRATCH(nq, i->head_dim));
  size_t window = align64(sizeof(int32_t) * 2 * nq), pointers = align64(sizeof(void *) * 2 * nq);
  size_t sampler = align64(colibri_sampler_scratch_bytes(i->vocab));
  char *p = env->block = aligned_alloc(64, rows + product + vector + queries + scratch + window + pointers + sampler);
  if (!p) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a lane's scratch of %zu bytes", rows + product + sampler);
  env->rows = (const void **)(void *)p, p += rows;
  env->product = (float *)(void *)p, p += product;
  env->vector = (float *)(void *)p, p += vector;
  env->queries = (float *)(void *)p, p += queries;
  env->attend = (float *)(void *)p, p += scratch;
  env->window = (int32_t *)(void *)p, p += window;
  env->pointers = (float **)(void *)p, p += pointers;
  env->sampler = p;
  return COLIBRI_OK;
}

void colibri_lane_env_close(colibri_lane_env *env) {
  free(env->block);
  env->block = NULL;
}
