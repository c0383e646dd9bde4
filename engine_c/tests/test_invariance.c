/* test_invariance.c - a row's logits have the same bits alone and in every company: on either side of every number of rows at which the code takes another
 * path.
 *
 * The rows a position gets alone, one token a step with one lane, are what all others are held against. */
#include "team_run.h"

#define LONGEST 513 /* rows of the longest prompt: one more than a tile of a matrix product */
#define CROWD 64    /* sequences of the largest batch of single rows */
#define CROWD_BLOCKS 4 /* KV blocks of each: its rows are at positions 0 to 63 */
#define PROMPT_BLOCKS ((LONGEST + 15) / 16)

static const char *const format_names[] = {"f32", "bf16", "int8", "int4"};

/* Wide enough that blocks of rows (400000 bytes of activations) are shorter than LONGEST, and that some matrix of each format is on the one side of 256 KiB a lane
 * with one lane and on the other with more. 8 heads share a KV head: 8 rows are an attention tile. */
static const random_shape dense = {.layers = 1, .hidden = 1024, .heads = 16, .kv_heads = 2, .head_dim = 32, .ffn = 96, .experts = 1, .top_k = 1, .vocab = 96,
                                   .context = 528};
static const random_shape sparse = {.layers = 2, .hidden = 160, .heads = 6, .kv_heads = 2, .head_dim = 24, .ffn = 224, .experts = 5, .top_k = 2, .vocab = 131,
                                    .context = 528, .window = 19};

typedef struct bench {
  const colibri_model *model;
  colibri_session *s;
  float *alone;            /* [LONGEST][vocab] */
  int vocab;
  char name[64];           /* what is being run */
} bench;

static int token_at(const bench *b, int position) { return (position * 37 + position / 5 + 3) % b->vocab; }

static colibri_session *open_wide(const colibri_model *model, int kv_format, int split) {
  return run_open(model, (colibri_session_options){.max_rows = LONGEST, .max_seqs = CROWD, .max_logit_rows = LONGEST, .kv_blocks = CROWD * CROWD_BLOCKS,
                                                   .kv_format = kv_format, .max_lanes = LANES, .front_lane = 1, .spin_us = 100, .split_down = split});
}

/* n sequences of rows[i] rows from start[i] on, each with blocks of its own that begin at i * per_seq; logits of all rows. */
static void run_rows_of(bench *b, int n, const int *rows, const int *start, int per_seq) {
  static colibri_seq seqs[CROWD];
  static int32_t tokens[LONGEST], blocks[CROWD * CROWD_BLOCKS];
  static colibri_row_result results[LONGEST];
  int t = 0, k = 0;
  for (int i = 0; i < n; i++) {
    int need = (start[i] + rows[i] + 15) / 16;
    seqs[i] = (colibri_seq){.n_rows = rows[i], .start = start[i], .n_logits = rows[i], .n_blocks = need, .slot = -1, .damping = -1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
    for (int p = 0; p < rows[i]; p++) tokens[t++] = token_at(b, start[i] + p);
    for (int p = 0; p < need; p++) blocks[k++] = i * per_seq + p;
  }
  colibri_batch batch = {.n_seqs = n, .seqs = seqs, .tokens = tokens, .blocks = blocks};
  colibri_error err;
  CHECK(!colibri_step(b->s, &batch, results, NULL, NULL, &err), "%s: %s", b->name, err.message);
}

/* Logit row `row` of the last step is what position `position` gets alone. */
static void check_row(const bench *b, int row, int position, int n) {
  const float *got = colibri_session_logits(b->s) + (int64_t)row * b->vocab;
  CHECK(!memcmp(got, b->alone + (int64_t)position * b->vocab, sizeof(float) * (size_t)b->vocab), "%s, %d rows: the row of position %d differs", b->name, n,
        position);
}

static void learn_alone(bench *b, int longest) {
  for (int p = 0; p < longest; p++) {
    run_rows_of(b, 1, &(int){1}, &p, PROMPT_BLOCKS);
    memcpy(b->alone + (int64_t)p * b->vocab, colibri_session_logits(b->s), sizeof(float) * (size_t)b->vocab);
  }
}

/* A prompt of n rows in one step. */
static void check_prompt(bench *b, int n) {
  run_rows_of(b, 1, &n, &(int){0}, PROMPT_BLOCKS);
  for (int p = 0; p < n; p++) check_row(b, p, p, n);
}

/* Keys and values of the first n positions into the blocks of sequence i of a crowd. */
static void prefill(bench *b, int i, int n) {
  colibri_seq seq = {.n_rows = n, .n_blocks = CROWD_BLOCKS, .slot = -1, .damping = -1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
  int32_t tokens[16 * CROWD_BLOCKS], blocks[CROWD_BLOCKS];
  for (int p = 0; p < n; p++) tokens[p] = token_at(b, p);
  for (int p = 0; p < CROWD_BLOCKS; p++) blocks[p] = i * CROWD_BLOCKS + p;
  colibri_batch batch = {.n_seqs = 1, .seqs = &seq, .tokens = tokens, .blocks = blocks};
  CHECK(!colibri_step(b->s, &batch, NULL, NULL, NULL, NULL), "%s: a prefill was refused", b->name);
}

/* n sequences of one row each, the first few at positions up to 63, the others near the beginning. */
static void check_crowd(bench *b, int n) {
  int rows[CROWD] = {0}, start[CROWD] = {0};
  for (int i = 0; i < n; i++) {
    rows[i] = 1, start[i] = i < 8 ? i * 29 % 64 : i % 7;
    if (start[i]) prefill(b, i, start[i]);
  }
  run_rows_of(b, n, rows, start, CROWD_BLOCKS);
  for (int i = 0; i < n; i++) check_row(b, i, start[i], n);
}

/* ---------------------------------------------------------------- boundaries */

/* Rows of one block of a product whose rows are of `width` columns (cut.c). */
static int row_block(int format, int width) { return (int)(400000 / colibri_row_bytes(format, (width + 31) / 32)); }

/* On both sides of: rows the front end prepares itself (2); the kernels' tiles of 1 to 8 and 12 rows; an attention tile (8 rows: also whether the tasks store the
 * keys themselves); a block of rows; a tile of a product's rows (512). */
static void check_all(bench *b, const random_shape *shape, int longest) {
  int block = row_block(shape->format, shape->hidden), o_block = row_block(shape->format, shape->heads * shape->head_dim);
  for (int n = 1; n <= 17; n++) check_prompt(b, n), check_crowd(b, n);
  const int more[] = {24, 25, 32, 33, 48, 63, 64};
  for (size_t i = 0; i < sizeof more / sizeof *more; i++) check_crowd(b, more[i]);
  const int prompts[] = {31, 33, 65, block, block + 1, o_block, o_block + 1, LONGEST - 1, LONGEST};
  for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++)
    if (prompts[i] <= longest) check_prompt(b, prompts[i]);
}

/* Fewer rows with more lanes: pieces of matrices (one or two a lane), of experts, of rows. */
static void check_lanes(bench *b, int n) {
  colibri_worker *w = attach_threads(b->s);
  lane_thread lanes[LANES];
  threads_start(b->s, w, lanes, n);
  for (int rows = 1; rows <= 9; rows += rows < 3 ? 1 : 3) check_prompt(b, rows), check_crowd(b, rows);
  check_prompt(b, 33);
  threads_stop(b->s, lanes, n);
  colibri_worker_detach(w);
}

static void check_model(const char *isa, random_shape shape, int format, int kv_format, int longest) {
  shape.format = format;
  bench b = {.model = run_model(&shape, 5), .vocab = shape.vocab, .alone = malloc(sizeof(float) * LONGEST * (size_t)shape.vocab)};
  for (int split = 0; split <= 1; split++) {
    b.s = open_wide(b.model, kv_format, split);
    snprintf(b.name, sizeof b.name, "%s %s, %d experts%s%s", isa, format_names[format], shape.experts, kv_format == COLIBRI_KV_F32 ? ", KV f32" : "", split ? ", split" : "");
    if (!split) learn_alone(&b, longest);
    check_all(&b, &shape, split && longest > CROWD ? CROWD : longest);
    for (int n = 1; n <= LANES; n += split ? 2 : 1) check_lanes(&b, n);
    colibri_session_close(b.s);
  }
  free(b.alone);
  colibri_model_close((colibri_model *)b.model);
}

#ifdef COLIBRI_EMULATED /* a hundred times slower: kernels alone, in the small model; the plain ones and how large work is cut are the same code everywhere */
#define EMULATED 1
#else
#define EMULATED 0
#endif

static void test_isa(const char *isa) {
  if (EMULATED && !strcmp(isa, "generic")) return;
  for (int format = 0; format < COLIBRI_FORMATS; format++) {
    if (!EMULATED) check_model(isa, dense, format, COLIBRI_KV_BF16, LONGEST);
    check_model(isa, sparse, format, format % 2 ? COLIBRI_KV_BF16 : COLIBRI_KV_F32, 130);
  }
}

int main(void) {
  check_each_isa(test_isa);
  return check_result("invariance");
}
