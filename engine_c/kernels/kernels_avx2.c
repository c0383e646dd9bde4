/* kernels_avx2.c - the avx2 table. */
#include "kernels.h"

const colibri_kernels *colibri_kernels_avx2(void) { return NULL; }
