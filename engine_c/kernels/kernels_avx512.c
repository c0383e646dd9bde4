/* kernels_avx512.c - the avx512 table. */
#include "kernels.h"

const colibri_kernels *colibri_kernels_avx512(void) { return NULL; }
