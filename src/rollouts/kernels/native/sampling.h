/* Log-probs and sampling over a vocabulary, and the gradient of the log-probs of labels. */
#pragma once

#include <math.h>

#include "threads.h"
#include "vectors.h"

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
