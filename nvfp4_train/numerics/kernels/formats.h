// Formats, scales, random numbers and rounding: the functions that all kernels share. The same bits as the PyTorch
// numerics next door.
//
// Rules that keep it so: IEEE fp32, one rounding per operation in the order of the oracle, no contraction
// (-ffp-contract=off), no flush to zero. Functions on elements are branch-free, so that compilers vectorize the loops that
// call them; comparisons are written so that NaN falls through unchanged.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <algorithm>

namespace {

constexpr int kBlock = 16;           // elements that share an E4M3 scale
constexpr int kChunk = 128;          // elements that share an FP32 scale below the level of a row
constexpr int kRowChunk = 512;       // elements of a row handled together, few enough for the L1 cache
constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kExponent = 0x7F800000u;
constexpr uint32_t kQuietNan = 0x7FC00000u;
constexpr uint32_t kOne = 0x3F800000u;

inline float as_float(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline uint32_t as_bits(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }  // by value: references hinder vectorization

struct BFloat16 { uint16_t bits; };
inline float load(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float load(float x) { return x; }
inline uint32_t size_bits(BFloat16 x) { return x.bits & 0x7FFFu; }  // integers that order magnitudes, NaN above infinity
inline uint32_t size_bits(float x) { return as_bits(x) & 0x7FFFFFFFu; }
inline float size_value(uint32_t bits, BFloat16) { return as_float(bits << 16); }
inline float size_value(uint32_t bits, float) { return as_float(bits); }
inline float quiet(float x) { return x == x ? x : as_float(kQuietNan); }

// ---------------------------------------------------------------------------------------------------------------- scales

// What an FP32 scale's amax says about its blocks: factors of block maxima and of scales.
struct Factors { float amax, encode, decode; };

inline Factors global_factors(float amax, float largest_product) {
    float encode = largest_product / amax;
    encode = encode > FLT_MAX ? FLT_MAX : encode;
    if (encode == 0.0f) encode = 1.0f;
    return {amax, encode, 1.0f / encode};
}

// Rounds to E4M3; `value` is not negative. Normal numbers by integer arithmetic, subnormal ones by adding 2^14.
inline uint32_t encode_e4m3(float value) {
    const float saturated = value > 448.0f ? 448.0f : value;
    const uint32_t bits = as_bits(saturated);
    const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    const uint32_t subnormal = as_bits(saturated + 16384.0f) - as_bits(16384.0f);
    const uint32_t code = saturated < 0.015625f ? subnormal : normal;
    return value == value ? code : 0x7Fu;
}

inline float decode_e4m3(uint32_t code) {
    const uint32_t size = code & 0x7Fu;
    const float subnormal = float(int32_t(size)) * 0.001953125f;
    const float normal = as_float((size + (120u << 3)) << 20);
    const float value = size < 8u ? subnormal : normal;
    return size == 0x7Fu ? as_float(kQuietNan) : as_float(as_bits(value) | (code & 0x80u) << 24);
}

// A power of two for a block maximum: `carry` turns any mantissa above the largest element's into the next exponent (rounding
// up), or is zero. Infinity and NaN give the NaN byte.
inline uint32_t encode_e8m0(float largest, uint32_t carry, int32_t largest_exponent) {
    const uint32_t bits = as_bits(largest);
    const int32_t exponent = int32_t((bits + carry) >> 23) - largest_exponent;
    const uint32_t code = uint32_t(exponent < 0 ? 0 : exponent);
    return bits >= kExponent ? 0xFFu : code;
}

inline float decode_e8m0(uint32_t code) {
    const uint32_t bits = code == 0u ? 0x00400000u : code << 23;
    return as_float(code == 0xFFu ? kQuietNan : bits);
}

inline float encode_factor(float scale, float decode) {
    const float factor = 1.0f / (scale * decode);
    return factor > FLT_MAX ? FLT_MAX : factor;
}

// ------------------------------------------------------------------------------------------------------------- randomness

struct RowKey { uint32_t low, high; };

inline RowKey row_key(uint64_t key, uint64_t row) {
    uint64_t state = (row + 1) * 0x9E3779B97F4A7C15ull + key;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
    state ^= state >> 31;
    return {uint32_t(state), uint32_t(state >> 32)};
}

inline uint32_t random_word(uint32_t word, uint32_t low, uint32_t high) {
    uint32_t state = word + low;
    state = (state ^ (state >> 16)) * 0x7FEB352Du;
    state = ((state ^ (state >> 15)) + high) * 0x846CA68Bu;
    return state ^ (state >> 16);
}

// ---------------------------------------------------------------------------------------------------------------- elements

// Element formats. `kSmallest` is the fp32 exponent field of the smallest normal number, below which the spacing stays.
struct E2M1 {
    static constexpr float kLargest = 6.0f;
    static constexpr int kMantissa = 1;
    static constexpr uint32_t kSmallest = 127u, kLargestExponent = 2u, kLargestMantissa = 0x400000u;
    static constexpr bool kIsByte = false;
};
struct E4M3 {
    static constexpr float kLargest = 448.0f;
    static constexpr int kMantissa = 3;
    static constexpr uint32_t kSmallest = 121u, kLargestExponent = 8u, kLargestMantissa = 0x600000u;
    static constexpr bool kIsByte = true;
};
struct E5M2 {
    static constexpr float kLargest = 57344.0f;
    static constexpr int kMantissa = 2;
    static constexpr uint32_t kSmallest = 113u, kLargestExponent = 15u, kLargestMantissa = 0x600000u;
    static constexpr bool kIsByte = true;
};

// 2^(kField - 127), for an exponent field between 64 and 127.
template <uint32_t kField>
constexpr float power_of_two() { return 1.0f / float(1ull << (127u - kField)); }

// |scaled| up to the largest element, and the power of two at or below it, at least the smallest, that sets the spacing of the
// grid. Formats with a code for NaN use it for infinity too.
struct Size { float value; uint32_t power; };

template <typename Element>
inline Size size_of(float scaled) {
    const float size = as_float(as_bits(scaled) & ~kSign);
    const float saturated = size > Element::kLargest ? Element::kLargest : size;
    const float value = Element::kIsByte && size > FLT_MAX ? as_float(kQuietNan) : saturated;
    return {value, larger(as_bits(value) & kExponent, Element::kSmallest << 23)};
}

// Both functions return the rounded value, or NaN. Adding a power of two whose spacing is the grid step rounds to nearest even.
template <typename Element>
inline float round_nearest(float scaled) {
    const Size size = size_of<Element>(scaled);
    const float magic = as_float(size.power + (uint32_t(23 - Element::kMantissa) << 23));
    const float rounded = (size.value + magic) - magic;
    const uint32_t sign = Element::kIsByte ? as_bits(scaled) & kSign : scaled < 0.0f ? kSign : 0u;
    return as_float(as_bits(rounded) | sign);
}

// Moves up by byte/256 of a grid step and truncates to the grid: normal numbers by clearing bits, others as integers. E2M1 has
// one subnormal number, 0.5, so clearing bits does for that too; conversions to integers would halve the speed.
template <typename Element>
inline float round_stochastic(float scaled, uint32_t byte) {
    constexpr float smallest = power_of_two<Element::kSmallest>();
    constexpr float step = smallest / float(1 << Element::kMantissa);
    const Size size = size_of<Element>(scaled);
    const float moved = size.value + float(int32_t(byte)) * as_float(size.power - (uint32_t(8 + Element::kMantissa) << 23));
    const uint32_t normal = as_bits(moved) & (kSign - (1u << (23 - Element::kMantissa)));
    if (!Element::kIsByte) {
        const uint32_t grid = moved < 1.0f ? 0xFF800000u : 0xFFC00000u;
        const uint32_t kept = as_bits(moved) & (moved < 0.5f ? 0u : grid);
        return as_float((moved == moved ? kept : kQuietNan) | (as_bits(scaled) & kSign));
    }
    const float below = moved < smallest ? moved : 0.0f;
    const uint32_t subnormal = as_bits(float(int32_t(below * (1.0f / step))) * step);
    const uint32_t kept = moved < smallest ? subnormal : normal;
    return as_float((moved == moved ? kept : kQuietNan) | (as_bits(scaled) & kSign));
}

// The code of a number on the grid. E2M1 has none for NaN, which the block's scale keeps visible.
template <typename Element>
inline uint32_t code_of(float rounded) {
    const uint32_t size = as_bits(rounded) & ~kSign;
    if (Element::kIsByte) {
        const uint32_t exponents = (Element::kSmallest - 1u) << Element::kMantissa;
        const uint32_t normal = (size >> (23 - Element::kMantissa)) - exponents;
        const uint32_t magic = (Element::kSmallest + 23u - uint32_t(Element::kMantissa)) << 23;
        const uint32_t subnormal = as_bits(as_float(size) + as_float(magic)) - magic;
        const uint32_t code = size < Element::kSmallest << 23 ? subnormal : normal;
        return size > kExponent ? 0x7Fu : code | as_bits(rounded) >> 31 << 7;
    }
    const uint32_t magnitude = size < kOne ? size >> 24 & 1u : (size >> 22) - 0xFCu;  // 0.5 is 0x3F000000
    const uint32_t code = magnitude | (as_bits(rounded) >> 31 << 3);
    return size > kExponent ? 0u : code;
}

// Rounds to BF16, as the upper half of an fp32 number.
inline uint32_t bf16_bits(float x) {
    const uint32_t bits = as_bits(x);
    return x == x ? bits + 0x7FFFu + ((bits >> 16) & 1u) : kQuietNan;
}

// code * scale as the upper half of an fp32 number. Exact, because six significant bits suffice, except where an 8-bit code
// times a tiny power of two is a subnormal number of BF16: that is rounded.
template <typename Element>
inline uint32_t operand_of(float rounded, float scale) {
    const float product = rounded * scale;
    return Element::kIsByte ? bf16_bits(product) : as_bits(product);
}

inline float decode_e2m1(uint32_t code) {
    const uint32_t magnitude = code & 7u;
    const uint32_t small = magnitude == 1u ? 0x3F000000u : 0u;
    return as_float((magnitude < 2u ? small : (magnitude + 0xFCu) << 22) | (code & 8u) << 28);
}

template <typename Element>
inline float decode(uint32_t code) {
    if (!Element::kIsByte) return decode_e2m1(code);
    constexpr float smallest = power_of_two<Element::kSmallest>();
    constexpr float step = smallest / float(1 << Element::kMantissa);
    const uint32_t size = code & 0x7Fu;
    const float normal = as_float((size + ((Element::kSmallest - 1u) << Element::kMantissa)) << (23 - Element::kMantissa));
    const float value = size < 1u << Element::kMantissa ? float(int32_t(size)) * step : normal;
    return as_float(value > Element::kLargest ? kQuietNan : as_bits(value) | (code & 0x80u) << 24);
}

inline uint32_t nibble(const uint8_t* packed, int64_t column) { return (packed[column / 2] >> (4 * (column % 2))) & 15u; }

// Gives every element the value of its block, so that loops over elements are long.
template <int kWidth>
inline void spread(const float* values, int blocks, float* elements) {
    for (int block = 0; block < blocks; ++block)
        for (int lane = 0; lane < kWidth; ++lane) elements[block * kWidth + lane] = values[block];
}

}  // namespace
