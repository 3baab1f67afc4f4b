// Quantization on a CPU: codes and scales, or GEMM operands, along rows or down columns. Called through ctypes.

#include "lanes.h"
#include "pages.h"

#ifdef __AVX512F__
#include "quantize_wide.h"
#endif

namespace {

Kernel choose(const Job& job, bool column) {
    const size_t count = size_t(job.rows) * size_t(job.columns);
    prefer_large_pages(job.operand, 2 * count);
    prefer_large_pages(job.codes, job.element == kE2m1 ? count / 2 : count);
    return choose_kernel(job, column);
}

}  // namespace

extern "C" {

void nvfp4_quantize(const Job* job, int column) {
    const Kernel kernel = choose(*job, column);
    for_each_region(*job, column ? column_region(*job) : kRowRegion, [&](const Region& region) { kernel(*job, region); });
}

// Both directions of one x: each region is read from memory once and from the cache afterwards.
void nvfp4_quantize_both(const Job* rows, const Job* columns) {
    const Kernel along_rows = choose(*rows, false), down_columns = choose(*columns, true);
    for_each_region(*rows, column_region(*columns), [&](const Region& region) {
        along_rows(*rows, region);
        down_columns(*columns, region);
    });
}

}  // extern "C"
