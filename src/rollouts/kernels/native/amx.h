/* Products of rows with a panel of a weight, by AMX. */
#pragma once

#include "layers.h"
#include "tiles.h"

/* Rows of a panel of a gated layer, HALF gates and then HALF values that they multiply, of which `gate_row` writes the
 * products: `inner` elements per row of `out`, of bf16 if it `rounds`. */
typedef struct {
  void *out;
  int64_t inner, columns;
  int rounds;
} Gate;

ALWAYS void gate_row(const Gate *gate, float *sums, int64_t row) {
  void *to = at_number(gate->out, row * gate->inner, gate->rounds);
  gated_row(sums, sums + HALF, gate->rounds ? sums : to, gate->columns);
  if (gate->rounds) round_row(sums, to, HALF);
}

/* AMX: products by tile registers of 16 rows of 64 bytes. The instructions of a tile compute each of its rows alone and
 * sum in a fixed order, so they serve any number of rows. */
#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define HAS_AMX
#endif

enum { AMX_ROWS = 16 };
static int use_amx; /* see `enable_amx` */

#ifdef HAS_AMX
/* Rows are divided among as few tiles as possible, of one height, so that one configuration serves all. The last tile may
 * overlap the one before it: rows that are computed twice have the same bits. */
ALWAYS int64_t amx_tiles(int64_t rows) { return (rows + AMX_ROWS - 1) / AMX_ROWS; }
ALWAYS int64_t amx_height(int64_t rows) { return (rows + amx_tiles(rows) - 1) / amx_tiles(rows); }

typedef struct {
  uint8_t palette, start, unused[14];
  uint16_t bytes[16]; /* per row */
  uint8_t rows[16];
} AmxShapes;

ALWAYS void set_shapes(const AmxShapes *shapes) {
  __asm__ volatile("" : : "r"(shapes) : "memory"); /* some versions of gcc take only a part of it for used */
  _tile_loadconfig(shapes);
}

/* Bytes to prefetch in a part of `amx_sums`, if each tile of rows takes `parts` of them for all `bytes`. */
ALWAYS int64_t amx_ahead(int64_t bytes, int64_t parts, int64_t rows) {
  return (bytes / (parts * amx_tiles(rows)) + 63) / 64 * 64;
}

/* Rows that wait for `gate_row`: `next` to `end` of those at `sums`, the first of which is `row` of the outputs. */
typedef struct {
  const Gate *gate; /* or NULL */
  float *sums;
  int64_t row, next, end;
} Waiting;

ALWAYS void gate_next(Waiting *w) {
  if (w->next == w->end) return;
  gate_row(w->gate, w->sums + w->next * PANEL, w->row + w->next);
  w->next++;
}

enum {
  PARTS = 4,        /* of a step of `amx_sums` */
  NEAR = 2048,      /* bytes that few rows prefetch ahead of a tile of weights: farther ahead, memory is slower */
  FOLLOWING = 2048, /* at the end of a panel, while its sums are stored */
};

/* Prefetch the lines that are NEAR bytes behind those of this tile, into the first cache. */
ALWAYS void fetch_near(const char *weights, Following following) {
  for (int64_t i = 0; i < 4 * AMX_ROWS * PANEL && following.end; i += 4 * PANEL)
    __builtin_prefetch(weights + NEAR + i, 0, 3);
}

/* Prefetch what follows a panel, behind the NEAR bytes that `fetch_near` has prefetched. */
ALWAYS void fetch_following(Following following) {
  for (int64_t i = 0; i < FOLLOWING && following.end; i += 64) __builtin_prefetch(following.next.from + NEAR + i, 0, 3);
}

/* Tiles 0 to 3 = sums over `steps` times 64 bytes: 4 x 16 outputs of the rows at x (tile 4), or 2 x 16 outputs of these
 * and then of the rows at `second` (tile 5). `row`: bytes between rows. While tiles are multiplied, each step gates a row
 * of `waiting`, if one is left. Prefetches `ahead`, `share` bytes per part, or by `fetch_near`: at an even pace, because
 * lines that are prefetched at once wait for each other and let tiles wait. */
ALWAYS void amx_sums(const char *x, const char *second, int64_t row, const char *panel, int64_t steps,
                     const char *ahead, int64_t share, Following following, Waiting *waiting, int format) {
#define AMX_ADD(sum, a, b) \
  do { \
    if (format == INT8) _tile_dpbsud(sum, a, b); \
    else _tile_dpbf16ps(sum, a, b); \
  } while (0)
  __asm__ volatile("" ::: "memory"); /* gcc does not know that tiles are loaded from memory */
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (following.end) share = 0;
  for (int64_t k = 0; k < steps; k++) {
    const char *weights = panel + k * AMX_ROWS * 4 * PANEL;
    ahead = fetch_on(ahead, share);
    _tile_loadd(4, x + 64 * k, row);
    fetch_near(weights, following);
    _tile_loadd(6, weights, 4 * PANEL);
    fetch_near(weights + 64, following);
    ahead = fetch_on(ahead, share);
    _tile_loadd(7, weights + 64, 4 * PANEL);
    AMX_ADD(0, 4, 6);
    ahead = fetch_on(ahead, share);
    AMX_ADD(1, 4, 7);
    if (second) {
      _tile_loadd(5, second + 64 * k, row);
      ahead = fetch_on(ahead, share);
      AMX_ADD(2, 5, 6);
      AMX_ADD(3, 5, 7);
    } else {
      fetch_near(weights + 128, following);
      _tile_loadd(6, weights + 128, 4 * PANEL);
      ahead = fetch_on(ahead, share);
      fetch_near(weights + 192, following);
      _tile_loadd(7, weights + 192, 4 * PANEL);
      AMX_ADD(2, 4, 6);
      AMX_ADD(3, 4, 7);
    }
    if (waiting) gate_next(waiting);
  }
}

enum { LARGE = 1 << 20 }; /* elements that are written past the caches: logits, whose rows even share a few lines of them */

/* Write a row of a panel's outputs. */
ALWAYS void write_row(float *out, const float *from, int64_t columns, int is_large) {
  if (is_large && columns == PANEL && (uintptr_t)out % 64 == 0)
    for (int64_t c = 0; c < PANEL; c += LANES) _mm512_stream_ps(out + c, (__m512)load(from + c));
  else memcpy(out, from, sizeof(float) * (size_t)columns);
}

/* `tiles` for DOTS, of rows `row` bytes apart; `inputs` is a multiple of STEP. `is_large`: see LARGE. With `gate` its
 * outputs are written, and none to `out`. */
ALWAYS void amx_dots_gated(const char *x, int64_t row, int64_t inputs, const char *panel, float *out, int64_t outputs,
                           int64_t columns, Following following, int64_t rows, int is_large, const Gate *gate) {
  int64_t height = amx_height(rows), steps = inputs / STEP;
  int64_t share = amx_ahead(following.next.bytes, PARTS * steps, rows);
  int copies = is_large || columns < PANEL || gate;
  int64_t width = copies ? PANEL : outputs;
  const char *ahead = following.next.from;
  float parts[gate ? 2 : 1][2][AMX_ROWS * PANEL] __attribute__((aligned(64)));
  Waiting waiting[2] = {{gate}, {gate}};
  for (int64_t r = 0; r < rows; r += 2 * height) {
    int64_t last = rows - height, num = r < last ? 2 : 1;
    int64_t from[] = {r < last ? r : last, r + height < last ? r + height : last};
    float *to[2], (*part)[AMX_ROWS * PANEL] = parts[gate && r / (2 * height) % 2];
    for (int i = 0; i < num; i++) to[i] = copies ? part[i] : out + from[i] * outputs;
    if (num == 1) {
      amx_sums(x + from[0] * row, NULL, row, panel, steps, ahead, share, following, gate ? waiting : NULL, DOTS);
      fetch_following(following);
      _tile_stored(0, to[0], 4 * width);
      _tile_stored(1, to[0] + 16, 4 * width);
      _tile_stored(2, to[0] + 32, 4 * width);
      _tile_stored(3, to[0] + 48, 4 * width);
    }
    for (int64_t c = 0; c < PANEL && num == 2; c += HALF, ahead += PARTS * steps * share) {
      amx_sums(x + from[0] * row, x + from[1] * row, row, panel + 4 * c, steps, ahead, share, following,
               gate ? waiting + c / HALF : NULL, DOTS);
      _tile_stored(0, to[0] + c, 4 * width);
      _tile_stored(1, to[0] + c + 16, 4 * width);
      _tile_stored(2, to[1] + c, 4 * width);
      _tile_stored(3, to[1] + c + 16, 4 * width);
    }
    for (int64_t i = 0; i < 2 && gate; i++) {
      while (waiting[i].next < waiting[i].end) gate_next(waiting + i);
      waiting[i] = (Waiting){gate, part[i], from[i], 0, i < num ? height : 0};
    }
    for (int64_t i = 0; i < num * height && copies && !gate; i++)
      write_row(out + (from[i / height] + i % height) * outputs, part[i / height] + i % height * PANEL, columns, is_large);
  }
  for (int64_t i = 0; i < 2 && gate; i++)
    while (waiting[i].next < waiting[i].end) gate_next(waiting + i);
  if (is_large) _mm_sfence();
}

static void amx_dots(const char *x, int64_t row, int64_t inputs, const char *panel, float *out, int64_t outputs,
                     int64_t columns, Following following, int64_t rows, int is_large) {
  amx_dots_gated(x, row, inputs, panel, out, outputs, columns, following, rows, is_large, NULL);
}

static void amx_gated_dots(const char *x, int64_t row, int64_t inputs, const char *panel, Following following,
                           int64_t rows, const Gate *gate) {
  amx_dots_gated(x, row, inputs, panel, NULL, 0, PANEL, following, rows, 0, gate);
}

/* `tiles_of_int8` with the same bits. */
static void amx_int8(const char *x, int64_t inputs, const char *panel, float *out, int64_t outputs, int64_t columns,
                     Memory next, int64_t rows, int is_large) {
  int64_t height = amx_height(rows), row = quantized_size(inputs, 0), padded = padded_inputs(inputs);
  int64_t groups = num_groups(inputs), share = amx_ahead(next.bytes, 2 * PARTS * padded / 64, rows);
  const char *ahead = next.from;
  for (int64_t r = 0; r < rows; r += height) {
    int64_t from = r < rows - height ? r : rows - height;
    float sums[AMX_ROWS][PANEL] __attribute__((aligned(64))), totals[AMX_ROWS][PANEL] = {{0}};
    for (int64_t g = 0; g < groups; g++) {
      int64_t first = g * GROUP, steps = (padded - first < GROUP ? padded - first : GROUP) / 64;
      const char *weights = panel + g * (GROUP + 4) * PANEL, *scales = weights + steps * 64 * PANEL;
      amx_sums(x + from * row + first, NULL, row, weights, steps, ahead, share, (Following){next, NULL}, NULL, INT8);
      ahead += PARTS * steps * share;
      int64_t rest = amx_ahead(PARTS * steps * share, height, 1); /* while tiles rest, as much as while they work */
      _tile_stored(0, sums[0], 4 * PANEL);
      _tile_stored(1, sums[0] + 16, 4 * PANEL);
      _tile_stored(2, sums[0] + 32, 4 * PANEL);
      _tile_stored(3, sums[0] + 48, 4 * PANEL);
      for (int64_t i = 0; i < height; i++) {
        ahead = fetch_on(ahead, rest);
        ROW(c, PANEL) {
          const float *own = (const float *)(x + (from + i) * row + padded);
          ivec sum = (ivec)load(sums[i] + c) - 128 * ((const int32_t *)own)[groups + g];
          vec scale = load((const float *)scales + c) * all(own[g]);
          store(totals[i] + c, fma_of(__builtin_convertvector(sum, vec), scale, load(totals[i] + c)));
        }
      }
    }
    for (int64_t i = 0; i < height; i++) write_row(out + (from + i) * outputs, totals[i], columns, is_large);
  }
  if (is_large) _mm_sfence();
}
#endif

/* Use AMX for DOTS and INT8 if `wanted`; returns whether it is used: the CPU must have it, and Linux grant it, which it
 * does for the whole process. */
int64_t enable_amx(int64_t wanted) {
#ifdef HAS_AMX
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  use_amx = wanted && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#endif
  return use_amx;
}

int64_t uses_amx(void) { return use_amx; }

/* Configure the tiles of this thread for products of `rows` rows; other libraries configure them as well. */
static void start_amx(int64_t rows, int format) {
#ifdef HAS_AMX
  if (!use_amx || (format != DOTS && format != INT8)) return;
  AmxShapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = (uint8_t)(i < 6 ? amx_height(rows) : AMX_ROWS);
  set_shapes(&shapes);
#endif
}

static void stop_amx(int format) {
#ifdef HAS_AMX
  if (use_amx && (format == DOTS || format == INT8)) _tile_release();
#endif
}
