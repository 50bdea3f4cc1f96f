/* AMX in C, as Intel documents the instructions, to test `kernels.c` on CPUs without AMX: compile it with this file
 * included and the macros of AMX defined. The first invalid use is kept, see `emulation_error`. */
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC optimize("O2")

enum { NUM_TILES = 8, TILE_ROWS = 16, ROW_BYTES = 64, REGIONS = 8 };

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} TileShapes;

static __thread TileShapes shapes;
static __thread uint8_t tile_data[NUM_TILES][TILE_ROWS][ROW_BYTES];
static char error[200];
static int is_refused, is_wrong, num_regions;
static int64_t num_products, num_configured; /* threads that have not released their tiles */
static struct { const char *base; int64_t size; } regions[REGIONS];

/* The first invalid use since the last call. */
const char *emulation_error(void) {
  static char last[sizeof error];
  memcpy(last, error, sizeof error);
  error[0] = 0;
  return last;
}

int64_t emulated_products(void) { return num_products; }
int64_t configured_threads(void) { return num_configured; }

/* Whether Linux refuses permission, and whether products are wrong. */
void emulate(int64_t refused, int64_t wrong) { is_refused = (int)refused, is_wrong = (int)wrong; }

/* Memory that tiles may be loaded from and stored to, besides the stack; none: all. */
void watch(const void *base, int64_t size) {
  if (!size) num_regions = 0;
  else if (num_regions < REGIONS) regions[num_regions].base = base, regions[num_regions++].size = size;
}

static void fail(const char *what, int tile) {
  if (!error[0]) snprintf(error, sizeof error, "%s, tile %d", what, tile);
}

static int is_allowed(const char *from, int64_t size) {
  char here;
  int64_t away = from > &here ? from - &here : &here - from;
  if (!num_regions || away < 1 << 16) return 1;
  for (int i = 0; i < num_regions; i++)
    if (from >= regions[i].base && from + size <= regions[i].base + regions[i].size) return 1;
  return 0;
}

static int is_ready(int tile) {
  int ready = shapes.palette == 1 && tile >= 0 && tile < NUM_TILES && shapes.rows[tile] && shapes.bytes[tile];
  if (!ready) fail("tile is not configured", tile);
  return ready;
}

static void emulate_loadconfig(const void *config) {
  if (!shapes.palette) __atomic_add_fetch(&num_configured, 1, __ATOMIC_SEQ_CST);
  memcpy(&shapes, config, sizeof shapes);
  memset(tile_data, 0, sizeof tile_data);
  if (shapes.palette != 1 || shapes.start) fail("palette must be 1", -1);
  for (int i = 0; i < 14; i++)
    if (shapes.reserved[i]) fail("reserved bytes of the configuration", i);
  for (int i = 0; i < 16; i++)
    if (shapes.rows[i] > (i < NUM_TILES ? TILE_ROWS : 0) || shapes.bytes[i] > (i < NUM_TILES ? ROW_BYTES : 0) || shapes.bytes[i] % 4)
      fail("shape of the configuration", i);
}

static void emulate_release(void) {
  if (shapes.palette) __atomic_sub_fetch(&num_configured, 1, __ATOMIC_SEQ_CST);
  memset(&shapes, 0, sizeof shapes);
  memset(tile_data, 0, sizeof tile_data);
}

static void emulate_zero(int tile) {
  if (is_ready(tile)) memset(tile_data[tile], 0, sizeof tile_data[tile]);
}

static void emulate_load(int tile, const void *base, int64_t stride) {
  if (!is_ready(tile)) return;
  memset(tile_data[tile], 0, sizeof tile_data[tile]);
  for (int r = 0; r < shapes.rows[tile]; r++) {
    const char *from = (const char *)base + r * stride;
    if (!is_allowed(from, shapes.bytes[tile])) fail("load beyond the memory of the product", tile);
    else memcpy(tile_data[tile][r], from, shapes.bytes[tile]);
  }
}

static void emulate_store(int tile, void *base, int64_t stride) {
  if (!is_ready(tile)) return;
  for (int r = 0; r < shapes.rows[tile]; r++) {
    char *to = (char *)base + r * stride;
    if (!is_allowed(to, shapes.bytes[tile])) fail("store beyond the memory of the product", tile);
    else memcpy(to, tile_data[tile][r], shapes.bytes[tile]);
  }
}

static int can_multiply(int sum, int a, int b) {
  if (!is_ready(sum) || !is_ready(a) || !is_ready(b)) return 0;
  if (sum == a || sum == b || a == b) fail("operands must be different tiles", sum);
  if (shapes.rows[sum] != shapes.rows[a] || shapes.bytes[sum] != shapes.bytes[b] || shapes.bytes[a] != 4 * shapes.rows[b])
    fail("shapes of operands do not fit", sum);
  __atomic_add_fetch(&num_products, 1, __ATOMIC_RELAXED);
  return !error[0];
}

/* Denormal numbers count as zero, and results are flushed. */
static inline float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

static inline float widened(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return flushed(wide);
}

static void emulate_dpbf16ps(int sum, int a, int b) {
  if (!can_multiply(sum, a, b)) return;
  int columns = shapes.bytes[sum] / 4;
  for (int m = 0; m < shapes.rows[sum]; m++) {
    const uint16_t *left = (const uint16_t *)tile_data[a][m];
    float parts[2 * ROW_BYTES / 4] = {0}, *to = (float *)tile_data[sum][m];
    for (int k = 0; k < shapes.bytes[a] / 4; k++)
      for (int n = 0; n < 2 * columns; n++) {
        float right = widened(((const uint16_t *)tile_data[b][k])[n]);
        parts[n] = flushed(fmaf(widened(left[2 * k + n % 2]), right, parts[n]));
      }
    for (int n = 0; n < columns; n++) to[n] = flushed(to[n] + flushed(parts[2 * n] + parts[2 * n + 1])) + is_wrong;
  }
}

static void emulate_dpbsud(int sum, int a, int b) {
  if (!can_multiply(sum, a, b)) return;
  for (int m = 0; m < shapes.rows[sum]; m++)
    for (int k = 0; k < shapes.bytes[a] / 4; k++)
      for (int n = 0; n < shapes.bytes[sum] / 4; n++)
        for (int i = 0; i < 4; i++)
          ((int32_t *)tile_data[sum][m])[n] += (int8_t)tile_data[a][m][4 * k + i] * (int32_t)tile_data[b][k][4 * n + i];
}

#pragma GCC pop_options

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulate_loadconfig
#define _tile_release emulate_release
#define _tile_loadd emulate_load
#define _tile_stored emulate_store
#define _tile_zero emulate_zero
#define _tile_dpbf16ps emulate_dpbf16ps
#define _tile_dpbsud emulate_dpbsud
static long emulated_permission(long request, long feature) {
  return request == 0x1023 && feature == 18 && !is_refused ? 0 : -1;
}
#define FIRST_TWO(first, second, ...) first, second
#define syscall(number, ...) \
  ((number) == SYS_arch_prctl ? emulated_permission(FIRST_TWO(__VA_ARGS__, 0)) : syscall(number, __VA_ARGS__))
