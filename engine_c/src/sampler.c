/* sampler.c - logits to a token.
 *
 * Without a filter a draw walks the vocabulary in token order, by blocks. What top-k, top-p and min-p keep is always a prefix of the
 * candidates in descending order, and such a draw walks that. Nothing is sorted as a whole: the candidates near the maximum (nearly always
 * all that matter) are dealt into buckets of descending logit, a bucket's mass is summed when it is reached, and only a bucket that holds a
 * boundary is sorted. If a boundary lies below the candidates taken first, it is done over with more of them. */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define FULL_DEPTH 103.0f /* nats below the maximum at which exp() becomes 0 in f32: such candidates can never be drawn */
#define WALK 256          /* candidates of a block whose mass is summed at once when nothing is filtered */
#define BUCKETS 1024
#define BUCKET_SHARE 8    /* candidates a bucket should hold */
#define INSERTION 48      /* up to so many keys insertion beats a radix sort with its 256 counters a pass */
#define BLOCK 16          /* logits tested at once for being worth a look */

/* A candidate as a sort key, ascending = descending logit, ties by index: high half the reversed order bits, low half the token. */
typedef uint64_t candidate;

typedef struct scratch {
  float *penalised;     /* [vocab] */
  float *depth;         /* [vocab] (logit - maximum) / temperature, <= 0 */
  candidate *gathered;  /* [vocab]; free for other use once dealt */
  candidate *dealt;     /* [vocab] bucket after bucket */
} scratch;

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t colibri_sampler_scratch_bytes(int32_t vocab) {
  size_t n = (size_t)vocab;
  return 64 + 2 * padded(n * sizeof(float)) + 2 * padded(n * sizeof(candidate));
}

static scratch carve(void *memory, int32_t vocab) {
  char *p = (char *)padded((uintptr_t)memory);
  size_t floats = padded((size_t)vocab * sizeof(float)), keys = padded((size_t)vocab * sizeof(candidate));
  return (scratch){(void *)p, (void *)(p + floats), (void *)(p + 2 * floats), (void *)(p + 2 * floats + keys)};
}

/* ---------------------------------------------------------------- random numbers */

/* The finaliser of splitmix64: a bijection that mixes every bit into every other. */
static uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

/* Uniform in [0, 1), 53 bits, a function of its arguments: draw number `position` of the stream that `seed` starts. */
static double uniform(uint64_t seed, int64_t position) {
  const uint64_t golden = UINT64_C(0x9E3779B97F4A7C15);
  uint64_t x = mix(mix(seed + golden) + golden * (uint64_t)position);
  return (double)(x >> 11) * 0x1p-53;
}

/* ---------------------------------------------------------------- candidates in order */

/* The candidates down to some depth, dealt into buckets. */
typedef struct order {
  const colibri_kernels *kernels;
  scratch s;
  float depth;                   /* all candidates down to here are in */
  float scale;                   /* bucket = -depth * scale */
  int32_t n, buckets;
  int32_t start[BUCKETS + 1];
  float mass[BUCKETS];           /* sum of weights, -1 while unknown */
  bool sorted[BUCKETS];
} order;

static candidate make_candidate(float logit, int32_t token) {
  uint32_t bits;
  logit += 0.0f; /* -0 becomes 0: the two are a tie */
  memcpy(&bits, &logit, sizeof bits);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffffu; /* a float's bits, so that larger floats give smaller numbers */
  return (uint64_t)bits << 32 | (uint32_t)token;
}

static int32_t token_of(candidate c) { return (int32_t)(uint32_t)c; }

static int bucket_of(const order *o, candidate c) {
  float at = -o->s.depth[token_of(c)] * o->scale;
  return at < (float)o->buckets ? (int)at : o->buckets - 1;
}

static bool any_above(const float *x, int n, float limit) {
  int any = 0;
  for (int i = 0; i < n; i++) any |= x[i] > limit;
  return any;
}

/* Collects the candidates within o->depth, in ascending token. */
static void gather(order *o, const float *logits, int32_t vocab) {
  const float *depth = o->s.depth;
  int32_t n = 0;
  for (int32_t i = 0; i < vocab; i += BLOCK) {
    int32_t end = vocab - i < BLOCK ? vocab : i + BLOCK;
    if (!any_above(depth + i, end - i, -o->depth)) continue;
    for (int32_t j = i; j < end; j++) {
      o->s.gathered[n] = make_candidate(logits[j], j);
      n += depth[j] > -o->depth;
    }
  }
  o->n = n;
}

/* Deals the candidates into buckets by a counting sort, which keeps ascending tokens inside each. */
static void deal(order *o) {
  o->buckets = o->n / BUCKET_SHARE < 1 ? 1 : o->n / BUCKET_SHARE > BUCKETS ? BUCKETS : o->n / BUCKET_SHARE;
  o->scale = (float)o->buckets / o->depth;
  memset(o->start, 0, sizeof o->start);
  for (int32_t i = 0; i < o->n; i++) o->start[bucket_of(o, o->s.gathered[i]) + 1]++;
  for (int b = 0; b < o->buckets; b++) {
    o->start[b + 1] += o->start[b];
    o->mass[b] = -1;
    o->sorted[b] = false;
  }
  int32_t next[BUCKETS];
  memcpy(next, o->start, sizeof next);
  for (int32_t i = 0; i < o->n; i++) o->s.dealt[next[bucket_of(o, o->s.gathered[i])]++] = o->s.gathered[i];
}

static void insertion_sort(candidate *c, int32_t n) {
  for (int32_t i = 1; i < n; i++) {
    candidate held = c[i];
    int32_t j = i;
    for (; j > 0 && c[j - 1] > held; j--) c[j] = c[j - 1];
    c[j] = held;
  }
}

/* Least significant byte first over the order bits alone: the sort is stable and the tokens already ascend. Four passes end in c. */
static void radix_sort(candidate *c, candidate *other, int32_t n) {
  for (int shift = 32; shift < 64; shift += 8) {
    int32_t at[256] = {0};
    for (int32_t i = 0; i < n; i++) at[c[i] >> shift & 255]++;
    for (int32_t digit = 0, sum = 0; digit < 256; digit++) {
      int32_t count = at[digit];
      at[digit] = sum;
      sum += count;
    }
    for (int32_t i = 0; i < n; i++) other[at[c[i] >> shift & 255]++] = c[i];
    candidate *swap = c;
    c = other;
    other = swap;
  }
}

static void sort_bucket(order *o, int b) {
  int32_t n = o->start[b + 1] - o->start[b];
  if (o->sorted[b]) return;
  if (n <= INSERTION) insertion_sort(o->s.dealt + o->start[b], n);
  else radix_sort(o->s.dealt + o->start[b], o->s.gathered, n);
  o->sorted[b] = true;
}

/* ---------------------------------------------------------------- masses and prefixes */

static float weight_at(const order *o, int32_t i) { return colibri_expf(o->s.depth[token_of(o->s.dealt[i])]); }

static double bucket_mass(order *o, int b) {
  if (o->mass[b] >= 0) return o->mass[b];
  int32_t n = o->start[b + 1] - o->start[b];
  float *depths = (void *)o->s.gathered;
  for (int32_t i = 0; i < n; i++) depths[i] = o->s.depth[token_of(o->s.dealt[o->start[b] + i])];
  o->mass[b] = o->kernels->sum_exp(depths, n, 0.0f);
  return o->mass[b];
}

/* Sum of the weights of the first `count` candidates. */
static double prefix_mass(order *o, int32_t count) {
  double sum = 0;
  int b = 0;
  for (; b < o->buckets && o->start[b + 1] <= count; b++) sum += bucket_mass(o, b);
  if (b == o->buckets || o->start[b] >= count) return sum;
  sort_bucket(o, b);
  for (int32_t i = o->start[b]; i < count; i++) sum += weight_at(o, i);
  return sum;
}

/* Index of the first candidate at which the running sum of weights reaches `target`; -1 if the first `limit` do not reach it. */
static int32_t locate(order *o, double target, int32_t limit) {
  double sum = 0;
  for (int b = 0; b < o->buckets && o->start[b] < limit; b++) {
    int32_t end = o->start[b + 1] < limit ? o->start[b + 1] : limit;
    if (end == o->start[b + 1] && sum + bucket_mass(o, b) < target) {
      sum += bucket_mass(o, b);
      continue;
    }
    sort_bucket(o, b);
    for (int32_t i = o->start[b]; i < end; i++) {
      sum += weight_at(o, i);
      if (sum >= target) return i;
    }
  }
  return -1;
}

/* Candidates whose depth is at least `least`. */
static int32_t count_within(order *o, float least) {
  int32_t count = 0;
  for (int b = 0; b < o->buckets; b++) {
    int32_t before = count;
    for (int32_t i = o->start[b]; i < o->start[b + 1]; i++) count += o->s.depth[token_of(o->s.dealt[i])] >= least;
    if (count - before < o->start[b + 1] - o->start[b]) break;
  }
  return count;
}

/* ---------------------------------------------------------------- drawing */

/* Draws among the candidates within o->depth; total: sum of all weights. -1 if the answer depends on candidates below that. */
static int32_t draw(order *o, const colibri_sampling *p, double total, double u) {
  bool complete = o->depth == FULL_DEPTH, cut_by_k = p->top_k > 0, bounded = cut_by_k;
  float least = p->min_p > 0 ? logf(p->min_p) : -INFINITY;
  bool cut_by_min = p->min_p > 0 && (complete || least > -o->depth);
  int32_t limit = o->n;
  if (cut_by_k && p->top_k > o->n && !complete) return -1;
  if (cut_by_k) {
    limit = p->top_k < o->n ? p->top_k : o->n;
    total = prefix_mass(o, limit);
  }
  if (p->top_p < 1) {
    int32_t last = locate(o, (double)p->top_p * total, limit);
    if (last < 0 && !complete && !cut_by_k && !cut_by_min) return -1;
    if (last >= 0) limit = last + 1;
    bounded |= last >= 0;
  }
  if (cut_by_min) {
    int32_t count = count_within(o, least);
    limit = count < limit ? count : limit;
    bounded = true;
  }
  if (bounded) total = prefix_mass(o, limit);
  int32_t drawn = locate(o, u * total, limit);
  if (drawn < 0 && !bounded && !complete) return -1;
  if (drawn < 0) { /* the sums' rounding: u was within 1e-6 of 1 */
    drawn = limit - 1;
    for (int b = 0; b < o->buckets; b++)
      if (o->start[b] <= drawn && drawn < o->start[b + 1]) sort_bucket(o, b);
  }
  return token_of(o->s.dealt[drawn]);
}

/* Draws from the whole vocabulary in token order. */
static int32_t draw_unfiltered(const colibri_kernels *kernels, int32_t vocab, double u, const scratch *s) {
  float *mass = (void *)s->gathered;
  int32_t blocks = (vocab + WALK - 1) / WALK, last = 0;
  double total = 0, sum = 0;
  for (int32_t b = 0; b < blocks; b++) {
    mass[b] = kernels->sum_exp(s->depth + b * WALK, vocab - b * WALK < WALK ? vocab - b * WALK : WALK, 0.0f);
    total += mass[b];
  }
  for (int32_t b = 0; b < blocks; b++) {
    if (mass[b] == 0 || (sum + mass[b] < u * total && b + 1 < blocks)) {
      sum += mass[b];
      continue;
    }
    for (int32_t i = b * WALK; i < vocab && i < (b + 1) * WALK; i++) {
      float weight = colibri_expf(s->depth[i]);
      sum += weight;
      if (weight > 0) last = i;
      if (weight > 0 && sum >= u * total) return i;
    }
  }
  return last; /* the sums' rounding: u was within 1e-6 of 1 */
}

/* Draws from what the filters keep, looking as far below the maximum as it takes. */
static int32_t draw_filtered(const colibri_kernels *kernels, const float *logits, int32_t vocab, const colibri_sampling *p, double u, const scratch *s) {
  static const float depths[] = {3, 6, 9, 12, FULL_DEPTH};
  double total = kernels->sum_exp(s->depth, vocab, 0.0f);
  order o = {.kernels = kernels, .s = *s};
  int32_t token = -1;
  for (int i = 0; i < 5 && token < 0; i++) {
    o.depth = depths[i];
    gather(&o, logits, vocab);
    deal(&o);
    token = draw(&o, p, total, u);
  }
  return token;
}

static int32_t sample_random(const colibri_kernels *kernels, const float *logits, int32_t vocab, int32_t best, const colibri_sampling *p,
                             int64_t position, const scratch *s) {
  float most = logits[best], inverse = 1.0f / p->temperature;
  double u = uniform(p->seed, position);
  if (inverse > FLT_MAX) inverse = FLT_MAX; /* not infinity: the maximum's own depth must stay 0 */
  for (int32_t i = 0; i < vocab; i++) s->depth[i] = (logits[i] - most) * inverse;
  bool filtered = (p->top_k > 0 && p->top_k < vocab) || p->top_p < 1 || p->min_p > 0;
  return filtered ? draw_filtered(kernels, logits, vocab, p, u, s) : draw_unfiltered(kernels, vocab, u, s);
}

/* A copy of the logits with the tokens of history made less likely; each counts once, however often it occurs. */
static const float *penalise(const float *logits, int32_t vocab, float penalty, const int32_t *history, int32_t n_history, float *copy) {
  memcpy(copy, logits, (size_t)vocab * sizeof *copy);
  for (int32_t i = 0; i < n_history; i++) {
    int32_t t = history[i];
    if (t < 0 || t >= vocab) continue;
    float x = logits[t] > 0 ? logits[t] / penalty : logits[t] * penalty;
    copy[t] = x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
  }
  return copy;
}

/* ---------------------------------------------------------------- what is reported */

/* ids [n] of the largest of x, descending, ties to the lower index; n <= COLIBRI_MAX_TOP_LOGPROBS, n <= vocab. */
static void largest(const float *x, int32_t vocab, int n, int32_t *ids) {
  float chosen[COLIBRI_MAX_TOP_LOGPROBS];
  int count = 0;
  for (int32_t i = 0; i < vocab; i++) {
    if (count == n && i % BLOCK == 0 && vocab - i >= BLOCK && !any_above(x + i, BLOCK, chosen[n - 1])) {
      i += BLOCK - 1;
      continue;
    }
    if (count == n && !(x[i] > chosen[n - 1])) continue;
    int j = count < n ? count++ : n - 1;
    for (; j > 0 && x[i] > chosen[j - 1]; j--) {
      chosen[j] = chosen[j - 1];
      ids[j] = ids[j - 1];
    }
    chosen[j] = x[i];
    ids[j] = i;
  }
}

static int32_t rank_of(const float *x, int32_t vocab, int32_t target) {
  int32_t above = 0;
  for (int32_t i = 0; i < vocab; i++) above += x[i] > x[target];
  return above;
}

/* Log-probabilities of the model's own distribution: of the token, the target and the most likely. */
static void report(const colibri_kernels *kernels, const float *logits, int32_t vocab, float most, int wanted, int32_t target,
                   colibri_row_result *out) {
  /* log in double: its rounding to f32 is the same whichever libm variant ran */
  double norm = (double)most + log((double)kernels->sum_exp(logits, vocab, most));
  out->logprob = (float)((double)logits[out->token] - norm);
  if (target >= 0) {
    out->target_logprob = (float)((double)logits[target] - norm);
    out->target_rank = rank_of(logits, vocab, target);
  }
  out->n_top = wanted < vocab ? wanted : vocab;
  if (out->n_top) largest(logits, vocab, out->n_top, out->top_tokens);
  for (int i = 0; i < out->n_top; i++) out->top_logprobs[i] = (float)((double)logits[out->top_tokens[i]] - norm);
}

void colibri_sample(const colibri_kernels *kernels, const float *logits, int32_t vocab, const colibri_sampling *params, int64_t position,
                    const int32_t *history, int32_t n_history, int32_t target, int32_t layers_mark, void *memory, colibri_row_result *out) {
  scratch s = carve(memory, vocab);
  *out = (colibri_row_result){.error_layer = -1, .target_rank = -1};
  int32_t best = kernels->argmax(logits, vocab);
  if (best < 0) {
    out->status = COLIBRI_ENUMERIC;
    out->error_layer = layers_mark;
    return;
  }
  float most = logits[best];
  const float *scores = logits;
  out->token = best;
  if (params->repetition_penalty != 1.0f && n_history > 0) {
    scores = penalise(logits, vocab, params->repetition_penalty, history, n_history, s.penalised);
    out->token = kernels->argmax(scores, vocab);
  }
  if (params->temperature > 0) out->token = sample_random(kernels, scores, vocab, out->token, params, position, &s);
  int wanted = params->top_logprobs < COLIBRI_MAX_TOP_LOGPROBS ? params->top_logprobs : COLIBRI_MAX_TOP_LOGPROBS;
  if (target >= vocab) target = -1;
  if (wanted >= 0 || target >= 0) report(kernels, logits, vocab, most, wanted > 0 ? wanted : 0, target, out);
}
