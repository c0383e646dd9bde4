/* kernels_neon.c - the table for Advanced SIMD of AArch64. The functions are the templates of kernels_v16.inc.h and attend_v16.inc.h and the products of gemm_neon.c. */
#include "gemm.h"

#if defined(__aarch64__)
#include "v16_neon.h"
#include "kernels_v16.inc.h"
#include "attend_v16.inc.h"

static const colibri_kernels table = {
  .name = "neon",
  .gemm = {colibri_gemm_f32_neon, colibri_gemm_bf16_neon, colibri_gemm_int8_neon, colibri_gemm_int4_neon},
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
  .top_k = top_k,
  .argmax = argmax,
  .sum_exp = sum_exp,
  .exp = exp_all,
};

const colibri_kernels *colibri_kernels_neon(void) { return &table; }

#else
const colibri_kernels *colibri_kernels_neon(void) { return NULL; }
#endif
