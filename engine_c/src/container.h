/* container.h - what container.c (header, descriptor) and tensors.c (tensor table) share (internal). */
#ifndef COLIBRI_CONTAINER_H
#define COLIBRI_CONTAINER_H

#include "json.h"
#include "model.h"

/* Limits of a model this engine opens: generous, and small enough that no product of two of them leaves int64. */
#define COLIBRI_MAX_LAYERS 1024

/* One row of the tensor table, or one blob. Strings point into the descriptor. */
typedef struct colibri_entry {
  colibri_json_string name, layout, format;
  uint64_t offset, length;
  int64_t shape[2];
  int32_t rank;
  bool blob;
} colibri_entry;

typedef struct colibri_table {
  colibri_entry *entries;  /* malloc'ed */
  size_t count, capacity;
} colibri_table;

/* The file the table speaks of. */
typedef struct colibri_image {
  const char *data;
  uint64_t size;
  uint64_t data_start;     /* first byte behind the descriptor */
} colibri_image;

/* Read "tensors" (an array) or "blobs" (an object) at the reader's position, appending to the table. */
int colibri_table_read_tensors(colibri_table *table, colibri_json *json, colibri_error *err);
int colibri_table_read_blobs(colibri_table *table, colibri_json *json, colibri_error *err);
/* Checks every entry against m's scalars and the file, then allocates and fills m's pointers, formats and byte counts. */
int colibri_table_bind(const colibri_table *table, const colibri_image *image, colibri_model *m, colibri_error *err);

/* The sentence for a mistake the reader found while at `where` (for example "arch.hidden"). Returns COLIBRI_EFORMAT. */
int colibri_json_fail(const colibri_json *json, const char *where, colibri_error *err);

/* A name as a message may show it: escapes as they stand, bytes outside printable ASCII as '?', cut to the buffer. Returns buffer. */
#define COLIBRI_SHOWN 72
const char *colibri_shown(const colibri_json_string *string, char buffer[COLIBRI_SHOWN]);

#endif
