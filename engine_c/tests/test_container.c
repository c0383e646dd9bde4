/* test_container.c - the container parser: valid images of many shapes, then every kind of damage. Each image ends at an inaccessible page, so
 * that a read beyond it faults, in builds without a sanitizer as well. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "image.h"
#include "kernels.h"
#include "model.h"

static const image_shape usual = {10, 64, 2, 4, 2, 16, 48, 3, 2, "int4", "int8", false, true, false};

/* ---------------------------------------------------------------- running the parser */

static char *fence_end;      /* the inaccessible page */
static size_t fence_room;

static void fence_open(size_t room) {
  fence_room = (room + 4095) / 4096 * 4096;
  char *map = mmap(NULL, fence_room + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED || mprotect(map + fence_room, 4096, PROT_NONE)) {
    perror("fence");
    exit(2);
  }
  fence_end = map + fence_room;
}

/* Checks the first `size` bytes of data, placed right before the fence. */
static int run(const uint8_t *data, size_t size, colibri_error *err) {
  if (size > fence_room) abort();
  char *place = fence_end - size;
  memcpy(place, data, size);
  *err = (colibri_error){0};
  return colibri_model_check(place, size, err);
}

/* Expects a refusal with `code` whose sentence holds `needle`. */
static void refused(const char *what, const uint8_t *data, size_t size, int code, const char *needle) {
  colibri_error err;
  int rc = run(data, size, &err);
  CHECK(rc == code && err.code == code, "%s: %d, want %d (%s)", what, rc, code, err.message);
  CHECK(strstr(err.message, needle), "%s: \"%s\" does not say \"%s\"", what, err.message, needle);
  CHECK(strlen(err.message) < sizeof err.message - 1, "%s: the sentence is cut off: %s", what, err.message);
}

static void accepted(const char *what, const image *im) {
  colibri_error err;
  size_t size;
  uint8_t *data = image_seal(im, &size);
  CHECK(run(data, size, &err) == COLIBRI_OK, "%s: %s", what, err.message);
  free(data);
}

static void refused_image(const char *what, const image *im, int code, const char *needle) {
  size_t size;
  uint8_t *data = image_seal(im, &size);
  refused(what, data, size, code, needle);
  free(data);
}

/* ---------------------------------------------------------------- valid images */

static const image_shape shapes[] = {
  {10, 64, 2, 4, 2, 16, 48, 3, 2, "int4", "int8", false, true, false},
  {1, 1, 1, 1, 1, 2, 1, 1, 1, "f32", "f32", true, false, false},
  {50, 96, 3, 3, 1, 40, 112, 5, 2, "bf16", "bf16", true, false, false},
  {33, 160, 1, 6, 3, 20, 176, 6, 6, "int8", "int8", false, false, false},
  {7, 32, 2, 2, 2, 16, 16, 64, 8, "f32", "int4", false, true, false},
  {7, 32, 1, 2, 2, 16, 16, 1024, 64, "int4", "f32", true, true, false},
};

static uint64_t packed(const char *format, int n, int k) { return image_ceil32(n) * image_ceil32(k) * image_block(format); }

static void check_info(const colibri_model *m, const image_shape *s, const image *im) {
  const colibri_model_info *i = &m->info;
  uint64_t rows = (uint64_t)(s->heads + 2 * s->kv_heads) * (uint64_t)s->head_dim, hidden = (uint64_t)s->hidden;
  uint64_t expert = 3 * image_ceil32(s->ffn) * image_ceil32(s->hidden) * image_block(s->format), table = packed(s->head_format, s->vocab, s->hidden);
  uint64_t layer = 8 * hidden + packed(s->format, (int)rows, s->hidden) + packed(s->format, s->hidden, s->heads * s->head_dim);
  if (s->experts > 1) layer += (uint64_t)s->experts * hidden * 4;
  if (s->extras) layer += 4 * (rows + 2 * (uint64_t)s->head_dim + 3 * (uint64_t)s->experts);
  uint64_t rest = (uint64_t)s->layers * layer + 4 * hidden + 4 * (uint64_t)(s->head_dim / 2);
  CHECK(i->vocab == s->vocab && i->hidden == s->hidden && i->layers == s->layers && i->heads == s->heads && i->kv_heads == s->kv_heads, "shape");
  CHECK(i->head_dim == s->head_dim && i->ffn == s->ffn && i->experts == s->experts && i->top_k == s->k && i->max_context == 4096, "shape");
  CHECK(i->sliding_window == 128 && i->norm_eps == 1e-5f && i->attention_scale == 0.125f && i->tied_head == s->tied, "scalars");
  CHECK(i->router_layers == (s->experts > 1 ? s->layers : 0), "%d layers with a router", i->router_layers);
  CHECK(m->rope_dims == s->head_dim && m->rope_interleaved == 0 && m->rope_scale == 1.0f, "rope");
  CHECK(i->file_bytes == im->file_bytes && i->expert_bytes == expert * (uint64_t)(s->layers * s->experts), "%llu bytes of experts",
        (unsigned long long)i->expert_bytes);
  CHECK(i->backbone_bytes == rest + table * (s->tied ? 1 : 2), "%llu bytes of backbone", (unsigned long long)i->backbone_bytes);
  CHECK(i->active_bytes == rest + table + expert * (uint64_t)(s->layers * s->k), "%llu active bytes", (unsigned long long)i->active_bytes);
}

/* Every pointer leads to where the table says, every matrix covers its tensor exactly. */
static void check_pointers(const colibri_model *m, const image_shape *s, const char *base) {
  uint64_t down = packed(s->format, s->hidden, s->ffn);
  for (int l = 0; l < s->layers; l++) {
    const colibri_layer *layer = &m->layers[l];
    CHECK(layer->qkv.n == (s->heads + 2 * s->kv_heads) * s->head_dim && layer->qkv.k == s->hidden && layer->o.n == s->hidden, "layer %d", l);
    CHECK((layer->router != NULL) == (s->experts > 1) && (layer->qkv_bias != NULL) == s->extras && (layer->k_norm != NULL) == s->extras, "layer %d", l);
    for (int e = 0; e < s->experts; e++) {
      const colibri_expert *x = &layer->experts[e];
      CHECK(x->gate_up.n == 2 * s->ffn && x->gate_up.k == s->hidden && x->down.n == s->hidden && x->down.k == s->ffn, "layer %d expert %d", l, e);
      CHECK(x->gate_up.panels == (int)(2 * image_ceil32(s->ffn)) && x->gate_up.groups == (int)image_ceil32(s->hidden), "layer %d expert %d", l, e);
      CHECK((uint64_t)(x->down.data - x->gate_up.data) == 2 * down, "layer %d expert %d: down at %td", l, e, x->down.data - x->gate_up.data);
      CHECK((x->gate_up.data - base) % 4096 == 0, "layer %d expert %d is not aligned", l, e);
    }
  }
  CHECK(m->head.n == s->vocab && m->head.k == s->hidden && (m->head.data == m->embed.data) == s->tied, "head");
}

static void valid_images_are_read(void) {
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    image im = image_make(&shapes[i]);
    size_t size;
    uint8_t *data = image_seal(&im, &size);
    colibri_model m;
    colibri_error err = {0};
    int rc = colibri_container_parse(data, size, &m, &err);
    CHECK(rc == COLIBRI_OK, "shape %zu: %s", i, err.message);
    if (!rc) {
      check_info(&m, &shapes[i], &im);
      check_pointers(&m, &shapes[i], (const char *)data);
      colibri_container_release(&m);
    }
    free(data);
    image_free(&im);
  }
}

/* ---------------------------------------------------------------- edits of the descriptor */

struct edit {
  const char *from, *to;
  int code;             /* COLIBRI_OK: still valid */
  const char *needle;   /* in the sentence */
};

/* Says something else of the router's score, and more. */
#define ROUTER(to, code, needle) {"\"score\": \"softmax_all\"", to, code, needle}

static const struct edit edits[] = {
  /* harmless */
  {"\"requires\": [], ", "", COLIBRI_OK, ""},
  {"\"name\": \"test\"", "\"future\": {\"a\": [1, {\"b\": null}]}, \"name\": 7", COLIBRI_OK, ""},
  {"\"vocab\": 10", "\"hint\": [0.5], \"vocab\": 10", COLIBRI_OK, ""},
  {"\"layout\": \"p32\"", "\"hint\": {}, \"layout\": \"p32\"", COLIBRI_OK, ""},
  {"\"layout\": \"plain\", \"format\": \"f32\"", "\"layout\": \"plain\"", COLIBRI_OK, ""},
  {"\"name\": \"embed\"", "\"name\": \"\\u0065mbed\"", COLIBRI_OK, ""},
  {"\"renorm\": \"none\"", "\"renorm\": \"none\", \"groups\": null, \"sel_bias\": false", COLIBRI_OK, ""},
  {"\"weight\": \"softmax_chosen\"", "\"weight\": \"unbiased_score\"", COLIBRI_OK, ""},
  {"\"style\": \"half\"", "\"style\": \"interleaved\"", COLIBRI_OK, ""},
  {"\"quant\": \"int4\"", "\"quant\": \"mixed\"", COLIBRI_OK, ""},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"extra.anything\"", COLIBRI_OK, ""},
  {"\"sliding_window\": 128", "\"sliding_window\": 0", COLIBRI_OK, ""},
  {"\"norm_eps\": 1e-05", "\"norm_eps\": 0", COLIBRI_OK, ""},
  ROUTER("\"score\": \"sigmoid\"", COLIBRI_OK, ""),
  ROUTER("\"score\": \"sqrt_softplus\"", COLIBRI_OK, ""),
  ROUTER("\"score\": \"logits\", \"input\": \"normed\"", COLIBRI_OK, ""),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 3, \"topk_group\": 2, \"group_metric\": \"max\", \"group_mask\": \"zero\"", COLIBRI_OK, ""),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 1, \"topk_group\": 1, \"group_metric\": null, \"jitter_eps\": null", COLIBRI_OK, ""),
  {"\"renorm\": \"none\"", "\"renorm\": \"sum\"", COLIBRI_OK, ""},
  {"\"renorm\": \"none\"", "\"renorm\": \"sum\", \"renorm_eps\": 1e-12, \"renorm_way\": \"clamp\"", COLIBRI_OK, ""},
  {"\"weight\": \"softmax_chosen\"", "\"weight\": \"sparsemixer\", \"jitter_eps\": 0.01", COLIBRI_OK, ""},
  {"\"weight\": \"softmax_chosen\"", "\"weight\": \"sigmoid_chosen\"", COLIBRI_OK, ""},
  {"\"apply_at\": \"output\"", "\"apply_at\": \"input\"", COLIBRI_OK, ""},
  {"\"name\": \"layers.0.router_select_bias\"", "\"name\": \"extra.anything\"", COLIBRI_OK, ""},
  /* routers that contradict themselves */
  {"\"weight\": \"softmax_chosen\"", "\"weight\": \"sparsemixer\"", COLIBRI_EFORMAT, "router.jitter_eps is missing though router.weight is sparsemixer"},
  {"\"weight\": \"softmax_chosen\"", "\"weight\": \"softmax_chosen\", \"jitter_eps\": 0.01", COLIBRI_EFORMAT, "router.weight is not sparsemixer"},
  {"\"renorm\": \"none\"", "\"renorm\": \"none\", \"renorm_eps\": 1e-20", COLIBRI_EFORMAT, "router.renorm_eps is 1e-20 though router.renorm is none"},
  {"\"renorm\": \"none\"", "\"renorm\": \"sum\", \"renorm_eps\": -1", COLIBRI_EFORMAT, "router.renorm_eps is -1"},
  {"\"renorm\": \"none\"", "\"renorm\": \"sum\", \"renorm_way\": \"floor\"", COLIBRI_EUNSUPPORTED, "this engine runs: add, clamp"},
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 0", COLIBRI_EFORMAT, "router.n_group is 0, outside 1.."),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 2, \"topk_group\": 1, \"group_metric\": \"max\", \"group_mask\": \"zero\"", COLIBRI_EFORMAT,
         "router.n_group is 2, which does not divide the 3 experts"),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 3, \"topk_group\": 2", COLIBRI_EFORMAT, "router.group_metric is missing though router.n_group"),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 3, \"group_metric\": \"max\", \"group_mask\": \"zero\"", COLIBRI_EFORMAT, "router.topk_group is missing"),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 3, \"topk_group\": 1, \"group_metric\": \"max\", \"group_mask\": \"zero\"", COLIBRI_EFORMAT,
         "router.k is 2, but router.topk_group keeps only 1 groups of 1 experts"),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 3, \"topk_group\": 4, \"group_metric\": \"max\", \"group_mask\": \"zero\"", COLIBRI_EFORMAT,
         "router.topk_group is 4, outside 1..3"),
  ROUTER("\"score\": \"sigmoid\", \"n_group\": 3, \"topk_group\": 2, \"group_metric\": \"sum_top2\", \"group_mask\": \"zero\"", COLIBRI_EFORMAT,
         "router.group_metric is sum_top2, but a group has one expert"),
  ROUTER("\"score\": \"sigmoid\", \"topk_group\": 2", COLIBRI_EFORMAT, "router.topk_group is 2 though there are no groups"),
  ROUTER("\"score\": \"sigmoid\", \"input\": \"residual\"", COLIBRI_EFORMAT, "layers.0.router_input_scale is missing though router.input is residual"),
  /* what this engine cannot run */
  {"\"requires\": []", "\"requires\": [\"mla\"]", COLIBRI_EUNSUPPORTED, "\"mla\""},
  {"\"score\": \"softmax_all\"", "\"score\": \"tanh\"", COLIBRI_EUNSUPPORTED,
   "router.score is \"tanh\"; this engine runs: softmax_all, sigmoid, sqrt_softplus, logits"},
  {"\"weight\": \"softmax_chosen\"", "\"weight\": \"uniform\"", COLIBRI_EUNSUPPORTED,
   "this engine runs: softmax_chosen, unbiased_score, sparsemixer, sigmoid_chosen"},
  {"\"renorm\": \"none\"", "\"renorm\": \"l2\"", COLIBRI_EUNSUPPORTED, "router.renorm is \"l2\"; this engine runs: none, sum"},
  {"\"renorm\": \"none\"", "\"renorm\": \"none\", \"groups\": {\"n_group\": 8}", COLIBRI_EUNSUPPORTED, "router.groups"},
  {"\"renorm\": \"none\"", "\"renorm\": \"none\", \"sel_bias\": true", COLIBRI_EUNSUPPORTED, "router.sel_bias"},
  {"\"apply_at\": \"output\"", "\"apply_at\": \"middle\"", COLIBRI_EUNSUPPORTED, "router.apply_at"},
  {"\"activation\": \"silu\"", "\"activation\": \"gelu\"", COLIBRI_EUNSUPPORTED, "\"gelu\"; this engine runs: silu"},
  {"\"style\": \"half\"", "\"style\": \"spiral\"", COLIBRI_EUNSUPPORTED, "half, interleaved"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"layers.0.sinks\"", COLIBRI_EUNSUPPORTED, "layers.0.sinks"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"layers.2.qkv_bias\"", COLIBRI_EUNSUPPORTED, "layers.2.qkv_bias"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"layers.00.qkv_bias\"", COLIBRI_EUNSUPPORTED, "layers.00.qkv_bias"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"layers.-1.qkv_bias\"", COLIBRI_EUNSUPPORTED, "layers.-1"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"layers.99999999999999999999.qkv\"", COLIBRI_EUNSUPPORTED, "layers.999"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"layers.0.experts.3\"", COLIBRI_EUNSUPPORTED, "layers.0.experts.3"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"\"", COLIBRI_EUNSUPPORTED, "has no place"},
  {"\"name\": \"layers.0.qkv_bias\"", "\"name\": \"a\\u0000b\"", COLIBRI_EUNSUPPORTED, "has no place"},
  {"\"format\": \"int8\"", "\"format\": \"mxfp4\"", COLIBRI_EUNSUPPORTED, "\"mxfp4\""},
  {"\"layout\": \"plain\", \"format\": \"f32\"", "\"layout\": \"plain\", \"format\": \"bf16\"", COLIBRI_EUNSUPPORTED, "reads f32 there"},
  /* scalars */
  {"\"vocab\": 10", "\"vocab\": 0", COLIBRI_EFORMAT, "arch.vocab is 0, outside 1.."},
  {"\"vocab\": 10", "\"vocab\": -10", COLIBRI_EFORMAT, "arch.vocab is -10"},
  {"\"hidden\": 64", "\"hidden\": 9223372036854775807", COLIBRI_EFORMAT, "arch.hidden is 9223372036854775807"},
  {"\"hidden\": 64", "\"hidden\": 4294967360", COLIBRI_EFORMAT, "arch.hidden is 4294967360"},
  {"\"hidden\": 64", "\"hidden\": 99999999999999999999999999", COLIBRI_EFORMAT, "arch.hidden: an integer is beyond 64 bits"},
  {"\"hidden\": 64", "\"hidden\": 64.0", COLIBRI_EFORMAT, "arch.hidden: an integer was expected"},
  {"\"hidden\": 64", "\"hidden\": \"64\"", COLIBRI_EFORMAT, "arch.hidden: a number was expected"},
  {"\"hidden\": 64", "\"hidden\": null", COLIBRI_EFORMAT, "arch.hidden"},
  {"\"hidden\": 64", "\"hidden\": NaN", COLIBRI_EFORMAT, "arch.hidden"},
  {"\"hidden\": 64, ", "", COLIBRI_EFORMAT, "arch.hidden is missing"},
  {"\"hidden\": 64", "\"hidden\": 64, \"hidden\": 64", COLIBRI_EFORMAT, "arch.hidden stands twice"},
  {"\"layers\": 2", "\"layers\": 1000000000", COLIBRI_EFORMAT, "arch.layers"},
  {"\"layers\": 2", "\"layers\": 1024", COLIBRI_EFORMAT, "too few for 1024 layers"},
  {"\"layers\": 2", "\"layers\": 3", COLIBRI_EFORMAT, "layers.2.attn_norm is missing"},
  {"\"layers\": 2", "\"layers\": 1", COLIBRI_EUNSUPPORTED, "layers.1."},
  {"\"heads\": 4", "\"heads\": 3", COLIBRI_EFORMAT, "arch.heads is 3, not a multiple of arch.kv_heads 2"},
  {"\"experts\": 3", "\"experts\": 4", COLIBRI_EFORMAT, "expected [4, 64]"},
  {"\"experts\": 3", "\"experts\": 1", COLIBRI_EFORMAT, "router.k is 2 but arch.experts is 1"},
  {"\"experts\": 3", "\"experts\": 1025", COLIBRI_EFORMAT, "arch.experts"},
  {"\"k\": 2", "\"k\": 0", COLIBRI_EFORMAT, "router.k is 0"},
  {"\"k\": 2", "\"k\": 4", COLIBRI_EFORMAT, "router.k is 4"},
  {"\"k\": 2", "\"k\": 65", COLIBRI_EFORMAT, "router.k is 65"},
  {"\"head_dim\": 16", "\"head_dim\": 8", COLIBRI_EFORMAT, "arch.rope.dims is 16"},
  {"\"dims\": 16", "\"dims\": 15", COLIBRI_EFORMAT, "arch.rope.dims is 15"},
  {"\"dims\": 16", "\"dims\": 8", COLIBRI_EFORMAT, "rope.inv_freq has shape [8], expected [4]"},
  {"\"norm_eps\": 1e-05", "\"norm_eps\": NaN", COLIBRI_EFORMAT, "arch.norm_eps"},
  {"\"norm_eps\": 1e-05", "\"norm_eps\": -1e-05", COLIBRI_EFORMAT, "arch.norm_eps is -1e-05"},
  {"\"norm_eps\": 1e-05", "\"norm_eps\": 1e999", COLIBRI_EFORMAT, "arch.norm_eps: a number is too large"},
  {"\"norm_eps\": 1e-05", "\"norm_eps\": \"1e-5\"", COLIBRI_EFORMAT, "arch.norm_eps"},
  {"\"attention_scale\": 0.125", "\"attention_scale\": 0", COLIBRI_EFORMAT, "arch.attention_scale is 0, outside above 0"},
  {"\"attention_scale\": 0.125", "\"attention_scale\": 1e-300", COLIBRI_EFORMAT, "arch.attention_scale"},
  {"\"scale\": 1.0}}", "\"scale\": Infinity}}", COLIBRI_EFORMAT, "arch.rope.scale"},
  {"\"rope\": {\"style\": \"half\", \"dims\": 16, \"scale\": 1.0}", "\"rope\": 1", COLIBRI_EFORMAT, "arch.rope"},
  {"\"style\": \"half\", ", "", COLIBRI_EFORMAT, "arch.rope.style is missing"},
  {"\"activation\": \"silu\"", "\"activation\": 1", COLIBRI_EFORMAT, "arch.activation"},
  {"\"quant\": \"int4\"", "\"quant\": \"int8\"", COLIBRI_EFORMAT, "quant says int8 but the experts are int4"},
  {"\"quant\": \"int4\"", "\"quant\": 4", COLIBRI_EFORMAT, "quant"},
  /* sections */
  {"\"arch\": {", "\"arch\": [], \"arch\": {", COLIBRI_EFORMAT, "arch"},
  {"\"arch\": {", "\"archi\": {", COLIBRI_EFORMAT, "\"arch\" is missing"},
  {"\"router\": {", "\"routed\": {", COLIBRI_EFORMAT, "\"router\" is missing"},
  {"\"tensors\": [", "\"tensor\": [", COLIBRI_EFORMAT, "\"tensors\" is missing"},
  {"\"tensors\": [", "\"tensors\": [], \"tensors\": [", COLIBRI_EFORMAT, "\"tensors\" stands twice"},
  {"\"tensors\": [", "\"tensors\": [1, ", COLIBRI_EFORMAT, "an object was expected"},
  {"\"requires\": []", "\"requires\": [1]", COLIBRI_EFORMAT, "requires"},
  {"\"requires\": []", "\"requires\": {}", COLIBRI_EFORMAT, "requires"},
  {"\"blobs\": {", "\"blobs\": [", COLIBRI_EFORMAT, "blobs"},
  {"{\"name\": \"test\"", "[\"name\": \"test\"", COLIBRI_EFORMAT, "an object was expected"},
  {"\"notes\": \"\\u00fc\\n\"}}", "\"notes\": \"\\u00fc\\n\"}", COLIBRI_EFORMAT, "descriptor"},
  {"\"notes\": \"\\u00fc\\n\"}}", "\"notes\": \"\\u00fc\\n\"}}}", COLIBRI_EFORMAT, "something follows"},
  {"\"notes\": \"\\u00fc", "\"notes\": \"\xff", COLIBRI_EFORMAT, "UTF-8"},
  /* the table */
  {"\"shape\": [10, 64]", "\"shape\": [64, 10]", COLIBRI_EFORMAT, "embed has shape [64, 10], expected [10, 64]"},
  {"\"shape\": [10, 64]", "\"shape\": [10, 64, 1]", COLIBRI_EFORMAT, "embed has 3 dimensions, expected 2"},
  {"\"shape\": [10, 64]", "\"shape\": [640]", COLIBRI_EFORMAT, "embed has 1 dimensions"},
  {"\"shape\": [10, 64]", "\"shape\": []", COLIBRI_EFORMAT, "embed has 0 dimensions"},
  {"\"shape\": [10, 64]", "\"shape\": [0, 0]", COLIBRI_EFORMAT, "embed has shape [0, 0]"},
  {"\"shape\": [10, 64]", "\"shape\": [-10, -64]", COLIBRI_EFORMAT, "embed has shape [-10, -64]"},
  {"\"shape\": [10, 64]", "\"shape\": [10, 64e0]", COLIBRI_EFORMAT, "an integer was expected"},
  {"\"shape\": [10, 64]", "\"shape\": [4294967306, 64]", COLIBRI_EFORMAT, "embed has shape [4294967306, 64]"},
  {"\"shape\": [10, 64]", "\"shape\": 640", COLIBRI_EFORMAT, "an array was expected"},
  {"\"shape\": [64], ", "", COLIBRI_EFORMAT, "has no \"shape\""},
  {"\"layout\": \"p32\"", "\"layout\": \"plain\"", COLIBRI_EFORMAT, "embed has layout \"plain\", expected p32"},
  {"\"layout\": \"expert\"", "\"layout\": \"p32\"", COLIBRI_EFORMAT, "expected expert"},
  {"\"layout\": \"p32\", ", "", COLIBRI_EFORMAT, "\"embed\" has no \"layout\""},
  {"\"layout\": \"p32\"", "\"layout\": \"p32\", \"layout\": \"p32\"", COLIBRI_EFORMAT, "\"embed\" has \"layout\" twice"},
  {"\"layout\": \"p32\", \"format\": \"int8\"", "\"layout\": \"p32\"", COLIBRI_EUNSUPPORTED, "embed has format \"\""},
  {"\"format\": \"int8\"", "\"format\": \"int4\"", COLIBRI_EFORMAT, "embed has 2176 bytes, its shape and format give 1152"},
  {"\"length\": 2176", "\"length\": 0", COLIBRI_EFORMAT, "embed has 0 bytes"},
  {"\"length\": 2176", "\"length\": 2175", COLIBRI_EFORMAT, "embed has 2175 bytes"},
  {"\"length\": 2176", "\"length\": -1", COLIBRI_EFORMAT, "negative"},
  {"\"length\": 2176", "\"length\": 18446744073709551615", COLIBRI_EFORMAT, "reaches beyond the file"},
  {"\"length\": 2176", "\"length\": 9223372036854775808", COLIBRI_EFORMAT, "reaches beyond the file"},
  {"\"length\": 2176", "\"length\": 18446744073709551616", COLIBRI_EFORMAT, "beyond 64 bits"},
  {"\"name\": \"head\"", "\"name\": \"embed\"", COLIBRI_EFORMAT, "\"embed\" stands twice"},
  {"\"name\": \"layers.1.experts.1\"", "\"name\": \"layers.0.experts.1\"", COLIBRI_EFORMAT, "\"layers.0.experts.1\" stands twice"},
  {"\"name\": \"layers.1.router\"", "\"name\": \"extra.router\"", COLIBRI_EFORMAT, "layers.1.router_bias is there but layers.1.router is missing"},
  {"\"blobs\": {", "\"blobs\": {\"tokenizer.json\": {\"offset\": 97034, \"length\": 0}, ", COLIBRI_EFORMAT, "stands twice"},
  {"\"blobs\": {", "\"blobs\": {\"x\": {\"offset\": 18446744073709551615, \"length\": 1}, ", COLIBRI_EFORMAT, "blob \"x\""},
  {"\"blobs\": {", "\"blobs\": {\"x\": {\"offset\": 9223372036854775807, \"length\": 9223372036854775807}, ", COLIBRI_EFORMAT, "beyond the file"},
  {"\"blobs\": {", "\"blobs\": {\"x\": {\"offset\": 70, \"length\": 1}, ", COLIBRI_EFORMAT, "before the end of the descriptor"},
  {"\"blobs\": {", "\"blobs\": {\"x\": {\"offset\": 70}, ", COLIBRI_EFORMAT, "blob \"x\" has no \"length\""},
  {"\"blobs\": {", "\"blobs\": {\"x\": 1, ", COLIBRI_EFORMAT, "blob"},
};

static void edits_are_judged(void) {
  image im = image_make(&usual);
  for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
    const struct edit *e = &edits[i];
    image copy = image_copy(&im);
    CHECK(image_replace(&copy, e->from, e->to), "the test's image has no %s", e->from);
    if (e->code) refused_image(e->to, &copy, e->code, e->needle);
    else accepted(e->to, &copy);
    image_free(&copy);
  }
  image_free(&im);
}

/* A router's own norm of the residual stream must be there if and only if the descriptor says so. */
static void input_scale_agrees_with_the_descriptor(void) {
  image_shape shape = usual;
  shape.residual = true;
  image im = image_make(&shape);
  refused_image("normed", &im, COLIBRI_EFORMAT, "layers.0.router_input_scale is there though router.input is normed");
  CHECK(image_replace(&im, "\"score\": ", "\"input\": \"residual\", \"score\": "), "the test's image has no score");
  accepted("residual", &im);
  image_free(&im);
}

/* ---------------------------------------------------------------- the table, tensor by tensor */

/* The i-th tensor's name and place as the image's text has them; false behind the last. */
static bool tensor_at(const image *im, int i, char name[64], unsigned long long *offset, unsigned long long *length) {
  const char *p = im->text;
  for (int k = 0; k <= i; k++) {
    p = strstr(p, "\n{\"name\"");
    if (!p) return false;
    p++;
  }
  return sscanf(p, "{\"name\": \"%63[^\"]", name) == 1 && sscanf(strstr(p, "\"offset\""), "\"offset\": %llu, \"length\": %llu", offset, length) == 2;
}

static bool optional(const char *name) {
  static const char *const endings[] = {"_bias", ".q_norm", ".k_norm", "_scale"};
  for (int i = 0; i < 4; i++)
    if (strlen(name) > strlen(endings[i]) && !strcmp(name + strlen(name) - strlen(endings[i]), endings[i])) return true;
  return !strcmp(name, "head");
}

static void replace_offset(const char *what, const image *im, unsigned long long from, unsigned long long to, const char *needle) {
  char a[64], b[64];
  image copy = image_copy(im);
  snprintf(a, sizeof a, "\"offset\": %llu,", from);
  snprintf(b, sizeof b, "\"offset\": %llu,", to);
  CHECK(image_replace(&copy, a, b), "no %s", a);
  refused_image(what, &copy, COLIBRI_EFORMAT, needle);
  image_free(&copy);
}

/* Every tensor in turn: renamed away, moved by a byte or onto another, before the data, beyond the file; the file cut inside it. */
static void every_tensor_is_guarded(void) {
  image im = image_make(&usual);
  char name[64], other[64], from[96], to[96];
  unsigned long long offset, length, other_offset, other_length;
  size_t size;
  uint8_t *data = image_seal(&im, &size);
  int count = 0;
  for (; tensor_at(&im, count, name, &offset, &length); count++) {
    image renamed = image_copy(&im);
    snprintf(from, sizeof from, "\"name\": \"%s\"", name);
    snprintf(to, sizeof to, "\"name\": \"extra.%s\"", name);
    CHECK(image_replace(&renamed, from, to), "no %s", from);
    if (optional(name)) accepted(name, &renamed);
    else refused_image(name, &renamed, COLIBRI_EFORMAT, "is missing");
    image_free(&renamed);
    replace_offset(name, &im, offset, offset + 1, name);
    replace_offset(name, &im, offset, 0, "before the end of the descriptor");
    replace_offset(name, &im, offset, UINT64_MAX, "beyond the file");
    replace_offset(name, &im, offset, UINT64_C(1) << 63, "beyond the file");
    replace_offset(name, &im, offset, UINT64_MAX - length + 1, "beyond the file");
    CHECK(tensor_at(&im, count ? 0 : 1, other, &other_offset, &other_length), "no other tensor");
    replace_offset(name, &im, offset, other_offset, "overlaps \"");
    for (unsigned long long cut = offset; cut <= offset + length; cut += length / 2) {
      uint8_t *cut_data = malloc(cut);
      if (!cut_data) abort();
      memcpy(cut_data, data, cut);
      refused(name, cut_data, cut, COLIBRI_EFORMAT, "truncated");
      image_fix(cut_data, cut, im.text_bytes);
      refused(name, cut_data, cut, COLIBRI_EFORMAT, "beyond the file");
      free(cut_data);
    }
  }
  CHECK(count == 4 + 2 * 14, "%d tensors", count);
  free(data);
  image_free(&im);
}

/* A layer without a router has one expert; more would mean that the router was lost. */
static void layers_without_router(void) {
  image_shape shape = usual;
  shape.extras = false;
  image im = image_make(&shape);
  CHECK(image_replace(&im, "\"name\": \"layers.1.router\"", "\"name\": \"extra.r\""), "no router");
  refused_image("router lost", &im, COLIBRI_EFORMAT, "layers.1.router is missing though layers.1.experts.1 is there");
  CHECK(image_replace(&im, "\"name\": \"layers.1.experts.1\"", "\"name\": \"extra.1\""), "no expert");
  CHECK(image_replace(&im, "\"name\": \"layers.1.experts.2\"", "\"name\": \"extra.2\""), "no expert");
  accepted("a dense layer among others", &im);
  CHECK(image_replace(&im, "\"name\": \"extra.2\"", "\"name\": \"extra.1\""), "no extra");
  refused_image("two extras of one name", &im, COLIBRI_EFORMAT, "\"extra.1\"");
  image_free(&im);
}

/* Kinds of matrices have one format each. */
static void formats_do_not_mix(void) {
  image_shape shape = usual;
  shape.format = "int8";
  image im = image_make(&shape);
  CHECK(image_replace(&im, "\"name\": \"layers.1.o\", \"layout\": \"p32\", \"format\": \"int8\"", "\"name\": \"layers.1.o\", \"layout\": \"p32\", \"format\": \"int4\""),
        "no layers.1.o");
  refused_image("format without its length", &im, COLIBRI_EFORMAT, "layers.1.o has 4352 bytes, its shape and format give 2304");
  CHECK(image_replace(&im, "\"length\": 4352, \"sha256\": \"00\"},\n{\"name\": \"layers.1.router\"", "\"length\": 2304, \"sha256\": \"00\"},\n{\"name\": \"layers.1.router\""),
        "no length");
  refused_image("mixed", &im, COLIBRI_EUNSUPPORTED, "layers.1.o is int4 where others of its kind are int8");
  image_free(&im);
}

/* ---------------------------------------------------------------- the header */

static void header_damage(void) {
  image im = image_make(&usual);
  size_t size;
  uint8_t *data = image_seal(&im, &size), *copy = malloc(size + 1);
  if (!copy) abort();
  for (size_t i = 0; i < IMAGE_HEADER; i++)
    for (int bit = 0; bit < 8; bit++) {
      colibri_error err;
      memcpy(copy, data, size);
      copy[i] ^= (uint8_t)(1 << bit);
      CHECK(run(copy, size, &err) == COLIBRI_EFORMAT, "header byte %zu bit %d flipped, yet accepted", i, bit);
    }
  struct { int at, bytes; uint64_t value; const char *needle; } fields[] = {
    {0, 1, 'c', "magic"}, {8, 4, 2, "version 2"}, {8, 4, 0, "version 0"}, {12, 4, 0x04030201, "byte order"}, {16, 8, 65, "descriptor"},
    {16, 8, UINT64_MAX, "descriptor"}, {24, 8, size, "descriptor"}, {24, 8, UINT64_MAX, "descriptor"}, {24, 8, UINT64_C(1) << 63, "descriptor"},
    {24, 8, UINT64_MAX - 63, "descriptor"}, {24, 8, 0, "descriptor"}, {32, 8, size - 1, "bytes, its header says"}, {32, 8, size + 1, "truncated"},
    {32, 8, UINT64_MAX, "truncated"}, {40, 4, 0, "descriptor's checksum"}, {63, 1, 1, "byte 63 is not zero"}, {48, 1, 255, "byte 48 is not zero"},
  };
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    memcpy(copy, data, size);
    image_store(copy + fields[i].at, fields[i].value, fields[i].bytes);
    image_store(copy + 44, image_crc(copy, 44), 4);
    refused("header field", copy, size, COLIBRI_EFORMAT, fields[i].needle);
  }
  memcpy(copy, data, size);
  copy[44] ^= 1;
  refused("header checksum", copy, size, COLIBRI_EFORMAT, "header's checksum");
  copy[44] ^= 1;
  copy[size] = 0;
  refused("a byte appended", copy, size + 1, COLIBRI_EFORMAT, "appended");
  for (size_t cut = 0; cut < IMAGE_HEADER + im.text_bytes; cut += cut < 200 ? 1 : 97) {
    colibri_error err;
    CHECK(run(data, cut, &err) == COLIBRI_EFORMAT, "cut at %zu, yet accepted", cut);
  }
  CHECK(colibri_model_check(NULL, 0, NULL) == COLIBRI_EINVAL, "NULL");
  free(copy);
  free(data);
  image_free(&im);
}

/* Every byte of the descriptor spoilt: with the checksum as it was it is refused; with a new one nothing is promised but staying inside. */
static void descriptor_bytes_spoilt(void) {
  image im = image_make(&usual);
  size_t size;
  uint8_t *data = image_seal(&im, &size);
  static const char junk[] = "\"\\{}[],:-.0e \xff";
  for (size_t i = 0; i < im.text_bytes; i++) {
    colibri_error err;
    uint8_t held = data[IMAGE_HEADER + i];
    data[IMAGE_HEADER + i] = (uint8_t)(held ^ 1);
    if (i % 37 == 0) refused("spoilt", data, size, COLIBRI_EFORMAT, "descriptor's checksum");
    data[IMAGE_HEADER + i] = (uint8_t)junk[check_random() % (sizeof junk)];
    image_fix(data, size, im.text_bytes);
    int rc = run(data, size, &err);
    CHECK(rc == COLIBRI_OK || (rc < 0 && err.message[0]), "byte %zu: %d without a sentence", i, rc);
    data[IMAGE_HEADER + i] = held;
    image_fix(data, size, im.text_bytes);
    if (i > 3000 && i % 50) i += 7; /* the rows of the table are alike */
  }
  free(data);
  image_free(&im);
}

static void deep_descriptors_are_refused(void) {
  static char deep[200002];
  memset(deep, '[', 100000);
  memset(deep + 100000, ']', 100000);
  for (int i = 0; i < 2; i++) {
    image im = image_make(&usual);
    char *to = malloc(sizeof deep + 64);
    if (!to) abort();
    sprintf(to, i ? "\"notes\": %s, \"x\": \"" : "\"vocab\": 10, \"x\": %s", deep);
    CHECK(image_replace(&im, i ? "\"notes\": \"" : "\"vocab\": 10", to), "no place for it");
    refused_image("deep", &im, COLIBRI_EFORMAT, "nested too deeply");
    free(to);
    image_free(&im);
  }
}

/* ---------------------------------------------------------------- files */

static void check_open_file(const image *im) {
  size_t size;
  uint8_t *data = image_seal(im, &size);
  colibri_model *m = NULL;
  colibri_error err = {0};
  int fd = memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size, "memfd: %s", strerror(errno));
  CHECK(!fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), "seals: %s", strerror(errno));
  CHECK(colibri_model_open_fd(fd, &m, &err) == COLIBRI_OK, "%s", err.message);
  close(fd); /* the model keeps what it needs */
  if (m) {
    CHECK(colibri_model_get_info(m)->file_bytes == size && !memcmp(m->map, data, size), "the mapping is not the file");
    CHECK(size < (2 << 20) || (uintptr_t)m->map % (2 << 20) == 0, "the mapping is not aligned for huge pages");
  }
  colibri_model_close(m);
  free(data);
}

static void files_are_opened_or_refused_by_name(void) {
  char folder[] = "/tmp/colibri-test-XXXXXX", path[128], link[160];
  colibri_model *m = NULL;
  colibri_error err = {0};
  image small = image_make(&usual), large = image_make(&shapes[5]);
  size_t size;
  uint8_t *data = image_seal(&small, &size);
  check_open_file(&small);
  check_open_file(&large);
  CHECK(mkdtemp(folder) != NULL, "mkdtemp: %s", strerror(errno));
  snprintf(path, sizeof path, "%s/model.colibri", folder);
  CHECK(colibri_model_open(path, &m, &err) == COLIBRI_EIO && strstr(err.message, path) && strstr(err.message, "No such file"), "%s", err.message);
  CHECK(colibri_model_open(folder, &m, &err) == COLIBRI_EIO && strstr(err.message, "not a regular file"), "%s", err.message);
  int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  CHECK(colibri_model_open(path, &m, &err) == COLIBRI_EFORMAT && strstr(err.message, "empty"), "%s", err.message);
  CHECK(write(fd, data, size / 2) == (ssize_t)(size / 2), "write: %s", strerror(errno));
  CHECK(colibri_model_open(path, &m, &err) == COLIBRI_EFORMAT && strstr(err.message, "model.colibri: ") && strstr(err.message, "truncated") && !m, "%s",
        err.message);
  CHECK(pwrite(fd, data, size, 0) == (ssize_t)size, "write: %s", strerror(errno));
  close(fd);
  CHECK(colibri_model_open(path, &m, &err) == COLIBRI_OK, "%s", err.message);
  colibri_model_close(m);
  snprintf(link, sizeof link, "%s/link", folder);
  CHECK(!symlink(path, link) && colibri_model_open(link, &m, NULL) == COLIBRI_OK, "through a symbolic link");
  colibri_model_close(m);
  CHECK(colibri_model_open_fd(-1, &m, &err) == COLIBRI_EIO && colibri_model_open(NULL, &m, NULL) == COLIBRI_EINVAL, "%s", err.message);
  colibri_model_close(NULL);
  unlink(link);
  unlink(path);
  rmdir(folder);
  free(data);
  image_free(&small);
  image_free(&large);
}

/* One row by colibri_matrix_row is the row of the whole matrix unpacked. */
static void rows_equal_the_unpacked_matrix(void) {
  static const int sizes[][2] = {{1, 1}, {33, 31}, {64, 32}, {50, 97}};
  static float w[50 * 97], all[50 * 97], row[97];
  for (int format = 0; format < COLIBRI_FORMATS; format++)
    for (int i = 0; i < 4; i++) {
      int n = sizes[i][0], k = sizes[i][1];
      char *data = malloc(colibri_packed_bytes(format, n, k));
      if (!data) abort();
      for (int j = 0; j < n * k; j++) w[j] = check_normal();
      CHECK(colibri_pack(format, w, n, k, data, NULL) == COLIBRI_OK && colibri_unpack(format, data, n, k, all, NULL) == COLIBRI_OK, "packing");
      colibri_matrix m = {data, format, n, k, (n + 31) / 32, (k + 31) / 32};
      for (int r = 0; r < n; r++) {
        colibri_matrix_row(&m, r, row);
        CHECK(!memcmp(row, all + r * k, (size_t)k * sizeof *row), "format %d [%d, %d] row %d", format, n, k, r);
      }
      free(data);
    }
}

int main(void) {
  fence_open((size_t)8 << 20);
  valid_images_are_read();
  edits_are_judged();
  input_scale_agrees_with_the_descriptor();
  every_tensor_is_guarded();
  layers_without_router();
  formats_do_not_mix();
  header_damage();
  descriptor_bytes_spoilt();
  deep_descriptors_are_refused();
  files_are_opened_or_refused_by_name();
  rows_equal_the_unpacked_matrix();
  return check_result("test_container");
}
