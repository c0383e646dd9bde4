/* kernels_avx512.c - the table for AVX-512 (F, BW, VL, DQ). The functions are the templates of kernels_v16.inc.h, route_v16.inc.h and attend_v16.inc.h and the products of gemm_avx512.c. */
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "target.h"

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX512)
#include "v16_avx512.h"
#include "kernels_v16.inc.h"
#include "route_v16.inc.h"
#include "attend_v16.inc.h"
#include "table_v16.inc.h"

static const colibri_kernels table = COLIBRI_TABLE_V16(avx512);

const colibri_kernels *colibri_kernels_avx512(void) { return &table; }
COLIBRI_TARGET_END

#else
const colibri_kernels *colibri_kernels_avx512(void) { return NULL; }
#endif
