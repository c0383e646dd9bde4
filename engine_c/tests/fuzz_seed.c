/* fuzz_seed.c - writes the fuzzer's first corpus and, beside the folder, its dictionary: fuzz_seed FOLDER. */
#include <stdio.h>
#include <stdlib.h>

#include "image.h"

/* The smallest models with each format, tied and not, with and without a router and the optional tensors. */
static const image_shape shapes[] = {
  {1, 1, 1, 1, 1, 2, 1, 1, 1, "int4", "int4", true, false, false},
  {1, 1, 1, 1, 1, 2, 1, 1, 1, "int4", "int8", false, false, false},
  {1, 1, 1, 1, 1, 2, 1, 2, 1, "int4", "int4", true, false, false},
  {1, 1, 2, 2, 1, 2, 1, 2, 2, "int8", "int4", true, true, false},
  {1, 1, 1, 1, 1, 2, 1, 1, 1, "bf16", "f32", true, false, false},
};

/* Words the parser looks for, which mutations would hardly find. */
static const char *const words[] = {
  "name", "requires", "arch", "router", "quant", "tensors", "blobs", "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "experts", "max_context",
  "sliding_window", "norm_eps", "attention_scale", "activation", "rope", "style", "dims", "scale", "score", "weight", "renorm", "apply_at", "layout", "format",
  "shape", "offset", "length", "sha256", "plain", "p32", "expert", "f32", "bf16", "int8", "int4", "silu", "half", "interleaved", "softmax_all", "softmax_chosen",
  "unbiased_score", "none", "output", "embed", "head", "final_norm", "rope.inv_freq", "extra.", ".attn_norm", ".ffn_norm", ".qkv", ".o", ".router", ".qkv_bias",
  "sigmoid", "sqrt_softplus", "logits", "sparsemixer", "sigmoid_chosen", "sum", "sum_top2", "max", "zero", "minus_inf", "input", "residual", "normed", "n_group",
  "topk_group", "group_metric", "group_mask", "renorm_eps", "renorm_way", "jitter_eps", ".router_select_bias", ".router_expert_scale", ".router_input_scale",
  ".q_norm", ".k_norm", ".router_bias", ".experts.", "layers.0", "layers.1", "null", "true", "false", "1e308", "1e-400", "-1", "9223372036854775807",
  "18446744073709551615", "4294967296", "2147483648", "\\u0000", "\\ud83d", "[[[[[[[[",
};

static void write_file(const char *folder, const char *name, const void *data, size_t size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(data, 1, size, file) != size || fclose(file)) {
    perror(path);
    exit(1);
  }
}

/* A whole file (short: no data) or, for the rest, header and descriptor, the length of the data where fuzz_container.c looks for it. */
static void write_seed(const char *folder, int index, bool whole) {
  image im = image_make_at(&shapes[index], 4096 * (1 + (uint64_t)shapes[index].layers));
  char name[32];
  size_t size, descriptor_end = IMAGE_HEADER + im.text_bytes;
  uint8_t *data = image_seal(&im, &size);
  if (descriptor_end > im.file_bytes || size - descriptor_end > UINT16_MAX) abort();
  if (!whole) image_store(data + 48, size - descriptor_end, 2);
  snprintf(name, sizeof name, whole ? "whole-%d" : "seed-%d", index);
  write_file(folder, name, data, whole ? size : descriptor_end);
  free(data);
  image_free(&im);
}

static void write_dictionary(const char *folder) {
  char text[8192];
  size_t n = 0;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    n += (size_t)sprintf(text + n, "\"");
    for (const char *p = words[i]; *p; p++) n += (size_t)sprintf(text + n, *p == '\\' ? "\\%c" : "%c", *p);
    n += (size_t)sprintf(text + n, "\"\n");
  }
  write_file(folder, "../container.dict", text, n);
}

int main(int count, char **arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: fuzz_seed FOLDER\n");
    return 2;
  }
  for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) write_seed(arguments[1], i, false);
  write_seed(arguments[1], 0, true);
  write_dictionary(arguments[1]);
  return 0;
}
