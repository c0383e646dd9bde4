/* target.h - compiles the functions between COLIBRI_TARGET_BEGIN(isa) and COLIBRI_TARGET_END for more than the build's base instruction set (internal).
 * `isa` is a complete list as GCC's and Clang's target attribute take it; regions do not nest. */
#ifndef COLIBRI_TARGET_H
#define COLIBRI_TARGET_H

#define COLIBRI_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define COLIBRI_TARGET_BEGIN(isa) COLIBRI_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define COLIBRI_TARGET_END _Pragma("clang attribute pop")
#else
#define COLIBRI_TARGET_BEGIN(isa) _Pragma("GCC push_options") COLIBRI_PRAGMA(GCC target(isa))
#define COLIBRI_TARGET_END _Pragma("GCC pop_options")
#endif

#define COLIBRI_TARGET_AVX2 "avx2,fma,f16c"
#define COLIBRI_TARGET_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"
/* GCC up to 12 at least has the dot product's intrinsics for this architecture and inlines them only into functions that have all of it. */
#if defined(__clang__)
#define COLIBRI_TARGET_DOTPROD "dotprod"
#else
#define COLIBRI_TARGET_DOTPROD "arch=armv8.2-a+dotprod"
#endif

#endif
