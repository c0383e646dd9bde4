/* error.c - the one way to write an error sentence. */
#include <stdarg.h>
#include <stdio.h>

#include "model.h"

int colibri_fail(colibri_error *err, int code, const char *format, ...) {
  if (!err) return code;
  va_list args;
  va_start(args, format);
  vsnprintf(err->message, sizeof err->message, format, args);
  va_end(args);
  err->code = code;
  return code;
}
