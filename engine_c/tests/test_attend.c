/* test_attend.c - paged attention and the KV store of every instruction set against the generic kernels, bit by bit, and the generic one against
 * a plain softmax in double. */
#include "fence.h"

#include <math.h>

#define MAX_NQ 13
#define MAX_DIM 144

static const colibri_kernels *k, *generic;

typedef struct cache {
  colibri_attend task;
  char *pool;
  int32_t blocks[64], n_blocks;
  size_t element;
} cache;

/* A pool of one sequence whose blocks lie in shuffled order between fences, all NaN where no position is. */
static void cache_make(cache *c, int head_dim, int format, int positions) {
  c->element = format == COLIBRI_KV_F32 ? 4 : 2;
  size_t v_offset = (16 * (size_t)head_dim * c->element + 63) / 64 * 64, stride = 2 * v_offset;
  c->n_blocks = (positions + 15) / 16;
  int pool_blocks = c->n_blocks + 2;
  c->pool = fence_bytes((size_t)pool_blocks * stride, 1);
  memset(c->pool, 0xff, (size_t)pool_blocks * stride);
  for (int i = 0; i < c->n_blocks; i++) c->blocks[i] = pool_blocks - 1 - i;
  for (int i = 0; i < c->n_blocks; i++) {
    int j = random_int(0, c->n_blocks - 1), t = c->blocks[i];
    c->blocks[i] = c->blocks[j];
    c->blocks[j] = t;
  }
  int32_t *table = fence_bytes(4 * (size_t)c->n_blocks, 1);
  memcpy(table, c->blocks, 4 * (size_t)c->n_blocks);
  c->task = (colibri_attend){.head_dim = head_dim, .kv_format = format, .kv = c->pool, .block_stride = (int64_t)stride, .v_offset = (int64_t)v_offset, .blocks = table};
}

static char *block_at(const cache *c, int position) { return c->pool + c->blocks[position / 16] * c->task.block_stride; }

static void cache_fill(cache *c, int positions, int kind) {
  float key[MAX_DIM], value[MAX_DIM];
  for (int p = 0; p < positions; p++) {
    fill_floats(key, (size_t)c->task.head_dim, kind);
    fill_floats(value, (size_t)c->task.head_dim, kind);
    k->store_kv(key, value, c->task.head_dim, c->task.kv_format, p % 16, block_at(c, p), block_at(c, p) + c->task.v_offset);
  }
}

static void test_store(void) {
  for (int round = 0; round < 200; round++) {
    int head_dim = random_int(1, MAX_DIM), format = round & 1, slot = random_int(0, 15);
    size_t bytes = 16 * (size_t)head_dim * (format == COLIBRI_KV_F32 ? 4 : 2);
    float *key = random_floats((size_t)head_dim, round % VALUE_KINDS), *value = random_floats((size_t)head_dim, round % VALUE_KINDS);
    char *k_block = fence_bytes(bytes, 0), *v_block = fence_bytes(bytes, 1), *k_want = fence_bytes(bytes, 1), *v_want = fence_bytes(bytes, 1);
    if (round % 5 == 0) key[head_dim / 2] = value[head_dim / 3] = not_finite();
    k->store_kv(key, value, head_dim, format, slot, k_block, v_block);
    generic->store_kv(key, value, head_dim, format, slot, k_want, v_want);
    CHECK(!memcmp(k_block, k_want, bytes) && !memcmp(v_block, v_want, bytes), "%s store_kv, head_dim %d, format %d", k->name, head_dim, format);
    fence_release();
  }
}

static void run(const colibri_kernels *kernels, colibri_attend *t, int nq, float *const *out) {
  t->nq = nq;
  t->out = out;
  t->scratch = fence_bytes((size_t)COLIBRI_ATTEND_SCRATCH(nq, t->head_dim) / 16 * 64, 1);
  CHECK((uintptr_t)t->scratch % 64 == 0, "scratch is aligned");
  kernels->attend(t);
}

static void test_bits(void) {
  static const int dims[] = {64, 128, 80, 96, 4, 7, 16, 20, 33, 48, 112, MAX_DIM};
  for (int round = 0; round < 400; round++) {
    int head_dim = dims[round % 12], nq = random_int(1, MAX_NQ), positions = random_int(1, 300), shared = random_int(0, 2);
    cache c;
    cache_make(&c, head_dim, round & 1 ? COLIBRI_KV_BF16 : COLIBRI_KV_F32, positions);
    cache_fill(&c, positions, round % 7 == 6 ? VALUES_TINY : VALUES_NORMAL);
    const float *q[MAX_NQ];
    float *out[MAX_NQ], *want[MAX_NQ], *alone = fence_floats((size_t)head_dim);
    int32_t *first = fence_bytes(4 * (size_t)nq, 1), *last = fence_bytes(4 * (size_t)nq, 1);
    for (int i = 0; i < nq; i++) {
      q[i] = random_floats((size_t)head_dim, VALUES_NORMAL);
      out[i] = fence_floats((size_t)head_dim);
      want[i] = fence_floats((size_t)head_dim);
      last[i] = shared == 0 ? positions - 1 : shared == 1 && positions > nq ? positions - nq + i : random_int(0, positions - 1);
      first[i] = round % 3 ? 0 : random_int(0, last[i]);
    }
    c.task.q = q;
    c.task.first = first;
    c.task.last = last;
    run(k, &c.task, nq, out);
    run(generic, &c.task, nq, want);
    for (int i = 0; i < nq; i++) CHECK_SAME(out[i], want[i], head_dim, "%s attend, head_dim %d, query %d of %d, positions %d..%d", k->name, head_dim, i, nq, first[i], last[i]);
    int one = random_int(0, nq - 1); /* alone, a query gives the same bits */
    c.task.q = q + one;
    c.task.first = first + one;
    c.task.last = last + one;
    run(k, &c.task, 1, &alone);
    CHECK_SAME(alone, out[one], head_dim, "%s attend alone", k->name);
    fence_release();
  }
}

/* A NaN at one position reaches the queries that see it and no other. */
static void test_poison(void) {
  for (int format = 0; format < 2; format++) {
    cache c;
    int32_t first[4] = {0, 0, 0, 0}, last[4] = {38, 39, 40, 41};
    const float *q[4];
    float *out[4], bad[64];
    cache_make(&c, 64, format, 42);
    cache_fill(&c, 42, VALUES_NORMAL);
    for (int d = 0; d < 64; d++) bad[d] = NAN;
    k->store_kv(bad, bad, 64, format, 40 % 16, block_at(&c, 40), block_at(&c, 40) + c.task.v_offset);
    for (int i = 0; i < 4; i++) {
      q[i] = random_floats(64, VALUES_NORMAL);
      out[i] = fence_floats(64);
    }
    c.task.q = q;
    c.task.first = first;
    c.task.last = last;
    run(k, &c.task, 4, out);
    for (int i = 0; i < 4; i++)
      for (int d = 0; d < 64; d++) CHECK(!isnan(out[i][d]) == (last[i] < 40), "%s: query that sees up to %d gives %g", k->name, last[i], (double)out[i][d]);
    fence_release();
  }
}

/* Against a softmax in double; f32 K and V, scores of a few units: 100 times the rounding of one operation is ample for 200 positions. */
static void test_value(void) {
  enum { N = 200, D = 64 };
  cache c;
  int32_t first = 30, last = N - 1;
  float *out = fence_floats(D), *query = random_floats(D, VALUES_NORMAL);
  const float *q = query;
  double want[D] = {0}, sum = 0, magnitude[D] = {0};
  for (int d = 0; d < D; d++) query[d] *= 0.25f;
  cache_make(&c, D, COLIBRI_KV_F32, N);
  cache_fill(&c, N, VALUES_NORMAL);
  for (int p = first; p <= last; p++) {
    const float *key = (const float *)block_at(&c, p), *value = (const float *)(block_at(&c, p) + c.task.v_offset) + p % 16 * D;
    double s = 0;
    for (int d = 0; d < D; d++) s += (double)q[d] * (double)key[d * 16 + p % 16];
    sum += exp(s);
    for (int d = 0; d < D; d++) {
      want[d] += exp(s) * (double)value[d];
      magnitude[d] += exp(s) * fabs((double)value[d]);
    }
  }
  c.task.q = &q;
  c.task.first = &first;
  c.task.last = &last;
  run(k, &c.task, 1, &out);
  for (int d = 0; d < D; d++)
    CHECK(fabs((double)out[d] - want[d] / sum) <= 100 * 0x1p-24 * magnitude[d] / sum, "%s attend [%d] is %g, not %g", k->name, d, (double)out[d], want[d] / sum);
  fence_release();
}

static void test_isa(const char *isa) {
  (void)isa;
  k = colibri_kernels_get();
  generic = colibri_kernels_generic();
  test_store();
  test_bits();
  test_poison();
  test_value();
}

int main(void) {
  check_each_isa(test_isa);
  return check_result("test_attend");
}
