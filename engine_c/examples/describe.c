/* describe.c - smallest use of the public C interface: opens a container and prints what it is. Valid C11 and C++17.
 *
 *   make engine && build/describe MODEL.colibri */
#include "colibri.h"

#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: describe MODEL.colibri   (engine %s; this CPU runs %s)\n", colibri_version(), colibri_isa_available());
    return 2;
  }
  colibri_error err;
  colibri_model *model = NULL;
  if (colibri_model_open(argv[1], &model, &err) != COLIBRI_OK) {
    fprintf(stderr, "describe: %s\n", err.message);
    return 1;
  }
  const colibri_model_info *info = colibri_model_get_info(model);
  printf("%d layers, hidden %d, %d experts, %d a token, vocabulary %d, context %d\n", (int)info->layers, (int)info->hidden,
         (int)info->experts, (int)info->top_k, (int)info->vocab, (int)info->max_context);
  printf("%" PRIu64 " bytes, of which one token reads %" PRIu64 "; kernels %s\n", info->file_bytes, info->active_bytes, colibri_isa_name());
  colibri_model_close(model);
  return 0;
}
