/* gemm.h - the SIMD matrix products and the driver they share (internal). */
#ifndef COLIBRI_GEMM_H
#define COLIBRI_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

#define COLIBRI_GEMM_ARGS \
  const void *w, int panels, int groups, const void *const *rows, int n_rows, float *out, ptrdiff_t ld, const void *next

#if defined(__x86_64__)
void colibri_gemm_f32_avx512(COLIBRI_GEMM_ARGS);
void colibri_gemm_bf16_avx512(COLIBRI_GEMM_ARGS);
void colibri_gemm_int8_avx512(COLIBRI_GEMM_ARGS);
void colibri_gemm_int4_avx512(COLIBRI_GEMM_ARGS);
void colibri_gemm_f32_avx2(COLIBRI_GEMM_ARGS);
void colibri_gemm_bf16_avx2(COLIBRI_GEMM_ARGS);
void colibri_gemm_int8_avx2(COLIBRI_GEMM_ARGS);
void colibri_gemm_int4_avx2(COLIBRI_GEMM_ARGS);

/* What the bf16, int8 and int4 products for AVX-512 fall back to on a CPU without AVX512_BF16 or AVX512_VNNI; named here so that tests run them everywhere. */
void colibri_gemm_bf16_avx512_plain(COLIBRI_GEMM_ARGS);
void colibri_gemm_int8_avx512_plain(COLIBRI_GEMM_ARGS);
void colibri_gemm_int4_avx512_plain(COLIBRI_GEMM_ARGS);
#elif defined(__aarch64__)
void colibri_gemm_f32_neon(COLIBRI_GEMM_ARGS);
void colibri_gemm_bf16_neon(COLIBRI_GEMM_ARGS);
void colibri_gemm_int8_neon(COLIBRI_GEMM_ARGS);
void colibri_gemm_int4_neon(COLIBRI_GEMM_ARGS);

/* What the integer products fall back to on a CPU without the dot product. */
void colibri_gemm_int8_neon_plain(COLIBRI_GEMM_ARGS);
void colibri_gemm_int4_neon_plain(COLIBRI_GEMM_ARGS);
#endif

/* A tile multiplies one panel with a fixed number of rows: out[r * ld + 0..31]. While it runs it prefetches `ahead_step` bytes a group from
 * `ahead` on (a hint, the address may lie outside the matrix). */
typedef void (*colibri_gemm_tile)(const char *w, int groups, const void *const *rows, float *out, ptrdiff_t ld, const char *ahead,
                                  ptrdiff_t ahead_step);

typedef struct colibri_gemm_tiles {
  int format, max_rows;      /* the tile of r rows is tile[r], 1 <= r <= max_rows */
  int streams;               /* with at most so many rows the weights' stream from memory is the limit by far (measured) */
  colibri_gemm_tile tile[9];
} colibri_gemm_tiles;

/* Rows are walked in blocks whose activations stay in the second-level cache beside a panel. */
#define COLIBRI_GEMM_ROW_BLOCK (400 * 1024)

/* Outputs are prefetched from this many tiles a panel on: with fewer the weights' stream from memory is the limit, and this gets in its way. */
#define COLIBRI_GEMM_OUT_TILES 4

static inline void colibri_gemm_prefetch_out(const float *out, ptrdiff_t ld, int n) {
  for (int r = 0; r < n; r++) {
    __builtin_prefetch(out + r * ld, 1);
    __builtin_prefetch(out + r * ld + 16, 1);
  }
}

/* One panel against `n` rows, cut into the fewest tiles, as equal as possible. Few rows are left to the hardware's prefetcher, which software
 * prefetching only slows; otherwise the tiles together fetch `ahead`, the panel that follows (NULL: none), so that memory is never idle. */
static inline void colibri_gemm_panel(const colibri_gemm_tiles *t, const char *w, int groups, const void *const *rows, int n, float *out, ptrdiff_t ld,
                                      const char *ahead) {
  ptrdiff_t block = (ptrdiff_t)colibri_block_bytes(t->format);
  int tiles = (n + t->max_rows - 1) / t->max_rows;
  ptrdiff_t step = (block / tiles + 63) / 64 * 64;
  if (!ahead || n <= t->streams) ahead = w, step = 0;
  for (int r = 0; tiles > 0; tiles--, ahead += step * groups) {
    int m = (n - r + tiles - 1) / tiles;
    if (n > t->max_rows * (COLIBRI_GEMM_OUT_TILES - 1)) colibri_gemm_prefetch_out(out + r * ld, ld, m);
    t->tile[m](w, groups, rows + r, out + r * ld, ld, ahead, step);
    r += m;
  }
}

static inline void colibri_gemm_run(const colibri_gemm_tiles *t, COLIBRI_GEMM_ARGS) {
  int64_t row_bytes = colibri_row_bytes(t->format, groups);
  int most = row_bytes > 0 ? (int)(COLIBRI_GEMM_ROW_BLOCK / row_bytes) / t->max_rows * t->max_rows : n_rows;
  if (most < t->max_rows) most = t->max_rows;
  ptrdiff_t panel_bytes = (ptrdiff_t)colibri_block_bytes(t->format) * groups;
  for (int r = 0; r < n_rows; r += most) {
    int n = n_rows - r < most ? n_rows - r : most;
    const char *after = r + n < n_rows ? w : next; /* what is read after these rows' last panel */
    for (int p = 0; p < panels; p++) {
      const char *panel = (const char *)w + panel_bytes * p;
      colibri_gemm_panel(t, panel, groups, rows + r, n, out + r * ld + COLIBRI_PANEL * p, ld, p + 1 < panels ? panel + panel_bytes : after);
    }
  }
}

#endif
