/* gemm_avx512.inc.h - the integer tiles of gemm_avx512.c, included once with VNNI and once without: the includer defines NAME(x), and DOT_U4
 * and DOT_S8, which add to 16 int32 lanes the products of 4 weights (0..15 unsigned, or signed bytes as INT8_WEIGHTS leaves them) and 4
 * activations. */

/* Adds one block's products to acc[0..R-1][h .. h + span - 1]; q, e, o: byte offsets of the group's q, scale and offset in a row. */
static ALWAYS void NAME(block_int4)(const int R, const int h, const int span, const char *w, const void *const *rows, ptrdiff_t q, ptrdiff_t e,
                                    ptrdiff_t o, __m512 acc[MAX_R][2]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i sum[MAX_R][2], v[2], u[2];
  UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = BROADCAST(r, o);
  UNROLL for (int s = 0; s < 8; s++) {
    HALVES(i, span) {
      if (s % 2 == 0) v[i] = _mm512_load_si512(w + 64 + s * 64 + (h + i) * 64);
      u[i] = _mm512_and_si512(s % 2 == 0 ? v[i] : _mm512_srli_epi16(v[i], 4), nibble);
    }
    UNROLL for (int r = 0; r < R; r++) {
      __m512i x = BROADCAST(r, q + 4 * s);
      HALVES(i, span) sum[r][i] = DOT_U4(sum[r][i], u[i], x);
    }
  }
  HALVES(i, span) {
    __m512i scale = _mm512_castps_si512(weight_scales(w, h + i));
    UNROLL for (int r = 0; r < R; r++) {
      __m512 scaled = _mm512_castsi512_ps(_mm512_add_epi32(scale, BROADCAST(r, e)));
      acc[r][h + i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][i]), scaled, acc[r][h + i]);
    }
  }
}

static ALWAYS void NAME(block_int8)(const int R, const int h, const int span, const char *w, const void *const *rows, ptrdiff_t q, ptrdiff_t e,
                                    ptrdiff_t o, __m512 acc[MAX_R][2]) {
  __m512i sum[MAX_R][2], v[2];
  UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = INT8_START(r, o);
  UNROLL for (int s = 0; s < 8; s++) {
    HALVES(i, span) v[i] = INT8_WEIGHTS(_mm512_load_si512(w + 64 + s * 128 + (h + i) * 64));
    UNROLL for (int r = 0; r < R; r++) {
      __m512i x = BROADCAST(r, q + 4 * s);
      HALVES(i, span) sum[r][i] = DOT_S8(sum[r][i], v[i], x);
    }
  }
  HALVES(i, span) {
    __m512 scale = weight_scales(w, h + i);
    UNROLL for (int r = 0; r < R; r++) {
      __m512 scaled = _mm512_mul_ps(scale, _mm512_castsi512_ps(BROADCAST(r, e)));
      acc[r][h + i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][i]), scaled, acc[r][h + i]);
    }
  }
}

/* Up to 6 rows the int32 sums of both halves fit into registers and share each broadcast; more rows take one half after the other. */
#define TILE_BODY(block, block_bytes)                                                 \
  const char *w_end = w + (ptrdiff_t)groups * block_bytes;                            \
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups, o = e + 4 * (ptrdiff_t)groups;         \
  __m512 acc[MAX_R][2];                                                               \
  UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();     \
  for (; w < w_end; w += block_bytes, q += 32, e += 4, o += 4) {                      \
    PREFETCH();                                                                       \
    if (R <= 6) {                                                                     \
      block(R, 0, 2, w, rows, q, e, o, acc);                                          \
    } else {                                                                          \
      block(R, 0, 1, w, rows, q, e, o, acc);                                          \
      OPAQUE(q);                                                                      \
      block(R, 1, 1, w, rows, q, e, o, acc);                                          \
    }                                                                                 \
  }                                                                                   \
  STORE();

static ALWAYS void NAME(tile_int4)(const int R, TILE_ARGS) { TILE_BODY(NAME(block_int4), 576) }
static ALWAYS void NAME(tile_int8)(const int R, TILE_ARGS) { TILE_BODY(NAME(block_int8), 1088) }

#undef TILE_BODY
