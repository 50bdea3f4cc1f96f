/* LoRA adapters: y += scale B (A x) for the rows of each adapter. */
#pragma once

#include "linear.h"

/* Columns of A and B are padded to a multiple of WHOLE, `LANES` of native/__init__.py, on every CPU. */
enum { DELTA_ROWS = 4, MAX_RANK = 256, VECS = 2, WHOLE = 16 };

typedef struct {
  int64_t rank, width, block;    /* width: rank padded; block: inputs per partial sum of B (A x), see `panel_product` */
  double scale;
  const float *const *matrices;  /* per place: A as [inputs][width] and B as [rank][outputs padded], or NULL */
} Delta;

/* Rows that have the same adapter; only int64_t, as `deltas.py` writes them. */
typedef struct {
  int64_t delta, num, rows[DELTA_ROWS];
} DeltaRows;

int64_t delta_struct_size(void) { return sizeof(Delta); }
int64_t max_rank(void) { return MAX_RANK; }

/* sums[r] = inputs of row r times `vecs` vectors of outputs, in the order of sums of `panel_product`. */
ALWAYS void delta_tile(const float *const *x, const float *w, int64_t size, int64_t width, int64_t block,
                       vec sums[DELTA_ROWS][VECS], int num, int vecs) {
  for (int64_t start = 0; start < size; start += block) {
    int64_t end = size - start < block ? size : start + block;
    vec part[DELTA_ROWS][VECS];
    for (int r = 0; r < num; r++)
      for (int c = 0; c < vecs; c++) part[r][c] = all(0.f);
    for (int64_t k = start; k < end; k++)
      for (int c = 0; c < vecs; c++) {
        vec column = load(w + k * width + c * LANES);
        for (int r = 0; r < num; r++) part[r][c] = fma_of(all(x[r][k]), column, part[r][c]);
      }
    for (int r = 0; r < num; r++)
      for (int c = 0; c < vecs; c++) sums[r][c] = start ? sums[r][c] + part[r][c] : part[r][c];
  }
}

ALWAYS void delta_rows(const Delta *d, const float *a, const float *b, const float *const *x, int64_t inputs,
                       int64_t block, float *const *y, int64_t outputs, int num) {
  float low[DELTA_ROWS][MAX_RANK];
  const float *lows[DELTA_ROWS] = {low[0], low[1], low[2], low[3]};
  int64_t padded = (outputs + WHOLE - 1) / WHOLE * WHOLE;
  vec sums[DELTA_ROWS][VECS];
  for (int64_t i = 0; i < d->width; i += VECS * LANES) {
    int both = i + VECS * LANES <= d->width;
    if (both) delta_tile(x, a + i, inputs, d->width, block, sums, num, VECS);
    else delta_tile(x, a + i, inputs, d->width, block, sums, num, 1);
    for (int r = 0; r < num; r++)
      for (int c = 0; c <= both; c++) store(low[r] + i + c * LANES, sums[r][c]);
  }
  for (int64_t i = 0; i < padded; i += VECS * LANES) {
    int both = i + VECS * LANES <= padded;
    if (both) delta_tile(lows, b + i, d->rank, padded, d->block, sums, num, VECS);
    else delta_tile(lows, b + i, d->rank, padded, d->block, sums, num, 1);
    for (int r = 0; r < num; r++)
      for (int c = 0; c <= both; c++) {
        int64_t at = i + c * LANES;
        STORE(y[r], at, outputs, LOAD(y[r], at, outputs) + sums[r][c] * all((float)d->scale));
      }
  }
}

/* Add the deltas of place `place` to `outputs` columns of y, which has `stride` elements per row. `block` is the number
 * of inputs per partial sum of A x. */
static void change_rows(Team *team, const Delta *deltas, const DeltaRows *items, int64_t num_items, int64_t place,
                        const float *x, int64_t inputs, int64_t block, float *y, int64_t stride, int64_t outputs) {
  SHARED_FOR
  for (int64_t i = 0; i < num_items; i++) {
    const DeltaRows *item = items + i;
    const Delta *d = deltas + item->delta;
    const float *a = d->matrices[2 * place], *b = d->matrices[2 * place + 1];
    const float *from[DELTA_ROWS];
    float *to[DELTA_ROWS];
    if (!a) continue;
    for (int64_t r = 0; r < item->num; r++) from[r] = x + item->rows[r] * inputs, to[r] = y + item->rows[r] * stride;
    switch (item->num) {
#define DELTA_CASE(num) \
  case num: delta_rows(d, a, b, from, inputs, block, to, outputs, num); break;
      DELTA_CASE(1)
      DELTA_CASE(2)
      DELTA_CASE(3)
      DELTA_CASE(4)
    }
  }
  wait_for_team(team);
}

void add_deltas(const Delta *deltas, const DeltaRows *items, int64_t num_items, int64_t place, const float *x,
                int64_t inputs, int64_t block, float *y, int64_t stride, int64_t outputs, int64_t threads) {
  TEAM_OF(threads)
  change_rows(NULL, deltas, items, num_items, place, x, inputs, block, y, stride, outputs);
}
