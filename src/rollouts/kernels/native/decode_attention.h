/* Attention of a decode step: one query position per sequence, keys and values in blocks of a cache. */
#pragma once

#include "attention.h"

enum {
  SHORT_CONTEXT = 512, /* keys; up to this length the next row's KV data fits into the CPU cache as well */
  PASS = 4             /* maximum queries per pass over the values */
};

typedef struct {
  int64_t layers, hidden, heads, kv_heads, size, inner, vocab;
  int64_t block_hidden, block_heads, block_inner; /* inputs per partial sum, see `panel_product` */
  int64_t narrow;                                 /* embedding and KV cache are bf16 */
  int64_t dots;                                   /* queries are rounded to bf16; multiplied as `find_way` says */
  int64_t format;                                 /* of packed weights */
  int64_t threads, scratch_size;
  int64_t shared_offset; /* offset in a thread's scratch of the block tags and transposed keys of shared blocks; or 0 */
} Shape;

typedef struct {
  const float *norm, *qk_norm, *mlp_norm; /* qk_norm: one row per query and key head, or NULL */
  const void *qkv, *out, *gate_up, *down; /* packed */
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias; /* or NULL */
  int64_t has_rope;
} Layer;

/* Struct sizes, which `__init__.py` compares with those of its ctypes structures. */
int64_t shape_struct_size(void) { return sizeof(Shape); }
int64_t layer_struct_size(void) { return sizeof(Layer); }

/* Offset of the keys (or values) of a row and head in column j of the cache: those of slot s and head h are at
 * (s kv_heads + h) KEYS size, and a row reads slot source[j rows + row]. */
ALWAYS int64_t find_keys(const int32_t *source, int64_t rows, int64_t kv_heads, int64_t size, int64_t j, int64_t row,
                         int64_t head) {
  return ((int64_t)source[j * rows + row] * kv_heads + head) * KEYS * size;
}

/* Prefetch `count` elements from index i. */
ALWAYS void fetch(const void *p, int64_t i, int64_t count, int narrow) {
  const char *from = (const char *)p + i * (narrow ? 2 : 4);
  for (int64_t byte = 0; byte < count * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

/* The cache blocks of a row and head, and the row and head that the thread processes next. `brief`: the KV data of both
 * fits into the CPU cache. `apart`: the keys of many rows come first, then their values. */
typedef struct {
  const void *const *keys, *const *values;
  const int32_t *source;
  int64_t rows, kv_heads, row, head, next_row, next_head, brief, apart;
  float *shared; /* transposed keys of columns that this row shares with the next rows, or NULL */
  int32_t *tag;  /* owner of the transposed keys of a column: 1 + slot kv_heads + head */
} CacheCursor;

/* Move to a row and head; the last of `num` rows that the thread processes together is followed by the next head. */
ALWAYS void move_to(CacheCursor *p, int64_t row, int64_t num, int64_t head, int64_t position) {
  int last = row + num == p->rows, last_head = head + 1 == p->kv_heads;
  p->row = row, p->head = head, p->next_row = last ? 0 : row + 1;
  p->next_head = last && !last_head ? head + 1 : head, p->brief = position < SHORT_CONTEXT;
}

/* Whether the next row and head read the same column. */
ALWAYS int next_shares(const CacheCursor *p, int64_t j) {
  const int32_t *source = p->source + j * p->rows;
  return p->next_head == p->head && p->next_row != p->row && source[p->next_row] == source[p->row];
}

/* What to prefetch while a column of keys or values is read: `count` elements per LANES positions of one or two arrays,
 * the first from index `at` on. */
typedef struct {
  const void *first, *second; /* NULL: nothing */
  int64_t at, count;
} Ahead;

/* Keys and values `apart`: those of the next row. Short contexts (`brief`): keys and values of the next row and head, half
 * of them while this one reads keys and half while it reads values (`weighing`), so that two memory streams are busy. Long
 * contexts: this row's own values, then the keys of the next row. */
ALWAYS Ahead ahead_of(const CacheCursor *p, int64_t size, int64_t j, int weighing) {
  int64_t own = !p->brief && !p->apart && !weighing, all = LANES * size;
  if (!own && next_shares(p, j)) return (Ahead){NULL, NULL, 0, 0};
  int64_t at = find_keys(p->source, p->rows, p->kv_heads, size, j, own ? p->row : p->next_row,
                         own ? p->head : p->next_head);
  if (p->apart) return (Ahead){weighing ? p->values[j] : p->keys[j], NULL, at, all};
  if (p->brief) return (Ahead){p->keys[j], p->values[j], at + weighing * all / 2, all / 2};
  return (Ahead){weighing ? p->keys[j] : p->values[j], NULL, at, all};
}

/* Prefetch item `item` of `items` for LANES positions from t on. */
ALWAYS void fetch_some(const Ahead *a, int64_t size, int64_t t, int64_t item, int64_t items, int narrow) {
  int64_t at = a->at + t % KEYS / LANES * LANES * size + item * a->count / items, count = a->count / items;
  if (a->first) fetch(a->first, at, count, narrow);
  if (a->second) fetch(a->second, at, count, narrow);
}

/* out[q] = sum of the values weighted by weights[q], for `num` queries with `width` elements between their weights,
 * cache block by cache block. This is pass `pass` of `passes` over the values. */
ALWAYS void weigh(const float *weights, int64_t width, const CacheCursor *p, int64_t length, int64_t pass,
                  int64_t passes, float *out, int64_t size, int num, int narrow) {
  vec sums[PASS][MAX_HEAD_DIM / LANES], total[PASS][MAX_HEAD_DIM / LANES];
  for (int64_t start = 0; start < length; start += KEYS) {
    int64_t j = start / KEYS, count = length - start < KEYS ? length - start : KEYS;
    int64_t at = find_keys(p->source, p->rows, p->kv_heads, size, j, p->row, p->head);
    Ahead ahead = ahead_of(p, size, j, 1);
    for (int q = 0; q < num; q++)
      for (int64_t i = 0; i < size / LANES; i++) sums[q][i] = all(0.f);
    for (int64_t t = 0; t < count; t++) {
      fetch_some(&ahead, size, t, t % LANES * passes + pass, LANES * passes, narrow);
      for (int64_t i = 0; i < size / LANES; i++) {
        vec value = load_as(p->values[j], at + t * size + i * LANES, narrow);
        for (int q = 0; q < num; q++) sums[q][i] = fma_of(all(weights[q * width + start + t]), value, sums[q][i]);
      }
    }
    for (int q = 0; q < num; q++)
      for (int64_t i = 0; i < size / LANES; i++) total[q][i] = start ? total[q][i] + sums[q][i] : sums[q][i];
  }
  for (int q = 0; q < num; q++)
    for (int64_t i = 0; i < size / LANES; i++) store(out + q * size + i * LANES, total[q][i]);
}

ALWAYS int64_t whole_vectors(int64_t length) { return (length + LANES - 1) / LANES * LANES; }

/* Scores of the scaled queries [group, size] of one sequence and KV head, bf16 for BY_DOTS, with `length` keys, rounded up
 * to whole vectors; `scores` has rows of `width` elements. */
ALWAYS void score_keys(const float *queries, int64_t group, const CacheCursor *p, int64_t length, float *scores,
                       int64_t width, int64_t size, int narrow, int way) {
  int64_t words = way ? size / 2 : size; /* per key, of a float or a pair of bf16 */
  int is_cached = 0, is_stored = 0;
  Ahead ahead = {NULL, NULL, 0, 0};
  for (int64_t t = 0; t < length; t += LANES) {
    int64_t j = t / KEYS;
    int64_t at = find_keys(p->source, p->rows, p->kv_heads, words, j, p->row, p->head) + t % KEYS * words;
    if (t % KEYS == 0) ahead = ahead_of(p, size, j, 0);
    if (t % KEYS == 0 && p->shared) {
      int32_t tag = (int32_t)(1 + p->source[j * p->rows + p->row] * p->kv_heads + p->head);
      is_cached = p->tag[j] == tag, is_stored = !is_cached && next_shares(p, j);
      if (is_stored) p->tag[j] = tag;
    }
    vec transposed[LANES];
    for (int64_t place = 0; place < words; place += LANES) {
      float *shared = is_cached || is_stored ? p->shared + t * words + place * LANES : NULL;
      if (is_cached) {
        for (int i = 0; i < LANES; i++) transposed[i] = load(shared + i * LANES);
      } else {
        transpose(p->keys[j], at, words, place, transposed, narrow && !way);
        if (is_stored)
          for (int i = 0; i < LANES; i++) store(shared + i * LANES, transposed[i]);
      }
      for (int64_t g = 0; g < group; g++) {
        const float *query = queries + g * size + place;
        fetch_some(&ahead, size, t, place / LANES * group + g, words / LANES * group, narrow);
        vec score = place ? load(scores + g * width + t) : all(0.f);
        for (int i = 0; i < LANES; i++) {
          vec both = (vec)(((const bits_in_memory *)query)[i] - (ivec){0});
          score = way ? dots_of(score, both, transposed[i]) : fma_of(both, transposed[i], score);
        }
        store(scores + g * width + t, score);
      }
    }
  }
}

/* out = the values, weighted by the softmax of the scores. */
ALWAYS void weigh_values(const CacheCursor *p, int64_t length, int64_t group, const float *scores, int64_t width,
                         float *out, int64_t size, int narrow) {
  int64_t most = size / LANES <= 4 ? PASS : PASS / 2; /* sums stay in registers */
  int64_t passes = (group + most - 1) / most;
  for (int64_t g = 0; g < group; g += most) {
#define WEIGH(num) weigh(scores + g * width, width, p, length, g / most, passes, out + g * size, size, num, narrow)
    int64_t left = group - g;
    if (left >= 4 && most == 4) WEIGH(4);
    else if (left == 3 && most == 4) WEIGH(3);
    else if (left >= 2) WEIGH(2);
    else WEIGH(1);
  }
}

/* Attention of the scaled queries of one sequence and KV head over `length` keys. */
ALWAYS void attend(const float *queries, int64_t group, const CacheCursor *p, int64_t length, float *scores, float *out,
                   int64_t size, int narrow, int way) {
  int64_t width = whole_vectors(length);
  score_keys(queries, group, p, length, scores, width, size, narrow, way);
  for (int64_t g = 0; g < group; g++) {
    for (int64_t t = length; t < width; t++) scores[g * width + t] = -INFINITY;
    softmax_row(scores + g * width, width);
  }
  weigh_values(p, length, group, scores, width, out, size, narrow);
}
