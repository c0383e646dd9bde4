/* kernels_avx2.c - the table for AVX2, FMA and F16C. The functions are the templates of kernels_v16.inc.h, route_v16.inc.h and attend_v16.inc.h and the products of gemm_avx2.c. */
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "target.h"

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX2)
#include "v16_avx2.h"
#include "kernels_v16.inc.h"
#include "route_v16.inc.h"
#include "attend_v16.inc.h"
#include "table_v16.inc.h"

static const colibri_kernels table = COLIBRI_TABLE_V16(avx2);

const colibri_kernels *colibri_kernels_avx2(void) { return &table; }
COLIBRI_TARGET_END

#else
const colibri_kernels *colibri_kernels_avx2(void) { return NULL; }
#endif
