/* gemm_neon.c - matrix products for Advanced SIMD of AArch64, the integer ones with the dot product where the CPU has it. All of them equal the
 * generic ones bit by bit; bf16 too, since a lane widens to f32 and sums k in ascending order.
 *
 * A pass over the columns computes R rows x C columns of 4 outputs; a panel is eight such columns. Few rows take a panel in one pass, so that
 * cold weights are streamed once; more rows take it in several, for 32 registers. All bodies have R and C constant and are unrolled in full. */
#include "gemm.h"

#if defined(__aarch64__)
/* Scheduled before registers are assigned, GCC loads a whole step's weights ahead and spills sums. */
#if !defined(__clang__)
#pragma GCC optimize("no-schedule-insns")
#endif
#include <arm_neon.h>

#include "cpu.h"
#include "target.h"

#define ALWAYS inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define MAX_R 6
#define TILE_ARGS \
  const char *w, int groups, const void *const *rows, float *out, ptrdiff_t ld, const char *ahead, ptrdiff_t ahead_step

#define CLEAR(acc) \
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) acc[r][c] = vdupq_n_f32(0)

/* Into the second-level cache: fetched further, the next panel would push this one out of the first. */
#define PREFETCH() \
  for (const char *stop = ahead + ahead_step; ahead < stop; ahead += 64) __builtin_prefetch(ahead, 0, 2)

#define STORE() \
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) vst1q_f32(out + r * ld + 4 * (first + c), acc[r][c])

/* Tiles of body R by the number of columns a pass takes; the first pass prefetches. */
#define ARGS w, groups, rows, out, ld
#define PASS_8(body, R) \
  static void body##_##R(TILE_ARGS) { body(R, 8, 0, ARGS, ahead, ahead_step); }
#define PASS_4(body, R)                      \
  static void body##_##R(TILE_ARGS) {        \
    body(R, 4, 0, ARGS, ahead, ahead_step);  \
    body(R, 4, 4, ARGS, ahead, 0);           \
  }
#define PASS_2(body, R)                      \
  static void body##_##R(TILE_ARGS) {        \
    body(R, 2, 0, ARGS, ahead, ahead_step);  \
    body(R, 2, 2, ARGS, ahead, 0);           \
    body(R, 2, 4, ARGS, ahead, 0);           \
    body(R, 2, 6, ARGS, ahead, 0);           \
  }
#define LIST_4(body) {NULL, body##_1, body##_2, body##_3, body##_4}
#define LIST_6(body) {NULL, body##_1, body##_2, body##_3, body##_4, body##_5, body##_6}

/* ---------------------------------------------------------------- f32 and bf16 */

/* pass_*: columns first .. first + C - 1 of a panel. Lanes must be constants, so the steps of four k are written out. */

#define F32_STEP(i) \
  UNROLL for (int c = 0; c < C; c++) { \
    float32x4_t v = vld1q_f32((const float *)w + (i) * 32 + 4 * (first + c)); \
    UNROLL for (int r = 0; r < R; r++) acc[r][c] = vfmaq_laneq_f32(acc[r][c], v, x[r], i); \
  }

static ALWAYS void pass_f32(const int R, const int C, const int first, TILE_ARGS) {
  float32x4_t acc[MAX_R][8], x[MAX_R];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 32 * (ptrdiff_t)groups; k += 4, w += 512) {
    if (k % 32 == 0) PREFETCH();
    UNROLL for (int r = 0; r < R; r++) x[r] = vld1q_f32((const float *)rows[r] + k);
    F32_STEP(0) F32_STEP(1) F32_STEP(2) F32_STEP(3)
  }
  STORE();
}

/* The even and odd bf16 of each 32-bit lane as f32. */
static ALWAYS float32x4_t even_bf16(uint32x4_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 16)); }
static ALWAYS float32x4_t odd_bf16(uint32x4_t v) { return vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000u))); }

#define BF16_STEP(i) \
  UNROLL for (int c = 0; c < C; c++) { \
    uint32x4_t v = vld1q_u32((const uint32_t *)w + (i) * 32 + 4 * (first + c)); \
    UNROLL for (int r = 0; r < R; r++) acc[r][c] = vfmaq_laneq_f32(acc[r][c], even_bf16(v), x[r], 2 * (i)); \
    UNROLL for (int r = 0; r < R; r++) acc[r][c] = vfmaq_laneq_f32(acc[r][c], odd_bf16(v), x[r], 2 * (i) + 1); \
  }

static ALWAYS void pass_bf16(const int R, const int C, const int first, TILE_ARGS) {
  float32x4_t acc[MAX_R][8], x[MAX_R];
  CLEAR(acc);
  for (ptrdiff_t k = 0; k < 32 * (ptrdiff_t)groups; k += 4, w += 256) {
    if (k % 32 == 0) PREFETCH();
    UNROLL for (int r = 0; r < R; r++) x[r] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)rows[r] + k), 16));
    BF16_STEP(0) BF16_STEP(1)
  }
  STORE();
}

PASS_8(pass_f32, 1) PASS_8(pass_f32, 2) PASS_8(pass_f32, 3) PASS_4(pass_f32, 4) PASS_4(pass_f32, 5) PASS_4(pass_f32, 6)
PASS_8(pass_bf16, 1) PASS_8(pass_bf16, 2) PASS_4(pass_bf16, 3) PASS_4(pass_bf16, 4)

static const colibri_gemm_tiles f32_tiles = {COLIBRI_F32, 6, 3, LIST_6(pass_f32)};
static const colibri_gemm_tiles bf16_tiles = {COLIBRI_BF16, 4, 2, LIST_4(pass_bf16)};

/* ---------------------------------------------------------------- integers */

/* Macros, since a function of the build's own target is not inlined into one of another that lacks a part of it. */

/* Four bytes of row r, at byte `at`, in all lanes. */
#define BROADCAST(r, at) vld1q_dup_s32((const int32_t *)((const char *)rows[r] + (at)))

/* The fp16 scales of the four outputs of column c. */
#define WEIGHT_SCALES(c) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)w + 4 * (c))))

/* ---- without the dot product ---- */

/* The sum of two neighbouring products is at most 2 * 128 * 127 = 32512 in size and fits 16 bits. */
static ALWAYS int32x4_t dot_s8(int32x4_t sum, int8x16_t w, int8x16_t x) {
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
}

/* Four products are at most 4 * 15 * 127 = 7620. */
static ALWAYS int32x4_t dot_u4(int32x4_t sum, int8x16_t w0, int8x16_t w1, int8x16_t x0, int8x16_t x1) {
  int16x8_t low = vmull_s8(vget_low_s8(w0), vget_low_s8(x0)), high = vmull_high_s8(w0, x0);
  low = vmlal_s8(low, vget_low_s8(w1), vget_low_s8(x1));
  high = vmlal_high_s8(high, w1, x1);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
}

#define NAME(x) x##_plain
#define ACTIVATIONS() (void)0
#define SPREAD(r, i) vreinterpretq_s8_s32(BROADCAST(r, q + 4 * (i)))
#define DOT_S8(sum, w, r, i) dot_s8(sum, w, SPREAD(r, i))
#define DOT_U4(sum, w0, w1, r, i) dot_u4(sum, w0, w1, SPREAD(r, i), SPREAD(r, (i) + 1))
#include "gemm_neon.inc.h"

static const colibri_gemm_tiles int8_plain_tiles = {COLIBRI_INT8, 4, 1, LIST_4(pass_int8_plain)};
static const colibri_gemm_tiles int4_plain_tiles = {COLIBRI_INT4, 4, 1, LIST_4(pass_int4_plain)};

/* ---- with the dot product ---- */

#if !defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD) /* older Clangs know it only in a build for such CPUs alone */
#if !defined(__ARM_FEATURE_DOTPROD)
COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_DOTPROD)
#endif
#define NAME(x) x##_dot
#define ACTIVATIONS() \
  int8x16_t x[MAX_R][2]; \
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < 2; i++) x[r][i] = vld1q_s8((const int8_t *)rows[r] + q + 16 * i)
#define DOT_S8(sum, w, r, i) vdotq_laneq_s32(sum, w, x[r][(i) / 4], (i) % 4)
#define DOT_U4(sum, w0, w1, r, i) DOT_S8(DOT_S8(sum, w0, r, i), w1, r, (i) + 1)
#include "gemm_neon.inc.h"

#if !defined(__ARM_FEATURE_DOTPROD)
COLIBRI_TARGET_END
#endif

static const colibri_gemm_tiles int8_dot_tiles = {COLIBRI_INT8, 4, 1, LIST_4(pass_int8_dot)};
static const colibri_gemm_tiles int4_dot_tiles = {COLIBRI_INT4, 4, 1, LIST_4(pass_int4_dot)};
#else
#define int8_dot_tiles int8_plain_tiles
#define int4_dot_tiles int4_plain_tiles
#endif

/* ---------------------------------------------------------------- the table's functions */

static inline int has_dot(void) { return (colibri_cpu_features() & COLIBRI_CPU_NEON_DOTPROD) != 0; }

#define RUN(tiles) colibri_gemm_run(tiles, w, panels, groups, rows, n_rows, out, ld, next)

void colibri_gemm_f32_neon(COLIBRI_GEMM_ARGS) { RUN(&f32_tiles); }
void colibri_gemm_bf16_neon(COLIBRI_GEMM_ARGS) { RUN(&bf16_tiles); }
void colibri_gemm_int8_neon(COLIBRI_GEMM_ARGS) { RUN(has_dot() ? &int8_dot_tiles : &int8_plain_tiles); }
void colibri_gemm_int4_neon(COLIBRI_GEMM_ARGS) { RUN(has_dot() ? &int4_dot_tiles : &int4_plain_tiles); }

void colibri_gemm_int8_neon_plain(COLIBRI_GEMM_ARGS) { RUN(&int8_plain_tiles); }
void colibri_gemm_int4_neon_plain(COLIBRI_GEMM_ARGS) { RUN(&int4_plain_tiles); }
#endif
