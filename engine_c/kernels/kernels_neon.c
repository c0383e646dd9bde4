/* kernels_neon.c - the table for Advanced SIMD of AArch64. The functions are the templates of kernels_v16.inc.h, route_v16.inc.h and attend_v16.inc.h and the products of gemm_neon.c. */
#include "gemm.h"

#if defined(__aarch64__)
#include "v16_neon.h"
#include "kernels_v16.inc.h"
#include "route_v16.inc.h"
#include "attend_v16.inc.h"
#include "table_v16.inc.h"

static const colibri_kernels table = COLIBRI_TABLE_V16(neon);

const colibri_kernels *colibri_kernels_neon(void) { return &table; }

#else
const colibri_kernels *colibri_kernels_neon(void) { return NULL; }
#endif
