/* cpu.c - detects instruction sets and selects the kernel table. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "kernels.h"
#include "model.h"

/* ---------------------------------------------------------------- detection */

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t xcr0(void) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

#define BIT(word, i) ((word) >> (i) & 1)

static unsigned detect(void) {
  uint32_t a, b, c, d, features = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  if (!BIT(c, 27)) return 0; /* the system has not enabled XSAVE */
  int fma_f16c = BIT(c, 12) && BIT(c, 28) && BIT(c, 29);
  uint64_t state = xcr0();
  int ymm = (state & 0x06) == 0x06, zmm = (state & 0xe6) == 0xe6;
  if (!ymm || !fma_f16c || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !BIT(b, 5)) return 0;
  uint32_t subleaves = a, b7 = b, c7 = c;
  features |= COLIBRI_CPU_AVX2;
  a = 0;
  if (subleaves >= 1) __get_cpuid_count(7, 1, &a, &b, &c, &d);
  if (BIT(a, 4)) features |= COLIBRI_CPU_AVX_VNNI;
  if (!zmm || !BIT(b7, 16) || !BIT(b7, 17) || !BIT(b7, 30) || !BIT(b7, 31)) return features;
  features |= COLIBRI_CPU_AVX512;
  if (BIT(c7, 11)) features |= COLIBRI_CPU_AVX512_VNNI;
  if (BIT(a, 5)) features |= COLIBRI_CPU_AVX512_BF16;
  return features;
}

#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

static unsigned detect(void) {
  unsigned long caps = getauxval(AT_HWCAP);
  if (!(caps & HWCAP_ASIMD)) return 0;
  return COLIBRI_CPU_NEON | (caps & HWCAP_ASIMDDP ? COLIBRI_CPU_NEON_DOTPROD : 0);
}

#else
static unsigned detect(void) { return 0; }
#endif

unsigned colibri_cpu_features(void) {
  static atomic_uint cached; /* the set with the top bit as "detected"; racing threads store the same value */
  unsigned features = atomic_load_explicit(&cached, memory_order_relaxed);
  if (!features) {
    features = detect() | 0x80000000u;
    atomic_store_explicit(&cached, features, memory_order_relaxed);
  }
  return features & 0x7fffffffu;
}

/* ---------------------------------------------------------------- policy */

/* Sets best first; generic closes the list and always runs. `list` is what can run where this is the best. */
static const struct isa {
  const char *name, *list;
  unsigned needs;
  const colibri_kernels *(*table)(void);
} isas[] = {
  {"avx512", "avx512,avx2,generic", COLIBRI_CPU_AVX512, colibri_kernels_avx512},
  {"avx2", "avx2,generic", COLIBRI_CPU_AVX2, colibri_kernels_avx2},
  {"neon", "neon,generic", COLIBRI_CPU_NEON, colibri_kernels_neon},
  {"generic", "generic", 0, colibri_kernels_generic},
};
enum { ISAS = sizeof isas / sizeof *isas };

static const colibri_kernels *usable(const struct isa *isa) {
  return (colibri_cpu_features() & isa->needs) == isa->needs ? isa->table() : NULL;
}

static const colibri_kernels *best(void) {
  for (int i = 0; i < ISAS - 1; i++)
    if (usable(&isas[i])) return usable(&isas[i]);
  return colibri_kernels_generic();
}

static _Atomic(const colibri_kernels *) selected;

const char *colibri_isa_available(void) {
  for (int i = 0; i < ISAS - 1; i++)
    if (usable(&isas[i])) return isas[i].list;
  return isas[ISAS - 1].list;
}

int colibri_isa_select(const char *name, colibri_error *err) {
  const char *from = "";
  if (!name) {
    name = getenv("COLIBRI_ISA");
    from = "COLIBRI_ISA: ";
  }
  if (!name || !*name) {
    atomic_store(&selected, best());
    return COLIBRI_OK;
  }
  for (int i = 0; i < ISAS; i++) {
    if (strcmp(name, isas[i].name)) continue;
    const colibri_kernels *table = usable(&isas[i]);
    if (!table)
      return colibri_fail(err, COLIBRI_EUNSUPPORTED, "%sthis CPU or build cannot run '%s'; it has %s", from, name, colibri_isa_available());
    atomic_store(&selected, table);
    return COLIBRI_OK;
  }
  return colibri_fail(err, COLIBRI_EUNSUPPORTED, "%sunknown instruction set '%.40s'; this CPU has %s", from, name, colibri_isa_available());
}

int colibri_isa_ensure(colibri_error *err) {
  return atomic_load(&selected) ? COLIBRI_OK : colibri_isa_select(NULL, err);
}

const colibri_kernels *colibri_kernels_get(void) {
  const colibri_kernels *table = atomic_load_explicit(&selected, memory_order_acquire);
  if (table) return table;
  if (colibri_isa_select(NULL, NULL) != COLIBRI_OK) atomic_store(&selected, best());
  return atomic_load(&selected);
}

const char *colibri_isa_name(void) { return colibri_kernels_get()->name; }
