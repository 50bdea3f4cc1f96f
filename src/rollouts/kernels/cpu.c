/* fp32 CPU kernels: RMSNorm, RoPE, SwiGLU, softmax, attention, sampling, GEMM with packed weights, and a fused decode step.
 *
 * Batch invariance: every row is computed independently and in a fixed order of operations, so its bits depend neither
 * on the other rows nor on the number of threads. Plain C with vector extensions (gcc 12, clang). `cpu.py` compiles and
 * calls it; contractions are off (-ffp-contract=off), so an expression rounds the same way wherever it is inlined.
 */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#define TEXT(words) #words
#define PARALLEL(enough) _Pragma(TEXT(omp parallel for schedule(static) if (enough)))
#define STATIC_FOR _Pragma("omp for schedule(static)")   /* inside a parallel region; barrier at the end */
#define DYNAMIC_FOR _Pragma("omp for schedule(dynamic)") /* the same with dynamic scheduling */
#define SHARED_FOR _Pragma("omp for schedule(static) nowait") /* without a barrier: see `wait_for_team` */
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#else
#define PARALLEL(enough)
#define STATIC_FOR
#define DYNAMIC_FOR
#define SHARED_FOR
#define THREAD 0
#define THREADS 1
#endif

#define ALWAYS static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define LANES 16 /* floats per vector; 8 without AVX-512 */
#define PANEL 64 /* outputs per panel of a packed weight */
#else
#define LANES 8
#define PANEL 16
#endif

enum {
  HALF = PANEL / 2,
  TILE = 6,    /* rows per register tile: TILE x PANEL sums stay in registers */
  KEYS = 128,  /* positions per KV cache block */
  BATCH = 96,  /* rows per batch of a long GEMM: they stay in the CPU cache while all panels are read, see `batch_of` */
  AMX_BATCH = 256,
  FEW_TILES = 4, /* so many register tiles of fp32 take the inputs in turns, and half as many of other formats */
  TURN = 64,     /* inputs */
  WIDEN = 12,  /* minimum rows for which widening a bf16 panel once is cheaper */
  MAX_HEAD_DIM = 256,
  SHORT_CONTEXT = 512, /* keys; up to this length the next row's KV data fits into the CPU cache as well */
  PASS = 4,    /* maximum queries per pass over the values */
  MANY = 1 << 14 /* minimum elements for multi-threading */
};

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
#ifdef __AVX512F__ /* gcc 12 splits the conversion below */
  __m256i items = _mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i));
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(items), 16);
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

/* x += y */
ALWAYS void add_row(void *x, const void *y, int64_t size, int narrow) {
  ROW(i, size) STORE_AS(x, i, size, LOAD_AS(x, i, size, narrow) + LOAD_AS(y, i, size, narrow), narrow);
}

/* out = weight x / rms(x); returns 1 / rms(x). `out` may alias `x`. */
ALWAYS float norm_row_as(const void *x, const float *weight, float eps, void *out, int64_t size, int narrow) {
  vec squares = {0};
  ROW(i, size) { vec v = LOAD_AS(x, i, size, narrow); squares = fma_of(v, v, squares); }
  float scale = 1.f / sqrtf(sum(squares) / (float)size + eps);
  ROW(i, size) STORE_AS(out, i, size, LOAD(weight, i, size) * (LOAD_AS(x, i, size, narrow) * all(scale)), narrow);
  return scale;
}
ALWAYS float norm_row(const float *x, const float *weight, float eps, float *out, int64_t size) {
  return norm_row_as(x, weight, eps, out, size, 0);
}

/* Row r of x is [r / inner][r % inner], with `stride` elements between outer rows. With `weights` > 1 there is one
 * weight row per inner row. If `added` is given, x += added first (fused residual add). x, `added` and out may be bf16
 * (`narrow`). */
void rms_norm(void *x, int64_t stride, const void *added, const float *weight, int64_t weights, float eps, void *out,
              float *scales, int64_t rows, int64_t inner, int64_t size, int64_t narrow) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    void *row = at_number(x, r / inner * stride + r % inner * size, (int)narrow);
    void *to = at_number(out, r * size, (int)narrow);
    const float *w = weight + (weights > 1 ? r % inner * size : 0);
    float scale;
    if (added) {
      const void *more = at_number(added, r * size, (int)narrow);
      FOR_TYPE(narrow, add_row(row, more, size, NARROW));
    }
    FOR_TYPE(narrow, scale = norm_row_as(row, w, eps, to, size, NARROW));
    if (scales) scales[r] = scale;
  }
}

/* With u = s x and y = w u:  dx = s (w dy - u mean(u w dy)),  dw += u dy */
ALWAYS void norm_row_backward(const void *dy, const void *row, const float *weight, float scale, void *dx, float *dw,
                              int64_t size, int narrow) {
  vec s = all(scale), inside = {0};
  ROW(i, size) {
    vec u = LOAD_AS(row, i, size, narrow) * s, g = LOAD_AS(dy, i, size, narrow);
    inside = inside + u * g * LOAD(weight, i, size);
    STORE(dw, i, size, LOAD(dw, i, size) + u * g);
  }
  vec mean = all(sum(inside) / (float)size);
  ROW(i, size) {
    vec u = LOAD_AS(row, i, size, narrow) * s;
    STORE_AS(dx, i, size, s * (LOAD(weight, i, size) * LOAD_AS(dy, i, size, narrow) - u * mean), narrow);
  }
}

/* Gradients of `rms_norm`; dw is in `parts` partial sums over rows. */
void rms_norm_backward(const void *grad, const void *x, int64_t stride, const float *weight, const float *scales,
                       void *grad_x, float *grad_weight, int64_t parts, int64_t rows, int64_t inner, int64_t size,
                       int64_t narrow) {
  int64_t share = (rows + parts - 1) / parts;
  PARALLEL(rows * size > MANY)
  for (int64_t part = 0; part < parts; part++) {
    float *dw = grad_weight + part * size;
    memset(dw, 0, sizeof(float) * (size_t)size);
    for (int64_t r = part * share; r < rows && r < (part + 1) * share; r++) {
      const void *row = at_number(x, r / inner * stride + r % inner * size, (int)narrow);
      const void *dy = at_number(grad, r * size, (int)narrow);
      void *dx = at_number(grad_x, r * size, (int)narrow);
      FOR_TYPE(narrow, norm_row_backward(dy, row, weight, scales[r], dx, dw, size, NARROW));
    }
  }
}

/* RoPE: (left, right) -> (left cos - right sin, right cos + left sin); `sign` -1 is the inverse. `out` may alias
 * `x`. Both halves of the tables are equal, except that the first half of `sin` may have the opposite sign. */
ALWAYS void rotate_row_as(const void *x, const float *cos, const float *sin, float sign, void *out, int64_t size,
                          int narrow) {
  int64_t mid = size / 2;
  const void *second = at_number(x, mid, narrow);
  void *second_out = at_number(out, mid, narrow);
  ROW(i, mid) {
    vec left = LOAD_AS(x, i, mid, narrow), right = LOAD_AS(second, i, mid, narrow);
    vec c = LOAD(cos, i, mid), s = LOAD(sin + mid, i, mid) * all(sign);
    STORE_AS(out, i, mid, left * c - right * s, narrow);
    STORE_AS(second_out, i, mid, right * c + left * s, narrow);
  }
}
ALWAYS void rotate_row(const float *x, const float *cos, const float *sin, float sign, float *out, int64_t size) {
  rotate_row_as(x, cos, sin, sign, out, size, 0);
}

void rotate(const void *x, int64_t stride, const float *cos, const float *sin, float sign, void *out, int64_t tokens,
            int64_t heads, int64_t size, int64_t narrow) {
  PARALLEL(tokens * heads * size > MANY)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      const void *row = at_number(x, t * stride + h * size, (int)narrow);
      void *to = at_number(out, (t * heads + h) * size, (int)narrow);
      FOR_TYPE(narrow, rotate_row_as(row, cos + t * size, sin + t * size, sign, to, size, NARROW));
    }
}

/* out = gate / (1 + exp(-gate)) up */
ALWAYS void gated_row_as(const void *gate, const void *up, void *out, int64_t size, int narrow) {
  ROW(i, size) {
    vec g = LOAD_AS(gate, i, size, narrow);
    STORE_AS(out, i, size, g / (all(1.f) + exp_of(-g)) * LOAD_AS(up, i, size, narrow), narrow);
  }
}
ALWAYS void gated_row(const float *gate, const float *up, float *out, int64_t size) {
  gated_row_as(gate, up, out, size, 0);
}

void swiglu(const void *gate, int64_t gate_stride, const void *up, int64_t up_stride, void *out, int64_t rows,
            int64_t size, int64_t narrow) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    const void *g = at_number(gate, r * gate_stride, (int)narrow), *u = at_number(up, r * up_stride, (int)narrow);
    FOR_TYPE(narrow, gated_row_as(g, u, at_number(out, r * size, NARROW), size, NARROW));
  }
}

ALWAYS void gated_row_backward(const void *grad, const void *gate, const void *up, void *grad_gate, void *grad_up,
                               int64_t size, int narrow) {
  ROW(i, size) {
    vec d = LOAD_AS(grad, i, size, narrow), g = LOAD_AS(gate, i, size, narrow), u = LOAD_AS(up, i, size, narrow);
    vec s = all(1.f) / (all(1.f) + exp_of(-g));
    STORE_AS(grad_up, i, size, d * g * s, narrow);
    STORE_AS(grad_gate, i, size, d * u * s * (all(1.f) + g * (all(1.f) - s)), narrow);
  }
}

void swiglu_backward(const void *grad, const void *gate, const void *up, void *grad_gate, void *grad_up, int64_t rows,
                     int64_t size, int64_t narrow) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = r * size;
#define AT(p) at_number(p, at, NARROW)
    FOR_TYPE(narrow, gated_row_backward(AT(grad), AT(gate), AT(up), AT(grad_gate), AT(grad_up), size, NARROW));
#undef AT
  }
}

/* weights = exp(scores - largest) / sum, in place; 0 where a score is minus infinity. Returns the log of the sum of
 * exp(scores). */
ALWAYS float softmax_row(float *scores, int64_t size) {
  vec high = all(-INFINITY), part = {0};
  int64_t whole = size / LANES * LANES, left = size - whole;
  vec last = all(-INFINITY);
  for (int64_t i = 0; i < left; i++) last[i] = scores[whole + i];
  for (int64_t i = 0; i < whole; i += LANES) high = larger(high, load(scores + i));
  vec most = all(largest(larger(high, last)));
  for (int64_t i = 0; i < whole; i += LANES) {
    vec p = exp_of(load(scores + i) - most);
    store(scores + i, p);
    part = part + p;
  }
  if (left) part = part + (last = exp_of(last - most));
  float total = sum(part);
  vec scale = all(1.f / total);
  for (int64_t i = 0; i < whole; i += LANES) store(scores + i, load(scores + i) * scale);
  if (left) store_some(scores + whole, last * scale, left);
  return most[0] + logf(total);
}

void softmax(float *scores, int64_t rows, int64_t size) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) softmax_row(scores + r * size, size);
}

/* sampling -------------------------------------------------------------------------------------------------------- */

#define LEAST (-1e4f) /* instead of a log-prob of minus infinity, whose product with 0 is not a number */

enum {
  PART = 256,        /* tokens of a row that are summed or compared at once, a multiple of all vector widths */
  MAX_PARTS = 1024,
  RADIX_BITS = 11,   /* 3 digits of at most 11 bits order all floats */
  RADIX = 1 << RADIX_BITS
};

ALWAYS dvec dall(double x) { return x - (dvec){0}; }

ALWAYS dvec dfma_of(dvec a, dvec b, dvec c) {
#if defined(__AVX512F__)
  return (dvec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (dvec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

/* exp in fp64 of floats, as `exp_of`: a Taylor polynomial of degree 12 in |r| <= ln 2 / 2; 0 below -708. */
ALWAYS dvec dexp_of(fvec floats) {
  dvec x = __builtin_convertvector(floats, dvec);
  lvec zero = x < dall(-708.), nan = x != x;
  dvec y = (dvec)((zero & (lvec)dall(-708.)) | (~zero & (lvec)x));
  dvec shifted = dfma_of(y, dall(0x1.71547652b82fep0), dall(0x1.8p52)); /* the low bits are the integer n */
  dvec n = shifted - dall(0x1.8p52);
  dvec r = dfma_of(n, dall(-0x1.abc9e3b39803fp-56), dfma_of(n, dall(-0x1.62e42fefa39efp-1), y));
  dvec p = dall(1. / 479001600);
  static const double inverse[] = {1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720,
                                   1. / 120,      1. / 24,      1. / 6,      .5,         1.,        1.};
  for (int i = 0; i < 12; i++) p = dfma_of(p, r, dall(inverse[i]));
  lvec scale = ((lvec)shifted - (lvec)dall(0x1.8p52) + 1023) << 52;
  dvec result = p * (dvec)scale;
  return (dvec)((nan & (lvec)x) | (~nan & ~zero & (lvec)result));
}

/* exp of up to LANES / 2 log-probs from `p` on; 0 beyond `count`. */
ALWAYS dvec probs_of(const float *p, int64_t count) {
  if (count >= LANES / 2) return dexp_of(*(const fvec *)p);
  fvec some = (fvec){0} - INFINITY;
  for (int64_t i = 0; i < count; i++) some[i] = p[i];
  return dexp_of(some);
}

ALWAYS double dsum(dvec x) {
  double total = x[0];
  for (int i = 1; i < LANES / 2; i++) total += x[i];
  return total;
}

/* LANES values of a row from `p` on; minus infinity beyond `count`. */
ALWAYS vec load_or_infinity(const float *p, int64_t count) {
  if (count >= LANES) return load(p);
  vec x = all(-INFINITY);
  for (int64_t i = 0; i < count; i++) x[i] = p[i];
  return x;
}

/* Tokens of each of at most MAX_PARTS parts of a row. */
ALWAYS int64_t part_of(int64_t size) {
  int64_t part = (size + MAX_PARTS - 1) / MAX_PARTS;
  return part <= PART ? PART : (part + PART - 1) / PART * PART;
}

/* A row of logits, in bf16 if `narrow`, that `divides` tells to divide by the temperature. */
typedef struct {
  const void *logits;
  int64_t size;
  float temperature;
  int divides, narrow;
} Row;

ALWAYS vec load_scaled(const Row *row, int64_t i) {
  vec x = row->narrow ? load_as(row->logits, i, 1) : load_or_infinity((const float *)row->logits + i, row->size - i);
  return row->divides ? x / all(row->temperature) : x;
}

ALWAYS float find_largest(const Row *row) {
  vec high[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
  Row plain = {row->logits, row->size, 1.f, 0, row->narrow};
  int64_t i = 0;
  for (; i + 4 * LANES <= row->size; i += 4 * LANES)
    for (int part = 0; part < 4; part++) high[part] = larger(high[part], load_scaled(&plain, i + part * LANES));
  for (; i < row->size; i += LANES) high[0] = larger(high[0], load_scaled(&plain, i));
  return largest(larger(larger(high[0], high[1]), larger(high[2], high[3]))) / row->temperature;
}

/* The sum over a row of exp(x - most), in fp64; up to each of its parts in `ends`, if given. `moment`, if given, becomes
 * the sum of exp(x - most) (x - most). Prefetches the row that follows, which is read next and waits for memory. */
ALWAYS double sum_parts(const Row *row, float most, double *ends, double *moment) {
  int64_t part = part_of(row->size);
  double total = 0;
  for (int64_t start = 0; start < row->size; start += part) {
    int64_t end = start + part < row->size ? start + part : row->size;
    dvec sums[2] = {{0}, {0}};
    vec products = {0};
    for (int64_t i = start; i < end; i += LANES) {
      __builtin_prefetch(at_number(row->logits, row->size + i, row->narrow), 0, 2);
      vec below = load_scaled(row, i) - all(most), p = exp_of(below);
      fvec halves[2];
      memcpy(halves, &p, sizeof p);
      for (int half = 0; half < 2; half++) sums[half] += __builtin_convertvector(halves[half], dvec);
      if (moment) products = fma_of(p, larger(all(LEAST), below), products);
    }
    total += dsum(sums[0] + sums[1]);
    if (ends) *ends++ = total;
    if (moment) *moment += (double)sum(products);
  }
  return total;
}

/* The first token whose cumulative probability exceeds `noise`; one of probability 0 never. `ends`: see `sum_parts`. */
static int64_t invert_cdf(const float *row, float most, const double *ends, double noise, int64_t size) {
  int64_t part = part_of(size), of = 0, last = (size - 1) / part, chosen = 0;
  double target = noise * ends[last];
  if (target >= ends[last]) { /* by rounding: the next smaller number */
    int64_t bits;
    memcpy(&bits, ends + last, sizeof bits);
    bits -= bits > 0;
    memcpy(&target, &bits, sizeof target);
  }
  while (of < last && !(ends[of] > target)) of++;
  double sum = of ? ends[of - 1] : 0;
  for (int64_t i = of * part; i < size && i < (of + 1) * part; i += LANES) {
    vec p = exp_of(load_or_infinity(row + i, size - i) - all(most));
    for (int lane = 0; lane < LANES; lane++) {
      if (p[lane] > 0) chosen = i + lane; /* the last one of the part if its sum was rounded up */
      if ((sum += p[lane]) > target) return chosen;
    }
  }
  return chosen;
}

static int64_t first_of(const float *row, float value, int64_t size) {
  for (int64_t i = 0; i < size; i++)
    if (row[i] == value) return i;
  return 0;
}

/* log_softmax(x) = (x - most) - log(sum of exp(x - most)), where the exponentials are in fp32 and their sum is in fp64. */
void log_softmax(const float *x, float *out, int64_t rows, int64_t size) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * size;
    Row logits = {row, size, 1.f, 0, 0};
    float most = find_largest(&logits), log_sum = (float)log(sum_parts(&logits, most, NULL, NULL));
    ROW(i, size) STORE(out + r * size, i, size, (LOAD(row, i, size) - all(most)) - all(log_sum));
  }
}

/* A token of each row by `invert_cdf`, of negative noise the most likely one, and its log-prob by `log_softmax`. */
void sample(const float *x, const double *noise, int64_t *tokens, float *logprobs, int64_t rows, int64_t size) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * size;
    Row logits = {row, size, 1.f, 0, 0};
    double ends[MAX_PARTS];
    float most = find_largest(&logits), log_sum = (float)log(sum_parts(&logits, most, ends, NULL));
    int64_t token = noise[r] < 0 ? first_of(row, most, size) : invert_cdf(row, most, ends, noise[r], size);
    tokens[r] = token, logprobs[r] = (row[token] - most) - log_sum;
  }
}

/* Of rows of logits / temperature: the log-prob of a label, with the bits of `log_softmax`; the entropy; and the largest
 * one and log_sum of `log_softmax` (`norms`). */
ALWAYS void head_row(const Row *row, int64_t label, float *logprob, float *entropy, float *norms) {
  float most = find_largest(row);
  double moment = 0, total = sum_parts(row, most, NULL, &moment);
  float log_sum = (float)log(total);
  *logprob = (load_scaled(row, label / LANES * LANES)[label % LANES] - most) - log_sum;
  *entropy = (float)(log(total) - moment / total);
  norms[0] = most, norms[1] = log_sum;
}

void head_forward(const void *logits, const int64_t *labels, const float *temperature, float *logprobs,
                  float *entropies, float *norms, int64_t rows, int64_t size, int64_t narrow) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    int divides = temperature[r] != 1.f;
#define HEAD_ROW(narrow, divides) \
  do { \
    Row row = {at_number(logits, r * size, narrow), size, temperature[r], divides, narrow}; \
    head_row(&row, labels[r], logprobs + r, entropies + r, norms + 2 * r); \
  } while (0)
    if (divides) FOR_TYPE(narrow, HEAD_ROW(NARROW, 1));
    else FOR_TYPE(narrow, HEAD_ROW(NARROW, 0));
  }
}

/* With l = log_softmax(logits / temperature), p = exp(l) and the entropy H, the gradients of the logits:
 * (onehot - p) of_logprob / temperature - p (l + H) of_entropy / temperature. */
typedef struct {
  Row row;
  vec most, log_sum, entropy, of_logprob, of_entropy; /* the last two divided by the temperature */
  int has_entropy;
} HeadRow;

/* All but the term of the label. */
ALWAYS vec head_gradient(const HeadRow *h, int64_t i) {
  vec logprob = (load_scaled(&h->row, i) - h->most) - h->log_sum, p = exp_of(logprob), change = p * h->of_logprob;
  return -(h->has_entropy ? fma_of(p * h->of_entropy, larger(all(LEAST), logprob) + h->entropy, change) : change);
}

/* `grad` may be the logits. */
ALWAYS void head_row_backward(const HeadRow *h, int64_t label, void *grad) {
  int64_t size = h->row.size, at = label / LANES * LANES;
  vec of_label = head_gradient(h, at);
  of_label[label % LANES] += h->of_logprob[0];
  ROW(i, size) STORE_AS(grad, i, size, head_gradient(h, i), h->row.narrow);
  STORE_AS(grad, at, size, of_label, h->row.narrow);
}

void head_backward(const void *logits, const int64_t *labels, const float *temperature, const float *norms,
                   const float *entropies, const float *of_logprob, const float *of_entropy, void *grad, int64_t rows,
                   int64_t size, int64_t narrow) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    float t = temperature[r];
    int divides = t != 1.f;
#define HEAD_ROW_BACKWARD(narrow, divides) \
  do { \
    HeadRow h = {{at_number(logits, r * size, narrow), size, t, divides, narrow}, all(norms[2 * r]), \
                 all(norms[2 * r + 1]), all(entropies[r]), all(of_logprob[r] / t), \
                 all(of_entropy ? of_entropy[r] / t : 0.f), of_entropy != NULL}; \
    head_row_backward(&h, labels[r], at_number(grad, r * size, narrow)); \
  } while (0)
    if (divides) FOR_TYPE(narrow, HEAD_ROW_BACKWARD(NARROW, 1));
    else FOR_TYPE(narrow, HEAD_ROW_BACKWARD(NARROW, 0));
  }
}

/* The `num` largest values of each row and their tokens, in descending order; of equal ones the first tokens. */
void top(const float *x, int64_t num, float *values, int64_t *tokens, int64_t rows, int64_t size) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * size;
    float *best = values + r * num;
    int64_t *ids = tokens + r * num, held = 0;
    for (int64_t start = 0; start < size; start += PART) {
      int64_t end = start + PART < size ? start + PART : size;
      if (held == num) {
        vec high = all(-INFINITY);
        for (int64_t i = start; i < end; i += LANES)
          high = larger(high, i + LANES <= size ? load(row + i) : load(row + size - LANES));
        if (!(largest(high) > best[num - 1])) continue;
      }
      for (int64_t i = start; i < end; i++) {
        if (held == num && !(row[i] > best[num - 1])) continue;
        int64_t at = held < num ? held++ : num - 1;
        for (; at > 0 && row[i] > best[at - 1]; at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
        best[at] = row[i], ids[at] = i;
      }
    }
  }
}

/* Bits of floats that, as unsigned integers, are in descending order of the floats. */
ALWAYS ivec descending_of(vec x) {
  ivec bits = (ivec)x, negative = bits < 0;
  return (negative & bits) | (~negative & ~bits & 0x7fffffff);
}

ALWAYS int any_of(ivec x) {
  int64_t words[sizeof(ivec) / 8], any = 0;
  memcpy(words, &x, sizeof x);
  for (size_t i = 0; i < sizeof(ivec) / 8; i++) any |= words[i];
  return any != 0;
}

/* Set all but the largest values of a row to minus infinity: a value is kept while the weights of those before it, in
 * descending order, sum to less than `limit`; of equal values the first tokens are kept. The weight of a token is its
 * probability relative to all of the row (`by_mass`), or else 1. Radix selection: one digit of the threshold at a time. */
static void keep_largest(float *row, double limit, int by_mass, int64_t size) {
  static const int shifts[] = {32 - RADIX_BITS, 32 - 2 * RADIX_BITS, 0};
  double before = 0, total = 1;
  uint32_t threshold = 0, known = 0; /* bits of the threshold found so far, and the mask of these */
  int64_t equal = 0;
  for (int digit = 0; digit < 3; digit++) {
    double weights[RADIX] = {0};
    int32_t counts[RADIX] = {0};
    uint32_t range = digit < 2 ? RADIX - 1 : (1u << (32 - 2 * RADIX_BITS)) - 1;
    for (int64_t i = 0; i < size; i += LANES) {
      int64_t num = size - i < LANES ? size - i : LANES;
      vec x = num == LANES ? load(row + i) : all(-INFINITY);
      for (int64_t lane = 0; lane < num && num < LANES; lane++) x[lane] = row[i + lane];
      ivec bits = descending_of(x), wanted = ((bits & (int32_t)known) == (int32_t)threshold) & (x > all(-INFINITY));
      if (!any_of(wanted)) continue;
      dvec probs[2] = {dall(1.), dall(1.)};
      if (by_mass) probs[0] = probs_of(row + i, num);
      if (by_mass) probs[1] = probs_of(row + i + LANES / 2, num - LANES / 2);
      for (int64_t lane = 0; lane < num; lane++) {
        if (!wanted[lane]) continue;
        uint32_t bucket = (uint32_t)bits[lane] >> shifts[digit] & range;
        weights[bucket] += ((const double *)probs)[lane];
        counts[bucket]++;
      }
    }
    if (!digit && by_mass) {
      total = 0;
      for (int64_t i = 0; i < RADIX; i++) total += weights[i];
      limit *= total;
    }
    uint32_t last = 0; /* the bucket in which the sum reaches the limit, or else the last one in use */
    int is_first = 1;
    for (uint32_t i = 0; i <= range; i++) {
      if (!counts[i]) continue;
      if (!is_first && before + weights[last] >= limit) break;
      if (!is_first) before += weights[last];
      last = i, is_first = 0;
    }
    threshold |= last << shifts[digit];
    known |= range << shifts[digit];
    if (digit == 2) { /* equal values have equal weights */
      double each = weights[last] / counts[last];
      for (equal = 1; equal < counts[last] && before + (double)equal * each < limit;) equal++;
    }
  }
  float last_kept;
  int32_t bits = (int32_t)threshold < 0 ? (int32_t)threshold : ~(int32_t)threshold & 0x7fffffff;
  memcpy(&last_kept, &bits, sizeof bits);
  for (int64_t i = 0; i < size; i++) row[i] = row[i] >= last_kept ? row[i] : -INFINITY;
  for (int64_t i = 0; i < size; i++)
    if (row[i] == last_kept && equal-- <= 0) row[i] = -INFINITY;
}

/* Filter log-probs in place by min_p (the logarithm), top_k (0: all) and top_p (1: all). */
void filter_rows(float *logprobs, const float *log_min_p, const int64_t *top_k, const float *top_p, int64_t rows,
                 int64_t size) {
  PARALLEL(rows * size > MANY)
  for (int64_t r = 0; r < rows; r++) {
    float *row = logprobs + r * size;
    if (log_min_p[r] > -INFINITY) {
      vec high = all(row[0]);
      int64_t i = 0;
      for (; i + LANES <= size; i += LANES) high = larger(high, load(row + i));
      float least = largest(high);
      for (; i < size; i++) least = row[i] > least ? row[i] : least;
      least += log_min_p[r];
      for (i = 0; i < size; i++) row[i] = row[i] >= least ? row[i] : -INFINITY;
    }
    if (top_k[r] > 0 && top_k[r] < size) keep_largest(row, (double)top_k[r], 0, size);
    if (top_p[r] < 1) keep_largest(row, top_p[r], 1, size);
  }
}


/* matrix products ------------------------------------------------------------------------------------------------- */

/* Element format of a packed weight. */
enum {
  FP32,
  BF16, /* widened to fp32 before multiplication */
  DOTS, /* bf16 in pairs of inputs for dot products by AVX512_BF16 or AMX; activations are rounded to bf16 as well */
  INT8  /* weights and activations in 8 bits, see `quantize_group` */
};

enum { STEP = 32 }; /* DOTS: inputs are zero-padded to a multiple, those of a tile of AMX */

ALWAYS int64_t whole_steps(int64_t inputs) { return (inputs + STEP - 1) / STEP * STEP; }

/* Elements (INT8: bytes) of a packed weight per output. */
int64_t quantized_size(int64_t inputs, int64_t is_weight);
int64_t packed_inputs(int64_t inputs, int64_t format) {
  return format == INT8 ? quantized_size(inputs, 1) : format == DOTS ? whole_steps(inputs) : inputs;
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
  __builtin_shufflevector(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n, 8 ^ n, 9 ^ n, 10 ^ n, 11 ^ n, \
                          12 ^ n, 13 ^ n, 14 ^ n, 15 ^ n)
#else
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#define SWAPPED(x, n) __builtin_shufflevector(x, x, 0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n)
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
    *(bvec *)(out + i * LANES) = __builtin_convertvector(bits, bvec);
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
#define LOW1(x, y) __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(x, y) __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW2(x, y) __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(x, y) __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW4(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW8(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(x, y) __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
  SWAP(a, b, 1, LOW1, HIGH1)
  SWAP(b, a, 2, LOW2, HIGH2)
  SWAP(a, b, 4, LOW4, HIGH4)
  SWAP(b, transposed, 8, LOW8, HIGH8)
#else
#define LOW1(x, y) __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14)
#define HIGH1(x, y) __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15)
#define LOW2(x, y) __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2(x, y) __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW4(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH4(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15)
  SWAP(a, b, 1, LOW1, HIGH1)
  SWAP(b, a, 2, LOW2, HIGH2)
  SWAP(a, transposed, 4, LOW4, HIGH4)
#endif
}

/* Pack LANES outputs at `place` of a panel, `count` of them present: for each group [inputs / 4][PANEL][4], as numbers
 * from 0 to 255 with zero at 128, and PANEL scales. */
static void pack_int8(const float *weight, int64_t inputs, int64_t count, char *panel, int64_t place) {
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
      for (int i = 0; i < LANES; i++) store(to + (k + i) * PANEL, (vec)((ivec)columns[i] ^ (int32_t)0x80808080));
    }
  }
}

/* Copy words of LANES outputs between rows of `words` words, from index `row`, and a panel [words][PANEL], from index
 * `place`; returns how many of each: all but those after the last whole vector. A word is an fp32 number, two bf16
 * numbers, or a bf16 number (`narrow`). */
ALWAYS int64_t copy_words(void *rows, int64_t row, int64_t words, void *panel, int64_t place, int unpacks, int narrow) {
  vec columns[LANES];
  int64_t k = 0;
  for (; k + LANES <= words; k += LANES) {
    if (unpacks) transpose(panel, place + k * PANEL, PANEL, 0, columns, narrow);
    else transpose(rows, row + k, words, 0, columns, narrow);
    for (int i = 0; i < LANES; i++)
      store_as(unpacks ? rows : panel, unpacks ? row + i * words + k : place + (k + i) * PANEL, columns[i], narrow);
  }
  return k;
}

/* Pack a weight [outputs, inputs] into panels of PANEL outputs, each [inputs][PANEL] (DOTS: [inputs / 2][PANEL][2], see
 * STEP; INT8: see `pack_int8`, from fp32), zero-padded after the last output; or the reverse, except for INT8. */
ALWAYS void copy_panels(void *weight, void *packed, int64_t outputs, int64_t inputs, int64_t format, int64_t kind,
                        int unpacks) {
  int64_t beside = format == DOTS ? 2 : 1;
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
                                p * PANEL * wide / beside + place, unpacks, format == BF16);
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

/* Prefetch `count` bytes, at most four cache lines. */
ALWAYS void fetch_lines(const char *from, int64_t count) {
  __builtin_prefetch(from, 0, 2);
  if (count > 64) __builtin_prefetch(from + 64, 0, 2);
  if (count > 128) __builtin_prefetch(from + 128, 0, 2);
  if (count > 192) __builtin_prefetch(from + 192, 0, 2);
}

/* What to prefetch. */
typedef struct {
  const char *from;
  int64_t bytes;
} Memory;

/* What to prefetch: with `end`, the memory a TURN ahead of the weights that are read, which goes on with `next` at `end`.
 * Without it, all of `next`: for many rows, which take longer for their products than the memory for the weights. */
typedef struct {
  Memory next;
  const char *end;
} Following;

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
    for (int64_t k = 0; k < size; k++) {
      vec w[PANEL / LANES];
      fetch_lines(ahead + k * step, step);
      for (int c = 0; c < PANEL / LANES; c++) w[c] = load_as(panel, k * PANEL + c * LANES, format == BF16);
      for (int r = 0; r < num; r++)
        for (int c = 0; c < PANEL / LANES; c++)
          sums[r][c] = fma_of(all(((const float *)x)[r * inputs + k]), w[c], sums[r][c]);
    }
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

/* sum + the four products of each lane; w has unsigned bytes, x signed ones. */
ALWAYS ivec dot4(ivec sum, ivec w, ivec x) {
#if defined(__AVX512VNNI__) && LANES == 16
  return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && LANES == 8
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
  ivec even = w & 0x00ff00ff, odd = (ivec)((uvec)w >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__) && LANES == 16 /* madd: two products of 16 bits per lane */
  __m512i high = _mm512_srai_epi16((__m512i)x, 8), low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
  return sum + (ivec)_mm512_madd_epi16((__m512i)even, low) + (ivec)_mm512_madd_epi16((__m512i)odd, high);
#elif defined(__AVX2__) && LANES == 8
  __m256i high = _mm256_srai_epi16((__m256i)x, 8), low = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
  return sum + (ivec)_mm256_madd_epi16((__m256i)even, low) + (ivec)_mm256_madd_epi16((__m256i)odd, high);
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
        sums[r][c] = -128 * ((const int32_t *)(x + r * row + padded))[groups + g] - (ivec){0};
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

/* Prefetch `bytes` bytes; returns where they end. */
ALWAYS const char *fetch_on(const char *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  return from + bytes;
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
      for (int64_t i = 0; i < size * PANEL; i += LANES) store(wide + i, load_as(weights, i, 1));
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

/* Threads of a parallel region that wait for each other. OpenMP's barrier either waits without a pause, and takes the core
 * from the very thread that it waits for when another program runs there, or it soon sleeps, and a decode step has hundreds
 * of barriers whose threads arrive within microseconds. */
typedef struct {
  int32_t arrived, round, asleep;
} Barrier;

/* The panels of a product that are left of those in a place: 16 bits for the product, 24 each for the first and the end. */
typedef struct {
  uint64_t left;
  char apart[56]; /* from those of other threads, which would wait for the cache line */
} Place;

/* With more threads than places none computes the panels of another one, which keeps a single panel. */
enum { MOST_PLACES = 32, LEAST_LEFT = 2 };

/* The team as one of its threads has it: `ahead` are the weights of its next product, which it prefetches while it waits. */
typedef struct {
  Barrier *barrier;
  Place *places;
  uint64_t product; /* the number of the last one */
  Memory ahead;
} Team;

enum { WHILE_WAITING = 1 << 17 }; /* at most so many bytes */

#ifndef SPINS
#define SPINS 1000 /* times that a thread looks for the others before it lets other programs run */
#define YIELDS_NS 1000000 /* nanoseconds for which it does so before it sleeps */
#endif

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Wait until `round` has ended: at first at full speed, then letting other programs run, and at last asleep. */
static void wait_for_round(Team *team, int32_t round) {
  Barrier *b = team->barrier;
#define HAS_ENDED (__atomic_load_n(&b->round, __ATOMIC_ACQUIRE) != round)
  for (int i = 0; i < SPINS; i++) {
    if (HAS_ENDED) return;
    if (team->ahead.bytes > 0) {
      for (int64_t byte = 0; byte < 512; byte += 64) __builtin_prefetch(team->ahead.from + byte, 0, 2);
      team->ahead.from += 512, team->ahead.bytes -= 512;
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int64_t end = nanoseconds() + YIELDS_NS; nanoseconds() < end; sched_yield())
    if (HAS_ENDED) return;
#ifdef __linux__
  __atomic_add_fetch(&b->asleep, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&b->round, __ATOMIC_SEQ_CST) == round)
    syscall(SYS_futex, &b->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
  __atomic_sub_fetch(&b->asleep, 1, __ATOMIC_SEQ_CST);
#else
  while (!HAS_ENDED) sched_yield();
#endif
}

/* A barrier of all threads of a parallel region; none for NULL, where the region ends anyway. */
static void wait_for_team(Team *team) {
  if (!team || THREADS == 1) return;
  Barrier *b = team->barrier;
  int32_t round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) < THREADS) {
    wait_for_round(team, round);
    return;
  }
  b->arrived = 0;
  __atomic_store_n(&b->round, round + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
  if (__atomic_load_n(&b->asleep, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &b->round, FUTEX_WAKE_PRIVATE, THREADS, NULL, NULL, 0);
#endif
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
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
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

/* LoRA deltas: y += scale B (A x) for the rows of each adapter ------------------------------------------------------ */

enum { DELTA_ROWS = 4, MAX_RANK = 256, VECS = 2 };

typedef struct {
  int64_t rank, width, block;    /* width: rank in whole vectors; inputs per partial sum of B (A x), see `panel_product` */
  double scale;
  const float *const *matrices;  /* per place: A as [inputs][width] and B as [rank][outputs], or NULL */
} Delta;

/* Rows that have the same adapter; only int64_t, as `deltas.py` writes them. */
typedef struct {
  int64_t delta, num, rows[DELTA_ROWS];
} DeltaRows;

int64_t delta_struct_size(void) { return sizeof(Delta); }
int64_t max_rank(void) { return MAX_RANK; }

/* sums[r] = inputs of row r times `vecs` vectors of outputs, in the order of sums of `panel_product`. */
ALWAYS void delta_tile(const float *const *x, const float *w, int64_t size, int64_t width, int64_t block,
                       vec sums[DELTA_ROWS][VECS], int num, int vecs) {
  for (int64_t start = 0; start < size; start += block) {
    int64_t end = size - start < block ? size : start + block;
    vec part[DELTA_ROWS][VECS];
    for (int r = 0; r < num; r++)
      for (int c = 0; c < vecs; c++) part[r][c] = all(0.f);
    for (int64_t k = start; k < end; k++)
      for (int c = 0; c < vecs; c++) {
        vec column = load(w + k * width + c * LANES);
        for (int r = 0; r < num; r++) part[r][c] = fma_of(all(x[r][k]), column, part[r][c]);
      }
    for (int r = 0; r < num; r++)
      for (int c = 0; c < vecs; c++) sums[r][c] = start ? sums[r][c] + part[r][c] : part[r][c];
  }
}

ALWAYS void delta_rows(const Delta *d, const float *a, const float *b, const float *const *x, int64_t inputs,
                       int64_t block, float *const *y, int64_t outputs, int num) {
  float low[DELTA_ROWS][MAX_RANK];
  const float *lows[DELTA_ROWS] = {low[0], low[1], low[2], low[3]};
  int64_t padded = (outputs + LANES - 1) / LANES * LANES;
  vec sums[DELTA_ROWS][VECS];
  for (int64_t i = 0; i < d->width; i += VECS * LANES) {
    int both = i + VECS * LANES <= d->width;
    if (both) delta_tile(x, a + i, inputs, d->width, block, sums, num, VECS);
    else delta_tile(x, a + i, inputs, d->width, block, sums, num, 1);
    for (int r = 0; r < num; r++)
      for (int c = 0; c <= both; c++) store(low[r] + i + c * LANES, sums[r][c]);
  }
  for (int64_t i = 0; i < padded; i += VECS * LANES) {
    int both = i + VECS * LANES <= padded;
    if (both) delta_tile(lows, b + i, d->rank, padded, d->block, sums, num, VECS);
    else delta_tile(lows, b + i, d->rank, padded, d->block, sums, num, 1);
    for (int r = 0; r < num; r++)
      for (int c = 0; c <= both; c++) {
        int64_t at = i + c * LANES;
        STORE(y[r], at, outputs, LOAD(y[r], at, outputs) + sums[r][c] * all((float)d->scale));
      }
  }
}

/* Add the deltas of place `place` to `outputs` columns of y, which has `stride` elements per row. `block` is the number
 * of inputs per partial sum of A x. */
static void change_rows(Team *team, const Delta *deltas, const DeltaRows *items, int64_t num_items, int64_t place,
                        const float *x, int64_t inputs, int64_t block, float *y, int64_t stride, int64_t outputs) {
  SHARED_FOR
  for (int64_t i = 0; i < num_items; i++) {
    const DeltaRows *item = items + i;
    const Delta *d = deltas + item->delta;
    const float *a = d->matrices[2 * place], *b = d->matrices[2 * place + 1];
    const float *from[DELTA_ROWS];
    float *to[DELTA_ROWS];
    if (!a) continue;
    for (int64_t r = 0; r < item->num; r++) from[r] = x + item->rows[r] * inputs, to[r] = y + item->rows[r] * stride;
    switch (item->num) {
#define DELTA_CASE(num) \
  case num: delta_rows(d, a, b, from, inputs, block, to, outputs, num); break;
      DELTA_CASE(1)
      DELTA_CASE(2)
      DELTA_CASE(3)
      DELTA_CASE(4)
    }
  }
  wait_for_team(team);
}

void add_deltas(const Delta *deltas, const DeltaRows *items, int64_t num_items, int64_t place, const float *x,
                int64_t inputs, int64_t block, float *y, int64_t stride, int64_t outputs, int64_t threads) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  change_rows(NULL, deltas, items, num_items, place, x, inputs, block, y, stride, outputs);
}

/* causal attention of many queries -------------------------------------------------------------------------------- */

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
#ifdef _OPENMP
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
#endif
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
#ifdef _OPENMP
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
#endif
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

/* decode step: one new token per sequence ------------------------------------------------------------------------ */

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

/* Struct sizes, which `cpu.py` compares with those of its ctypes structures. */
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
  store(out, __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
  store(out + LANES, __builtin_shufflevector(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
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
static int64_t lay_out(Activations *a, const Shape *s, float *work, int64_t widest, int64_t rows) {
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
  return lay_out(&unused, s, NULL, widest, rows);
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
  lay_out(&all_rows, s, work, widest, rows);
#ifdef _OPENMP
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
#endif
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
