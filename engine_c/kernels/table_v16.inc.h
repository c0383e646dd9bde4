/* table_v16.inc.h - the table of an ISA whose functions are the templates of kernels_v16.inc.h, route_v16.inc.h and attend_v16.inc.h and the products of gemm_<isa>.c. Include it after them. */
#define COLIBRI_TABLE_V16(isa)                                                                                                          \
  {                                                                                                                                     \
    .name = #isa,                                                                                                                       \
    .gemm = {colibri_gemm_f32_##isa, colibri_gemm_bf16_##isa, colibri_gemm_int8_##isa, colibri_gemm_int4_##isa},                        \
    .prepare = {prepare_f32, prepare_bf16, prepare_int8, prepare_int4}, .rmsnorm = rmsnorm, .gate = gate, .silu_mul = silu_mul,         \
    .axpy = axpy, .add = add, .rope = rope, .store_kv = store_kv, .attend = attend, .top2_softmax = top2_softmax, .top_k = top_k,       \
    .scores = scores, .group_best = group_best, .argmax = argmax, .sum_exp = sum_exp, .exp = exp_all,                                    \
  }
