/* test_json.c - the JSON reader: what it takes, what it refuses, and that it never reads beyond its span. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "json.h"

/* A copy of exactly the text's bytes, so that a sanitizer sees a read beyond it. */
static char *exact(const char *text, size_t n) {
  char *copy = malloc(n ? n : 1);
  if (!copy) abort();
  memcpy(copy, text, n);
  return copy;
}

static bool accepts(const char *text, size_t n) {
  colibri_json json;
  char *copy = exact(text, n);
  colibri_json_init(&json, copy, n);
  bool ok = colibri_json_skip(&json) && colibri_json_end(&json);
  CHECK(ok == !json.error, "'%s': result and error disagree", text);
  CHECK(json.at <= n, "'%s': read to %zu of %zu", text, json.at, n);
  free(copy);
  return ok;
}

static const char *const good[] = {
  "null", "true", "false", "0", "-0", "1", "-1", "10", "1.5", "-0.25e-7", "1E+2", "1e400", "123456789012345678901234567890", "\"\"", "\"a\"", "\" \\\" \\\\ \\/ \\b\\f\\n\\r\\t\"",
  "\"\\u0000\\uD834\\uDD1E\\uabCD\"", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\xa6\"", "\"\x7f\"", "[]", "[ ]", "{}", "{ }", "[1,2 , 3]", "[[],[[]],{}]", "{\"a\":1,\"b\":[true,null]}", " \t\r\n{\n} ",
  "{\"a\":{\"a\":{\"a\":{}}}}", "\"a long string of more than eight bytes, for the fast scan\"", "\"12345678\\n1234567\\u0041\"",
};

static const char *const wrong[] = {
  "", " ", "nul", "nulll", "True", "+1", "01", "-01", "1.", ".5", "-", "1e", "1e+", "0x10", "NaN", "-Infinity", "Infinity", "\"", "\"a", "\"\\", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\t\"", "\"\n\"",
  "\"12345678\n\"", "\"\x80\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xe2\x82\"", "\"\xff\"", "\"1234567\xff\"", "\"1\x80\x81\x90\x9f\x80\x80\x80\x80\x80\"", "[", "]", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "{", "}", "{1:2}", "{\"a\"}", "{\"a\":}", "{\"a\":1,}",
  "{\"a\":1 \"b\":2}", "{,}", "{\"a\" 1}", "[1}", "{\"a\":1]", "1 2", "{} {}", "[] ,", "/* */ 1", "'a'", "\"a\" \"b\"", "[\"a\":1]", "\xef\xbb\xbf{}",
};

static void grammar(void) {
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    size_t n = strlen(good[i]);
    CHECK(accepts(good[i], n), "refused: %s", good[i]);
    for (size_t cut = 0; cut < n; cut++) accepts(good[i], cut); /* whatever it says, it stays inside */
  }
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) CHECK(!accepts(wrong[i], strlen(wrong[i])), "accepted: %s", wrong[i]);
  CHECK(!accepts("1\0", 2), "a NUL behind the value was accepted");
  CHECK(!accepts("\"a\0b\"", 5), "a NUL in a string was accepted");
}

static bool nested(size_t depth, const char *open, const char *close) {
  size_t a = strlen(open), b = strlen(close);
  char *text = malloc(depth * (a + b) + 2), *p = text;
  if (!text) abort();
  for (size_t i = 0; i < depth; i++, p += a) memcpy(p, open, a);
  *p++ = '1';
  for (size_t i = 0; i < depth; i++, p += b) memcpy(p, close, b);
  *p = '\0';
  bool ok = accepts(text, (size_t)(p - text));
  free(text);
  return ok;
}

static void depth_is_limited(void) {
  CHECK(nested(COLIBRI_JSON_DEPTH, "[", "]") && nested(COLIBRI_JSON_DEPTH, "{\"a\":", "}"), "the depth allowed was refused");
  CHECK(!nested(COLIBRI_JSON_DEPTH + 1, "[", "]") && !nested(COLIBRI_JSON_DEPTH + 1, "{\"a\":", "}"), "too deep, yet accepted");
  CHECK(!nested(1000000, "[", "]") && !nested(1000000, "[{\"a\":", "}]"), "far too deep, yet accepted");
}

static bool read_int(const char *text, int64_t *out) {
  colibri_json json;
  colibri_json_init(&json, text, strlen(text));
  return colibri_json_read_int(&json, out) && colibri_json_end(&json);
}

static bool read_unsigned(const char *text, uint64_t *out) {
  colibri_json json;
  colibri_json_init(&json, text, strlen(text));
  return colibri_json_read_unsigned(&json, out) && colibri_json_end(&json);
}

static bool read_double(const char *text, double *out) {
  colibri_json json;
  colibri_json_init(&json, text, strlen(text));
  return colibri_json_read_double(&json, out) && colibri_json_end(&json);
}

static void numbers(void) {
  int64_t i;
  uint64_t u;
  double d;
  CHECK(read_int("9223372036854775807", &i) && i == INT64_MAX, "largest int64");
  CHECK(read_int("-9223372036854775807", &i) && i == -INT64_MAX, "most negative int64 but one");
  CHECK(!read_int("9223372036854775808", &i) && !read_int("1e3", &i) && !read_int("1.0", &i) && !read_int("\"1\"", &i) && !read_int("true", &i),
        "not an int64, yet read");
  CHECK(read_unsigned("18446744073709551615", &u) && u == UINT64_MAX, "largest uint64");
  CHECK(read_unsigned("-0", &u) && u == 0, "minus zero is zero");
  CHECK(!read_unsigned("18446744073709551616", &u) && !read_unsigned("99999999999999999999999", &u) && !read_unsigned("-1", &u), "not a uint64, yet read");
  static const double doubles[] = {0.1, 1e-5, 0.08838834764831845, 1.7976931348623157e308, 5e-324, 123456789.123456789, -3.25};
  for (int k = 0; k < 7; k++) {
    char text[64];
    snprintf(text, sizeof text, "%.17g", doubles[k]);
    CHECK(read_double(text, &d) && d == doubles[k], "%s read as %.17g", text, d);
  }
  CHECK(read_double("12", &d) && d == 12, "an integer as a double");
  CHECK(!read_double("1e309", &d) && !read_double("-1e999999999999", &d), "an infinite double was read");
  CHECK(!read_double("1000000000000000000000000000000000000000000000000000000000000000000000000", &d), "a number of 73 digits was read");
  CHECK(!read_double("NaN", &d) && !read_double("[1]", &d), "not a number, yet read");
}

static void strings(void) {
  colibri_json json;
  colibri_json_string s;
  char out[16];
  const char *text = "\"a\\u00e9\\ud83d\\udc26\\n\"";
  colibri_json_init(&json, text, strlen(text));
  CHECK(colibri_json_read_string(&json, &s) && s.escaped, "an escaped string");
  CHECK(colibri_json_decode(&s, out, sizeof out) == 8 && !strcmp(out, "a\xc3\xa9\xf0\x9f\x90\xa6\n"), "decoded to '%s'", out);
  CHECK(colibri_json_decode(&s, out, 9) == 8, "fits exactly");
  CHECK(colibri_json_decode(&s, out, 8) == -1 && colibri_json_decode(&s, out, 1) == -1, "does not fit, yet decoded");
  CHECK(colibri_json_equals(&s, "a\xc3\xa9\xf0\x9f\x90\xa6\n") && !colibri_json_equals(&s, "a"), "comparison of an escaped string");
  static const char *const halves[] = {"\"\\ud83d\"", "\"\\ud83dxxxxxx\"", "\"\\ud83d\\u0041\"", "\"\\udc26\"", "\"\\u0000\""};
  for (int i = 0; i < 5; i++) {
    colibri_json_init(&json, halves[i], strlen(halves[i]));
    CHECK(colibri_json_read_string(&json, &s) && colibri_json_decode(&s, out, sizeof out) == -1, "decoded: %s", halves[i]);
  }
  colibri_json_init(&json, "\"embed\"", 7);
  CHECK(colibri_json_read_string(&json, &s) && colibri_json_equals(&s, "embed") && !colibri_json_equals(&s, "embe") && !colibri_json_equals(&s, "embedd") &&
          !colibri_json_equals(&s, ""), "comparison of a plain string");
}

/* After the first mistake every call fails and the place stays. */
static void errors_stick(void) {
  colibri_json json;
  colibri_json_string key;
  int64_t i;
  double d;
  const char *text = "{\"a\": x, \"b\": 2}";
  colibri_json_init(&json, text, strlen(text));
  CHECK(colibri_json_enter(&json, COLIBRI_JSON_OBJECT) && colibri_json_key(&json, &key), "the key before the mistake");
  CHECK(!colibri_json_read_int(&json, &i) && json.error && json.at == 6, "error at %zu", json.at);
  const char *first = json.error;
  CHECK(!colibri_json_skip(&json) && !colibri_json_key(&json, &key) && !colibri_json_element(&json) && !colibri_json_end(&json) &&
          !colibri_json_read_double(&json, &d) && !colibri_json_enter(&json, COLIBRI_JSON_ARRAY), "a call after the mistake succeeded");
  CHECK(json.error == first && json.at == 6, "the first mistake was forgotten");
}

int main(void) {
  grammar();
  depth_is_limited();
  numbers();
  strings();
  errors_stick();
  return check_result("test_json");
}
