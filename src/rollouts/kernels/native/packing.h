/* Packed weights: element formats, rounding to bf16, quantization to int8, and panels of outputs. */
#pragma once

#include "vectors.h"

#ifdef __AVX512F__
#define PANEL 64 /* outputs per panel of a packed weight */
#else
#define PANEL 16
#endif

enum { HALF = PANEL / 2 };

/* Element format of a packed weight. */
enum {
  FP32,
  BF16, /* in pairs of inputs, widened to fp32 before multiplication */
  DOTS, /* the same pairs for dot products by AVX512_BF16 or AMX; activations are rounded to bf16 as well */
  INT8  /* weights and activations in 8 bits, see `quantize_group` */
};

enum { STEP = 32 }; /* BF16, DOTS: inputs are zero-padded to a multiple, those of a tile of AMX */

ALWAYS int64_t whole_steps(int64_t inputs) { return (inputs + STEP - 1) / STEP * STEP; }

/* Elements (INT8: bytes) of a packed weight per output. */
int64_t quantized_size(int64_t inputs, int64_t is_weight);
int64_t packed_inputs(int64_t inputs, int64_t format) {
  return format == INT8 ? quantized_size(inputs, 1) : format == FP32 ? inputs : whole_steps(inputs);
}

/* Bytes of a row of activations, see `in_format`. */
ALWAYS int64_t row_size(int64_t inputs, int format) {
  return format == INT8 ? quantized_size(inputs, 0) : format == DOTS ? 2 * whole_steps(inputs) : 4 * inputs;
}

/* Whether the CPU has bf16 dot products (AVX512_BF16). */
int has_dots(void) {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

/* sum + a[0] b[0] + a[1] b[1], where each lane of a and b is a pair of bf16 values. */
ALWAYS vec dots_of(vec sum, vec a, vec b) {
#ifdef __AVX512BF16__
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  return sum; /* unreachable, see `has_dots` */
#endif
}

/* int8: groups of up to GROUP inputs of a row have a common scale. The Hadamard transform of each SPREAD inputs, of
 * weights and activations alike, leaves their product unchanged and spreads outliers over the group (QuaRot, Ashkboos
 * et al. 2024). Integer sums are exact and all else has a fixed order, so the bits are the same on every CPU. */
enum { SPREAD = 64, GROUP = 128, GROUP_BYTES = (GROUP + 4) * PANEL /* of a panel */ };

ALWAYS int64_t padded_inputs(int64_t inputs) { return (inputs + SPREAD - 1) / SPREAD * SPREAD; }
ALWAYS int64_t num_groups(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

/* Bytes of a quantized row: its numbers, and a scale and a sum per group; a weight has no sums. */
int64_t quantized_size(int64_t inputs, int64_t is_weight) {
  return padded_inputs(inputs) + (is_weight ? 4 : 8) * num_groups(inputs);
}

#if LANES == 16
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define SWAPPED(x, n) \
  SHUFFLE(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n, 8 ^ n, 9 ^ n, 10 ^ n, 11 ^ n, 12 ^ n, 13 ^ n, \
          14 ^ n, 15 ^ n)
#else
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#define SWAPPED(x, n) SHUFFLE(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n)
#endif

/* Hadamard transform of SPREAD numbers, not normalized. */
ALWAYS void spread(vec *x) {
  const ivec lanes = {LANE_NUMBERS};
#define BUTTERFLY(n) \
  for (int i = 0; i < SPREAD / LANES; i++) \
    x[i] = SWAPPED(x[i], n) + (vec)((ivec)x[i] ^ (((lanes & n) != 0) & INT32_MIN));
  BUTTERFLY(1)
  BUTTERFLY(2)
  BUTTERFLY(4)
#if LANES == 16
  BUTTERFLY(8)
#endif
  for (int step = 1; step < SPREAD / LANES; step *= 2)
    for (int i = 0; i < SPREAD / LANES; i++)
      if (!(i & step)) {
        vec a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
}

/* Quantize `count` inputs, transformed, as out[i] scale; the scale is NaN if an input is not finite. */
static void quantize_group(const float *x, int64_t count, int8_t *out, float *scale, int32_t *sum_of) {
  int num = (int)(padded_inputs(count) / LANES);
  vec v[GROUP / LANES], high = all(0.f), bad = all(0.f);
  ivec total = {0};
  for (int i = 0; i < num; i++) v[i] = i * LANES < count ? LOAD(x, i * LANES, count) : all(0.f);
  for (int i = 0; i < num; i += SPREAD / LANES) spread(v + i);
  for (int i = 0; i < num; i++) high = larger(high, (vec)((ivec)v[i] & INT32_MAX)), bad = fma_of(v[i], all(0.f), bad);
  float most = largest(high);
  vec inverse = all(most > 1e-30f ? 127.f / most : 0.f);
  *scale = most / (127.f * 8.f) + sum(bad); /* 8: the transform has length sqrt(SPREAD) */
  for (int i = 0; i < num; i++) {
    ivec bits = (ivec)fma_of(v[i], inverse, all(12582912.f)) - 0x4B400000; /* to nearest by 1.5 * 2^23 */
    store_bytes(out + i * LANES, bits);
    total += bits;
  }
  *sum_of = 0;
  for (int i = 0; i < LANES; i++) *sum_of += total[i];
}

/* Round to bf16 and store at index i. */
ALWAYS void store_rounded(void *out, int64_t i, vec x) {
#ifdef __AVX512BF16__
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy((uint16_t *)out + i, &rounded, sizeof rounded);
#endif
}

/* x rounded to bf16, in fp32. */
ALWAYS vec rounded_of(vec x) {
#ifdef __AVX512BF16__
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#else
  return x;
#endif
}

/* Round `size` numbers, a multiple of LANES, to bf16. */
ALWAYS void round_row(const float *x, uint16_t *out, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) store_rounded(out, i, load(x + i));
}

/* Activations in the format that the weight needs: x itself, or x rounded to bf16 (DOTS) or quantized (INT8) in
 * `scratch`. */
static const void *in_format(const float *x, float *scratch, int64_t rows, int64_t inputs, int format) {
  int64_t padded = padded_inputs(inputs), groups = num_groups(inputs);
  if (format == INT8)
    for (int64_t r = 0; r < rows; r++) {
      char *row = (char *)scratch + r * quantized_size(inputs, 0);
      float *scales = (float *)(row + padded);
      for (int64_t g = 0; g < groups; g++) {
        int64_t left = inputs - g * GROUP;
        quantize_group(x + r * inputs + g * GROUP, left < GROUP ? left : GROUP, (int8_t *)row + g * GROUP, scales + g,
                       (int32_t *)(scales + groups) + g);
      }
    }
  if (format == INT8) return scratch;
  if (format != DOTS) return x;
  for (int64_t r = 0; r < rows; r++)
    ROW(i, whole_steps(inputs))
      store_rounded((uint16_t *)scratch + r * whole_steps(inputs), i, LOAD(x + r * inputs, i, inputs));
  return scratch;
}

/* Address of element i of an array of this format. */
ALWAYS const void *at_item(const void *p, int64_t i, int format) {
  return (const char *)p + i * (format == FP32 ? 4 : 2);
}

/* The weights, in fp32, of input k and LANES outputs from index c on, in a panel of bf16 pairs. */
ALWAYS vec weights_of_pairs(const void *panel, int64_t k, int64_t c) {
  ivec pairs = (ivec)load((const float *)((const uint16_t *)panel + (k & ~1) * PANEL + 2 * c));
  return (vec)(k & 1 ? pairs & (int32_t)0xffff0000 : pairs << 16);
}

/* Layout of the outputs of a packed weight in its panels. */
enum {
  PLAIN,  /* consecutive outputs */
  PAIRED, /* each panel has HALF outputs of the first half (gate) and HALF of the second half (up) */
  GATED   /* PAIRED layout, with out = silu(first half) * second half */
};

ALWAYS int64_t num_panels(int64_t outputs, int64_t kind) {
  return kind == PLAIN ? (outputs + PANEL - 1) / PANEL : (outputs / 2 + HALF - 1) / HALF;
}

int64_t packed_size(int64_t outputs, int64_t inputs, int64_t kind) {
  return num_panels(outputs, kind) * PANEL * inputs;
}

/* Transpose a LANES x LANES block: LANES rows (keys, outputs of a weight) at `size` elements distance, columns from
 * `place` on. */
ALWAYS void transpose(const void *rows, int64_t at, int64_t size, int64_t place, vec *transposed, int narrow) {
  vec a[LANES], b[LANES];
  for (int i = 0; i < LANES; i++) a[i] = load_as(rows, at + i * size + place, narrow);
#define SWAP(from, to, step, low, high) \
  for (int i = 0; i < LANES; i++) \
    if (!(i & step)) to[i] = low(from[i], from[i + step]), to[i + step] = high(from[i], from[i + step]);
#if LANES == 16
#define LOW1(x, y) SHUFFLE(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(x, y) SHUFFLE(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW2(x, y) SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(x, y) SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW4(x, y) SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(x, y) SHUFFLE(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW8(x, y) SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(x, y) SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
  SWAP(a, b, 1, LOW1, HIGH1)
  SWAP(b, a, 2, LOW2, HIGH2)
  SWAP(a, b, 4, LOW4, HIGH4)
  SWAP(b, transposed, 8, LOW8, HIGH8)
#else
#define LOW1(x, y) SHUFFLE(x, y, 0, 8, 2, 10, 4, 12, 6, 14)
#define HIGH1(x, y) SHUFFLE(x, y, 1, 9, 3, 11, 5, 13, 7, 15)
#define LOW2(x, y) SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(x, y) SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW4(x, y) SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH4(x, y) SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15)
  SWAP(a, b, 1, LOW1, HIGH1)
  SWAP(b, a, 2, LOW2, HIGH2)
  SWAP(a, transposed, 4, LOW4, HIGH4)
#endif
}

/* Whether the bytes of a panel of INT8 are signed: AVX2 has no sums of products of unsigned ones that cannot overflow. */
#if defined(__AVX2__) && LANES == 8 && !defined(__AVXVNNI__)
#define SIGNED_WEIGHTS 1
#else
#define SIGNED_WEIGHTS 0
#endif

/* Pack LANES outputs at `place` of a panel, `count` of them present: for each group [inputs / 4][PANEL][4], with 128
 * added unless SIGNED_WEIGHTS, and PANEL scales. */
static void pack_int8(const float *weight, int64_t inputs, int64_t count, char *panel, int64_t place) {
  const int32_t added = SIGNED_WEIGHTS ? 0 : (int32_t)0x80808080;
  int8_t rows[LANES][GROUP];
  int32_t unused;
  vec columns[LANES];
  memset(rows, 0, sizeof rows);
  for (int64_t first = 0; first < inputs; first += GROUP) {
    int64_t size = inputs - first < GROUP ? inputs - first : GROUP, quads = padded_inputs(size) / 4;
    float *to = (float *)(panel + first / GROUP * (GROUP + 4) * PANEL) + place, *scales = to + quads * PANEL;
    for (int64_t c = 0; c < LANES; c++)
      if (c < count) quantize_group(weight + c * inputs + first, size, rows[c], scales + c, &unused);
      else scales[c] = 0.f;
    for (int64_t k = 0; k < quads; k += LANES) {
      transpose(rows, 0, GROUP / 4, k, columns, 0);
      for (int i = 0; i < LANES; i++) store(to + (k + i) * PANEL, (vec)((ivec)columns[i] ^ added));
    }
  }
}

/* Copy words of LANES outputs between rows of `words` words, from index `row`, and a panel [words][PANEL], from index
 * `place`; returns how many of each: all but those after the last whole vector. A word is an fp32 or two bf16 numbers. */
ALWAYS int64_t copy_words(float *rows, int64_t row, int64_t words, float *panel, int64_t place, int unpacks) {
  vec columns[LANES];
  int64_t k = 0;
  for (; k + LANES <= words; k += LANES) {
    if (unpacks) transpose(panel, place + k * PANEL, PANEL, 0, columns, 0);
    else transpose(rows, row + k, words, 0, columns, 0);
    for (int i = 0; i < LANES; i++)
      store(unpacks ? rows + row + i * words + k : panel + place + (k + i) * PANEL, columns[i]);
  }
  return k;
}

/* Pack a weight [outputs, inputs] into panels of PANEL outputs, each [inputs][PANEL] (BF16, DOTS: [inputs / 2][PANEL][2],
 * see STEP; INT8: see `pack_int8`, from fp32), zero-padded after the last output; or the reverse, except for INT8. */
ALWAYS void copy_panels(void *weight, void *packed, int64_t outputs, int64_t inputs, int64_t format, int64_t kind,
                        int unpacks) {
  int64_t beside = format == BF16 || format == DOTS ? 2 : 1;
  int64_t panels = num_panels(outputs, kind), inner = outputs / 2, wide = packed_inputs(inputs, format);
  PARALLEL(outputs * inputs > MANY)
  for (int64_t p = 0; p < panels; p++) {
    int64_t first[2] = {p * PANEL, p * PANEL + HALF}, end[2] = {outputs, outputs};
    if (kind != PLAIN) first[0] = p * HALF, first[1] = inner + p * HALF, end[0] = inner;
    for (int64_t place = 0; place < PANEL; place += LANES) {
      int64_t side = place / HALF, output = first[side] + place % HALF, k = 0;
      if (format == INT8) {
        pack_int8((const float *)weight + output * inputs, inputs, end[side] - output,
                  (char *)packed + p * PANEL * wide, place);
        continue;
      }
      if (inputs % beside == 0 && output + LANES <= end[side])
        k = beside * copy_words(weight, output * inputs / beside, inputs / beside, packed,
                                p * PANEL * wide / beside + place, unpacks);
      for (; k < wide; k++)
        for (int64_t c = 0; c < LANES; c++) {
          int64_t from = (output + c) * inputs + k, there = output + c < end[side] && k < inputs;
          int64_t to = (p * wide + k / beside * beside) * PANEL + (place + c) * beside + k % beside;
          uint16_t *narrow = weight, *narrow_to = packed;
          float *full = weight, *full_to = packed;
          if (unpacks && there && format != FP32) narrow[from] = narrow_to[to];
          else if (unpacks && there) full[from] = full_to[to];
          else if (!unpacks && format != FP32) narrow_to[to] = there ? narrow[from] : 0;
          else if (!unpacks) full_to[to] = there ? full[from] : 0.f;
        }
    }
  }
}

void pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int64_t format, int64_t kind) {
  copy_panels((void *)weight, packed, outputs, inputs, format, kind, 0);
}

void unpack(const void *packed, void *weight, int64_t outputs, int64_t inputs, int64_t format, int64_t kind) {
  copy_panels(weight, (void *)packed, outputs, inputs, format, kind, 1);
}

/* bf16 numbers, in fp32, as pairs. */
ALWAYS vec pairs_of(vec even, vec odd) {
  return (vec)((ivec)((uvec)even >> 16) | ((ivec)odd & (int32_t)0xffff0000));
}

/* LANES numbers of a row of `size` from i on; zeros after its end, and if the row is not there. */
ALWAYS vec load_row(const float *row, int64_t i, int64_t size, int is_there) {
  return is_there && i < size ? LOAD(row, i, size) : all(0.f);
}

/* `pack` for DOTS and PLAIN of a weight in fp32, or of its transpose (`turned`: weight is [inputs, outputs]), for a CPU that
 * `has_dots`. */
void pack_rounded(const float *weight, float *packed, int64_t outputs, int64_t inputs, int64_t turned) {
  int64_t pairs = whole_steps(inputs) / 2;
  PARALLEL(outputs * inputs > MANY)
  for (int64_t p = 0; p < num_panels(outputs, PLAIN); p++) {
    float *panel = packed + p * pairs * PANEL;
    for (int64_t k = 0; k < pairs && turned; k++)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        const float *row = weight + 2 * k * outputs;
        vec even = load_row(row, p * PANEL + i, outputs, 2 * k < inputs);
        vec odd = load_row(row + outputs, p * PANEL + i, outputs, 2 * k + 1 < inputs);
        store(panel + k * PANEL + i, pairs_of(rounded_of(even), rounded_of(odd)));
      }
    for (int64_t i = 0; i < PANEL && !turned; i += LANES)
      for (int64_t k = 0; k < pairs; k += LANES) {
        uint16_t rows[LANES][2 * LANES];
        vec block[LANES];
        for (int64_t r = 0; r < LANES; r++)
          for (int64_t j = 0; j < 2 * LANES; j += LANES) {
            int64_t output = p * PANEL + i + r;
            store_rounded(rows[r], j, load_row(weight + output * inputs, 2 * k + j, inputs, output < outputs));
          }
        transpose(rows, 0, LANES, 0, block, 0);
        for (int64_t r = 0; r < LANES && k + r < pairs; r++) store(panel + (k + r) * PANEL + i, block[r]);
      }
  }
}

/* The transpose of x [rows, columns] in bf16, for a CPU that `has_dots`: out is [columns, width], with zeros after `rows`. */
void transpose_rounded(const float *x, uint16_t *out, int64_t rows, int64_t columns, int64_t width) {
  int64_t whole = columns / LANES * LANES;
  PARALLEL(rows * columns > MANY)
  for (int64_t r = 0; r < width; r += LANES) {
    int is_whole = r + LANES <= rows;
    for (int64_t c = 0; c < whole && is_whole; c += LANES) {
      vec block[LANES];
      transpose(x, r * columns, columns, c, block, 0);
      for (int i = 0; i < LANES; i++) store_rounded(out, (c + i) * width + r, block[i]);
    }
    for (int64_t c = is_whole ? whole : 0; c < columns; c++) {
      float part[LANES] = {0};
      uint16_t rounded[LANES];
      int64_t count = width - r < LANES ? width - r : LANES;
      for (int64_t i = 0; i < LANES && r + i < rows; i++) part[i] = x[(r + i) * columns + c];
      store_rounded(rounded, 0, load(part));
      memcpy(out + c * width + r, rounded, sizeof *rounded * (size_t)count);
    }
  }
}
