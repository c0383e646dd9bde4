/* pack.c - f32 matrices to and from the packed layouts of docs/container.md. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "model.h"

/* A block as it is worked on: transposed, so that the loops below run over 32 independent rows and the compiler turns them into vectors
 * without reassociating anything. */
typedef struct tile {
  float v[COLIBRI_GROUP][COLIBRI_PANEL]; /* [column][row] */
} tile;

#define SMALLEST_SCALE 0x1p-14f /* smallest normal fp16 */
#define LARGEST_SCALE 65504.0f

/* ---------------------------------------------------------------- sizes */

static int64_t ceil32(int64_t n) { return n / 32 + (n % 32 != 0); }

static uint64_t panel_bytes(int format, int64_t k) { return (uint64_t)colibri_block_bytes(format) * (uint64_t)ceil32(k); }

/* Bytes of `panels` panels over k columns; 0 if out of range. */
static uint64_t panels_bytes(int format, int64_t panels, int64_t k) {
  uint64_t block = (uint64_t)colibri_block_bytes(format), bytes;
  if (!block || panels <= 0 || k <= 0) return 0;
  if (__builtin_mul_overflow((uint64_t)panels, (uint64_t)ceil32(k), &bytes)) return 0;
  if (__builtin_mul_overflow(bytes, block, &bytes) || bytes > INT64_MAX) return 0;
  return bytes;
}

uint64_t colibri_packed_bytes(int format, int64_t n, int64_t k) {
  if (n <= 0 || n > INT32_MAX || k > INT32_MAX) return 0;
  return panels_bytes(format, ceil32(n), k);
}

uint64_t colibri_expert_bytes(int format, int64_t hidden, int64_t ffn) {
  if (hidden <= 0 || ffn <= 0 || hidden > INT32_MAX || ffn > INT32_MAX) return 0;
  uint64_t fused = panels_bytes(format, ceil32(ffn) * 2, hidden), down = colibri_packed_bytes(format, hidden, ffn), bytes;
  if (!fused || !down || __builtin_add_overflow(fused, down, &bytes) || bytes > INT64_MAX) return 0;
  return bytes;
}

/* ---------------------------------------------------------------- packing a block */

/* Largest magnitude that survives a format: bf16 would round to infinity above it, integers would need a scale above fp16's range. */
static float largest_weight(int format) {
  switch (format) {
    case COLIBRI_BF16: return 0x1.fep127f;
    case COLIBRI_INT8: return 127 * LARGEST_SCALE;
    case COLIBRI_INT4: return 7 * LARGEST_SCALE;
    default: return 0x1.fffffep127f;
  }
}

/* fp16 scale nearest to s, kept normal; s itself becomes what the engine will read. */
static uint16_t round_scale(float *s) {
  float a = fabsf(*s);
  a = a < SMALLEST_SCALE ? SMALLEST_SCALE : a > LARGEST_SCALE ? LARGEST_SCALE : a;
  uint16_t h = colibri_f32_to_f16(copysignf(a, *s));
  *s = colibri_f16_to_f32(h);
  return h;
}

/* Each row's weight of largest magnitude, with its sign. */
static void extremes(const tile *t, float extreme[COLIBRI_PANEL]) {
  memset(extreme, 0, COLIBRI_PANEL * sizeof *extreme);
  for (int k = 0; k < COLIBRI_GROUP; k++)
    for (int r = 0; r < COLIBRI_PANEL; r++) extreme[r] = fabsf(t->v[k][r]) > fabsf(extreme[r]) ? t->v[k][r] : extreme[r];
}

/* Nearest integer to x within [lo, hi], ties to even, in a form that vectorises: adding 1.5 * 2^23 leaves no fraction bits. */
static inline float round_clamped(float x, float lo, float hi) {
  x = x < lo ? lo : x;
  x = x > hi ? hi : x;
  return (x + 0x1.8p23f) - 0x1.8p23f;
}

static void pack_int8(const tile *t, uint8_t *block) {
  float scale[COLIBRI_PANEL], inverse[COLIBRI_PANEL];
  uint16_t h[COLIBRI_PANEL];
  extremes(t, scale);
  for (int r = 0; r < COLIBRI_PANEL; r++) {
    scale[r] = scale[r] != 0 ? fabsf(scale[r]) / 127 : 1;
    h[r] = round_scale(&scale[r]);
    inverse[r] = 1 / scale[r];
  }
  memcpy(block, h, sizeof h);
  for (int k = 0; k < COLIBRI_GROUP; k++) {
    uint8_t *out = block + 64 + k / 4 * 128 + k % 4;
    for (int r = 0; r < COLIBRI_PANEL; r++) out[4 * r] = (uint8_t)(int8_t)round_clamped(t->v[k][r] * inverse[r], -127, 127);
  }
}

/* Squared error of each row under the given scales. */
static void int4_errors(const tile *t, const float scale[COLIBRI_PANEL], float error[COLIBRI_PANEL]) {
  float inverse[COLIBRI_PANEL];
  for (int r = 0; r < COLIBRI_PANEL; r++) {
    inverse[r] = 1 / scale[r];
    error[r] = 0;
  }
  for (int k = 0; k < COLIBRI_GROUP; k++)
    for (int r = 0; r < COLIBRI_PANEL; r++) {
      float d = t->v[k][r] - scale[r] * round_clamped(t->v[k][r] * inverse[r], -8, 7);
      error[r] += d * d;
    }
}

/* The scales of a block's rows: of a handful of candidates the one with the least squared error, the first of equals. The scale's sign is chosen
 * so that the extreme weight lands on the negative side, which has one step more (-8..7): relative error of gaussian weights 9.7 % with
 * amax / 7 alone, 8.65 % with a search over positive scales, 8.16 % so. */
static void int4_scales(const tile *t, float scale[COLIBRI_PANEL], uint16_t h[COLIBRI_PANEL]) {
  static const float divisors[] = {-8.0f, -7.75f, -8.25f, -8.5f, -7.5f, -8.75f, -9.0f, -7.25f};
  float extreme[COLIBRI_PANEL], least[COLIBRI_PANEL];
  extremes(t, extreme);
  for (size_t c = 0; c < sizeof divisors / sizeof *divisors; c++) {
    float candidate[COLIBRI_PANEL], error[COLIBRI_PANEL];
    uint16_t bits[COLIBRI_PANEL];
    for (int r = 0; r < COLIBRI_PANEL; r++) {
      candidate[r] = extreme[r] != 0 ? extreme[r] / divisors[c] : 1;
      bits[r] = round_scale(&candidate[r]);
    }
    int4_errors(t, candidate, error);
    for (int r = 0; r < COLIBRI_PANEL; r++)
      if (c == 0 || error[r] < least[r]) {
        least[r] = error[r];
        scale[r] = candidate[r];
        h[r] = bits[r];
      }
  }
}

static void pack_int4(const tile *t, uint8_t *block) {
  float scale[COLIBRI_PANEL];
  uint16_t h[COLIBRI_PANEL];
  int4_scales(t, scale, h);
  memcpy(block, h, sizeof h);
  for (int r = 0; r < COLIBRI_PANEL; r++) scale[r] = 1 / scale[r];
  for (int k = 0; k < COLIBRI_GROUP; k += k % 4 == 3 ? 5 : 1) { /* columns 8s + i; 8s + 4 + i goes to the high nibble */
    uint8_t *out = block + 64 + k / 8 * 128 + k % 4;
    for (int r = 0; r < COLIBRI_PANEL; r++) {
      int low = (int)round_clamped(t->v[k][r] * scale[r], -8, 7) + 8;
      int high = (int)round_clamped(t->v[k + 4][r] * scale[r], -8, 7) + 8;
      out[4 * r] = (uint8_t)(high << 4 | low);
    }
  }
}

static void pack_bf16(const tile *t, uint16_t *block) {
  for (int k = 0; k < COLIBRI_GROUP; k++)
    for (int r = 0; r < COLIBRI_PANEL; r++) block[k / 2 * 64 + r * 2 + k % 2] = colibri_f32_to_bf16(t->v[k][r]);
}

static void pack_block(int format, const tile *t, void *block) {
  switch (format) {
    case COLIBRI_F32: memcpy(block, t, sizeof *t); break;
    case COLIBRI_BF16: pack_bf16(t, block); break;
    case COLIBRI_INT8: pack_int8(t, block); break;
    default: pack_int4(t, block); break;
  }
}

/* ---------------------------------------------------------------- unpacking a block */

static float scale_of(const uint8_t *block, int r) {
  uint16_t h;
  memcpy(&h, block + 2 * r, sizeof h);
  return colibri_f16_to_f32(h);
}

static void unpack_int8(const uint8_t *block, tile *t) {
  for (int r = 0; r < COLIBRI_PANEL; r++)
    for (int k = 0; k < COLIBRI_GROUP; k++) t->v[k][r] = scale_of(block, r) * (int8_t)block[64 + k / 4 * 128 + r * 4 + k % 4];
}

static void unpack_int4(const uint8_t *block, tile *t) {
  for (int r = 0; r < COLIBRI_PANEL; r++)
    for (int k = 0; k < COLIBRI_GROUP; k++) {
      int byte = block[64 + k / 8 * 128 + r * 4 + k % 4];
      t->v[k][r] = scale_of(block, r) * (float)((k & 4 ? byte >> 4 : byte & 15) - 8);
    }
}

static void unpack_block(int format, const void *block, tile *t) {
  const uint16_t *b = block;
  switch (format) {
    case COLIBRI_F32: memcpy(t, block, sizeof *t); break;
    case COLIBRI_BF16:
      for (int k = 0; k < COLIBRI_GROUP; k++)
        for (int r = 0; r < COLIBRI_PANEL; r++) t->v[k][r] = colibri_bf16_to_f32(b[k / 2 * 64 + r * 2 + k % 2]);
      break;
    case COLIBRI_INT8: unpack_int8(block, t); break;
    default: unpack_int4(block, t); break;
  }
}

/* ---------------------------------------------------------------- panels */

/* The 32 rows of a panel in an f32 matrix, NULL where a row is padding. `name` and `first` say which, for errors: rows 0-15 are first[0] + r,
 * rows 16-31 first[1] + r - 16. */
typedef struct panel_rows {
  float *row[COLIBRI_PANEL];
  const char *name[2];
  int64_t first[2];
} panel_rows;

/* Rows `from`.. of a matrix [n, k] become half h of a panel. */
static void set_half(panel_rows *p, int h, const char *name, const float *w, int64_t n, int64_t k, int64_t from) {
  p->name[h] = name;
  p->first[h] = from;
  for (int r = 0; r < 16; r++) p->row[16 * h + r] = from + r < n ? (float *)w + (from + r) * k : NULL;
}

/* Gathers block g of a panel. Returns the largest magnitude's bits as an integer (NaN above all). */
static uint32_t gather(const panel_rows *p, int64_t k, int64_t g, tile *t) {
  int valid = k - g * 32 < 32 ? (int)(k - g * 32) : 32;
  uint32_t top = 0;
  memset(t, 0, sizeof *t);
  for (int r = 0; r < COLIBRI_PANEL; r++) {
    if (!p->row[r]) continue;
    const float *x = p->row[r] + g * 32;
    for (int i = 0; i < valid; i++) t->v[i][r] = x[i];
  }
  for (int i = 0; i < COLIBRI_GROUP; i++) {
    uint32_t u[COLIBRI_PANEL];
    memcpy(u, t->v[i], sizeof u);
    for (int r = 0; r < COLIBRI_PANEL; r++) top = (u[r] & 0x7fffffffu) > top ? u[r] & 0x7fffffffu : top;
  }
  return top;
}

/* Names the first weight of a block that the format cannot hold. */
static int refuse(const panel_rows *p, const tile *t, int64_t g, float limit, colibri_error *err) {
  for (int r = 0; r < COLIBRI_PANEL; r++)
    for (int i = 0; i < COLIBRI_GROUP; i++) {
      float v = t->v[i][r];
      if (fabsf(v) <= limit) continue;
      return colibri_fail(err, COLIBRI_ENUMERIC, "%s weight [%lld, %lld] is %g, %s", p->name[r / 16],
                          (long long)(p->first[r / 16] + r % 16), (long long)(g * 32 + i), (double)v,
                          isfinite(v) ? "too large for the format" : "not a finite number");
    }
  return COLIBRI_OK;
}

static int pack_panel(int format, const panel_rows *p, int64_t k, char *dst, colibri_error *err) {
  float limit = largest_weight(format);
  uint32_t limit_bits;
  memcpy(&limit_bits, &limit, sizeof limit_bits);
  for (int64_t g = 0; g < ceil32(k); g++, dst += colibri_block_bytes(format)) {
    tile t;
    if (gather(p, k, g, &t) > limit_bits) return refuse(p, &t, g, limit, err);
    pack_block(format, &t, dst);
  }
  return COLIBRI_OK;
}

static int unpack_panel(int format, const panel_rows *p, int64_t k, const char *src) {
  for (int64_t g = 0; g < ceil32(k); g++, src += colibri_block_bytes(format)) {
    int valid = k - g * 32 < 32 ? (int)(k - g * 32) : 32;
    tile t;
    unpack_block(format, src, &t);
    for (int r = 0; r < COLIBRI_PANEL; r++)
      for (int i = 0; p->row[r] && i < valid; i++) p->row[r][g * 32 + i] = t.v[i][r];
  }
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- matrices */

/* Both directions: pack (dst from w) or, with `unpack`, w from dst. The sizes are checked by the callers. */
static int matrix(int unpack, int format, const char *name, const float *w, int64_t n, int64_t k, char *packed, colibri_error *err) {
  for (int64_t p = 0; p < ceil32(n); p++, packed += panel_bytes(format, k)) {
    panel_rows rows;
    set_half(&rows, 0, name, w, n, k, 32 * p);
    set_half(&rows, 1, name, w, n, k, 32 * p + 16);
    int status = unpack ? unpack_panel(format, &rows, k, packed) : pack_panel(format, &rows, k, packed, err);
    if (status != COLIBRI_OK) return status;
  }
  return COLIBRI_OK;
}

static int expert(int unpack, int format, const float *gate, const float *up, const float *down, int64_t hidden, int64_t ffn, char *packed,
                  colibri_error *err) {
  for (int64_t p = 0; p < ceil32(ffn) * 2; p++, packed += panel_bytes(format, hidden)) {
    panel_rows rows;
    set_half(&rows, 0, "gate", gate, ffn, hidden, 16 * p);
    set_half(&rows, 1, "up", up, ffn, hidden, 16 * p);
    int status = unpack ? unpack_panel(format, &rows, hidden, packed) : pack_panel(format, &rows, hidden, packed, err);
    if (status != COLIBRI_OK) return status;
  }
  return matrix(unpack, format, "down", down, hidden, ffn, packed, err);
}

static int check_matrix(int format, int64_t n, int64_t k, const void *a, const void *b, colibri_error *err) {
  if (colibri_packed_bytes(format, n, k) && a && b) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EINVAL, "cannot pack a matrix [%lld, %lld] in format %d: format 0..3, 1 <= n, k < 2^31, no NULL buffer",
                      (long long)n, (long long)k, format);
}

static int check_expert(int format, int64_t hidden, int64_t ffn, int buffers, colibri_error *err) {
  if (colibri_expert_bytes(format, hidden, ffn) && buffers) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EINVAL, "cannot pack an expert of hidden %lld, ffn %lld in format %d: format 0..3, 1 <= hidden, ffn < 2^31, no NULL buffer",
                      (long long)hidden, (long long)ffn, format);
}

int colibri_pack(int format, const float *w, int64_t n, int64_t k, void *dst, colibri_error *err) {
  int status = check_matrix(format, n, k, w, dst, err);
  return status != COLIBRI_OK ? status : matrix(0, format, "matrix", w, n, k, dst, err);
}

int colibri_pack_expert(int format, const float *gate, const float *up, const float *down, int64_t hidden, int64_t ffn, void *dst,
                        colibri_error *err) {
  int status = check_expert(format, hidden, ffn, gate && up && down && dst, err);
  return status != COLIBRI_OK ? status : expert(0, format, gate, up, down, hidden, ffn, dst, err);
}

int colibri_unpack(int format, const void *src, int64_t n, int64_t k, float *w, colibri_error *err) {
  int status = check_matrix(format, n, k, src, w, err);
  return status != COLIBRI_OK ? status : matrix(1, format, "matrix", w, n, k, (char *)src, err);
}

int colibri_unpack_expert(int format, const void *src, int64_t hidden, int64_t ffn, float *gate, float *up, float *down, colibri_error *err) {
  int status = check_expert(format, hidden, ffn, src && gate && up && down, err);
  return status != COLIBRI_OK ? status : expert(1, format, gate, up, down, hidden, ffn, (char *)src, err);
}
