/* v16_avx2.h - 16 floats in two ymm registers. The functions are listed and explained in kernels_v16.inc.h. */
#ifndef COLIBRI_V16_AVX2_H
#define COLIBRI_V16_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define V16 static inline __attribute__((always_inline))
#define V16_REGISTERS 8

typedef struct v16 {
  __m256 lo, hi;
} v16;

#define V16_BOTH(f, a, b) ((v16){f((a).lo, (b).lo), f((a).hi, (b).hi)})

/* Lane i of half h is all ones if 8 h + i < n. */
V16 __m256i v16_lanes(int n, int h) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8 * h), lane);
}

V16 v16 v16_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
V16 v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
V16 v16 v16_load_n(const float *p, int n) { return (v16){_mm256_maskload_ps(p, v16_lanes(n, 0)), _mm256_maskload_ps(p + 8, v16_lanes(n, 1))}; }
V16 void v16_store(float *p, v16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
V16 void v16_store_n(float *p, v16 a, int n) {
  _mm256_maskstore_ps(p, v16_lanes(n, 0), a.lo);
  _mm256_maskstore_ps(p + 8, v16_lanes(n, 1), a.hi);
}

V16 v16 v16_add(v16 a, v16 b) { return V16_BOTH(_mm256_add_ps, a, b); }
V16 v16 v16_sub(v16 a, v16 b) { return V16_BOTH(_mm256_sub_ps, a, b); }
V16 v16 v16_mul(v16 a, v16 b) { return V16_BOTH(_mm256_mul_ps, a, b); }
V16 v16 v16_div(v16 a, v16 b) { return V16_BOTH(_mm256_div_ps, a, b); }
V16 v16 v16_fma(v16 a, v16 b, v16 c) { return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
V16 v16 v16_neg(v16 a) { return V16_BOTH(_mm256_xor_ps, a, v16_set1(-0.0f)); }
V16 v16 v16_sqrt(v16 a) { return (v16){_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
V16 v16 v16_max(v16 a, v16 b) { return V16_BOTH(_mm256_max_ps, a, b); }
V16 v16 v16_min(v16 a, v16 b) { return V16_BOTH(_mm256_min_ps, a, b); }
V16 v16 v16_first(int n, v16 a, v16 b) {
  return (v16){_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(v16_lanes(n, 0))),
               _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(v16_lanes(n, 1)))};
}

V16 __m256 v16_scale8(__m256 a, __m256 shifted) {
  __m256i i = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000)), half = _mm256_srai_epi32(i, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23)));
}
V16 v16 v16_scale(v16 a, v16 n, v16 shifted) {
  (void)n;
  return V16_BOTH(v16_scale8, a, shifted);
}

V16 float v16_fold(v16 a) {
  __m256 b = _mm256_add_ps(a.lo, a.hi);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

V16 float v16_top(v16 a) {
  __m256 b = _mm256_max_ps(a.lo, a.hi);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

/* One half after the other: fewer registers are alive at a time, and the sums stay in theirs. */
V16 void v16_tile(const int rows, const int count, const float *x, ptrdiff_t x_ld, const float *w, ptrdiff_t w_ld, v16 *sum) {
  for (int e = 0; e < count; e++) {
    __m256 u = _mm256_loadu_ps(w + e * w_ld);
    for (int r = 0; r < rows; r++) sum[r * count + e].lo = _mm256_fmadd_ps(u, _mm256_loadu_ps(x + r * x_ld), sum[r * count + e].lo);
  }
  for (int e = 0; e < count; e++) {
    __m256 u = _mm256_loadu_ps(w + e * w_ld + 8);
    for (int r = 0; r < rows; r++) sum[r * count + e].hi = _mm256_fmadd_ps(u, _mm256_loadu_ps(x + r * x_ld + 8), sum[r * count + e].hi);
  }
}

/* ---------------------------------------------------------------- integers and masks */

V16 uint32_t v16_bits(__m256 lo, __m256 hi) { return (uint32_t)(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8); }
V16 uint32_t v16_equal(v16 a, v16 b) { return v16_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)); }
V16 uint32_t v16_is_nan(v16 a) { return v16_bits(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)); }

V16 v16 v16_and(v16 a, uint32_t bits) {
  __m256 b = _mm256_castsi256_ps(_mm256_set1_epi32((int32_t)bits));
  return (v16){_mm256_and_ps(a.lo, b), _mm256_and_ps(a.hi, b)};
}
V16 v16 v16_tag(v16 a, uint32_t keep, uint32_t tag) {
  __m256 b = _mm256_castsi256_ps(_mm256_set1_epi32((int32_t)tag));
  a = v16_and(a, keep);
  return (v16){_mm256_or_ps(a.lo, b), _mm256_or_ps(a.hi, b)};
}
V16 v16 v16_other(v16 a, v16 b, v16 one) {
  a = V16_BOTH(_mm256_xor_ps, a, b);
  return V16_BOTH(_mm256_xor_ps, a, one);
}

V16 uint32_t v16_not_finite(v16 a) { return v16_is_nan(v16_sub(a, a)); }

V16 __m256i v16_magnitude(__m256 a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }

V16 uint32_t v16_amax_bits(v16 a, v16 b) {
  __m256i m = _mm256_max_epi32(_mm256_max_epi32(v16_magnitude(a.lo), v16_magnitude(a.hi)),
                               _mm256_max_epi32(v16_magnitude(b.lo), v16_magnitude(b.hi)));
  __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(h);
}

V16 int32_t v16_store_int8(int8_t *q, v16 a, v16 b) {
  __m256i i0 = _mm256_cvtps_epi32(a.lo), i1 = _mm256_cvtps_epi32(a.hi), i2 = _mm256_cvtps_epi32(b.lo), i3 = _mm256_cvtps_epi32(b.hi);
  /* The packs work on 128-bit halves; the permutation puts the groups of four back in order. */
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3));
  _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  __m256i sum = _mm256_add_epi32(_mm256_add_epi32(i0, i1), _mm256_add_epi32(i2, i3));
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
  return _mm_cvtsi128_si32(h);
}

/* ---------------------------------------------------------------- bf16 */

V16 __m256 v16_widen8(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
V16 v16 v16_load_bf16(const uint16_t *p) {
  return (v16){v16_widen8(_mm_loadu_si128((const __m128i *)p)), v16_widen8(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
V16 v16 v16_load_bf16_n(const uint16_t *p, int n) {
  uint16_t whole[16] = {0};
  memcpy(whole, p, 2 * (size_t)n);
  return v16_load_bf16(whole);
}

V16 __m256i v16_round_bf16(__m256 a) {
  __m256i u = _mm256_castps_si256(a), even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even);
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm256_srli_epi32(rounded, 16);
}
V16 void v16_store_bf16(uint16_t *p, v16 a) {
  __m256i packed = _mm256_packus_epi32(v16_round_bf16(a.lo), v16_round_bf16(a.hi));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
V16 void v16_store_bf16_n(uint16_t *p, v16 a, int n) {
  uint16_t whole[16];
  v16_store_bf16(whole, a);
  memcpy(p, whole, 2 * (size_t)n);
}

/* ---------------------------------------------------------------- top 2 */

/* 8 rows of 8 floats, the first n valid, to columns. */
V16 void v16_transpose8(const float *x, ptrdiff_t ld, int n, __m256 c[8]) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = n == 8 ? _mm256_loadu_ps(x + i * ld) : _mm256_maskload_ps(x + i * ld, v16_lanes(n, 0));
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[4 + i] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) { /* r[2 h + i]: columns 0 + h and, in the upper 128 bits, 4 + h; rows 4 i .. 4 i + 3 */
    r[0 + i] = _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44);
    r[2 + i] = _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee);
    r[4 + i] = _mm256_shuffle_ps(t[4 + 2 * i], t[4 + 2 * i + 1], 0x44);
    r[6 + i] = _mm256_shuffle_ps(t[4 + 2 * i], t[4 + 2 * i + 1], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    c[i] = _mm256_permute2f128_ps(r[2 * i], r[2 * i + 1], 0x20);
    c[4 + i] = _mm256_permute2f128_ps(r[2 * i], r[2 * i + 1], 0x31);
  }
}

V16 void v16_columns8(const float *x, ptrdiff_t ld, int n, v16 column[8]) {
  __m256 half[8];
  v16_transpose8(x, ld, n, half);
  for (int i = 0; i < 8; i++) column[i].lo = half[i];
  v16_transpose8(x + 8 * ld, ld, n, half);
  for (int i = 0; i < 8; i++) column[i].hi = half[i];
}

typedef struct v16_best {
  v16 first, second;
  v16 id1, id2; /* int32 bits */
} v16_best;

V16 __m256 v16_greater8(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
V16 v16 v16_greater(v16 a, v16 b) { return V16_BOTH(v16_greater8, a, b); } /* all ones or zeros in each lane */
V16 v16 v16_select(v16 mask, v16 a, v16 b) { return (v16){_mm256_blendv_ps(b.lo, a.lo, mask.lo), _mm256_blendv_ps(b.hi, a.hi, mask.hi)}; }

/* id + sign * mask, the mask's ones being -1. */
V16 __m256 v16_step8(int id, int sign, __m256 mask) {
  __m256i i = _mm256_set1_epi32(id), m = _mm256_castps_si256(mask);
  return _mm256_castsi256_ps(sign > 0 ? _mm256_add_epi32(i, m) : _mm256_sub_epi32(i, m));
}

V16 v16_best v16_best_of(v16 z0, v16 z1, int id) {
  v16 swap = v16_greater(z1, z0);
  v16 id1 = {v16_step8(id, -1, swap.lo), v16_step8(id, -1, swap.hi)}, id2 = {v16_step8(id + 1, 1, swap.lo), v16_step8(id + 1, 1, swap.hi)};
  return (v16_best){v16_max(z0, z1), v16_min(z0, z1), id1, id2};
}

V16 v16_best v16_best_merge(v16_best a, v16_best b) {
  v16 swap = v16_greater(b.first, a.first);
  v16 from_a = v16_select(swap, a.first, a.second), from_b = v16_select(swap, b.second, b.first);
  v16 next = v16_greater(from_b, from_a);
  v16 id_a = v16_select(swap, a.id1, a.id2), id_b = v16_select(swap, b.id2, b.id1);
  return (v16_best){v16_max(a.first, b.first), v16_max(from_a, from_b), v16_select(swap, b.id1, a.id1), v16_select(next, id_b, id_a)};
}

V16 void v16_store_pairs(float *p, v16 a, v16 b) {
  __m256 lo = _mm256_unpacklo_ps(a.lo, b.lo), hi = _mm256_unpackhi_ps(a.lo, b.lo);
  v16_store(p, (v16){_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31)});
  lo = _mm256_unpacklo_ps(a.hi, b.hi), hi = _mm256_unpackhi_ps(a.hi, b.hi);
  v16_store(p + 16, (v16){_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31)});
}

V16 void v16_best_store(const v16_best *b, int32_t *ids) { v16_store_pairs((float *)ids, b->id1, b->id2); }

#endif
