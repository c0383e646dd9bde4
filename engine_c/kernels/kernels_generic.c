/* kernels_generic.c - the kernels in plain C: the specification every SIMD set is tested against, bit by bit (kernels.h). */
#include <math.h>
#include <string.h>

#include "expf.h"
#include "kernels.h"

/* ---------------------------------------------------------------- 16 partial sums */

/* Element i of a sum goes to partial sum i % 16; the partial sums are then folded 8, 4, 2, 1. That is a 16-lane vector's natural order. */
static float fold(float s[16]) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
}

static int is_finite(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return (u & 0x7f800000u) != 0x7f800000u;
}

/* ---------------------------------------------------------------- matrix products */

static void gemm_f32(const void *w, int panels, int groups, const void *const *rows, int n_rows, float *out, ptrdiff_t ld, const void *next) {
  (void)next;
  for (int p = 0; p < panels; p++) {
    const float *block = (const float *)w + (int64_t)p * groups * 1024; /* [k][32 rows] */
    for (int r = 0; r < n_rows; r++) {
      const float *x = rows[r];
      for (int j = 0; j < COLIBRI_PANEL; j++) {
        float acc = 0;
        for (int k = 0; k < groups * COLIBRI_GROUP; k++) acc = fmaf(block[k * 32 + j], x[k], acc);
        out[r * ld + p * COLIBRI_PANEL + j] = acc;
      }
    }
  }
}

static void gemm_bf16(const void *w, int panels, int groups, const void *const *rows, int n_rows, float *out, ptrdiff_t ld, const void *next) {
  (void)next;
  for (int p = 0; p < panels; p++) {
    const uint16_t *block = (const uint16_t *)w + (int64_t)p * groups * 1024; /* [k / 2][32 rows][k % 2] */
    for (int r = 0; r < n_rows; r++) {
      const uint16_t *x = rows[r];
      for (int j = 0; j < COLIBRI_PANEL; j++) {
        float acc = 0;
        for (int k = 0; k < groups * COLIBRI_GROUP; k++)
          acc = fmaf(colibri_bf16_to_f32(block[k / 2 * 64 + j * 2 + k % 2]), colibri_bf16_to_f32(x[k]), acc);
        out[r * ld + p * COLIBRI_PANEL + j] = acc;
      }
    }
  }
}

/* Weight scale of row j of an integer block. */
static float block_scale(const uint8_t *block, int j) {
  uint16_t h;
  memcpy(&h, block + 2 * j, sizeof h);
  return colibri_f16_to_f32(h);
}

/* sum[j] = row j of a block times 32 activations, exact. */
static void dot_int8(const uint8_t *block, const int8_t *q, int32_t sum[COLIBRI_PANEL]) {
  memset(sum, 0, COLIBRI_PANEL * sizeof *sum);
  for (int k = 0; k < COLIBRI_GROUP; k++)
    for (int j = 0; j < COLIBRI_PANEL; j++) sum[j] += (int8_t)block[64 + k / 4 * 128 + j * 4 + k % 4] * q[k];
}

static void dot_int4(const uint8_t *block, const int8_t *q, int32_t sum[COLIBRI_PANEL]) {
  memset(sum, 0, COLIBRI_PANEL * sizeof *sum);
  for (int k = 0; k < COLIBRI_GROUP; k++)
    for (int j = 0; j < COLIBRI_PANEL; j++) {
      int byte = block[64 + k / 8 * 128 + j * 4 + k % 4];
      sum[j] += ((k & 4 ? byte >> 4 : byte & 15) - 8) * q[k];
    }
}

static void gemm_int8(const void *w, int panels, int groups, const void *const *rows, int n_rows, float *out, ptrdiff_t ld, const void *next) {
  (void)next;
  for (int p = 0; p < panels; p++)
    for (int r = 0; r < n_rows; r++) {
      const int8_t *q = rows[r];
      const float *x_scale = (const float *)(q + groups * COLIBRI_GROUP);
      const uint8_t *block = (const uint8_t *)w + (int64_t)p * groups * 1088;
      float acc[COLIBRI_PANEL] = {0};
      for (int g = 0; g < groups; g++, block += 1088) {
        int32_t sum[COLIBRI_PANEL];
        dot_int8(block, q + g * COLIBRI_GROUP, sum);
        for (int j = 0; j < COLIBRI_PANEL; j++) acc[j] = fmaf((float)sum[j], block_scale(block, j) * x_scale[g], acc[j]);
      }
      memcpy(out + r * ld + p * COLIBRI_PANEL, acc, sizeof acc);
    }
}

/* scale * 2^e where exponent = e << 23: an integer addition to the float's bits. The scale's own exponent is within [-14, 15], so it stays normal. */
static float add_exponent(float scale, int32_t exponent) {
  uint32_t u;
  memcpy(&u, &scale, sizeof u);
  u += (uint32_t)exponent;
  memcpy(&scale, &u, sizeof u);
  return scale;
}

static void gemm_int4(const void *w, int panels, int groups, const void *const *rows, int n_rows, float *out, ptrdiff_t ld, const void *next) {
  (void)next;
  for (int p = 0; p < panels; p++)
    for (int r = 0; r < n_rows; r++) {
      const int8_t *q = rows[r];
      const int32_t *exponent = (const int32_t *)(q + groups * COLIBRI_GROUP);
      const uint8_t *block = (const uint8_t *)w + (int64_t)p * groups * 576;
      float acc[COLIBRI_PANEL] = {0};
      for (int g = 0; g < groups; g++, block += 576) {
        int32_t sum[COLIBRI_PANEL];
        dot_int4(block, q + g * COLIBRI_GROUP, sum);
        for (int j = 0; j < COLIBRI_PANEL; j++) acc[j] = fmaf((float)sum[j], add_exponent(block_scale(block, j), exponent[g]), acc[j]);
      }
      memcpy(out + r * ld + p * COLIBRI_PANEL, acc, sizeof acc);
    }
}

/* ---------------------------------------------------------------- activations */

static int prepare_f32(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  (void)groups;
  float *y = (float *)row + g0 * COLIBRI_GROUP;
  int bad = 0;
  for (int k = 0; k < (g1 - g0) * COLIBRI_GROUP; k++) {
    y[k] = k < k_valid ? x[k] : 0;
    bad |= !is_finite(y[k]);
  }
  return bad;
}

static int prepare_bf16(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  (void)groups;
  uint16_t *y = (uint16_t *)row + g0 * COLIBRI_GROUP;
  int bad = 0;
  for (int k = 0; k < (g1 - g0) * COLIBRI_GROUP; k++) {
    float v = k < k_valid ? x[k] : 0;
    bad |= !is_finite(v);
    y[k] = colibri_f32_to_bf16(v);
  }
  return bad;
}

/* Copies one group, zero-filled behind its `valid` columns, and returns the bits of its largest magnitude: as integers the magnitudes order
 * like the floats, and infinities and NaNs come out on top (>= 0x7f800000). */
static uint32_t load_group(const float *x, int valid, float v[COLIBRI_GROUP]) {
  uint32_t top = 0;
  for (int k = 0; k < COLIBRI_GROUP; k++) {
    v[k] = k < valid ? x[k] : 0;
    uint32_t u;
    memcpy(&u, &v[k], sizeof u);
    u &= 0x7fffffffu;
    if (u > top) top = u;
  }
  return top;
}

/* Rounds to nearest even within [-127, 127]; NaN gives 127. */
static int8_t quantise(float t) {
  t = t < 127.0f ? t : 127.0f;
  t = t > -127.0f ? t : -127.0f;
  return (int8_t)rintf(t);
}

static int prepare_int8(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  int8_t *q = row;
  float *scales = (float *)(q + groups * COLIBRI_GROUP);
  int32_t *offsets = (int32_t *)(scales + groups);
  int bad = 0;
  for (int g = g0; g < g1; g++) {
    float v[COLIBRI_GROUP], amax;
    int done = (g - g0) * COLIBRI_GROUP;
    uint32_t top = load_group(x + done, k_valid - done, v);
    bad |= top >= 0x7f800000u;
    memcpy(&amax, &top, sizeof amax);
    float scale = amax / 127.0f;
    if (scale == 0) scale = 1; /* all zero, or too small for a scale */
    int32_t sum = 0;
    for (int k = 0; k < COLIBRI_GROUP; k++) sum += q[g * COLIBRI_GROUP + k] = quantise(v[k] / scale);
    scales[g] = scale;
    offsets[g] = -128 * sum;
  }
  return bad;
}

static int prepare_int4(const float *x, int k_valid, int groups, int g0, int g1, void *row) {
  int8_t *q = row;
  int32_t *exponents = (int32_t *)(q + groups * COLIBRI_GROUP);
  int32_t *offsets = exponents + groups;
  int bad = 0;
  for (int g = g0; g < g1; g++) {
    float v[COLIBRI_GROUP], amax;
    int done = (g - g0) * COLIBRI_GROUP;
    uint32_t top = load_group(x + done, k_valid - done, v);
    bad |= top >= 0x7f800000u;
    memcpy(&amax, &top, sizeof amax);
    amax /= 127.0f;
    memcpy(&top, &amax, sizeof top);
    int32_t e = (int32_t)((top + 0x7fffffu) >> 23) - 127; /* ceil(log2(amax / 127)) */
    e = e < -63 ? -63 : e > 63 ? 63 : e;
    float inverse = add_exponent(1.0f, -e * (1 << 23));
    int32_t sum = 0;
    for (int k = 0; k < COLIBRI_GROUP; k++) sum += q[g * COLIBRI_GROUP + k] = quantise(v[k] * inverse);
    exponents[g] = e * (1 << 23);
    offsets[g] = -8 * sum;
  }
  return bad;
}

/* ---------------------------------------------------------------- elementwise */

static void rmsnorm(const float *x, const float *weight, float eps, int n, float *y) {
  float s[16] = {0};
  for (int i = 0; i < n; i++) s[i % 16] = fmaf(x[i], x[i], s[i % 16]);
  float r = 1.0f / sqrtf(fold(s) / (float)n + eps);
  for (int i = 0; i < n; i++) y[i] = x[i] * r * weight[i];
}

static void gate(const float *w, const float *bias, int experts, int hidden, const float *x, ptrdiff_t ld, int n, float *logits) {
  for (int t = 0; t < n; t++, x += ld, logits += experts)
    for (int e = 0; e < experts; e++) {
      float s[16] = {0};
      for (int k = 0; k < hidden; k++) s[k % 16] = fmaf(w[(int64_t)e * hidden + k], x[k], s[k % 16]);
      logits[e] = fold(s);
      if (bias) logits[e] += bias[e];
    }
}

static void silu_mul(const float *gu, ptrdiff_t ld, int n_rows, int panels, float *y, ptrdiff_t y_ld) {
  for (int r = 0; r < n_rows; r++)
    for (int p = 0; p < panels; p++)
      for (int j = 0; j < 16; j++) {
        float g = gu[r * ld + p * 32 + j], u = gu[r * ld + p * 32 + 16 + j];
        y[r * y_ld + p * 16 + j] = g / (1.0f + colibri_expf(-g)) * u;
      }
}

static void axpy(float a, const float *x, int n, float *y) {
  for (int i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

static void add(const float *a, const float *b, int n, float *y) {
  for (int i = 0; i < n; i++) y[i] = a[i] + b[i];
}

static void rope(float *x, const float *cos_sin, int dims, int head_dim, int interleaved, float scale) {
  int half = dims / 2;
  for (int i = 0; i < half; i++) {
    float *pa = x + (interleaved ? 2 * i : i), *pb = x + (interleaved ? 2 * i + 1 : i + half);
    float a = *pa, b = *pb, c = cos_sin[i], s = cos_sin[half + i];
    *pa = fmaf(a, c, -(b * s));
    *pb = fmaf(b, c, a * s);
  }
  for (int i = 0; i < head_dim; i++) x[i] *= scale;
}

/* ---------------------------------------------------------------- attention */

static void store_kv(const float *k, const float *v, int head_dim, int kv_format, int slot, void *k_block, void *v_block) {
  for (int d = 0; d < head_dim; d++) {
    if (kv_format == COLIBRI_KV_F32) {
      ((float *)k_block)[d * 16 + slot] = k[d];
      ((float *)v_block)[slot * head_dim + d] = v[d];
    } else {
      ((uint16_t *)k_block)[d * 16 + slot] = colibri_f32_to_bf16(k[d]);
      ((uint16_t *)v_block)[slot * head_dim + d] = colibri_f32_to_bf16(v[d]);
    }
  }
}

static float kv_at(const char *base, int kv_format, int64_t i) {
  return kv_format == COLIBRI_KV_F32 ? ((const float *)base)[i] : colibri_bf16_to_f32(((const uint16_t *)base)[i]);
}

static float larger(float a, float b) { return a > b ? a : b; }

/* One chunk for one query: positions lo..hi of the chunk's 64 (0-based within it), whose first block is a->blocks[b0]. m is the running maximum,
 * l [16] the running sums of exp(score - m) by position % 16, out the running weighted sum of V. Positions outside lo..hi are never looked at. */
static void attend_chunk(const colibri_attend *a, const float *q, int b0, int lo, int hi, float *m, float l[16], float *out) {
  float s[64], top = *m;
  for (int j = lo; j <= hi; j++) {
    const char *k = a->kv + a->blocks[b0 + j / 16] * a->block_stride;
    s[j] = 0;
    for (int d = 0; d < a->head_dim; d++) s[j] = fmaf(q[d], kv_at(k, a->kv_format, d * 16 + j % 16), s[j]);
    top = larger(s[j], top);
  }
  float correction = colibri_expf(*m - top);
  *m = top;
  for (int i = 0; i < 16; i++) l[i] *= correction;
  for (int d = 0; d < a->head_dim; d++) out[d] *= correction;
  for (int j = lo; j <= hi; j++) {
    const char *v = a->kv + a->blocks[b0 + j / 16] * a->block_stride + a->v_offset;
    float p = colibri_expf(s[j] - top);
    l[j % 16] += p;
    for (int d = 0; d < a->head_dim; d++) out[d] = fmaf(p, kv_at(v, a->kv_format, j % 16 * a->head_dim + d), out[d]);
  }
}

static void attend(const colibri_attend *a) {
  for (int i = 0; i < a->nq; i++) {
    float m = -INFINITY, l[16] = {0};
    for (int d = 0; d < a->head_dim; d++) a->out[i][d] = 0;
    for (int c = a->first[i] / 64; c <= a->last[i] / 64; c++) {
      int lo = a->first[i] - c * 64, hi = a->last[i] - c * 64;
      attend_chunk(a, a->q[i], c * 4, lo < 0 ? 0 : lo, hi > 63 ? 63 : hi, &m, l, a->out[i]);
    }
    float inverse = 1.0f / fold(l);
    for (int d = 0; d < a->head_dim; d++) a->out[i][d] *= inverse;
  }
}

/* ---------------------------------------------------------------- logits */

static int top2_softmax(const float *z, int ld, int experts, int n, int32_t *ids, float *weights) {
  int bad = -1;
  for (int t = 0; t < n; t++) {
    const float *row = z + (int64_t)t * ld;
    int first = 0, second = -1;
    for (int e = 0; e < experts; e++) {
      if (!is_finite(row[e]) && bad < 0) bad = t;
      if (e == 0) continue;
      if (row[e] > row[first]) {
        second = first;
        first = e;
      } else if (second < 0 || row[e] > row[second]) {
        second = e;
      }
    }
    float p = colibri_expf(row[second] - row[first]), inverse = 1.0f / (1.0f + p);
    ids[2 * t] = first;
    ids[2 * t + 1] = second;
    weights[2 * t] = inverse;
    weights[2 * t + 1] = p * inverse;
  }
  return bad;
}

/* ids [k] of the largest of z [n], descending. A later equal goes behind an earlier one, so ties keep the lower index first. */
static void select_top(const float *z, int n, int k, int32_t *ids) {
  float chosen[COLIBRI_MAX_TOP_K];
  int count = 0;
  for (int e = 0; e < n; e++) {
    if (count == k && !(z[e] > chosen[k - 1])) continue;
    int i = count < k ? count++ : k - 1;
    for (; i > 0 && z[e] > chosen[i - 1]; i--) {
      chosen[i] = chosen[i - 1];
      ids[i] = ids[i - 1];
    }
    chosen[i] = z[e];
    ids[i] = e;
  }
}

static void top_k(const float *z, int ld, int experts, int n, int k, int32_t *ids, uint8_t *bad) {
  for (int t = 0; t < n; t++, z += ld, ids += k) {
    bad[t] = 0;
    for (int e = 0; e < experts; e++) bad[t] |= !is_finite(z[e]);
    if (!bad[t]) select_top(z, experts, k, ids);
    for (int i = 0; bad[t] && i < k; i++) ids[i] = i;
  }
}

/* y may be z. */
static void softmax(const float *z, int n, float *y) {
  float top = -INFINITY, s[16] = {0};
  for (int i = 0; i < n; i++) top = larger(z[i], top);
  for (int i = 0; i < n; i++) s[i % 16] += y[i] = colibri_expf(z[i] - top);
  float inverse = 1.0f / fold(s);
  for (int i = 0; i < n; i++) y[i] *= inverse;
}

static float sqrt_softplus(float z) {
  float u = colibri_expf(-fabsf(z)), p = colibri_log1p_terms[0];
  for (int i = 1; i < COLIBRI_LOG1P_TERMS; i++) p = fmaf(p, u, colibri_log1p_terms[i]);
  return sqrtf(fmaf(p, u, larger(z, 0.0f)));
}

static void scores(int score, const float *z, ptrdiff_t ld, int experts, int n, float *y, uint8_t *bad) {
  for (int t = 0; t < n; t++, z += ld, y += experts) {
    bad[t] = 0;
    for (int e = 0; e < experts; e++) bad[t] |= !is_finite(z[e]);
    if (score == COLIBRI_SCORE_SOFTMAX_ALL) softmax(z, experts, y);
    for (int e = 0; score == COLIBRI_SCORE_SIGMOID && e < experts; e++) y[e] = 1.0f / (1.0f + colibri_expf(-z[e]));
    for (int e = 0; score == COLIBRI_SCORE_SQRT_SOFTPLUS && e < experts; e++) y[e] = sqrt_softplus(z[e]);
    for (int e = 0; score == COLIBRI_SCORE_LOGITS && e < experts; e++) y[e] = z[e];
  }
}

static void group_best(const float *s, int size, int groups, int n, int sum_top2, float *metric) {
  for (int g = 0; g < n * groups; g++, s += size) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = 0; e < size; e++) {
      second = larger(second, first < s[e] ? first : s[e]);
      first = larger(first, s[e]);
    }
    metric[g] = sum_top2 ? first + second : first;
  }
}

static int32_t argmax(const float *x, int32_t n) {
  int32_t best = 0;
  for (int32_t i = 0; i < n; i++) {
    if (!is_finite(x[i])) return -1;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

static float sum_exp(const float *x, int32_t n, float shift) {
  float s[16] = {0};
  for (int32_t i = 0; i < n; i++) s[i % 16] += colibri_expf(x[i] - shift);
  return fold(s);
}

static void exp_all(float *x, int32_t n) {
  for (int32_t i = 0; i < n; i++) x[i] = colibri_expf(x[i]);
}

const colibri_kernels *colibri_kernels_generic(void) {
  static const colibri_kernels table = {
    .name = "generic",
    .gemm = {gemm_f32, gemm_bf16, gemm_int8, gemm_int4},
    .prepare = {prepare_f32, prepare_bf16, prepare_int8, prepare_int4},
    .rmsnorm = rmsnorm,
    .gate = gate,
    .silu_mul = silu_mul,
    .axpy = axpy,
    .add = add,
    .rope = rope,
    .store_kv = store_kv,
    .attend = attend,
    .top2_softmax = top2_softmax,
    .top_k = top_k,
    .scores = scores,
    .group_best = group_best,
    .argmax = argmax,
    .sum_exp = sum_exp,
    .exp = exp_all,
  };
  return &table;
}
