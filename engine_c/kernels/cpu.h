/* cpu.h - what this CPU and operating system can run (internal). */
#ifndef COLIBRI_CPU_H
#define COLIBRI_CPU_H

enum colibri_cpu_feature {
  COLIBRI_CPU_AVX2 = 1,          /* AVX2, FMA and F16C, ymm state enabled */
  COLIBRI_CPU_AVX_VNNI = 2,      /* dpbusd on ymm without AVX-512 */
  COLIBRI_CPU_AVX512 = 4,        /* F, BW, DQ and VL with COLIBRI_CPU_AVX2, zmm and mask state enabled */
  COLIBRI_CPU_AVX512_VNNI = 8,   /* dpbusd on zmm */
  COLIBRI_CPU_AVX512_BF16 = 16,  /* dpbf16ps */
  COLIBRI_CPU_NEON = 32,         /* Advanced SIMD of AArch64 */
  COLIBRI_CPU_NEON_DOTPROD = 64, /* its dot product of bytes */
};

/* Features as a set of the bits above, detected once. Any thread. */
unsigned colibri_cpu_features(void);

#endif
