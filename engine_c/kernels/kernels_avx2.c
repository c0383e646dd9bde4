/* kernels_avx2.c - the table for AVX2, FMA and F16C. The functions are the templates of kernels_v16.inc.h and attend_v16.inc.h and the products of gemm_avx2.c. */
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "target.h"

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX2)
#include "v16_avx2.h"
#include "kernels_v16.inc.h"
#include "attend_v16.inc.h"

static const colibri_kernels table = {
  .name = "avx2",
  .gemm = {colibri_gemm_f32_avx2, colibri_gemm_bf16_avx2, colibri_gemm_int8_avx2, colibri_gemm_int4_avx2},
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

const colibri_kernels *colibri_kernels_avx2(void) { return &table; }
COLIBRI_TARGET_END

#else
const colibri_kernels *colibri_kernels_avx2(void) { return NULL; }
#endif
