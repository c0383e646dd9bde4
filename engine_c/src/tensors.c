/* tensors.c - the tensor table of a `.colibri` file: read, checked against the architecture and the file, bound to pointers.
 *
 * A known name is a slot in a flat array (4 globals, then per layer 13 tensors and its experts), so finding, missing and double
 * entries cost one pass whatever their number. Nothing is allocated that the table's own size does not pay for. */
#include "container.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum global_role { EMBED, HEAD, FINAL_NORM, INV_FREQ, GLOBALS };
enum layer_role { ATTN_NORM, FFN_NORM, QKV, O, ROUTER, QKV_BIAS, Q_NORM, K_NORM, ROUTER_BIAS, ROUTER_SELECT_BIAS, ROUTER_EXPERT_SCALE,
                  ROUTER_INPUT_SCALE, LAYER_ROLES };
static const char *const global_names[GLOBALS] = {"embed", "head", "final_norm", "rope.inv_freq"};
static const char *const layer_names[LAYER_ROLES] = {"attn_norm", "ffn_norm", "qkv", "o", "router", "qkv_bias", "q_norm", "k_norm", "router_bias",
                                                    "router_select_bias", "router_expert_scale", "router_input_scale"};
static const char *const format_names[COLIBRI_FORMATS] = {"f32", "bf16", "int8", "int4"};

enum layout { PLAIN, P32, EXPERT, LAYOUTS };
static const char *const layout_names[LAYOUTS] = {"plain", "p32", "expert"};
static const uint64_t layout_align[LAYOUTS] = {64, 4096, 4096};

/* Tensors whose name starts so are for others: the engine checks that they lie inside the file and looks no further. */
static const char extra_prefix[] = "extra.";

/* ---------------------------------------------------------------- reading */

static int append(colibri_table *table, const colibri_entry *entry, colibri_error *err) {
  if (table->count == table->capacity) {
    size_t capacity = table->capacity ? 2 * table->capacity : 256;
    colibri_entry *entries = realloc(table->entries, capacity * sizeof *entries);
    if (!entries) return colibri_fail(err, COLIBRI_ENOMEM, "no memory for a table of %zu tensors", capacity);
    table->entries = entries;
    table->capacity = capacity;
  }
  table->entries[table->count++] = *entry;
  return COLIBRI_OK;
}

static bool read_shape(colibri_json *json, colibri_entry *entry) {
  if (!colibri_json_enter(json, COLIBRI_JSON_ARRAY)) return false;
  while (colibri_json_element(json)) {
    int64_t n;
    if (!colibri_json_read_int(json, &n)) return false;
    if (entry->rank < 2) entry->shape[entry->rank] = n;
    entry->rank++;
  }
  return !json->error;
}

enum entry_key { KEY_NAME, KEY_LAYOUT, KEY_FORMAT, KEY_SHAPE, KEY_OFFSET, KEY_LENGTH, ENTRY_KEYS };
static const char *const key_names[ENTRY_KEYS] = {"name", "layout", "format", "shape", "offset", "length"};

static bool read_value(colibri_json *json, int key, colibri_entry *entry) {
  switch (key) {
    case KEY_NAME: return colibri_json_read_string(json, &entry->name);
    case KEY_LAYOUT: return colibri_json_read_string(json, &entry->layout);
    case KEY_FORMAT: return colibri_json_read_string(json, &entry->format);
    case KEY_SHAPE: return read_shape(json, entry);
    case KEY_OFFSET: return colibri_json_read_unsigned(json, &entry->offset);
    case KEY_LENGTH: return colibri_json_read_unsigned(json, &entry->length);
    default: return colibri_json_skip(json);
  }
}

/* Reads one object of the table into *entry; `needed` is a bit set of the keys it must have. */
static int read_entry(colibri_json *json, const char *where, unsigned needed, colibri_entry *entry, colibri_error *err) {
  char shown[COLIBRI_SHOWN];
  colibri_json_string key;
  unsigned seen = 0;
  if (!colibri_json_enter(json, COLIBRI_JSON_OBJECT)) return colibri_json_fail(json, where, err);
  while (colibri_json_key(json, &key)) {
    int i = 0;
    while (i < ENTRY_KEYS && !colibri_json_equals(&key, key_names[i])) i++;
    if (i < ENTRY_KEYS && seen >> i & 1)
      return colibri_fail(err, COLIBRI_EFORMAT, "%s \"%s\" has \"%s\" twice; convert the model again", where, colibri_shown(&entry->name, shown),
                          key_names[i]);
    seen |= 1u << i;
    if (!read_value(json, i, entry)) break;
  }
  if (json->error) return colibri_json_fail(json, where, err);
  for (int i = 0; i < ENTRY_KEYS; i++)
    if (needed >> i & 1 && !(seen >> i & 1))
      return colibri_fail(err, COLIBRI_EFORMAT, "%s \"%s\" has no \"%s\"; convert the model again", where, colibri_shown(&entry->name, shown),
                          key_names[i]);
  return COLIBRI_OK;
}

int colibri_table_read_tensors(colibri_table *table, colibri_json *json, colibri_error *err) {
  const unsigned needed = 1u << KEY_NAME | 1u << KEY_LAYOUT | 1u << KEY_SHAPE | 1u << KEY_OFFSET | 1u << KEY_LENGTH;
  if (!colibri_json_enter(json, COLIBRI_JSON_ARRAY)) return colibri_json_fail(json, "tensors", err);
  while (colibri_json_element(json)) {
    colibri_entry entry = {0};
    int rc = read_entry(json, "tensor", needed, &entry, err);
    if (!rc) rc = append(table, &entry, err);
    if (rc) return rc;
  }
  return json->error ? colibri_json_fail(json, "tensors", err) : COLIBRI_OK;
}

int colibri_table_read_blobs(colibri_table *table, colibri_json *json, colibri_error *err) {
  colibri_json_string name;
  if (!colibri_json_enter(json, COLIBRI_JSON_OBJECT)) return colibri_json_fail(json, "blobs", err);
  while (colibri_json_key(json, &name)) {
    colibri_entry entry = {.name = name, .blob = true};
    int rc = read_entry(json, "blob", 1u << KEY_OFFSET | 1u << KEY_LENGTH, &entry, err);
    entry.name = name; /* whatever a "name" inside says */
    if (!rc) rc = append(table, &entry, err);
    if (rc) return rc;
  }
  return json->error ? colibri_json_fail(json, "blobs", err) : COLIBRI_OK;
}

/* ---------------------------------------------------------------- names to slots */

struct binding {
  const colibri_table *table;
  const colibri_image *image;
  colibri_model *m;
  const colibri_entry **slots;   /* GLOBALS + layers * per_layer, NULL where the file has no such tensor */
  const colibri_entry **others;  /* blobs and extras */
  size_t n_others;
  int64_t per_layer;
  colibri_error *err;
};

/* Reads a decimal number without needless zeros; -1 if there is none or it is beyond 6 digits. */
static int64_t take_number(const char **p) {
  const char *start = *p;
  int64_t n = 0;
  while (**p >= '0' && **p <= '9' && *p - start < 7) n = n * 10 + (*(*p)++ - '0');
  ptrdiff_t digits = *p - start;
  return digits == 0 || digits > 6 || (digits > 1 && *start == '0') ? -1 : n;
}

static bool take_prefix(const char **p, const char *prefix) {
  size_t n = strlen(prefix);
  if (strncmp(*p, prefix, n) != 0) return false;
  *p += n;
  return true;
}

/* Slot of a tensor's name, or -1 if this model has no tensor of that name. */
static int64_t slot_of(const struct binding *b, const char *name) {
  for (int role = 0; role < GLOBALS; role++)
    if (strcmp(name, global_names[role]) == 0) return role;
  if (!take_prefix(&name, "layers.")) return -1;
  int64_t layer = take_number(&name), base = GLOBALS + layer * b->per_layer;
  if (layer < 0 || layer >= b->m->info.layers || *name++ != '.') return -1;
  if (take_prefix(&name, "experts.")) {
    int64_t e = take_number(&name);
    return e < 0 || e >= b->m->info.experts || *name ? -1 : base + LAYER_ROLES + e;
  }
  for (int role = 0; role < LAYER_ROLES; role++)
    if (strcmp(name, layer_names[role]) == 0) return base + role;
  return -1;
}

/* Name of a slot for a message. */
static const char *slot_name(const struct binding *b, int64_t slot, char out[COLIBRI_SHOWN]) {
  int64_t layer = (slot - GLOBALS) / b->per_layer, role = (slot - GLOBALS) % b->per_layer;
  if (slot < GLOBALS) snprintf(out, COLIBRI_SHOWN, "%s", global_names[slot]);
  else if (role < LAYER_ROLES) snprintf(out, COLIBRI_SHOWN, "layers.%d.%s", (int)layer, layer_names[role]);
  else snprintf(out, COLIBRI_SHOWN, "layers.%d.experts.%d", (int)layer, (int)(role - LAYER_ROLES));
  return out;
}

static bool is_other(const colibri_entry *entry) {
  const size_t n = sizeof extra_prefix - 1;
  return entry->blob || (entry->name.size >= n && memcmp(entry->name.text, extra_prefix, n) == 0);
}

/* Sorts the table into slots and others. */
static int assign(struct binding *b) {
  char name[COLIBRI_SHOWN], shown[COLIBRI_SHOWN];
  for (size_t i = 0; i < b->table->count; i++) {
    const colibri_entry *entry = &b->table->entries[i];
    if (is_other(entry)) {
      b->others[b->n_others++] = entry;
      continue;
    }
    int64_t slot = colibri_json_decode(&entry->name, name, sizeof name) > 0 ? slot_of(b, name) : -1;
    if (slot < 0)
      return colibri_fail(b->err, COLIBRI_EUNSUPPORTED, "tensor \"%s\" has no place in this model; use a newer engine or convert the model again",
                          colibri_shown(&entry->name, shown));
    if (b->slots[slot])
      return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor \"%s\" stands twice in the table; convert the model again", name);
    b->slots[slot] = entry;
  }
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- what lies where */

static int place_error(const struct binding *b, const colibri_entry *entry, const char *what) {
  char shown[COLIBRI_SHOWN];
  return colibri_fail(b->err, COLIBRI_EFORMAT, "%s \"%s\" (offset %llu, length %llu) %s; copy or convert the file again",
                      entry->blob ? "blob" : "tensor", colibri_shown(&entry->name, shown), (unsigned long long)entry->offset,
                      (unsigned long long)entry->length, what);
}

static int overlap_error(const struct binding *b, const colibri_entry *entry, const colibri_entry *other) {
  char what[COLIBRI_SHOWN + 16], shown[COLIBRI_SHOWN];
  snprintf(what, sizeof what, "overlaps \"%.40s\"", colibri_shown(&other->name, shown));
  return place_error(b, entry, what);
}

static int check_inside(const struct binding *b, const colibri_entry *entry) {
  const char *what = NULL;
  if (entry->offset < b->image->data_start) what = "begins before the end of the descriptor";
  else if (entry->offset > b->image->size || entry->length > b->image->size - entry->offset) what = "reaches beyond the file";
  return what ? place_error(b, entry, what) : COLIBRI_OK;
}

static int by_offset(const void *a, const void *b) {
  const colibri_entry *x = *(const colibri_entry *const *)a, *y = *(const colibri_entry *const *)b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->length > y->length) - (x->length < y->length);
}

static int by_name(const void *a, const void *b) {
  const colibri_entry *x = *(const colibri_entry *const *)a, *y = *(const colibri_entry *const *)b;
  if (x->blob != y->blob) return x->blob ? 1 : -1;
  int order = memcmp(x->name.text, y->name.text, x->name.size < y->name.size ? x->name.size : y->name.size);
  return order ? order : (x->name.size > y->name.size) - (x->name.size < y->name.size);
}

/* Every entry inside the file and behind the descriptor, no two overlapping; names of blobs and extras distinct. */
static int check_places(const struct binding *b) {
  size_t n = b->table->count;
  const colibri_entry **order = malloc((n + 1) * sizeof *order);
  if (!order) return colibri_fail(b->err, COLIBRI_ENOMEM, "no memory to check %zu tensors", n);
  int rc = COLIBRI_OK;
  bool sorted = true;
  for (size_t i = 0; i < n && !rc; i++) {
    order[i] = &b->table->entries[i];
    if (i && order[i]->offset < order[i - 1]->offset) sorted = false;
    rc = check_inside(b, order[i]);
  }
  if (!rc && !sorted) qsort(order, n, sizeof *order, by_offset);
  for (size_t i = 1; i < n && !rc; i++)
    if (order[i]->offset < order[i - 1]->offset + order[i - 1]->length) rc = overlap_error(b, order[i], order[i - 1]);
  free(order);
  if (rc) return rc;
  qsort(b->others, b->n_others, sizeof *b->others, by_name);
  for (size_t i = 1; i < b->n_others; i++)
    if (by_name(&b->others[i - 1], &b->others[i]) == 0) return place_error(b, b->others[i], "stands twice in the table");
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- one tensor against what it must be */

/* What a slot wants: shape [rows, columns], or [columns] if rows is 0. */
struct want {
  enum layout layout;
  int64_t rows, columns;
  bool optional;
};

static struct want want_of(const struct binding *b, int64_t slot) {
  const colibri_model_info *a = &b->m->info;
  int64_t heads = (int64_t)a->heads * a->head_dim, qkv = heads + 2 * (int64_t)a->kv_heads * a->head_dim;
  if (slot < GLOBALS) switch (slot) {
    case EMBED: return (struct want){P32, a->vocab, a->hidden, false};
    case HEAD: return (struct want){P32, a->vocab, a->hidden, true};
    case FINAL_NORM: return (struct want){PLAIN, 0, a->hidden, false};
    default: return (struct want){PLAIN, 0, b->m->rope_dims / 2, false};
  }
  switch ((slot - GLOBALS) % b->per_layer) {
    case ATTN_NORM: case FFN_NORM: return (struct want){PLAIN, 0, a->hidden, false};
    case QKV: return (struct want){P32, qkv, a->hidden, false};
    case O: return (struct want){P32, a->hidden, heads, false};
    case ROUTER: return (struct want){PLAIN, a->experts, a->hidden, true};
    case QKV_BIAS: return (struct want){PLAIN, 0, qkv, true};
    case Q_NORM: case K_NORM: return (struct want){PLAIN, 0, a->head_dim, true};
    case ROUTER_BIAS: case ROUTER_SELECT_BIAS: case ROUTER_EXPERT_SCALE: return (struct want){PLAIN, 0, a->experts, true};
    case ROUTER_INPUT_SCALE: return (struct want){PLAIN, 0, a->hidden, true};
    default: return (struct want){EXPERT, a->ffn, a->hidden, true}; /* check_layer says which experts must be there */
  }
}

static int index_of(const colibri_json_string *string, const char *const *names, int n) {
  for (int i = 0; i < n; i++)
    if (colibri_json_equals(string, names[i])) return i;
  return -1;
}

static int check_shape(const struct binding *b, int64_t slot, const struct want *want) {
  const colibri_entry *entry = b->slots[slot];
  char name[COLIBRI_SHOWN];
  int rank = want->rows ? 2 : 1;
  if (entry->rank != rank)
    return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s has %d dimensions, expected %d; convert the model again", slot_name(b, slot, name),
                        entry->rank, rank);
  if (rank == 1 && entry->shape[0] != want->columns)
    return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s has shape [%lld], expected [%lld]; convert the model again", slot_name(b, slot, name),
                        (long long)entry->shape[0], (long long)want->columns);
  if (rank == 2 && (entry->shape[0] != want->rows || entry->shape[1] != want->columns))
    return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s has shape [%lld, %lld], expected [%lld, %lld]; convert the model again",
                        slot_name(b, slot, name), (long long)entry->shape[0], (long long)entry->shape[1], (long long)want->rows,
                        (long long)want->columns);
  return COLIBRI_OK;
}

static uint64_t bytes_of(const struct want *want, int format) {
  switch (want->layout) {
    case PLAIN: return 4 * (uint64_t)(want->rows ? want->rows : 1) * (uint64_t)want->columns;
    case P32: return colibri_packed_bytes(format, want->rows, want->columns);
    default: return colibri_expert_bytes(format, want->columns, want->rows);
  }
}

/* Checks an entry against its slot; *format gets its format. */
static int check_tensor(const struct binding *b, int64_t slot, const struct want *want, int *format) {
  const colibri_entry *entry = b->slots[slot];
  char shown[COLIBRI_SHOWN], name[COLIBRI_SHOWN];
  bool plain = want->layout == PLAIN;
  if (!colibri_json_equals(&entry->layout, layout_names[want->layout]))
    return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s has layout \"%s\", expected %s; convert the model again", slot_name(b, slot, name),
                        colibri_shown(&entry->layout, shown), layout_names[want->layout]);
  *format = plain && !entry->format.text ? COLIBRI_F32 : entry->format.text ? index_of(&entry->format, format_names, COLIBRI_FORMATS) : -1;
  if (*format < 0 || (plain && *format != COLIBRI_F32))
    return colibri_fail(b->err, COLIBRI_EUNSUPPORTED, "tensor %s has format \"%s\"; this engine reads %s there", slot_name(b, slot, name),
                        colibri_shown(&entry->format, shown), plain ? "f32" : "f32, bf16, int8, int4");
  int rc = check_shape(b, slot, want);
  if (rc) return rc;
  uint64_t bytes = bytes_of(want, *format);
  if (!bytes || entry->length != bytes)
    return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s has %llu bytes, its shape and format give %llu; convert the model again",
                        slot_name(b, slot, name), (unsigned long long)entry->length, (unsigned long long)bytes);
  if (entry->offset % layout_align[want->layout])
    return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s starts at %llu, not a multiple of %llu; convert the model again",
                        slot_name(b, slot, name), (unsigned long long)entry->offset, (unsigned long long)layout_align[want->layout]);
  return COLIBRI_OK;
}

/* ---------------------------------------------------------------- binding */

/* Tensor of a slot, checked: *data gets its place or NULL if it is optional and absent. */
static int fetch(const struct binding *b, int64_t slot, const char **data, int *format) {
  char name[COLIBRI_SHOWN];
  struct want want = want_of(b, slot);
  const colibri_entry *entry = b->slots[slot];
  *data = NULL;
  *format = -1;
  if (!entry && want.optional) return COLIBRI_OK;
  if (!entry) return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s is missing; convert the model again", slot_name(b, slot, name));
  int rc = check_tensor(b, slot, &want, format);
  if (!rc) *data = b->image->data + entry->offset;
  return rc;
}

static int fetch_plain(const struct binding *b, int64_t slot, const float **out) {
  const char *data;
  int format, rc = fetch(b, slot, &data, &format);
  *out = (const float *)(const void *)data;
  if (data) b->m->info.backbone_bytes += b->slots[slot]->length;
  return rc;
}

static colibri_matrix matrix(const char *data, int format, int64_t n, int64_t k) {
  return (colibri_matrix){data, format, (int32_t)n, (int32_t)k, (int32_t)((n + 31) / 32), (int32_t)((k + 31) / 32)};
}

static int fetch_matrix(const struct binding *b, int64_t slot, colibri_matrix *out) {
  const char *data;
  int format, rc = fetch(b, slot, &data, &format);
  struct want want = want_of(b, slot);
  if (rc || !data) return rc;
  *out = matrix(data, format, want.rows, want.columns);
  b->m->info.backbone_bytes += b->slots[slot]->length;
  return COLIBRI_OK;
}

/* The kernels' row buffers are made for one format a kind of matrix; the first one met sets it. */
static int same_format(const struct binding *b, int64_t slot, int format, int32_t *common) {
  char name[COLIBRI_SHOWN];
  if (*common < 0) *common = format;
  if (*common == format) return COLIBRI_OK;
  return colibri_fail(b->err, COLIBRI_EUNSUPPORTED, "tensor %s is %s where others of its kind are %s; this engine needs one format",
                      slot_name(b, slot, name), format_names[format], format_names[*common]);
}

static int bind_globals(const struct binding *b) {
  colibri_model *m = b->m;
  int rc = fetch_matrix(b, EMBED, &m->embed);
  if (!rc) rc = fetch_matrix(b, HEAD, &m->head);
  if (!rc) rc = fetch_plain(b, FINAL_NORM, &m->final_norm);
  if (!rc) rc = fetch_plain(b, INV_FREQ, &m->inv_freq);
  if (rc) return rc;
  m->info.tied_head = !m->head.data;
  if (m->info.tied_head) m->head = m->embed;
  m->info.head_format = m->head.format;
  return COLIBRI_OK;
}

static int bind_experts(const struct binding *b, int32_t index, int64_t base) {
  colibri_model_info *info = &b->m->info;
  bool routed = b->m->layers[index].router != NULL;
  char name[COLIBRI_SHOWN];
  for (int32_t e = 0; e < info->experts; e++) {
    int64_t slot = base + LAYER_ROLES + e;
    const char *data;
    int format, rc = fetch(b, slot, &data, &format);
    if (rc) return rc;
    if (!data && (routed || e == 0))
      return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor %s is missing; convert the model again", slot_name(b, slot, name));
    if (data && !routed && e > 0)
      return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor layers.%d.router is missing though %s is there; convert the model again", index,
                          slot_name(b, slot, name));
    if (!data) continue;
    rc = same_format(b, slot, format, &info->expert_format);
    if (rc) return rc;
    int64_t panels = 2 * (((int64_t)info->ffn + 31) / 32), groups = ((int64_t)info->hidden + 31) / 32;
    colibri_expert *expert = &b->m->experts[(int64_t)index * info->experts + e];
    expert->gate_up = matrix(data, format, 2 * (int64_t)info->ffn, info->hidden);
    expert->gate_up.panels = (int32_t)panels;
    expert->down = matrix(data + panels * groups * colibri_block_bytes(format), format, info->hidden, info->ffn);
    info->expert_bytes += b->slots[slot]->length;
  }
  return COLIBRI_OK;
}

/* A vector of the router without a router, or a norm of its own that the descriptor does not speak of, would change results: refused. */
static int bind_router(const struct binding *b, int32_t index, int64_t base) {
  static const enum layer_role vectors[] = {ROUTER_BIAS, ROUTER_SELECT_BIAS, ROUTER_EXPERT_SCALE, ROUTER_INPUT_SCALE};
  colibri_layer *l = &b->m->layers[index];
  const float **places[] = {&l->route.bias, &l->route.select_bias, &l->route.expert_scale, &l->router_input_scale};
  bool residual = b->m->router.input == COLIBRI_ROUTER_RESIDUAL;
  int rc = fetch_plain(b, base + ROUTER, &l->router);
  for (int i = 0; i < 4 && !rc; i++) {
    rc = fetch_plain(b, base + vectors[i], places[i]);
    if (!rc && *places[i] && !l->router)
      rc = colibri_fail(b->err, COLIBRI_EFORMAT, "tensor layers.%d.%s is there but layers.%d.router is missing; convert the model again", index,
                        layer_names[vectors[i]], index);
  }
  if (rc || !l->router || residual == (l->router_input_scale != NULL)) return rc;
  return colibri_fail(b->err, COLIBRI_EFORMAT, "tensor layers.%d.router_input_scale is %s though router.input is %s; convert the model again", index,
                      residual ? "missing" : "there", residual ? "residual" : "normed");
}

static int bind_layer(const struct binding *b, int32_t index) {
  colibri_layer *l = &b->m->layers[index];
  int64_t base = GLOBALS + index * b->per_layer;
  l->experts = b->m->experts + (int64_t)index * b->m->info.experts;
  int rc = fetch_plain(b, base + ATTN_NORM, &l->attn_norm);
  if (!rc) rc = fetch_plain(b, base + FFN_NORM, &l->ffn_norm);
  if (!rc) rc = fetch_matrix(b, base + QKV, &l->qkv);
  if (!rc) rc = same_format(b, base + QKV, l->qkv.format, &b->m->info.backbone_format);
  if (!rc) rc = fetch_matrix(b, base + O, &l->o);
  if (!rc) rc = same_format(b, base + O, l->o.format, &b->m->info.backbone_format);
  if (!rc) rc = fetch_plain(b, base + QKV_BIAS, &l->qkv_bias);
  if (!rc) rc = fetch_plain(b, base + Q_NORM, &l->q_norm);
  if (!rc) rc = fetch_plain(b, base + K_NORM, &l->k_norm);
  if (!rc) rc = bind_router(b, index, base);
  if (rc) return rc;
  b->m->info.router_layers += l->router != NULL;
  return bind_experts(b, index, base);
}

/* Bytes one token reads: all of the backbone but an embedding that is not the head, and its experts. */
static uint64_t active_bytes(const struct binding *b) {
  const colibri_model_info *info = &b->m->info;
  uint64_t bytes = info->backbone_bytes - (info->tied_head ? 0 : b->slots[EMBED]->length);
  uint64_t one = colibri_expert_bytes(info->expert_format, info->hidden, info->ffn);
  uint64_t read = (uint64_t)info->router_layers * (uint64_t)info->top_k + (uint64_t)(info->layers - info->router_layers);
  return bytes + read * one;
}

static int bind_all(struct binding *b) {
  colibri_model *m = b->m;
  int rc = assign(b);
  if (!rc) rc = check_places(b);
  if (!rc) rc = bind_globals(b);
  m->info.expert_format = m->info.backbone_format = -1;
  for (int32_t i = 0; i < m->info.layers && !rc; i++) rc = bind_layer(b, i);
  if (!rc) m->info.active_bytes = active_bytes(b);
  return rc;
}

int colibri_table_bind(const colibri_table *table, const colibri_image *image, colibri_model *m, colibri_error *err) {
  struct binding b = {.table = table, .image = image, .m = m, .err = err};
  int64_t layers = m->info.layers, cells = layers * m->info.experts;
  if (table->count < (uint64_t)layers * 5) /* two norms, qkv, o, an expert */
    return colibri_fail(err, COLIBRI_EFORMAT, "the table has %zu tensors, too few for %lld layers; convert the model again", table->count,
                        (long long)layers);
  b.per_layer = LAYER_ROLES + m->info.experts;
  b.slots = calloc((size_t)(GLOBALS + layers * b.per_layer), sizeof *b.slots);
  b.others = calloc(table->count + 1, sizeof *b.others);
  m->layers = calloc((size_t)layers, sizeof *m->layers);
  m->experts = calloc((size_t)cells, sizeof *m->experts);
  int rc = COLIBRI_OK;
  if (!b.slots || !b.others || !m->layers || !m->experts)
    rc = colibri_fail(err, COLIBRI_ENOMEM, "no memory for %lld layers of %d experts", (long long)layers, m->info.experts);
  if (!rc) rc = bind_all(&b);
  free(b.slots);
  free(b.others);
  return rc;
}
