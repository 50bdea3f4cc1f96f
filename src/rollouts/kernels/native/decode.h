/* A decode step: one new token per sequence, through all layers. */
#pragma once

#include "adapters.h"
#include "prefix_attention.h"

static void attend_rows(Team *team, const Shape *s, const Layer *layer, float eps, float *qkv, const float *cos,
                        const float *sin, const int64_t *positions, void *const *keys, void *const *values,
                        int64_t num_columns, const int32_t *source, float *out, uint16_t *rounded, float *scratch,
                        int64_t rows, const Run *runs, int64_t num_runs) {
  int64_t size = s->size, group = s->heads / s->kv_heads, all_heads = s->heads + 2 * s->kv_heads;
  int narrow = (int)s->narrow, way = find_way(s->dots);
  vec scale = all((float)pow((double)size, -0.5)); /* the same rounding as in Python */
  SHARED_FOR /* all keys first: several rows may be of the same sequence */
  for (int64_t item = 0; item < rows * s->kv_heads; item++) {
    int64_t row = item % rows, head = item / rows, position = positions[row], j = position / KEYS;
    const float *c = cos + position * size, *sn = sin + position * size;
    float *q = qkv + (row * all_heads + head * group) * size, *k = qkv + (row * all_heads + s->heads + head) * size;
    float *v = k + s->kv_heads * size;
    if (layer->qk_norm) norm_row(k, layer->qk_norm + (s->heads + head) * size, eps, k, size);
    if (layer->has_rope) rotate_row(k, c, sn, 1.f, k, size);
    int64_t at = find_keys(source, rows, s->kv_heads, size, j, row, head) + position % KEYS * size;
    for (int64_t i = 0; i < size; i += LANES) {
      store_as(keys[j], at + i, load(k + i), narrow);
      store_as(values[j], at + i, load(v + i), narrow);
    }
    for (int64_t g = 0; g < group; g++) {
      float *one = q + g * size;
      if (layer->qk_norm) norm_row(one, layer->qk_norm + (head * group + g) * size, eps, one, size);
      if (layer->has_rope) rotate_row(one, c, sn, 1.f, one, size);
      scale_query(one, scale, one, size, way != WIDE);
    }
  }
  wait_for_team(team);
  CacheCursor cursor = {(const void *const *)keys, (const void *const *)values, source, rows, s->kv_heads};
  if (way == BY_TILES) {
    attend_runs(runs, num_runs, s, qkv, &cursor, positions, out, rounded, scratch + THREAD * s->scratch_size);
    wait_for_team(team);
    return;
  }
  int32_t *tag = (int32_t *)(scratch + THREAD * s->scratch_size + s->shared_offset);
  float *shared = (float *)tag + (num_columns + LANES - 1) / LANES * LANES;
  if (s->shared_offset) memset(tag, 0, (size_t)num_columns * sizeof *tag); /* left by another layer */
  SHARED_FOR /* rows that share columns are adjacent, so that these are in the CPU cache */
  for (int64_t item = 0; item < rows * s->kv_heads; item++) {
    int64_t row = item % rows, head = item / rows, position = positions[row];
    float *q = qkv + (row * all_heads + head * group) * size, *scores = scratch + THREAD * s->scratch_size;
    float *to = out + (row * s->heads + head * group) * size;
    move_to(&cursor, row, 1, head, position);
    cursor.shared = s->shared_offset ? shared : NULL, cursor.tag = tag;
#define ATTEND(size, narrow, way) attend(q, group, &cursor, position + 1, scores, to, size, narrow, way)
#define ATTEND_BY_WAY(size) \
  do { \
    if (way == BY_DOTS) ATTEND(size, 1, BY_DOTS); \
    else if (narrow) ATTEND(size, 1, WIDE); \
    else ATTEND(size, 0, WIDE); \
  } while (0)
    if (size == 64) ATTEND_BY_WAY(64);
    else if (size == 128) ATTEND_BY_WAY(128);
    else ATTEND(size, narrow, way);
    if (rounded) round_row(to, rounded + (to - out), group * size);
  }
  wait_for_team(team);
}

/* x += added, unless that is NULL; out = the norms of x, and `ready` the same `in_format`. */
static void norm_rows(Team *team, float *x, const float *added, const float *weight, float eps, float *out, void *ready,
                      int64_t rows, int64_t size, int format) {
  SHARED_FOR
  for (int64_t r = 0; r < rows; r++) {
    if (added) ROW(i, size) STORE(x + r * size, i, size, LOAD(added + r * size, i, size) + LOAD(x + r * size, i, size));
    norm_row(x + r * size, weight, eps, out + r * size, size);
    if (ready) in_format(out + r * size, (float *)((char *)ready + r * row_size(size, format)), 1, size, format);
  }
  wait_for_team(team);
}

/* The activations of a decode step. Each thread computes some, which all threads then read. */
typedef struct {
  float *x, *normed, *y, *z;
  void *ready_norms, *ready; /* norms, and inputs of the other products, see `product`; or NULL */
} Activations;

/* Divides `work` among them; returns the number of its elements. */
static int64_t place_activations(Activations *a, const Shape *s, float *work, int64_t widest, int64_t rows) {
  int64_t size = 0, width = s->heads * s->size, format = s->format;
#define TAKE(count) (size += whole_vectors(count), work + size - whole_vectors(count))
  a->x = TAKE(rows * s->hidden), a->normed = TAKE(rows * s->hidden), a->y = TAKE(rows * widest), a->z = TAKE(rows * widest);
  a->ready_norms = format == DOTS || format == INT8 ? TAKE(rounded_size(rows, s->hidden, (int)format)) : NULL;
  a->ready = format == DOTS && width % STEP == 0 && s->inner % STEP == 0
                 ? TAKE(rounded_size(rows, width > s->inner ? width : s->inner, DOTS)) : NULL;
  return size;
}

/* Elements of `work` that `decode` needs for so many rows, of at most `widest` elements. */
int64_t decode_work_size(const Shape *s, int64_t widest, int64_t rows) {
  Activations unused;
  return place_activations(&unused, s, NULL, widest, rows);
}

/* Logits of the next tokens, [num_wanted, vocab], of the `wanted` rows. `columns` has, for each layer, the addresses of
 * the key columns and then of the value columns; `work` has `decode_work_size` elements. */
void decode(const Shape *s, const Layer *layers, const void *embedding, const float *last_norm, const void *head,
            float eps, const float *cos, const float *sin, const int64_t *tokens, const int64_t *positions,
            void *const *columns, int64_t num_columns, const int32_t *source, float *work, int64_t widest,
            float *scratch, float *logits, int64_t rows, const int64_t *wanted, int64_t num_wanted,
            const Delta *deltas, const DeltaRows *items, int64_t num_items) {
  int64_t hidden = s->hidden, inner = s->inner, width = s->heads * s->size, n = s->scratch_size;
  int narrow = (int)s->narrow, format = (int)s->format;
  Barrier barrier __attribute__((aligned(128))) = {0};
  Place places[MOST_PLACES] __attribute__((aligned(64))) = {{0}};
  Run runs[rows];
  int64_t num_runs = find_runs(s, source, positions, rows, runs);
  Activations all_rows;
  place_activations(&all_rows, s, work, widest, rows);
  TEAM_OF(s->threads)
  {
    Team this_thread = {&barrier, places}, *team = &this_thread;
    float *x = all_rows.x, *normed = all_rows.normed, *y = all_rows.y, *z = all_rows.z;
    void *ready_norms = all_rows.ready_norms, *ready = num_items ? NULL : all_rows.ready; /* deltas need fp32 */
    SHARED_FOR
    for (int64_t r = 0; r < rows; r++) {
      int64_t i = 0;
      for (; i + LANES <= hidden; i += LANES)
        store(x + r * hidden + i, load_as(embedding, tokens[r] * hidden + i, narrow));
      for (; i < hidden; i++) {
        uint32_t bits = narrow ? (uint32_t)((const uint16_t *)embedding)[tokens[r] * hidden + i] << 16 : 0;
        float wide;
        memcpy(&wide, &bits, sizeof wide);
        x[r * hidden + i] = narrow ? wide : ((const float *)embedding)[tokens[r] * hidden + i];
      }
    }
    wait_for_team(team);
    Linear last = {head, NULL, s->block_hidden, s->vocab, hidden, format, PLAIN};
    for (int64_t l = 0; l < s->layers; l++) {
      const Layer *layer = layers + l, *then = layer + 1;
      void *const *keys = columns + 2 * l * num_columns, *const *values = keys + num_columns;
      int64_t kv_width = s->kv_heads * s->size, qkv_width = width + 2 * kv_width;
#define CHANGE(kind, from, inputs, block, to, stride, outputs) \
  if (num_items) change_rows(team, deltas, items, num_items, 7 * l + kind, from, inputs, block, to, stride, outputs)
      Linear qkv = {layer->qkv, layer->qkv_bias, s->block_hidden, qkv_width, hidden, format, PLAIN};
      Linear out = {layer->out, layer->out_bias, s->block_heads, hidden, width, format, PLAIN};
      Linear gate_up = {layer->gate_up, layer->gate_up_bias, s->block_hidden, 2 * inner, hidden, format,
                        num_items ? PAIRED : GATED, ready != NULL};
      Linear down = {layer->down, layer->down_bias, s->block_inner, hidden, inner, format, PLAIN, 0, 1}, next = last;
      if (l + 1 < s->layers) next = qkv, next.packed = then->qkv;
      norm_rows(team, x, l ? y : NULL, layer->norm, eps, normed, ready_norms, rows, hidden, format);
      product(team, &qkv, &out, normed, ready_norms, y, scratch, n, rows);
      CHANGE(0, normed, hidden, s->block_hidden, y, qkv_width, width);
      CHANGE(1, normed, hidden, s->block_hidden, y + width, qkv_width, kv_width);
      CHANGE(2, normed, hidden, s->block_hidden, y + width + kv_width, qkv_width, kv_width);
      attend_rows(team, s, layer, eps, y, cos, sin, positions, keys, values, num_columns, source, z, ready, scratch,
                  rows, runs, num_runs);
      product(team, &out, &gate_up, z, ready, y, scratch, n, rows);
      CHANGE(3, z, width, s->block_heads, y, hidden, hidden);
      norm_rows(team, x, y, layer->mlp_norm, eps, normed, ready_norms, rows, hidden, format);
      product(team, &gate_up, &down, normed, ready_norms, ready ? ready : z, scratch, n, rows);
      if (num_items) {
        CHANGE(4, normed, hidden, s->block_hidden, z, 2 * inner, inner);
        CHANGE(5, normed, hidden, s->block_hidden, z + inner, 2 * inner, inner);
        SHARED_FOR
        for (int64_t r = 0; r < rows; r++)
          gated_row(z + 2 * r * inner, z + (2 * r + 1) * inner, y + r * inner, inner);
        wait_for_team(team);
        float *other = z;
        z = y, y = other;
      }
      product(team, &down, &next, z, ready, y, scratch, n, rows);
      CHANGE(6, z, inner, s->block_inner, y, hidden, hidden);
    }
    norm_rows(team, x, y, last_norm, eps, normed, ready_norms, rows, hidden, format);
    const char *norms = ready_norms ? ready_norms : normed;
    int64_t row = ready_norms ? row_size(hidden, format) : 4 * hidden;
    SHARED_FOR
    for (int64_t r = 0; r < num_wanted; r++) memcpy((char *)z + r * row, norms + wanted[r] * row, (size_t)row);
    wait_for_team(team);
    product(team, &last, NULL, z, ready_norms ? z : NULL, logits, scratch, n, num_wanted);
  }
}
