/* probe.c - what this machine can do at most: reading speed, arithmetic peaks, and the router by itself.
 *
 * The loops do nothing but the operation they measure, in enough independent chains to hide its latency. An empty asm statement that claims to
 * change an operand keeps the compiler from computing a product once and reusing it; it emits no instruction. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu.h"
#include "kernels.h"
#include "model.h"
#include "router.h"
#include "target.h"

#define LINE 64
#define BURST 4096 /* rounds of a peak loop between two looks at the clock: tens of microseconds */
#define CHAINS 10  /* latency 4 or 5, two a cycle; with operands they fit 16 registers */
#define FOR_CHAINS \
  _Pragma("GCC unroll 10") for (int i = 0; i < CHAINS; i++)
/* In a register, value unknown to the compiler. */
#if defined(__x86_64__)
#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+w"(x))
#endif
#define STREAMS 8
#define FOR_STREAMS _Pragma("GCC unroll 8") for (int i = 0; i < STREAMS; i++)

typedef uint64_t read_loop(const char *p, uint64_t bytes);
/* Runs BURST rounds; *sink gets something that depends on all of them. */
typedef void peak_loop(uint64_t *sink);

typedef struct probe_set {
  const char *isa;
  read_loop *read;
  struct { peak_loop *run; unsigned needs; uint64_t ops; } peaks[3][3]; /* [f32, bf16, int8], best first, those the CPU lacks are skipped */
} probe_set;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The value counts as used. */
static void keep(uint64_t value) { __asm__ volatile("" : : "r"(value)); }

/* ---------------------------------------------------------------- any CPU */

static uint64_t read_plain(const char *p, uint64_t bytes) {
  uint64_t sums[STREAMS] = {0}, sum = 0;
  for (const char *end = p + bytes; p < end; p += LINE) {
    FOR_STREAMS sums[i] += *(const uint64_t *)(p + 8 * i);
  }
  FOR_STREAMS sum += sums[i];
  return sum;
}

/* Vectors of 16 bytes are what a compiler makes of plain loops on any 64-bit CPU. */
typedef float plain_f32 __attribute__((vector_size(16)));
typedef uint16_t plain_u16 __attribute__((vector_size(16)));

static void peak_plain_f32(uint64_t *sink) {
  plain_f32 acc[CHAINS] = {{0}}, x = {0.5f, 0.5f, 0.5f, 0.5f}, y = x;
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      OPAQUE(x);
      acc[i] += x * y;
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS *sink += (uint64_t)acc[i][0];
}

static void peak_plain_int8(uint64_t *sink) {
  plain_u16 acc[CHAINS] = {{0}}, x = {3, 3, 3, 3, 3, 3, 3, 3}, y = {5, 5, 5, 5, 5, 5, 5, 5};
  OPAQUE(y);
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      OPAQUE(x);
      acc[i] += x * y;
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS *sink += (uint64_t)acc[i][0];
}

#define PEAK(run, needs, lanes) {run, needs, (uint64_t)BURST * CHAINS * 2 * (lanes)}

#if defined(__x86_64__)
#include <immintrin.h>

/* ---------------------------------------------------------------- AVX2 */

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX2)

static uint64_t read_avx2(const char *p, uint64_t bytes) {
  __m256i sums[STREAMS], sum = _mm256_setzero_si256();
  FOR_STREAMS sums[i] = sum;
  for (const char *end = p + bytes; p < end; p += 32 * STREAMS) {
    FOR_STREAMS sums[i] = _mm256_add_epi64(sums[i], _mm256_load_si256((const __m256i *)(p + 32 * i)));
  }
  FOR_STREAMS sum = _mm256_add_epi64(sum, sums[i]);
  return (uint64_t)(_mm256_extract_epi64(sum, 0) | _mm256_extract_epi64(sum, 1) | _mm256_extract_epi64(sum, 2) | _mm256_extract_epi64(sum, 3));
}

static void sink_256(const __m256i *acc, uint64_t *sink) {
  __m256i sum = _mm256_setzero_si256();
  FOR_CHAINS sum = _mm256_xor_si256(sum, acc[i]);
  *sink += (uint64_t)_mm256_extract_epi64(sum, 0);
}

static void peak_avx2_f32(uint64_t *sink) {
  __m256 acc[CHAINS], x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(0.25f);
  __m256i bits[CHAINS];
  FOR_CHAINS acc[i] = _mm256_setzero_ps();
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = _mm256_fmadd_ps(x, y, acc[i]);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS bits[i] = _mm256_castps_si256(acc[i]);
  sink_256(bits, sink);
}

/* Bytes by bytes to pairs of 16 bits, then a sum: what int8 products are made of without VNNI. */
static void peak_avx2_int8(uint64_t *sink) {
  __m256i acc[CHAINS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5);
  FOR_CHAINS acc[i] = _mm256_setzero_si256();
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      OPAQUE(x);
      acc[i] = _mm256_add_epi16(acc[i], _mm256_maddubs_epi16(x, y));
      OPAQUE(acc[i]);
    }
  }
  sink_256(acc, sink);
}

COLIBRI_TARGET_END
COLIBRI_TARGET_BEGIN("avx2,fma,f16c,avxvnni")

static void peak_avxvnni_int8(uint64_t *sink) {
  __m256i acc[CHAINS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5), sum = _mm256_setzero_si256();
  FOR_CHAINS acc[i] = sum;
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = _mm256_dpbusd_avx_epi32(acc[i], x, y);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS sum = _mm256_xor_si256(sum, acc[i]);
  *sink += (uint64_t)_mm256_extract_epi64(sum, 0);
}

COLIBRI_TARGET_END

/* ---------------------------------------------------------------- AVX-512 */

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_AVX512)

static uint64_t read_avx512(const char *p, uint64_t bytes) {
  __m512i sums[STREAMS], sum = _mm512_setzero_si512();
  FOR_STREAMS sums[i] = sum;
  for (const char *end = p + bytes; p < end; p += LINE * STREAMS) {
    FOR_STREAMS sums[i] = _mm512_add_epi64(sums[i], _mm512_load_si512(p + LINE * i));
  }
  FOR_STREAMS sum = _mm512_add_epi64(sum, sums[i]);
  return (uint64_t)_mm512_reduce_or_epi64(sum);
}

static void peak_avx512_f32(uint64_t *sink) {
  __m512 acc[CHAINS], x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(0.25f), sum = _mm512_setzero_ps();
  FOR_CHAINS acc[i] = sum;
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = _mm512_fmadd_ps(x, y, acc[i]);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS sum = _mm512_add_ps(sum, acc[i]);
  *sink += (uint64_t)_mm512_reduce_add_ps(sum);
}

static void peak_avx512_int8(uint64_t *sink) {
  __m512i acc[CHAINS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5), sum = _mm512_setzero_si512();
  FOR_CHAINS acc[i] = sum;
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      OPAQUE(x);
      acc[i] = _mm512_add_epi16(acc[i], _mm512_maddubs_epi16(x, y));
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS sum = _mm512_xor_si512(sum, acc[i]);
  *sink += (uint64_t)_mm512_reduce_or_epi64(sum);
}

COLIBRI_TARGET_END
COLIBRI_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")

static void peak_vnni_int8(uint64_t *sink) {
  __m512i acc[CHAINS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5), sum = _mm512_setzero_si512();
  FOR_CHAINS acc[i] = sum;
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = _mm512_dpbusd_epi32(acc[i], x, y);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS sum = _mm512_xor_si512(sum, acc[i]);
  *sink += (uint64_t)_mm512_reduce_or_epi64(sum);
}

static void peak_avx512_bf16(uint64_t *sink) {
  __m512 acc[CHAINS], sum = _mm512_setzero_ps();
  __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f)), y = x;
  FOR_CHAINS acc[i] = sum;
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS sum = _mm512_add_ps(sum, acc[i]);
  *sink += (uint64_t)_mm512_reduce_add_ps(sum);
}

COLIBRI_TARGET_END
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

/* ---------------------------------------------------------------- NEON */

COLIBRI_TARGET_BEGIN(COLIBRI_TARGET_DOTPROD)

static uint64_t read_neon(const char *p, uint64_t bytes) {
  uint64x2_t sums[STREAMS], sum = vdupq_n_u64(0);
  FOR_STREAMS sums[i] = sum;
  for (const char *end = p + bytes; p < end; p += 16 * STREAMS) {
    FOR_STREAMS sums[i] = vaddq_u64(sums[i], vld1q_u64((const uint64_t *)(p + 16 * i)));
  }
  FOR_STREAMS sum = vaddq_u64(sum, sums[i]);
  return vaddvq_u64(sum);
}

static void peak_neon_f32(uint64_t *sink) {
  float32x4_t acc[CHAINS], x = vdupq_n_f32(0.5f), y = vdupq_n_f32(0.25f);
  FOR_CHAINS acc[i] = vdupq_n_f32(0);
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = vfmaq_f32(acc[i], x, y);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS *sink += (uint64_t)vaddvq_f32(acc[i]);
}

static void peak_neon_int8(uint64_t *sink) {
  int32x4_t acc[CHAINS];
  int8x16_t x = vdupq_n_s8(3), y = vdupq_n_s8(5);
  FOR_CHAINS acc[i] = vdupq_n_s32(0);
  for (int n = 0; n < BURST; n++) {
    FOR_CHAINS {
      acc[i] = vdotq_s32(acc[i], x, y);
      OPAQUE(acc[i]);
    }
  }
  FOR_CHAINS *sink += (uint64_t)vaddvq_s32(acc[i]);
}

COLIBRI_TARGET_END
#endif

/* ---------------------------------------------------------------- the sets */

/* bf16 without instructions of its own is f32's arithmetic. */
static const probe_set sets[] = {
#if defined(__x86_64__)
  {"avx512", read_avx512,
   {{PEAK(peak_avx512_f32, 0, 16)},
    {PEAK(peak_avx512_bf16, COLIBRI_CPU_AVX512_BF16 | COLIBRI_CPU_AVX512_VNNI, 32), PEAK(peak_avx512_f32, 0, 16)},
    {PEAK(peak_vnni_int8, COLIBRI_CPU_AVX512_BF16 | COLIBRI_CPU_AVX512_VNNI, 64), PEAK(peak_avx512_int8, 0, 64)}}},
  {"avx2", read_avx2,
   {{PEAK(peak_avx2_f32, 0, 8)},
    {PEAK(peak_avx2_f32, 0, 8)},
    {PEAK(peak_avxvnni_int8, COLIBRI_CPU_AVX_VNNI, 32), PEAK(peak_avx2_int8, 0, 32)}}},
#endif
#if defined(__aarch64__)
  {"neon", read_neon, {{PEAK(peak_neon_f32, 0, 4)}, {PEAK(peak_neon_f32, 0, 4)}, {PEAK(peak_neon_int8, 0, 16)}}},
#endif
  {"generic", read_plain, {{PEAK(peak_plain_f32, 0, 4)}, {PEAK(peak_plain_f32, 0, 4)}, {PEAK(peak_plain_int8, 0, 8)}}},
};

static const probe_set *selected(void) {
  const probe_set *set = sets;
  for (const char *name = colibri_isa_name(); strcmp(set->isa, name); set++)
    if (set == sets + sizeof sets / sizeof *sets - 1) break; /* the last, generic, runs anywhere */
  return set;
}

/* ---------------------------------------------------------------- public */

int colibri_probe_fill(void *data, uint64_t bytes, colibri_probe *out, colibri_error *err) {
  if (!data || !bytes || bytes % COLIBRI_PROBE_ALIGN || (uintptr_t)data % COLIBRI_PROBE_ALIGN)
    return colibri_fail(err, COLIBRI_EINVAL, "a probe of memory needs an address and a size that are multiples of %d", COLIBRI_PROBE_ALIGN);
  out->begin_ns = now_ns();
  memset(data, 1, bytes);
  out->end_ns = now_ns();
  out->work = bytes;
  return COLIBRI_OK;
}

int colibri_probe_read(const void *data, uint64_t bytes, int passes, colibri_probe *out, colibri_error *err) {
  if (!data || !bytes || bytes % COLIBRI_PROBE_ALIGN || (uintptr_t)data % COLIBRI_PROBE_ALIGN || passes < 1)
    return colibri_fail(err, COLIBRI_EINVAL, "a probe of memory needs an address and a size that are multiples of %d, and a pass or more",
                        COLIBRI_PROBE_ALIGN);
  const probe_set *set = selected();
  uint64_t sum = 0;
  out->begin_ns = now_ns();
  for (int i = 0; i < passes; i++) sum += set->read(data, bytes);
  keep(sum);
  out->end_ns = now_ns();
  out->work = bytes * (uint64_t)passes;
  return COLIBRI_OK;
}

int colibri_probe_compute(int format, uint64_t duration_ns, colibri_probe *out, colibri_error *err) {
  if (format < 0 || format >= COLIBRI_FORMATS) return colibri_fail(err, COLIBRI_EINVAL, "there is no weight format %d", format);
  const probe_set *set = selected();
  int row = format == COLIBRI_F32 ? 0 : format == COLIBRI_BF16 ? 1 : 2, choice = 0;
  while ((colibri_cpu_features() & set->peaks[row][choice].needs) != set->peaks[row][choice].needs) choice++; /* the last needs nothing */
  uint64_t sum = 0;
  out->work = 0;
  out->begin_ns = now_ns();
  do {
    set->peaks[row][choice].run(&sum);
    out->work += set->peaks[row][choice].ops;
    out->end_ns = now_ns();
  } while (out->end_ns - out->begin_ns < duration_ns);
  keep(sum);
  return COLIBRI_OK;
}

/* Numbers between -2 and 2 that make choices neither equal nor predictable. */
static void scatter(float *x, size_t n) {
  uint32_t state = 2463534242u;
  for (size_t i = 0; i < n; i++) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    x[i] = (float)(state >> 8) * 0x1p-22f - 2;
  }
}

int colibri_probe_route(const colibri_route_probe *wish, colibri_probe *out, colibri_error *err) {
  int experts = wish->experts, k = wish->top_k, n = wish->tokens, hidden = wish->hidden;
  if (k < 1 || k > COLIBRI_MAX_TOP_K || experts < k || experts > COLIBRI_MAX_EXPERTS || n < 1 || n > 4096 || hidden < 0 || hidden > 65536 || wish->calls < 1)
    return colibri_fail(err, COLIBRI_EINVAL, "cannot probe a router of top %d of %d experts, %d tokens, hidden %d", k, experts, n, hidden);
  const colibri_kernels *kernels = colibri_kernels_get();
  colibri_router router = {.k = k, .experts = experts, .scale = 1};
  colibri_router_layer layer = {0};
  size_t logits = (size_t)n * (size_t)experts, gate = (size_t)hidden * (size_t)(experts + n), picks = (size_t)n * (size_t)k;
  float *z = malloc((logits + gate + picks) * sizeof *z), *w = z + logits, *x = w + (size_t)hidden * (size_t)experts, *weights = z + logits + gate;
  int32_t *ids = malloc(picks * sizeof *ids);
  uint8_t *bad = malloc((size_t)n);
  int status = COLIBRI_OK;
  if (!z || !ids || !bad) {
    status = colibri_fail(err, COLIBRI_ENOMEM, "no memory for a probe of the router");
    goto done;
  }
  scatter(z, logits + gate);
  out->begin_ns = now_ns();
  for (int call = 0; call < wish->calls; call++) {
    if (hidden) kernels->gate(w, NULL, experts, hidden, x, hidden, n, z);
    colibri_route(&router, &layer, kernels, z, experts, n, ids, weights, bad);
  }
  out->end_ns = now_ns();
  out->work = (uint64_t)n * (uint64_t)wish->calls;
done:
  free(z);
  free(ids);
  free(bad);
  return status;
}
