/* damping_batch.c - scope BATCH: the tokens of a step weighed against each other.
 *
 * HEAT and CAPACITY put a cost on each token of a queue that rises from one to the next, and make moves, the one that saves most first, until none saves
 * more than it loses. A table of the cheapest move from each expert to each other is kept up to date, so that a move costs little. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math") /* no result changes; loops that compare become vectors */
#endif
#include <math.h>
#include <string.h>

#include "damping.h"

#define LEAST_GAIN 1e-5f /* above what rounding can feign: prices are at most 32 */

typedef struct batch {
  colibri_damper *d;
  const colibri_damping *p;
  const colibri_damp_rows *r;
  int n;                   /* members */
  uint64_t pairs, *changed;
  int64_t work;            /* pairs that may still be looked at again */
} batch;

/* ---------------------------------------------------------------- the table of moves */

static inline int32_t *ids_of(const batch *b, int m) { return b->r->ids + b->d->rows[m] * b->d->k; }

/* What a pair loses by going to e; INFINITY: it may not. */
static inline float loss_of(const batch *b, int32_t pair, int e) {
  const colibri_damper *d = b->d;
  int m = pair / d->k, i = pair % d->k, own = d->own[pair], now = ids_of(b, m)[i];
  const float *scores = b->r->scores + (size_t)d->rows[m] * (size_t)d->experts, *values = d->values + (size_t)m * (size_t)d->experts;
  if (e == own) return now == own ? INFINITY : values[now] - values[e];
  return scores[own] - scores[e] <= b->p->margin ? values[now] - values[e] + d->block[(size_t)m * (size_t)d->experts + (size_t)e] : INFINITY;
}

static inline void keep_better(float *best, int32_t *mover, float loss, int32_t pair) {
  int better = (loss < *best) | ((loss == *best) & (pair < *mover) & (loss < INFINITY));
  *best = better ? loss : *best, *mover = better ? pair : *mover;
}

/* Lets a pair into the table's row of its expert. The long loop has no branches: it becomes vectors. */
static void offer(const batch *b, int32_t pair) {
  const colibri_damper *d = b->d;
  int m = pair / d->k, own = d->own[pair], now = ids_of(b, m)[pair % d->k];
  size_t at = (size_t)m * (size_t)d->experts;
  const float *restrict scores = b->r->scores + (size_t)d->rows[m] * (size_t)d->experts, *restrict values = d->values + at, *restrict block = d->block + at;
  float *restrict best = d->loss + (size_t)now * (size_t)d->experts, limit = b->p->margin, from = scores[own], value = values[now];
  int32_t *restrict mover = d->mover + (size_t)now * (size_t)d->experts;
  for (int e = 0, experts = d->experts; e < experts; e++) {
    float open = value - values[e] + block[e], loss = from - scores[e] <= limit ? open : INFINITY;
    int32_t better = -(loss < best[e]) | (-(loss == best[e]) & -(pair < mover[e]) & -(loss < INFINITY));
    best[e] = better ? loss : best[e];
    mover[e] = better ? pair : mover[e];
  }
  if (now != own) keep_better(&best[own], &mover[own], value - values[own], pair);
}

static void rescan(batch *b, int from, int to) {
  const colibri_damper *d = b->d;
  b->work -= d->queue[from];
  size_t at = (size_t)from * (size_t)d->experts + (size_t)to;
  d->loss[at] = INFINITY, d->mover[at] = -1;
  for (int32_t pair = d->head[from]; pair >= 0; pair = d->next[pair]) keep_better(&d->loss[at], &d->mover[at], loss_of(b, pair, to), pair);
}

/* Which experts a member may not take: those it had chosen, and those it has. */
static void block_row(const batch *b, int m) {
  const colibri_damper *d = b->d;
  float *block = d->block + (size_t)m * (size_t)d->experts;
  memset(block, 0, sizeof *block * (size_t)d->experts);
  for (int i = 0; i < d->k; i++) block[d->own[m * d->k + i]] = block[ids_of(b, m)[i]] = INFINITY;
}

static void link_pair(colibri_damper *d, int32_t pair, int e) {
  d->next[pair] = d->head[e], d->before[pair] = -1;
  if (d->head[e] >= 0) d->before[d->head[e]] = pair;
  d->head[e] = pair;
}

static void unlink_pair(colibri_damper *d, int32_t pair, int e) {
  if (d->before[pair] >= 0) d->next[d->before[pair]] = d->next[pair];
  else d->head[e] = d->next[pair];
  if (d->next[pair] >= 0) d->before[d->next[pair]] = d->before[pair];
}

/* d->price[e]: of one more token in e's queue. */
static inline float price_of(const colibri_damper *d, int from, int to) { return d->price[to] + d->loss[(size_t)from * (size_t)d->experts + (size_t)to]; }

static void find_best_to(const colibri_damper *d, int from) {
  const float *restrict loss = d->loss + (size_t)from * (size_t)d->experts, *restrict price = d->price;
  float least = INFINITY;
  int best = 0;
  for (int e = 0, experts = d->experts; e < experts; e++) {
    float here = price[e] + loss[e];
    int better = here < least;
    best = better ? e : best, least = better ? here : least;
  }
  d->best_to[from] = best, d->best_cost[from] = least, d->loose[from] = 0;
}

static void fill_table(const batch *b) {
  colibri_damper *d = b->d;
  for (int e = 0; e < d->experts; e++) d->head[e] = -1, d->price[e] = d->cost[d->queue[e] + 1];
  for (size_t i = 0; i < (size_t)d->experts * (size_t)d->experts; i++) d->loss[i] = INFINITY, d->mover[i] = -1;
  for (int m = b->n - 1; m >= 0; m--) {
    block_row(b, m);
    for (int i = d->k - 1; i >= 0; i--) {
      link_pair(d, m * d->k + i, ids_of(b, m)[i]);
      offer(b, m * d->k + i);
    }
  }
  for (int e = 0; e < d->experts; e++) find_best_to(d, e);
}

/* What the table knows of a row's pairs is no longer so, in the rows of expert e: the losses become bounds, without a mover. */
static void forget_row(const batch *b, int m, int e) {
  const colibri_damper *d = b->d;
  int32_t *restrict mover = d->mover + (size_t)e * (size_t)d->experts, first = m * d->k;
  for (int to = 0, experts = d->experts, k = d->k; to < experts; to++) mover[to] = (uint32_t)(mover[to] - first) < (uint32_t)k ? -1 : mover[to];
  d->stale[e] = 1;
}

/* ---------------------------------------------------------------- moving */

static void make_move(const batch *b, int32_t pair, int to) {
  colibri_damper *d = b->d;
  int m = pair / d->k, row = d->rows[m];
  int32_t *ids = ids_of(b, m);
  int from = ids[pair % d->k];
  unlink_pair(d, pair, from), link_pair(d, pair, to);
  d->queue[from]--, d->queue[to]++;
  d->price[from] = d->cost[d->queue[from] + 1], d->price[to] = d->cost[d->queue[to] + 1];
  ids[pair % d->k] = to;
  int now = memcmp(d->own + m * d->k, ids, sizeof *ids * (size_t)d->k) != 0;
  *b->changed += (uint64_t)now - b->r->changed[row];
  b->r->changed[row] = (uint8_t)now;
  block_row(b, m);
  memset(d->stale, 0, (size_t)d->experts);
  forget_row(b, m, from);
  for (int i = 0; i < d->k; i++) forget_row(b, m, ids[i]);
  for (int i = 0; i < d->k; i++) offer(b, m * d->k + i);
  for (int e = 0; e < d->experts; e++) {
    float here = price_of(d, e, from);
    if (d->stale[e]) find_best_to(d, e);
    else if (here < d->best_cost[e]) d->best_to[e] = from, d->best_cost[e] = here, d->loose[e] = 0;
    else if (d->best_to[e] == to || (here == d->best_cost[e] && from < d->best_to[e])) d->loose[e] = 1;
  }
}

/* Makes the best moves until none saves anything. A bound that would be the best is found out first: whole queues are looked through seldom. */
static void settle(batch *b) {
  colibri_damper *d = b->d;
  fill_table(b);
  b->work = COLIBRI_DAMP_WORK(b->n, d->k, d->experts);
  while (b->work >= 0 && (colibri_damp_within(b->p, b->pairs, *b->changed) || *b->changed == b->pairs)) { /* or no move can change one more */
    int from = -1;
    float most = LEAST_GAIN;
    for (int e = 0; e < d->experts; e++) {
      float gain = d->cost[d->queue[e]] - d->best_cost[e];
      if (gain > most) most = gain, from = e;
    }
    if (from < 0) return;
    if (d->loose[from]) {
      find_best_to(d, from);
      continue;
    }
    int to = d->best_to[from];
    int32_t pair = d->mover[(size_t)from * (size_t)d->experts + (size_t)to];
    if (pair >= 0) make_move(b, pair, to);
    else rescan(b, from, to), find_best_to(d, from);
  }
}

/* ---------------------------------------------------------------- policies */

/* An even share costs nothing; above it the price grows by `growth` with each share more, below it it falls. Once it is worth any loss it rises on, slowly. */
static void find_prices(const batch *b, int most) {
  colibri_damper *d = b->d;
  float rate = (float)log((double)b->p->growth), share = (float)b->r->n_rows * (float)d->k / (float)d->experts;
  for (int n = 0; n <= most; n++) d->cost[n] = rate * ((float)n / share - 1);
  d->kernels->exp(d->cost, most + 1);
  for (int n = 0; n <= most; n++) d->cost[n] = fminf(d->cost[n] - 1, COLIBRI_DAMP_ANY_LOSS + (float)n / share / 64);
}

static void find_bound(const batch *b, int most) {
  double share = (double)b->r->n_rows * b->d->k / b->d->experts, bound = fmax(ceil(share), floor((double)b->p->capacity_factor * share));
  for (int n = 0; n <= most; n++) b->d->cost[n] = n > bound ? COLIBRI_DAMP_ANY_LOSS : 0;
}

/* ---------------------------------------------------------------- reuse */

/* The cheapest other expert in use for a pair; -1: none. */
static int32_t find_target(const batch *b, int32_t pair, int from, float *loss) {
  const colibri_damper *d = b->d;
  int32_t to = -1;
  *loss = INFINITY;
  for (int e = 0; e < d->experts; e++) {
    if (!d->queue[e] || e == from) continue;
    float here = loss_of(b, pair, e);
    if (here < *loss) *loss = here, to = e;
  }
  return to;
}

/* What emptying an expert loses; INFINITY: it cannot be done, nor ever will: it loses the more, the fewer experts are in use. */
static float find_emptying(const batch *b, int e) {
  colibri_damper *d = b->d;
  double sum = 0; /* of few floats: exact, whatever their order */
  float loss = 0;
  int count = 0;
  for (int32_t pair = d->head[e]; pair >= 0 && loss < INFINITY; pair = d->next[pair], count++) {
    d->target[pair] = find_target(b, pair, e, &loss);
    sum += loss;
  }
  return count && count == d->queue[e] ? (float)sum : INFINITY; /* others' rows are not to be moved */
}

static uint64_t rows_changed_by_emptying(const batch *b, int e) {
  uint64_t count = 0;
  for (int32_t pair = b->d->head[e]; pair >= 0; pair = b->d->next[pair]) count += !b->r->changed[b->d->rows[pair / b->d->k]];
  return count;
}

/* Moves all of an expert's tokens to their targets; what this makes stale is the emptying of experts that shared a row, or were to give to it. */
static void empty(const batch *b, int from) {
  colibri_damper *d = b->d;
  for (int32_t pair = d->head[from], next; pair >= 0; pair = next) {
    int m = pair / d->k;
    int32_t *ids = ids_of(b, m), to = d->target[pair];
    next = d->next[pair];
    unlink_pair(d, pair, from), link_pair(d, pair, to);
    d->queue[from]--, d->queue[to]++;
    ids[pair % d->k] = to;
    block_row(b, m);
    for (int i = 0; i < d->k; i++) d->stale[ids[i]] = 1;
    int now = memcmp(d->own + m * d->k, ids, sizeof *ids * (size_t)d->k) != 0;
    *b->changed += (uint64_t)now - b->r->changed[d->rows[m]];
    b->r->changed[d->rows[m]] = (uint8_t)now;
  }
  for (int32_t pair = 0; pair < b->n * d->k; pair++)
    if (d->target[pair] == from) d->stale[ids_of(b, pair / d->k)[pair % d->k]] = 1;
}

/* Empties experts, the one first that loses least. d->price: what emptying each loses; of stale ones a bound, which is found out when it is the least. */
static void reuse(const batch *b) {
  colibri_damper *d = b->d;
  for (int e = 0; e < d->experts; e++) d->head[e] = -1;
  for (int m = 0; m < b->n; m++) block_row(b, m);
  for (int32_t pair = b->n * d->k - 1; pair >= 0; pair--) link_pair(d, pair, ids_of(b, pair / d->k)[pair % d->k]);
  for (int e = 0; e < d->experts; e++) d->price[e] = find_emptying(b, e);
  memset(d->stale, 0, (size_t)d->experts);
  for (;;) {
    int least = 0;
    for (int e = 1; e < d->experts; e++)
      if (d->price[e] < d->price[least]) least = e;
    if (!(d->price[least] < INFINITY)) return;
    if (d->stale[least]) {
      d->price[least] = find_emptying(b, least), d->stale[least] = 0;
      continue;
    }
    uint64_t more = rows_changed_by_emptying(b, least);
    if (more && !colibri_damp_within(b->p, b->pairs, *b->changed + more - 1)) return;
    empty(b, least);
    d->price[least] = INFINITY;
  }
}

void colibri_damp_batch(colibri_damper *d, const colibri_damping *p, const colibri_damp_rows *r, int n, uint64_t pairs, uint64_t *changed) {
  batch b = {d, p, r, n, pairs, changed, 0};
  int most = 1;
  for (int e = 0; e < d->experts; e++) most = d->queue[e] >= most ? d->queue[e] + 1 : most;
  if (p->kind == COLIBRI_DAMPING_REUSE) reuse(&b);
  else if (p->kind == COLIBRI_DAMPING_CAPACITY) find_bound(&b, most), settle(&b);
  else find_prices(&b, most), settle(&b);
}
