/* gemm_avx2.c - matrix products for AVX2 with FMA and F16C.
 *
 * A pass over the columns computes R rows x C columns of 8 outputs; a panel is four such columns. Few rows take a panel in one pass, so that
 * cold weights are streamed once; more rows take it in two, for 16 registers. All bodies have R and C constant and are unrolled in full. */
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "target.h"

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX2)

#define ALWAYS inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define MAX_R 6
#define TILE_ARGS \
  const char *w, int groups, const void *const *rows, float *out, ptrdiff_t ld, const char *ahead, ptrdiff_t ahead_step

/* Four bytes of row r, at byte `at`, in all lanes. */
static ALWAYS __m256i broadcast(const void *row, ptrdiff_t at) {
  int32_t v;
  memcpy(&v, (const char *)row + at, 4);
  return _mm256_set1_epi32(v);
}
#define BROADCAST(r, at) broadcast(rows[r], at)

static ALWAYS __m256i load(const char *p) { return _mm256_load_si256((const __m256i *)p); }

/* A sum the compiler must not reassociate: it would keep all products of a block in registers before it adds them. */
static ALWAYS __m256i pinned(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}

#define CLEAR(acc) \
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) acc[r][c] = _mm256_setzero_ps()

/* Into the second-level cache: fetched further, the next panel would push this one out of the first. */
#define PREFETCH() \
  for (const char *stop = ahead + ahead_step; ahead < stop; ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1)

#define STORE() \
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) _mm256_storeu_ps(out + r * ld + 8 * (first + c), acc[r][c])

/* pass_*: columns first .. first + C - 1 of a panel. */

static ALWAYS void pass_f32(const int R, const int C, const int first, TILE_ARGS) {
  __m256 acc[MAX_R][4];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 32 * (ptrdiff_t)groups; k += 4) {
    if (k % 32 == 0) PREFETCH();
    UNROLL for (int i = 0; i < 4; i++, w += 128) {
      UNROLL for (int r = 0; r < R; r++) {
        __m256 x = _mm256_castsi256_ps(BROADCAST(r, 4 * (k + i)));
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = _mm256_fmadd_ps(_mm256_load_ps((const float *)(w + 32 * (first + c))), x, acc[r][c]);
      }
    }
  }
  STORE();
}

/* The even and odd bf16 of each 32-bit lane as f32. */
static ALWAYS __m256 even_bf16(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
static ALWAYS __m256 odd_bf16(__m256i v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u))); }

static ALWAYS void pass_bf16(const int R, const int C, const int first, TILE_ARGS) {
  __m256 acc[MAX_R][4];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 64 * (ptrdiff_t)groups; k += 8) {
    if (k % 64 == 0) PREFETCH();
    UNROLL for (int i = 0; i < 2; i++, w += 128) {
      UNROLL for (int r = 0; r < R; r++) {
        __m256i x = BROADCAST(r, k + 4 * i);
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = _mm256_fmadd_ps(even_bf16(load(w + 32 * (first + c))), even_bf16(x), acc[r][c]);
        UNROLL for (int c = 0; c < C; c++) acc[r][c] = _mm256_fmadd_ps(odd_bf16(load(w + 32 * (first + c))), odd_bf16(x), acc[r][c]);
      }
    }
  }
  STORE();
}

/* int8: |w| times x with the sign of w; a 16-bit pair sum is at most 2 * 128 * 127 in size. */
static ALWAYS void pass_int8(const int R, const int C, const int first, TILE_ARGS) {
  const __m256i ones = _mm256_set1_epi16(1);
  const char *w_end = w + (ptrdiff_t)groups * 1088;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups;
  __m256 acc[MAX_R][4];
  CLEAR(acc);
  for (; w < w_end; w += 1088, q += 32, e += 4) {
    PREFETCH();
    __m256i sum[MAX_R][4];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = _mm256_setzero_si256();
    UNROLL for (int s = 0; s < 8; s++) {
      UNROLL for (int r = 0; r < R; r++) {
        __m256i x = BROADCAST(r, q + 4 * s);
        UNROLL for (int c = 0; c < C; c++) {
          __m256i v = load(w + 64 + s * 128 + (first + c) * 32);
          __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(x, v));
          sum[r][c] = pinned(_mm256_add_epi32(sum[r][c], _mm256_madd_epi16(pairs, ones)));
        }
      }
    }
    UNROLL for (int c = 0; c < C; c++) {
      __m256 scale = _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(w + 16 * (first + c))));
      UNROLL for (int r = 0; r < R; r++) {
        __m256 scaled = _mm256_mul_ps(scale, _mm256_castsi256_ps(BROADCAST(r, e)));
        acc[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][c]), scaled, acc[r][c]);
      }
    }
  }
  STORE();
}

/* int4: 16-bit sums hold a whole group, at most 32 / 2 * 15 * 127 = 30480 in size. */
static ALWAYS void pass_int4(const int R, const int C, const int first, TILE_ARGS) {
  const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
  const char *w_end = w + (ptrdiff_t)groups * 576;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups, o = e + 4 * (ptrdiff_t)groups;
  __m256 acc[MAX_R][4];
  CLEAR(acc);
  for (; w < w_end; w += 576, q += 32, e += 4, o += 4) {
    PREFETCH();
    __m256i sum[MAX_R][4], u[4];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = _mm256_setzero_si256();
    UNROLL for (int s = 0; s < 8; s++) {
      UNROLL for (int c = 0; c < C; c++) {
        __m256i v = load(w + 64 + s / 2 * 128 + (first + c) * 32);
        u[c] = _mm256_and_si256(s % 2 == 0 ? v : _mm256_srli_epi16(v, 4), nibble);
      }
      UNROLL for (int r = 0; r < R; r++) {
        __m256i x = BROADCAST(r, q + 4 * s);
        UNROLL for (int c = 0; c < C; c++) sum[r][c] = pinned(_mm256_add_epi16(sum[r][c], _mm256_maddubs_epi16(u[c], x)));
      }
    }
    UNROLL for (int c = 0; c < C; c++) {
      __m256i scale = _mm256_castps_si256(_mm256_cvtph_ps(_mm_load_si128((const __m128i *)(w + 16 * (first + c)))));
      UNROLL for (int r = 0; r < R; r++) {
        __m256 total = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(sum[r][c], ones), BROADCAST(r, o)));
        acc[r][c] = _mm256_fmadd_ps(total, _mm256_castsi256_ps(_mm256_add_epi32(scale, BROADCAST(r, e))), acc[r][c]);
      }
    }
  }
  STORE();
}

/* A tile of few rows is one pass; one of more rows is two, of which the first prefetches. */
#define WIDE(body, R) \
  static void body##_##R(TILE_ARGS) { body(R, 4, 0, w, groups, rows, out, ld, ahead, ahead_step); }
#define NARROW(body, R)                                          \
  static void body##_##R(TILE_ARGS) {                            \
    body(R, 2, 0, w, groups, rows, out, ld, ahead, ahead_step);  \
    body(R, 2, 2, w, groups, rows, out, ld, ahead, 0);           \
  }
#define TILES_4(body) WIDE(body, 1) WIDE(body, 2) NARROW(body, 3) NARROW(body, 4)
#define TILES_6(body) TILES_4(body) NARROW(body, 5) NARROW(body, 6)
#define LIST_4(body) {NULL, body##_1, body##_2, body##_3, body##_4}
#define LIST_6(body) {NULL, body##_1, body##_2, body##_3, body##_4, body##_5, body##_6}

TILES_6(pass_f32)
TILES_4(pass_bf16)
TILES_4(pass_int8)
TILES_4(pass_int4)

static const colibri_gemm_tiles f32_tiles = {COLIBRI_F32, 6, 2, LIST_6(pass_f32)};
static const colibri_gemm_tiles bf16_tiles = {COLIBRI_BF16, 4, 2, LIST_4(pass_bf16)};
static const colibri_gemm_tiles int8_tiles = {COLIBRI_INT8, 4, 2, LIST_4(pass_int8)};
static const colibri_gemm_tiles int4_tiles = {COLIBRI_INT4, 4, 2, LIST_4(pass_int4)};

#define RUN(tiles) colibri_gemm_run(tiles, w, panels, groups, rows, n_rows, out, ld, next)

void colibri_gemm_f32_avx2(COLIBRI_GEMM_ARGS) { RUN(&f32_tiles); }
void colibri_gemm_bf16_avx2(COLIBRI_GEMM_ARGS) { RUN(&bf16_tiles); }
void colibri_gemm_int8_avx2(COLIBRI_GEMM_ARGS) { RUN(&int8_tiles); }
void colibri_gemm_int4_avx2(COLIBRI_GEMM_ARGS) { RUN(&int4_tiles); }
COLIBRI_TARGET_END
#endif
