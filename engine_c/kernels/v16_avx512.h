/* v16_avx512.h - 16 floats in one zmm register. The functions are listed and explained in kernels_v16.inc.h. */
#ifndef COLIBRI_V16_AVX512_H
#define COLIBRI_V16_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#define V16 static inline __attribute__((always_inline))
#define V16_REGISTERS 32 /* vectors of 16 floats that fit into the register file */

typedef __m512 v16;

V16 __mmask16 v16_lanes(int n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

V16 v16 v16_set1(float x) { return _mm512_set1_ps(x); }
V16 v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
V16 v16 v16_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(v16_lanes(n), p); }
V16 void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
V16 void v16_store_n(float *p, v16 a, int n) { _mm512_mask_storeu_ps(p, v16_lanes(n), a); }

V16 v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
V16 v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
V16 v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
V16 v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
V16 v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
V16 v16 v16_neg(v16 a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
V16 v16 v16_sqrt(v16 a) { return _mm512_sqrt_ps(a); }
V16 v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
V16 v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
V16 v16 v16_first(int n, v16 a, v16 b) { return _mm512_mask_mov_ps(b, v16_lanes(n), a); }

V16 v16 v16_scale(v16 a, v16 n, v16 shifted) {
  (void)shifted;
  return _mm512_scalef_ps(a, n);
}

V16 __m256 v16_high(v16 a) { return _mm512_extractf32x8_ps(a, 1); }

V16 float v16_fold(v16 a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), v16_high(a));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

V16 float v16_top(v16 a) {
  __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), v16_high(a));
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

V16 void v16_tile(const int rows, const int count, const float *x, ptrdiff_t x_ld, const float *w, ptrdiff_t w_ld, v16 *sum) {
  v16 v[4];
  for (int r = 0; r < rows; r++) v[r] = v16_load(x + r * x_ld);
  for (int e = 0; e < count; e++) {
    v16 u = v16_load(w + e * w_ld);
    for (int r = 0; r < rows; r++) sum[r * count + e] = v16_fma(u, v[r], sum[r * count + e]);
  }
}

/* ---------------------------------------------------------------- integers and masks */

V16 uint32_t v16_equal(v16 a, v16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
V16 uint32_t v16_is_nan(v16 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }

V16 v16 v16_and(v16 a, uint32_t bits) { return _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32((int32_t)bits))); }
V16 v16 v16_tag(v16 a, uint32_t keep, uint32_t tag) { /* 0xea: (a & keep) | tag */
  __m512i kept = _mm512_castps_si512(a);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(kept, _mm512_set1_epi32((int32_t)keep), _mm512_set1_epi32((int32_t)tag), 0xea));
}
V16 v16 v16_other(v16 a, v16 b, v16 one) { /* 0x96: a ^ b ^ one */
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b), _mm512_castps_si512(one), 0x96));
}

V16 uint32_t v16_not_finite(v16 a) { return _mm512_fpclass_ps_mask(a, 0x99); }

V16 uint32_t v16_amax_bits(v16 a, v16 b) {
  __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512i m = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), mask), _mm512_and_si512(_mm512_castps_si512(b), mask));
  return (uint32_t)_mm512_reduce_max_epi32(m);
}

V16 int32_t v16_store_int8(int8_t *q, v16 a, v16 b) {
  __m512i i = _mm512_cvtps_epi32(a), j = _mm512_cvtps_epi32(b);
  _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(i));
  _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(j));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
}

/* ---------------------------------------------------------------- bf16 */

V16 v16 v16_widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
V16 v16 v16_load_bf16(const uint16_t *p) { return v16_widen(_mm256_loadu_si256((const __m256i *)p)); }
V16 v16 v16_load_bf16_n(const uint16_t *p, int n) { return v16_widen(_mm256_maskz_loadu_epi16(v16_lanes(n), p)); }

V16 __m256i v16_narrow(v16 a) {
  __m512i u = _mm512_castps_si512(a), even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even);
  rounded = _mm512_mask_or_epi32(rounded, (__mmask16)v16_is_nan(a), u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
V16 void v16_store_bf16(uint16_t *p, v16 a) { _mm256_storeu_si256((__m256i *)p, v16_narrow(a)); }
V16 void v16_store_bf16_n(uint16_t *p, v16 a, int n) { _mm256_mask_storeu_epi16(p, v16_lanes(n), v16_narrow(a)); }

/* ---------------------------------------------------------------- top 2 */

/* Rows a and b, 8 floats each of which the first n are valid, in one register. */
V16 v16 v16_pair(const float *a, const float *b, int n) {
  __mmask8 m = (__mmask8)((1u << n) - 1);
  __m256 low = n == 8 ? _mm256_loadu_ps(a) : _mm256_maskz_loadu_ps(m, a), high = n == 8 ? _mm256_loadu_ps(b) : _mm256_maskz_loadu_ps(m, b);
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

/* 8 rows to columns in quarters: c[i] = column i of rows 0-3, column 4 + i of rows 0-3, column i of rows 4-7, column 4 + i of rows 4-7. */
V16 void v16_quarters(const float *x, ptrdiff_t ld, int n, v16 c[4]) {
  v16 r0 = v16_pair(x, x + 4 * ld, n), r1 = v16_pair(x + ld, x + 5 * ld, n);
  v16 r2 = v16_pair(x + 2 * ld, x + 6 * ld, n), r3 = v16_pair(x + 3 * ld, x + 7 * ld, n);
  __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1)), b = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
  __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1)), e = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
  c[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
  c[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  c[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(d, e));
  c[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(d, e));
}

V16 void v16_columns8(const float *x, ptrdiff_t ld, int n, v16 column[8]) {
  v16 a[4], b[4];
  v16_quarters(x, ld, n, a);
  v16_quarters(x + 8 * ld, ld, n, b);
  for (int i = 0; i < 4; i++) {
    column[i] = _mm512_shuffle_f32x4(a[i], b[i], 0x88);
    column[4 + i] = _mm512_shuffle_f32x4(a[i], b[i], 0xdd);
  }
}

/* The numbers are bytes: a quarter of the work. */
typedef struct v16_best {
  v16 first, second;
  __m128i id1, id2;
} v16_best;

/* 16 bytes of id. From memory: GCC would bring each constant from a general register, in two operations of a busy unit. */
V16 __m128i v16_number(int id) {
#define V16_TIMES4(x) 0x01010101 * (x), 0x01010101 * (x), 0x01010101 * (x), 0x01010101 * (x)
  static const _Alignas(16) int32_t numbers[16][4] = {
    {V16_TIMES4(0)}, {V16_TIMES4(1)}, {V16_TIMES4(2)}, {V16_TIMES4(3)}, {V16_TIMES4(4)}, {V16_TIMES4(5)}, {V16_TIMES4(6)}, {V16_TIMES4(7)},
    {V16_TIMES4(8)}, {V16_TIMES4(9)}, {V16_TIMES4(10)}, {V16_TIMES4(11)}, {V16_TIMES4(12)}, {V16_TIMES4(13)}, {V16_TIMES4(14)}, {V16_TIMES4(15)},
  };
  const __m128i *number = (const __m128i *)numbers;
  __asm__("" : "+r"(number));
  return number[id];
}

V16 v16_best v16_best_of(v16 z0, v16 z1, int id) {
  __mmask16 swap = _mm512_cmp_ps_mask(z1, z0, _CMP_GT_OQ);
  __m128i low = v16_number(id), high = v16_number(id + 1);
  v16_best b = {_mm512_max_ps(z0, z1), _mm512_min_ps(z0, z1), _mm_mask_mov_epi8(low, swap, high), _mm_mask_mov_epi8(high, swap, low)};
  return b;
}

V16 v16_best v16_best_merge(v16_best a, v16_best b) {
  __mmask16 swap = _mm512_cmp_ps_mask(b.first, a.first, _CMP_GT_OQ);
  v16 from_a = _mm512_mask_mov_ps(a.second, swap, a.first), from_b = _mm512_mask_mov_ps(b.first, swap, b.second);
  __mmask16 next = _mm512_cmp_ps_mask(from_b, from_a, _CMP_GT_OQ);
  __m128i id_a = _mm_mask_mov_epi8(a.id2, swap, a.id1), id_b = _mm_mask_mov_epi8(b.id1, swap, b.id2);
  v16_best c = {_mm512_max_ps(a.first, b.first), _mm512_max_ps(from_a, from_b), _mm_mask_mov_epi8(a.id1, swap, b.id1), _mm_mask_mov_epi8(id_a, next, id_b)};
  return c;
}

V16 void v16_store_pairs(float *p, v16 a, v16 b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(a, low, b));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a, high, b));
}

V16 void v16_best_store(const v16_best *b, int32_t *ids) {
  _mm512_storeu_si512(ids, _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(b->id1, b->id2)));
  _mm512_storeu_si512(ids + 16, _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(b->id1, b->id2)));
}

#endif
