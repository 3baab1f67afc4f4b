// Largest magnitudes of tensors, rows and chunks of 128, and the Hadamard transform by itself. Called through ctypes.

#include "lanes.h"

#include <atomic>

namespace {

// Largest magnitude of columns [first, last) of rows [row, last_row), as bits.
template <typename T>
uint32_t largest_bits(const Job& job, int64_t row, int64_t last_row, int64_t first, int64_t last) {
    uint32_t largest = 0;
    for (; row < last_row; ++row) {
        const T* x = static_cast<const T*>(job.x) + row * job.stride;
        uint32_t bits = 0;
        for (int64_t column = first; column < last; ++column) bits = larger(bits, size_bits(x[column]));
        largest = larger(largest, bits);
    }
    return largest;
}

// Of a tensor or of each of its rows.
template <typename T>
void amax_rows(const Job& job, float* out) {
    uint32_t largest = 0;
#pragma omp parallel for num_threads(job.threads) schedule(static) reduction(max : largest)
    for (int64_t row = 0; row < job.rows; ++row) {
        const uint32_t bits = largest_bits<T>(job, row, row + 1, 0, job.columns);
        if (job.outer == kRowScale) out[row] = quiet(size_value(bits, T{}));
        largest = larger(largest, bits);
    }
    if (job.outer != kRowScale) out[0] = quiet(size_value(largest, T{}));
}

// Of 1x128 chunks or 128x128 tiles, out [rows, amax_stride]; a tile's maximum is repeated over its rows.
template <typename T>
void amax_row_chunks(const Job& job, float* out) {
    const int64_t height = job.is_tile ? kChunk : 1, bands = (job.rows + height - 1) / height;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t band = 0; band < bands; ++band)
        for (int64_t first = 0; first < job.columns; first += kChunk) {
            const int64_t last_row = std::min(job.rows, (band + 1) * height), last = std::min(job.columns, first + kChunk);
            const uint32_t bits = largest_bits<T>(job, band * height, last_row, first, last);
            for (int64_t row = band * height; row < last_row; ++row)
                out[row * job.amax_stride + first / kChunk] = quiet(size_value(bits, T{}));
        }
}

#ifdef __AVX512F__

// Largest bits of a vector's lanes.
uint32_t largest_lane(Words bits) {
    uint32_t largest = 0;
    for (int lane = 0; lane < kWide; ++lane) largest = larger(largest, uint32_t(bits[lane]));
    return largest;
}

// The same down the columns, after a Hadamard transform if asked: of the tensor, or out [columns, amax_stride].
template <typename T>
void amax_down_columns(const Job& job, float* out) {
    uint32_t largest = 0;
    const int64_t width = job.is_tile ? kChunk : kLanes;  // a tile's columns are one thread's work
    const int64_t strips = (job.columns + width - 1) / width, bands = (job.rows + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(job.threads) schedule(static) reduction(max : largest)
    for (int64_t unit = 0; unit < strips * bands; ++unit) {
        const int64_t first = unit % strips * width, row = unit / strips * kChunk, end = std::min(job.columns, first + width);
        const int last = int(std::min<int64_t>(kChunk, job.rows - row)), height = std::max(kBlock, int(job.hadamard));
        uint32_t whole = 0;
        for (int64_t column = first; column < end; column += kLanes) {
            Words bits[2] = {};
            const int lanes = int(std::min<int64_t>(kLanes, end - column));
            for (int line = 0; line < last; line += height) {
                const int count = std::min(height, last - line);
                column_maxima<T>(job, row + line, count, column, lanes, bits);
            }
            whole = larger(whole, largest_lane(larger(bits[0], bits[1])));
            if (job.outer != kChunkScale || job.is_tile) continue;
            for (int half = 0; half < 2; ++half)
                for (int lane = 0; lane < kWide; ++lane)
                    if (const int at = column_of(job, half, lane); at < lanes)
                        out[(column + at) * job.amax_stride + row / kChunk] = quiet(as_float(bits[half][lane]));
        }
        largest = larger(largest, whole);
        if (job.outer == kChunkScale && job.is_tile)
            for (int64_t column = first; column < end; ++column)
                out[column * job.amax_stride + row / kChunk] = quiet(as_float(whole));
    }
    if (job.outer != kChunkScale) out[0] = quiet(as_float(largest));
}

void transform(const Job& job) {
    const int64_t strips = (job.columns + kLanes - 1) / kLanes;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t unit = 0; unit < strips * (job.rows / job.hadamard); ++unit) {
        Strip v;
        const int64_t column = unit % strips * kLanes, row = unit / strips * job.hadamard;
        const int lanes = int(std::min<int64_t>(kLanes, job.columns - column));
        load_columns(job, row, job.hadamard, column, lanes, v);
        for (int half = 0; half < 2; ++half)
            for (int lane = 0; lane < kWide; ++lane)
                if (const int at = column_of(job, half, lane); at < lanes)
                    for (int line = 0; line < job.hadamard; ++line)
                        job.operand[(column + at) * job.rows + row + line] = uint16_t(bits_of(v[half][line])[lane] >> 16);
    }
}

// Largest magnitude of a region after the column job's transform.
template <typename T>
uint32_t transformed_bits(const Job& columns, const Region& region) {
    const int height = std::max(kBlock, int(columns.hadamard));
    Words bits[2] = {};
    for (int64_t column = region.column; column < region.last_column; column += kLanes) {
        const int lanes = int(std::min<int64_t>(kLanes, region.last_column - column));
        for (int64_t row = region.row; row < region.last_row; row += height) {
            column_maxima<T>(columns, row, height, column, lanes, bits);
        }
    }
    return largest_lane(larger(bits[0], bits[1]));
}

#else

// The same down the columns, after a Hadamard transform if asked: of the tensor, or out [columns, amax_stride].
template <typename T>
void amax_down_columns(const Job& job, float* out) {
    uint32_t largest = 0;
    const int64_t strips = (job.columns + kLanes - 1) / kLanes, bands = (job.rows + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(job.threads) schedule(static) reduction(max : largest)
    for (int64_t unit = 0; unit < strips * bands; ++unit) {
        alignas(64) float v[kMostRows][kLanes];
        alignas(64) uint32_t bits[kLanes] = {};
        const int64_t column = unit % strips * kLanes, row = unit / strips * kChunk;
        const int lanes = int(std::min<int64_t>(kLanes, job.columns - column));
        const int last = int(std::min<int64_t>(kChunk, job.rows - row)), height = job.hadamard > kBlock ? job.hadamard : kBlock;
        for (int line = 0; line < last; line += height) {
            const int count = std::min(height, last - line);
            load_lanes<T>(job, row + line, count, column, lanes, v);
            lane_maxima(v, count, bits);
        }
        const uint32_t strip = *std::max_element(bits, bits + kLanes);
        largest = larger(largest, strip);
        if (job.outer == kChunkScale)
            for (int lane = 0; lane < lanes; ++lane)
                out[(column + lane) * job.amax_stride + row / kChunk] = quiet(as_float(job.is_tile ? strip : bits[lane]));
    }
    if (job.outer != kChunkScale) out[0] = quiet(as_float(largest));
}

template <typename T>
void transform_typed(const Job& job) {
    const int64_t strips = (job.columns + kLanes - 1) / kLanes;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t unit = 0; unit < strips * (job.rows / job.hadamard); ++unit) {
        alignas(64) float v[kMostRows][kLanes];
        const int64_t column = unit % strips * kLanes, row = unit / strips * job.hadamard;
        const int lanes = int(std::min<int64_t>(kLanes, job.columns - column));
        load_lanes<T>(job, row, job.hadamard, column, lanes, v);
        for (int lane = 0; lane < lanes; ++lane)
            for (int line = 0; line < job.hadamard; ++line)
                job.operand[(column + lane) * job.rows + row + line] = uint16_t(as_bits(v[line][lane]) >> 16);
    }
}

void transform(const Job& job) { job.is_fp32 ? transform_typed<float>(job) : transform_typed<BFloat16>(job); }

// Largest magnitude of a region after the column job's transform.
template <typename T>
uint32_t transformed_bits(const Job& columns, const Region& region) {
    const int height = std::max(kBlock, int(columns.hadamard));
    alignas(64) float v[kMostRows][kLanes];
    alignas(64) uint32_t bits[kLanes] = {};
    for (int64_t column = region.column; column < region.last_column; column += kLanes) {
        const int lanes = int(std::min<int64_t>(kLanes, region.last_column - column));
        for (int64_t row = region.row; row < region.last_row; row += height) {
            load_lanes<T>(columns, row, height, column, lanes, v);
            lane_maxima(v, height, bits);
        }
    }
    return *std::max_element(bits, bits + kLanes);
}

#endif

template <typename T>
void amax_typed(const Job& job, bool column, float* out) {
    if (job.hadamard || (column && job.outer == kChunkScale)) amax_down_columns<T>(job, out);
    else if (job.outer == kChunkScale) amax_row_chunks<T>(job, out);
    else amax_rows<T>(job, out);
}

template <typename T>
void amax_both(const Job& rows, const Job& columns, float* out) {
    std::atomic<uint32_t> largest[2] = {};
    for_each_region(rows, column_region(columns), [&](const Region& region) {
        const uint32_t bits[2] = {
            largest_bits<T>(rows, region.row, region.last_row, region.column, region.last_column),
            columns.hadamard ? transformed_bits<T>(columns, region) : 0,
        };
        for (int kind = 0; kind < 2; ++kind) {
            uint32_t seen = largest[kind];
            while (seen < bits[kind] && !largest[kind].compare_exchange_weak(seen, bits[kind])) {}
        }
    });
    out[0] = quiet(size_value(largest[0], T{}));
    out[1] = columns.hadamard ? quiet(as_float(largest[1])) : out[0];
}

}  // namespace

extern "C" {

// Largest magnitudes of x and of x transformed down its columns, out [2], in one pass over x.
void nvfp4_amax_both(const Job* rows, const Job* columns, float* out) {
    rows->is_fp32 ? amax_both<float>(*rows, *columns, out) : amax_both<BFloat16>(*rows, *columns, out);
}

void nvfp4_amax(const Job* job, int column, float* out) {
    job->is_fp32 ? amax_typed<float>(*job, column, out) : amax_typed<BFloat16>(*job, column, out);
}

// Transforms down the columns of x [rows, columns] into operand [columns, rows].
void nvfp4_hadamard(const Job* job) { transform(*job); }

}  // extern "C"
