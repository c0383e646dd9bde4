/* expf.h - the steps of colibri_expf, to be compiled into functions of any instruction set (internal). */
#ifndef COLIBRI_EXPF_H
#define COLIBRI_EXPF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. The polynomial is the degree-6 minimax of exp with 1 + r fixed (relative error
 * 3.1e-9, so rounding dominates; the kernel tests bound the whole at 1 ulp). x is clamped to where the result is 0 and infinity already;
 * 2^n is applied in two halves, so subnormal results round once and n = 128 does not overflow early. Written with explicit comparisons and
 * the 1.5 * 2^23 rounding trick so that a NaN comes through and every SIMD set repeats it bit by bit. */
static inline __attribute__((always_inline)) float colibri_expf_steps(float x) {
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
  uint32_t bits, scales[2];
  float factors[2];
  memcpy(&bits, &shifted, sizeof bits);
  int32_t i = (int32_t)(bits - 0x4b400000u), half = i >> 1;
  scales[0] = (uint32_t)(half + 127) << 23;
  scales[1] = (uint32_t)(i - half + 127) << 23;
  memcpy(factors, scales, sizeof factors);
  return p * factors[0] * factors[1];
}

/* log(1 + u) of u in [0, 1]: u times the degree-9 minimax of log1p(u) / u (relative error 4.8e-9, so rounding dominates). Its coefficients, highest first. */
#define COLIBRI_LOG1P_TERMS 10
static const float colibri_log1p_terms[COLIBRI_LOG1P_TERMS] = {
  -0x1.a9334ap-9f, 0x1.453efep-6f, -0x1.d29cbap-5f, 0x1.b25358p-4f, -0x1.397560p-3f,
  0x1.92f696p-3f, -0x1.ff0f88p-3f, 0x1.554c80p-2f, -0x1.ffffbep-2f, 1.0f,
};

#endif
