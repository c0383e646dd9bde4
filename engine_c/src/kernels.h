/* kernels.h - the table of inner loops, one per instruction set (internal).
 *
 * Layout, measured (docs/container.md has the byte map): a packed matrix [n, k] is ceil(n/32) panels of ceil(k/32) blocks; a block holds 32
 * rows x 32 columns with its scales inline. Row r of a panel is half h = r / 16, SIMD lane r % 16, so a lane owns an output row and sums
 * over k in one fixed order. For gate/up, half 0 holds 16 gate rows and half 1 the up rows of the same 16 neurons.
 *
 * Contract of every function here: a row's result has the same bits whatever the number of rows, panels or alignment of the call, and,
 * but for bf16 matrices, whatever the instruction set. Therefore: no reassociation, explicit fma only (-ffp-contract=off), our own
 * exponential. kernels_generic.c is the specification. Nothing here allocates or fails; "1 on non-finite" is a result. */
#ifndef COLIBRI_KERNELS_H
#define COLIBRI_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

#define COLIBRI_PANEL 32  /* rows of a panel */
#define COLIBRI_GROUP 32  /* columns of a block; also the activation quantisation group */

/* Bytes of one 32 x 32 block. */
static inline int64_t colibri_block_bytes(int format) {
  switch (format) {
    case COLIBRI_F32: return 4096;
    case COLIBRI_BF16: return 2048;
    case COLIBRI_INT8: return 64 + 1024;
    case COLIBRI_INT4: return 64 + 512;
    default: return 0;
  }
}

/* An activation row as a matrix of `format` wants it, k = 32 * groups columns (zeros beyond the valid ones):
 *   F32   float x[k]
 *   BF16  uint16_t x[k]                                  round to nearest even
 *   INT8  int8_t q[k]; float scale[groups]; int32_t offset[groups]     scale = amax / 127, offset = -128 * sum(q)
 *   INT4  int8_t q[k]; int32_t exponent[groups]; int32_t offset[groups]  scale = 2^e >= amax / 127, -63 <= e <= 63, stored as e << 23,
 *                                                        added to the bits of the weight's f32 scale; offset = -8 * sum(q)
 * q = round to nearest even of x / scale, within [-127, 127]. An all-zero group has scale 1 (INT8) or e = -63 (INT4) and q = 0. */
static inline int64_t colibri_row_bytes(int format, int64_t groups) {
  int64_t k = groups * COLIBRI_GROUP, bytes;
  switch (format) {
    case COLIBRI_F32: bytes = 4 * k; break;
    case COLIBRI_BF16: bytes = 2 * k; break;
    default: bytes = k + 8 * groups; break;
  }
  return (bytes + 63) / 64 * 64;
}

/* One attention task: nq query vectors that share a KV head. Vector i sees positions first[i] .. last[i] inclusive.
 * Block b of the sequence holds positions 16b .. 16b+15: K transposed [head_dim][16], V [16][head_dim], both in kv_format, 64-byte aligned.
 * Blocks are walked in ascending order in chunks of 4 (64 positions, chunk c = positions 64c .. 64c+63, always aligned so), online softmax
 * per chunk; chunks without a visible position are skipped; scores are q . k summed over head_dim ascending by fma, the scale is already in q. */
typedef struct colibri_attend {
  const float *const *q;       /* [nq] -> [head_dim] */
  float *const *out;           /* [nq] -> [head_dim] */
  const int32_t *first, *last; /* [nq], 0 <= first <= last */
  int32_t nq, head_dim, kv_format;
  const char *kv;              /* base of this layer's pool for this KV head */
  int64_t block_stride;        /* bytes from one pool block to the next */
  int64_t v_offset;            /* bytes from a block's K to its V */
  const int32_t *blocks;       /* the sequence's block table */
  float *scratch;              /* COLIBRI_ATTEND_SCRATCH(nq, head_dim) floats, 64-byte aligned */
} colibri_attend;
#define COLIBRI_ATTEND_SCRATCH(nq, head_dim) ((int64_t)(nq) * (64 + 16) + 64 * (int64_t)(head_dim) + 256)

typedef struct colibri_kernels {
  const char *name;

  /* out[r * ld + 32 p + j] = sum_k w[32 p + j][k] * row r [k], for p < panels. rows[r] as colibri_row_bytes describes (64-byte aligned), w 64-byte
   * aligned and contiguous. n_rows >= 0, any. F32: one fma chain over k ascending from 0. INT8/INT4: int32 exact inside a group, then
   * acc = fma((float)sum, scale, acc), groups ascending from 0; scale = fp16 weight scale times (INT8: one f32 multiply; INT4: exponent add)
   * the row's. BF16: pairs of k ascending; f32 accumulation. next: the weights that the caller reads after these, NULL if unknown: a hint. */
  void (*gemm[COLIBRI_FORMATS])(const void *w, int panels, int groups, const void *const *rows, int n_rows, float *out, ptrdiff_t ld,
                                const void *next);

  /* Writes groups g0..g1-1 of an activation row of `groups` groups. x points at column 32 * g0; k_valid columns of x are read (<= 32 * (g1-g0)), the
   * rest of the range counts as zero. Returns 1 if a value was NaN or infinite (the row is then poison but defined memory), else 0. */
  int (*prepare[COLIBRI_FORMATS])(const float *x, int k_valid, int groups, int g0, int g1, void *row);

  /* y = x * rsqrt(mean(x^2) + eps) * weight. The sum runs over 16 partial sums (k % 16) by fma, then a fixed tree (8, 4, 2, 1). 1 / sqrtf. x may be y. */
  void (*rmsnorm)(const float *x, const float *weight, float eps, int n, float *y);

  /* logits[t * experts + e] = sum_k w[e][k] * x[t * ld + k] (+ bias[e] if bias) of n rows, f32, w [experts, hidden] row-major unpadded; 16 partial sums
   * (k % 16) by fma, then the fixed tree. */
  void (*gate)(const float *w, const float *bias, int experts, int hidden, const float *x, ptrdiff_t ld, int n, float *logits);

  /* y[i] = silu(g[i]) * u[i], silu(g) = g / (1 + exp(-g)). For row r < n_rows and panel p < panels of a fused gate/up product
   * gu[r * ld + 32 p + (0..15 gate, 16..31 up)] -> y[r * y_ld + 16 p + 0..15]. */
  void (*silu_mul)(const float *gu, ptrdiff_t ld, int n_rows, int panels, float *y, ptrdiff_t y_ld);

  void (*axpy)(float a, const float *x, int n, float *y);           /* y[i] = fma(a, x[i], y[i]) */
  void (*add)(const float *a, const float *b, int n, float *y);     /* y[i] = a[i] + b[i]; y may be a or b */

  /* Rotates x [head_dim] in place, half-split: for i < dims/2 (a, b) = (x[i], x[i + dims/2]) -> (a c - b s, b c + a s) as mul then fma
   * (fma(a, c, -(b * s)), fma(b, c, a * s)); cos_sin [dims/2 cosines][dims/2 sines]. interleaved != 0: pairs (x[2i], x[2i + 1]). Then x[0..head_dim) *= scale. */
  void (*rope)(float *x, const float *cos_sin, int dims, int head_dim, int interleaved, float scale);

  /* Stores one position (slot 0..15) of a KV block: k, v [head_dim] f32 into K^T [head_dim][16] and V [16][head_dim], converted to kv_format (bf16: nearest even). */
  void (*store_kv)(const float *k, const float *v, int head_dim, int kv_format, int slot, void *k_block, void *v_block);
  void (*attend)(const colibri_attend *a);

  /* Top-k of n tokens' gate logits z [n, ld], softmax over the chosen: ids, weights [n, k] by descending logit, ties to the lower index. experts <= 16, k == 2.
   * Returns the index of the first token that has a NaN or infinite logit, or -1. weights = exp(z - zmax) * (1 / sum). */
  int (*top2_softmax)(const float *z, int ld, int experts, int n, int32_t *ids, float *weights);

  /* Top-k of n tokens' logits z [n, ld], 1 <= k <= experts <= 1024, k <= COLIBRI_MAX_TOP_K: ids [n, k] by descending logit, ties to the lower
   * index. bad [n]: 1 for a token with a NaN or infinite logit, whose ids are 0..k-1; else 0. */
  void (*top_k)(const float *z, int ld, int experts, int n, int k, int32_t *ids, uint8_t *bad);

  /* Scores (enum colibri_router_score) of n tokens' logits z [n, ld]: y [n, experts]. Softmax: exp(z - max) * (1 / sum), the sum that of sum_exp; sigmoid:
   * 1 / (1 + exp(-z)); sqrt_softplus: sqrt(max(z, 0) + log1p(exp(-|z|))). bad [n]: 1 for a token with a NaN or infinite logit, else 0. But for softmax y may
   * be z. */
  void (*scores)(int score, const float *z, ptrdiff_t ld, int experts, int n, float *y, uint8_t *bad);
  /* What groups of neighbours are compared by: of n tokens' scores s [n, groups * size] the largest of each group, or the sum of its two largest (size >= 2):
   * metric [n, groups]. */
  void (*group_best)(const float *s, int size, int groups, int n, int sum_top2, float *metric);

  /* Index of the largest of x[n], ties to the lowest; NaN or infinity: -1. */
  int32_t (*argmax)(const float *x, int32_t n);
  /* sum of exp(x[i] - shift), 16 partial sums (i % 16), fixed tree. */
  float (*sum_exp)(const float *x, int32_t n, float shift);
  void (*exp)(float *x, int32_t n); /* x[i] = colibri_expf(x[i]) */
} colibri_kernels;

/* One table an ISA; NULL where the compiler does not target that architecture. */
const colibri_kernels *colibri_kernels_generic(void);
const colibri_kernels *colibri_kernels_avx2(void);
const colibri_kernels *colibri_kernels_avx512(void);
const colibri_kernels *colibri_kernels_neon(void);
/* The selected table (colibri_isa_select), selecting the default on first use; never NULL. */
const colibri_kernels *colibri_kernels_get(void);
/* colibri_isa_select(NULL) unless a set has been selected already: what opening a model or session calls. */
int colibri_isa_ensure(colibri_error *err);

/* The exponential all kernels share, exact sequence of operations in expf.h: colibri_expf(-inf) = 0, no other special case needed. */
float colibri_expf(float x);

/* fp16 and bf16 conversions, round to nearest even. */
uint16_t colibri_f32_to_f16(float x);
float colibri_f16_to_f32(uint16_t h);
static inline float colibri_bf16_to_f32(uint16_t h) { union { uint32_t u; float f; } v; v.u = (uint32_t)h << 16; return v.f; }
uint16_t colibri_f32_to_bf16(float x);

#endif
