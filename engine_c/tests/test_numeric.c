/* test_numeric.c - fp16, bf16 and the exponential against definitions in double. */
#include <float.h>
#include <math.h>

#include "check.h"
#include "kernels.h"

/* fp16 by its definition. */
static double half_value(uint16_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  double magnitude = e == 0 ? ldexp(m, -24) : e == 31 ? (m ? (double)NAN : (double)INFINITY) : ldexp(1024 + m, e - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

static float of_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

static void test_half_exact(void) {
  for (unsigned h = 0; h < 65536; h++) {
    double want = half_value((uint16_t)h);
    float got = colibri_f16_to_f32((uint16_t)h);
    if (isnan(want)) {
      CHECK(isnan(got) && isnan(colibri_f16_to_f32(colibri_f32_to_f16(got))), "fp16 NaN %04x", h);
      continue;
    }
    CHECK((double)got == want && !signbit(got) == !signbit(want), "fp16 %04x reads as %g, not %g", h, (double)got, want);
    CHECK(colibri_f32_to_f16(got) == h, "fp16 %04x comes back as %04x", h, colibri_f32_to_f16(got));
  }
}

/* Halfway between two neighbours goes to the even one; a float to either side of it to the nearer. */
static void test_half_rounding(void) {
  for (unsigned h = 0; h < 0x7c00; h++) {
    double above = h == 0x7bff ? 65536 : half_value((uint16_t)(h + 1));
    float middle = (float)((half_value((uint16_t)h) + above) / 2);
    unsigned even = h & 1 ? h + 1 : h;
    CHECK(colibri_f32_to_f16(middle) == even, "%a rounds to %04x, not %04x", (double)middle, colibri_f32_to_f16(middle), even);
    CHECK(colibri_f32_to_f16(-middle) == (even | 0x8000), "%a", (double)-middle);
    CHECK(colibri_f32_to_f16(nextafterf(middle, 0)) == h, "just below %a", (double)middle);
    CHECK(colibri_f32_to_f16(nextafterf(middle, FLT_MAX)) == h + 1, "just above %a", (double)middle);
  }
  CHECK(colibri_f32_to_f16(FLT_MAX) == 0x7c00 && colibri_f32_to_f16(-INFINITY) == 0xfc00, "overflow");
}

static void test_bfloat(void) {
  for (unsigned h = 0; h < 65536; h++) {
    float x = colibri_bf16_to_f32((uint16_t)h);
    if (isnan(x)) {
      CHECK(isnan(colibri_bf16_to_f32(colibri_f32_to_bf16(x))), "bf16 NaN %04x", h);
      continue;
    }
    CHECK(colibri_f32_to_bf16(x) == h, "bf16 %04x comes back as %04x", h, colibri_f32_to_bf16(x));
    if (isinf(x)) continue;
    uint32_t u = h << 16, even = h & 1 ? h + 1 : h;
    CHECK(colibri_f32_to_bf16(of_bits(u + 0x8000)) == even, "half a unit above %04x", h);
    CHECK(colibri_f32_to_bf16(of_bits(u + 0x7fff)) == h && colibri_f32_to_bf16(of_bits(u + 0x8001)) == h + 1, "around half a unit above %04x", h);
  }
  CHECK(isnan(colibri_bf16_to_f32(colibri_f32_to_bf16(of_bits(0x7f800001)))), "a signalling NaN stays a NaN");
}

/* Within 1 unit in the last place of the result (measured: 0.86), half a unit of the smallest subnormal where it is one. */
static void test_exponential(void) {
  double worst = 0;
  for (uint64_t u = 0; u < UINT64_C(1) << 32; u += 1237) {
    float x = of_bits((uint32_t)u), got = colibri_expf(x);
    if (isnan(x)) {
      CHECK(isnan(got), "exp(NaN) is %g", (double)got);
      continue;
    }
    double want = exp((double)x);
    if (want > (double)FLT_MAX || want < 0x1p-151) {
      CHECK(got == (want > 1 ? INFINITY : 0), "exp(%g) is %g", (double)x, (double)got);
      continue;
    }
    double unit = want < (double)FLT_MIN ? 0x1p-149 : (double)(nextafterf((float)want, INFINITY) - (float)want);
    double error = isinf(got) ? fabs(0x1p128 - want) / unit : fabs((double)got - want) / unit;
    worst = error > worst ? error : worst;
    CHECK(error <= 1, "exp(%a) is %a, %g units off", (double)x, (double)got, error);
  }
  CHECK(worst > 0.4, "an error of %g units is too good to have been measured", worst);
  CHECK(colibri_expf(0) == 1 && colibri_expf(-0.0f) == 1, "exp(0)");
  CHECK(colibri_expf(-INFINITY) == 0 && !signbit(colibri_expf(-INFINITY)), "exp(-inf)");
}

int main(void) {
  test_half_exact();
  test_half_rounding();
  test_bfloat();
  test_exponential();
  return check_result("test_numeric");
}
