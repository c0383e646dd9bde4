/* test_gemm.c - matrix products of every instruction set against the generic ones: bit by bit, but for bf16 where the CPU multiplies bf16 itself. */
#include "fence.h"

#include <math.h>

#include "gemm.h"
#if defined(__x86_64__)
#include "cpu.h"
#endif

#define ROUNDS 60
#define MAX_ROWS 64

typedef void (*gemm_function)(COLIBRI_GEMM_ARGS);

static const colibri_kernels *generic;

/* One multiplication: `panels` x `groups` packed weights, fenced exactly, and n_rows activation rows in shuffled order. */
struct problem {
  int format, panels, groups, n_rows;
  char *w;
  const void *rows[MAX_ROWS];
};

/* ---------------------------------------------------------------- problems */

enum weights { WEIGHTS_RANDOM, WEIGHTS_ONES, WEIGHTS_LOWEST, WEIGHTS_KINDS };

/* Integer weights: random bytes, all bits set (int8 -1, int4 7) or the lowest value (-128, -8); fp16 scales normal, of every exponent. */
static void fill_integers(char *block, int format, enum weights kind) {
  int bytes = (int)colibri_block_bytes(format);
  for (int i = 0; i < 32; i++) {
    uint16_t scale = (uint16_t)(random_int(1, 30) << 10 | random_int(0, 1023));
    memcpy(block + 2 * i, &scale, 2);
  }
  for (int i = 64; i < bytes; i++)
    block[i] = (char)(kind == WEIGHTS_ONES ? 0xff : kind == WEIGHTS_RANDOM ? (int)(check_random() & 255) : format == COLIBRI_INT8 ? 0x80 : 0);
}

static void fill_block(char *block, int format, int kind) {
  float x[1024];
  if (format == COLIBRI_INT8 || format == COLIBRI_INT4) {
    fill_integers(block, format, (enum weights)(kind % WEIGHTS_KINDS));
    return;
  }
  fill_floats(x, 1024, kind % 2 ? VALUES_ZERO : VALUES_NORMAL);
  if (format == COLIBRI_F32) memcpy(block, x, sizeof x);
  for (int i = 0; format == COLIBRI_BF16 && i < 1024; i++) {
    uint16_t h = colibri_f32_to_bf16(x[i]);
    memcpy(block + 2 * i, &h, 2);
  }
}

/* Activations, prepared by the generic kernel: ordinary, mostly zero, or all of one size, which quantises to 127 and -127 throughout. */
static void fill_row(void *row, int format, int groups, int kind) {
  int k = groups * COLIBRI_GROUP;
  float *x = random_floats((size_t)k, kind % 3 == 1 ? VALUES_ZERO : VALUES_NORMAL);
  for (int i = 0; kind % 3 == 2 && i < k; i++) x[i] = kind % 2 ? 3.0f : x[i] < 0 ? -3.0f : 3.0f;
  generic->prepare[format](x, k, groups, 0, groups, row);
}

static struct problem make_problem(int format, int round) {
  struct problem p = {format, random_int(1, 4), random_int(1, round % 10 == 0 ? 40 : 6), round <= MAX_ROWS ? round : random_int(1, MAX_ROWS), NULL, {NULL}};
  size_t block = (size_t)colibri_block_bytes(format), row = (size_t)colibri_row_bytes(format, p.groups);
  p.w = fence_bytes(block * (size_t)(p.panels * p.groups), round & 1);
  for (int i = 0; i < p.panels * p.groups; i++) fill_block(p.w + block * (size_t)i, format, round);
  char *rows = fence_bytes(row * (size_t)p.n_rows, ~round & 1);
  for (int r = 0; r < p.n_rows; r++) {
    fill_row(rows + row * (size_t)r, format, p.groups, round + r);
    int other = random_int(0, r);
    p.rows[r] = p.rows[other];
    p.rows[other] = rows + row * (size_t)r;
  }
  return p;
}

/* ---------------------------------------------------------------- checks */

/* Sum of |w x| of one output of a bf16 product: what rounding errors are measured against. */
static float bf16_magnitude(const struct problem *p, int r, int column) {
  float sum = 0;
  const uint16_t *x = p->rows[r];
  for (int k = 0; k < p->groups * COLIBRI_GROUP; k++) {
    uint16_t w;
    memcpy(&w, p->w + colibri_block_bytes(COLIBRI_BF16) * p->groups * (column / 32) + k / 2 * 128 + column % 32 * 4 + k % 2 * 2, 2);
    sum += fabsf(colibri_bf16_to_f32(w) * colibri_bf16_to_f32(x[k]));
  }
  return sum;
}

/* Two sums of k products, each rounded at most k times, in any order. Products of ordinary values: the subnormals a CPU may flush are below this. */
static void check_close(const char *name, const struct problem *p, const float *got, const float *want, int ld) {
  for (int r = 0; r < p->n_rows; r++)
    for (int j = 0; j < 32 * p->panels; j++) {
      float bound = bf16_magnitude(p, r, j) * (float)p->groups * COLIBRI_GROUP * 0x1p-23f, off = fabsf(got[r * ld + j] - want[r * ld + j]);
      CHECK(off <= bound, "%s row %d column %d is off by %g, %g allowed", name, r, j, (double)off, (double)bound);
    }
}

/* A row and a panel give the same bits alone. */
static void check_alone(const char *name, gemm_function gemm, const struct problem *p, const float *whole, int ld) {
  int64_t panel_bytes = colibri_block_bytes(p->format) * p->groups;
  for (int r = 0; r < p->n_rows; r++) {
    int panel = random_int(0, p->panels - 1);
    float *one = fence_floats(32);
    gemm(p->w + panel_bytes * panel, 1, p->groups, p->rows + r, 1, one, 32);
    CHECK_SAME(one, whole + r * ld + 32 * panel, 32, "%s alone, row %d of %d, panel %d", name, r, p->n_rows, panel);
  }
}

static void test_product(const char *name, gemm_function gemm, int format, int exact) {
  for (int round = 0; round < ROUNDS + MAX_ROWS; round++) {
    struct problem p = make_problem(format, round);
    int ld = 32 * p.panels + random_int(0, 5);
    size_t floats = p.n_rows ? (size_t)((p.n_rows - 1) * ld + 32 * p.panels) : 0;
    float *got = fence_floats(floats), *want = fence_floats(floats); /* the gaps between rows keep the fence's filling */
    gemm(p.w, p.panels, p.groups, p.rows, p.n_rows, got, ld);
    generic->gemm[format](p.w, p.panels, p.groups, p.rows, p.n_rows, want, ld);
    if (exact)
      CHECK_SAME(got, want, floats, "%s, %d rows, %d panels, %d groups", name, p.n_rows, p.panels, p.groups);
    else
      check_close(name, &p, got, want, ld);
    check_alone(name, gemm, &p, got, ld);
    fence_release();
  }
}

/* More rows than one block of activations: the caller's rows are walked in several. */
static void test_many_rows(const char *name, gemm_function gemm, int format) {
  enum { rows = 700, groups = 34 };
  static const void *pointers[rows];
  char *w = fence_bytes((size_t)colibri_block_bytes(format) * groups, 1), *row = fence_bytes((size_t)colibri_row_bytes(format, groups) * 5, 1);
  float *got = fence_floats(rows * 32), *want = fence_floats(5 * 32);
  for (int g = 0; g < groups; g++) fill_block(w + colibri_block_bytes(format) * g, format, 0);
  for (int r = 0; r < 5; r++) fill_row(row + colibri_row_bytes(format, groups) * r, format, groups, r);
  for (int r = 0; r < rows; r++) pointers[r] = row + colibri_row_bytes(format, groups) * (r % 5);
  gemm(w, 1, groups, pointers, rows, got, 32);
  gemm(w, 1, groups, pointers, 5, want, 32);
  for (int r = 0; r < rows; r++) CHECK_SAME(got + 32 * r, want + 32 * (r % 5), 32, "%s, row %d of %d", name, r, (int)rows);
  fence_release();
}

static void test_gemm(const char *name, gemm_function gemm, int format, int exact) {
  test_product(name, gemm, format, exact);
  test_many_rows(name, gemm, format);
}

static void test_isa(const char *isa) {
  const colibri_kernels *k = colibri_kernels_get();
  CHECK(!strcmp(k->name, isa), "%s selected, %s runs", isa, k->name);
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    char name[64];
    snprintf(name, sizeof name, "%s format %d", isa, format);
    test_gemm(name, k->gemm[format], format, format != COLIBRI_BF16 || !strcmp(isa, "avx2"));
  }
}

int main(void) {
  generic = colibri_kernels_generic();
  check_each_isa(test_isa);
#if defined(__x86_64__)
  if (colibri_cpu_features() & COLIBRI_CPU_AVX512) { /* what AVX-512 without VNNI and BF16 runs */
    test_gemm("avx512 bf16 plain", colibri_gemm_bf16_avx512_plain, COLIBRI_BF16, 1);
    test_gemm("avx512 int8 plain", colibri_gemm_int8_avx512_plain, COLIBRI_INT8, 1);
    test_gemm("avx512 int4 plain", colibri_gemm_int4_avx512_plain, COLIBRI_INT4, 1);
  }
#endif
  return check_result("test_gemm");
}
