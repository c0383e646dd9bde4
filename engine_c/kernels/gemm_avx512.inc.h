/* gemm_avx512.inc.h - the integer tiles of gemm_avx512.c, included once with VNNI and once without: the includer defines NAME(x); DOT_U4 and
 * DOT_S8, which add to 16 int32 lanes the products of 4 weights (0..15 unsigned, or signed bytes as INT8_WEIGHTS leaves them) and 4
 * activations; and INT8_START(r, at), the sum an int8 group begins with. q, e, o: byte offsets of a group's q, scale and offset in a row. */

static ALWAYS void NAME(tile_int4)(const int R, TILE_ARGS) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const char *end = w + (ptrdiff_t)groups * 576;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups, o = e + 4 * (ptrdiff_t)groups;
  __m512 acc[MAX_R][2];
  CLEAR(acc);
  for (; w < end; w += 576, q += 32, e += 4, o += 4) {
    PREFETCH();
    __m512i sum[MAX_R][2], v[2], u[2];
    UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = BROADCAST(r, o);
    UNROLL for (int s = 0; s < 8; s++) {
      UNROLL for (int h = 0; h < 2; h++) {
        if (s % 2 == 0) v[h] = _mm512_load_si512(w + 64 + s * 64 + h * 64);
        u[h] = _mm512_and_si512(s % 2 == 0 ? v[h] : _mm512_srli_epi16(v[h], 4), nibble);
      }
      UNROLL for (int r = 0; r < R; r++) {
        __m512i x = BROADCAST(r, q + 4 * s);
        UNROLL for (int h = 0; h < 2; h++) sum[r][h] = DOT_U4(sum[r][h], u[h], x);
      }
    }
    UNROLL for (int h = 0; h < 2; h++) {
      __m512i scale = _mm512_castps_si512(weight_scales(w, h));
      UNROLL for (int r = 0; r < R; r++) {
        __m512 scaled = _mm512_castsi512_ps(_mm512_add_epi32(scale, BROADCAST(r, e)));
        acc[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][h]), scaled, acc[r][h]);
      }
    }
  }
  STORE(acc);
}

static ALWAYS void NAME(tile_int8)(const int R, TILE_ARGS) {
  const char *end = w + (ptrdiff_t)groups * 1088;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups, o = e + 4 * (ptrdiff_t)groups;
  __m512 acc[MAX_R][2];
  CLEAR(acc);
  for (; w < end; w += 1088, q += 32, e += 4, o += 4) {
    PREFETCH();
    __m512i sum[MAX_R][2], v[2];
    UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = INT8_START(r, o);
    UNROLL for (int s = 0; s < 8; s++) {
      UNROLL for (int h = 0; h < 2; h++) v[h] = INT8_WEIGHTS(_mm512_load_si512(w + 64 + s * 128 + h * 64));
      UNROLL for (int r = 0; r < R; r++) {
        __m512i x = BROADCAST(r, q + 4 * s);
        UNROLL for (int h = 0; h < 2; h++) sum[r][h] = DOT_S8(sum[r][h], v[h], x);
      }
    }
    UNROLL for (int h = 0; h < 2; h++) {
      __m512 scale = weight_scales(w, h);
      UNROLL for (int r = 0; r < R; r++) {
        __m512 scaled = _mm512_mul_ps(scale, _mm512_castsi512_ps(BROADCAST(r, e)));
        acc[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][h]), scaled, acc[r][h]);
      }
    }
  }
  STORE(acc);
}
