// One quantization job, its FP32 scales, and how a strip of columns is read: what quantize.cpp and amax.cpp share.

#pragma once

#include "formats.h"

extern "C" {

// Mirrored by `Job` in native.py. Rows and columns are those of x; all dims are whole blocks.
struct Job {
    const void* x;
    const float* amax;  // see Outer
    uint8_t* codes;     // outputs: codes and scale bytes, or the operand
    uint8_t* scales;
    uint16_t* operand;
    int64_t rows, columns, stride;
    int64_t amax_stride;  // from one row of the quantized matrix to the next
    uint64_t key;
    int64_t row_offset, row_segment, row_stride;           // where the random words of the quantized matrix come from:
    int64_t column_offset, column_segment, column_stride;  // see RandomStream; a segment of 0 has no end
    uint64_t signs[2];                  // of the Hadamard transform
    float largest_product;              // what amax is mapped to
    float smallest_amax;                // below it, amax counts as this
    float reciprocal;                   // of the element that a block maximum is mapped to
    int32_t is_fp32, element, scale_kind, width, is_tile, outer, stochastic, hadamard, scale_rule, threads;
};

}  // extern "C"

namespace {

enum ElementKind { kE2m1 = 0, kE4m3 = 1, kE5m2 = 2 };
enum Outer { kNoAmax = 0, kTensorScale = 1, kRowScale = 2, kChunkScale = 3 };  // amax: none, [1], [R], [R, C/128]
enum ScaleRule { kAmax = 0, kFourOverSixMae = 1, kFourOverSixMse = 2, kFloor = 3 };

constexpr int kLanes = 128;     // columns handled together when blocks run down the columns
constexpr int kMostRows = 128;  // and rows, for the largest transform

// What one thread handles at a time; a region holds whole blocks and transforms.
struct Region { int64_t row, last_row, column, last_column; };
struct RegionSize { int64_t rows, columns; };

constexpr RegionSize kRowRegion = {32, INT64_MAX};  // memory is read in its order
// 256 KiB of BF16 numbers: what is read again is in the cache; high enough that results of columns fill whole cache lines.
constexpr RegionSize kColumnRegion = {256, 512};

template <typename Function>
void for_each_region(const Job& job, RegionSize size, Function function) {
    const int64_t width = std::min(size.columns, std::max<int64_t>(job.columns, 1));
    const int64_t bands = (job.rows + size.rows - 1) / size.rows, strips = (job.columns + width - 1) / width;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t unit = 0; unit < bands * strips; ++unit) {
        const int64_t row = unit / strips * size.rows, column = unit % strips * width;
        function(Region{row, std::min(job.rows, row + size.rows), column, std::min(job.columns, column + width)});
    }
}

inline int64_t global_index(int64_t local, int64_t offset, int64_t segment, int64_t stride) {
    return segment == 0 ? offset + local : offset + local / segment * stride + local % segment;
}

inline RowKey row_key(const Job& job, int64_t row) {
    return row_key(job.key, uint64_t(global_index(row, job.row_offset, job.row_segment, job.row_stride)));
}

// Of the word that holds the byte of a column.
inline uint32_t word_index(const Job& job, int64_t column) {
    return uint32_t(global_index(column, job.column_offset, job.column_segment, job.column_stride) / 4);
}

// The bytes of up to kRowChunk columns, little-endian: byte 0 of a word belongs to its first column.
inline void random_row(const Job& job, RowKey key, int64_t column, int columns, uint8_t* bytes) {
    uint32_t words[kRowChunk / 4];
    const int64_t segment = job.column_segment == 0 ? INT64_MAX : job.column_segment;
    for (int done = 0; done < columns;) {
        const int64_t here = column + done;
        const int count = int(std::min<int64_t>(columns - done, segment - here % segment));
        const uint32_t first = word_index(job, here);
#pragma omp simd
        for (int lane = 0; lane < (count + 3) / 4; ++lane)
            words[done / 4 + lane] = random_word(first + uint32_t(lane), key.low, key.high);
        done += count;
    }
    std::memcpy(bytes, words, size_t(columns));
}

inline Factors outer_factors(const Job& job, int64_t row, int64_t column) {
    const int64_t chunk = job.outer == kChunkScale ? column / kChunk : 0;
    const float amax = job.amax[job.outer == kTensorScale ? 0 : row * job.amax_stride + chunk];
    return global_factors(amax < job.smallest_amax ? job.smallest_amax : amax, job.largest_product);
}

// ------------------------------------------------------------------------------------------------------ Hadamard transform

// Rounds to BF16, kept as fp32.
inline float to_bf16(float x) { return as_float(bf16_bits(x) & 0xFFFF0000u); }
inline float bf16_value(BFloat16 x) { return load(x); }
inline float bf16_value(float x) { return to_bf16(x); }

// Two butterfly stages at once, with distances `d` and 2 * d, on rows 0, d, 2d and 3d of v.
inline void two_stages(float (*v)[kLanes], int d) {
    float *a = v[0], *b = v[d], *c = v[2 * d], *e = v[3 * d];
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
        const float sum_0 = a[lane] + b[lane], difference_0 = a[lane] - b[lane];
        const float sum_1 = c[lane] + e[lane], difference_1 = c[lane] - e[lane];
        a[lane] = sum_0 + sum_1;
        b[lane] = difference_0 + difference_1;
        c[lane] = sum_0 - sum_1;
        e[lane] = difference_0 - difference_1;
    }
}

inline void one_stage(float (*v)[kLanes], int d) {
    float *a = v[0], *b = v[d];
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
        const float sum = a[lane] + b[lane];
        b[lane] = a[lane] - b[lane];
        a[lane] = sum;
    }
}

// Transforms groups of `size` rows; sizes that are odd powers of two are scaled by sqrt(1/2) at the end.
inline void butterfly(float (*v)[kLanes], int height, int size) {
    int d = 1;
    for (; 2 * d < size; d *= 4)
        for (int line = 0; line < height; ++line)
            if ((line & (3 * d)) == 0) two_stages(v + line, d);
    const bool is_odd = d < size;
    if (is_odd)
        for (int line = 0; line < height; ++line)
            if ((line & d) == 0) one_stage(v + line, d);
    const float scale = is_odd ? 0.70710678118654752f : 1.0f;
    for (int line = 0; line < height; ++line)
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) v[line][lane] = to_bf16(v[line][lane] * scale);
}

// The sign of a row of a group, times the power of two in 1/sqrt(size).
inline float hadamard_factor(const Job& job, int64_t row) {
    const uint32_t place = uint32_t(row) & uint32_t(job.hadamard - 1);
    float scale = 1.0f;
    for (int size = job.hadamard; size >= 4; size /= 4) scale *= 0.5f;
    return job.signs[place / 64] >> (place % 64) & 1u ? -scale : scale;
}

// ------------------------------------------------------------------------------------------------------ strips of columns

// Reads `height` rows of up to kLanes columns, transformed if asked; the other lanes are zero.
template <typename T>
void load_lanes(const Job& job, int64_t row, int height, int64_t column, int lanes, float (*v)[kLanes]) {
    const T* x = static_cast<const T*>(job.x) + row * job.stride + column;
    T partial[kLanes] = {};
    for (int line = 0; line < height; ++line, x += job.stride) {
        const T* source = x;
        if (lanes < kLanes) source = static_cast<const T*>(std::memcpy(partial, x, sizeof(T) * size_t(lanes)));
        if (job.hadamard) {
            const float factor = hadamard_factor(job, line);
#pragma omp simd
            for (int lane = 0; lane < kLanes; ++lane) v[line][lane] = bf16_value(source[lane]) * factor;
        } else {
#pragma omp simd
            for (int lane = 0; lane < kLanes; ++lane) v[line][lane] = load(source[lane]);
        }
    }
    if (job.hadamard) butterfly(v, height, job.hadamard);
}

// Integers that order magnitudes.
inline void lane_maxima(const float (*v)[kLanes], int height, uint32_t* bits) {
    for (int line = 0; line < height; ++line)
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) bits[lane] = larger(bits[lane], as_bits(v[line][lane]) & ~kSign);
}

}  // namespace
