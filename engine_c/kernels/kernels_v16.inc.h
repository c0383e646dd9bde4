/* kernels_v16.inc.h - all kernels but the matrix products, written once over vectors of 16 floats. kernels_avx2.c, kernels_avx512.c and
 * kernels_neon.c include it, each with its v16_*.h, and get functions equal bit by bit to kernels_generic.c: lane i is partial sum i there.
 *
 * A v16_*.h defines the type v16, V16_REGISTERS (how many fit into the register file) and, n being 0..16 and unaligned pointers allowed throughout:
 *   v16_set1 v16_load v16_store       and _n: the first n lanes only; others load as 0, memory behind them is not touched
 *   v16_add _sub _mul _div _fma _neg _sqrt  fma(a, b, c) = a b + c, rounded once
 *   v16_max(a, b) v16_min(a, b)       a > b ? a : b and a < b ? a : b, so b where a is NaN
 *   v16_first(n, a, b)                the first n lanes of a, the others of b
 *   v16_fold(a) v16_top(a)            sum in the order 8, 4, 2, 1; largest lane
 *   v16_scale(a, n, shifted)          a * 2^n rounded once; n also comes as the bits of shifted = n + 1.5 * 2^23
 *   v16_equal(a, b) v16_is_nan(a) v16_not_finite(a)    bit i set for lane i
 *   v16_amax_bits(a, b)               bits of the largest magnitude of 32 lanes as an integer
 *   v16_store_int8(q, a, b)           rounds 32 lanes to nearest even, stores them as int8, returns their sum
 *   v16_load_bf16 v16_store_bf16      and _n; nearest even, NaN stays NaN
 *   v16_and(a, bits) v16_tag(a, keep, tag)    a & bits, (a & keep) | tag, of the lanes' bits
 *   v16_other(a, b, one)              a ^ b ^ one: of a and b the one that `one` is not
 *   v16_columns8(x, ld, n, column)    16 rows of n <= 8 floats to 8 columns
 *   v16_best_of(z0, z1, id)           lane by lane the larger and the smaller of two vectors, with their numbers, id and id + 1
 *   v16_best_merge(a, b)              the two largest of two such, all of b's numbers being higher; the lower number wins ties
 *   v16_best_store(best, ids)         the pairs of numbers as int32
 *   v16_store_pairs(p, a, b)          a0 b0 a1 b1 ..
 *   v16_tile(rows, count, x, x_ld, w, w_ld, sum)    sum[r * count + e] += 16 floats of row r of x times those of row e of w; rows, count <= 4, constants */
#include <math.h>
#include <string.h>

#include "expf.h"
#include "kernels.h"

/* ---------------------------------------------------------------- exponential */

/* colibri_expf, operation by operation, of x <= 89. */
V16 v16 v16_exp_low(v16 x) {
  x = v16_max(v16_set1(-104.0f), x);
  v16 magic = v16_set1(0x1.8p23f);
  v16 shifted = v16_fma(x, v16_set1(0x1.715476p+0f), magic), n = v16_sub(shifted, magic);
  v16 r = v16_fma(n, v16_set1(-0x1.62e4p-1f), x);
  r = v16_fma(n, v16_set1(-0x1.7f7d1cp-20f), r);
  v16 p = v16_fma(v16_set1(0x1.6a23ccp-10f), r, v16_set1(0x1.123a20p-7f));
  p = v16_fma(p, r, v16_set1(0x1.5558f2p-5f));
  p = v16_fma(p, r, v16_set1(0x1.555492p-3f));
  p = v16_fma(p, r, v16_set1(0x1.fffffcp-2f));
  p = v16_fma(p, r, v16_set1(1.0f));
  p = v16_fma(p, r, v16_set1(1.0f));
  return v16_scale(p, n, shifted);
}
V16 v16 v16_exp(v16 x) { return v16_exp_low(v16_min(v16_set1(89.0f), x)); }

/* ---------------------------------------------------------------- activations */

/* 0 for finite lanes of x, NaN otherwise; adds up in acc. */
V16 v16 v16_poison(v16 x, v16 acc) { return v16_fma(x, v16_set1(0.0f), acc); }

static int prepare_f32(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  (void)groups;
  float *y = (float *)row + g0 * COLIBRI_GROUP;
  int n = (g1 - g0) * COLIBRI_GROUP, k = 0;
  v16 poison = v16_set1(0.0f);
  for (; k + 16 <= k_valid; k += 16) {
    v16 v = v16_load(x + k);
    poison = v16_poison(v, poison);
    v16_store(y + k, v);
  }
  for (; k < n; k += 16) {
    v16 v = v16_load_n(x + k, k < k_valid ? k_valid - k : 0);
    poison = v16_poison(v, poison);
    v16_store(y + k, v);
  }
  return v16_is_nan(poison) != 0;
}

static int prepare_bf16(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  (void)groups;
  uint16_t *y = (uint16_t *)row + g0 * COLIBRI_GROUP;
  int n = (g1 - g0) * COLIBRI_GROUP, k = 0;
  v16 poison = v16_set1(0.0f);
  for (; k + 16 <= k_valid; k += 16) {
    v16 v = v16_load(x + k);
    poison = v16_poison(v, poison);
    v16_store_bf16(y + k, v);
  }
  for (; k < n; k += 16) {
    v16 v = v16_load_n(x + k, k < k_valid ? k_valid - k : 0);
    poison = v16_poison(v, poison);
    v16_store_bf16(y + k, v);
  }
  return v16_is_nan(poison) != 0;
}

/* One group of 32 columns, the first `valid` of them read. */
V16 void load_group(const float *x, int valid, v16 *a, v16 *b) {
  if (valid >= COLIBRI_GROUP) {
    *a = v16_load(x);
    *b = v16_load(x + 16);
  } else {
    *a = v16_load_n(x, valid < 0 ? 0 : valid > 16 ? 16 : valid);
    *b = v16_load_n(x + 16, valid < 16 ? 0 : valid - 16);
  }
}

V16 float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* Within [-127, 127]; NaN gives 127. */
V16 v16 clamp127(v16 t) { return v16_max(v16_min(t, v16_set1(127.0f)), v16_set1(-127.0f)); }

static int prepare_int8(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  int8_t *q = row;
  float *scales = (float *)(q + groups * COLIBRI_GROUP);
  int32_t *offsets = (int32_t *)(scales + groups);
  uint32_t worst = 0;
  for (int g = g0; g < g1; g++, x += COLIBRI_GROUP, k_valid -= COLIBRI_GROUP) {
    v16 a, b;
    load_group(x, k_valid, &a, &b);
    uint32_t top = v16_amax_bits(a, b);
    worst = top > worst ? top : worst;
    float scale = float_of(top) / 127.0f;
    if (scale == 0) scale = 1;
    v16 s = v16_set1(scale);
    scales[g] = scale;
    offsets[g] = -128 * v16_store_int8(q + g * COLIBRI_GROUP, clamp127(v16_div(a, s)), clamp127(v16_div(b, s)));
  }
  return worst >= 0x7f800000u;
}

static int prepare_int4(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  int8_t *q = row;
  int32_t *exponents = (int32_t *)(q + groups * COLIBRI_GROUP);
  int32_t *offsets = exponents + groups;
  uint32_t worst = 0;
  for (int g = g0; g < g1; g++, x += COLIBRI_GROUP, k_valid -= COLIBRI_GROUP) {
    v16 a, b;
    load_group(x, k_valid, &a, &b);
    uint32_t top = v16_amax_bits(a, b), bits;
    worst = top > worst ? top : worst;
    float least = float_of(top) / 127.0f;
    memcpy(&bits, &least, sizeof bits);
    int32_t e = (int32_t)((bits + 0x7fffffu) >> 23) - 127; /* ceil(log2(amax / 127)) */
    e = e < -63 ? -63 : e > 63 ? 63 : e;
    v16 inverse = v16_set1(float_of((uint32_t)(127 - e) << 23));
    exponents[g] = e * (1 << 23);
    offsets[g] = -8 * v16_store_int8(q + g * COLIBRI_GROUP, clamp127(v16_mul(a, inverse)), clamp127(v16_mul(b, inverse)));
  }
  return worst >= 0x7f800000u;
}

/* ---------------------------------------------------------------- norm and gate */

static void rmsnorm(const float *x, const float *weight, float eps, int n, float *y) {
  int i = 0, whole = n / 16 * 16, tail = n % 16;
  v16 sum = v16_set1(0.0f);
  for (; i < whole; i += 16) {
    v16 v = v16_load(x + i);
    sum = v16_fma(v, v, sum);
  }
  if (tail) {
    v16 v = v16_load_n(x + i, tail);
    sum = v16_first(tail, v16_fma(v, v, sum), sum);
  }
  v16 r = v16_set1(1.0f / sqrtf(v16_fold(sum) / (float)n + eps));
  for (i = 0; i < whole; i += 16) v16_store(y + i, v16_mul(v16_mul(v16_load(x + i), r), v16_load(weight + i)));
  if (tail) v16_store_n(y + i, v16_mul(v16_mul(v16_load_n(x + i, tail), r), v16_load_n(weight + i, tail)), tail);
}

#define GATE_ROWS (V16_REGISTERS >= 32 ? 4 : 2) /* of a tile, measured */
#define GATE_EXPERTS 4

/* logits [rows, count] of rows and count experts, constants: each sum is by itself, whatever the tile. */
V16 void gate_tile(const int rows, const int count, const float *w, const float *bias, int hidden, const float *x, ptrdiff_t ld, float *logits,
                   int experts) {
  v16 sum[GATE_ROWS * GATE_EXPERTS];
  int k = 0, tail = hidden % 16;
  for (int i = 0; i < rows * count; i++) sum[i] = v16_set1(0.0f);
  for (; k + 16 <= hidden; k += 16) v16_tile(rows, count, x + k, ld, w + k, hidden, sum);
  for (int e = 0; tail && e < count; e++) {
    v16 u = v16_load_n(w + (int64_t)e * hidden + k, tail);
    for (int r = 0; r < rows; r++) {
      v16 *s = &sum[r * count + e];
      *s = v16_first(tail, v16_fma(u, v16_load_n(x + r * ld + k, tail), *s), *s);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int e = 0; e < count; e++) {
      float z = v16_fold(sum[r * count + e]);
      logits[(ptrdiff_t)r * experts + e] = bias ? z + bias[e] : z;
    }
}

/* All rows of `count` experts. */
V16 void gate_strip(const int count, const float *w, const float *bias, int hidden, const float *x, ptrdiff_t ld, int n, float *logits, int experts) {
  for (; n >= GATE_ROWS; n -= GATE_ROWS, x += GATE_ROWS * ld, logits += GATE_ROWS * experts)
    gate_tile(GATE_ROWS, count, w, bias, hidden, x, ld, logits, experts);
  for (; n; n--, x += ld, logits += experts) gate_tile(1, count, w, bias, hidden, x, ld, logits, experts);
}

static void gate(const float *w, const float *bias, int experts, int hidden, const float *x, ptrdiff_t ld, int n, float *logits) {
  int e = 0;
  for (; e + GATE_EXPERTS <= experts; e += GATE_EXPERTS)
    gate_strip(GATE_EXPERTS, w + (int64_t)e * hidden, bias ? bias + e : NULL, hidden, x, ld, n, logits + e, experts);
  for (; e < experts; e++) gate_strip(1, w + (int64_t)e * hidden, bias ? bias + e : NULL, hidden, x, ld, n, logits + e, experts);
}

/* ---------------------------------------------------------------- elementwise */

static void silu_mul(const float *gu, ptrdiff_t ld, int n_rows, int panels, float *y, ptrdiff_t y_ld) {
  for (int r = 0; r < n_rows; r++, gu += ld, y += y_ld)
    for (int p = 0; p < panels; p++) {
      v16 g = v16_load(gu + p * 32), u = v16_load(gu + p * 32 + 16);
      v16_store(y + p * 16, v16_mul(v16_div(g, v16_add(v16_set1(1.0f), v16_exp(v16_neg(g)))), u));
    }
}

static void axpy(float a, const float *x, int n, float *y) {
  v16 factor = v16_set1(a);
  int i = 0;
  for (; i + 16 <= n; i += 16) v16_store(y + i, v16_fma(factor, v16_load(x + i), v16_load(y + i)));
  if (i < n) v16_store_n(y + i, v16_fma(factor, v16_load_n(x + i, n - i), v16_load_n(y + i, n - i)), n - i);
}

static void add(const float *a, const float *b, int n, float *y) {
  int i = 0;
  for (; i + 16 <= n; i += 16) v16_store(y + i, v16_add(v16_load(a + i), v16_load(b + i)));
  if (i < n) v16_store_n(y + i, v16_add(v16_load_n(a + i, n - i), v16_load_n(b + i, n - i)), n - i);
}

static void scale_by(float *x, int n, float scale) {
  v16 s = v16_set1(scale);
  int i = 0;
  for (; i + 16 <= n; i += 16) v16_store(x + i, v16_mul(v16_load(x + i), s));
  if (i < n) v16_store_n(x + i, v16_mul(v16_load_n(x + i, n - i), s), n - i);
}

/* The half-split rotation of 16 pairs. */
V16 void rotate(v16 *a, v16 *b, v16 c, v16 s) {
  v16 turned = v16_fma(*a, c, v16_neg(v16_mul(*b, s)));
  *b = v16_fma(*b, c, v16_mul(*a, s));
  *a = turned;
}

static void rope_half(float *x, const float *cos_sin, int half) {
  int i = 0, rest = half % 16;
  for (; i + 16 <= half; i += 16) {
    v16 a = v16_load(x + i), b = v16_load(x + half + i);
    rotate(&a, &b, v16_load(cos_sin + i), v16_load(cos_sin + half + i));
    v16_store(x + i, a);
    v16_store(x + half + i, b);
  }
  if (rest) {
    v16 a = v16_load_n(x + i, rest), b = v16_load_n(x + half + i, rest);
    rotate(&a, &b, v16_load_n(cos_sin + i, rest), v16_load_n(cos_sin + half + i, rest));
    v16_store_n(x + i, a, rest);
    v16_store_n(x + half + i, b, rest);
  }
}

static void rope(float *x, const float *cos_sin, int dims, int head_dim, int interleaved, float scale) {
  int half = dims / 2;
  for (int i = 0; interleaved && i < half; i++) {
    float a = x[2 * i], b = x[2 * i + 1], c = cos_sin[i], s = cos_sin[half + i];
    x[2 * i] = fmaf(a, c, -(b * s));
    x[2 * i + 1] = fmaf(b, c, a * s);
  }
  if (!interleaved) rope_half(x, cos_sin, half);
  scale_by(x, head_dim, scale);
}

/* ---------------------------------------------------------------- logits */

/* The two largest of 8 experts' columns, numbered from id. */
V16 v16_best top2_of8(const v16 column[8], int id) {
  v16_best a = v16_best_merge(v16_best_of(column[0], column[1], id), v16_best_of(column[2], column[3], id + 2));
  v16_best b = v16_best_merge(v16_best_of(column[4], column[5], id + 4), v16_best_of(column[6], column[7], id + 6));
  return v16_best_merge(a, b);
}

/* 8 experts of 16 tokens, the first n of them read, the others -inf, which is never chosen: it is larger than nothing. Adds products of pairs to
 * *check, which is then not finite where a logit is not (or where finite ones overflow: whoever asks looks again). */
V16 void expert_columns(const float *z, ptrdiff_t ld, int n, v16 column[8], v16 *check) {
  v16 products = *check;
  v16_columns8(z, ld, n, column);
  for (int e = 0; e < 8; e += 2)
    if (e < n) products = v16_fma(column[e], column[e + 1 < n ? e + 1 : e], products);
  for (int e = 0; e < 8; e++)
    if (e >= n) column[e] = v16_set1(-INFINITY);
  *check = products;
}

/* 16 tokens. Returns a bit for each that may have a NaN or infinite logit. */
V16 uint32_t top2_block(const float *z, ptrdiff_t ld, const int experts, int32_t *ids, float *weights) {
  v16 column[8], check = v16_set1(0.0f);
  expert_columns(z, ld, experts < 8 ? experts : 8, column, &check);
  v16_best best = top2_of8(column, 0);
  if (experts > 8) {
    expert_columns(z + 8, ld, experts - 8, column, &check);
    best = v16_best_merge(best, top2_of8(column, 8));
  }
  v16 p = v16_exp_low(v16_sub(best.second, best.first)), inverse = v16_div(v16_set1(1.0f), v16_add(v16_set1(1.0f), p));
  v16_best_store(&best, ids);
  v16_store_pairs(weights, inverse, v16_mul(p, inverse));
  return v16_not_finite(check);
}

/* The n < 16 tokens left over, by way of a full block with zeros behind. */
static __attribute__((noinline)) uint32_t top2_rest(const float *z, ptrdiff_t ld, int experts, int n, int32_t *ids, float *weights) {
  float whole[16 * 16] = {0}, block_weights[32];
  int32_t block_ids[32];
  for (int t = 0; t < n; t++) memcpy(whole + 16 * t, z + t * ld, (size_t)experts * sizeof *z);
  uint32_t poisoned = top2_block(whole, 16, experts, block_ids, block_weights);
  memcpy(ids, block_ids, 2 * (size_t)n * sizeof *ids);
  memcpy(weights, block_weights, 2 * (size_t)n * sizeof *weights);
  return poisoned;
}

static int all_finite(const float *x, int n) {
  uint32_t bad = 0;
  for (int i = 0; i < n; i++) {
    uint32_t u;
    memcpy(&u, x + i, sizeof u);
    bad |= (u & 0x7f800000u) == 0x7f800000u;
  }
  return !bad;
}

/* The first of n tokens that has a NaN or infinite logit, or -1. */
static __attribute__((noinline, cold)) int first_bad(const float *z, ptrdiff_t ld, int experts, int n) {
  for (int t = 0; t < n; t++)
    if (!all_finite(z + t * ld, experts)) return t;
  return -1;
}

/* Separate, so that the common case of 16 tokens and 8 experts is not burdened with the others' set-up. */
static __attribute__((noinline)) int top2_any(const float *z, ptrdiff_t ld, int experts, int n, int32_t *ids, float *weights) {
  uint32_t suspect = 0;
  int t = 0;
  for (; t + 16 <= n; t += 16, ids += 32, weights += 32)
    switch (experts) {
      case 8: suspect |= top2_block(z + t * ld, ld, 8, ids, weights); break;
      case 16: suspect |= top2_block(z + t * ld, ld, 16, ids, weights); break;
      default: suspect |= top2_block(z + t * ld, ld, experts, ids, weights); break;
    }
  if (t < n) suspect |= top2_rest(z + t * ld, ld, experts, n - t, ids, weights);
  return suspect ? first_bad(z, ld, experts, n) : -1;
}

static int top2_softmax(const float *z, int ld, int experts, int n, int32_t *ids, float *weights) {
  if (n != 16 || experts != 8) return top2_any(z, ld, experts, n, ids, weights);
  return __builtin_expect(top2_block(z, ld, 8, ids, weights) != 0, 0) ? first_bad(z, ld, experts, n) : -1;
}

/* ---------------------------------------------------------------- top k
 *
 * 16 tokens at a time, one a lane. A key is a logit with its last bits replaced by its expert's number, so sorting networks of nothing but maxima move
 * both. Where two keys that matter differ in nothing but those bits the order is not known, and the generic kernel redoes the token. */

#define TOP_KEYS COLIBRI_MAX_TOP_K
#define REST_FLOATS (16 * 256) /* what fewer than 16 tokens are copied to as a block */

V16 void exchange(v16 *a, v16 *b) {
  v16 larger = v16_max(*a, *b);
  *b = v16_other(*a, *b, larger);
  *a = larger;
}

/* 8 keys to descending order: the network of 19 exchanges. */
V16 void sort8(v16 x[8]) {
  exchange(&x[0], &x[2]), exchange(&x[1], &x[3]), exchange(&x[4], &x[6]), exchange(&x[5], &x[7]);
  exchange(&x[0], &x[4]), exchange(&x[1], &x[5]), exchange(&x[2], &x[6]), exchange(&x[3], &x[7]);
  exchange(&x[0], &x[1]), exchange(&x[2], &x[3]), exchange(&x[4], &x[5]), exchange(&x[6], &x[7]);
  exchange(&x[2], &x[4]), exchange(&x[3], &x[5]);
  exchange(&x[1], &x[4]), exchange(&x[3], &x[6]);
  exchange(&x[1], &x[2]), exchange(&x[3], &x[4]), exchange(&x[5], &x[6]);
}

/* A bitonic sequence of 8 to descending order. */
V16 void clean8(v16 x[8]) {
  exchange(&x[0], &x[4]), exchange(&x[1], &x[5]), exchange(&x[2], &x[6]), exchange(&x[3], &x[7]);
  exchange(&x[0], &x[2]), exchange(&x[1], &x[3]), exchange(&x[4], &x[6]), exchange(&x[5], &x[7]);
  exchange(&x[0], &x[1]), exchange(&x[2], &x[3]), exchange(&x[4], &x[5]), exchange(&x[6], &x[7]);
}

/* The `size` largest of two descending runs into the first, in bitonic order; *below keeps the largest of all left out so far. */
V16 void keep_larger(const int size, v16 *run, const v16 *other, v16 *below) {
  for (int i = 0; i < size; i++) {
    v16 larger = v16_max(run[i], other[size - 1 - i]);
    *below = v16_max(*below, v16_other(run[i], other[size - 1 - i], larger));
    run[i] = larger;
  }
}

typedef struct key_source {
  const float *z; /* 16 tokens */
  ptrdiff_t ld;
  int experts;
  uint32_t keep; /* the bits of a key that are the logit's */
} key_source;

/* The keys of 8 experts from e on, descending; -inf where there is no expert. */
V16 void sorted_keys(const key_source *s, int e, v16 key[8], v16 *check) {
  int n = s->experts - e;
  if (n >= 8)
    expert_columns(s->z + e, s->ld, 8, key, check);
  else
    expert_columns(s->z + e, s->ld, n < 0 ? 0 : n, key, check);
  for (int i = 0; i < 8; i++)
    if (i < n) key[i] = v16_tag(key[i], s->keep, (uint32_t)(e + i));
  sort8(key);
}

static void top_keys8(const key_source *s, v16 *key, v16 *below, v16 *check) {
  v16 top[8], next[8], left = *below, products = *check;
  sorted_keys(s, 0, top, &products);
  for (int e = 8; e < s->experts; e += 8) {
    sorted_keys(s, e, next, &products);
    keep_larger(8, top, next, &left);
    clean8(top);
  }
  for (int i = 0; i < 8; i++) key[i] = top[i];
  *below = left;
  *check = products;
}

/* A bitonic sequence of a power of two to descending order. */
static void clean(int size, v16 *x) {
  for (int stride = size / 2; stride >= 8; stride /= 2)
    for (int i = 0; i < size; i += 2 * stride)
      for (int j = i; j < i + stride; j++) exchange(&x[j], &x[j + stride]);
  for (int i = 0; i < size; i += 8) clean8(x + i);
}

/* The keys of `size` experts from e on, descending: runs of 8, merged. */
static void sorted_run(const key_source *s, int e, int size, v16 *key, v16 *check) {
  for (int i = 0; i < size; i += 8) sorted_keys(s, e + i, key + i, check);
  for (int half = 8; half < size; half *= 2)
    for (int i = 0; i < size; i += 2 * half) {
      for (int j = 0; j < half; j++) exchange(&key[i + j], &key[i + 2 * half - 1 - j]);
      clean(half, key + i);
      clean(half, key + i + half);
    }
}

static void top_keys(const key_source *s, int size, v16 *key, v16 *below, v16 *check) {
  v16 next[TOP_KEYS];
  sorted_run(s, 0, size, key, check);
  for (int e = size; e < s->experts; e += size) {
    sorted_run(s, e, size, next, check);
    keep_larger(size, key, next, below);
    clean(size, key);
  }
}

/* A bit for each token whose k first keys or whose choice of them is in doubt. */
V16 uint32_t in_doubt(const v16 *key, int k, v16 next, uint32_t keep) {
  uint32_t doubt = 0;
  v16 last = v16_and(key[0], keep);
  for (int i = 1; i <= k; i++) {
    v16 here = v16_and(i < k ? key[i] : next, keep);
    doubt |= v16_equal(last, here);
    last = here;
  }
  return doubt;
}

/* 16 tokens' numbers [16][TOP_KEYS]; returns a bit for each token that needs the generic kernel. */
static uint32_t top_block(const float *z, ptrdiff_t ld, int experts, int k, int32_t number[TOP_KEYS][16]) {
  v16 key[TOP_KEYS], below = v16_set1(-INFINITY), check = v16_set1(0.0f);
  uint32_t tag = experts > 1 ? UINT32_MAX >> __builtin_clz((uint32_t)experts - 1) : 0;
  key_source s = {z, ld, experts, ~tag};
  int size = 8;
  while (size < k) size *= 2;
  if (size == 8)
    top_keys8(&s, key, &below, &check);
  else
    top_keys(&s, size, key, &below, &check);
  for (int i = 0; i < k; i++) v16_store((float *)number[i], v16_and(key[i], tag));
  return in_doubt(key, k, k < size ? key[k] : below, s.keep) | v16_not_finite(check);
}

/* 8 columns of 16 numbers to 16 rows of 8: three times two sequences to one that has an element of each in turn. */
V16 void store_rows8(float *rows, const float column[8][16]) {
  float pairs[4][32], fours[2][64];
  for (int i = 0; i < 4; i++) v16_store_pairs(pairs[i], v16_load(column[i]), v16_load(column[i + 4]));
  for (int i = 0; i < 2; i++)
    for (int at = 0; at < 32; at += 16) v16_store_pairs(fours[i] + 2 * at, v16_load(pairs[i] + at), v16_load(pairs[i + 2] + at));
  for (int at = 0; at < 64; at += 16) v16_store_pairs(rows + 2 * at, v16_load(fours[0] + at), v16_load(fours[1] + at));
}

/* n <= 16 tokens. */
static void top_k_block(const float *z, int ld, int experts, int n, int k, int32_t *ids, uint8_t *bad) {
  int32_t number[TOP_KEYS][16];
  uint32_t doubt = top_block(z, ld, experts, k, number);
  memset(bad, 0, (size_t)n);
  if (k == 8 && n == 16)
    store_rows8((float *)ids, (const float(*)[16])number);
  else
    for (int t = 0; t < n; t++)
      for (int i = 0; i < k; i++) ids[t * k + i] = number[i][t];
  for (doubt &= (1u << n) - 1; doubt; doubt &= doubt - 1) {
    int t = __builtin_ctz(doubt);
    colibri_kernels_generic()->top_k(z + (ptrdiff_t)t * ld, ld, experts, 1, k, ids + t * k, bad + t);
  }
}

#define WORTH_A_BLOCK 4 /* tokens from which a block is faster than one after the other */

static void top_k(const float *z, int ld, int experts, int n, int k, int32_t *ids, uint8_t *bad) {
  for (; n >= 16; n -= 16, z += 16 * (ptrdiff_t)ld, ids += 16 * k, bad += 16) top_k_block(z, ld, experts, 16, k, ids, bad);
  if (n >= WORTH_A_BLOCK && 16 * experts <= REST_FLOATS) {
    float whole[REST_FLOATS];
    for (int t = 0; t < 16; t++) memcpy(whole + t * experts, z + (ptrdiff_t)(t < n ? t : 0) * ld, (size_t)experts * sizeof *z);
    top_k_block(whole, experts, experts, n, k, ids, bad);
  } else if (n) {
    colibri_kernels_generic()->top_k(z, ld, experts, n, k, ids, bad);
  }
}

static int32_t argmax(const float *x, int32_t n) {
  v16 top = v16_set1(-INFINITY), poison = v16_set1(0.0f);
  int32_t i = 0, whole = n / 16 * 16, tail = n % 16;
  for (; i < whole; i += 16) {
    v16 v = v16_load(x + i);
    top = v16_max(v, top);
    poison = v16_poison(v, poison);
  }
  if (tail) {
    v16 v = v16_load_n(x + i, tail);
    top = v16_max(v16_first(tail, v, top), top);
    poison = v16_poison(v, poison);
  }
  if (v16_is_nan(poison)) return -1;
  v16 best = v16_set1(v16_top(top));
  for (i = 0; i < whole; i += 16) {
    uint32_t here = v16_equal(v16_load(x + i), best);
    if (here) return i + __builtin_ctz(here);
  }
  uint32_t here = v16_equal(v16_load_n(x + i, tail), best) & ((1u << tail) - 1);
  return here ? i + __builtin_ctz(here) : 0;
}

static float sum_exp(const float *x, int32_t n, float shift) {
  v16 sum = v16_set1(0.0f), by = v16_set1(shift);
  int32_t i = 0, tail = n % 16;
  for (; i + 16 <= n; i += 16) sum = v16_add(sum, v16_exp(v16_sub(v16_load(x + i), by)));
  if (tail) sum = v16_first(tail, v16_add(sum, v16_exp(v16_sub(v16_load_n(x + i, tail), by))), sum);
  return v16_fold(sum);
}

static void exp_all(float *x, int32_t n) {
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) v16_store(x + i, v16_exp(v16_load(x + i)));
  if (i < n) v16_store_n(x + i, v16_exp(v16_load_n(x + i, n - i)), n - i);
}
