/* random_model.h - a small random model as a container in a memfd, for the C tests. */
#ifndef COLIBRI_TEST_RANDOM_MODEL_H
#define COLIBRI_TEST_RANDOM_MODEL_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "colibri.h"

typedef struct random_shape {
  int layers, hidden, heads, kv_heads, head_dim, ffn, experts, top_k, vocab, context, window, format;
} random_shape;

typedef struct random_builder {
  char *data;              /* the file image */
  uint64_t at, room;
  char json[1 << 18];
  int n;                   /* bytes of json used */
  uint32_t rng;
} random_builder;

static uint32_t random_crc32(const void *data, size_t size) {
  uint32_t c = ~0u;
  for (size_t i = 0; i < size; i++) {
    c ^= ((const uint8_t *)data)[i];
    for (int k = 0; k < 8; k++) c = c >> 1 ^ (c & 1 ? 0xedb88320u : 0);
  }
  return ~c;
}

static float random_unit(random_builder *b) {
  b->rng = b->rng * 1664525u + 1013904223u;
  return (float)(int32_t)b->rng / 2147483648.0f;
}

static float *random_floats(random_builder *b, int64_t n, float scale, float offset) {
  float *w = malloc(sizeof(float) * (size_t)n);
  for (int64_t i = 0; i < n; i++) w[i] = offset + scale * random_unit(b);
  return w;
}

static void *random_place(random_builder *b, const char *name, const char *layout, const char *format, int d0, int d1, uint64_t bytes) {
  uint64_t align = strcmp(layout, "plain") ? 4096 : 64;
  b->at = (b->at + align - 1) / align * align;
  if (b->at + bytes > b->room) {
    fprintf(stderr, "random model: the image is too small\n");
    exit(2);
  }
  b->n += snprintf(b->json + b->n, sizeof b->json - (size_t)b->n, "%s{\"name\":\"%s\",\"layout\":\"%s\",\"format\":\"%s\",\"shape\":[%d%s%.0d],\"offset\":%llu,\"length\":%llu,\"sha256\":\"%064d\"}",
                   b->json[b->n - 1] == '[' ? "" : ",", name, layout, format, d0, d1 ? "," : "", d1, (unsigned long long)b->at, (unsigned long long)bytes, 0);
  void *p = b->data + b->at;
  b->at += bytes;
  return p;
}

static const char *random_format_name(int format) {
  static const char *names[] = {"f32", "bf16", "int8", "int4"};
  return names[format];
}

static void random_plain(random_builder *b, const char *name, int d0, int d1, float scale, float offset) {
  int64_t n = (int64_t)d0 * (d1 ? d1 : 1);
  float *w = random_floats(b, n, scale, offset);
  memcpy(random_place(b, name, "plain", "f32", d0, d1, 4 * (uint64_t)n), w, 4 * (size_t)n);
  free(w);
}

static void random_packed(random_builder *b, const char *name, int format, int n, int k, float scale) {
  float *w = random_floats(b, (int64_t)n * k, scale, 0);
  colibri_pack(format, w, n, k, random_place(b, name, "p32", random_format_name(format), n, k, colibri_packed_bytes(format, n, k)), NULL);
  free(w);
}

static void random_expert(random_builder *b, const char *name, const random_shape *s) {
  int64_t n = (int64_t)s->ffn * s->hidden;
  float scale = 2.0f / (float)(s->hidden > 16 ? 16 : s->hidden);
  float *gate = random_floats(b, n, scale, 0), *up = random_floats(b, n, scale, 0), *down = random_floats(b, n, scale, 0);
  void *at = random_place(b, name, "expert", random_format_name(s->format), s->ffn, s->hidden, colibri_expert_bytes(s->format, s->hidden, s->ffn));
  colibri_pack_expert(s->format, gate, up, down, s->hidden, s->ffn, at, NULL);
  free(gate), free(up), free(down);
}

static void random_layer(random_builder *b, const random_shape *s, int l) {
  char name[64];
  int q = s->heads * s->head_dim, qkv = q + 2 * s->kv_heads * s->head_dim;
#define NAMED(...) (snprintf(name, sizeof name, __VA_ARGS__), name)
  random_plain(b, NAMED("layers.%d.attn_norm", l), s->hidden, 0, 0.1f, 1);
  random_plain(b, NAMED("layers.%d.ffn_norm", l), s->hidden, 0, 0.1f, 1);
  random_packed(b, NAMED("layers.%d.qkv", l), s->format, qkv, s->hidden, 0.2f);
  random_packed(b, NAMED("layers.%d.o", l), s->format, s->hidden, q, 0.2f);
  if (s->experts > 1) random_plain(b, NAMED("layers.%d.router", l), s->experts, s->hidden, 0.5f, 0);
  for (int e = 0; e < s->experts; e++) random_expert(b, NAMED("layers.%d.experts.%d", l, e), s);
#undef NAMED
}

static void random_header(random_builder *b) {
  uint64_t words[3] = {64, (uint64_t)b->n, b->at};
  uint32_t version = 1, order = 0x01020304, crc = random_crc32(b->json, (size_t)b->n);
  memcpy(b->data, "COLIBRI", 8);
  memcpy(b->data + 8, &version, 4);
  memcpy(b->data + 12, &order, 4);
  memcpy(b->data + 16, words, 24);
  memcpy(b->data + 40, &crc, 4);
  crc = random_crc32(b->data, 44);
  memcpy(b->data + 44, &crc, 4);
  memcpy(b->data + 64, b->json, (size_t)b->n);
}

/* Writes the model's image into a new memfd. Exits on failure: test code. */
static int random_model_fd(const random_shape *s, uint32_t seed) {
  random_builder *b = calloc(1, sizeof *b);
  int fd = memfd_create("random-model", MFD_CLOEXEC), half = s->head_dim / 2;
  b->room = UINT64_C(1) << 28;
  b->data = mmap(NULL, b->room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  b->at = sizeof b->json + 4096;
  b->rng = seed;
  b->n = snprintf(b->json, sizeof b->json,
                  "{\"name\":\"random\",\"requires\":[],\"arch\":{\"vocab\":%d,\"hidden\":%d,\"layers\":%d,\"heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"ffn\":%d,"
                  "\"experts\":%d,\"max_context\":%d,\"sliding_window\":%d,\"norm_eps\":1e-05,\"attention_scale\":0.25,\"activation\":\"silu\","
                  "\"rope\":{\"style\":\"half\",\"dims\":%d,\"scale\":1.0}},\"router\":{\"score\":\"softmax_all\",\"k\":%d,\"weight\":\"softmax_chosen\","
                  "\"renorm\":\"none\",\"scale\":1.0,\"apply_at\":\"output\"},\"quant\":\"%s\",\"blobs\":{},\"tensors\":[",
                  s->vocab, s->hidden, s->layers, s->heads, s->kv_heads, s->head_dim, s->ffn, s->experts, s->context, s->window, s->head_dim,
                  s->top_k, random_format_name(s->format));
  random_packed(b, "embed", s->format == COLIBRI_INT4 ? COLIBRI_INT8 : s->format, s->vocab, s->hidden, 1);
  random_packed(b, "head", s->format == COLIBRI_INT4 ? COLIBRI_INT8 : s->format, s->vocab, s->hidden, 0.3f);
  random_plain(b, "final_norm", s->hidden, 0, 0.1f, 1);
  float *freq = (float *)random_place(b, "rope.inv_freq", "plain", "f32", half, 0, 4 * (uint64_t)half);
  for (int i = 0; i < half; i++) freq[i] = 1.0f / (float)(1 + 7 * i);
  for (int l = 0; l < s->layers; l++) random_layer(b, s, l);
  b->n += snprintf(b->json + b->n, sizeof b->json - (size_t)b->n, "]}");
  random_header(b);
  for (uint64_t done = 0; done < b->at;) {
    ssize_t n = write(fd, b->data + done, b->at - done);
    if (n <= 0) exit(2);
    done += (uint64_t)n;
  }
  munmap(b->data, b->room);
  free(b);
  return fd;
}

#endif
