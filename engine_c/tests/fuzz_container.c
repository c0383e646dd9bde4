/* fuzz_container.c - libFuzzer target for the container parser. Every input is tried as it is, and again as a sound file whose descriptor is what stands
 * behind the input's header, followed by as many zeros as bytes 48 and 49 say: so the fuzzer reaches the descriptor, and an input stays small.
 * `make fuzz` builds and runs it; by hand, from the repository's root (gcc has no libFuzzer):
 *
 *   mkdir -p build/fuzz/corpus
 *   clang -std=gnu11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -ffp-contract=off -Wall -Wextra -Werror \
 *     -Iengine_c/include -Iengine_c/src -Iengine_c/kernels engine_c/tests/fuzz_container.c \
 *     engine_c/src/{error,json,container,tensors,model,pack}.c engine_c/kernels/numeric.c -o build/fuzz/fuzz_container
 *   cc -std=gnu11 -O1 engine_c/tests/fuzz_seed.c -o build/fuzz/fuzz_seed && build/fuzz/fuzz_seed build/fuzz/corpus
 *   build/fuzz/fuzz_container -dict=build/fuzz/container.dict -max_len=16384 -max_total_time=30 -rss_limit_mb=2048 build/fuzz/corpus */
#include <stdlib.h>
#include <string.h>

#include "colibri.h"
#include "image.h"
#include "model.h"

/* The kernels are left out of this build: only opening a file, which is not fuzzed, chooses among them. */
int colibri_isa_ensure(colibri_error *err);
int colibri_isa_ensure(colibri_error *err) {
  (void)err;
  return COLIBRI_OK;
}

/* Reads a byte wherever an accepted container says that data are: the promise the parser makes. */
static unsigned touch(const char *data, uint64_t bytes) { return bytes ? (unsigned)(unsigned char)data[0] + (unsigned char)data[bytes - 1] : 0; }

static unsigned touch_matrix(const colibri_matrix *m) { return m->data ? touch(m->data, colibri_packed_bytes(m->format, m->n, m->k)) : 0; }

static unsigned touch_floats(const float *data, int64_t n) { return data ? touch((const char *)data, (uint64_t)n * 4) : 0; }

static unsigned touch_model(const colibri_model *m) {
  const colibri_model_info *info = &m->info;
  unsigned sum = touch_matrix(&m->embed) + touch_matrix(&m->head) + touch_floats(m->final_norm, info->hidden) + touch_floats(m->inv_freq, m->rope_dims / 2);
  for (int l = 0; l < info->layers; l++) {
    const colibri_layer *layer = &m->layers[l];
    sum += touch_matrix(&layer->qkv) + touch_matrix(&layer->o) + touch_floats(layer->attn_norm, info->hidden) + touch_floats(layer->ffn_norm, info->hidden);
    sum += touch_floats(layer->router, (int64_t)info->experts * info->hidden) + touch_floats(layer->route.bias, info->experts);
    sum += touch_floats(layer->route.select_bias, info->experts) + touch_floats(layer->route.expert_scale, info->experts);
    sum += touch_floats(layer->router_input_scale, info->hidden);
    sum += touch_floats(layer->qkv_bias, (int64_t)(info->heads + 2 * info->kv_heads) * info->head_dim);
    sum += touch_floats(layer->q_norm, info->head_dim) + touch_floats(layer->k_norm, info->head_dim);
    for (int e = 0; e < info->experts; e++) {
      const colibri_expert *x = &layer->experts[e];
      if (x->gate_up.data) sum += touch(x->gate_up.data, colibri_expert_bytes(x->down.format, info->hidden, info->ffn)) + touch_matrix(&x->down);
    }
  }
  return sum;
}

volatile unsigned colibri_fuzz_sink; /* keeps the reads above from being optimised away */

static void try(const uint8_t *data, size_t size) {
  colibri_model m;
  colibri_error err = {0};
  int rc = colibri_container_parse(data, size, &m, &err);
  if (rc == COLIBRI_OK) {
    colibri_fuzz_sink += touch_model(&m);
    colibri_container_release(&m);
  } else if (rc > 0 || err.code != rc || !err.message[0] || m.layers || m.experts) {
    abort(); /* a refusal without its sentence, or with something left allocated */
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  try(data, size);
  if (size < IMAGE_HEADER) return 0;
  size_t file = size + data[48] + 256u * data[49];
  uint8_t *fixed = calloc(1, file);
  if (!fixed) return 0;
  memcpy(fixed, "COLIBRI", 8);
  image_store(fixed + 8, 1, 4);
  image_store(fixed + 12, 0x01020304, 4);
  image_store(fixed + 16, IMAGE_HEADER, 8);
  memcpy(fixed + IMAGE_HEADER, data + IMAGE_HEADER, size - IMAGE_HEADER);
  image_fix(fixed, file, size - IMAGE_HEADER);
  try(fixed, file);
  free(fixed);
  return 0;
}
