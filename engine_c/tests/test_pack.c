/* test_pack.c - packing: sizes, round trips, error bounds, scales, refusals. */
#include "fence.h"

#include <math.h>

static const double step_error[] = {0, 0x1p-8, 0.5, 0.5}; /* of |w| for bf16, of a scale's step for integers */

static void check_range(uint64_t bytes, int format, long long n, long long k, uint64_t want) {
  CHECK(bytes == want, "format %d [%lld, %lld] needs %llu bytes, not %llu", format, n, k, (unsigned long long)bytes, (unsigned long long)want);
}

static void test_sizes(void) {
  static const struct { int format; int64_t n, k; uint64_t bytes; } cases[] = {
    {COLIBRI_F32, 1, 1, 4096}, {COLIBRI_F32, 32, 32, 4096}, {COLIBRI_F32, 33, 32, 8192}, {COLIBRI_BF16, 32, 33, 4096}, {COLIBRI_INT8, 32000, 1024, 34816000},
    {COLIBRI_INT4, 64, 64, 4 * 576}, {4, 32, 32, 0}, {-1, 32, 32, 0}, {COLIBRI_INT4, 0, 32, 0}, {COLIBRI_INT4, 32, 0, 0}, {COLIBRI_INT4, -1, 32, 0},
    {COLIBRI_INT4, 32, -32, 0}, {COLIBRI_F32, INT64_MAX, 1, 0}, {COLIBRI_F32, 1, INT64_MAX, 0}, {COLIBRI_F32, INT32_MAX, INT32_MAX, 0},
    {COLIBRI_INT4, INT32_MAX, INT32_MAX, UINT64_C(576) << 52}, {COLIBRI_BF16, INT32_MAX, INT32_MAX, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    check_range(colibri_packed_bytes(cases[i].format, cases[i].n, cases[i].k), cases[i].format, cases[i].n, cases[i].k, cases[i].bytes);
  check_range(colibri_expert_bytes(COLIBRI_INT4, 1024, 3584), COLIBRI_INT4, 1024, 3584, UINT64_C(3) * 1024 * 3584 / 1024 * 576);
  check_range(colibri_expert_bytes(COLIBRI_F32, 40, 33), COLIBRI_F32, 40, 33, 4 * 2 * 4096 + 2 * 2 * 4096);
  check_range(colibri_expert_bytes(COLIBRI_F32, INT32_MAX, INT32_MAX), COLIBRI_F32, INT32_MAX, INT32_MAX, 0);
  check_range(colibri_expert_bytes(COLIBRI_F32, 0, 1), COLIBRI_F32, 0, 1, 0);
}

/* Scale of column k in row r. */
static double scale_at(int format, const char *packed, int64_t cols, int64_t r, int64_t k) {
  int64_t groups = (cols + 31) / 32;
  uint16_t h;
  memcpy(&h, packed + (r / 32 * groups + k / 32) * colibri_block_bytes(format) + 2 * (r % 32), sizeof h);
  return fabs((double)colibri_f16_to_f32(h));
}

/* Every scale, padding's included, is normal. */
static void check_scales(int format, const char *packed, uint64_t bytes) {
  for (uint64_t at = 0; format >= COLIBRI_INT8 && at < bytes; at += (uint64_t)colibri_block_bytes(format))
    for (int r = 0; r < 32; r++) {
      uint16_t h;
      memcpy(&h, packed + at + 2 * r, sizeof h);
      int e = h >> 10 & 31;
      CHECK(e > 0 && e < 31, "format %d has the scale %04x", format, h);
    }
}

/* Half a step; an int4 group's scale may be up to a fourteenth smaller than would reach the opposite extreme, which then misses by more. */
static double allowed(int format, double w, double scale) {
  double bound = format < COLIBRI_INT8 ? step_error[format] * fabs(w) : step_error[format] * scale * 1.0001;
  if (format == COLIBRI_INT4 && fabs(w) > 7 * scale) bound = fabs(w) - 7 * scale + bound;
  return bound + (format == COLIBRI_INT8 ? fabs(w) * 0x1p-10 : 0); /* fp16 rounds an int8 scale down: the extreme is clamped */
}

static void test_matrix(int format, int n, int k, int kind) {
  size_t count = (size_t)n * (size_t)k;
  uint64_t bytes = colibri_packed_bytes(format, n, k);
  float *w = random_floats(count, kind), *back = fence_floats(count);
  char *packed = fence_bytes(bytes, 1), *again = fence_bytes(bytes, 0);
  colibri_error err = {0};
  for (size_t i = 0; kind == VALUES_WIDE && i < count; i++) w[i] = ldexpf(w[i], -55);
  CHECK(colibri_pack(format, w, n, k, packed, &err) == COLIBRI_OK, "%s", err.message);
  CHECK(colibri_unpack(format, packed, n, k, back, &err) == COLIBRI_OK, "%s", err.message);
  check_scales(format, packed, bytes);
  for (int r = 0; r < n; r++)
    for (int c = 0; c < k; c++) {
      double x = (double)w[r * k + c], y = (double)back[r * k + c];
      double scale = format >= COLIBRI_INT8 ? scale_at(format, packed, k, r, c) : 0;
      CHECK(fabs(x - y) <= allowed(format, x, scale) + 0x1p-134, "format %d [%d, %d] of [%d, %d]: %a becomes %a (scale %a)", format, r, c, n, k, x, y, scale);
    }
  if (format < COLIBRI_INT8) { /* what was packed packs to itself */
    CHECK(colibri_pack(format, back, n, k, again, &err) == COLIBRI_OK && !memcmp(packed, again, bytes), "format %d [%d, %d] is not stable", format, n, k);
  }
  fence_release();
}

static void test_round_trips(void) {
  for (int round = 0; round < 200; round++)
    for (int format = 0; format < COLIBRI_FORMATS; format++) test_matrix(format, random_int(1, 70), random_int(1, 100), round % VALUE_KINDS);
}

/* Padding is zero, so it adds nothing to a product. */
static void test_padding(void) {
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    float *w = random_floats(5 * 7, VALUES_NORMAL), *back = fence_floats(32 * 32);
    char *packed = fence_bytes(colibri_packed_bytes(format, 5, 7), 1);
    colibri_pack(format, w, 5, 7, packed, NULL);
    colibri_unpack(format, packed, 32, 32, back, NULL); /* the same single block, read whole */
    for (int i = 0; i < 1024; i++) CHECK((i / 32 < 5 && i % 32 < 7) || back[i] == 0, "format %d pads with %g", format, (double)back[i]);
    fence_release();
  }
}

/* Relative RMS error of gaussian weights: bf16 0.17 %, int8 0.53 %, int4 8.15 % (8.65 % with positive scales alone, 9.7 % without a search). */
static void test_rms(void) {
  static const double bounds[] = {0, 0.0018, 0.0056, 0.082};
  enum { N = 128, K = 512 };
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    float *w = random_floats(N * K, VALUES_NORMAL), *back = fence_floats(N * K);
    char *packed = fence_bytes(colibri_packed_bytes(format, N, K), 1);
    double error = 0, power = 0;
    colibri_pack(format, w, N, K, packed, NULL);
    colibri_unpack(format, packed, N, K, back, NULL);
    for (int i = 0; i < N * K; i++) {
      error += ((double)w[i] - (double)back[i]) * ((double)w[i] - (double)back[i]);
      power += (double)w[i] * (double)w[i];
    }
    CHECK(sqrt(error / power) <= bounds[format], "format %d has an error of %.3f %%", format, 100 * sqrt(error / power));
    fence_release();
  }
}

static void test_expert(int format, int hidden, int ffn) {
  size_t count = (size_t)hidden * (size_t)ffn;
  float *in[3], *out[3], *alone = fence_floats(count);
  char *packed = fence_bytes(colibri_expert_bytes(format, hidden, ffn), 1), *one = fence_bytes(colibri_packed_bytes(format, hidden > ffn ? hidden : ffn, hidden > ffn ? hidden : ffn), 1);
  colibri_error err = {0};
  for (int m = 0; m < 3; m++) {
    in[m] = random_floats(count, VALUES_NORMAL);
    out[m] = fence_floats(count);
  }
  CHECK(colibri_pack_expert(format, in[0], in[1], in[2], hidden, ffn, packed, &err) == COLIBRI_OK, "%s", err.message);
  CHECK(colibri_unpack_expert(format, packed, hidden, ffn, out[0], out[1], out[2], &err) == COLIBRI_OK, "%s", err.message);
  check_scales(format, packed, colibri_expert_bytes(format, hidden, ffn));
  for (int m = 0; m < 3; m++) { /* the same values as the matrices packed one by one */
    int n = m == 2 ? hidden : ffn, k = m == 2 ? ffn : hidden;
    colibri_pack(format, in[m], n, k, one, &err);
    colibri_unpack(format, one, n, k, alone, &err);
    CHECK_SAME(out[m], alone, count, "format %d, expert %d x %d, matrix %d", format, hidden, ffn, m);
  }
  fence_release();
}

/* Where docs/container.md says element (h, lane, k) is. */
static void test_layout(void) {
  float w[32 * 32] = {0};
  uint8_t block[4096];
  int r = 21, k = 13, h = r / 16, lane = r % 16;
  w[r * 32 + k] = 1;
  colibri_pack(COLIBRI_F32, w, 32, 32, block, NULL);
  CHECK(!memcmp(block + k * 128 + h * 64 + lane * 4, &w[r * 32 + k], 4), "f32");
  colibri_pack(COLIBRI_BF16, w, 32, 32, block, NULL);
  CHECK(block[k / 2 * 128 + h * 64 + lane * 4 + k % 2 * 2 + 1] == 0x3f, "bf16");
  colibri_pack(COLIBRI_INT8, w, 32, 32, block, NULL);
  CHECK(block[64 + k / 4 * 128 + h * 64 + lane * 4 + k % 4] == 127, "int8");
  colibri_pack(COLIBRI_INT4, w, 32, 32, block, NULL);
  CHECK(block[64 + k / 8 * 128 + h * 64 + lane * 4 + k % 4] >> 4 == 0 && (block[2 * r + 1] & 0x80), "int4: -8 times a negative scale, in the high nibble");
}

static void check_refusal(int format, float value, int code, const char *word) {
  float w[40 * 40] = {0};
  _Alignas(64) static char packed[4 * 4096 * 4];
  colibri_error err = {0};
  w[35 * 40 + 33] = value;
  int status = colibri_pack(format, w, 40, 40, packed, &err);
  CHECK(status == code && (code == COLIBRI_OK || (err.code == code && strstr(err.message, "[35, 33]") && strstr(err.message, word))), "format %d, %g: %d %s", format, (double)value, status, err.message);
}

static void test_refusals(void) {
  float x = 0;
  colibri_error err = {0};
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    check_refusal(format, NAN, COLIBRI_ENUMERIC, "finite");
    check_refusal(format, INFINITY, COLIBRI_ENUMERIC, "finite");
    check_refusal(format, -INFINITY, COLIBRI_ENUMERIC, "finite");
    check_refusal(format, 3.4e38f, format == COLIBRI_F32 ? COLIBRI_OK : COLIBRI_ENUMERIC, "large");
    check_refusal(format, 4e5f, COLIBRI_OK, "");
    check_refusal(format, 1e-40f, COLIBRI_OK, "");
  }
  CHECK(colibri_pack(7, &x, 1, 1, &x, &err) == COLIBRI_EINVAL && strstr(err.message, "format 7"), "%s", err.message);
  CHECK(colibri_pack(0, NULL, 1, 1, &x, NULL) == COLIBRI_EINVAL, "NULL weights");
  CHECK(colibri_unpack(0, &x, 0, 1, &x, NULL) == COLIBRI_EINVAL, "no rows");
  CHECK(colibri_pack_expert(0, &x, &x, NULL, 1, 1, &x, NULL) == COLIBRI_EINVAL, "NULL down");
  CHECK(colibri_unpack_expert(0, &x, 1, -1, &x, &x, &x, NULL) == COLIBRI_EINVAL, "negative ffn");
}

int main(void) {
  test_sizes();
  test_round_trips();
  test_padding();
  test_rms();
  for (int i = 0; i < 40; i++) test_expert(i % 4, random_int(1, 80), random_int(1, 80));
  test_layout();
  test_refusals();
  return check_result("test_pack");
}
