/* test_sampler.c - sampling against a float64 reference that sorts everything, and against the exact distribution.
 *
 * The reference draws with the same uniform number, so it is compared token by token; where the number falls within EDGE of a boundary between
 * two tokens either will do (f32 weights and sums against f64 ones). */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "check.h"
#include "sampler.h"

#define MAX_VOCAB 40000
#define EDGE 3e-5 /* of all mass: sum_exp adds up to 2500 f32 terms in each of 16 chains, an error of 1e-5 at the very worst seen */
#define LAYERS 11

static float logits[MAX_VOCAB + 16];
static char *memory;
static const colibri_sampling greedy = {.temperature = 0, .top_p = 1, .repetition_penalty = 1};

static colibri_row_result sample(const float *x, int32_t vocab, const colibri_sampling *p, int64_t position) {
  colibri_row_result out;
  colibri_sample(colibri_kernels_get(), x, vocab, p, position, NULL, 0, -1, LAYERS, memory, &out);
  return out;
}

/* ---------------------------------------------------------------- reference */

/* The generator as documented: splitmix64's finaliser of (hashed seed + position times the golden ratio), upper 53 bits. */
static uint64_t reference_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

static double reference_uniform(uint64_t seed, int64_t position) {
  uint64_t golden = UINT64_C(0x9E3779B97F4A7C15);
  return (double)(reference_mix(reference_mix(seed + golden) + golden * (uint64_t)position) >> 11) / 9007199254740992.0;
}

static const float *sort_by;
static int descending(const void *a, const void *b) {
  int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
  return sort_by[i] != sort_by[j] ? (sort_by[i] > sort_by[j] ? -1 : 1) : (i > j) - (i < j);
}

typedef struct distribution {
  int32_t vocab, kept;      /* the first `kept` in order can be drawn */
  int32_t *order;           /* [vocab] tokens by descending logit */
  double *p;                /* [vocab] probability of order[i], renormalised over the kept */
  bool unfiltered;          /* drawn in token order */
  bool boundary_is_close;   /* a hair more or less and `kept` would be another */
} distribution;

static double prefix(const double *w, int32_t n) {
  double sum = 0;
  for (int32_t i = 0; i < n; i++) sum += w[i];
  return sum;
}

/* Cuts d->kept to the shortest prefix that holds `share` of the mass. */
static void cut_top_p(distribution *d, double share) {
  double total = prefix(d->p, d->kept), sum = 0;
  for (int32_t i = 0; i < d->kept; i++) {
    sum += d->p[i];
    if (fabs(sum - share * total) < EDGE * total) d->boundary_is_close = true;
    if (sum >= share * total) {
      d->kept = i + 1;
      return;
    }
  }
}

static distribution make_distribution(const float *x, int32_t vocab, const colibri_sampling *s) {
  distribution d = {.vocab = vocab, .kept = vocab, .order = malloc((size_t)vocab * sizeof(int32_t)), .p = malloc((size_t)vocab * sizeof(double))};
  for (int32_t i = 0; i < vocab; i++) d.order[i] = i;
  sort_by = x;
  qsort(d.order, (size_t)vocab, sizeof *d.order, descending);
  for (int32_t i = 0; i < vocab; i++) d.p[i] = exp(((double)x[d.order[i]] - (double)x[d.order[0]]) / (double)s->temperature);
  if (s->top_k > 0 && s->top_k < vocab) d.kept = s->top_k;
  if (s->top_p < 1) cut_top_p(&d, (double)s->top_p);
  int32_t within = 0;
  for (; within < d.kept && d.p[within] >= (double)s->min_p; within++)
    if (s->min_p > 0 && fabs(d.p[within] / (double)s->min_p - 1) < 1e-5) d.boundary_is_close = true;
  d.kept = within;
  double total = prefix(d.p, d.kept);
  for (int32_t i = 0; i < vocab; i++) d.p[i] = i < d.kept ? d.p[i] / total : 0;
  d.unfiltered = (s->top_k == 0 || s->top_k >= vocab) && s->top_p >= 1 && s->min_p == 0;
  return d;
}

static void free_distribution(distribution *d) {
  free(d->order);
  free(d->p);
}

/* True if `token` is what the uniform number u draws, or could be by a rounding. */
static bool could_draw(const distribution *d, double u, int32_t token) {
  double below = 0, own = 0;
  for (int32_t i = 0; i < d->kept && d->unfiltered; i++) {
    if (d->order[i] < token) below += d->p[i];
    if (d->order[i] == token) own = d->p[i];
  }
  if (d->unfiltered) return u >= below - EDGE && u <= below + own + EDGE;
  for (int32_t i = 0; i < d->kept; below += d->p[i++])
    if (d->order[i] == token) return u >= below - EDGE && u <= below + d->p[i] + EDGE;
  return false;
}

/* ---------------------------------------------------------------- inputs */

enum shape { FLAT, PEAKED, BELL, TIES, EQUAL, STEEP, ZEROS, ALMOST_EQUAL, SHAPES };

static void fill(enum shape shape, int32_t vocab) {
  for (int32_t i = 0; i < vocab; i++) switch (shape) {
      case FLAT: logits[i] = check_uniform(); break;
      case PEAKED: logits[i] = check_random() % 500 ? check_normal() - 6 : 8 * check_uniform(); break;
      case BELL: logits[i] = 4 * check_normal(); break;
      case TIES: logits[i] = (float)(check_random() % 7); break;
      case EQUAL: logits[i] = 3.5f; break;
      case STEEP: logits[i] = -(float)((uint32_t)i * 7919u % (uint32_t)vocab) * 0.75f; break;
      case ZEROS: logits[i] = check_random() % 2 ? 0.0f : -0.0f; break; /* all ties */
      default: logits[i] = 1.0f + (float)(check_random() % 4) * 0x1p-23f; break;
    }
}

static const colibri_sampling filters[] = {
  {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
  {.temperature = 0.6f, .top_p = 1, .repetition_penalty = 1},
  {.temperature = 2.5f, .top_p = 1, .repetition_penalty = 1},
  {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .top_k = 1},
  {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .top_k = 40},
  {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .top_k = 3000},
  {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .top_k = 1000000},
  {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1},
  {.temperature = 1, .top_p = 0.01f, .repetition_penalty = 1},
  {.temperature = 1, .top_p = 0.999999f, .repetition_penalty = 1},
  {.temperature = 1, .top_p = 1, .min_p = 0.1f, .repetition_penalty = 1},
  {.temperature = 1, .top_p = 1, .min_p = 1e-7f, .repetition_penalty = 1},
  {.temperature = 1, .top_p = 0.999f, .min_p = 0.02f, .repetition_penalty = 1},
  {.temperature = 0.8f, .top_p = 0.95f, .min_p = 0.05f, .repetition_penalty = 1, .top_k = 50},
  {.temperature = 1.3f, .top_p = 0.7f, .repetition_penalty = 1, .top_k = 2000},
  {.temperature = 1e-6f, .top_p = 1, .repetition_penalty = 1},
  {.temperature = 1e-42f, .top_p = 0.5f, .repetition_penalty = 1},
};
enum { FILTERS = sizeof filters / sizeof *filters };

/* ---------------------------------------------------------------- tests */

static void every_draw_is_the_references(const char *isa) {
  static const int32_t vocabs[] = {1, 2, 15, 16, 17, 300, 5000, MAX_VOCAB};
  int close = 0, compared = 0;
  for (int v = 0; v < 8; v++)
    for (int shape = 0; shape < SHAPES; shape++) {
      fill(shape, vocabs[v]);
      for (int f = 0; f < FILTERS; f++) {
        if (vocabs[v] == MAX_VOCAB && (f + shape) % 8) continue; /* sorting it takes the reference long */
        distribution d = make_distribution(logits, vocabs[v], &filters[f]);
        colibri_sampling p = filters[f];
        close += d.boundary_is_close;
        for (int i = 0; i < 40 && !d.boundary_is_close; i++, compared++) {
          p.seed = (uint64_t)i << 33;
          int32_t token = sample(logits, vocabs[v], &p, 5 * i).token;
          CHECK(could_draw(&d, reference_uniform(p.seed, 5 * i), token), "%s vocab %d shape %d filter %d draw %d: token %d", isa, vocabs[v], shape, f, i,
                token);
        }
        free_distribution(&d);
      }
    }
  CHECK(compared > 40 * close, "only %d draws compared, %d cases had a boundary too close to tell", compared, close);
}

/* Chi-square at a chance of about 1e-6 (Wilson and Hilferty); the seeds are fixed, so this either always holds or never. */
static double chi_square_limit(double freedom) {
  double t = 1 - 2 / (9 * freedom) + 4.75 * sqrt(2 / (9 * freedom));
  return freedom * t * t * t;
}

static void frequencies_match_the_distribution(const char *isa) {
  enum { VOCAB = 60, DRAWS = 8000 };
  for (int shape = 0; shape < SHAPES; shape++)
    for (int f = 0; f < FILTERS; f++) {
      int counts[VOCAB] = {0};
      double chi = 0, rest = 0, rest_counts = 0, freedom = -1;
      fill(shape, VOCAB);
      distribution d = make_distribution(logits, VOCAB, &filters[f]);
      colibri_sampling p = filters[f];
      p.seed = 12345;
      for (int i = 0; i < DRAWS; i++) counts[sample(logits, VOCAB, &p, i).token]++;
      for (int i = 0; i < VOCAB; i++) {
        double expected = d.p[i] * DRAWS, seen = counts[d.order[i]];
        if (i >= d.kept && !d.boundary_is_close) CHECK(seen == 0, "%s shape %d filter %d: token %d was cut, yet drawn", isa, shape, f, d.order[i]);
        if (expected >= 5) chi += (seen - expected) * (seen - expected) / expected, freedom++;
        else rest += expected, rest_counts += seen;
      }
      if (rest >= 5) chi += (rest_counts - rest) * (rest_counts - rest) / rest, freedom++;
      if (freedom > 0 && !d.boundary_is_close)
        CHECK(chi < chi_square_limit(freedom), "%s shape %d filter %d: chi-square %.1f with %.0f degrees of freedom", isa, shape, f, chi, freedom);
      free_distribution(&d);
    }
}

static void seeds_and_positions_give_other_draws(const char *isa) {
  enum { VOCAB = 1000 };
  fill(EQUAL, VOCAB);
  int same_position = 0, same_seed = 0;
  for (int i = 0; i < 1000; i++) {
    colibri_sampling a = filters[0], b = filters[0];
    a.seed = (uint64_t)i;
    b.seed = (uint64_t)i + 1;
    same_position += sample(logits, VOCAB, &a, 7).token == sample(logits, VOCAB, &b, 7).token;
    same_seed += sample(logits, VOCAB, &a, i).token == sample(logits, VOCAB, &a, i + 1).token;
  }
  /* 1 expected of each; 12 or more would be a chance of 1e-9 */
  CHECK(same_position < 12 && same_seed < 12, "%s: %d equal over seeds, %d over positions", isa, same_position, same_seed);
}

static void greedy_takes_the_lowest_of_equals(const char *isa) {
  static const int32_t vocabs[] = {1, 2, 16, 17, 31, 33, 1000};
  for (int v = 0; v < 7; v++)
    for (int i = 0; i < 50; i++) {
      fill(TIES, vocabs[v]);
      int32_t first = (int32_t)(check_random() % (uint32_t)vocabs[v]), second = (int32_t)(check_random() % (uint32_t)vocabs[v]);
      logits[first] = logits[second] = 9;
      int32_t want = first < second ? first : second;
      CHECK(sample(logits, vocabs[v], &greedy, i).token == want, "%s vocab %d: maxima at %d and %d", isa, vocabs[v], first, second);
    }
  fill(EQUAL, 1000);
  CHECK(sample(logits, 1000, &greedy, 0).token == 0, "%s: all equal", isa);
}

/* Scratch contents, alignment of the logits and repetition change nothing; the logits are left alone. */
static void a_draw_depends_on_its_arguments_alone(const char *isa) {
  static float copy[5000], moved[5016];
  int32_t history[] = {4, 4, 17, 4999, 0};
  fill(BELL, 5000);
  memcpy(copy, logits, sizeof copy);
  for (int i = 0; i < 200; i++) {
    colibri_sampling p = filters[i % FILTERS];
    colibri_row_result a, b;
    p.repetition_penalty = i % 3 ? 1.2f : 1;
    p.top_logprobs = i % 21;
    p.seed = (uint64_t)i;
    int shift = i % 16;
    memcpy(moved + shift, copy, sizeof copy);
    memset(memory, 0xA5, colibri_sampler_scratch_bytes(5000));
    colibri_sample(colibri_kernels_get(), logits, 5000, &p, i, history, 5, i, LAYERS, memory, &a);
    memset(memory, 0x00, colibri_sampler_scratch_bytes(5000));
    colibri_sample(colibri_kernels_get(), moved + shift, 5000, &p, i, history, 5, i, LAYERS, memory + 1, &b);
    CHECK(!memcmp(&a, &b, sizeof a), "%s draw %d: tokens %d and %d", isa, i, a.token, b.token);
  }
  CHECK(!memcmp(copy, logits, sizeof copy), "%s: the logits were modified", isa);
}

/* Greedy under a penalty shows exactly which logits were changed and to what. */
static void penalty_counts_a_token_once(const char *isa) {
  colibri_sampling p = greedy;
  colibri_row_result out;
  int32_t history[] = {2, 2, 2, 5, -1, 1 << 30};
  p.repetition_penalty = 2;
  fill(EQUAL, 20);
  for (int i = 0; i < 20; i++) logits[i] = -8;
  logits[2] = 4;   /* 4 / 2 = 2 with the penalty once, 0.5 if it were applied three times */
  logits[3] = 1.9f;
  colibri_sample(colibri_kernels_get(), logits, 20, &p, 0, history, 6, -1, LAYERS, memory, &out);
  CHECK(out.token == 2, "%s: token %d, want 2", isa, out.token);
  logits[3] = 2.1f;
  colibri_sample(colibri_kernels_get(), logits, 20, &p, 0, history, 6, -1, LAYERS, memory, &out);
  CHECK(out.token == 3, "%s: token %d, want 3", isa, out.token);
  logits[2] = logits[3] = -8;
  logits[5] = -5; /* -5 * 2 = -10: behind the others */
  colibri_sample(colibri_kernels_get(), logits, 20, &p, 0, history, 6, -1, LAYERS, memory, &out);
  CHECK(out.token == 0, "%s: token %d, want 0", isa, out.token);
  logits[5] = FLT_MAX;
  p.repetition_penalty = 1e-3f; /* overflows: stays the largest finite number */
  colibri_sample(colibri_kernels_get(), logits, 20, &p, 0, history, 6, -1, LAYERS, memory, &out);
  CHECK(out.token == 5 && out.status == COLIBRI_OK, "%s: token %d status %d", isa, out.token, out.status);
  p.temperature = 1;
  colibri_sample(colibri_kernels_get(), logits, 20, &p, 0, history, 6, -1, LAYERS, memory, &out);
  CHECK(out.token == 5 && out.status == COLIBRI_OK, "%s: token %d status %d at temperature 1", isa, out.token, out.status);
}

static void check_logprobs(const char *isa, int32_t vocab, const colibri_sampling *p, int32_t target) {
  int32_t history[] = {1, 2, 3};
  colibri_row_result out;
  colibri_sampling exact = {.temperature = 1, .top_p = 1};
  distribution d = make_distribution(logits, vocab, &exact);
  colibri_sample(colibri_kernels_get(), logits, vocab, p, 3, history, 3, target, LAYERS, memory, &out);
  int want_top = p->top_logprobs < vocab ? p->top_logprobs : vocab;
  CHECK(out.n_top == want_top, "%s vocab %d: %d top, want %d", isa, vocab, out.n_top, want_top);
  for (int32_t i = 0, rank = -1; i < vocab; i++) {
    if (i == 0 || logits[d.order[i]] != logits[d.order[i - 1]]) rank = i;
    double want = log(d.p[i]), tolerance = 4e-5 + 2e-7 * fabs(want); /* EDGE on the sum, f32 rounding of the result */
    if (i < want_top)
      CHECK(out.top_tokens[i] == d.order[i] && fabs((double)out.top_logprobs[i] - want) < tolerance, "%s vocab %d place %d: token %d %g, want %d %g", isa,
            vocab, i, out.top_tokens[i], (double)out.top_logprobs[i], d.order[i], want);
    if (d.order[i] == out.token)
      CHECK(fabs((double)out.logprob - want) < tolerance, "%s vocab %d token %d: %g, want %g", isa, vocab, out.token, (double)out.logprob, want);
    if (d.order[i] == target)
      CHECK(out.target_rank == rank && fabs((double)out.target_logprob - want) < tolerance, "%s vocab %d target %d: rank %d %g, want %d %g", isa, vocab,
            target, out.target_rank, (double)out.target_logprob, rank, want);
  }
  if (target < 0) CHECK(out.target_rank == -1 && out.target_logprob == 0, "%s: a rank without a target", isa);
  free_distribution(&d);
}

/* Log-probabilities are of the unpenalised distribution at temperature 1, whatever the parameters. */
static void logprobs_match_float64(const char *isa) {
  static const int32_t vocabs[] = {1, 5, 19, 20, 21, 700, 9000};
  for (int v = 0; v < 7; v++)
    for (int shape = 0; shape < SHAPES; shape++) {
      if (shape == STEEP && vocabs[v] > 100) continue; /* log of 0 in the reference */
      fill(shape, vocabs[v]);
      for (int top = 0; top <= 20; top += 5) {
        colibri_sampling p = filters[(v + shape + top) % FILTERS];
        p.top_logprobs = top;
        p.repetition_penalty = top % 2 ? 1.3f : 1;
        check_logprobs(isa, vocabs[v], &p, top == 15 ? -1 : (int32_t)(check_random() % (uint32_t)vocabs[v]));
      }
    }
}

static void nan_and_infinity_are_named(const char *isa) {
  static const float poisons[] = {NAN, -NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 400; i++) {
    int32_t vocab = 1 + (int32_t)(check_random() % 200);
    fill(BELL, vocab);
    logits[check_random() % (uint32_t)vocab] = poisons[i % 4];
    colibri_row_result out = sample(logits, vocab, i % 2 ? &filters[i % FILTERS] : &greedy, i);
    CHECK(out.status == COLIBRI_ENUMERIC && out.error_layer == LAYERS && out.token == 0, "%s vocab %d: status %d layer %d token %d", isa, vocab,
          out.status, out.error_layer, out.token);
  }
  fill(BELL, 100);
  colibri_row_result out = sample(logits, 100, &greedy, 0);
  CHECK(out.status == COLIBRI_OK && out.error_layer == -1, "%s: a sound row is reported as bad", isa);
}

/* The token stream is the same on every instruction set: a digest of many draws must not depend on it. */
static void every_isa_draws_the_same(const char *isa) {
  static uint64_t first_digest;
  uint64_t digest = 1469598103934665603u;
  check_state = 99;
  for (int shape = 0; shape < SHAPES; shape++) {
    fill(shape, 3000);
    for (int i = 0; i < 20 * FILTERS; i++) {
      colibri_sampling p = filters[i % FILTERS];
      p.seed = 42;
      digest = (digest ^ (uint64_t)sample(logits, 3000, &p, i).token) * 1099511628211u;
    }
  }
  if (!first_digest) first_digest = digest;
  CHECK(digest == first_digest, "%s draws other tokens than the set before it", isa);
}

static void all(const char *isa) {
  static bool again;
  every_isa_draws_the_same(isa);
  if (!again) frequencies_match_the_distribution(isa); /* long; the other sets draw the same tokens, see above */
  again = true;
  greedy_takes_the_lowest_of_equals(isa);
  every_draw_is_the_references(isa);
  seeds_and_positions_give_other_draws(isa);
  a_draw_depends_on_its_arguments_alone(isa);
  penalty_counts_a_token_once(isa);
  logprobs_match_float64(isa);
  nan_and_infinity_are_named(isa);
}

int main(void) {
  memory = malloc(colibri_sampler_scratch_bytes(MAX_VOCAB) + 1);
  if (!memory) return 2;
  check_each_isa(all);
  free(memory);
  return check_result("test_sampler");
}
