/* What to prefetch, and prefetching. */
#pragma once

#include "vectors.h"

/* Prefetch `count` bytes, at most four cache lines. */
ALWAYS void fetch_lines(const char *from, int64_t count) {
  __builtin_prefetch(from, 0, 2);
  if (count > 64) __builtin_prefetch(from + 64, 0, 2);
  if (count > 128) __builtin_prefetch(from + 128, 0, 2);
  if (count > 192) __builtin_prefetch(from + 192, 0, 2);
}

/* Prefetch from `count` bytes at an even pace: those beside input i, if inputs of `bytes` bytes each are read meanwhile. */
ALWAYS void fetch_share(const char *from, int64_t count, int64_t i, int64_t bytes) {
  int64_t start = i * bytes, most = bytes < 64 ? 64 : bytes, left = count - start;
  if (start % 64 == 0 && (i == 0 || left > 0)) fetch_lines(from + start, left < most ? left : most);
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

/* Prefetch `bytes` bytes; returns where they end. */
ALWAYS const char *fetch_on(const char *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  return from + bytes;
}
