/* bench_kernels.c - speed of the kernels on one core, for each instruction set: GB/s of a matrix-vector product and GOP/s of 8, 32 and 128 rows by format;
 * nanoseconds of the small kernels. Usage: bench_kernels [isa ..]. Build: make build/plain/bench_kernels, or with all of src/ and kernels/. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels.h"

#define HIDDEN 1024
#define FFN 3584
#define ROWS 128
#define STREAM (128 << 20) /* a matrix-vector product walks this many bytes of matrices in turn: more than a last-level cache holds */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *memory(size_t bytes) {
  void *p = aligned_alloc(1 << 21, (bytes + (1 << 21) - 1) >> 21 << 21);
  if (!p) exit(1);
  memset(p, 0, bytes);
  return p;
}

/* Best seconds per call of `code` over at least 0.2 s, in runs of `calls`. */
#define SECONDS(calls, code)                                        \
  ({                                                                \
    double best_ = 1e9, end_ = now() + 0.2;                         \
    do {                                                            \
      double start_ = now();                                        \
      for (int i = 0; i < (calls); i++) { code; }                   \
      double took_ = (now() - start_) / (calls);                    \
      best_ = took_ < best_ ? took_ : best_;                        \
    } while (now() < end_);                                         \
    best_;                                                          \
  })

static float *uniform(size_t n) {
  float *x = memory(n * sizeof *x);
  for (size_t i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return x;
}

static void bench_gemm(const colibri_kernels *k, const float *w, const float *x, float *out) {
  static const char *const names[] = {"f32", "bf16", "int8", "int4"};
  static const int counts[] = {8, 32, ROWS};
  int groups = HIDDEN / 32, panels = FFN / 32;
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    size_t bytes = colibri_packed_bytes(format, FFN, HIDDEN), row_bytes = (size_t)colibri_row_bytes(format, groups);
    int copies = (int)(STREAM / bytes) + 1;
    char *packed = memory(bytes * (size_t)copies), *acts = memory(row_bytes * ROWS);
    const void *rows[ROWS];
    colibri_pack(format, w, FFN, HIDDEN, packed, NULL);
    for (int c = 1; c < copies; c++) memcpy(packed + bytes * (size_t)c, packed, bytes);
    for (int r = 0; r < ROWS; r++) {
      rows[r] = acts + row_bytes * (size_t)r;
      k->prepare[format](x + r * HIDDEN, HIDDEN, groups, 0, groups, acts + row_bytes * (size_t)r);
    }
    double s = SECONDS(copies, k->gemm[format](packed + bytes * (size_t)i, panels, groups, rows, 1, out, FFN, NULL));
    printf("%-7s %-4s  1 row %5.1f GB/s ", k->name, names[format], (double)bytes / s * 1e-9);
    for (int c = 0; c < 3; c++) {
      int n = counts[c];
      s = SECONDS(2, k->gemm[format](packed + bytes * (size_t)i, panels, groups, rows, n, out, FFN, NULL));
      printf("  %3d rows %6.1f GOP/s", n, 2e-9 * FFN * HIDDEN * n / s);
    }
    s = SECONDS(100, k->prepare[format](x, HIDDEN, groups, 0, groups, acts));
    printf("  prepare %4.0f ns\n", s * 1e9);
    free(packed);
    free(acts);
  }
}

/* A decode token's attention (1 and 4 queries, 2048 positions) and a prefill tile (64 queries, 512 positions), head_dim 64. */
static void bench_attend(const colibri_kernels *k, const float *x, float *out) {
  static const struct { int nq, positions; } cases[] = {{1, 2048}, {4, 2048}, {64, 512}};
  static int32_t blocks[128], first[64], last[64];
  const float *q[64];
  float *o[64];
  for (int format = 0; format < 2; format++) {
    int64_t half = 16 * 64 * (format ? 2 : 4);
    char *kv = memory((size_t)half * 2 * 128);
    for (int i = 0; i < 128; i++) blocks[i] = i;
    for (int p = 0; p < 2048; p++) k->store_kv(x + p, x + 2 * p, 64, format, p % 16, kv + half * 2 * (p / 16), kv + half * 2 * (p / 16) + half);
    printf("%-7s attend %s", k->name, format ? "bf16" : "f32 ");
    for (int c = 0; c < 3; c++) {
      int nq = cases[c].nq, n = cases[c].positions;
      float *scratch = memory((size_t)COLIBRI_ATTEND_SCRATCH(nq, 64) * 4);
      for (int i = 0; i < nq; i++) q[i] = x + 64 * i, o[i] = out + 64 * i, last[i] = n - 1;
      colibri_attend a = {q, o, first, last, nq, 64, format, kv, half * 2, half, blocks, scratch};
      double s = SECONDS(4, k->attend(&a));
      printf("  %2d x %4d: %7.1f us, %5.1f GFLOP/s, %4.1f GB/s", nq, n, s * 1e6, 4e-9 * 64 * nq * n / s, (double)(half * 2) * n / 16 / s * 1e-9);
      free(scratch);
    }
    printf("\n");
    free(kv);
  }
}

/* 16 tokens' selection by shape; fresh logits each call, 64 sets in turn. */
static void bench_top_k(const colibri_kernels *k, const float *x) {
  static const struct { int k, experts; } shapes[] = {{4, 32}, {6, 64}, {8, 64}, {8, 128}, {6, 160}, {8, 256}};
  static int32_t ids[16 * 8];
  static uint8_t bad[16];
  printf("%-7s top k, 16 tokens:", k->name);
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
    double took = SECONDS(256, k->top_k(x + 1024 * (i % 64), shapes[s].experts, shapes[s].experts, 16, shapes[s].k, ids, bad));
    printf(" %d of %d %.0f ns;", shapes[s].k, shapes[s].experts, took * 1e9);
  }
  printf("\n");
}

static void bench_small(const colibri_kernels *k, const float *x, float *out) {
  static _Alignas(64) int32_t ids[64];
  static _Alignas(64) float weights[64];
  double top2 = SECONDS(1000, k->top2_softmax(x + 16 * (i % 64), 8, 8, 16, ids, weights));
  double norm = SECONDS(100, k->rmsnorm(x, x, 1e-5f, HIDDEN, out));
  double gate = SECONDS(100, k->gate(x, NULL, 8, HIDDEN, x + 8 * HIDDEN, HIDDEN, 16, out));
  double silu = SECONDS(100, k->silu_mul(x, 2 * FFN, 1, FFN / 16, out, FFN));
  double axpy = SECONDS(100, k->axpy(0.5f, x, HIDDEN, out));
  double sum = SECONDS(4, weights[0] += k->sum_exp(x, 32000, 1)), most = SECONDS(4, ids[0] += k->argmax(x, 32000));
  printf("%-7s top2 of 8, 16 tokens %.1f ns; rmsnorm %d %.0f ns; gate of 16 tokens, 8 x %d %.0f ns; silu_mul %d %.0f ns; axpy %.0f ns; 32000 logits: sum_exp %.1f us, argmax %.1f us\n",
         k->name, top2 * 1e9, HIDDEN, norm * 1e9, HIDDEN, gate * 1e9, FFN, silu * 1e9, axpy * 1e9, sum * 1e6, most * 1e6);
}

int main(int argc, char **argv) {
  float *w = uniform((size_t)FFN * HIDDEN), *x = uniform((size_t)ROWS * HIDDEN), *out = memory((size_t)ROWS * FFN * 4);
  const char *names[] = {"avx512", "avx2", "neon", "generic"};
  for (int i = 0; i < 4; i++) {
    int wanted = argc == 1;
    for (int j = 1; j < argc; j++) wanted |= !strcmp(argv[j], names[i]);
    if (!wanted || colibri_isa_select(names[i], NULL) != COLIBRI_OK) continue;
    bench_gemm(colibri_kernels_get(), w, x, out);
    bench_attend(colibri_kernels_get(), x, out);
    bench_small(colibri_kernels_get(), x, out);
    bench_top_k(colibri_kernels_get(), x);
  }
  free(w);
  free(x);
  free(out);
  return 0;
}
