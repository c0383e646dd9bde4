/* numeric.c - number formats and the exponential all kernels share. */
#include <string.h>

#include "expf.h"
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

#if defined(__x86_64__)
/* The build's base instruction set has no fma: fmaf would be a call into the C library, ten times in an exponential. Same operations, same bits. */
static __attribute__((target("fma"))) float expf_fma(float x) { return colibri_expf_steps(x); }

float colibri_expf(float x) { return __builtin_cpu_supports("fma") ? expf_fma(x) : colibri_expf_steps(x); }
#else
float colibri_expf(float x) { return colibri_expf_steps(x); }
#endif
