/* Row-wise layers, forward and backward: RMSNorm, RoPE, SwiGLU, softmax. */
#pragma once

#include <math.h>

#include "threads.h"
#include "vectors.h"

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
