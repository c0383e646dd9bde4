/* json.h - a strict pull reader for JSON over a byte span (internal).
 *
 * Nothing is copied, allocated or recursed into: the caller walks objects and arrays in the order they stand, and what it has no use for it
 * skips, still checked. RFC 8259 without exceptions: no trailing commas, no comments, no NaN, no leading zeros, valid UTF-8, at most
 * COLIBRI_JSON_DEPTH levels. After the first mistake `error` is set and every further call fails, so callers may check late. */
#ifndef COLIBRI_JSON_H
#define COLIBRI_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COLIBRI_JSON_DEPTH 64

typedef struct colibri_json {
  const char *text;
  size_t size, at;        /* at: the next byte to read; after an error the byte where it was found */
  int depth;
  bool fresh;             /* just entered an object or array: no comma is due */
  const char *error;      /* NULL, or what is wrong at byte `at` */
} colibri_json;

/* The bytes between the quotes, escapes not yet resolved, points into the text. */
typedef struct colibri_json_string {
  const char *text;
  size_t size;
  bool escaped;
} colibri_json_string;

enum colibri_json_type { COLIBRI_JSON_NONE = 0, COLIBRI_JSON_OBJECT, COLIBRI_JSON_ARRAY, COLIBRI_JSON_STRING, COLIBRI_JSON_NUMBER,
                         COLIBRI_JSON_TRUE, COLIBRI_JSON_FALSE, COLIBRI_JSON_NULL };

void colibri_json_init(colibri_json *json, const char *text, size_t size);
/* Type of the next value by its first byte; NONE at the end of the text, at a byte that starts no value, or after an error. */
enum colibri_json_type colibri_json_peek(colibri_json *json);

/* Enters the object or array that comes next. False if something else does. */
bool colibri_json_enter(colibri_json *json, enum colibri_json_type type);
/* Next member of the object just entered: true with *key read and its value next; false at the end (the object is then left) or on an error. */
bool colibri_json_key(colibri_json *json, colibri_json_string *key);
/* Next element of the array just entered: true with the element next; false at the end (the array is then left) or on an error. */
bool colibri_json_element(colibri_json *json);

/* Reads a scalar. False, with `error` set, if the next value is of another type. Integers: no fraction, no exponent, within int64 or uint64.
 * Doubles: correctly rounded whatever the locale, finite. */
bool colibri_json_read_string(colibri_json *json, colibri_json_string *out);
bool colibri_json_read_int(colibri_json *json, int64_t *out);
bool colibri_json_read_unsigned(colibri_json *json, uint64_t *out);
bool colibri_json_read_double(colibri_json *json, double *out);
/* Steps over one value of any type. */
bool colibri_json_skip(colibri_json *json);
/* True if nothing but white space is left and no error has occurred. */
bool colibri_json_end(colibri_json *json);

/* Resolves escapes: writes at most `capacity` bytes and a NUL (capacity includes it). Returns the length, or -1 if it does not fit or an
 * escape stands for half a surrogate pair or for NUL. */
int colibri_json_decode(const colibri_json_string *string, char *out, size_t capacity);
/* True if the string, escapes resolved, is `literal`. */
bool colibri_json_equals(const colibri_json_string *string, const char *literal);

#endif
