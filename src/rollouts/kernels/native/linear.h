/* Linear layers: panels of a weight, divided among the threads. */
#pragma once

#include "amx.h"

enum {
#if defined(__AVX2__) && !defined(__AVX512F__)
  WIDEN = 1 << 30, /* one instruction widens a vector, and a widened panel would exceed the first cache */
#else
  WIDEN = 12, /* minimum rows for which widening a bf16 panel once is cheaper */
#endif
  BATCH = 96,      /* rows per batch of a long GEMM: they stay in the CPU cache while all panels are read, see `batch_of` */
  AMX_BATCH = 256  /* the same, see `batch_of` */
};

static void add_bias(float *out, int64_t stride, const float *bias, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++)
    ROW(i, columns) {
      float *at = out + r * stride;
      STORE(at, i, columns, LOAD(at, i, columns) + LOAD(bias, i, columns));
    }
}

/* A linear layer. Sums of FP32 and BF16 are blocked: each covers `block` inputs and starts from zero. */
typedef struct {
  const void *packed;
  const float *bias; /* or NULL */
  int64_t block, outputs, inputs;
  int format, kind;
  int rounds;    /* GATED: the outputs, a multiple of STEP, are bf16 */
  int from_last; /* the last threads take the panels that remain, if rows are few */
} Linear;

ALWAYS int64_t panel_bytes(const Linear *l) {
  return PANEL * packed_inputs(l->inputs, l->format) * (l->format == FP32 ? 4 : l->format == INT8 ? 1 : 2);
}

/* Panel p of a weight. */
ALWAYS Memory panel_of(const Linear *l, int64_t p) {
  return (Memory){(const char *)l->packed + p * panel_bytes(l), panel_bytes(l)};
}

/* A panel of DOTS or INT8: sums are not blocked. */
static void whole_product(const void *x, int64_t inputs, const char *panel, float *out, int64_t outputs,
                          int64_t columns, Following following, int64_t rows, int format) {
  int64_t wide = whole_steps(inputs);
#ifdef HAS_AMX
  if (use_amx) {
    int is_large = rows * outputs > LARGE; /* not scores, which are read at once */
    if (format == DOTS) amx_dots(x, 2 * wide, wide, panel, out, outputs, columns, following, rows, is_large);
    else amx_int8(x, inputs, panel, out, outputs, columns, following.next, rows, is_large);
    return;
  }
#endif
  if (format == DOTS) tiles_of_dots(x, wide, panel, wide, out, outputs, columns, 0, following, rows);
  else tiles_of_int8(x, inputs, panel, out, outputs, columns, following, rows);
}

/* Panel p of a linear layer; x comes from `in_format`. `scratch` has space for a widened panel (BF16) and then for rows
 * x PANEL elements (PAIRED, GATED). Prefetches `next`. */
static void panel_product(const Linear *l, const void *x, float *out, float *scratch, int64_t p, Memory next,
                          int64_t rows) {
  int64_t outputs = l->outputs, inputs = l->inputs, width = l->kind == PLAIN ? PANEL : HALF, inner = outputs / 2;
  int64_t first = p * width, columns = (l->kind == PLAIN ? outputs : inner) - first, item = l->format == FP32 ? 4 : 2;
  if (columns > width) columns = width;
  if (next.bytes > panel_bytes(l)) next.bytes = panel_bytes(l);
  int widen = l->format == BF16 && rows >= WIDEN;
  float *wide = scratch, *pairs = scratch + (l->format == BF16 ? inputs * PANEL : 0);
  float *to = l->kind == PLAIN ? out + first : pairs;
  int64_t stride = l->kind == PLAIN ? outputs : PANEL, written = l->kind == PLAIN ? columns : PANEL;
  int is_blocked = l->format == FP32 || l->format == BF16;
  const char *panel = panel_of(l, p).from;
  Following following = {next, are_few(rows, l->format) && !widen ? panel + panel_bytes(l) : NULL};
  Gate gate = {at_number(out, first, l->rounds), inner, l->rounds ? HALF : columns, l->rounds};
#ifdef HAS_AMX
  if (use_amx && l->format == DOTS && l->kind == GATED && !l->bias) {
    int64_t wide = whole_steps(inputs);
    amx_gated_dots(x, 2 * wide, wide, panel, following, rows, &gate);
    return;
  }
#endif
  if (!is_blocked) whole_product(x, inputs, panel, to, stride, written, following, rows, l->format);
  for (int64_t start = 0; start < inputs && is_blocked; start += l->block) {
    int64_t size = inputs - start < l->block ? inputs - start : l->block, bytes = size * PANEL * item;
    const char *weights = panel + start * PANEL * item;
    if (!following.end) following.next = start + size < inputs ? (Memory){weights + bytes, bytes} : next;
    if (!following.end && following.next.bytes > bytes) following.next.bytes = bytes;
    if (widen)
      for (int64_t k = 0; k < size; k++)
        for (int64_t c = 0; c < PANEL; c += LANES) store(wide + k * PANEL + c, weights_of_pairs(weights, k, c));
#define TILES(name) \
  tiles_of_##name((const float *)x + start, inputs, widen ? (const char *)wide : weights, size, to, stride, written, \
                  start > 0, following, rows)
    if (l->format == FP32 || widen) TILES(fp32);
    else TILES(bf16);
#undef TILES
  }
  if (l->bias) add_bias(to, stride, l->bias + first, rows, columns);
  if (l->kind == PLAIN) return;
  if (l->bias) add_bias(to + HALF, stride, l->bias + inner + first, rows, columns);
  for (int64_t r = 0; r < rows; r++) {
    float *sums = pairs + r * PANEL;
    if (l->kind == GATED) {
      gate_row(&gate, sums, r);
    } else {
      memcpy(out + r * outputs + first, sums, sizeof(float) * (size_t)columns);
      memcpy(out + r * outputs + inner + first, sums + HALF, sizeof(float) * (size_t)columns);
    }
  }
}

/* `panel_product` for panels `first` to `end`; prefetches `next` at the end. */
static void panel_products(const Linear *l, const void *x, float *out, float *scratch, int64_t first, int64_t end,
                           Memory next, int64_t rows) {
  if (first >= end || rows <= 0) return;
  start_amx(rows, l->format);
  for (int64_t p = first; p < end; p++)
    panel_product(l, x, out, scratch, p, p + 1 < end ? panel_of(l, p + 1) : next, rows);
  stop_amx(l->format);
}

/* Scratch elements that `in_format` needs, rounded up to whole vectors. */
ALWAYS int64_t rounded_size(int64_t rows, int64_t inputs, int format) {
  int64_t size = format == DOTS || format == INT8 ? rows * row_size(inputs, format) / 4 : 0;
  return (size + LANES - 1) / LANES * LANES;
}

/* The number of a thread among those that share the panels of a layer. */
ALWAYS int64_t place_of(const Linear *l) { return l->from_last ? THREADS - 1 - THREAD : THREAD; }

/* The first panel of the thread in a place. If there are few rows, the first places take those that remain, otherwise all
 * threads do, which split them by rows. */
ALWAYS int64_t first_panel(const Linear *l, int64_t place, int64_t rows) {
  int64_t panels = num_panels(l->outputs, l->kind), remain = rows < 2 * TILE ? panels % THREADS : 0;
  return place * (panels / THREADS) + (place < remain ? place : remain);
}

/* Take the first panel that is left in a place, or for another thread the last one; -1: none is left. */
static int64_t take_panel(Team *team, const Linear *l, int64_t place, int64_t rows, int for_other) {
  uint64_t *left = &team->places[place].left, held = __atomic_load_n(left, __ATOMIC_RELAXED), now;
  int64_t taken;
  do {
    int64_t first = held >> 24 & 0xffffff, end = held & 0xffffff;
    if (held >> 48 != team->product) first = first_panel(l, place, rows), end = first_panel(l, place + 1, rows);
    if (end - first < (for_other ? LEAST_LEFT : 1)) return -1;
    taken = for_other ? --end : first++;
    now = team->product << 48 | (uint64_t)first << 24 | (uint64_t)end;
  } while (!__atomic_compare_exchange_n(left, &held, now, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return taken;
}

/* `panel_products` of the panels in a place, then of those that other threads have left: one may be slow, because other
 * programs use its core or the hyperthread beside it. */
static void shared_products(Team *team, const Linear *l, const void *x, float *out, float *scratch, int64_t place,
                            Memory next, int64_t rows) {
  if (rows <= 0) return;
  start_amx(rows, l->format);
  team->product++;
  for (int64_t i = 0, p; i < THREADS; i++)
    while ((p = take_panel(team, l, (place + i) % THREADS, rows, i > 0)) >= 0) {
      int is_last = p + 1 == first_panel(l, place + 1, rows);
      panel_product(l, x, out, scratch, p, i ? (Memory){NULL, 0} : is_last ? next : panel_of(l, p + 1), rows);
    }
  stop_amx(l->format);
}

/* out = x packed^T + bias. The threads of the parallel region share the panels; each has `scratch_size` elements of
 * `scratch`, for `in_format` and for `panel_product`. Panels that would leave a thread idle are split by rows. At the end
 * a thread prefetches its first panel of `after`, unless that is NULL. `ready`: x in the format of the weight, or NULL. */
static void product(Team *team, const Linear *l, const Linear *after, const float *x, const void *ready, float *out,
                    float *scratch, int64_t scratch_size, int64_t rows) {
  float *mine = scratch + THREAD * scratch_size;
  const char *rounded = ready; /* otherwise every thread converts x: faster than a barrier */
  if (!ready) rounded = in_format(x, mine, rows, l->inputs, l->format);
  mine += rounded_size(rows, l->inputs, l->format);
  int64_t panels = num_panels(l->outputs, l->kind), width = l->kind == GATED ? l->outputs / 2 : l->outputs;
  int64_t place = place_of(l), start = first_panel(l, place, rows), end = first_panel(l, place + 1, rows);
  int64_t remaining = first_panel(l, THREADS, rows), panel = panel_bytes(l);
  int64_t share = (rows + THREADS - 1) / THREADS, first = THREAD * share, num = rows - first < share ? rows - first : share;
  Memory next = after ? panel_of(after, first_panel(after, place_of(after), rows)) : (Memory){l->packed, 0};
  Memory following = remaining < panels ? panel_of(l, remaining) : next;
  if (team && THREADS > 1 && THREADS <= MOST_PLACES)
    shared_products(team, l, rounded, out, mine, place, following, rows);
  else panel_products(l, rounded, out, mine, start, end, following, rows);
  float *rest = (float *)((char *)out + first * width * (l->rounds ? 2 : 4));
  panel_products(l, rounded + first * row_size(l->inputs, l->format), rest, mine, remaining, panels, next, num);
  int64_t skipped = are_few(rows, l->format) ? 0 : next.bytes < panel ? next.bytes : panel;
  if (team) team->ahead = (Memory){next.from + skipped, after ? WHILE_WAITING : 0};
  wait_for_team(team);
}

/* Up to 2 BATCH rows per thread, panels are distributed over the threads; beyond it, batches of rows, dynamically. At most
 * so many rows are computed at once. */
int64_t max_rows_at_once(int64_t threads) { return 2 * BATCH * threads > AMX_BATCH ? 2 * BATCH * threads : AMX_BATCH; }

/* Rows per batch, as many batches for every thread. AMX takes larger ones, of whole tiles: its products would wait for the
 * weights that each batch reads again. */
static int64_t batch_of(int64_t rows, int64_t inputs, int format, int64_t threads) {
  int by_amx = use_amx && (format == DOTS || format == INT8);
  int64_t most = BATCH, unit = by_amx ? AMX_ROWS : TILE, fitting = (1 << 20) / row_size(inputs, format);
  if (by_amx && fitting > BATCH) most = fitting < AMX_BATCH ? fitting : AMX_BATCH;
  int64_t batches = ((rows + most - 1) / most + threads - 1) / threads * threads;
  return ((rows + batches - 1) / batches + unit - 1) / unit * unit;
}

void linear(const float *x, const void *packed, const float *bias, int64_t block, float *out, float *scratch,
            int64_t scratch_size, int64_t rows, int64_t outputs, int64_t inputs, int64_t format, int64_t kind,
            int64_t threads) {
  Linear l = {packed, bias, block, outputs, inputs, (int)format, (int)kind};
  int64_t width = kind == GATED ? outputs / 2 : outputs, batch = batch_of(rows, inputs, l.format, threads);
  TEAM_OF(threads)
  if (rows <= 2 * BATCH * threads) {
    product(NULL, &l, NULL, x, NULL, out, scratch, scratch_size, rows);
  } else {
    DYNAMIC_FOR
    for (int64_t r = 0; r < rows; r += batch) {
      int64_t num = rows - r < batch ? rows - r : batch;
      float *mine = scratch + THREAD * scratch_size;
      const void *rounded = in_format(x + r * inputs, mine, num, inputs, l.format);
      mine += rounded_size(num, inputs, l.format);
      panel_products(&l, rounded, out + r * width, mine, 0, num_panels(outputs, kind), panel_of(&l, 0), num);
    }
  }
}
