// How strips of columns are read with AVX-512: 16 blocks at a time, a lane each. Included by lanes.h.

#pragma once

#include "vectors.h"

namespace {

constexpr int kLanes = 32;      // columns handled together when blocks run down the columns: a cache line of BF16 numbers
constexpr int kMostRows = 128;  // and rows, for the largest transform

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
