/* gemm_neon.inc.h - the integer passes of gemm_neon.c, included once with the dot product and once without: the includer defines NAME(x) and
 *   ACTIVATIONS()               what a group begins with: 32 activations of each row, at q, if the products want them in registers
 *   DOT_S8(sum, w, r, i)        sum + the products of 16 signed weights (4 outputs x 4 columns) and activations 4 i .. 4 i + 3 of row r
 *   DOT_U4(sum, w0, w1, r, i)   the same for weights 0..15, w0 with activations 4 i .. and w1 with the next four
 * i is a constant, so steps are written out. q, e, o: byte offsets of a group's q, scale and offset in a row. */

#define INT8_STEP(s) \
  UNROLL for (int c = 0; c < C; c++) { \
    int8x16_t v = vld1q_s8((const int8_t *)w + 64 + (s) * 128 + (first + c) * 16); \
    UNROLL for (int r = 0; r < R; r++) sum[r][c] = DOT_S8(sum[r][c], v, r, s); \
  }

static ALWAYS void NAME(pass_int8)(const int R, const int C, const int first, TILE_ARGS) {
  const char *end = w + (ptrdiff_t)groups * 1088;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups;
  float32x4_t acc[MAX_R][8];
  CLEAR(acc);
  for (; w < end; w += 1088, q += 32, e += 4) {
    PREFETCH();
    int32x4_t sum[MAX_R][8];
    ACTIVATIONS();
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = vdupq_n_s32(0);
    INT8_STEP(0) INT8_STEP(1) INT8_STEP(2) INT8_STEP(3) INT8_STEP(4) INT8_STEP(5) INT8_STEP(6) INT8_STEP(7)
    UNROLL for (int c = 0; c < C; c++) {
      float32x4_t scale = WEIGHT_SCALES(first + c);
      UNROLL for (int r = 0; r < R; r++) {
        float32x4_t scaled = vmulq_f32(scale, vreinterpretq_f32_s32(BROADCAST(r, e)));
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
    UNROLL for (int r = 0; r < R; r++) sum[r][c] = DOT_U4(sum[r][c], low, high, r, 2 * (s)); \
  }

static ALWAYS void NAME(pass_int4)(const int R, const int C, const int first, TILE_ARGS) {
  const char *end = w + (ptrdiff_t)groups * 576;
  ptrdiff_t q = 0, e = 32 * (ptrdiff_t)groups, o = e + 4 * (ptrdiff_t)groups;
  float32x4_t acc[MAX_R][8];
  CLEAR(acc);
  for (; w < end; w += 576, q += 32, e += 4, o += 4) {
    PREFETCH();
    int32x4_t sum[MAX_R][8];
    ACTIVATIONS();
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = BROADCAST(r, o);
    INT4_STEP(0) INT4_STEP(1) INT4_STEP(2) INT4_STEP(3)
    UNROLL for (int c = 0; c < C; c++) {
      int32x4_t scale = vreinterpretq_s32_f32(WEIGHT_SCALES(first + c));
      UNROLL for (int r = 0; r < R; r++) {
        float32x4_t scaled = vreinterpretq_f32_s32(vaddq_s32(scale, BROADCAST(r, e)));
        acc[r][c] = vfmaq_f32(acc[r][c], vcvtq_f32_s32(sum[r][c]), scaled);
      }
    }
  }
  STORE();
}

#define TILES_4(body) PASS_8(body, 1) PASS_4(body, 2) PASS_2(body, 3) PASS_2(body, 4)
TILES_4(NAME(pass_int8))
TILES_4(NAME(pass_int4))

#undef TILES_4
#undef NAME
#undef ACTIVATIONS
#undef DOT_S8
#undef DOT_U4
#undef INT8_STEP
#undef INT4_STEP
