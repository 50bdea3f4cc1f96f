/* Causal attention of many queries. */
#pragma once

#include "linear.h"

enum {
  KEYS = 128, /* positions per KV cache block */
  MAX_HEAD_DIM = 256
};

/* Keys (or values) of a sequence and head in panels for `tiles`: keys [panels][size][PANEL] (`dots`:
 * [panels][size / 2][PANEL][2] bf16), values [panels of the head][keys][PANEL]. Packs LANES of them, the first of which
 * is number t and has index `at`; they are `stride` elements apart. `dots`: they are bf16 values. */
ALWAYS void pack_some_keys(const void *keys, int64_t at, int64_t stride, float *packed, int64_t t, int64_t size,
                           int64_t dots, int narrow) {
  vec columns[LANES];
  float *to = packed + t / PANEL * size / (dots ? 2 : 1) * PANEL + t % PANEL;
  for (int64_t place = 0; place < size / 2 && dots && narrow; place += LANES, to += LANES * PANEL) {
    transpose(keys, at / 2, stride / 2, place, columns, 0); /* of pairs */
    for (int i = 0; i < LANES; i++) store(to + i * PANEL, columns[i]);
  }
  for (int64_t place = 0; place < size && !(dots && narrow); place += LANES) {
    transpose(keys, at, stride, place, columns, narrow);
    for (int i = 0; i < LANES && !dots; i++, to += PANEL) store(to, columns[i]);
    for (int i = 0; i < LANES && dots; i += 2, to += PANEL)
      store(to, pairs_of(columns[i], columns[i + 1]));
  }
}

static void pack_keys(const float *keys, int64_t stride, float *packed, int64_t num, int64_t size) {
  for (int64_t t = 0; t < num; t += LANES) pack_some_keys(keys, t * stride, stride, packed, t, size, 0, 0);
}

/* How attention multiplies: in fp32, by `dots_of`, or as AMX does, with weights rounded to bf16. */
enum { WIDE, BY_DOTS, BY_TILES };

ALWAYS int find_way(int64_t dots) { return !dots ? WIDE : use_amx ? BY_TILES : BY_DOTS; }

/* Scale a query and write it in fp32 or bf16 (`rounds`); `out` may alias `x`. */
ALWAYS void scale_query(const float *x, vec scale, void *out, int64_t size, int rounds) {
  for (int64_t i = 0; i < size; i += LANES) {
    if (rounds) store_rounded(out, i, load(x + i) * scale);
    else store((float *)out + i, load(x + i) * scale);
  }
}

#ifdef HAS_AMX
/* exp to 3e-6, which is enough for weights that are rounded to bf16: x / ln 2 = n + f, a polynomial of 2^f. 0 instead of
 * denormal numbers, which take 150 cycles. */
ALWAYS vec short_exp_of(vec x) {
  vec y = larger(all(-200.f), x * all(1.44269504f)); /* in this order NaN remains */
  vec n = (vec)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = y - n;
  vec p = all(9.58284789e-3f);
  p = fma_of(p, f, all(5.59064326e-2f));
  p = fma_of(p, f, all(.240240988f));
  p = fma_of(p, f, all(.693124192f));
  __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)n, (__m512)all(-126.f), _CMP_NLT_UQ);
  return (vec)_mm512_maskz_scalef_ps(is_normal, (__m512)fma_of(p, f, all(1.f)), (__m512)n);
}
#else
ALWAYS vec short_exp_of(vec x) { return exp_of(x); }
#endif

/* BY_TILES: the weights of scores, rounded to bf16, whose sum is 1 / scale. `out` may be where the scores are, or before.
 * `size` is a multiple of LANES. Returns the log-sum-exp. */
ALWAYS float weights_of(const float *scores, int64_t size, void *out, float *scale) {
  vec high = all(-INFINITY), part = {0};
  for (int64_t i = 0; i < size; i += LANES) high = larger(high, load(scores + i));
  vec most = all(largest(high));
  for (int64_t i = 0; i < size; i += LANES) {
    vec p = short_exp_of(load(scores + i) - most);
    part = part + p;
    store_rounded(out, i, p);
  }
  float total = sum(part);
  *scale = 1.f / total;
  return most[0] + logf(total);
}

/* As `pack_some_keys` for values; `num` is the number of all. */
ALWAYS void pack_some_values(const void *values, int64_t at, int64_t stride, float *packed, int64_t t, int64_t num,
                             int64_t size, int narrow) {
  for (int64_t first = 0; first < size; first += PANEL)
    for (int64_t r = 0; r < LANES; r++)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        vec x = first + i < size ? load_as(values, at + r * stride + first + i, narrow) : all(0.f);
        store(packed + (first / PANEL * num + t + r) * PANEL + i, x);
      }
}

static void pack_values(const float *values, int64_t stride, float *packed, int64_t num, int64_t size) {
  for (int64_t t = 0; t < num; t += LANES) pack_some_values(values, t * stride, stride, packed, t, num, size, 0);
}

/* As `pack_some_values`, of bf16 values: [panels of the head][num / 2][PANEL][2]; `num` is a multiple of STEP. */
ALWAYS void pack_value_pairs(const void *values, int64_t at, int64_t stride, float *packed, int64_t t, int64_t num,
                             int64_t size, int narrow) {
  for (int64_t first = 0; first < size; first += PANEL)
    for (int64_t r = 0; r < LANES; r += 2)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        int64_t from = at + r * stride + first + i;
        vec even = first + i < size ? load_as(values, from, narrow) : all(0.f);
        vec odd = first + i < size ? load_as(values, from + stride, narrow) : all(0.f);
        float *to = packed + (first / PANEL * num + t + r) / 2 * PANEL + i;
        store(to, pairs_of(even, odd));
      }
}

typedef struct {
  int64_t seqs, rows, heads, kv_heads, keys, size; /* `keys` is a multiple of LANES */
  int64_t query_stride;                            /* from one position to the next, also of the next sequence */
  int64_t seq_stride, key_stride, head_stride;     /* of keys and values */
  int64_t window;                                  /* visible keys of a query, its own included; 0: all */
  int64_t block;                                   /* query positions per item of work */
  int64_t scratch_size, threads;
  int64_t dots;                                    /* as in `Shape`; keys and values are bf16 values */
  int64_t narrow;                                  /* the pages of the cache are bf16 */
} Causal;

int64_t causal_struct_size(void) { return sizeof(Causal); }

/* Multiply by AMX: the rounded queries with the keys from `first` to `end`, or (`weighs`) the weights with the values. */
static void attend_by_tiles(const Causal *a, const void *queries, const void *keys, const void *values, int64_t first,
                            int64_t end, float *scores, float *sums, int64_t rows, int weighs) {
#ifdef HAS_AMX
  int64_t span = end - first, size = a->size;
  start_amx(rows, DOTS);
  for (int64_t t = first; t < end && !weighs; t += PANEL) {
    const char *panel = (const char *)keys + t * 2 * size;
    int64_t columns = end - t < PANEL ? end - t : PANEL, bytes = 2 * PANEL * size;
    Memory next = {panel + bytes, t + PANEL < end ? bytes : 0};
    amx_dots(queries, 2 * size, size, panel, scores + t - first, span, columns, (Following){next, NULL}, rows, 0);
  }
  for (int64_t i = 0; i < size && weighs; i += PANEL) {
    const char *panel = (const char *)values + (i * whole_steps(a->keys) + first * PANEL) * 2;
    int64_t columns = size - i < PANEL ? size - i : PANEL;
    amx_dots((const char *)scores, 2 * whole_steps(span), whole_steps(span), panel, sums + i, size, columns,
             (Following){{0}, NULL}, rows, 0);
  }
  stop_amx(DOTS);
#endif
}

/* Attention of `num` positions from row `first_row` on, with the operations of `attend` in the same order. `scratch` has
 * the scaled queries, the outputs, and the scores of these rows: memory is linear in the number of keys. */
static void attend_block(const Causal *a, const float *q, const float *keys, const float *values, int64_t position,
                         int64_t num, float *scratch, float *out, float *log_sums) {
  int64_t group = a->heads / a->kv_heads, size = a->size, rows = num * group, width = a->heads * size;
  int64_t end = position + num < a->keys ? position + num : a->keys, low = position + 1 - a->window;
  low = low < end ? low : end - 1; /* padding rows may be beyond the last key */
  int64_t first = a->window && low > 0 ? low / KEYS * KEYS : 0;
  end = (end + LANES - 1) / LANES * LANES;
  int64_t span = end - first;
  int way = find_way(a->dots);
  float *queries = scratch, *sums = queries + rows * size, *scores = sums + rows * size;
  float *shares = queries + rows * size / 2; /* BY_TILES: behind the queries, which are bf16 */
  vec scale = all((float)pow((double)size, -0.5)); /* the same rounding as in Python */
  for (int64_t r = 0; r < rows; r++)
    scale_query(q + r / group * a->query_stride + r % group * size, scale, queries + r * size / (way ? 2 : 1), size, way);
  if (way == BY_TILES) attend_by_tiles(a, queries, keys, values, first, end, scores, sums, rows, 0);
  for (int64_t t = first; t < end && way != BY_TILES; t += PANEL) {
    const float *panel = keys + t * size / (way ? 2 : 1);
    Following next = {{(const char *)panel + (way ? 2 : 4) * PANEL * size, (way ? 2 : 4) * PANEL * size}, NULL};
    int64_t columns = end - t < PANEL ? end - t : PANEL;
    if (way) tiles_of_dots(queries, size, panel, size, scores + t - first, span, columns, 0, next, rows);
    else tiles_of_fp32(queries, size, panel, size, scores + t - first, span, columns, 0, next, rows);
  }
  for (int64_t r = 0; r < rows; r++) {
    float *row = scores + r * span;
    int64_t at = position + r / group, count = (at + 1 < a->keys ? at + 1 : a->keys) - first;
    int64_t whole = (count + LANES - 1) / LANES * LANES, hidden = a->window ? at + 1 - a->window - first : 0;
    if (hidden >= count) hidden = count - 1; /* padding rows only */
    for (int64_t t = 0; t < hidden; t++) row[t] = -INFINITY;
    for (int64_t t = count; t < whole; t++) row[t] = -INFINITY;
    int64_t length = whole_steps(span);
    uint16_t *weights = (uint16_t *)scores + r * length; /* side by side, before the scores that are still needed */
    float log_sum = way == BY_TILES ? weights_of(row, whole, weights, shares + r) : softmax_row(row, whole);
    if (log_sums) log_sums[r % group * a->rows + r / group] = log_sum;
    if (way == BY_TILES) memset(weights + whole, 0, sizeof *weights * (size_t)(length - whole));
    else memset(row + whole, 0, sizeof(float) * (size_t)(span - whole));
  }
  if (way == BY_TILES) attend_by_tiles(a, queries, keys, values, first, end, scores, sums, rows, 1);
  for (int64_t t = first; t < end && way != BY_TILES; t += KEYS)
    for (int64_t i = 0; i < size; i += PANEL) {
      int64_t count = end - t < KEYS ? end - t : KEYS, columns = size - i < PANEL ? size - i : PANEL;
      const float *panel = values + (i / PANEL * a->keys + t) * PANEL;
      tiles_of_fp32(scores + t - first, span, panel, count, sums + i, size, columns, t > first,
                    wide_panel(panel + count * PANEL, count), rows);
    }
  for (int64_t r = 0; r < rows; r++) {
    const float *from = sums + r * size;
    float *to = out + r / group * width + r % group * size;
    if (way != BY_TILES) memcpy(to, from, sizeof(float) * (size_t)size);
    for (int64_t i = 0; i < size && way == BY_TILES; i += LANES) store(to + i, load(from + i) * all(shares[r]));
  }
}

/* Elements of the packed keys and values of one sequence and head. */
int64_t packed_keys_size(int64_t keys, int64_t size) {
  return (keys + PANEL - 1) / PANEL * PANEL * size + (size + PANEL - 1) / PANEL * PANEL * keys;
}

/* Where keys and values are: in tensors, or in pages of the cache. Sequence s has page pages[j seqs + s] of block j, and
 * counts[s] positions. */
typedef struct {
  const float *k, *v;
  const void *const *keys, *const *values; /* blocks */
  const int32_t *pages;                    /* NULL: in tensors */
  const int64_t *counts;
} Source;

/* Pack the keys and values of a sequence and head; zeros after its last one. */
static void pack_pair(const Causal *a, const Source *from, int64_t seq, int64_t head, float *keys, float *values) {
  static const float nothing[MAX_HEAD_DIM];
  int by_tiles = find_way(a->dots) == BY_TILES;
  int64_t num = by_tiles ? whole_steps(a->keys) : a->keys, count = from->pages ? from->counts[seq] : a->keys;
  for (int64_t t = 0; t < num; t += LANES) {
    const void *k = nothing, *v = nothing;
    int64_t at = 0, stride = 0;
    int narrow = 0;
    if (t < count && from->pages) {
      int64_t j = t / KEYS, page = from->pages[j * a->seqs + seq];
      k = from->keys[j], v = from->values[j], at = ((page * a->kv_heads + head) * KEYS + t % KEYS) * a->size;
      stride = a->size, narrow = (int)a->narrow;
    } else if (t < count) {
      k = from->k, v = from->v, at = seq * a->seq_stride + head * a->head_stride + t * a->key_stride;
      stride = a->key_stride;
    }
    if (t < a->keys) pack_some_keys(k, at, stride, keys, t, a->size, a->dots, narrow);
    if (by_tiles) pack_value_pairs(v, at, stride, values, t, num, a->size, narrow);
    else pack_some_values(v, at, stride, values, t, num, a->size, narrow);
  }
}

static void attend_all(const Causal *a, const float *q, const Source *from, const int64_t *starts, float *packed,
                       float *scratch, float *out, float *log_sums) {
  int64_t pairs = a->seqs * a->kv_heads, blocks = (a->rows + a->block - 1) / a->block, group = a->heads / a->kv_heads;
  int64_t each = packed_keys_size(a->keys, a->size), of_keys = (a->keys + PANEL - 1) / PANEL * PANEL * a->size;
  TEAM_OF(a->threads)
  {
    STATIC_FOR
    for (int64_t pair = 0; pair < pairs; pair++) {
      float *keys = packed + pair * each;
      pack_pair(a, from, pair / a->kv_heads, pair % a->kv_heads, keys, keys + of_keys);
    }
    DYNAMIC_FOR
    for (int64_t item = 0; item < pairs * blocks; item++) {
      int64_t pair = item / blocks, row = (blocks - 1 - item % blocks) * a->block; /* long ones first */
      int64_t seq = pair / a->kv_heads, head = pair % a->kv_heads * group;
      int64_t num = a->rows - row < a->block ? a->rows - row : a->block;
      int64_t position = seq * a->rows + row, at = (position * a->heads + head) * a->size;
      const float *keys = packed + pair * each;
      attend_block(a, q + position * a->query_stride + head * a->size, keys, keys + of_keys, starts[seq] + row, num,
                   scratch + THREAD * a->scratch_size, out + at,
                   log_sums ? log_sums + (seq * a->heads + head) * a->rows + row : NULL);
    }
  }
}

/* Row r of sequence s, at position starts[s] + r, attends to the keys up to its position. q and out are [seqs, rows,
 * heads, size], log_sums [seqs, heads, rows]. */
void causal_attention(const Causal *a, const float *q, const float *k, const float *v, const int64_t *starts,
                      float *packed, float *scratch, float *out, float *log_sums) {
  attend_all(a, q, &(Source){k, v, NULL, NULL, NULL, NULL}, starts, packed, scratch, out, log_sums);
}

/* `causal_attention` with the keys and values of pages: `blocks` has the addresses of `num` blocks of keys, then of values. */
void paged_attention(const Causal *a, const float *q, const void *const *blocks, int64_t num, const int32_t *pages,
                     const int64_t *counts, const int64_t *starts, float *packed, float *scratch, float *out) {
  attend_all(a, q, &(Source){NULL, NULL, blocks, blocks + num, pages, counts}, starts, packed, scratch, out, NULL);
}

/* Write keys and values, rows `k_stride` and `v_stride` elements apart, to `places`: of each token the block (negative:
 * nowhere), the page and the position in it. `blocks` as for `paged_attention`. */
void store_in_pages(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *const *blocks, int64_t num,
                    const int64_t *places, int64_t tokens, int64_t kv_heads, int64_t size, int64_t narrow) {
  PARALLEL(tokens * kv_heads * size > MANY)
  for (int64_t token = 0; token < tokens; token++) {
    int64_t j = places[token], page = places[tokens + token], position = places[2 * tokens + token];
    for (int64_t head = 0; head < kv_heads && j >= 0; head++)
      for (int64_t i = 0; i < size; i += LANES) {
        int64_t at = ((page * kv_heads + head) * KEYS + position) * size + i;
        store_as(blocks[j], at, load(k + token * k_stride + head * size + i), (int)narrow);
        store_as(blocks[num + j], at, load(v + token * v_stride + head * size + i), (int)narrow);
      }
  }
}
