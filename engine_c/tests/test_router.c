/* test_router.c - routing against a float64 reference over a sweep of experts x k, special values, and the fast path's bits. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "check.h"
#include "router.h"

#define MAX_E 1024
#define MAX_N 67

static const colibri_router_layer plain_layer;

static const int expert_counts[] = {1, 2, 3, 5, 7, 8, 16, 17, 60, 64, 128, 256, 1024};
static const int token_counts[] = {1, 2, 7, 15, 16, 17, 33, MAX_N};

/* ---------------------------------------------------------------- reference */

static bool comes_before(const float *z, int a, int b) { return z[a] > z[b] || (z[a] == z[b] && a < b); }

/* Selection by k scans for the best not yet taken; weights in double. */
static void reference(const colibri_router *r, const float *z, int32_t *ids, double *weights) {
  bool taken[MAX_E] = {false};
  double sum = 0;
  for (int i = 0; i < r->k; i++) {
    int best = -1;
    for (int e = 0; e < r->experts; e++)
      if (!taken[e] && (best < 0 || comes_before(z, e, best))) best = e;
    taken[best] = true;
    ids[i] = best;
    weights[i] = exp((double)z[best] - (double)z[ids[0]]);
    sum += weights[i];
  }
  if (r->weight == COLIBRI_WEIGHT_SCORE) {
    sum = 0;
    for (int e = 0; e < r->experts; e++) sum += exp((double)z[e] - (double)z[ids[0]]);
  }
  for (int i = 0; i < r->k; i++) weights[i] = weights[i] / sum * (double)r->scale;
}

/* ---------------------------------------------------------------- inputs */

enum fill { FILL_NORMAL, FILL_TIES, FILL_EQUAL, FILL_HUGE, FILL_DENORMAL, FILL_ZEROS, FILL_ASCENDING, FILL_DESCENDING, FILLS };

static float fill_value(enum fill fill, int e) {
  switch (fill) {
    case FILL_NORMAL: return 3 * check_normal();
    case FILL_TIES: return (float)(check_random() % 3);
    case FILL_EQUAL: return -7.25f;
    case FILL_HUGE: return check_random() % 2 ? FLT_MAX * check_uniform() : -FLT_MAX * check_uniform();
    case FILL_DENORMAL: return (float)(check_random() % 1000) * 0x1p-149f;
    case FILL_ZEROS: return check_random() % 2 ? 0.0f : -0.0f;
    case FILL_ASCENDING: return (float)e * 0.125f;
    default: return (float)e * -0.125f;
  }
}

static void fill_logits(enum fill fill, float *z, int ld, int experts, int n) {
  for (int t = 0; t < n; t++)
    for (int e = 0; e < ld; e++) z[t * ld + e] = e < experts ? fill_value(fill, e) : NAN; /* what lies between rows is not to be read */
}

/* ---------------------------------------------------------------- tests */

static float z[MAX_N * (MAX_E + 3)];
static int32_t ids[MAX_N * COLIBRI_MAX_TOP_K];
static float weights[MAX_N * COLIBRI_MAX_TOP_K];
static uint8_t bad[MAX_N];

static void compare_token(const char *isa, const colibri_router *r, enum fill fill, int ld, int t) {
  int32_t want_ids[COLIBRI_MAX_TOP_K];
  double want[COLIBRI_MAX_TOP_K], sum = 0, want_sum = 0;
  reference(r, z + t * ld, want_ids, want);
  CHECK(bad[t] == 0, "%s E %d k %d fill %d token %d", isa, r->experts, r->k, fill, t);
  for (int i = 0; i < r->k; i++) {
    CHECK(ids[t * r->k + i] == want_ids[i], "%s E %d k %d fill %d token %d place %d: %d, not %d", isa, r->experts, r->k, fill, t, i,
          ids[t * r->k + i], want_ids[i]);
    /* exp is good to about 2 ulp, z - max rounds once (half an ulp of up to 90: 4e-6 relative), the sum to E ulp at worst */
    CHECK(fabs(weights[t * r->k + i] - want[i]) <= 8e-6 * want[i] + 1e-37, "%s E %d k %d fill %d token %d place %d: %.9g, not %.9g", isa, r->experts,
          r->k, fill, t, i, (double)weights[t * r->k + i], want[i]);
    sum += weights[t * r->k + i];
    want_sum += want[i];
  }
  CHECK(fabs(sum - want_sum) <= 4e-6 * want_sum, "%s E %d k %d: weights sum to %g, not %g", isa, r->experts, r->k, sum, want_sum);
}

static void sweep_one(const char *isa, int experts, int k, int weight, float scale) {
  colibri_router r = {.weight = weight, .k = k, .experts = experts, .scale = scale};
  for (int fill = 0; fill < FILLS; fill++) {
    int n = token_counts[check_random() % 8], ld = experts + (int)(check_random() % 4);
    fill_logits(fill, z, ld, experts, n);
    memset(bad, 7, sizeof bad);
    colibri_route(&r, &plain_layer, colibri_kernels_get(), z, ld, n, ids, weights, bad);
    for (int t = 0; t < n; t++) compare_token(isa, &r, fill, ld, t);
  }
}

static void sweep(const char *isa) {
  for (size_t i = 0; i < sizeof expert_counts / sizeof *expert_counts; i++) {
    int experts = expert_counts[i], ks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, experts < COLIBRI_MAX_TOP_K ? experts : COLIBRI_MAX_TOP_K};
    for (int j = 0; j < 11; j++)
      for (int weight = 0; weight < 2; weight++)
        if (ks[j] <= experts) sweep_one(isa, experts, ks[j], weight, j % 2 ? 1.0f : 2.5f);
  }
}

/* A 17th expert that cannot be chosen forces the general path: same ids, same bits of the weights. */
static void fast_path_has_the_general_paths_bits(const char *isa) {
  static float wide[MAX_N * 17], general[MAX_N * 2];
  static int32_t general_ids[MAX_N * 2];
  for (int experts = 2; experts <= 16; experts++)
    for (int fill = 0; fill < FILLS; fill++) {
      colibri_router r = {.weight = COLIBRI_WEIGHT_SOFTMAX_CHOSEN, .k = 2, .experts = experts, .scale = 1.0f}, general_r = r;
      general_r.experts = 17;
      fill_logits(fill, z, experts, experts, MAX_N);
      for (int t = 0; t < MAX_N; t++)
        for (int e = 0; e < 17; e++) wide[t * 17 + e] = e < experts ? z[t * experts + e] : -FLT_MAX;
      colibri_route(&r, &plain_layer, colibri_kernels_get(), z, experts, MAX_N, ids, weights, bad);
      colibri_route(&general_r, &plain_layer, colibri_kernels_get(), wide, 17, MAX_N, general_ids, general, bad);
      CHECK(!memcmp(ids, general_ids, sizeof general_ids), "%s E %d fill %d: other experts", isa, experts, fill);
      CHECK(!memcmp(weights, general, sizeof general), "%s E %d fill %d: other bits", isa, experts, fill);
    }
}

/* A NaN or infinity marks its own token and no other. */
static void poison_stays_in_its_row(const char *isa) {
  static const float poisons[] = {NAN, -NAN, INFINITY, -INFINITY};
  static const int shapes[][2] = {{1, 1}, {2, 2}, {8, 2}, {16, 2}, {17, 2}, {64, 8}};
  for (int s = 0; s < 6; s++)
    for (int i = 0; i < 64; i++) {
      int experts = shapes[s][0], k = shapes[s][1], poisoned = i % MAX_N, second = (i * 7 + 3) % MAX_N;
      colibri_router r = {.weight = COLIBRI_WEIGHT_SOFTMAX_CHOSEN, .k = k, .experts = experts, .scale = 1.0f};
      fill_logits(FILL_NORMAL, z, experts, experts, MAX_N);
      z[poisoned * experts + (int)(check_random() % (unsigned)experts)] = poisons[i % 4];
      z[second * experts + experts - 1] = poisons[(i + 1) % 4];
      colibri_route(&r, &plain_layer, colibri_kernels_get(), z, experts, MAX_N, ids, weights, bad);
      for (int t = 0; t < MAX_N; t++) {
        bool want = t == poisoned || t == second;
        CHECK(bad[t] == want, "%s E %d k %d: token %d, poison in %d and %d", isa, experts, k, t, poisoned, second);
        if (!want) compare_token(isa, &r, FILL_NORMAL, experts, t);
        for (int j = 0; j < k && want; j++)
          CHECK(ids[t * k + j] == j && weights[t * k + j] == 0, "%s: a bad token's route is not the neutral one", isa);
      }
    }
}

/* A token's route does not depend on its neighbours or its place in the call. */
static void rows_are_independent(const char *isa) {
  static const int shapes[][2] = {{8, 2}, {13, 2}, {64, 8}};
  for (int s = 0; s < 3; s++) {
    int experts = shapes[s][0], k = shapes[s][1];
    colibri_router r = {.weight = COLIBRI_WEIGHT_SOFTMAX_CHOSEN, .k = k, .experts = experts, .scale = 1.0f};
    fill_logits(FILL_NORMAL, z, experts, experts, MAX_N);
    colibri_route(&r, &plain_layer, colibri_kernels_get(), z, experts, MAX_N, ids, weights, bad);
    for (int t = 0; t < MAX_N; t++) {
      int32_t one_id[COLIBRI_MAX_TOP_K];
      float one[COLIBRI_MAX_TOP_K];
      uint8_t one_bad;
      colibri_route(&r, &plain_layer, colibri_kernels_get(), z + t * experts, experts, 1, one_id, one, &one_bad);
      CHECK(!memcmp(one_id, ids + t * k, sizeof *ids * (size_t)k) && !memcmp(one, weights + t * k, sizeof *weights * (size_t)k),
            "%s E %d token %d routed alone differs", isa, experts, t);
    }
  }
}

/* ---------------------------------------------------------------- the parts */

static float random_vector[2][MAX_E]; /* a selection bias, factors */

/* Every kind of router in turn, with a layer's vectors in some of them. */
static colibri_router any_router(int i, colibri_router_layer *layer) {
  colibri_router r = {.experts = 64, .k = 1 + i % 8, .score = i % 4, .weight = i / 4 % 4, .scale = i % 3 ? 1.0f : 2.5f};
  r.renorm = i / 16 % 2;
  r.renorm_eps = r.renorm && i % 5 == 0 ? 1e-6f : 0;
  r.jitter_eps = r.weight == COLIBRI_WEIGHT_SPARSEMIXER ? 0.1f : 0;
  if (i / 32 % 3) r.n_group = 8, r.topk_group = 3, r.group_metric = i / 32 % 3 - 1, r.group_mask = i / 96 % 2;
  for (int e = 0; e < 64; e++) random_vector[0][e] = 0.2f * check_normal(), random_vector[1][e] = 0.5f + check_uniform();
  *layer = (colibri_router_layer){.select_bias = i / 192 % 2 ? random_vector[0] : NULL, .expert_scale = i % 7 ? NULL : random_vector[1]};
  return r;
}

/* What routing is made of gives what routing gives: weights of its own choice bit by bit; scores in the order of its choice, no other above. */
static void parts_agree_with_the_whole(const char *isa) {
  static float scores[MAX_N * 64], again[MAX_N * 8];
  const colibri_kernels *k = colibri_kernels_get();
  for (int i = 0; i < 384; i++) {
    colibri_router_layer layer;
    colibri_router r = any_router(i, &layer);
    colibri_error err;
    CHECK(colibri_router_check(&r, &err) == COLIBRI_OK, "%s router %d: %s", isa, i, err.message);
    fill_logits(FILL_NORMAL, z, 66, 64, MAX_N);
    z[66 * 5 + 7] = NAN;
    colibri_route(&r, &layer, k, z, 66, MAX_N, ids, weights, bad);
    CHECK(bad[5] == 1, "%s router %d: the NaN goes unseen", isa, i);
    colibri_route_weigh(&r, &layer, k, z, 66, MAX_N, ids, bad, again);
    CHECK(!memcmp(weights, again, sizeof *weights * (size_t)(MAX_N * r.k)), "%s router %d: other weights for the same experts", isa, i);
    colibri_route_select_scores(&r, &layer, k, z, 66, MAX_N, scores);
    for (int t = 0; t < MAX_N; t++) {
      const float *s = scores + t * 64;
      bool taken[64] = {false};
      for (int j = 0; j < r.k && t != 5; j++) {
        int e = ids[t * r.k + j], before = j ? ids[t * r.k + j - 1] : e;
        CHECK(s[before] > s[e] || before <= e, "%s router %d token %d: place %d is out of order", isa, i, t, j);
        taken[e] = true;
      }
      float last = s[ids[t * r.k + r.k - 1]];
      for (int e = 0; e < 64 && t != 5; e++) CHECK(taken[e] || s[e] <= last, "%s router %d token %d: expert %d was passed over", isa, i, t, e);
    }
  }
}

/* Weights of experts that were not the best are finite, and those of a softmax sum to 1: what damping asks for. */
static void given_experts_are_weighed(const char *isa) {
  for (int i = 0; i < 384; i++) {
    colibri_router_layer layer;
    colibri_router r = any_router(i, &layer);
    r.n_group = 0, r.topk_group = 0;
    fill_logits(FILL_NORMAL, z, 64, 64, MAX_N);
    memset(bad, 0, sizeof bad);
    for (int t = 0; t < MAX_N; t++)
      for (int j = 0; j < r.k; j++) ids[t * r.k + j] = (t * 5 + j * 9) % 64;
    colibri_route_weigh(&r, &layer, colibri_kernels_get(), z, 64, MAX_N, ids, bad, weights);
    for (int t = 0; t < MAX_N; t++) {
      double sum = 0;
      for (int j = 0; j < r.k; j++) {
        CHECK(isfinite(weights[t * r.k + j]), "%s router %d token %d: weight %g", isa, i, t, (double)weights[t * r.k + j]);
        sum += weights[t * r.k + j];
      }
      if (r.weight == COLIBRI_WEIGHT_SOFTMAX_CHOSEN && !r.renorm && !layer.expert_scale && layer.select_bias)
        CHECK(fabs(sum - (double)r.scale) < 1e-5, "%s router %d token %d: weights sum to %g", isa, i, t, sum);
    }
  }
}

static void all(const char *isa) {
  sweep(isa);
  fast_path_has_the_general_paths_bits(isa);
  poison_stays_in_its_row(isa);
  rows_are_independent(isa);
  parts_agree_with_the_whole(isa);
  given_experts_are_weighed(isa);
}

int main(void) {
  check_each_isa(all);
  return check_result("test_router");
}
