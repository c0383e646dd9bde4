/* test_gemm.c - the matrix products of every instruction set: against the generic ones (bit by bit, but for bf16), invariant over the number of rows and
 * panels, within their memory. */
#include "fence.h"

#include <math.h>
#include "cpu.h"
#include "gemm.h"

#define MAX_ROWS 64

typedef void (*gemm)(COLIBRI_GEMM_ARGS);

static const colibri_kernels *generic;
static const char *const format_names[] = {"f32", "bf16", "int8", "int4"};

/* One product: weights of `panels` x `groups` blocks at the fence, rows likewise. */
typedef struct product {
  int format, panels, groups, n_rows;
  char *w;
  const void *rows[MAX_ROWS];
  float *x; /* [n_rows, 32 groups], what the rows were made from */
} product;

static float *weights_of(int n, int k, int kind) {
  float *w = malloc((size_t)n * (size_t)k * sizeof *w);
  fill_floats(w, (size_t)n * (size_t)k, kind);
  for (long i = 0; kind == VALUES_WIDE && i < (long)n * k; i++) w[i] = ldexpf(w[i], -55); /* into the integer formats' range */
  return w;
}

/* Rows alternate between touching the front and the back fence; w ends at one. */
static void product_make(product *p, int format, int panels, int groups, int n_rows, int kind) {
  int k = 32 * groups;
  size_t row_bytes = (size_t)colibri_row_bytes(format, groups), bytes = colibri_packed_bytes(format, 32 * panels, k);
  float *w = weights_of(32 * panels, k, kind);
  colibri_error err = {0};
  *p = (product){.format = format, .panels = panels, .groups = groups, .n_rows = n_rows, .w = fence_bytes(bytes, 1)};
  CHECK(colibri_pack(format, w, 32 * panels, k, p->w, &err) == COLIBRI_OK, "%s", err.message);
  free(w);
  p->x = fence_floats((size_t)n_rows * (size_t)k);
  fill_floats(p->x, (size_t)n_rows * (size_t)k, kind);
  for (int r = 0; r < n_rows; r++) {
    char *row = fence_bytes(row_bytes, r % 2);
    generic->prepare[format](p->x + r * k, k, groups, 0, groups, row);
    p->rows[r] = row;
  }
}

/* Every weight and activation byte at an extreme: -8 or 7, +-127, in every combination of signs. */
static void make_extreme(product *p) {
  size_t block = (size_t)colibri_block_bytes(p->format);
  for (int b = 0; b < p->panels * p->groups; b++)
    for (size_t i = 64; i < block; i++) {
      int sign = check_random() & 1;
      p->w[(size_t)b * block + i] = (char)(p->format == COLIBRI_INT4 ? (sign ? 0x00 : 0xff) : b % 3 == 0 ? -128 : sign ? -127 : 127);
    }
  for (int r = 0; r < p->n_rows; r++) {
    int8_t *q = (int8_t *)p->rows[r];
    int32_t *offset = (int32_t *)(q + 32 * p->groups) + p->groups;
    for (int g = 0; g < p->groups; g++) {
      int sum = 0;
      for (int i = 32 * g; i < 32 * g + 32; i++) sum += q[i] = (int8_t)(r == 0 ? 127 : r == 1 ? -127 : check_random() & 1 ? 127 : -127);
      offset[g] = (p->format == COLIBRI_INT4 ? -8 : -128) * sum;
    }
  }
}

/* A bf16 result may differ from the generic one by rounding alone: k terms summed in another order, 1e-5 of the sum of magnitudes (f32 has 6e-8). */
static void check_bf16(const char *name, const product *p, int r, const float *got, const float *want) {
  int k = 32 * p->groups;
  for (int j = 0; j < 32 * p->panels; j++) {
    const uint16_t *panel = (const uint16_t *)p->w + (size_t)(j / 32) * (size_t)k * 32;
    double magnitude = 0;
    for (int i = 0; i < k; i++)
      magnitude += fabs((double)colibri_bf16_to_f32(panel[i / 2 * 64 + j % 32 * 2 + i % 2]) * (double)colibri_bf16_to_f32(((const uint16_t *)p->rows[r])[i]));
    CHECK(fabs((double)got[j] - (double)want[j]) <= 1e-5 * magnitude + 1e-35, "%s bf16 row %d output %d is %g, generic %g", name, r, j, (double)got[j], (double)want[j]);
  }
}

/* The output has gaps of ld - 32 panels between rows that must stay as they were. */
static void check_product(const char *name, gemm run, const product *p) {
  int width = 32 * p->panels, ld = width + random_int(0, 2) * 5;
  size_t floats = p->n_rows ? (size_t)(p->n_rows - 1) * (size_t)ld + (size_t)width : 0;
  float *got = fence_floats(floats), *want = fence_floats(floats);
  run(p->w, p->panels, p->groups, p->rows, p->n_rows, got, ld, random_int(0, 1) ? p->w : NULL);
  generic->gemm[p->format](p->w, p->panels, p->groups, p->rows, p->n_rows, want, ld, NULL);
  for (int r = 0; r < p->n_rows; r++) {
    if (p->format == COLIBRI_BF16) check_bf16(name, p, r, got + r * ld, want + r * ld);
    else CHECK_SAME(got + r * ld, want + r * ld, width, "%s %s %d rows x %d panels x %d groups, row %d", name, format_names[p->format], p->n_rows, p->panels, p->groups, r);
    for (int i = width; r + 1 < p->n_rows && i < ld; i++) CHECK(!memcmp(&got[r * ld + i], "\xA5\xA5\xA5\xA5", 4), "%s writes behind a row", name);
  }
}

static void test_differential(const char *name, int format, gemm run) {
  static const int counts[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 32, 33};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (int kind = 0; kind < VALUE_KINDS; kind++) {
      product p;
      product_make(&p, format, random_int(1, 3), random_int(1, 5), counts[i], kind);
      check_product(name, run, &p);
      if (format >= COLIBRI_INT8) {
        make_extreme(&p);
        check_product(name, run, &p);
      }
      fence_release();
    }
}

/* Row r has the same bits whatever rows and panels come with it. */
static void test_invariance(const char *name, int format, gemm run) {
  static const int counts[] = {1, 2, 3, 5, 7, 8, 12, 32, MAX_ROWS};
  enum { PANELS = 5, WIDTH = 32 * PANELS };
  product p;
  float *all = malloc(MAX_ROWS * WIDTH * sizeof *all), *part = malloc(MAX_ROWS * WIDTH * sizeof *part);
  product_make(&p, format, PANELS, 7, MAX_ROWS, VALUES_NORMAL);
  run(p.w, PANELS, p.groups, p.rows, MAX_ROWS, all, WIDTH, NULL);
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (int from = 0; from + counts[i] <= MAX_ROWS; from += counts[i] > 8 ? counts[i] : 13) {
      run(p.w, PANELS, p.groups, p.rows + from, counts[i], part, WIDTH, p.w);
      CHECK_SAME(part, all + from * WIDTH, counts[i] * WIDTH, "%s %s, rows %d.. of %d at once", name, format_names[format], from, counts[i]);
      for (int first = 0, n; first < PANELS; first += n) { /* in pieces of 1 to 3 panels, from a copy at another address */
        size_t panel = (size_t)colibri_block_bytes(format) * 7;
        n = random_int(1, PANELS - first < 3 ? PANELS - first : 3);
        char *copy = fence_bytes(panel * (size_t)n, 1);
        memcpy(copy, p.w + panel * (size_t)first, panel * (size_t)n);
        run(copy, n, p.groups, p.rows + from, counts[i], part + 32 * first, WIDTH, NULL);
      }
      CHECK_SAME(part, all + from * WIDTH, counts[i] * WIDTH, "%s %s in pieces, rows %d.. of %d at once", name, format_names[format], from, counts[i]);
      while (fence_count > MAX_ROWS + 2) { /* the copies */
        fence_count--;
        munmap(fences[fence_count].map, fences[fence_count].bytes);
      }
    }
  fence_release();
  free(all);
  free(part);
}

static void test_one(const char *name, int format, gemm run) {
  test_differential(name, format, run);
  test_invariance(name, format, run);
}

static void test_isa(const char *isa) {
  const colibri_kernels *k = colibri_kernels_get();
  generic = colibri_kernels_generic();
  for (int format = 0; format < COLIBRI_FORMATS; format++) test_one(isa, format, k->gemm[format]);
}

int main(void) {
  check_each_isa(test_isa);
#if defined(__x86_64__)
  if (colibri_cpu_features() & COLIBRI_CPU_AVX512) { /* what a CPU without VNNI or BF16 would run */
    test_one("avx512 plain", COLIBRI_BF16, colibri_gemm_bf16_avx512_plain);
    test_one("avx512 plain", COLIBRI_INT8, colibri_gemm_int8_avx512_plain);
    test_one("avx512 plain", COLIBRI_INT4, colibri_gemm_int4_avx512_plain);
  }
#elif defined(__aarch64__)
  if (colibri_cpu_features() & COLIBRI_CPU_NEON_DOTPROD) { /* what a CPU without it would run */
    test_one("neon plain", COLIBRI_INT8, colibri_gemm_int8_neon_plain);
    test_one("neon plain", COLIBRI_INT4, colibri_gemm_int4_neon_plain);
  }
#endif
  return check_result("test_gemm");
}
