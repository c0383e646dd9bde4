/* guard.h - the allocation guard: in a build with -DCOLIBRI_GUARD, a thread that takes or gives back memory within a step or a task aborts with the name of
 * the call (internal). Every C test program is such a build; without the define nothing is left of it. */
#ifndef COLIBRI_GUARD_H
#define COLIBRI_GUARD_H

#ifdef COLIBRI_GUARD
/* Between the two, which nest, this thread must not allocate. */
void colibri_guard_enter(void);
void colibri_guard_leave(void);
#else
static inline void colibri_guard_enter(void) {}
static inline void colibri_guard_leave(void) {}
#endif

#endif
