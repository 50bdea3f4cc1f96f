/* Gradients of causal attention. */
#pragma once

#include "attention.h"

enum { SPAN = 512 }; /* keys whose weights for a block of queries the backward pass holds at once: a multiple of PANEL */

/* Elements of scratch of a thread for `causal_attention_backward`: keys and values of a pair, packed, then one block. */
int64_t backward_scratch_size(const Causal *a) {
  int64_t rows = (a->block * (a->heads / a->kv_heads) + LANES - 1) / LANES * LANES;
  int64_t width = num_panels(a->size, PLAIN) * PANEL;
  int64_t panels = 2 * num_panels(a->keys, PLAIN) * PANEL * a->size + width * a->keys;
  return panels + rows * (3 * a->size + width + 3 * SPAN);
}

/* total += x^T y of `rows` rows, a multiple of LANES; total has `columns` rows at `stride` elements distance. `scratch`
 * has the transposed x, then y in panels. */
static void add_outer(const float *x, const float *y, int64_t rows, int64_t columns, int64_t size, float *total,
                      int64_t stride, float *scratch) {
  float *turned = scratch, *panels = scratch + columns * rows;
  vec block[LANES];
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t t = 0; t < columns; t += LANES) {
      transpose(x, r * columns, columns, t, block, 0);
      for (int i = 0; i < LANES; i++) store(turned + (t + i) * rows + r, block[i]);
    }
  pack_values(y, size, panels, rows, size);
  for (int64_t i = 0; i < size; i += PANEL) {
    const float *panel = panels + i * rows;
    tiles_of_fp32(turned, rows, panel, rows, total + i, stride, size - i < PANEL ? size - i : PANEL, 1,
                  wide_panel(panel + rows * PANEL, rows), columns);
  }
}

/* What the backward pass of a pair of sequence and key head has in common: keys and values packed by `pack_keys`, the
 * keys packed by `pack_values`, and the gradients to add to, whose rows have `stride` elements distance. */
typedef struct {
  const Causal *a;
  const float *keys, *values, *flat;
  float *dk, *dv;
  int64_t stride;
} Pair;

/* The weights p of `rows` query rows (padded to `all_rows`) for the keys from first to end, and after them the gradients of
 * their scores. `counts`: instead of using deltas (see `differentiate_block`), add p dp to them, which is stored as well. */
static void weigh_span(const Pair *pair, const float *queries, const float *grads, float *deltas, int counts,
                       const float *log_sums, int64_t position, int64_t rows, int64_t all_rows, int64_t first,
                       int64_t end, float *p) {
  const Causal *a = pair->a;
  int64_t group = a->heads / a->kv_heads, size = a->size, span = end - first;
  float *ds = p + all_rows * span;
  const ivec lanes = {LANE_NUMBERS};
  for (int64_t t = first; t < end; t += PANEL) {
    int64_t columns = end - t < PANEL ? end - t : PANEL;
    const float *keys = pair->keys + t * size, *values = pair->values + t * size;
    tiles_of_fp32(queries, size, keys, size, p + t - first, span, columns, 0, wide_panel(values, size), rows);
    tiles_of_fp32(grads, size, values, size, ds + t - first, span, columns, 0, wide_panel(keys + PANEL * size, size),
                  rows);
  }
  memset(p + rows * span, 0, sizeof(float) * (size_t)((all_rows - rows) * span));
  memset(ds + rows * span, 0, sizeof(float) * (size_t)((all_rows - rows) * span));
  for (int64_t r = 0; r < rows; r++) {
    float *weights = p + r * span, *slopes = ds + r * span;
    int64_t at = position + r / group, count = at + 1 < a->keys ? at + 1 : a->keys;
    int64_t hidden = a->window ? at + 1 - a->window : 0;
    if (hidden >= count) hidden = count - 1; /* padding rows only */
    vec delta = all(counts ? 0.f : deltas[r]), log_sum = all(log_sums[r % group * a->rows + r / group]), part = {0};
    for (int64_t t = 0; t < span; t += LANES) {
      ivec place = lanes + (int32_t)(first + t), visible = (place < (int32_t)count) & (place >= (int32_t)hidden);
      vec weight = pick(visible, exp_of(load(weights + t) - log_sum), all(0.f));
      vec slope = pick(visible, weight * (load(slopes + t) - delta), all(0.f));
      store(weights + t, weight);
      store(slopes + t, slope);
      part = part + slope;
    }
    if (counts) deltas[r] += sum(part);
  }
}

/* Add the gradients of what `weigh_span` left in `p` to dk, dv and `sums` (`more`); what follows in `p` is scratch. */
static void differentiate_span(const Pair *pair, const float *queries, const float *grads, int64_t rows, int64_t all_rows,
                               int64_t first, int64_t end, float *sums, int more, float *p) {
  const Causal *a = pair->a;
  int64_t size = a->size, span = end - first;
  float *ds = p + all_rows * span, *rest = ds + all_rows * span;
  for (int64_t i = 0; i < size; i += PANEL) {
    const float *panel = pair->flat + (i / PANEL * a->keys + first) * PANEL;
    tiles_of_fp32(ds, span, panel, span, sums + i, size, size - i < PANEL ? size - i : PANEL, more,
                  wide_panel(panel + span * PANEL, span), rows);
  }
  add_outer(p, grads, all_rows, span, size, pair->dv + first * pair->stride, pair->stride, rest);
  add_outer(ds, queries, all_rows, span, size, pair->dk + first * pair->stride, pair->stride, rest);
}

/* Gradients of `attend_block`: writes dq, adds to dk and dv. With s = q k^T / sqrt(dim) and p = exp(s - log_sum):
 * dv = p^T do,  ds = p (do v^T - delta),  dq = ds k / sqrt(dim),  dk = ds^T q / sqrt(dim), where delta = do o = sum(p dp).
 * BY_TILES o has rounded weights: as the difference of large numbers, ds would not sum to 0, and a large mean of the keys
 * would appear in dq. There delta is the sum, in a pass of its own if there are several spans. */
static void differentiate_block(const Pair *pair, const float *grad, const float *q, const float *out,
                                const float *log_sums, int64_t position, int64_t num, float *scratch, float *dq) {
  const Causal *a = pair->a;
  int64_t group = a->heads / a->kv_heads, size = a->size, rows = num * group, width = a->heads * size;
  int64_t all_rows = (rows + LANES - 1) / LANES * LANES;
  int64_t end = position + num < a->keys ? position + num : a->keys, low = position + 1 - a->window;
  low = low < end ? low : end - 1;
  int64_t first = a->window && low > 0 ? low / KEYS * KEYS : 0;
  end = (end + LANES - 1) / LANES * LANES;
  float *queries = scratch, *grads = queries + all_rows * size, *sums = grads + all_rows * size;
  float deltas[all_rows];
  int counts = find_way(a->dots) == BY_TILES;
  vec scale = all((float)pow((double)size, -0.5));
  memset(queries, 0, sizeof(float) * (size_t)(2 * all_rows * size));
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = r / group * width + r % group * size;
    const float *query = q + r / group * a->query_stride + r % group * size;
    vec inner = {0};
    ROW(i, size) {
      vec d = load(grad + at + i);
      inner = fma_of(d, load(out + at + i), inner);
      vec scaled = load(query + i) * scale;
      store(grads + r * size + i, d);
      store(queries + r * size + i, a->dots ? rounded_of(scaled) : scaled);
    }
    deltas[r] = counts ? 0 : sum(inner);
  }
  float *p = sums + all_rows * size;
  for (int64_t t = first; t < end && counts; t += SPAN)
    weigh_span(pair, queries, grads, deltas, 1, log_sums, position, rows, all_rows, t, end - t < SPAN ? end : t + SPAN, p);
  for (int64_t t = first; t < end; t += SPAN) {
    int64_t to = end - t < SPAN ? end : t + SPAN, span = to - t;
    float *ds = p + all_rows * span;
    if (!counts || end - first > SPAN)
      weigh_span(pair, queries, grads, deltas, 0, log_sums, position, rows, all_rows, t, to, p);
    else
      for (int64_t r = 0; r < rows; r++)
        ROW(i, span) store(ds + r * span + i, load(ds + r * span + i) - load(p + r * span + i) * all(deltas[r]));
    differentiate_span(pair, queries, grads, rows, all_rows, t, to, sums, t > first, p);
  }
  for (int64_t r = 0; r < rows; r++)
    ROW(i, size) store(dq + r / group * width + r % group * size + i, load(sums + r * size + i) * scale);
}

/* Gradients of `causal_attention`. dq is as q; dk and dv, zero at first, are [seqs, keys, kv_heads, size]. A thread
 * computes all of a sequence and key head, in order, so the bits do not depend on the number of threads. */
void causal_attention_backward(const Causal *a, const float *grad, const float *q, const float *k, const float *v,
                               const float *out, const float *log_sums, const int64_t *starts, float *scratch,
                               float *dq, float *dk, float *dv) {
  int64_t pairs = a->seqs * a->kv_heads, group = a->heads / a->kv_heads;
  int64_t of_keys = num_panels(a->keys, PLAIN) * PANEL * a->size;
  TEAM_OF(a->threads)
  {
    float *keys = scratch + THREAD * a->scratch_size, *values = keys + of_keys, *flat = values + of_keys;
    float *mine = flat + num_panels(a->size, PLAIN) * PANEL * a->keys;
    DYNAMIC_FOR
    for (int64_t item = 0; item < pairs; item++) {
      int64_t seq = item / a->kv_heads, kv_head = item % a->kv_heads, head = kv_head * group;
      int64_t from = seq * a->seq_stride + kv_head * a->head_stride;
      int64_t to = (seq * a->keys * a->kv_heads + kv_head) * a->size;
      Pair pair = {a, keys, values, flat, dk + to, dv + to, a->kv_heads * a->size};
      pack_keys(k + from, a->key_stride, keys, a->keys, a->size);
      pack_keys(v + from, a->key_stride, values, a->keys, a->size);
      pack_values(k + from, a->key_stride, flat, a->keys, a->size);
      for (int64_t row = 0; row < a->rows; row += a->block) {
        int64_t num = a->rows - row < a->block ? a->rows - row : a->block;
        int64_t position = seq * a->rows + row, at = (position * a->heads + head) * a->size;
        differentiate_block(&pair, grad + at, q + position * a->query_stride + head * a->size, out + at,
                            log_sums + (seq * a->heads + head) * a->rows + row, starts[seq] + row, num, mine, dq + at);
      }
    }
  }
}
