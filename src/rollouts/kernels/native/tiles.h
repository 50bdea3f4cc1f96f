/* Products of rows with a panel of a weight, in tiles of vector registers. */
#pragma once

#include "packing.h"
#include "prefetch.h"

enum {
  TILE = 6,      /* rows per register tile: TILE x PANEL sums stay in registers */
  FEW_TILES = 4, /* so many register tiles of fp32 take the inputs in turns, and half as many of other formats */
  TURN = 4096 / PANEL /* inputs */
};

/* A panel of floats that is read next. */
ALWAYS Following wide_panel(const float *panel, int64_t inputs) {
  return (Following){{(const char *)panel, 4 * PANEL * inputs}, NULL};
}

/* Sums of a register tile that `tile` continues: none at the first inputs of a block, and not written to `out` before
 * the last ones. */
typedef struct {
  vec (*sums)[PANEL / LANES];
  int is_first, is_last;
} Partial;

/* Add the products of input k of `num` rows, `inputs` elements apart, with its weights in a panel. */
ALWAYS void add_products(vec sums[TILE][PANEL / LANES], const float *x, int64_t inputs, const void *panel, int64_t k,
                         int num, int format) {
  vec w[PANEL / LANES];
  for (int c = 0; c < PANEL / LANES; c++)
    if (format == FP32) w[c] = load((const float *)panel + k * PANEL + c * LANES);
    else w[c] = weights_of_pairs(panel, k, c * LANES);
  for (int r = 0; r < num; r++)
    for (int c = 0; c < PANEL / LANES; c++) sums[r][c] = fma_of(all(x[r * inputs + k]), w[c], sums[r][c]);
}

/* Multiply `num` rows of x with `size` inputs of one panel; `more` accumulates into `out`. Prefetches `ahead`, `step`
 * bytes per input. */
ALWAYS void tile(const void *x, int64_t inputs, const void *panel, int64_t size, float *out, int64_t outputs,
                 int64_t columns, int more, const char *ahead, int64_t step, Partial part, int num, int format) {
  vec sums[TILE][PANEL / LANES];
  for (int r = 0; r < num; r++)
    for (int c = 0; c < PANEL / LANES; c++) sums[r][c] = part.is_first ? all(0.f) : part.sums[r][c];
  if (format == DOTS) {
    for (int64_t k = 0; k < size; k += 2) {
      vec w[PANEL / LANES];
      fetch_lines(ahead + k * step, 2 * step);
      for (int c = 0; c < PANEL / LANES; c++) w[c] = load(at_item(panel, k * PANEL + 2 * c * LANES, DOTS));
      for (int r = 0; r < num; r++) {
        vec both = (vec)(*(const bits_in_memory *)at_item(x, r * inputs + k, DOTS) - (ivec){0});
        for (int c = 0; c < PANEL / LANES; c++) sums[r][c] = dots_of(sums[r][c], both, w[c]);
      }
    }
  } else {
    int64_t k = 0, chunk = LANES == 8 ? 8 : format == FP32 ? 1 : 2; /* inputs between tests for the end */
    for (; k + chunk <= size; k += chunk)
#pragma GCC unroll 8
      for (int64_t i = 0; i < chunk; i++) {
        fetch_share(ahead + k * step, chunk * step, i, PANEL * (format == FP32 ? 4 : 2));
        add_products(sums, x, inputs, panel, k + i, num, format);
      }
    for (; k < size; k++) add_products(sums, x, inputs, panel, k, num, format);
  }
  if (!part.is_last) {
    for (int r = 0; r < num; r++)
      for (int c = 0; c < PANEL / LANES; c++) part.sums[r][c] = sums[r][c];
    return;
  }
  for (int r = 0; r < num; r++)
    for (int c = 0; c < PANEL / LANES; c++)
      if (c * LANES < columns) {
        float *to = out + r * outputs;
        vec sum = sums[r][c];
        if (more) sum = LOAD(to, c * LANES, columns) + sum;
        STORE(to, c * LANES, columns, sum);
      }
}

/* Rows of the first register tile of `rows`. Between one tile and two, both get half of the rows: a tile of few rows
 * would wait for its weights. */
ALWAYS int64_t tile_rows(int64_t rows) {
  return rows <= TILE ? rows : rows < 2 * TILE ? (rows + 1) / 2 : TILE;
}

/* Calls CASE(num) for each register tile. */
#define FOR_TILES(rows) \
  for (int64_t left = (rows); left > 0; left -= tile_rows(left)) \
    switch (tile_rows(left)) { \
      CASE(1) \
      CASE(2) \
      CASE(3) \
      CASE(4) \
      CASE(5) \
      CASE(6) \
    }

/* Whether the products of these rows take less time than the memory takes for their weights. */
ALWAYS int are_few(int64_t rows, int format) { return rows <= (format == FP32 ? FEW_TILES : FEW_TILES / 2) * TILE; }

/* Whether the register tiles take the inputs in turns: few of them do, so that the weights are read from memory at an even
 * pace, not all of them while the first tile waits. */
ALWAYS int takes_turns(int64_t rows, int format) { return rows > TILE && are_few(rows, format); }

/* `tile` for all rows; prefetches `following`, in its `next` at most as many bytes as these inputs of the panel have. */
ALWAYS void tiles(const void *x, int64_t inputs, const void *panel, int64_t size, float *out, int64_t outputs,
                  int64_t columns, int more, Following following, int64_t rows, int format) {
  int64_t num_tiles = (rows + TILE - 1) / TILE, bytes = PANEL * (format == FP32 ? 4 : 2);
  int64_t step = (following.end ? bytes : following.next.bytes / size) / num_tiles;
  const char *ahead = following.next.from;
  vec sums[FEW_TILES * TILE][PANEL / LANES];
  for (int64_t start = 0, num_inputs; start < size; start += num_inputs) {
    const char *weights = (const char *)panel + start * bytes;
    int64_t row = 0, until_next = following.end ? (following.end - weights) / bytes - TURN : 0;
    num_inputs = takes_turns(rows, format) ? TURN : until_next > 0 ? until_next : size;
    if (num_inputs > size - start) num_inputs = size - start;
    if (following.end) ahead = until_next > 0 ? weights + TURN * bytes : following.next.from - until_next * bytes;
#define CASE(num) \
  case num: \
    tile(at_item(x, row * inputs + start, format == DOTS ? DOTS : FP32), inputs, weights, num_inputs, \
         out + row * outputs, outputs, columns, more, ahead, step, \
         (Partial){sums + row, start == 0, start + num_inputs == size}, num, format); \
    row += num, ahead += step * num_inputs; \
    break;
    FOR_TILES(rows)
#undef CASE
  }
}

#define TILES_OF(name, format) \
  static void tiles_of_##name(const void *x, int64_t inputs, const void *panel, int64_t size, float *out, \
                              int64_t outputs, int64_t columns, int more, Following following, int64_t rows) { \
    tiles(x, inputs, panel, size, out, outputs, columns, more, following, rows, format); \
  }
TILES_OF(fp32, FP32)
TILES_OF(bf16, BF16)
TILES_OF(dots, DOTS)

/* sum + the four products of each lane; w is of a panel, x has signed bytes of at most 127. */
ALWAYS ivec dot4(ivec sum, ivec w, ivec x) {
#if defined(__AVX512VNNI__) && LANES == 16
  return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && LANES == 8
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif SIGNED_WEIGHTS /* pairs of products have 16 bits: |w| times x with the sign of w */
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
  return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  ivec even = w & 0x00ff00ff, odd = (ivec)((uvec)w >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__) && LANES == 16 /* madd: two products of 16 bits per lane */
  __m512i high = _mm512_srai_epi16((__m512i)x, 8), low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
  return sum + (ivec)_mm512_madd_epi16((__m512i)even, low) + (ivec)_mm512_madd_epi16((__m512i)odd, high);
#else
  sum += (even & 0xffff) * (x << 24 >> 24) + (odd & 0xffff) * (x << 16 >> 24);
  return sum + (even >> 16) * (x << 8 >> 24) + (odd >> 16) * (x >> 24);
#endif
#endif
}

/* `tile` for INT8: `num` rows of `in_format` with groups `first` to `end` of a panel; prefetches `ahead`, `step` bytes per
 * quad and per row of scales. */
ALWAYS void tile_int8(const char *x, int64_t inputs, const char *panel, int64_t first, int64_t end, float *out,
                      int64_t outputs, int64_t columns, const char *ahead, int64_t step, Partial part, int num) {
  int64_t padded = padded_inputs(inputs), groups = num_groups(inputs), row = quantized_size(inputs, 0);
  vec totals[TILE][PANEL / LANES];
  for (int r = 0; r < num; r++)
    for (int c = 0; c < PANEL / LANES; c++) totals[r][c] = part.is_first ? all(0.f) : part.sums[r][c];
  for (int64_t g = first; g < end; g++) {
    int64_t start = g * GROUP, quads = (padded - start < GROUP ? padded - start : GROUP) / 4;
    const char *weights = panel + g * GROUP_BYTES;
    ivec sums[TILE][PANEL / LANES];
    for (int r = 0; r < num; r++)
      for (int c = 0; c < PANEL / LANES; c++)
        sums[r][c] = (SIGNED_WEIGHTS ? 0 : -128) * ((const int32_t *)(x + r * row + padded))[groups + g] - (ivec){0};
    for (int64_t k = 0; k < quads; k++, ahead += step) {
      ivec w[PANEL / LANES];
      fetch_lines(ahead, step);
      for (int c = 0; c < PANEL / LANES; c++) w[c] = (ivec)load((const float *)weights + k * PANEL + c * LANES);
      for (int r = 0; r < num; r++) {
        ivec four = *(const bits_in_memory *)(x + r * row + start + 4 * k) - (ivec){0};
        for (int c = 0; c < PANEL / LANES; c++) sums[r][c] = dot4(sums[r][c], w[c], four);
      }
    }
    fetch_lines(ahead, step);
    ahead += step;
    for (int c = 0; c < PANEL / LANES; c++) {
      vec scale = load((const float *)weights + quads * PANEL + c * LANES);
      for (int r = 0; r < num; r++) {
        vec both = scale * all(((const float *)(x + r * row + padded))[g]);
        totals[r][c] = fma_of(__builtin_convertvector(sums[r][c], vec), both, totals[r][c]);
      }
    }
  }
  for (int r = 0; r < num; r++)
    for (int c = 0; c < PANEL / LANES; c++)
      if (!part.is_last) part.sums[r][c] = totals[r][c];
      else if (c * LANES < columns) STORE(out + r * outputs, c * LANES, columns, totals[r][c]);
}

/* `tiles` for INT8; a turn is one group. */
static void tiles_of_int8(const char *x, int64_t inputs, const char *panel, float *out, int64_t outputs,
                          int64_t columns, Following following, int64_t rows) {
  int64_t bytes = quantized_size(inputs, 0), padded = padded_inputs(inputs), groups = num_groups(inputs);
  int64_t turn = following.end ? 1 : groups, step = following.end ? 4 * PANEL : 4 * following.next.bytes / padded;
  const char *ahead = following.next.from;
  step = (step < 4 * PANEL ? step : 4 * PANEL) / ((rows + TILE - 1) / TILE);
  vec sums[FEW_TILES * TILE][PANEL / LANES];
  for (int64_t first = 0; first < groups; first += turn) {
    int64_t end = first + turn, row = 0, steps = ((end == groups ? padded : end * GROUP) - first * GROUP) / 4 + turn;
    const char *next = panel + end * GROUP_BYTES;
    if (following.end) ahead = next < following.end ? next : following.next.from + (next - following.end);
#define CASE(num) \
  case num: \
    tile_int8(x + row * bytes, inputs, panel, first, end, out + row * outputs, outputs, columns, ahead, step, \
              (Partial){sums + row, first == 0, end == groups}, num); \
    row += num, ahead += step * steps; \
    break;
    FOR_TILES(rows)
#undef CASE
  }
}
