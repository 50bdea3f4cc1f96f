/* Vectors of LANES floats: loads, stores, sums, and exp. */
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define LANES 16 /* floats per vector; 8 without AVX-512 */
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t bits_in_memory __attribute__((aligned(2), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float half __attribute__((vector_size(32)));
typedef float quarter __attribute__((vector_size(16)));
typedef double dvec __attribute__((vector_size(4 * LANES))); /* half as many doubles as there are floats in `vec` */
typedef int64_t lvec __attribute__((vector_size(4 * LANES)));
typedef float fvec __attribute__((vector_size(2 * LANES), aligned(4), may_alias)); /* their floats in memory */

/* The lanes of x and y, which follow those of x, at the given indices. */
#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else /* gcc 11 does not have the other one */
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (ivec){__VA_ARGS__})
#endif

ALWAYS vec load(const float *p) { return *(const in_memory *)p; }
ALWAYS void store(float *p, vec x) { *(in_memory *)p = x; }
ALWAYS vec all(float x) { return x - (vec){0}; }

/* a b + c, rounded once. */
ALWAYS vec fma_of(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  quarter x[2], y[2], z[2];
  memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; i++) z[i] = (quarter)vfmaq_f32((float32x4_t)z[i], (float32x4_t)x[i], (float32x4_t)y[i]);
  memcpy(&c, z, sizeof c);
  return c;
#else
#error "unsupported CPU: the kernels need FMA (x86) or NEON (ARM)"
#endif
}

/* Load LANES elements from index i of an fp32 array, or of a bf16 array (`narrow`): bf16 is the upper half of fp32. */
ALWAYS vec load_as(const void *p, int64_t i, int narrow) {
  if (!narrow) return load((const float *)p + i);
#if defined(__AVX512F__) /* gcc 12 splits the conversion below */
  __m256i items = _mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i));
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(items), 16);
#elif defined(__AVX2__)
  __m128i items = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
  return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(items), 16);
#endif
  uvec wide = __builtin_convertvector(*(const hvec *)((const uint16_t *)p + i), uvec) << 16;
  return (vec)wide;
}

ALWAYS void store_as(void *p, int64_t i, vec x, int narrow) {
  if (!narrow) {
    store((float *)p + i, x);
    return;
  }
  uvec bits = (uvec)x;
  bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
  *(hvec *)((uint16_t *)p + i) = __builtin_convertvector(bits, hvec);
}

/* Store numbers of 8 bits. */
ALWAYS void store_bytes(int8_t *p, ivec x) {
#if defined(__AVX2__) && LANES == 8 /* gcc 12 moves one at a time */
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
#else
  *(bvec *)p = __builtin_convertvector(x, bvec);
#endif
}

ALWAYS float sum(vec x) {
  quarter q[2];
#if LANES == 16
  half h[2];
  memcpy(h, &x, sizeof h);
  half s = h[0] + h[1];
#else
  half s = x;
#endif
  memcpy(q, &s, sizeof q);
  quarter t = q[0] + q[1];
  return (t[0] + t[2]) + (t[1] + t[3]);
}

ALWAYS vec pick(ivec yes, vec a, vec b) { return (vec)((yes & (ivec)a) | (~yes & (ivec)b)); }

/* b if one of them is NaN */
#ifdef __AVX512F__ /* gcc 12 does not find these instructions */
ALWAYS vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
ALWAYS vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
ALWAYS vec larger(vec a, vec b) { return pick(a > b, a, b); }
ALWAYS vec smaller(vec a, vec b) { return pick(a < b, a, b); }
#endif

ALWAYS float largest(vec x) {
#if LANES == 16
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

/* exp to a unit or two in the last place: x = n ln 2 + r, a polynomial in r, n into the exponent; 0 below -87.3. */
ALWAYS vec exp_of(vec x) {
  ivec zero = x < all(-87.3f);
  vec y = smaller(all(88.3f), larger(all(-87.3f), x)); /* in this order NaN remains */
  vec n = fma_of(y, all(1.44269504f), all(12582912.f)) - all(12582912.f); /* round to nearest by 1.5 * 2^23 */
  vec r = fma_of(n, all(2.12194440e-4f), fma_of(n, all(-0.693359375f), y));
  vec p = all(1.9875691500e-4f);
  p = fma_of(p, r, all(1.3981999507e-3f));
  p = fma_of(p, r, all(8.3334519073e-3f));
  p = fma_of(p, r, all(4.1665795894e-2f));
  p = fma_of(p, r, all(1.6666665459e-1f));
  p = fma_of(p, r, all(5.0000001201e-1f));
  p = fma_of(p * r, r, r) + all(1.f);
  ivec scale = (__builtin_convertvector(n, ivec) + 127) << 23;
  return (vec)(~zero & (ivec)(p * (vec)scale));
}

/* The last, partial vector of a row, zero-padded. */
ALWAYS vec load_some(const float *p, int64_t count) {
  vec x = {0};
  for (int64_t i = 0; i < count; i++) x[i] = p[i];
  return x;
}
ALWAYS void store_some(float *p, vec x, int64_t count) {
  for (int64_t i = 0; i < count; i++) p[i] = x[i];
}
#define ROW(i, size) \
  for (int64_t i = 0; i < (size); i += LANES)
#define LOAD(p, i, size) ((i) + LANES <= (size) ? load((p) + (i)) : load_some((p) + (i), (size) - (i)))
#define STORE(p, i, size, x) \
  do { \
    if ((i) + LANES <= (size)) store((p) + (i), x); \
    else store_some((p) + (i), x, (size) - (i)); \
  } while (0)

/* Element i of an array of fp32, or of bf16 (`narrow`), whose rows are whole vectors. */
#define LOAD_AS(p, i, size, narrow) ((narrow) ? load_as(p, i, 1) : LOAD((const float *)(p), i, size))
#define STORE_AS(p, i, size, x, narrow) \
  do { \
    if (narrow) store_as(p, i, x, 1); \
    else STORE((float *)(p), i, size, x); \
  } while (0)

ALWAYS void *at_number(const void *p, int64_t i, int narrow) { return (char *)p + i * (narrow ? 2 : 4); }

/* Calls an inlined function for fp32 or bf16 arrays. */
#define FOR_TYPE(narrow, call) \
  do { \
    if (narrow) { enum { NARROW = 1 }; call; } \
    else { enum { NARROW = 0 }; call; } \
  } while (0)
