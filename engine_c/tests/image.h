/* image.h - container images made in memory for the parser's tests: the descriptor is text that a test may edit before it is sealed with
 * right lengths and checksums. Tensor data are zeros; nothing here uses the engine's own reader or sizes. */
#ifndef COLIBRI_TEST_IMAGE_H
#define COLIBRI_TEST_IMAGE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct image_shape {
  int vocab, hidden, layers, heads, kv_heads, head_dim, ffn, experts, k;
  const char *format, *head_format;  /* of qkv, o and experts; of embed and head */
  bool tied, extras;                 /* extras: all optional tensors are there but router_input_scale */
  bool residual;                     /* that one is there */
} image_shape;

typedef struct image {
  char *text;            /* the descriptor */
  size_t text_bytes, room;
  uint64_t file_bytes;   /* end of the last tensor or blob */
} image;

#define IMAGE_HEADER 64

static inline void image_put(image *im, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void image_put(image *im, const char *format, ...) {
  va_list args;
  if (im->room - im->text_bytes < 1024) {
    im->room = im->room * 2 + 4096;
    im->text = realloc(im->text, im->room);
    if (!im->text) abort();
  }
  va_start(args, format);
  im->text_bytes += (size_t)vsnprintf(im->text + im->text_bytes, im->room - im->text_bytes, format, args);
  va_end(args);
}

static inline uint64_t image_block(const char *format) {
  return !strcmp(format, "f32") ? 4096 : !strcmp(format, "bf16") ? 2048 : !strcmp(format, "int8") ? 1088 : 576;
}

/* Appends a tensor's row of the table and its place. d1 0: one dimension. */
static inline void image_tensor(image *im, const char *name, const char *layout, const char *format, int d0, int d1, uint64_t bytes) {
  uint64_t align = strcmp(layout, "plain") ? 4096 : 64, offset = (im->file_bytes + align - 1) / align * align;
  image_put(im, "%s\n{\"name\": \"%s\", \"layout\": \"%s\", \"format\": \"%s\", \"shape\": [%d", im->text[im->text_bytes - 1] == '[' ? "" : ",", name, layout,
            format, d0);
  if (d1) image_put(im, ", %d", d1);
  image_put(im, "], \"offset\": %llu, \"length\": %llu, \"sha256\": \"00\"}", (unsigned long long)offset, (unsigned long long)bytes);
  im->file_bytes = offset + bytes;
}

static inline void image_plain(image *im, const char *name, int d0, int d1) {
  image_tensor(im, name, "plain", "f32", d0, d1, (uint64_t)d0 * (uint64_t)(d1 ? d1 : 1) * 4);
}

static inline uint64_t image_ceil32(int n) { return (uint64_t)(n + 31) / 32; }

static inline void image_packed(image *im, const char *name, const char *format, int n, int k) {
  image_tensor(im, name, "p32", format, n, k, image_ceil32(n) * image_ceil32(k) * image_block(format));
}

static inline void image_layer(image *im, const image_shape *s, int layer) {
  static const char *const plain[] = {"attn_norm", "ffn_norm", "qkv_bias", "q_norm", "k_norm", "router_bias", "router_select_bias",
                                      "router_expert_scale", "router_input_scale"};
  int qkv = (s->heads + 2 * s->kv_heads) * s->head_dim, sizes[] = {s->hidden, s->hidden, qkv, s->head_dim, s->head_dim, s->experts, s->experts, s->experts, s->hidden};
  char name[64];
  for (int i = 0; i < 9; i++) {
    if (i >= 2 && !(i == 8 ? s->residual : s->extras)) continue;
    snprintf(name, sizeof name, "layers.%d.%s", layer, plain[i]);
    image_plain(im, name, sizes[i], 0);
  }
  snprintf(name, sizeof name, "layers.%d.qkv", layer);
  image_packed(im, name, s->format, qkv, s->hidden);
  snprintf(name, sizeof name, "layers.%d.o", layer);
  image_packed(im, name, s->format, s->hidden, s->heads * s->head_dim);
  snprintf(name, sizeof name, "layers.%d.router", layer);
  if (s->experts > 1) image_plain(im, name, s->experts, s->hidden);
  uint64_t bytes = image_ceil32(s->ffn) * image_ceil32(s->hidden) * 3 * image_block(s->format);
  for (int e = 0; e < s->experts; e++) {
    snprintf(name, sizeof name, "layers.%d.experts.%d", layer, e);
    image_tensor(im, name, "expert", s->format, s->ffn, s->hidden, bytes);
  }
}

/* Tensors begin at data_start, which must lie behind the descriptor as it will be when sealed. */
static inline image image_make_at(const image_shape *s, uint64_t data_start) {
  image im = {.file_bytes = data_start};
  image_put(&im, "{\"name\": \"test\", \"requires\": [], \"arch\": {\"vocab\": %d, \"hidden\": %d, \"layers\": %d, \"heads\": %d, \"kv_heads\": %d, ", s->vocab,
            s->hidden, s->layers, s->heads, s->kv_heads);
  image_put(&im, "\"head_dim\": %d, \"ffn\": %d, \"experts\": %d, \"max_context\": 4096, \"sliding_window\": 128, \"norm_eps\": 1e-05, ", s->head_dim, s->ffn,
            s->experts);
  image_put(&im, "\"attention_scale\": 0.125, \"activation\": \"silu\", \"rope\": {\"style\": \"half\", \"dims\": %d, \"scale\": 1.0}}, ", s->head_dim);
  image_put(&im, "\"router\": {\"score\": \"softmax_all\", \"k\": %d, \"weight\": \"softmax_chosen\", \"renorm\": \"none\", \"scale\": 1.0, ", s->k);
  image_put(&im, "\"apply_at\": \"output\"}, \"quant\": \"%s\", \"tensors\": [", s->format);
  image_packed(&im, "embed", s->head_format, s->vocab, s->hidden);
  if (!s->tied) image_packed(&im, "head", s->head_format, s->vocab, s->hidden);
  image_plain(&im, "final_norm", s->hidden, 0);
  image_plain(&im, "rope.inv_freq", s->head_dim / 2, 0);
  for (int i = 0; i < s->layers; i++) image_layer(&im, s, i);
  image_put(&im, "], \"blobs\": {\"tokenizer.json\": {\"offset\": %llu, \"length\": 10, \"sha256\": \"00\"}, ", (unsigned long long)im.file_bytes);
  image_put(&im, "\"licence\": {\"offset\": %llu, \"length\": 0, \"sha256\": \"00\"}}, ", (unsigned long long)(im.file_bytes += 10));
  image_put(&im, "\"generation\": {\"eos_token_ids\": [2], \"pad_token_id\": null}, \"provenance\": {\"notes\": \"\\u00fc\\n\"}}");
  return im;
}

/* With room for the descriptor to grow by some kilobytes. */
static inline image image_make(const image_shape *s) {
  uint64_t rows = 8 + (uint64_t)s->layers * (uint64_t)(12 + s->experts);
  return image_make_at(s, (rows * 256 + 8192 + 4095) / 4096 * 4096);
}

/* The copy owns its text. */
static inline image image_copy(const image *im) {
  image copy = *im;
  copy.text = malloc(copy.room);
  if (!copy.text) abort();
  memcpy(copy.text, im->text, im->text_bytes + 1);
  return copy;
}

static inline void image_free(image *im) { free(im->text); }

/* Replaces the first `from` of the descriptor; false if there is none. */
static inline bool image_replace(image *im, const char *from, const char *to) {
  char *at = strstr(im->text, from);
  if (!at) return false;
  size_t before = (size_t)(at - im->text), after = im->text_bytes - before - strlen(from);
  size_t needed = before + strlen(to) + after + 1;
  char *text = malloc(needed + 1024);
  if (!text) abort();
  memcpy(text, im->text, before);
  memcpy(text + before, to, strlen(to));
  memcpy(text + before + strlen(to), at + strlen(from), after + 1);
  free(im->text);
  im->text = text;
  im->text_bytes = needed - 1;
  im->room = needed + 1024;
  return true;
}

/* Bitwise CRC-32, on purpose not the engine's. */
static inline uint32_t image_crc(const void *data, size_t size) {
  uint32_t c = ~0u;
  for (size_t i = 0; i < size; i++) {
    c ^= ((const uint8_t *)data)[i];
    for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (0xEDB88320u & -(c & 1));
  }
  return ~c;
}

static inline void image_store(uint8_t *p, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> 8 * i);
}

/* Makes lengths and both checksums of an image right again: descriptor_bytes behind the header, the rest data. */
static inline void image_fix(uint8_t *data, uint64_t size, uint64_t descriptor_bytes) {
  image_store(data + 24, descriptor_bytes, 8);
  image_store(data + 32, size, 8);
  image_store(data + 40, image_crc(data + IMAGE_HEADER, descriptor_bytes), 4);
  image_store(data + 44, image_crc(data, 44), 4);
}

/* The file: header, descriptor, zeros. malloc'ed, *size bytes. */
static inline uint8_t *image_seal(const image *im, size_t *size) {
  uint64_t bytes = im->file_bytes > IMAGE_HEADER + im->text_bytes ? im->file_bytes : IMAGE_HEADER + im->text_bytes;
  uint8_t *data = calloc(1, bytes);
  if (!data) abort();
  memcpy(data, "COLIBRI", 8);
  image_store(data + 8, 1, 4);
  image_store(data + 12, 0x01020304, 4);
  image_store(data + 16, IMAGE_HEADER, 8);
  memcpy(data + IMAGE_HEADER, im->text, im->text_bytes);
  image_fix(data, bytes, im->text_bytes);
  *size = bytes;
  return data;
}

#endif
