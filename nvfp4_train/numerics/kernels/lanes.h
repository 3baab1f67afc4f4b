// One quantization job, its FP32 scales, and how a strip of columns is read: what quantize.cpp and amax.cpp share.

#pragma once

#include "vectors.h"

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

constexpr int kLanes = 32;      // columns handled together when blocks run down the columns: a cache line of BF16 numbers
constexpr int kMostRows = 128;  // and rows, for the largest transform

// What one thread handles at a time; a region holds whole blocks and transforms.
struct Region { int64_t row, last_row, column, last_column; };
struct RegionSize { int64_t rows, columns; };

constexpr RegionSize kRowRegion = {32, INT64_MAX};  // memory is read in its order
// Whole rows where they are not very long, so that memory is read in its order, and few enough of them that the caches keep what
// is read again; at least the rows that are transformed together.
inline RegionSize column_region(const Job& job) { return {std::max<int64_t>(64, job.hadamard), 4096}; }

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

// ------------------------------------------------------------------------------------------------------ strips of columns

// Up to kMostRows rows of kLanes columns: two vectors a row, of BF16 numbers the even columns and the odd ones, of FP32
// numbers the first and the second 16.
using Strip = Floats[2][kMostRows];

inline int column_of(const Job& job, int half, int lane) { return job.is_fp32 ? kWide * half + lane : 2 * lane + half; }

// Two stages of the Hadamard butterfly on lines 0, d, 2d and 3d, with distances d and 2d.
NVFP4_INLINE void two_stages(Floats* v, int d) {
    const Floats sum_0 = v[0] + v[d], difference_0 = v[0] - v[d];
    const Floats sum_1 = v[2 * d] + v[3 * d], difference_1 = v[2 * d] - v[3 * d];
    v[0] = sum_0 + sum_1;
    v[d] = difference_0 + difference_1;
    v[2 * d] = sum_0 - sum_1;
    v[3 * d] = difference_0 - difference_1;
}

NVFP4_INLINE void one_stage(Floats* v, int d) {
    const Floats sum = v[0] + v[d];
    v[d] = v[0] - v[d];
    v[0] = sum;
}

// Transforms groups of `size` lines; sizes that are odd powers of two are scaled by sqrt(1/2) at the end.
inline void butterfly(Floats* v, int height, int size) {
    int d = 1;
    for (; 2 * d < size; d *= 4)
        for (int line = 0; line < height; ++line)
            if ((line & (3 * d)) == 0) two_stages(v + line, d);
    const bool is_odd = d < size;
    if (is_odd)
        for (int line = 0; line < height; ++line)
            if ((line & d) == 0) one_stage(v + line, d);
    const Floats scale = all(is_odd ? 0.70710678118654752f : 1.0f);
    for (int line = 0; line < height; ++line) v[line] = bf16_of_clean(v[line] * scale);
}

// The sign of a row of a group, times the power of two in 1/sqrt(size).
inline float hadamard_factor(const Job& job, int64_t row) {
    const uint32_t place = uint32_t(row) & uint32_t(job.hadamard - 1);
    float scale = 1.0f;
    for (int size = job.hadamard; size >= 4; size /= 4) scale *= 0.5f;
    return job.signs[place / 64] >> (place % 64) & 1u ? -scale : scale;
}

NVFP4_INLINE void load_line(const BFloat16* x, Floats& even, Floats& odd) {
    const Words pairs = load_vector<Words>(x);
    even = floats_of(pairs << 16);
    odd = floats_of(pairs & 0xFFFF0000u);
}

NVFP4_INLINE void load_line(const float* x, Floats& first, Floats& second) {
    first = load_vector<Floats>(x);
    second = load_vector<Floats>(x + kWide);
}

// The common transform, of a group of 16 lines, in registers and not rounded yet: calls use(half, lines).
template <typename T, typename Function>
NVFP4_INLINE void transform_16(const T* x, int64_t stride, const float* factors, Function use) {
    Floats group[16], rest[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) load_line(x + i * stride, group[i], rest[i]);
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) group[i] = (sizeof(T) == 4 ? bf16_of(group[i]) : group[i]) * factors[i];
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) two_stages(group + i, 1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) two_stages(group + i, 4);
        use(half, group);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) group[i] = rest[i];
    }
}

// Reads `height` rows of kLanes columns, transformed if asked; rows of x are `stride` elements apart.
template <typename T>
void load_strip(const Job& job, const T* x, int64_t stride, int height, Strip& v) {
    constexpr bool is_fp32 = sizeof(T) == 4;
    float factors[kMostRows];
    for (int line = 0; line < job.hadamard; ++line) factors[line] = hadamard_factor(job, line);
    if (job.hadamard == 16) {
        for (int line = 0; line < height; line += 16)
            transform_16(x + line * stride, stride, factors, [&](int half, const Floats* group) {
#pragma GCC unroll 16
                for (int i = 0; i < 16; ++i) v[half][line + i] = bf16_of_clean(group[i]);
            });
        return;
    }
    for (int line = 0; line < height; ++line) load_line(x + line * stride, v[0][line], v[1][line]);
    if (!job.hadamard) return;
    for (int half = 0; half < 2; ++half) {
        for (int line = 0; line < height; ++line)
            v[half][line] = (is_fp32 ? bf16_of(v[half][line]) : v[half][line]) * factors[line & (job.hadamard - 1)];
        butterfly(v[half], height, job.hadamard);
    }
}

// The same of `lanes` columns from (row, column) on; the other lanes are zero.
template <typename T>
void load_columns(const Job& job, int64_t row, int height, int64_t column, int lanes, Strip& v) {
    const T* x = static_cast<const T*>(job.x) + row * job.stride + column;
    if (lanes == kLanes) {
        for (int line = 0; line < height; ++line) __builtin_prefetch(x + line * job.stride + kLanes, 0, 2);
        return load_strip(job, x, job.stride, height, v);
    }
    alignas(64) T partial[kMostRows][kLanes] = {};
    for (int line = 0; line < height; ++line) std::memcpy(partial[line], x + line * job.stride, sizeof(T) * size_t(lanes));
    load_strip(job, partial[0], kLanes, height, v);
}

inline void load_columns(const Job& job, int64_t row, int height, int64_t column, int lanes, Strip& v) {
    job.is_fp32 ? load_columns<float>(job, row, height, column, lanes, v)
                : load_columns<BFloat16>(job, row, height, column, lanes, v);
}

// Largest magnitudes of what load_columns reads, in the same lanes.
template <typename T>
void column_maxima(const Job& job, int64_t row, int height, int64_t column, int lanes, Words (&largest)[2]) {
    const T* x = static_cast<const T*>(job.x) + row * job.stride + column;
    if (job.hadamard != 16 || lanes < kLanes) {
        Strip v;
        load_columns<T>(job, row, height, column, lanes, v);
        for (int half = 0; half < 2; ++half) largest[half] = larger(largest[half], maxima(v[half], height));
        return;
    }
    float factors[16];
    for (int line = 0; line < 16; ++line) factors[line] = hadamard_factor(job, line);
    for (int line = 0; line < height; ++line) __builtin_prefetch(x + line * job.stride + kLanes, 0, 2);
    for (int line = 0; line < height; line += 16)  // rounding keeps the order: the largest is rounded alone
        transform_16(x + line * job.stride, job.stride, factors, [&](int half, const Floats* group) {
            const Words own = bits_of(bf16_of(floats_of(maxima(group, 16))));
            largest[half] = larger(largest[half], own);
        });
}

}  // namespace
