// Small matrix products in the caches, and the layouts that they read.
//
// A word holds what one multiply-add of a lane takes: one FP32 number, or two BF16 numbers that are neighbours along the
// contraction. Sums are FP32 and run along the contraction in ascending order.

#pragma once

#include "simd.h"

namespace {

template <typename T> struct Word;
template <> struct Word<float> {
    using type = float;
    static constexpr int kNumbers = 1;
};
template <> struct Word<BFloat16> {
    using type = uint32_t;
    static constexpr int kNumbers = 2;
};

inline Vector load_words(const float* x) { return load(x); }
inline Bits load_words(const uint32_t* x) { Bits v; std::memcpy(&v, x, sizeof v); return v; }

inline Vector multiply_add(Vector sum, float a, Vector b) { return sum + a * b; }
inline Vector multiply_add(Vector sum, uint32_t a, Bits b) {
#if defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
#else
    const Bits both = Bits{} + a, high = Bits{} + 0xFFFF0000u;
    return (sum + (Vector)(both << 16) * (Vector)(b << 16)) + (Vector)(both & high) * (Vector)(b & high);
#endif
}

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t whole(int64_t count) { return up(count, kWide) * kWide; }

// A left operand [rows, depth] of words, in any layout.
template <typename W>
struct Left { const W* words; int64_t row, depth; };  // strides
// A right operand [depth, columns]: columns are neighbours, and a whole number of vectors.
template <typename W>
struct Right { const W* words; int64_t depth; };
struct Out { float* values; int64_t row; bool adds; };

template <typename W, int kRows, int kVectors>
inline __attribute__((always_inline)) void tile(Left<W> a, Right<W> b, int64_t from, int64_t to, Out out) {
    Vector sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[row][v] = out.adds ? load(out.values + row * out.row + v * kWide) : Vector{};
    for (int64_t k = from; k < to; ++k) {
        decltype(load_words(b.words)) right[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) right[v] = load_words(b.words + k * b.depth + v * kWide);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const W left = a.words[row * a.row + k * a.depth];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[row][v] = multiply_add(sums[row][v], left, right[v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(out.values + row * out.row + v * kWide, sums[row][v]);
}

template <typename W, int kRows>
inline void strip(Left<W> a, Right<W> b, int64_t from, int64_t to, int64_t vectors, Out out) {
    for (; vectors >= 4; vectors -= 4, b.words += 4 * kWide, out.values += 4 * kWide) tile<W, kRows, 4>(a, b, from, to, out);
    for (; vectors >= 2; vectors -= 2, b.words += 2 * kWide, out.values += 2 * kWide) tile<W, kRows, 2>(a, b, from, to, out);
    if (vectors) tile<W, kRows, 1>(a, b, from, to, out);
}

// Which part of a product between tokens counts, where rows or the contraction are tokens in their order.
enum class Part {
    all,
    depth_to_row,    // left[i, k] is zero for k > i
    depth_from_row,  // left[i, k] is zero for k < i
    columns_to_row,  // out[i, j] is not needed for j > i
};

// out [rows, columns] = (or +=) a b; `depth` in words.
template <typename W>
void multiply(int64_t rows, int64_t columns, int64_t depth, Left<W> a, Right<W> b, Out out, Part part = Part::all) {
    constexpr int kNumbers = sizeof(W) == 4 && !std::is_same<W, float>::value ? 2 : 1;
    for (int64_t row = 0; row < rows;) {
        const int64_t count = std::min<int64_t>(6, rows - row), last = row + count;
        const int64_t from = part == Part::depth_from_row ? row / kNumbers : 0;
        const int64_t to = part == Part::depth_to_row ? std::min(depth, up(last, kNumbers)) : depth;
        const int64_t vectors = up(part == Part::columns_to_row ? std::min(columns, last) : columns, kWide);
        const Left<W> left = {a.words + row * a.row, a.row, a.depth};
        const Out here = {out.values + row * out.row, out.row, out.adds};
        switch (count) {
            case 6: strip<W, 6>(left, b, from, to, vectors, here); row += 6; break;
            case 5: case 4: strip<W, 4>(left, b, from, to, vectors, here); row += 4; break;
            case 3: case 2: strip<W, 2>(left, b, from, to, vectors, here); row += 2; break;
            default: strip<W, 1>(left, b, from, to, vectors, here); row += 1;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- layouts
// A matrix [rows, columns] of numbers as `Numbers`: rows of `stride` numbers, zero beyond `columns` up to a whole vector.

// Copies strided rows of a tensor, each times a factor (null: one); there are zero rows up to an even number.
template <typename T>
void gather(const T* x, int64_t x_stride, int64_t rows, int64_t columns, const float* factors, T* out, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * x_stride;
        T* to = out + row * stride;
        if (factors == nullptr) {
            std::memcpy(to, from, sizeof(T) * size_t(columns));
            std::memset(static_cast<void*>(to + columns), 0, sizeof(T) * size_t(stride - columns));
            continue;
        }
        const Vector factor = splat(factors[row]);
        for (int64_t column = 0; column < stride; column += kWide)
            store(to + column, load_part(from + column, std::max<int64_t>(0, columns - column)) * factor);
    }
    if (rows % 2) std::memset(static_cast<void*>(out + rows * stride), 0, sizeof(T) * size_t(stride));
}

// Rounds FP32 rows to numbers.
template <typename T>
void narrow(const float* x, int64_t rows, int64_t stride, T* out) {
    for (int64_t i = 0; i < rows * stride; i += kWide) store(out + i, load(x + i));
    if (rows % 2) std::memset(static_cast<void*>(out + rows * stride), 0, sizeof(T) * size_t(stride));
}

// Words whose numbers are neighbours along a row: what the memory holds. Left operands contract the columns.
inline const float* words_of(const float* x) { return x; }
inline const uint32_t* words_of(const BFloat16* x) { return reinterpret_cast<const uint32_t*>(x); }

// Words whose numbers are neighbours down a column: [ceil(rows / 2), stride] of BF16. Operands that contract the rows.
inline const float* pair_rows(const float* x, int64_t, int64_t, float*) { return x; }
inline const uint32_t* pair_rows(const BFloat16* x, int64_t rows, int64_t stride, uint32_t* out) {
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t column = 0; column < stride; column += kWide) {
            const BFloat16* from = x + row * stride + column;
            const Bits even = (Bits)load(from), odd = (Bits)load(from + stride);
            const Bits words = (even >> 16) | odd;
            std::memcpy(out + row / 2 * stride + column, &words, sizeof words);
        }
    return out;
}

// Words along a row, transposed to [columns in words, width]: right operands that contract the columns.
template <typename W>
const W* transpose(const W* x, int64_t rows, int64_t words, int64_t stride, W* out, int64_t width) {
    for (int64_t first = 0; first < rows; first += kWide) {
        const int64_t count = std::min<int64_t>(kWide, rows - first);
        for (int64_t word = 0; word < words; ++word) {
            W* to = out + word * width + first;
            const W* from = x + first * stride + word;
            for (int64_t row = 0; row < count; ++row) to[row] = from[row * stride];
            for (int64_t row = count; row < kWide; ++row) to[row] = W(0);
        }
    }
    return out;
}

}  // namespace
