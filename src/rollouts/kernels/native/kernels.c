/* fp32, bf16 and int8 kernels for CPUs: this file includes them all, and is compiled at once.
 *
 * Batch invariance: every row is computed independently and in a fixed order of operations, so its bits depend neither
 * on the other rows nor on the number of threads. Plain C with vector extensions (gcc 11, clang). `__init__.py` compiles
 * it; contractions are off (-ffp-contract=off), so an expression rounds the same way wherever it is inlined.
 */
#include "attention_backward.h"
#include "decode.h"
#include "layers.h"
#include "sampling.h"
