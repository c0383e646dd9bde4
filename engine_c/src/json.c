/* json.c - a strict pull reader for JSON over a byte span. See json.h. */
#define _GNU_SOURCE  /* strtod_l: the process's locale must not change what a number means */
#include "json.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER_BYTES 64  /* longest number that is read (any length may be skipped) */

static bool fail(colibri_json *json, const char *what) {
  if (!json->error) json->error = what;
  return false;
}

static bool digit(char c) { return c >= '0' && c <= '9'; }

static void skip_space(colibri_json *json) {
  while (json->at < json->size) {
    char c = json->text[json->at];
    if (c != ' ' && c != '\n' && c != '\t' && c != '\r') return;
    json->at++;
  }
}

/* The byte at `at`, or NUL at the end (a NUL in the text starts no token either). */
static char current(const colibri_json *json) { return json->at < json->size ? json->text[json->at] : '\0'; }

static bool take(colibri_json *json, char c) {
  if (current(json) != c) return false;
  json->at++;
  return true;
}

void colibri_json_init(colibri_json *json, const char *text, size_t size) {
  *json = (colibri_json){.text = text, .size = size};
}

enum colibri_json_type colibri_json_peek(colibri_json *json) {
  if (json->error) return COLIBRI_JSON_NONE;
  skip_space(json);
  switch (current(json)) {
    case '{': return COLIBRI_JSON_OBJECT;
    case '[': return COLIBRI_JSON_ARRAY;
    case '"': return COLIBRI_JSON_STRING;
    case 't': return COLIBRI_JSON_TRUE;
    case 'f': return COLIBRI_JSON_FALSE;
    case 'n': return COLIBRI_JSON_NULL;
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
      return COLIBRI_JSON_NUMBER;
    default: return COLIBRI_JSON_NONE;
  }
}

/* ---------------------------------------------------------------- strings */

/* Length of the valid UTF-8 sequence at s (left bytes remain, s[0] >= 0x80); 0 if it is none. No overlong forms, no surrogates. */
static size_t utf8_sequence(const unsigned char *s, size_t left) {
  unsigned char low = 0x80, high = 0xBF;
  size_t n;
  if (s[0] >= 0xC2 && s[0] <= 0xDF) n = 2;
  else if (s[0] >= 0xE0 && s[0] <= 0xEF) n = 3;
  else if (s[0] >= 0xF0 && s[0] <= 0xF4) n = 4;
  else return 0;
  if (s[0] == 0xE0) low = 0xA0;
  if (s[0] == 0xED) high = 0x9F;
  if (s[0] == 0xF0) low = 0x90;
  if (s[0] == 0xF4) high = 0x8F;
  if (left < n || s[1] < low || s[1] > high) return 0;
  for (size_t i = 2; i < n; i++)
    if (s[i] < 0x80 || s[i] > 0xBF) return 0;
  return n;
}

/* Value of four hexadecimal digits, or -1. */
static int hex4(const char *s) {
  int value = 0;
  for (int i = 0; i < 4; i++) {
    char c = s[i];
    int d = digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (d < 0) return -1;
    value = value * 16 + d;
  }
  return value;
}

/* Steps over the escape whose backslash is at `at`. */
static bool skip_escape(colibri_json *json) {
  size_t left = json->size - json->at;
  if (left < 2) return fail(json, "the text ends inside a string");
  char c = json->text[json->at + 1];
  if (c == 'u') {
    if (left < 6 || hex4(json->text + json->at + 2) < 0) return fail(json, "\\u needs four hexadecimal digits");
    json->at += 6;
    return true;
  }
  if (c == '\0' || !strchr("\"\\/bfnrt", c)) return fail(json, "an unknown escape in a string");
  json->at += 2;
  return true;
}

/* Number of bytes from s on that need no look: printable ASCII but quote and backslash. Eight at a time; may stop early, never late. */
static size_t plain_run(const char *s, size_t left) {
  const uint64_t ones = UINT64_C(0x0101010101010101), tops = ones << 7;
  size_t n = 0;
  for (; left - n >= 8; n += 8) {
    uint64_t w;
    memcpy(&w, s + n, sizeof w);
    uint64_t quote = w ^ ones * '"', slash = w ^ ones * '\\';
    /* x - ones has the top bit set in the lowest byte that was zero (w - ones * 0x20: below 0x20), or w itself has: not ASCII */
    if (((quote - ones) | (slash - ones) | (w - ones * 0x20) | w) & tops) break;
  }
  return n;
}

bool colibri_json_read_string(colibri_json *json, colibri_json_string *out) {
  if (colibri_json_peek(json) != COLIBRI_JSON_STRING) return fail(json, "a string was expected");
  size_t start = ++json->at;
  bool escaped = false;
  while (json->at < json->size) {
    json->at += plain_run(json->text + json->at, json->size - json->at);
    if (json->at == json->size) break;
    unsigned char c = (unsigned char)json->text[json->at];
    if (c == '"') {
      *out = (colibri_json_string){json->text + start, json->at - start, escaped};
      json->at++;
      return true;
    }
    if (c == '\\') {
      escaped = true;
      if (!skip_escape(json)) return false;
    } else if (c < 0x20) {
      return fail(json, "a control character in a string");
    } else if (c < 0x80) {
      json->at++;
    } else {
      size_t n = utf8_sequence((const unsigned char *)json->text + json->at, json->size - json->at);
      if (!n) return fail(json, "a string is not valid UTF-8");
      json->at += n;
    }
  }
  return fail(json, "the text ends inside a string");
}

/* Writes code point c as UTF-8 into out (4 bytes of room); returns its length. */
static size_t encode_utf8(unsigned c, char *out) {
  if (c < 0x80) {
    out[0] = (char)c;
    return 1;
  }
  size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
  for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
  out[0] = (char)(lead[n] | c);
  return n;
}

/* Code point of the escape at s (already checked by skip_escape), *used its bytes; -1 for half a surrogate pair. */
static long decode_escape(const char *s, const char *end, size_t *used) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  *used = 2;
  if (s[1] != 'u') return to[strchr(from, s[1]) - from];
  *used = 6;
  long c = hex4(s + 2);
  if (c < 0xD800 || c > 0xDFFF) return c;
  if (c > 0xDBFF || end - s < 12 || s[6] != '\\' || s[7] != 'u') return -1;
  long low = hex4(s + 8);
  if (low < 0xDC00 || low > 0xDFFF) return -1;
  *used = 12;
  return 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
}

int colibri_json_decode(const colibri_json_string *string, char *out, size_t capacity) {
  const char *s = string->text, *end = s + string->size;
  size_t n = 0;
  while (s < end) {
    char bytes[4] = {*s};
    size_t used = 1, length = 1;
    if (*s == '\\') {
      long c = decode_escape(s, end, &used);
      if (c <= 0) return -1;
      length = encode_utf8((unsigned)c, bytes);
    }
    if (n + length >= capacity) return -1;
    memcpy(out + n, bytes, length);
    n += length;
    s += used;
  }
  if (n >= capacity) return -1;
  out[n] = '\0';
  return (int)n;
}

bool colibri_json_equals(const colibri_json_string *string, const char *literal) {
  char text[64];
  if (!string->escaped) { /* keys mostly differ in their first byte: no call for that. A string holds no NUL, so the loop ends with the literal */
    size_t i = 0;
    while (i < string->size && string->text[i] == literal[i]) i++;
    return i == string->size && literal[i] == '\0';
  }
  return colibri_json_decode(string, text, sizeof text) >= 0 && strcmp(text, literal) == 0;
}

/* ---------------------------------------------------------------- numbers */

/* Steps over a number, checking its grammar; *integer tells whether it has neither fraction nor exponent. */
static bool scan_number(colibri_json *json, bool *integer) {
  if (colibri_json_peek(json) != COLIBRI_JSON_NUMBER) return fail(json, "a number was expected");
  *integer = true;
  take(json, '-');
  if (!digit(current(json))) return fail(json, "a digit was expected");
  if (take(json, '0')) {
    if (digit(current(json))) return fail(json, "a number starts with a needless zero");
  } else {
    while (digit(current(json))) json->at++;
  }
  if (take(json, '.')) {
    *integer = false;
    if (!digit(current(json))) return fail(json, "a digit was expected after the point");
    while (digit(current(json))) json->at++;
  }
  if (current(json) == 'e' || current(json) == 'E') {
    *integer = false;
    json->at++;
    if (current(json) == '+' || current(json) == '-') json->at++;
    if (!digit(current(json))) return fail(json, "a digit was expected in the exponent");
    while (digit(current(json))) json->at++;
  }
  return true;
}

/* Reads an integer as sign and magnitude. */
static bool read_integer(colibri_json *json, bool *negative, uint64_t *magnitude) {
  bool integer;
  skip_space(json);
  size_t start = json->at;
  if (!scan_number(json, &integer)) return false;
  size_t end = json->at;
  json->at = start; /* an error points at the number */
  if (!integer) return fail(json, "an integer was expected");
  *negative = json->text[start] == '-';
  *magnitude = 0;
  for (size_t i = start + (*negative ? 1 : 0); i < end; i++) {
    uint64_t d = (uint64_t)(json->text[i] - '0');
    if (__builtin_mul_overflow(*magnitude, 10, magnitude) || __builtin_add_overflow(*magnitude, d, magnitude))
      return fail(json, "an integer is beyond 64 bits");
  }
  json->at = end;
  return true;
}

bool colibri_json_read_unsigned(colibri_json *json, uint64_t *out) {
  bool negative;
  if (!read_integer(json, &negative, out)) return false;
  return !(negative && *out) || fail(json, "an integer may not be negative");
}

bool colibri_json_read_int(colibri_json *json, int64_t *out) {
  bool negative;
  uint64_t magnitude;
  if (!read_integer(json, &negative, &magnitude)) return false;
  if (magnitude > (uint64_t)INT64_MAX) return fail(json, "an integer is beyond 64 bits");
  *out = negative ? -(int64_t)magnitude : (int64_t)magnitude;
  return true;
}

bool colibri_json_read_double(colibri_json *json, double *out) {
  bool integer;
  char text[NUMBER_BYTES];
  skip_space(json);
  size_t start = json->at;
  if (!scan_number(json, &integer)) return false;
  size_t n = json->at - start;
  if (n >= sizeof text) return fail(json, "a number has too many digits");
  memcpy(text, json->text + start, n);
  text[n] = '\0';
  locale_t locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (!locale) return fail(json, "the C locale could not be had");
  *out = strtod_l(text, NULL, locale);
  freelocale(locale);
  return isfinite(*out) || fail(json, "a number is too large");
}

/* ---------------------------------------------------------------- structure */

bool colibri_json_enter(colibri_json *json, enum colibri_json_type type) {
  if (colibri_json_peek(json) != type) return fail(json, type == COLIBRI_JSON_OBJECT ? "an object was expected" : "an array was expected");
  if (json->depth == COLIBRI_JSON_DEPTH) return fail(json, "nested too deeply");
  json->depth++;
  json->at++;
  json->fresh = true;
  return true;
}

/* Shared by key and element: true if another item follows, its comma consumed; false at `close` or on an error. */
static bool more(colibri_json *json, char close) {
  if (json->error) return false;
  skip_space(json);
  bool fresh = json->fresh;
  json->fresh = false;
  if (take(json, close)) {
    json->depth--;
    return false;
  }
  if (!fresh && !take(json, ',')) return fail(json, close == '}' ? "',' or '}' was expected" : "',' or ']' was expected");
  return true;
}

bool colibri_json_key(colibri_json *json, colibri_json_string *key) {
  if (!more(json, '}') || !colibri_json_read_string(json, key)) return false;
  skip_space(json);
  return take(json, ':') || fail(json, "':' was expected");
}

bool colibri_json_element(colibri_json *json) {
  if (!more(json, ']')) return false;
  return colibri_json_peek(json) != COLIBRI_JSON_NONE || fail(json, "a value was expected");
}

static bool skip_word(colibri_json *json, const char *word) {
  size_t n = strlen(word);
  if (json->size - json->at < n || memcmp(json->text + json->at, word, n) != 0) return fail(json, "a value was expected");
  json->at += n;
  return true;
}

/* Steps over a scalar, or enters an object or array, noting which in bit `depth` of *objects. */
static bool skip_step(colibri_json *json, uint64_t *objects) {
  colibri_json_string string;
  bool integer;
  enum colibri_json_type type = colibri_json_peek(json);
  switch (type) {
    case COLIBRI_JSON_OBJECT:
    case COLIBRI_JSON_ARRAY: {
      if (!colibri_json_enter(json, type)) return false;
      uint64_t bit = UINT64_C(1) << (json->depth - 1);
      *objects = type == COLIBRI_JSON_OBJECT ? *objects | bit : *objects & ~bit;
      return true;
    }
    case COLIBRI_JSON_STRING: return colibri_json_read_string(json, &string);
    case COLIBRI_JSON_NUMBER: return scan_number(json, &integer);
    case COLIBRI_JSON_TRUE: return skip_word(json, "true");
    case COLIBRI_JSON_FALSE: return skip_word(json, "false");
    case COLIBRI_JSON_NULL: return skip_word(json, "null");
    default: return fail(json, "a value was expected");
  }
}

bool colibri_json_skip(colibri_json *json) {
  int outer = json->depth;
  uint64_t objects = 0; /* bit d - 1: level d is an object */
  colibri_json_string key;
  if (!skip_step(json, &objects)) return false;
  while (json->depth > outer) {
    bool object = objects >> (json->depth - 1) & 1;
    if (object ? colibri_json_key(json, &key) : colibri_json_element(json)) skip_step(json, &objects);
    if (json->error) return false;
  }
  return true;
}

bool colibri_json_end(colibri_json *json) {
  if (json->error) return false;
  skip_space(json);
  return json->at == json->size || fail(json, "something follows the value");
}
