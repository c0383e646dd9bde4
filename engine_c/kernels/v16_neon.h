/* v16_neon.h - 16 floats in four q registers of Advanced SIMD. The functions are listed and explained in kernels_v16.inc.h.
 *
 * Subnormals and NaNs follow FPCR, which is left as the system sets it: no flush to zero, no default NaN. vmaxq and vminq are not used for v16_max and
 * v16_min: they differ in NaNs and in the sign of zero. */
#ifndef COLIBRI_V16_NEON_H
#define COLIBRI_V16_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define V16 static inline __attribute__((always_inline))
#define V16_REGISTERS 8

typedef struct v16 {
  float32x4_t q0, q1, q2, q3;
} v16;

#define V16_EACH(f, a) ((v16){f((a).q0), f((a).q1), f((a).q2), f((a).q3)})
#define V16_EACH2(f, a, b) ((v16){f((a).q0, (b).q0), f((a).q1, (b).q1), f((a).q2, (b).q2), f((a).q3, (b).q3)})

/* Lane i is all ones if 4 h + i < n. */
V16 uint32x4_t v16_lanes(int n, int h) {
  const int32x4_t lane = {0, 1, 2, 3};
  return vcltq_s32(lane, vdupq_n_s32(n - 4 * h));
}

V16 v16 v16_set1(float x) { return (v16){vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
V16 v16 v16_load(const float *p) { return (v16){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
V16 v16 v16_load_n(const float *p, int n) {
  float whole[16] = {0};
  memcpy(whole, p, (size_t)n * sizeof *p);
  return v16_load(whole);
}
V16 void v16_store(float *p, v16 a) {
  vst1q_f32(p, a.q0);
  vst1q_f32(p + 4, a.q1);
  vst1q_f32(p + 8, a.q2);
  vst1q_f32(p + 12, a.q3);
}
V16 void v16_store_n(float *p, v16 a, int n) {
  float whole[16];
  v16_store(whole, a);
  memcpy(p, whole, (size_t)n * sizeof *p);
}

V16 v16 v16_set1_bits(uint32_t u) {
  float32x4_t x = vreinterpretq_f32_u32(vdupq_n_u32(u));
  return (v16){x, x, x, x};
}
V16 float32x4_t v16_and4(float32x4_t a, float32x4_t b) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b))); }
V16 float32x4_t v16_or4(float32x4_t a, float32x4_t b) { return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b))); }
V16 float32x4_t v16_xor4(float32x4_t a, float32x4_t b) { return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b))); }
V16 v16 v16_and(v16 a, uint32_t bits) { return V16_EACH2(v16_and4, a, v16_set1_bits(bits)); }
V16 v16 v16_tag(v16 a, uint32_t keep, uint32_t tag) {
  a = v16_and(a, keep);
  return V16_EACH2(v16_or4, a, v16_set1_bits(tag));
}
V16 v16 v16_other(v16 a, v16 b, v16 one) {
  a = V16_EACH2(v16_xor4, a, b);
  return V16_EACH2(v16_xor4, a, one);
}

V16 float32x4_t v16_larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
V16 float32x4_t v16_smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

V16 v16 v16_add(v16 a, v16 b) { return V16_EACH2(vaddq_f32, a, b); }
V16 v16 v16_sub(v16 a, v16 b) { return V16_EACH2(vsubq_f32, a, b); }
V16 v16 v16_mul(v16 a, v16 b) { return V16_EACH2(vmulq_f32, a, b); }
V16 v16 v16_div(v16 a, v16 b) { return V16_EACH2(vdivq_f32, a, b); }
V16 v16 v16_fma(v16 a, v16 b, v16 c) {
  return (v16){vfmaq_f32(c.q0, a.q0, b.q0), vfmaq_f32(c.q1, a.q1, b.q1), vfmaq_f32(c.q2, a.q2, b.q2), vfmaq_f32(c.q3, a.q3, b.q3)};
}
V16 v16 v16_neg(v16 a) { return V16_EACH(vnegq_f32, a); }
V16 v16 v16_sqrt(v16 a) { return V16_EACH(vsqrtq_f32, a); }
V16 v16 v16_max(v16 a, v16 b) { return V16_EACH2(v16_larger, a, b); }
V16 v16 v16_min(v16 a, v16 b) { return V16_EACH2(v16_smaller, a, b); }
V16 v16 v16_first(int n, v16 a, v16 b) {
  return (v16){vbslq_f32(v16_lanes(n, 0), a.q0, b.q0), vbslq_f32(v16_lanes(n, 1), a.q1, b.q1), vbslq_f32(v16_lanes(n, 2), a.q2, b.q2),
               vbslq_f32(v16_lanes(n, 3), a.q3, b.q3)};
}

V16 float32x4_t v16_power(int32x4_t e) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)); }
V16 float32x4_t v16_scale4(float32x4_t a, float32x4_t shifted) {
  int32x4_t i = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000)), half = vshrq_n_s32(i, 1);
  return vmulq_f32(vmulq_f32(a, v16_power(half)), v16_power(vsubq_s32(i, half)));
}
V16 v16 v16_scale(v16 a, v16 n, v16 shifted) {
  (void)n;
  return V16_EACH2(v16_scale4, a, shifted);
}

V16 float v16_fold(v16 a) {
  float32x4_t b = vaddq_f32(vaddq_f32(a.q0, a.q2), vaddq_f32(a.q1, a.q3));
  float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
  return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}

V16 float v16_top(v16 a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q0, a.q1), vmaxq_f32(a.q2, a.q3))); }

V16 void v16_tile(const int rows, const int count, const float *x, ptrdiff_t x_ld, const float *w, ptrdiff_t w_ld, v16 *sum) {
  v16 v[4];
  for (int r = 0; r < rows; r++) v[r] = v16_load(x + r * x_ld);
  for (int e = 0; e < count; e++) {
    v16 u = v16_load(w + e * w_ld);
    for (int r = 0; r < rows; r++) sum[r * count + e] = v16_fma(u, v[r], sum[r * count + e]);
  }
}

/* ---------------------------------------------------------------- integers and masks */

V16 uint32_t v16_bits(uint32x4_t m0, uint32x4_t m1, uint32x4_t m2, uint32x4_t m3) {
  const uint32x4_t bit = {1, 2, 4, 8};
  uint32x4_t low = vorrq_u32(vandq_u32(m0, bit), vandq_u32(m1, vshlq_n_u32(bit, 4)));
  uint32x4_t high = vorrq_u32(vandq_u32(m2, vshlq_n_u32(bit, 8)), vandq_u32(m3, vshlq_n_u32(bit, 12)));
  return vaddvq_u32(vorrq_u32(low, high));
}
V16 uint32_t v16_equal(v16 a, v16 b) {
  return v16_bits(vceqq_f32(a.q0, b.q0), vceqq_f32(a.q1, b.q1), vceqq_f32(a.q2, b.q2), vceqq_f32(a.q3, b.q3));
}
V16 uint32_t v16_is_nan(v16 a) { return 0xffffu & ~v16_equal(a, a); }

V16 uint32x4_t v16_magnitude(float32x4_t a) { return vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7fffffff)); }
V16 uint32x4_t v16_magnitudes(v16 a) {
  return vmaxq_u32(vmaxq_u32(v16_magnitude(a.q0), v16_magnitude(a.q1)), vmaxq_u32(v16_magnitude(a.q2), v16_magnitude(a.q3)));
}
V16 uint32_t v16_not_finite(v16 a) { return v16_is_nan(v16_sub(a, a)); }

V16 uint32_t v16_amax_bits(v16 a, v16 b) { return vmaxvq_u32(vmaxq_u32(v16_magnitudes(a), v16_magnitudes(b))); }

/* 16 lanes as int8 to q, the sums of every fourth lane returned. */
V16 int32x4_t v16_store_int8_half(int8_t *q, v16 a) {
  int32x4_t i0 = vcvtnq_s32_f32(a.q0), i1 = vcvtnq_s32_f32(a.q1), i2 = vcvtnq_s32_f32(a.q2), i3 = vcvtnq_s32_f32(a.q3);
  int16x8_t low = vcombine_s16(vmovn_s32(i0), vmovn_s32(i1)), high = vcombine_s16(vmovn_s32(i2), vmovn_s32(i3));
  vst1q_s8(q, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  return vaddq_s32(vaddq_s32(i0, i1), vaddq_s32(i2, i3));
}
V16 int32_t v16_store_int8(int8_t *q, v16 a, v16 b) {
  int32x4_t sum = v16_store_int8_half(q, a);
  return vaddvq_s32(vaddq_s32(sum, v16_store_int8_half(q + 16, b)));
}

/* ---------------------------------------------------------------- bf16 */

V16 float32x4_t v16_widen(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
V16 v16 v16_load_bf16(const uint16_t *p) {
  uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
  return (v16){v16_widen(vget_low_u16(low)), v16_widen(vget_high_u16(low)), v16_widen(vget_low_u16(high)), v16_widen(vget_high_u16(high))};
}
V16 v16 v16_load_bf16_n(const uint16_t *p, int n) {
  uint16_t whole[16] = {0};
  memcpy(whole, p, (size_t)n * sizeof *p);
  return v16_load_bf16(whole);
}

V16 uint16x4_t v16_narrow(float32x4_t a) {
  uint32x4_t u = vreinterpretq_u32_f32(a), even = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), even), quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
}
V16 void v16_store_bf16(uint16_t *p, v16 a) {
  vst1q_u16(p, vcombine_u16(v16_narrow(a.q0), v16_narrow(a.q1)));
  vst1q_u16(p + 8, vcombine_u16(v16_narrow(a.q2), v16_narrow(a.q3)));
}
V16 void v16_store_bf16_n(uint16_t *p, v16 a, int n) {
  uint16_t whole[16];
  v16_store_bf16(whole, a);
  memcpy(p, whole, (size_t)n * sizeof *p);
}

/* ---------------------------------------------------------------- top 2 */

/* Four rows of four floats to columns. */
V16 void v16_transpose4(const float32x4_t r[4], float32x4_t c[4]) {
  float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])), b = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3]));
  float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1])), e = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
  c[0] = vreinterpretq_f32_f64(vzip1q_f64(a, b));
  c[1] = vreinterpretq_f32_f64(vzip1q_f64(d, e));
  c[2] = vreinterpretq_f32_f64(vzip2q_f64(a, b));
  c[3] = vreinterpretq_f32_f64(vzip2q_f64(d, e));
}

/* Four rows of 8 floats, the first n valid, to columns. */
V16 void v16_transpose8(const float *x, ptrdiff_t ld, int n, float32x4_t c[8]) {
  float32x4_t left[4], right[4];
  for (int i = 0; i < 4; i++, x += ld) {
    float whole[8] = {0};
    const float *row = x;
    if (n < 8) row = memcpy(whole, x, (size_t)n * sizeof *x);
    left[i] = vld1q_f32(row);
    right[i] = vld1q_f32(row + 4);
  }
  v16_transpose4(left, c);
  v16_transpose4(right, c + 4);
}

V16 void v16_columns8(const float *x, ptrdiff_t ld, int n, v16 column[8]) {
  float32x4_t c0[8], c1[8], c2[8], c3[8];
  v16_transpose8(x, ld, n, c0);
  v16_transpose8(x + 4 * ld, ld, n, c1);
  v16_transpose8(x + 8 * ld, ld, n, c2);
  v16_transpose8(x + 12 * ld, ld, n, c3);
  for (int i = 0; i < 8; i++) column[i] = (v16){c0[i], c1[i], c2[i], c3[i]};
}

/* All ones or zeros in each lane. */
typedef struct v16_mask {
  uint32x4_t q0, q1, q2, q3;
} v16_mask;

V16 v16_mask v16_greater(v16 a, v16 b) { return (v16_mask){vcgtq_f32(a.q0, b.q0), vcgtq_f32(a.q1, b.q1), vcgtq_f32(a.q2, b.q2), vcgtq_f32(a.q3, b.q3)}; }
V16 v16 v16_select(v16_mask m, v16 a, v16 b) {
  return (v16){vbslq_f32(m.q0, a.q0, b.q0), vbslq_f32(m.q1, a.q1, b.q1), vbslq_f32(m.q2, a.q2, b.q2), vbslq_f32(m.q3, a.q3, b.q3)};
}

typedef struct v16_best {
  v16 first, second;
  v16 id1, id2; /* int32 bits */
} v16_best;

V16 v16_best v16_best_of(v16 z0, v16 z1, int id) {
  v16 a = v16_set1_bits((uint32_t)id), b = v16_set1_bits((uint32_t)id + 1);
  v16_mask swap = v16_greater(z1, z0);
  return (v16_best){v16_max(z0, z1), v16_min(z0, z1), v16_select(swap, b, a), v16_select(swap, a, b)};
}

V16 v16_best v16_best_merge(v16_best a, v16_best b) {
  v16_mask swap = v16_greater(b.first, a.first);
  v16 from_a = v16_select(swap, a.first, a.second), from_b = v16_select(swap, b.second, b.first);
  v16_mask next = v16_greater(from_b, from_a);
  v16 id_a = v16_select(swap, a.id1, a.id2), id_b = v16_select(swap, b.id2, b.id1);
  return (v16_best){v16_select(swap, b.first, a.first), v16_select(next, from_b, from_a), v16_select(swap, b.id1, a.id1), v16_select(next, id_b, id_a)};
}

V16 void v16_store_pairs(float *p, v16 a, v16 b) {
  vst2q_f32(p, ((float32x4x2_t){{a.q0, b.q0}}));
  vst2q_f32(p + 8, ((float32x4x2_t){{a.q1, b.q1}}));
  vst2q_f32(p + 16, ((float32x4x2_t){{a.q2, b.q2}}));
  vst2q_f32(p + 24, ((float32x4x2_t){{a.q3, b.q3}}));
}

V16 void v16_best_store(const v16_best *b, int32_t *ids) { v16_store_pairs((float *)ids, b->id1, b->id2); }

#endif
