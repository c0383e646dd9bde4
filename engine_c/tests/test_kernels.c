/* test_kernels.c - activations, elementwise kernels and logits of every instruction set against the generic ones, bit by bit. */
#include "fence.h"

#include <math.h>

#define ROUNDS 300

static const colibri_kernels *k, *generic;

/* ---------------------------------------------------------------- activations */

static void check_prepare(int format, const float *x, int k_valid, int groups, int g0, int g1) {
  size_t bytes = (size_t)colibri_row_bytes(format, groups);
  char *row = fence_bytes(bytes, 1), *want = fence_bytes(bytes, 0);
  int bad = k->prepare[format](x, k_valid, groups, g0, g1, row), bad_want = generic->prepare[format](x, k_valid, groups, g0, g1, want);
  CHECK(bad == bad_want, "%s prepare %d returns %d", k->name, format, bad);
  for (size_t i = 0; i < bytes; i++)
    if (row[i] != want[i]) {
      CHECK(row[i] == want[i], "%s prepare %d, groups %d of %d..%d, %d valid: byte %zu", k->name, format, groups, g0, g1, k_valid, i);
      return;
    }
}

static void test_prepare(void) {
  for (int round = 0; round < ROUNDS; round++)
    for (int format = 0; format < COLIBRI_FORMATS; format++) {
      int groups = random_int(1, 12), g0 = random_int(0, groups - 1), g1 = random_int(g0 + 1, groups);
      int valid = random_int(0, 32 * (g1 - g0));
      float *x = random_floats((size_t)valid, round % VALUE_KINDS);
      check_prepare(format, x, valid, groups, g0, g1);
      if (valid) x[random_int(0, valid - 1)] = not_finite();
      check_prepare(format, x, valid, groups, g0, g1);
      fence_release();
    }
}

/* Halves go to the even neighbour: with 127 as the largest value the scale is 1. */
static void test_prepare_ties(void) {
  float x[32];
  for (int i = 0; i < 32; i++) x[i] = i == 16 ? 127.0f : (float)i - 15.5f;
  check_prepare(COLIBRI_INT8, x, 32, 1, 0, 1);
  check_prepare(COLIBRI_INT4, x, 32, 1, 0, 1);
  fence_release();
}

/* What the format promises, on the generic kernel: |q| <= 127, x = q * scale within half a step, offsets. */
static void test_prepare_error(void) {
  for (int round = 0; round < ROUNDS; round++) {
    float x[32];
    _Alignas(64) int8_t row[64];
    float step;
    int32_t exponent, offset, sum = 0;
    int format = round & 1 ? COLIBRI_INT4 : COLIBRI_INT8;
    fill_floats(x, 32, round / 2 % 2 ? VALUES_WIDE : VALUES_NORMAL);
    int bad = k->prepare[format](x, 32, 1, 0, 1, row);
    CHECK(!bad, "%s prepare %d", k->name, format);
    memcpy(&step, row + 32, 4);
    memcpy(&exponent, row + 32, 4);
    memcpy(&offset, row + 36, 4);
    if (format == COLIBRI_INT4) step = ldexpf(1, exponent >> 23);
    for (int i = 0; i < 32; i++) {
      sum += row[i];
      CHECK(row[i] >= -127, "%s quantises to %d", k->name, row[i]);
      CHECK(fabs((double)x[i] - (double)step * row[i]) <= 0.50001 * (double)step, "%s: %a is not %d * %a", k->name, (double)x[i], row[i], (double)step);
    }
    CHECK(offset == (format == COLIBRI_INT8 ? -128 : -8) * sum, "%s offset %d", k->name, offset);
  }
}

/* ---------------------------------------------------------------- norm, gate, elementwise */

static void test_rmsnorm(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int n = random_int(1, 200), kind = round % VALUE_KINDS;
    float *x = random_floats((size_t)n, kind), *w = random_floats((size_t)n, VALUES_NORMAL), *y = fence_floats((size_t)n), *want = fence_floats((size_t)n);
    k->rmsnorm(x, w, 1e-5f, n, y);
    generic->rmsnorm(x, w, 1e-5f, n, want);
    CHECK_SAME(y, want, n, "%s rmsnorm n %d", k->name, n);
    k->rmsnorm(x, w, 1e-5f, n, x);
    CHECK_SAME(x, want, n, "%s rmsnorm in place n %d", k->name, n);
    fence_release();
  }
}

static void test_gate(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int experts = random_int(1, 19), hidden = random_int(1, 130), n = random_int(0, 9), kind = round % VALUE_KINDS, ld = hidden + random_int(0, 3);
    size_t logits = (size_t)experts * (size_t)n;
    float *w = random_floats((size_t)experts * (size_t)hidden, kind), *x = random_floats(n ? (size_t)((n - 1) * ld + hidden) : 0, kind);
    float *bias = round & 1 ? random_floats((size_t)experts, VALUES_NORMAL) : NULL;
    float *y = fence_floats(logits), *want = fence_floats(logits), *one = fence_floats((size_t)experts);
    k->gate(w, bias, experts, hidden, x, ld, n, y);
    generic->gate(w, bias, experts, hidden, x, ld, n, want);
    CHECK_SAME(y, want, logits, "%s gate [%d, %d], %d rows", k->name, experts, hidden, n);
    for (int t = 0; t < n; t++) {
      k->gate(w, bias, experts, hidden, x + t * ld, ld, 1, one);
      CHECK_SAME(one, want + t * experts, experts, "%s gate [%d, %d], row %d of %d alone", k->name, experts, hidden, t, n);
    }
    fence_release();
  }
}

static void test_silu_mul(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int rows = random_int(0, 4), panels = random_int(1, 4), ld = 32 * panels + random_int(0, 3), y_ld = 16 * panels + random_int(0, 3);
    size_t in = rows ? (size_t)((rows - 1) * ld + 32 * panels) : 0, out = rows ? (size_t)((rows - 1) * y_ld + 16 * panels) : 0;
    float *gu = random_floats(in, round % VALUE_KINDS), *y = fence_floats(out), *want = fence_floats(out);
    for (size_t i = 0; i < in; i += 7) gu[i] *= 40; /* past the exponential's ends */
    k->silu_mul(gu, ld, rows, panels, y, y_ld);
    generic->silu_mul(gu, ld, rows, panels, want, y_ld);
    CHECK_SAME(y, want, out, "%s silu_mul %d rows, %d panels", k->name, rows, panels);
    fence_release();
  }
}

static void test_axpy_and_add(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int n = random_int(0, 100), kind = round % VALUE_KINDS;
    float *x = random_floats((size_t)n, kind), *y = random_floats((size_t)n, kind), *want = fence_floats((size_t)n), factor = check_normal();
    memcpy(want, y, (size_t)n * 4);
    k->axpy(factor, x, n, y);
    generic->axpy(factor, x, n, want);
    CHECK_SAME(y, want, n, "%s axpy n %d", k->name, n);
    k->add(x, y, n, y);
    generic->add(x, want, n, want);
    CHECK_SAME(y, want, n, "%s add n %d", k->name, n);
    fence_release();
  }
}

static void test_rope(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int half = random_int(0, 70), head_dim = 2 * half + random_int(0, 20), interleaved = round & 1;
    float *x = random_floats((size_t)head_dim, round % VALUE_KINDS), *want = fence_floats((size_t)head_dim), *cs = random_floats((size_t)half * 2, VALUES_NORMAL);
    memcpy(want, x, (size_t)head_dim * 4);
    k->rope(x, cs, 2 * half, head_dim, interleaved, 0.125f);
    generic->rope(want, cs, 2 * half, head_dim, interleaved, 0.125f);
    CHECK_SAME(x, want, head_dim, "%s rope %d of %d, interleaved %d", k->name, 2 * half, head_dim, interleaved);
    fence_release();
  }
}

/* ---------------------------------------------------------------- logits */

/* Some logits equal, so that ties occur. */
static void test_top2(void) {
  for (int round = 0; round < 3 * ROUNDS; round++) {
    int experts = random_int(2, 16), n = random_int(0, 50), ld = experts + random_int(0, 3);
    size_t floats = n ? (size_t)((n - 1) * ld + experts) : 0, pairs = 2 * (size_t)n;
    float *z = random_floats(floats, round % 5 == 4 ? VALUES_ZERO : VALUES_NORMAL), *w = fence_floats(pairs), *w_want = fence_floats(pairs);
    int32_t *ids = fence_bytes(4 * pairs, 1), *ids_want = fence_bytes(4 * pairs, 1);
    for (size_t i = 0; round % 3 == 0 && i < floats; i++) z[i] = rintf(z[i]);
    int bad = k->top2_softmax(z, ld, experts, n, ids, w), bad_want = generic->top2_softmax(z, ld, experts, n, ids_want, w_want);
    CHECK(bad == -1 && bad_want == -1, "%s top2 finds a bad token %d, generic %d", k->name, bad, bad_want);
    CHECK(!memcmp(ids, ids_want, 4 * pairs), "%s top2 chooses others, %d experts, %d tokens", k->name, experts, n);
    CHECK_SAME(w, w_want, pairs, "%s top2 weights, %d experts, %d tokens", k->name, experts, n);
    if (n) {
      int t = random_int(0, n - 1);
      z[t * ld + random_int(0, experts - 1)] = not_finite();
      bad = k->top2_softmax(z, ld, experts, n, ids, w);
      CHECK(bad == t, "%s top2 says token %d is bad, it is %d", k->name, bad, t);
      for (size_t i = 0; i < pairs; i++) CHECK(ids[i] >= 0 && ids[i] < experts, "%s top2 gives expert %d", k->name, ids[i]);
    }
    fence_release();
  }
}

/* One call of top_k for both; the generic one is the reference. Some values are not finite if `poison`. */
static void check_top_k(int experts, int count, int n, int kind, int poison) {
  int ld = experts + random_int(0, 3);
  size_t floats = (size_t)((n - 1) * ld + experts), chosen = (size_t)(n * count);
  float *z = random_floats(floats, kind % VALUE_KINDS);
  int32_t *ids = fence_bytes(4 * chosen, 1), *want = fence_bytes(4 * chosen, 1);
  uint8_t *bad = fence_bytes((size_t)n, 1), *bad_want = fence_bytes((size_t)n, 1);
  for (size_t i = 0; kind == VALUE_KINDS && i < floats; i++) z[i] = rintf(4 * z[i]); /* ties */
  for (size_t i = 0; kind == VALUE_KINDS + 1 && i < floats; i++) z[i] = 1 + (float)(check_random() & 31) * 0x1p-23f; /* differ in the bits a key gives up */
  for (size_t i = 0; kind == VALUE_KINDS + 2 && i < floats; i++) z[i] = (check_random() & 1 ? 0x1p127f : -0x1p127f) * (0.5f + check_uniform()); /* sums overflow, values do not */
  for (int i = 0; poison && i < 3; i++) z[random_int(0, n - 1) * ld + random_int(0, experts - 1)] = not_finite();
  k->top_k(z, ld, experts, n, count, ids, bad);
  generic->top_k(z, ld, experts, n, count, want, bad_want);
  CHECK(!memcmp(bad, bad_want, (size_t)n), "%s top %d of %d, %d tokens, kind %d: other bad tokens", k->name, count, experts, n, kind);
  CHECK(!memcmp(ids, want, 4 * chosen), "%s top %d of %d, %d tokens, kind %d: other experts", k->name, count, experts, n, kind);
  fence_release();
}

static void test_top_k(void) {
  static const int experts[] = {1, 2, 3, 5, 7, 8, 9, 16, 32, 60, 64, 128, 160, 256, 1024}, tokens[] = {1, 3, 7, 16, 19, 33};
  for (int e = 0; e < 15; e++)
    for (int count = 1; count <= experts[e] && count <= COLIBRI_MAX_TOP_K; count += count < 10 ? 1 : count < 16 ? 6 : count < 32 ? 16 : 1)
      for (int t = 0; t < 6; t++)
        for (int kind = 0; kind < VALUE_KINDS + 3; kind++)
          if (experts[e] <= 64 || (t + kind + count) % 5 == 0) check_top_k(experts[e], count, tokens[t], kind, (t + kind) % 3 == 0);
}

/* Every choice of 0 and 1 for 16 experts sorts: what holds for those holds for all values. */
static void test_networks(void) {
  float z[16 * 16];
  int32_t ids[16 * 16];
  uint8_t bad[16];
  for (int bits = 0; bits < 1 << 16; bits += 16) {
    for (int t = 0; t < 16; t++)
      for (int e = 0; e < 16; e++) z[16 * t + e] = (float)((bits + t) >> e & 1) + (float)(15 - e) * 0x1p-10f; /* no ties */
    k->top_k(z, 16, 16, 16, 16, ids, bad);
    for (int t = 0; t < 16; t++)
      for (int i = 1; i < 16; i++) {
        float before = z[16 * t + ids[16 * t + i - 1]], after = z[16 * t + ids[16 * t + i]];
        CHECK(before > after, "%s top 16 of %04x: place %d", k->name, bits + t, i);
      }
  }
}

static void check_scores(int score, int experts, int n, int kind, int poison) {
  int ld = experts + random_int(0, 3);
  size_t floats = n ? (size_t)((n - 1) * ld + experts) : 0, all = (size_t)(n * experts);
  float *z = random_floats(floats, kind), *y = fence_floats(all), *want = fence_floats(all);
  uint8_t *bad = fence_bytes((size_t)n, 1), *bad_want = fence_bytes((size_t)n, 1);
  for (size_t i = 0; i < floats; i += 3) z[i] *= 40; /* past the exponential's ends */
  for (int i = 0; poison && n && i < 2; i++) z[random_int(0, n - 1) * ld + random_int(0, experts - 1)] = not_finite();
  k->scores(score, z, ld, experts, n, y, bad);
  generic->scores(score, z, ld, experts, n, want, bad_want);
  CHECK(!memcmp(bad, bad_want, (size_t)n), "%s scores %d of %d experts, %d tokens: other bad tokens", k->name, score, experts, n);
  for (int t = 0; t < n; t++)
    if (!bad[t]) CHECK_SAME(y + t * experts, want + t * experts, experts, "%s scores %d of %d experts, token %d of %d", k->name, score, experts, t, n);
  fence_release();
}

static void test_scores(void) {
  for (int round = 0; round < ROUNDS; round++)
    for (int score = COLIBRI_SCORE_SOFTMAX_ALL; score <= COLIBRI_SCORE_LOGITS; score++)
      check_scores(score, random_int(1, 70), random_int(0, 5), round % VALUE_KINDS, round % 3 == 0);
}

static void test_group_best(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int sum = round & 1, size = random_int(1 + sum, 40), groups = random_int(1, 9), n = random_int(0, 40);
    size_t all = (size_t)(groups * size * n), metrics = (size_t)(groups * n);
    float *s = random_floats(all, round % VALUE_KINDS), *metric = fence_floats(metrics), *want = fence_floats(metrics);
    for (size_t i = 0; round % 3 == 0 && i < all; i++) s[i] = rintf(s[i]);
    k->group_best(s, size, groups, n, sum, metric);
    generic->group_best(s, size, groups, n, sum, want);
    CHECK_SAME(metric, want, metrics, "%s group_best of %d groups of %d, %d tokens, sum %d", k->name, groups, size, n, sum);
    fence_release();
  }
}

static void test_exp(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int n = random_int(0, 70);
    float *x = random_floats((size_t)n, round % VALUE_KINDS), *want = fence_floats((size_t)n);
    for (int i = 0; i < n; i++) want[i] = x[i] = i % 5 ? x[i] * 40 : not_finite();
    k->exp(x, n);
    generic->exp(want, n);
    CHECK_SAME(x, want, n, "%s exp n %d", k->name, n);
    fence_release();
  }
}

static void test_argmax(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int n = random_int(1, 100);
    float *x = random_floats((size_t)n, round % VALUE_KINDS);
    for (int i = 0; round & 1 && i < n; i++) x[i] = rintf(x[i]);
    for (int i = 0; round % 3 == 0 && i < n; i++) x[i] = -fabsf(x[i]) - 1; /* nothing reaches the zeros an overread would bring */
    int32_t got = k->argmax(x, n), want = generic->argmax(x, n);
    CHECK(got == want, "%s argmax of %d is %d, generic %d", k->name, n, got, want);
    x[random_int(0, n - 1)] = not_finite();
    CHECK(k->argmax(x, n) == -1 && generic->argmax(x, n) == -1, "%s argmax misses a value that is not finite", k->name);
    fence_release();
  }
}

static void test_sum_exp(void) {
  for (int round = 0; round < ROUNDS; round++) {
    int n = random_int(0, 100);
    float *x = random_floats((size_t)n, round % VALUE_KINDS), shift = check_normal() * 10, got, want;
    if (n && round % 3 == 0) x[random_int(0, n - 1)] = -INFINITY;
    got = k->sum_exp(x, n, shift);
    want = generic->sum_exp(x, n, shift);
    CHECK_SAME(&got, &want, 1, "%s sum_exp n %d", k->name, n);
    fence_release();
  }
}

/* One element's sum_exp is the exponential itself: over all exponents, in 2^32 / 4099 steps, it is colibri_expf. */
static void test_exponential(void) {
  for (uint64_t u = 0; u < UINT64_C(1) << 32; u += 4099) {
    uint32_t bits = (uint32_t)u;
    float x, got, want;
    memcpy(&x, &bits, sizeof x);
    got = k->sum_exp(&x, 1, 0.0f);
    want = 0.0f + colibri_expf(x);
    CHECK_SAME(&got, &want, 1, "%s exp(%a)", k->name, (double)x);
  }
}

static void test_isa(const char *isa) {
  k = colibri_kernels_get();
  generic = colibri_kernels_generic();
  CHECK(!strcmp(k->name, isa) && !strcmp(colibri_isa_name(), isa), "%s selected, %s runs", isa, k->name);
  test_prepare();
  test_prepare_ties();
  test_prepare_error();
  test_rmsnorm();
  test_gate();
  test_silu_mul();
  test_axpy_and_add();
  test_rope();
  test_top2();
  test_top_k();
  test_networks();
  test_scores();
  test_group_best();
  test_exp();
  test_argmax();
  test_sum_exp();
  test_exponential();
}

int main(void) {
  colibri_error err;
  CHECK(colibri_isa_select("sse9", &err) == COLIBRI_EUNSUPPORTED && strstr(err.message, "sse9"), "an unknown set is refused by name: %s", err.message);
  check_each_isa(test_isa);
  return check_result("test_kernels");
}
