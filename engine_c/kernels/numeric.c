/* numeric.c - number formats and the exponential all kernels share. */
#include <math.h>
#include <string.h>

#include "kernels.h"

static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

uint16_t colibri_f32_to_bf16(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40); /* a quiet NaN stays one */
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

uint16_t colibri_f32_to_f16(float x) {
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
  if (a < 0x38800000u) {
    /* Below 2^-14 the result is a multiple of 2^-24: adding 0.5 puts that unit in the last place of the float, and the adder rounds to even. */
    return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - bits_of(0.5f)));
  }
  a += 0x0fffu + (a >> 13 & 1);
  return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

float colibri_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, a = h & 0x7fffu;
  if (a >= 0x7c00u) return float_of(sign | 0x7f800000u | (a & 0x3ffu) << 13);
  if (a < 0x0400u) return float_of(sign | bits_of((float)a * 0x1p-24f));
  return float_of(sign | ((a << 13) + 0x38000000u));
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. The polynomial is the degree-6 minimax of exp with 1 + r fixed (relative error
 * 3.1e-9, so rounding dominates; the kernel tests bound the whole at 1 ulp). x is clamped to where the result is 0 and infinity already;
 * 2^n is applied in two halves, so subnormal results round once and n = 128 does not overflow early. Written with explicit comparisons and
 * the 1.5 * 2^23 rounding trick so that a NaN comes through and every SIMD set repeats it bit by bit. */
float colibri_expf(float x) {
  x = 89.0f < x ? 89.0f : x;
  x = -104.0f > x ? -104.0f : x;
  float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p23f);
  float n = shifted - 0x1.8p23f;
  float r = fmaf(n, -0x1.62e4p-1f, x);      /* exact: the constant has 15 bits */
  r = fmaf(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6a23ccp-10f;
  p = fmaf(p, r, 0x1.123a20p-7f);
  p = fmaf(p, r, 0x1.5558f2p-5f);
  p = fmaf(p, r, 0x1.555492p-3f);
  p = fmaf(p, r, 0x1.fffffcp-2f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  int32_t i = (int32_t)(bits_of(shifted) - bits_of(0x1.8p23f));
  int32_t half = i >> 1;
  p *= float_of((uint32_t)(half + 127) << 23);
  return p * float_of((uint32_t)(i - half + 127) << 23);
}
