/* sampler.h - logits to a token (internal). */
#ifndef COLIBRI_SAMPLER_H
#define COLIBRI_SAMPLER_H

#include "kernels.h"

/* Bytes of scratch colibri_sample needs for a vocabulary. */
size_t colibri_sampler_scratch_bytes(int32_t vocab);

/* Samples one row. logits [vocab] f32 are not modified. position: of the token being sampled (start + row + 1). history [n_history] token ids.
 * target: token whose log-probability and rank are wanted, or -1. Fills *out (error_layer is set to `layers_mark` if the logits hold a NaN or
 * infinity, status COLIBRI_ENUMERIC, token 0). Order: repetition penalty, then temperature 0 = argmax (lowest index wins ties) or: temperature, top-k,
 * top-p, min-p (each over what the one before kept, renormalised), one uniform draw from a counter-based generator of (seed, position). Candidates are
 * walked by descending logit, ties to the lower index (in token order if nothing is filtered), so a result depends on its arguments alone. logprob,
 * target_logprob and top_* are of the unpenalised distribution at temperature 1; with top_logprobs < 0 and no target logprob is left 0, and a greedy
 * token costs one pass. Allocates nothing. */
void colibri_sample(const colibri_kernels *kernels, const float *logits, int32_t vocab, const colibri_sampling *params, int64_t position,
                    const int32_t *history, int32_t n_history, int32_t target, int32_t layers_mark, void *scratch, colibri_row_result *out);

#endif
