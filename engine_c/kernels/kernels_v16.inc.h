/* kernels_v16.inc.h - all kernels but the matrix products, written once over vectors of 16 floats. kernels_avx2.c, kernels_avx512.c and
 * kernels_neon.c include it, each with its v16_*.h, and get functions equal bit by bit to kernels_generic.c: lane i is partial sum i there.
 *
 * A v16_*.h defines the type v16, V16_REGISTERS (how many fit into the register file) and, n being 0..16 and unaligned pointers allowed throughout:
 *   v16_set1 v16_load v16_store       and _n: the first n lanes only; others load as 0, memory behind them is not touched
 *   v16_add _sub _mul _div _fma _neg  fma(a, b, c) = a b + c, rounded once
 *   v16_max(a, b) v16_min(a, b)       a > b ? a : b and a < b ? a : b, so b where a is NaN
 *   v16_first(n, a, b)                the first n lanes of a, the others of b
 *   v16_fold(a) v16_top(a)            sum in the order 8, 4, 2, 1; largest lane
 *   v16_scale(a, n, shifted)          a * 2^n rounded once; n also comes as the bits of shifted = n + 1.5 * 2^23
 *   v16_equal(a, b) v16_is_nan(a)     bit i set for lane i
 *   v16_amax_bits(a, b)               bits of the largest magnitude of 32 lanes as an integer
 *   v16_store_int8(q, a, b)           rounds 32 lanes to nearest even, stores them as int8, returns their sum
 *   v16_load_bf16 v16_store_bf16      and _n; nearest even, NaN stays NaN
 *   v16_columns8(x, ld, n, column)    16 rows of n <= 8 floats to 8 columns
 *   v16_best_of v16_best_add v16_best_store   the two largest of several vectors lane by lane, with their numbers; the lower number wins ties
 *   v16_store_pairs(p, a, b)          a0 b0 a1 b1 .. */
#include <math.h>
#include <string.h>

#include "kernels.h"

/* ---------------------------------------------------------------- exponential */

/* colibri_expf, operation by operation. */
V16 v16 v16_exp(v16 x) {
  x = v16_min(v16_set1(89.0f), x);
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

/* `count` experts' logits, count a constant. */
V16 void gate_some(const int count, const float *w, const float *bias, int hidden, const float *x, float *logits) {
  v16 sum[4];
  int k = 0, tail = hidden % 16;
  for (int e = 0; e < count; e++) sum[e] = v16_set1(0.0f);
  for (; k + 16 <= hidden; k += 16) {
    v16 v = v16_load(x + k);
    for (int e = 0; e < count; e++) sum[e] = v16_fma(v16_load(w + (int64_t)e * hidden + k), v, sum[e]);
  }
  if (tail) {
    v16 v = v16_load_n(x + k, tail);
    for (int e = 0; e < count; e++) sum[e] = v16_first(tail, v16_fma(v16_load_n(w + (int64_t)e * hidden + k, tail), v, sum[e]), sum[e]);
  }
  for (int e = 0; e < count; e++) {
    logits[e] = v16_fold(sum[e]);
    if (bias) logits[e] += bias[e];
  }
}

static void gate(const float *w, const float *bias, int experts, int hidden, const float *x, float *logits) {
  int e = 0;
  for (; e + 4 <= experts; e += 4) gate_some(4, w + (int64_t)e * hidden, bias ? bias + e : NULL, hidden, x, logits + e);
  for (; e < experts; e++) gate_some(1, w + (int64_t)e * hidden, bias ? bias + e : NULL, hidden, x, logits + e);
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

/* 16 tokens. Returns a bit for each with a NaN or infinite logit. */
V16 uint32_t top2_block(const float *z, ptrdiff_t ld, const int experts, int32_t *ids, float *weights) {
  v16 column[8], poison;
  v16_columns8(z, ld, experts < 8 ? experts : 8, column);
  v16_best best = v16_best_of(column[0], column[1]);
  poison = v16_poison(column[1], v16_poison(column[0], v16_set1(0.0f)));
  for (int e = 2; e < 8 && e < experts; e++) {
    v16_best_add(&best, column[e], e);
    poison = v16_poison(column[e], poison);
  }
  if (experts > 8) v16_columns8(z + 8, ld, experts - 8, column);
  for (int e = 8; e < experts; e++) {
    v16_best_add(&best, column[e - 8], e);
    poison = v16_poison(column[e - 8], poison);
  }
  v16 p = v16_exp(v16_sub(best.second, best.first)), sum = v16_add(v16_set1(1.0f), p);
  v16_best_store(&best, ids);
  v16_store_pairs(weights, v16_div(v16_set1(1.0f), sum), v16_div(p, sum));
  return v16_is_nan(poison);
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

V16 int top2_blocks(const float *z, ptrdiff_t ld, const int experts, int n, int32_t *ids, float *weights) {
  int bad = -1;
  for (int t = 0; t < n; t += 16, z += 16 * ld, ids += 32, weights += 32) {
    uint32_t poisoned = n - t < 16 ? top2_rest(z, ld, experts, n - t, ids, weights) : top2_block(z, ld, experts, ids, weights);
    if (__builtin_expect(poisoned && bad < 0, 0)) bad = t + __builtin_ctz(poisoned);
  }
  return bad;
}

/* Separate, so that the common one of 8 experts is not burdened with the other's set-up. */
static __attribute__((noinline)) int top2_any(const float *z, ptrdiff_t ld, int experts, int n, int32_t *ids, float *weights) {
  return top2_blocks(z, ld, experts, n, ids, weights);
}

static int top2_softmax(const float *z, int ld, int experts, int n, int32_t *ids, float *weights) {
  return experts == 8 ? top2_blocks(z, ld, 8, n, ids, weights) : top2_any(z, ld, experts, n, ids, weights);
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
