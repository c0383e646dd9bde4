/* cut.h - a phase's work cut into tasks: what is written into team->tasks and homes (internal). */
#ifndef COLIBRI_CUT_H
#define COLIBRI_CUT_H

#include "session.h"

/* Lanes that compute in this step, the front end's included. */
int colibri_lanes_of(const colibri_session *s);

/* Every function here writes a list of tasks from number 0 on and returns how many. */

/* Rows in at most n nearly equal blocks. */
int colibri_cut_rows(colibri_session *s, int rows, int n);
/* A matrix product of `rows` rows: blocks of rows whose activations stay in cache, times pieces of panels. */
int colibri_cut_matrix(colibri_session *s, const colibri_matrix *m, int rows);
/* Each expert's mini-batch in as many pieces of neurons as its share of the work is of all lanes' (two pieces a lane in all). */
int colibri_cut_gate_up(colibri_session *s, int layer);
/* The experts' down products: pieces of panels, each for all experts; or, with split_down, cut like gate_up. */
int colibri_cut_down(colibri_session *s, int layer);
/* The weighted sum after a split down product: blocks of rows, times groups of columns where rows are few. */
int colibri_cut_combine(colibri_session *s);

/* Where the next attention task starts: a task is a sequence, a KV head and a tile of rows. */
typedef struct colibri_attention_cursor { int seq, head, row; } colibri_attention_cursor;
/* 1 if no sequence has more than one tile: then each task can store the K and V of its rows itself. */
int colibri_one_tile_each(const colibri_session *s);
/* Attention from the cursor on, as far as the list goes. */
int colibri_cut_attention(colibri_session *s, colibri_attention_cursor *c);

#endif
