/* attend_v16.inc.h - paged attention over v16 (see kernels_v16.inc.h). Chunks of 64 positions are the outer loop, so K and V come from the cache for all
 * queries but the first few; up to four queries share each load. */

/* State of a query between chunks: running sums by position % 16, running maximum, padding. Behind the states: exp(score - maximum) of one batch. */
typedef struct attend_state {
  float sum[16];
  float top;
  float pad[15];
} attend_state;

#define ATTEND_BATCH 4

/* A batch: up to four queries that see something of one chunk. */
typedef struct attend_batch {
  int n;
  int query[ATTEND_BATCH];
  int lo[ATTEND_BATCH], hi[ATTEND_BATCH]; /* visible positions within the chunk, 0..63, inclusive */
} attend_batch;

V16 const char *kv_block(const colibri_attend *a, int block) { return a->kv + a->blocks[block] * a->block_stride; }

V16 v16 kv_load(const char *p, int64_t i, const int is_f32) { return is_f32 ? v16_load((const float *)p + i) : v16_load_bf16((const uint16_t *)p + i); }
V16 v16 kv_load_n(const char *p, int64_t i, int n, const int is_f32) {
  return is_f32 ? v16_load_n((const float *)p + i, n) : v16_load_bf16_n((const uint16_t *)p + i, n);
}

#define UNROLL _Pragma("GCC unroll 8")

/* Scores of Q queries against B blocks of K, Q and B constants: p[64 i + 16 b + lane]. */
V16 void attend_scores(const int Q, const int B, const float *const *q, const char *const *k, int head_dim, const int is_f32, float *p) {
  v16 s[ATTEND_BATCH][4];
  UNROLL for (int i = 0; i < Q; i++) UNROLL for (int b = 0; b < B; b++) s[i][b] = v16_set1(0.0f);
  for (int d = 0; d < head_dim; d++) {
    v16 key[4];
    UNROLL for (int b = 0; b < B; b++) key[b] = kv_load(k[b], d * 16, is_f32);
    UNROLL for (int i = 0; i < Q; i++) {
      v16 x = v16_set1(q[i][d]);
      UNROLL for (int b = 0; b < B; b++) s[i][b] = v16_fma(x, key[b], s[i][b]);
    }
  }
  UNROLL for (int i = 0; i < Q; i++) UNROLL for (int b = 0; b < B; b++) v16_store(p + 64 * i + 16 * b, s[i][b]);
}

/* Blocks b0 .. b1 of the chunk, as many at a time as registers allow. A call of several blocks with fewer left repeats the last. */
V16 void attend_all_scores(const int Q, const colibri_attend *a, const float *const *q, int chunk, int b0, int b1, const int is_f32, float *p) {
  const int at_once = V16_REGISTERS >= 32 || Q == 1 ? 4 : 1;
  for (int b = b0; b <= b1; b += at_once) {
    const char *k[4];
    float *to = p + 16 * b, spill[64 * ATTEND_BATCH];
    int left = b1 - b + 1 < at_once ? b1 - b + 1 : at_once;
    for (int i = 0; i < at_once; i++) k[i] = kv_block(a, chunk * 4 + b + (i < left ? i : left - 1));
    attend_scores(Q, at_once, q, k, a->head_dim, is_f32, left < at_once ? spill : to);
    for (int i = 0; left < at_once && i < Q; i++) memcpy(to + 64 * i, spill + 64 * i, 64 * (size_t)left);
  }
}

/* Scores to exp(score - maximum), 0 where invisible; returns what the sums so far are to be multiplied with. */
V16 float attend_softmax(attend_state *state, float *p, int lo, int hi) {
  v16 s[4], nothing = v16_set1(-INFINITY), top = v16_set1(state->top);
  int b0 = lo / 16, b1 = hi / 16;
  for (int b = b0; b <= b1; b++) {
    s[b] = v16_load(p + 16 * b);
    if (hi - 16 * b < 15) s[b] = v16_first(hi - 16 * b + 1, s[b], nothing);
    if (lo > 16 * b) s[b] = v16_first(lo - 16 * b, nothing, s[b]);
    top = v16_max(s[b], top);
  }
  float maximum = v16_top(top), correction = colibri_expf_steps(state->top - maximum);
  v16 m = v16_set1(maximum), sum = v16_mul(v16_load(state->sum), v16_set1(correction));
  for (int b = b0; b <= b1; b++) {
    v16 e = v16_exp(v16_sub(s[b], m));
    v16_store(p + 16 * b, e);
    sum = v16_add(sum, e);
  }
  v16_store(state->sum, sum);
  state->top = maximum;
  return correction;
}

/* out[i][d .. d + 16 D) += sum over positions lo .. hi of p[64 i + j] * V[j], Q and D constants; n < 16 lanes if D is 0. */
V16 void attend_values(const int Q, const int D, int n, const colibri_attend *a, int chunk, int lo, int hi, int d, const float *const *p,
                       float *const *out, const int is_f32) {
  enum { MOST = 8 };
  const int wide = D ? D : 1;
  v16 acc[ATTEND_BATCH][MOST];
  UNROLL for (int i = 0; i < Q; i++)
    UNROLL for (int c = 0; c < wide; c++) acc[i][c] = D ? v16_load(out[i] + d + 16 * c) : v16_load_n(out[i] + d, n);
  for (int b = lo / 16; b <= hi / 16; b++) {
    const char *v = kv_block(a, chunk * 4 + b) + a->v_offset;
    int last = hi - 16 * b < 15 ? hi - 16 * b : 15;
    for (int j = lo > 16 * b ? lo - 16 * b : 0; j <= last; j++) {
      v16 weight[ATTEND_BATCH];
      int64_t at = (int64_t)j * a->head_dim + d;
      UNROLL for (int i = 0; i < Q; i++) weight[i] = v16_set1(p[i][16 * b + j]);
      UNROLL for (int c = 0; c < wide; c++) {
        v16 value = D ? kv_load(v, at + 16 * c, is_f32) : kv_load_n(v, at, n, is_f32);
        UNROLL for (int i = 0; i < Q; i++) acc[i][c] = v16_fma(weight[i], value, acc[i][c]);
      }
    }
  }
  UNROLL for (int i = 0; i < Q; i++)
    UNROLL for (int c = 0; c < wide; c++)
      if (D) v16_store(out[i] + d + 16 * c, acc[i][c]);
      else v16_store_n(out[i] + d, acc[i][c], n);
}

/* All of head_dim, in column strips of as many registers as there are. */
V16 void attend_all_values(const int Q, const colibri_attend *a, int chunk, int lo, int hi, const float *const *p, float *const *out,
                           const int is_f32) {
  const int strip = V16_REGISTERS >= 32 ? 4 : Q == 1 ? 4 : Q == 2 ? 2 : 1;
  int d = 0;
  if (lo > hi) return;
  for (; d + 16 * strip <= a->head_dim; d += 16 * strip) attend_values(Q, strip, 0, a, chunk, lo, hi, d, p, out, is_f32);
  for (; strip > 1 && d + 16 <= a->head_dim; d += 16) attend_values(Q, 1, 0, a, chunk, lo, hi, d, p, out, is_f32);
  if (d < a->head_dim) attend_values(Q, 0, a->head_dim - d, a, chunk, lo, hi, d, p, out, is_f32);
}

/* The positions of one query that others of its batch do not see; out of line, since it is rare and large. */
static __attribute__((noinline)) void attend_values_alone(const colibri_attend *a, int chunk, int lo, int hi, const float *p, float *out) {
  if (a->kv_format == COLIBRI_KV_F32) attend_all_values(1, a, chunk, lo, hi, &p, &out, 1);
  else attend_all_values(1, a, chunk, lo, hi, &p, &out, 0);
}

/* Q queries of a batch against one chunk, Q a constant. Positions that all of them see are taken together; what only some see before and after, one
 * query at a time, so that each sums exactly its own positions in ascending order. */
V16 void attend_chunk(const int Q, const colibri_attend *a, const attend_batch *batch, int chunk, attend_state *states, float *p, const int is_f32) {
  const float *q[ATTEND_BATCH], *weights[ATTEND_BATCH];
  float *out[ATTEND_BATCH];
  int lo = batch->lo[0], hi = batch->hi[0], least = lo, most = hi; /* lo..hi: seen by all; least..most: by any */
  for (int i = 0; i < Q; i++) {
    q[i] = a->q[batch->query[i]];
    out[i] = a->out[batch->query[i]];
    weights[i] = p + 64 * i;
    lo = batch->lo[i] > lo ? batch->lo[i] : lo;
    hi = batch->hi[i] < hi ? batch->hi[i] : hi;
    least = batch->lo[i] < least ? batch->lo[i] : least;
    most = batch->hi[i] > most ? batch->hi[i] : most;
  }
  attend_all_scores(Q, a, q, chunk, least / 16, most / 16, is_f32, p);
  for (int i = 0; i < Q; i++) scale_by(out[i], a->head_dim, attend_softmax(&states[batch->query[i]], p + 64 * i, batch->lo[i], batch->hi[i]));
  if (lo > hi) lo = 64, hi = 63; /* nothing in common */
  for (int i = 0; Q > 1 && i < Q; i++) attend_values_alone(a, chunk, batch->lo[i], batch->hi[i] < lo - 1 ? batch->hi[i] : lo - 1, weights[i], out[i]);
  attend_all_values(Q, a, chunk, lo, hi, weights, out, is_f32);
  for (int i = 0; Q > 1 && lo <= hi && i < Q; i++) attend_values_alone(a, chunk, hi + 1, batch->hi[i], weights[i], out[i]);
}

static void attend_batch_f32(const colibri_attend *a, const attend_batch *batch, int chunk, attend_state *states, float *p) {
  switch (batch->n) {
    case 1: attend_chunk(1, a, batch, chunk, states, p, 1); break;
    case 2: attend_chunk(2, a, batch, chunk, states, p, 1); break;
    case 3: attend_chunk(3, a, batch, chunk, states, p, 1); break;
    default: attend_chunk(4, a, batch, chunk, states, p, 1); break;
  }
}

static void attend_batch_bf16(const colibri_attend *a, const attend_batch *batch, int chunk, attend_state *states, float *p) {
  switch (batch->n) {
    case 1: attend_chunk(1, a, batch, chunk, states, p, 0); break;
    case 2: attend_chunk(2, a, batch, chunk, states, p, 0); break;
    case 3: attend_chunk(3, a, batch, chunk, states, p, 0); break;
    default: attend_chunk(4, a, batch, chunk, states, p, 0); break;
  }
}

static void attend(const colibri_attend *a) {
  attend_state *states = (attend_state *)a->scratch;
  float *p = (float *)(states + a->nq);
  int chunk = INT32_MAX, last_chunk = 0;
  for (int i = 0; i < a->nq; i++) {
    memset(states[i].sum, 0, sizeof states[i].sum);
    states[i].top = -INFINITY;
    memset(a->out[i], 0, (size_t)a->head_dim * sizeof(float));
    chunk = a->first[i] / 64 < chunk ? a->first[i] / 64 : chunk;
    last_chunk = a->last[i] / 64 > last_chunk ? a->last[i] / 64 : last_chunk;
  }
  for (; chunk <= last_chunk; chunk++) {
    attend_batch batch = {0};
    for (int i = 0; i < a->nq; i++) {
      int lo = a->first[i] - chunk * 64, hi = a->last[i] - chunk * 64;
      if (hi >= 0 && lo < 64) {
        batch.lo[batch.n] = lo < 0 ? 0 : lo;
        batch.hi[batch.n] = hi > 63 ? 63 : hi;
        batch.query[batch.n++] = i;
      }
      if (!batch.n || (batch.n < ATTEND_BATCH && i + 1 < a->nq)) continue;
      if (a->kv_format == COLIBRI_KV_F32) attend_batch_f32(a, &batch, chunk, states, p);
      else attend_batch_bf16(a, &batch, chunk, states, p);
      batch.n = 0;
    }
  }
  for (int i = 0; i < a->nq; i++) scale_by(a->out[i], a->head_dim, 1.0f / v16_fold(v16_load(states[i].sum)));
}

static void store_kv(const float *k, const float *v, int head_dim, int kv_format, int slot, void *k_block, void *v_block) {
  float *k32 = k_block, *v32 = v_block;
  uint16_t *k16 = k_block, *v16_ = v_block;
  if (kv_format == COLIBRI_KV_F32) {
    for (int d = 0; d < head_dim; d++) k32[d * 16 + slot] = k[d];
    memcpy(v32 + slot * head_dim, v, (size_t)head_dim * sizeof(float));
    return;
  }
  for (int d = 0; d < head_dim; d += 16) {
    int n = head_dim - d < 16 ? head_dim - d : 16;
    uint16_t column[16];
    v16_store_bf16(column, v16_load_n(k + d, n));
    for (int i = 0; i < n; i++) k16[(d + i) * 16 + slot] = column[i];
    v16_store_bf16_n(v16_ + slot * head_dim + d, v16_load_n(v + d, n), n);
  }
}
