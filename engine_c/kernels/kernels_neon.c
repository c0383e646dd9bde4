/* kernels_neon.c - the place of the NEON table. No NEON kernels exist yet: on Arm the generic ones run. */
#include "kernels.h"

const colibri_kernels *colibri_kernels_neon(void) { return NULL; }
