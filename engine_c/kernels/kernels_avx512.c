/* kernels_avx512.c - the table for AVX-512 (F, BW, VL, DQ). The functions are the templates of kernels_v16.inc.h and attend_v16.inc.h and the products of gemm_avx512.c. */
#include "gemm.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#include "v16_avx512.h"
#include "kernels_v16.inc.h"
#include "attend_v16.inc.h"

static const colibri_kernels table = {
  .name = "avx512",
  .gemm = {colibri_gemm_f32_avx512, colibri_gemm_bf16_avx512, colibri_gemm_int8_avx512, colibri_gemm_int4_avx512},
  .prepare = {prepare_f32, prepare_bf16, prepare_int8, prepare_int4},
  .rmsnorm = rmsnorm,
  .gate = gate,
  .silu_mul = silu_mul,
  .axpy = axpy,
  .add = add,
  .rope = rope,
  .store_kv = store_kv,
  .attend = attend,
  .top2_softmax = top2_softmax,
  .argmax = argmax,
  .sum_exp = sum_exp,
};

const colibri_kernels *colibri_kernels_avx512(void) { return &table; }
#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
const colibri_kernels *colibri_kernels_avx512(void) { return NULL; }
#endif
