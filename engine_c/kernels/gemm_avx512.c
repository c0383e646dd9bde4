/* gemm_avx512.c - matrix products for AVX-512 (F, BW, VL, DQ), with VNNI and BF16 where the CPU has them.
 *
 * A tile keeps the sums of R rows x 32 outputs in registers, f32 and for the integer formats int32 as well, hence 6 rows there; 8 of int8 are
 * faster although some sums go through memory. The tiles of a format are one body with R a constant, unrolled in full. */
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "cpu.h"
#include "target.h"

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX512)

#define ALWAYS inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define MAX_R 8
#define TILE_ARGS \
  const char *w, int groups, const void *const *rows, float *out, ptrdiff_t ld, const char *ahead, ptrdiff_t ahead_step
#define TILE_PASS w, groups, rows, out, ld, ahead, ahead_step

/* Four bytes of row r, at byte `at`, in all lanes. */
static ALWAYS __m512i broadcast(const void *row, ptrdiff_t at) {
  int32_t v;
  memcpy(&v, (const char *)row + at, 4);
  return _mm512_set1_epi32(v);
}
#define BROADCAST(r, at) broadcast(rows[r], at)

static ALWAYS __m512 weight_scales(const char *w, int h) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(w + 32 * h))); }

/* Into the second-level cache: fetched further, the next panel would push this one out of the first. */
#define PREFETCH() \
  for (const char *stop = ahead + ahead_step; ahead < stop; ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1)

#define CLEAR(acc) \
  UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps()

#define STORE(acc)                                  \
  UNROLL for (int r = 0; r < R; r++) {              \
    _mm512_storeu_ps(out + r * ld, acc[r][0]);      \
    _mm512_storeu_ps(out + r * ld + 16, acc[r][1]); \
  }

/* ---- f32 and, without AVX512_BF16, bf16: fma chains over k ascending ---- */

static ALWAYS void tile_f32(const int R, TILE_ARGS) {
  __m512 acc[MAX_R][2];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 32 * (ptrdiff_t)groups; k += 4) {
    if (k % 32 == 0) PREFETCH();
    UNROLL for (int i = 0; i < 4; i++, w += 128) {
      __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 64);
      UNROLL for (int r = 0; r < R; r++) {
        __m512 x = _mm512_castsi512_ps(BROADCAST(r, 4 * (k + i)));
        acc[r][0] = _mm512_fmadd_ps(w0, x, acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(w1, x, acc[r][1]);
      }
    }
  }
  STORE(acc);
}

/* The even and odd bf16 of each 32-bit lane as f32. */
static ALWAYS __m512 even_bf16(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
static ALWAYS __m512 odd_bf16(__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u))); }

static ALWAYS void tile_bf16_plain(const int R, TILE_ARGS) {
  __m512 acc[MAX_R][2];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 64 * (ptrdiff_t)groups; k += 8) {
    if (k % 64 == 0) PREFETCH();
    UNROLL for (int i = 0; i < 2; i++, w += 128) {
      __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64);
      UNROLL for (int r = 0; r < R; r++) {
        __m512i x = BROADCAST(r, k + 4 * i);
        acc[r][0] = _mm512_fmadd_ps(even_bf16(w0), even_bf16(x), acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(even_bf16(w1), even_bf16(x), acc[r][1]);
        acc[r][0] = _mm512_fmadd_ps(odd_bf16(w0), odd_bf16(x), acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(odd_bf16(w1), odd_bf16(x), acc[r][1]);
      }
    }
  }
  STORE(acc);
}

/* ---- int8 and int4 without VNNI ---- */

#define NAME(x) x##_plain
/* At most 4 * 15 * 127 in a 16-bit pair sum. */
static ALWAYS __m512i dot_u4_plain(__m512i sum, __m512i weights, __m512i x) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, x), _mm512_set1_epi16(1)));
  __asm__("" : "+v"(sum)); /* reassociated sums would keep all products of a block in registers */
  return sum;
}
/* |w| times x with the sign of w: a 16-bit pair sum is at most 2 * 128 * 127 in size. */
static ALWAYS __m512i dot_s8_plain(__m512i sum, __m512i weights, __m512i x) {
  __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), x);
  return dot_u4_plain(sum, _mm512_abs_epi8(weights), signed_x);
}
#define DOT_U4 dot_u4_plain
#define DOT_S8 dot_s8_plain
#define INT8_WEIGHTS(v) (v)
#define INT8_START(r, at) ((void)(at), _mm512_setzero_si512())
#include "gemm_avx512.inc.h"
#undef NAME
#undef DOT_U4
#undef DOT_S8
#undef INT8_WEIGHTS
#undef INT8_START

#define TILE(body, R) \
  static void body##_##R(TILE_ARGS) { body(R, TILE_PASS); }
#define TILES_6(body) TILE(body, 1) TILE(body, 2) TILE(body, 3) TILE(body, 4) TILE(body, 5) TILE(body, 6)
#define TILES_8(body) TILES_6(body) TILE(body, 7) TILE(body, 8)
#define LIST_6(body) NULL, body##_1, body##_2, body##_3, body##_4, body##_5, body##_6
#define LIST_8(body) LIST_6(body), body##_7, body##_8

TILES_6(tile_f32)
TILES_8(tile_bf16_plain)
TILES_6(tile_int8_plain)
TILES_6(tile_int4_plain)

static const colibri_gemm_tiles f32_tiles = {COLIBRI_F32, 6, 6, {LIST_6(tile_f32)}};
static const colibri_gemm_tiles bf16_plain_tiles = {COLIBRI_BF16, 8, 8, {LIST_8(tile_bf16_plain)}};
static const colibri_gemm_tiles int8_plain_tiles = {COLIBRI_INT8, 6, 6, {LIST_6(tile_int8_plain)}};
static const colibri_gemm_tiles int4_plain_tiles = {COLIBRI_INT4, 6, 6, {LIST_6(tile_int4_plain)}};

/* ---- int8 and int4 with VNNI ---- */

COLIBRI_TARGET_END
COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX512 ",avx512vnni")
#define NAME(x) x##_vnni
#define DOT_U4 _mm512_dpbusd_epi32
#define DOT_S8 _mm512_dpbusd_epi32
/* w + 128 as an unsigned byte; the row's offset, -128 times the sum of x, takes it back. */
#define INT8_WEIGHTS(v) _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80))
#define INT8_START(r, at) BROADCAST(r, at)
#include "gemm_avx512.inc.h"
TILES_8(tile_int8_vnni)
TILES_6(tile_int4_vnni)

static const colibri_gemm_tiles int8_vnni_tiles = {COLIBRI_INT8, 8, 4, {LIST_8(tile_int8_vnni)}};
static const colibri_gemm_tiles int4_vnni_tiles = {COLIBRI_INT4, 6, 2, {LIST_6(tile_int4_vnni)}};

/* ---- bf16 with AVX512_BF16 ---- */

COLIBRI_TARGET_END
COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX512 ",avx512bf16")
static ALWAYS void tile_bf16_native(const int R, TILE_ARGS) {
  __m512 acc[MAX_R][2];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 64 * (ptrdiff_t)groups; k += 16) {
    if (k % 64 == 0) PREFETCH();
    UNROLL for (int i = 0; i < 4; i++, w += 128) {
      __m512bh w0 = (__m512bh)_mm512_load_si512(w), w1 = (__m512bh)_mm512_load_si512(w + 64);
      UNROLL for (int r = 0; r < R; r++) {
        __m512bh x = (__m512bh)BROADCAST(r, k + 4 * i);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, x);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, x);
      }
    }
  }
  STORE(acc);
}
TILES_8(tile_bf16_native)
COLIBRI_TARGET_END
COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX512)

static const colibri_gemm_tiles bf16_native_tiles = {COLIBRI_BF16, 8, 8, {LIST_8(tile_bf16_native)}};

/* ---- the table's functions ---- */

static inline int has(unsigned feature) { return (colibri_cpu_features() & feature) != 0; }

#define RUN(tiles) colibri_gemm_run(tiles, w, panels, groups, rows, n_rows, out, ld, next)

void colibri_gemm_f32_avx512(COLIBRI_GEMM_ARGS) { RUN(&f32_tiles); }
void colibri_gemm_bf16_avx512(COLIBRI_GEMM_ARGS) { RUN(has(COLIBRI_CPU_AVX512_BF16) ? &bf16_native_tiles : &bf16_plain_tiles); }
void colibri_gemm_int8_avx512(COLIBRI_GEMM_ARGS) { RUN(has(COLIBRI_CPU_AVX512_VNNI) ? &int8_vnni_tiles : &int8_plain_tiles); }
void colibri_gemm_int4_avx512(COLIBRI_GEMM_ARGS) { RUN(has(COLIBRI_CPU_AVX512_VNNI) ? &int4_vnni_tiles : &int4_plain_tiles); }

void colibri_gemm_bf16_avx512_plain(COLIBRI_GEMM_ARGS) { RUN(&bf16_plain_tiles); }
void colibri_gemm_int8_avx512_plain(COLIBRI_GEMM_ARGS) { RUN(&int8_plain_tiles); }
void colibri_gemm_int4_avx512_plain(COLIBRI_GEMM_ARGS) { RUN(&int4_plain_tiles); }
COLIBRI_TARGET_END
#endif
