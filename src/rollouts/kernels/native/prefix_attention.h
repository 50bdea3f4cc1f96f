/* Attention of a decode step by AMX: rows with the same prefix multiply its keys and values together. */
#pragma once

#include "decode_attention.h"

/* Consecutive rows whose first columns are the same: whole ones, of whose keys all are visible. */
typedef struct {
  int64_t first, num, columns;
} Run;

enum { RUN_QUERIES = 4 * AMX_ROWS }; /* at most so many queries of a key head in a run, if a row has no more */

/* The runs of a step, short enough to be divided among the threads, for AMX. */
static int64_t find_runs(const Shape *s, const int32_t *source, const int64_t *positions, int64_t rows, Run *runs) {
  int64_t num = 0, most = RUN_QUERIES * s->kv_heads / s->heads;
  int64_t fair = rows * s->kv_heads / (2 * s->threads);
  most = fair < 1 || most < 1 ? 1 : fair < most ? fair : most;
  for (int64_t row = 0, count; find_way(s->dots) == BY_TILES && row < rows; row += count, num++) {
    int64_t columns = 0;
    for (count = 1; s->shared_offset && row + count < rows; count++) {
      int64_t other = row + count, j = 0, keys = positions[positions[row] < positions[other] ? row : other] + 1;
      while ((j + 1) * KEYS <= keys && source[j * rows + row] == source[j * rows + other]) j++;
      if (count == 1) columns = j;
      if (j == 0 || j < columns) break;
    }
    int64_t parts = (count + most - 1) / most;
    count = (count + parts - 1) / parts;
    runs[num] = (Run){row, count, count > 1 ? columns : 0};
  }
  return num;
}

/* What `attend_run` has in its scratch, in floats. */
typedef struct {
  int64_t queries, sums, keys, values, all;
} RunScratch;

ALWAYS RunScratch run_scratch(int64_t queries, int64_t width, int64_t columns, int64_t size) {
  RunScratch at = {.queries = queries * width};
  at.sums = at.queries + queries * size / 2;
  at.keys = at.sums + queries * size;
  at.values = at.keys + PANEL * size / 2;
  at.all = at.values + num_panels(size, PLAIN) * PANEL * columns * KEYS / 2;
  return at;
}

/* Elements of scratch of a thread for `attend_run`, of up to `columns` columns. */
int64_t run_scratch_size(const Shape *s, int64_t columns) {
  int64_t group = s->heads / s->kv_heads, queries = group < RUN_QUERIES ? RUN_QUERIES : group;
  return find_way(s->dots) == BY_TILES ? run_scratch(queries, columns * KEYS, columns, s->size).all : 0;
}

#ifdef HAS_AMX
/* Configure the tiles of attention: 0 scores, of 16 keys (tile 2) with queries (tile 1); 4 to 7 sums, of values (tile 2)
 * with weights (tile 3). */
static void start_attention(int64_t group) {
  AmxShapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shapes.rows[i] = (uint8_t)(i < 3 ? AMX_ROWS : amx_height(group));
    shapes.bytes[i] = (uint16_t)(i < 2 ? 4 * amx_height(group) : 64);
  }
  set_shapes(&shapes);
}

/* 32 values of each of two keys in pairs: first those of columns 0-3, 8-11, 16-19 and 24-27, which takes fewer instructions
 * than to keep their order. NULL: zeros. */
ALWAYS void pair_values(const uint16_t *even, const uint16_t *odd, float *to) {
  __m512i x = even ? _mm512_loadu_si512(even) : _mm512_setzero_si512();
  __m512i y = odd ? _mm512_loadu_si512(odd) : _mm512_setzero_si512();
  store(to, (vec)_mm512_unpacklo_epi16(x, y));
  store(to + LANES, (vec)_mm512_unpackhi_epi16(x, y));
}

/* Scaled sums of such columns, in the order of columns. */
ALWAYS void order_sums(const float *sums, vec scale, float *out) {
  vec x = load(sums) * scale, y = load(sums + LANES) * scale;
  store(out, SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
  store(out + LANES, SHUFFLE(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}

/* `score_keys` by AMX, from key `first`, of a block, on. Rows of bf16 queries are `stride` floats apart. */
ALWAYS void score_by_tiles(const float *queries, int64_t stride, int64_t group, const CacheCursor *p, int64_t first,
                           int64_t length, float *scores, int64_t width, int64_t size) {
  int64_t num = amx_height(group), row = 2 * size;
  int32_t pairs[MAX_HEAD_DIM / 2 * AMX_ROWS];
  float part[KEYS * AMX_ROWS];
  __m512i lanes = (__m512i)((ivec){LANE_NUMBERS} * (int32_t)num);
  for (int64_t g = 0; g < group; g += num) {
    int64_t from = g < group - num ? g : group - num;
    for (int64_t q = 0; q < num; q++)
      for (int64_t i = 0; i < size / 2; i++)
        pairs[i * num + q] = ((const bits_in_memory *)(queries + (from + q) * stride))[i];
    for (int64_t start = first; start < length; start += KEYS) {
      int64_t j = start / KEYS, count = length - start < KEYS ? length - start : KEYS;
      int64_t at = find_keys(p->source, p->rows, p->kv_heads, size, j, p->row, p->head);
      const char *keys = (const char *)p->keys[j] + 2 * at;
      Ahead ahead = g ? (Ahead){NULL, NULL, 0, 0} : ahead_of(p, size, j, 0);
      __asm__ volatile("" ::: "memory"); /* gcc does not know that tiles are loaded from memory */
      for (int64_t t = 0; t < count; t += LANES) {
        _tile_zero(0);
        for (int64_t k = 0; k < size; k += STEP) {
          fetch_some(&ahead, size, t, k / STEP, size / STEP, 1);
          _tile_loadd(2, keys + t * row + 2 * k, row);
          _tile_loadd(1, pairs + k / 2 * num, 4 * num);
          _tile_dpbf16ps(0, 2, 1);
        }
        _tile_stored(0, part + t * num, 4 * num);
      }
      for (int64_t t = 0; t < count; t += LANES)
        for (int64_t q = 0; q < num; q++)
          store(scores + (from + q) * width + start + t, (vec)_mm512_i32gather_ps(lanes, part + t * num + q, 4));
    }
  }
}

/* The weights of all scores, bf16 in their place, with zeros up to `width`, a multiple of STEP; then their scale. */
ALWAYS void weigh_scores(float *scores, int64_t group, int64_t length, int64_t width) {
  for (int64_t g = 0; g < group; g++) {
    float *row = scores + g * width;
    for (int64_t t = length; t < width; t++) row[t] = -INFINITY;
    weights_of(row, width, row, row + width / 2);
  }
}

/* out = the weighted values from key `first`, of a block, to `length`; `before`: sums of those before, or NULL. */
ALWAYS void weigh_by_tiles(const CacheCursor *p, int64_t first, int64_t length, const float *before, int64_t group,
                           const float *weights, int64_t width, float *out, int64_t size) {
  int64_t num = amx_height(group);
  float pairs[2][AMX_ROWS * PANEL] __attribute__((aligned(64))), sums[AMX_ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t i = 0; i < size; i += PANEL)
    for (int64_t g = 0; g < group; g += num) {
      int64_t from = g < group - num ? g : group - num, columns = size - i < PANEL ? HALF : PANEL;
      Ahead ahead = {NULL, NULL, 0, 0};
      if (before) {
        for (int64_t q = 0; q < num; q++)
          memcpy(sums + q * PANEL, before + (from + q) * size + i, sizeof *sums * (size_t)columns);
        __asm__ volatile("" ::: "memory");
        _tile_loadd(4, sums, 4 * PANEL);
        _tile_loadd(5, sums + LANES, 4 * PANEL);
        _tile_loadd(6, sums + 2 * LANES, 4 * PANEL);
        _tile_loadd(7, sums + 3 * LANES, 4 * PANEL);
      } else {
        _tile_zero(4);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
      }
      for (int64_t start = first; start < length; start += STEP) {
        int64_t j = start / KEYS, count = length - start;
        int64_t at = find_keys(p->source, p->rows, p->kv_heads, size, j, p->row, p->head) + start % KEYS * size + i;
        const uint16_t *values = (const uint16_t *)p->values[j] + at;
        float *to = pairs[start / STEP % 2];
        if (start % KEYS == 0 && g == 0) ahead = ahead_of(p, size, j, 1);
        for (int64_t t = 0; t < STEP; t += 2)
          for (int64_t c = 0; c < columns; c += HALF)
            pair_values(t < count ? values + t * size + c : NULL, t + 1 < count ? values + (t + 1) * size + c : NULL,
                        to + t / 2 * PANEL + c);
        for (int64_t t = 0; t < STEP; t += LANES)
          fetch_some(&ahead, size, start + t, i / PANEL, (size + HALF) / PANEL, 1);
        __asm__ volatile("" ::: "memory");
        _tile_loadd(3, (const char *)(weights + from * width) + 2 * start, 4 * width);
        _tile_loadd(2, to, 4 * PANEL);
        _tile_dpbf16ps(4, 3, 2);
        _tile_loadd(2, to + LANES, 4 * PANEL);
        _tile_dpbf16ps(5, 3, 2);
        if (columns < PANEL) continue;
        _tile_loadd(2, to + 2 * LANES, 4 * PANEL);
        _tile_dpbf16ps(6, 3, 2);
        _tile_loadd(2, to + 3 * LANES, 4 * PANEL);
        _tile_dpbf16ps(7, 3, 2);
      }
      _tile_stored(4, sums, 4 * PANEL);
      _tile_stored(5, sums + LANES, 4 * PANEL);
      _tile_stored(6, sums + 2 * LANES, 4 * PANEL);
      _tile_stored(7, sums + 3 * LANES, 4 * PANEL);
      for (int64_t q = 0; q < num; q++)
        for (int64_t c = 0; c < columns; c += HALF)
          order_sums(sums + q * PANEL + c, all(weights[(from + q) * width + width / 2]), out + (from + q) * size + i + c);
    }
}

/* Scores of `num` queries with the columns of a run. */
static void score_run(const void *queries, int64_t num, const CacheCursor *p, int64_t columns, float *scores,
                      int64_t width, float *packed, int64_t size) {
  start_amx(num, DOTS);
  for (int64_t t = 0; t < columns * KEYS; t += PANEL) {
    int64_t j = t / KEYS, at = find_keys(p->source, p->rows, p->kv_heads, size, j, p->row, p->head) + t % KEYS * size;
    for (int64_t i = 0; i < PANEL; i += LANES) pack_some_keys(p->keys[j], at + i * size, size, packed, i, size, 1, 1);
    amx_dots(queries, 2 * size, size, (const char *)packed, scores + t, width, PANEL, (Following){{0}, NULL}, num, 0);
  }
}

/* Sums of the values of these columns, in the order of `pair_values`; rows of weights are `width` floats apart. */
static void weigh_run(const float *weights, int64_t width, int64_t num, const CacheCursor *p, int64_t columns,
                      float *sums, float *packed, int64_t size) {
  int64_t keys = columns * KEYS;
  start_amx(num, DOTS);
  for (int64_t i = 0; i < size; i += PANEL) {
    int64_t some = size - i < PANEL ? HALF : PANEL;
    for (int64_t t = 0; t < keys; t += 2) {
      int64_t at = find_keys(p->source, p->rows, p->kv_heads, size, t / KEYS, p->row, p->head) + t % KEYS * size + i;
      const uint16_t *values = (const uint16_t *)p->values[t / KEYS] + at;
      for (int64_t c = 0; c < some; c += HALF)
        pair_values(values + c, values + size + c, packed + t / 2 * PANEL + c);
    }
    amx_dots((const char *)weights, 4 * width, keys, (const char *)packed, sums + i, size, some,
             (Following){{0}, NULL}, num, 0);
  }
}

/* `attend` for the rows of a run, of which `start` is at the first: their columns in common are multiplied for all of them
 * at once, and what follows row by row, with the same bits. Rows of q and out have `q_stride` and `out_stride` elements. */
ALWAYS void attend_run(const Run *run, const CacheCursor *start, const int64_t *positions, int64_t group,
                       const float *q, int64_t q_stride, float *out, int64_t out_stride, float *scratch, int64_t size) {
  int64_t num = run->num * group, keys = run->columns * KEYS, width = 0;
  for (int64_t r = 0; r < run->num; r++)
    if (whole_steps(positions[r] + 1) > width) width = whole_steps(positions[r] + 1);
  RunScratch at = run_scratch(num, width, run->columns, size);
  float *queries = scratch + at.queries, *sums = scratch + at.sums;
  for (int64_t i = 0; i < num && keys; i++)
    memcpy(queries + i * size / 2, q + i / group * q_stride + i % group * size, 2 * (size_t)size);
  if (keys) score_run(queries, num, start, run->columns, scratch, width, scratch + at.keys, size);
  CacheCursor cursor;
  if (keys) start_attention(group);
#define FOR_ROWS \
  cursor = *start; \
  for (int64_t r = 0; r < run->num; r++, cursor.row++, cursor.next_row = (cursor.row + 1) % cursor.rows)
  FOR_ROWS {
    float *scores = scratch + r * group * width;
    score_by_tiles(q + r * q_stride, size, group, &cursor, keys, positions[r] + 1, scores, width, size);
    weigh_scores(scores, group, positions[r] + 1, width);
  }
  if (keys) weigh_run(scratch, width, num, start, run->columns, sums, scratch + at.values, size);
  if (keys) start_attention(group);
  FOR_ROWS
    weigh_by_tiles(&cursor, keys, positions[r] + 1, keys ? sums + r * group * size : NULL, group,
                   scratch + r * group * width, width, out + r * out_stride, size);
}

/* `attend` for all runs. */
static void attend_runs(const Run *runs, int64_t num_runs, const Shape *s, const float *q, const CacheCursor *all_rows,
                        const int64_t *positions, float *out, uint16_t *rounded, float *scratch) {
  int64_t size = s->size, group = s->heads / s->kv_heads, rows = all_rows->rows;
  int64_t q_stride = (s->heads + 2 * s->kv_heads) * size, out_stride = s->heads * size;
  start_attention(group);
  for (int64_t item = 0; item < num_runs * s->kv_heads; item++) {
    const Run *run = runs + item % num_runs;
    int64_t head = item / num_runs, row = run->first;
    if ((head * rows + row) * THREADS / (rows * s->kv_heads) != THREAD) continue; /* as many rows for each thread */
    const float *from = q + row * q_stride + head * group * size;
    float *to = out + row * out_stride + head * group * size;
    CacheCursor cursor = *all_rows;
    move_to(&cursor, row, run->num, head, positions[row]);
    cursor.apart = run->num > 1;
    if (size == 64) attend_run(run, &cursor, positions + row, group, from, q_stride, to, out_stride, scratch, 64);
    else attend_run(run, &cursor, positions + row, group, from, q_stride, to, out_stride, scratch, size);
    for (int64_t r = 0; r < run->num && rounded; r++)
      round_row(to + r * out_stride, rounded + (to - out) + r * out_stride, group * size);
  }
  _tile_release();
}
#else
static void attend_runs(const Run *runs, int64_t num_runs, const Shape *s, const float *q, const CacheCursor *all_rows,
                        const int64_t *positions, float *out, uint16_t *rounded, float *scratch) {}
#endif
