/* kernels_neon.c - the neon table. */
#include "kernels.h"

const colibri_kernels *colibri_kernels_neon(void) { return NULL; }
