/* gemm_neon.inc.h - the integer passes of gemm_neon.c, included once with the dot product and once without: the includer defines NAME(x) and
 *   DOT_S8(sum, w, x, lane)       sum + the products of 16 signed weights (4 outputs x 4 columns) and the 4 activations of lane `lane` of x
 *   DOT_U4(sum, w0, w1, x, lane)  the same for weights 0..15, w0 with lane `lane` and w1 with the next
 * Lanes are constants, so steps are written out. q, e, o: byte offsets of a group's q, scale and offset in a row. */

#define LOAD_ACTIVATIONS() \
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < 2; i++) x[r][i] = vld1q_s8((const int8_t *)rows[r] + q + 16 * i)

#define INT8_STEP(s) \
  UNROLL for (int c = 0; c < C; c++) { \
    int8x16_t v = vld1q_s8((const int8_t *)w + 64 + (s) * 128 + (first + c) * 16); \
    UNROLL for (int r = 0; r < R; r++) sum[r][c] = DOT_S8(sum[r][c], v, x[r][(s) / 4], (s) % 4); \
  }

static ALWAYS void NAME(pass_int8)(const int R, const int C, const int first, TILE_ARGS) {
  const char *end = w + (ptrdiff_t)groups * 1088;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups;
  float32x4_t acc[MAX_R][8];
  CLEAR(acc);
  for (; w < end; w += 1088, q += 32, e += 4) {
    PREFETCH();
    int32x4_t sum[MAX_R][8];
    int8x16_t x[MAX_R][2];
    LOAD_ACTIVATIONS();
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = vdupq_n_s32(0);
    INT8_STEP(0) INT8_STEP(1) INT8_STEP(2) INT8_STEP(3) INT8_STEP(4) INT8_STEP(5) INT8_STEP(6) INT8_STEP(7)
    UNROLL for (int c = 0; c < C; c++) {
      float32x4_t scale = weight_scales(w, first + c);
      UNROLL for (int r = 0; r < R; r++) {
        float32x4_t scaled = vmulq_f32(scale, vreinterpretq_f32_s32(broadcast(rows[r], e)));
        acc[r][c] = vfmaq_f32(acc[r][c], vcvtq_f32_s32(sum[r][c]), scaled);
      }
    }
  }
  STORE();
}

#define INT4_STEP(s) \
  UNROLL for (int c = 0; c < C; c++) { \
    uint8x16_t v = vld1q_u8((const uint8_t *)w + 64 + (s) * 128 + (first + c) * 16); \
    int8x16_t low = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))), high = vreinterpretq_s8_u8(vshrq_n_u8(v, 4)); \
    UNROLL for (int r = 0; r < R; r++) sum[r][c] = DOT_U4(sum[r][c], low, high, x[r][(s) / 2], (s) % 2 * 2); \
  }

static ALWAYS void NAME(pass_int4)(const int R, const int C, const int first, TILE_ARGS) {
  const char *end = w + (ptrdiff_t)groups * 576;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups, o = e + 4 * (ptrdiff_t)groups;
  float32x4_t acc[MAX_R][8];
  CLEAR(acc);
  for (; w < end; w += 576, q += 32, e += 4, o += 4) {
    PREFETCH();
    int32x4_t sum[MAX_R][8];
    int8x16_t x[MAX_R][2];
    LOAD_ACTIVATIONS();
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = broadcast(rows[r], o);
    INT4_STEP(0) INT4_STEP(1) INT4_STEP(2) INT4_STEP(3)
    UNROLL for (int c = 0; c < C; c++) {
      int32x4_t scale = vreinterpretq_s32_f32(weight_scales(w, first + c));
      UNROLL for (int r = 0; r < R; r++) {
        float32x4_t scaled = vreinterpretq_f32_s32(vaddq_s32(scale, broadcast(rows[r], e)));
        acc[r][c] = vfmaq_f32(acc[r][c], vcvtq_f32_s32(sum[r][c]), scaled);
      }
    }
  }
  STORE();
}

TILES_4(NAME(pass_int8))
TILES_4(NAME(pass_int4))

#undef LOAD_ACTIVATIONS
#undef INT8_STEP
#undef INT4_STEP
