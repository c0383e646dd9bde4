/* container.c - header and descriptor of a `.colibri` file (docs/container.md); the tensor table is tensors.c. */
#include "container.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "router.h"

#define HEADER_BYTES 64
#define HEADER_CRC_AT 44        /* the header's checksum covers what precedes it */
#define VERSION 1
#define BYTE_ORDER_MARK 0x01020304u
#define DESCRIPTOR_MAX (UINT64_C(64) << 20)

static const char magic[8] = {'C', 'O', 'L', 'I', 'B', 'R', 'I', '\0'};

/* ---------------------------------------------------------------- bytes and checksums */

static uint32_t load_u32(const unsigned char *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static uint64_t load_u64(const unsigned char *p) { return load_u32(p) | (uint64_t)load_u32(p + 4) << 32; }

/* Slicing-by-8 tables of the reflected polynomial 0xEDB88320: t[j][b] is byte b followed by j zero bytes. */
static void crc_tables(uint32_t t[8][256]) {
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t c = b;
    for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0);
    t[0][b] = c;
  }
  for (uint32_t b = 0; b < 256; b++)
    for (int j = 1; j < 8; j++) t[j][b] = t[j - 1][b] >> 8 ^ t[0][t[j - 1][b] & 0xFF];
}

/* zlib's CRC-32. The tables are made anew (microseconds, once a file): nothing global to initialise. */
static uint32_t crc32_of(const unsigned char *p, size_t n) {
  uint32_t t[8][256], c = 0xFFFFFFFFu;
  crc_tables(t);
  for (; n >= 8; p += 8, n -= 8) {
    uint32_t a = c ^ load_u32(p), b = load_u32(p + 4);
    c = t[7][a & 0xFF] ^ t[6][a >> 8 & 0xFF] ^ t[5][a >> 16 & 0xFF] ^ t[4][a >> 24] ^ t[3][b & 0xFF] ^ t[2][b >> 8 & 0xFF] ^
        t[1][b >> 16 & 0xFF] ^ t[0][b >> 24];
  }
  for (; n; p++, n--) c = c >> 8 ^ t[0][(c ^ *p) & 0xFF];
  return ~c;
}

/* ---------------------------------------------------------------- messages */

const char *colibri_shown(const colibri_json_string *string, char buffer[COLIBRI_SHOWN]) {
  size_t n = string->size < COLIBRI_SHOWN - 1 ? string->size : COLIBRI_SHOWN - 1;
  for (size_t i = 0; i < n; i++) buffer[i] = string->text[i] >= 0x20 && string->text[i] < 0x7F ? string->text[i] : '?';
  buffer[n] = '\0';
  return buffer;
}

int colibri_json_fail(const colibri_json *json, const char *where, colibri_error *err) {
  return colibri_fail(err, COLIBRI_EFORMAT, "%s: %s at byte %zu of the descriptor; convert the model again", where,
                      json->error ? json->error : "a value of another type was expected", json->at);
}

/* ---------------------------------------------------------------- objects of scalars */

enum kind { KIND_INT, KIND_FLOAT, KIND_CHOICE, KIND_OBJECT };

/* One key of a descriptor object and where its value goes in colibri_model. */
struct field {
  const char *name;
  enum kind kind;
  size_t target;               /* offset in colibri_model: int32_t, float, or int32_t index of the choice */
  bool optional;               /* left as it is if it is not there or null */
  double low, high;            /* numbers: inclusive range; a float's low of 0 excludes 0 itself if `positive` */
  bool positive;
  const char *const *choices;  /* NULL-terminated; what this engine can run */
  const struct object *object; /* KIND_OBJECT */
};

struct object {
  const char *name;            /* as messages show it */
  const struct field *fields;
  int count;
  bool closed;                 /* an unknown key is refused unless it is null or false: it would change results */
};

#define AT(member) offsetof(struct colibri_model, member)

static const char *const activations[] = {"silu", NULL};
static const char *const rope_styles[] = {"half", "interleaved", NULL};
/* In the order of colibri.h's enums. */
static const char *const scores[] = {"softmax_all", "sigmoid", "sqrt_softplus", "logits", NULL};
static const char *const weights[] = {"softmax_chosen", "unbiased_score", "sparsemixer", "sigmoid_chosen", NULL};
static const char *const group_metrics[] = {"max", "sum_top2", NULL};
static const char *const group_masks[] = {"zero", "minus_inf", NULL};
static const char *const renorms[] = {"none", "sum", NULL};
static const char *const eps_ways[] = {"add", "clamp", NULL};
static const char *const applications[] = {"output", "input", NULL};
static const char *const router_inputs[] = {"normed", "residual", NULL};

static const struct field rope_fields[] = {
  {.name = "style", .kind = KIND_CHOICE, .target = AT(rope_interleaved), .choices = rope_styles},
  {.name = "dims", .kind = KIND_INT, .target = AT(rope_dims), .low = 2, .high = 1024},
  {.name = "scale", .kind = KIND_FLOAT, .target = AT(rope_scale), .low = 0, .high = 1e6, .positive = true},
};
static const struct object rope_object = {"arch.rope", rope_fields, 3, false};

static const struct field arch_fields[] = {
  {.name = "vocab", .kind = KIND_INT, .target = AT(info.vocab), .low = 1, .high = 1 << 22},
  {.name = "hidden", .kind = KIND_INT, .target = AT(info.hidden), .low = 1, .high = 1 << 17},
  {.name = "layers", .kind = KIND_INT, .target = AT(info.layers), .low = 1, .high = COLIBRI_MAX_LAYERS},
  {.name = "heads", .kind = KIND_INT, .target = AT(info.heads), .low = 1, .high = 1024},
  {.name = "kv_heads", .kind = KIND_INT, .target = AT(info.kv_heads), .low = 1, .high = 1024},
  {.name = "head_dim", .kind = KIND_INT, .target = AT(info.head_dim), .low = 2, .high = 1024},
  {.name = "ffn", .kind = KIND_INT, .target = AT(info.ffn), .low = 1, .high = 1 << 20},
  {.name = "experts", .kind = KIND_INT, .target = AT(info.experts), .low = 1, .high = COLIBRI_MAX_EXPERTS},
  {.name = "max_context", .kind = KIND_INT, .target = AT(info.max_context), .low = 1, .high = 1 << 24},
  {.name = "sliding_window", .kind = KIND_INT, .target = AT(info.sliding_window), .low = 0, .high = 1 << 24},
  {.name = "norm_eps", .kind = KIND_FLOAT, .target = AT(info.norm_eps), .low = 0, .high = 1},
  {.name = "attention_scale", .kind = KIND_FLOAT, .target = AT(info.attention_scale), .low = 0, .high = 1e6, .positive = true},
  {.name = "activation", .kind = KIND_CHOICE, .target = SIZE_MAX, .choices = activations},
  {.name = "rope", .kind = KIND_OBJECT, .object = &rope_object},
};
static const struct object arch_object = {"arch", arch_fields, 14, false};

/* colibri_router_check has the last word on how they go together. */
static const struct field router_fields[] = {
  {.name = "score", .kind = KIND_CHOICE, .target = AT(router.score), .choices = scores},
  {.name = "k", .kind = KIND_INT, .target = AT(router.k), .low = 1, .high = COLIBRI_MAX_TOP_K},
  {.name = "weight", .kind = KIND_CHOICE, .target = AT(router.weight), .choices = weights},
  {.name = "renorm", .kind = KIND_CHOICE, .target = AT(router.renorm), .choices = renorms},
  {.name = "scale", .kind = KIND_FLOAT, .target = AT(router.scale), .low = 0, .high = 1e6, .positive = true},
  {.name = "apply_at", .kind = KIND_CHOICE, .target = AT(router.apply_at), .choices = applications},
  {.name = "renorm_eps", .kind = KIND_FLOAT, .target = AT(router.renorm_eps), .low = 0, .high = 1e6, .optional = true},
  {.name = "renorm_way", .kind = KIND_CHOICE, .target = AT(router.renorm_way), .choices = eps_ways, .optional = true},
  {.name = "n_group", .kind = KIND_INT, .target = AT(router.n_group), .low = 1, .high = COLIBRI_MAX_EXPERTS, .optional = true},
  {.name = "topk_group", .kind = KIND_INT, .target = AT(router.topk_group), .low = 1, .high = COLIBRI_MAX_EXPERTS, .optional = true},
  {.name = "group_metric", .kind = KIND_CHOICE, .target = AT(router.group_metric), .choices = group_metrics, .optional = true},
  {.name = "group_mask", .kind = KIND_CHOICE, .target = AT(router.group_mask), .choices = group_masks, .optional = true},
  {.name = "jitter_eps", .kind = KIND_FLOAT, .target = AT(router.jitter_eps), .low = 0, .high = 1e6, .optional = true},
  {.name = "input", .kind = KIND_CHOICE, .target = AT(router.input), .choices = router_inputs, .optional = true},
};
static const struct object router_object = {"router", router_fields, 14, true};

static int read_object(const struct object *object, colibri_json *json, colibri_model *m, colibri_error *err);

static int read_int_field(const struct field *f, const char *where, colibri_json *json, colibri_model *m, colibri_error *err) {
  int64_t value;
  if (!colibri_json_read_int(json, &value)) return colibri_json_fail(json, where, err);
  if (value < (int64_t)f->low || value > (int64_t)f->high)
    return colibri_fail(err, COLIBRI_EFORMAT, "%s is %lld, outside %.0f..%.0f; check the source's config.json and convert again", where,
                        (long long)value, f->low, f->high);
  *(int32_t *)((char *)m + f->target) = (int32_t)value;
  return COLIBRI_OK;
}

static int read_float_field(const struct field *f, const char *where, colibri_json *json, colibri_model *m, colibri_error *err) {
  double value;
  if (!colibri_json_read_double(json, &value)) return colibri_json_fail(json, where, err);
  if (value < f->low || value > f->high || (f->positive && (float)value <= 0))
    return colibri_fail(err, COLIBRI_EFORMAT, "%s is %g, outside %s0..%g; check the source's config.json and convert again", where, value,
                        f->positive ? "above " : "", f->high);
  *(float *)((char *)m + f->target) = (float)value;
  return COLIBRI_OK;
}

/* Joins the choices as "a, b" for a message. */
static const char *join(const char *const *choices, char *out, size_t capacity) {
  size_t n = 0;
  for (; *choices && n + strlen(*choices) + 3 < capacity; choices++) {
    if (n) n = (size_t)(stpcpy(out + n, ", ") - out);
    n = (size_t)(stpcpy(out + n, *choices) - out);
  }
  return out;
}

static int read_choice_field(const struct field *f, const char *where, colibri_json *json, colibri_model *m, colibri_error *err) {
  colibri_json_string value;
  char shown[COLIBRI_SHOWN], known[64];
  if (!colibri_json_read_string(json, &value)) return colibri_json_fail(json, where, err);
  int i = 0;
  while (f->choices[i] && !colibri_json_equals(&value, f->choices[i])) i++;
  if (!f->choices[i])
    return colibri_fail(err, COLIBRI_EUNSUPPORTED, "%s is \"%s\"; this engine runs: %s", where, colibri_shown(&value, shown),
                        join(f->choices, known, sizeof known));
  if (f->target != SIZE_MAX) *(int32_t *)((char *)m + f->target) = i;
  return COLIBRI_OK;
}

static int read_field(const struct object *object, const struct field *f, colibri_json *json, colibri_model *m, colibri_error *err) {
  char where[64];
  if (f->optional && colibri_json_peek(json) == COLIBRI_JSON_NULL) return colibri_json_skip(json) ? COLIBRI_OK : colibri_json_fail(json, f->name, err);
  stpcpy(stpcpy(stpcpy(where, object->name), "."), f->name);
  switch (f->kind) {
    case KIND_INT: return read_int_field(f, where, json, m, err);
    case KIND_FLOAT: return read_float_field(f, where, json, m, err);
    case KIND_CHOICE: return read_choice_field(f, where, json, m, err);
    default: return read_object(f->object, json, m, err);
  }
}

static int unknown_key(const struct object *object, const colibri_json_string *key, colibri_json *json, colibri_error *err) {
  char shown[COLIBRI_SHOWN];
  enum colibri_json_type type = colibri_json_peek(json);
  if (!colibri_json_skip(json)) return colibri_json_fail(json, object->name, err);
  if (!object->closed || type == COLIBRI_JSON_NULL || type == COLIBRI_JSON_FALSE) return COLIBRI_OK;
  return colibri_fail(err, COLIBRI_EUNSUPPORTED, "%s.%s is set, which this engine does not know; use a newer engine", object->name,
                      colibri_shown(key, shown));
}

/* Reads an object of known scalars; every field must be there once, an optional one may be left out. */
static int read_object(const struct object *object, colibri_json *json, colibri_model *m, colibri_error *err) {
  colibri_json_string key;
  uint32_t seen = 0;
  if (!colibri_json_enter(json, COLIBRI_JSON_OBJECT)) return colibri_json_fail(json, object->name, err);
  while (colibri_json_key(json, &key)) {
    int i = 0;
    while (i < object->count && !colibri_json_equals(&key, object->fields[i].name)) i++;
    if (i < object->count && seen >> i & 1)
      return colibri_fail(err, COLIBRI_EFORMAT, "%s.%s stands twice; convert the model again", object->name, object->fields[i].name);
    int rc = i < object->count ? read_field(object, &object->fields[i], json, m, err) : unknown_key(object, &key, json, err);
    if (rc) return rc;
    if (i < object->count) seen |= 1u << i;
  }
  if (json->error) return colibri_json_fail(json, object->name, err);
  for (int i = 0; i < object->count; i++)
    if (!(seen >> i & 1) && !object->fields[i].optional)
      return colibri_fail(err, COLIBRI_EFORMAT, "%s.%s is missing; convert the model again", object->name, object->fields[i].name);
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- the descriptor */

enum section { SECTION_ARCH, SECTION_ROUTER, SECTION_TENSORS, SECTION_BLOBS, SECTION_REQUIRES, SECTION_QUANT, SECTIONS };
static const char *const section_names[SECTIONS] = {"arch", "router", "tensors", "blobs", "requires", "quant"};

struct descriptor {
  uint32_t seen;              /* bit per enum section */
  bool has_router;
  colibri_json_string quant;
  colibri_table table;
};

static int read_requires(colibri_json *json, colibri_error *err) {
  colibri_json_string feature;
  char shown[COLIBRI_SHOWN];
  if (!colibri_json_enter(json, COLIBRI_JSON_ARRAY)) return colibri_json_fail(json, "requires", err);
  while (colibri_json_element(json)) {
    if (!colibri_json_read_string(json, &feature)) break;
    return colibri_fail(err, COLIBRI_EUNSUPPORTED, "the model requires \"%s\", which this engine does not know; use a newer engine",
                        colibri_shown(&feature, shown));
  }
  return json->error ? colibri_json_fail(json, "requires", err) : COLIBRI_OK;
}

#define NOT_SAID -1

static int read_router(struct descriptor *d, colibri_json *json, colibri_model *m, colibri_error *err) {
  d->has_router = colibri_json_peek(json) != COLIBRI_JSON_NULL;
  m->router = (colibri_router){.topk_group = NOT_SAID, .group_metric = NOT_SAID, .group_mask = NOT_SAID, .jitter_eps = NOT_SAID};
  if (d->has_router) return read_object(&router_object, json, m, err);
  return colibri_json_skip(json) ? COLIBRI_OK : colibri_json_fail(json, "router", err);
}

static int read_section(struct descriptor *d, int section, colibri_json *json, colibri_model *m, colibri_error *err) {
  switch (section) {
    case SECTION_ARCH: return read_object(&arch_object, json, m, err);
    case SECTION_ROUTER: return read_router(d, json, m, err);
    case SECTION_TENSORS: return colibri_table_read_tensors(&d->table, json, err);
    case SECTION_BLOBS: return colibri_table_read_blobs(&d->table, json, err);
    case SECTION_REQUIRES: return read_requires(json, err);
    case SECTION_QUANT: return colibri_json_read_string(json, &d->quant) ? COLIBRI_OK : colibri_json_fail(json, "quant", err);
    default: return colibri_json_skip(json) ? COLIBRI_OK : colibri_json_fail(json, "descriptor", err);
  }
}

static int read_descriptor(struct descriptor *d, const char *text, size_t size, colibri_model *m, colibri_error *err) {
  colibri_json json;
  colibri_json_string key;
  colibri_json_init(&json, text, size);
  if (!colibri_json_enter(&json, COLIBRI_JSON_OBJECT)) return colibri_json_fail(&json, "descriptor", err);
  while (colibri_json_key(&json, &key)) {
    int section = 0;
    while (section < SECTIONS && !colibri_json_equals(&key, section_names[section])) section++;
    if (section < SECTIONS && d->seen >> section & 1)
      return colibri_fail(err, COLIBRI_EFORMAT, "\"%s\" stands twice in the descriptor; convert the model again", section_names[section]);
    int rc = read_section(d, section, &json, m, err);
    if (rc) return rc;
    d->seen |= 1u << section;
  }
  if (!colibri_json_end(&json)) return colibri_json_fail(&json, "descriptor", err);
  static const int needed[] = {SECTION_ARCH, SECTION_TENSORS};
  for (int i = 0; i < 2; i++)
    if (!(d->seen >> needed[i] & 1))
      return colibri_fail(err, COLIBRI_EFORMAT, "\"%s\" is missing from the descriptor; convert the model again", section_names[needed[i]]);
  return COLIBRI_OK;
}

static int missing_though(const char *field, const char *because, colibri_error *err) {
  return colibri_fail(err, COLIBRI_EFORMAT, "router.%s is missing though %s; convert the model again", field, because);
}

/* What must be said because of something else. What need not and is not is zero. */
static int complete_router(colibri_router *r, colibri_error *err) {
  const struct { const char *name; int32_t *value; } of_groups[] = {
    {"topk_group", &r->topk_group}, {"group_metric", &r->group_metric}, {"group_mask", &r->group_mask}};
  for (int i = 0; i < 3; i++) {
    if (*of_groups[i].value == NOT_SAID && r->n_group > 1) return missing_though(of_groups[i].name, "router.n_group says that there are groups", err);
    if (*of_groups[i].value == NOT_SAID) *of_groups[i].value = 0;
  }
  if (r->jitter_eps == NOT_SAID && r->weight == COLIBRI_WEIGHT_SPARSEMIXER) return missing_though("jitter_eps", "router.weight is sparsemixer", err);
  if (r->jitter_eps == NOT_SAID) r->jitter_eps = 0;
  return COLIBRI_OK;
}

static int check_router(colibri_router *r, colibri_error *err) {
  colibri_error why;
  int rc = complete_router(r, err);
  if (rc || !colibri_router_check(r, &why)) return rc;
  return colibri_fail(err, COLIBRI_EFORMAT, "%s; check the source's config.json and convert again", why.message);
}

/* What one scalar must be to another. */
static int check_scalars(const struct descriptor *d, colibri_model *m, colibri_error *err) {
  colibri_model_info *info = &m->info;
  if (info->heads % info->kv_heads)
    return colibri_fail(err, COLIBRI_EFORMAT, "arch.heads is %d, not a multiple of arch.kv_heads %d; check the source's config.json", info->heads,
                        info->kv_heads);
  if (m->rope_dims % 2 || m->rope_dims > info->head_dim)
    return colibri_fail(err, COLIBRI_EFORMAT, "arch.rope.dims is %d: it must be even and at most arch.head_dim %d", m->rope_dims, info->head_dim);
  if (!d->has_router) {
    if (info->experts > 1)
      return colibri_fail(err, COLIBRI_EFORMAT, "\"router\" is missing though arch.experts is %d; convert the model again", info->experts);
    m->router = (colibri_router){.k = 1, .scale = 1.0f};
  }
  if (m->router.k > info->experts)
    return colibri_fail(err, COLIBRI_EFORMAT, "router.k is %d but arch.experts is %d; check the source's config.json", m->router.k, info->experts);
  m->router.experts = info->experts;
  info->top_k = m->router.k;
  return check_router(&m->router, err);
}

/* A file that says int4 must hold int4. Other words than the formats' names say nothing about one format and are left alone. */
static int check_quant(const struct descriptor *d, const colibri_model *m, colibri_error *err) {
  static const char *const names[COLIBRI_FORMATS] = {"f32", "bf16", "int8", "int4"};
  if (!(d->seen >> SECTION_QUANT & 1)) return COLIBRI_OK;
  for (int format = 0; format < COLIBRI_FORMATS; format++)
    if (colibri_json_equals(&d->quant, names[format]) && format != m->info.expert_format)
      return colibri_fail(err, COLIBRI_EFORMAT, "quant says %s but the experts are %s; convert the model again", names[format],
                          names[m->info.expert_format]);
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- the header */

/* Checks the header and the descriptor's checksum; *length gets the descriptor's bytes. */
static int check_header(const unsigned char *p, size_t size, uint64_t *length, colibri_error *err) {
  if (size < HEADER_BYTES)
    return colibri_fail(err, COLIBRI_EFORMAT, "the file has %zu bytes, fewer than a header; it is truncated or no .colibri file", size);
  if (memcmp(p, magic, sizeof magic) != 0)
    return colibri_fail(err, COLIBRI_EFORMAT, "not a .colibri file (wrong magic); make one with `colibri convert`");
  if (load_u32(p + 12) != BYTE_ORDER_MARK)
    return colibri_fail(err, COLIBRI_EFORMAT, "byte order mark is 0x%08x, not 0x%08x; convert the model again", load_u32(p + 12), BYTE_ORDER_MARK);
  if (load_u32(p + 8) != VERSION)
    return colibri_fail(err, COLIBRI_EFORMAT, "container version %u; this engine reads version %d: convert again or use another engine",
                        load_u32(p + 8), VERSION);
  if (crc32_of(p, HEADER_CRC_AT) != load_u32(p + HEADER_CRC_AT))
    return colibri_fail(err, COLIBRI_EFORMAT, "the header's checksum is wrong; the file is damaged: copy or convert it again");
  for (int i = HEADER_CRC_AT + 4; i < HEADER_BYTES; i++)
    if (p[i]) return colibri_fail(err, COLIBRI_EFORMAT, "header byte %d is not zero; the file is damaged: copy or convert it again", i);
  if (load_u64(p + 32) != size)
    return colibri_fail(err, COLIBRI_EFORMAT, "the file has %zu bytes, its header says %llu; it is truncated or was appended to: copy it again",
                        size, (unsigned long long)load_u64(p + 32));
  *length = load_u64(p + 24);
  if (load_u64(p + 16) != HEADER_BYTES || *length > size - HEADER_BYTES || *length > DESCRIPTOR_MAX)
    return colibri_fail(err, COLIBRI_EFORMAT, "the descriptor (offset %llu, %llu bytes) is not at byte 64, within the file and 64 MiB",
                        (unsigned long long)load_u64(p + 16), (unsigned long long)*length);
  if (crc32_of(p + HEADER_BYTES, *length) != load_u32(p + 40))
    return colibri_fail(err, COLIBRI_EFORMAT, "the descriptor's checksum is wrong; the file is damaged: copy or convert it again");
  return COLIBRI_OK;
}

int colibri_container_parse(const void *data, size_t size, colibri_model *m, colibri_error *err) {
  struct descriptor d = {0};
  colibri_image image = {.data = data, .size = size};
  uint64_t length = 0;
  *m = (colibri_model){0};
  int rc = check_header(data, size, &length, err);
  if (rc) return rc;
  image.data_start = HEADER_BYTES + length;
  m->descriptor_crc = load_u32((const unsigned char *)data + 40);
  m->info.file_bytes = size;
  rc = read_descriptor(&d, image.data + HEADER_BYTES, length, m, err);
  if (!rc) rc = check_scalars(&d, m, err);
  if (!rc) rc = colibri_table_bind(&d.table, &image, m, err);
  if (!rc) rc = check_quant(&d, m, err);
  if (rc) colibri_container_release(m);
  free(d.table.entries);
  return rc;
}

void colibri_container_release(colibri_model *m) {
  free(m->layers);
  free(m->experts);
  m->layers = NULL;
  m->experts = NULL;
}
