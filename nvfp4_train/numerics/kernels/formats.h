// Formats, scales, random numbers and rounding of NVFP4: the functions that all kernels share. The same bits as the PyTorch
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

constexpr int kBlock = 16;           // elements that share a scale
constexpr int kLanes = 128;          // columns handled together when blocks run down the columns
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

struct Factors { float amax, encode, decode, block; };

inline Factors global_factors(float amax, float largest_product) {
    float encode = largest_product / amax;
    encode = encode > FLT_MAX ? FLT_MAX : encode;
    if (encode == 0.0f) encode = 1.0f;
    return {amax, encode, 1.0f / encode, encode * (1.0f / 6.0f)};
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

// One byte per column; little-endian, so byte 0 of a word belongs to its first column.
inline void random_row(RowKey key, uint32_t first_word, int columns, uint8_t* bytes) {
    uint32_t words[kRowChunk / 4];
    const int count = (columns + 3) / 4;
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) words[lane] = random_word(first_word + uint32_t(lane), key.low, key.high);
    std::memcpy(bytes, words, size_t(columns));
}

// ---------------------------------------------------------------------------------------------------------------- elements

// |scaled| up to 6, and the power of two at or below it, at least 1, that sets the spacing of the grid.
struct Size { float value; uint32_t power; };

inline Size size_of(float scaled) {
    const float size = as_float(as_bits(scaled) & ~kSign);
    const float saturated = size > 6.0f ? 6.0f : size;
    return {saturated, larger(as_bits(saturated) & kExponent, kOne)};
}

// Both functions return the rounded value, or NaN for NaN. Adding 2^22 * power gives a sum whose spacing is the grid step,
// so the addition itself rounds to nearest even.
inline float round_nearest(float scaled) {
    const Size size = size_of(scaled);
    const float magic = as_float(size.power + (22u << 23));
    const float rounded = (size.value + magic) - magic;
    return as_float(as_bits(rounded) | (scaled < 0.0f ? kSign : 0u));
}

// Moves up by byte/256 of a grid step and truncates to the grid.
inline float round_stochastic(float scaled, uint32_t byte) {
    const Size size = size_of(scaled);
    const float moved = size.value + float(int32_t(byte)) * as_float(size.power - (9u << 23));
    const uint32_t grid = moved < 1.0f ? 0xFF800000u : 0xFFC00000u;
    const uint32_t kept = as_bits(moved) & (moved < 0.5f ? 0u : grid);
    return as_float((moved == moved ? kept : kQuietNan) | (as_bits(scaled) & kSign));
}

inline uint32_t code_of(float rounded) {
    const uint32_t size = as_bits(rounded) & ~kSign;
    const uint32_t magnitude = size < kOne ? size >> 24 & 1u : (size >> 22) - 0xFCu;  // 0.5 is 0x3F000000
    const uint32_t code = magnitude | (as_bits(rounded) >> 31 << 3);
    return size > kExponent ? 0u : code;
}

// code * scale as the upper half of an fp32 number: exact, because six significant bits suffice.
inline uint32_t operand_of(float rounded, float scale) { return as_bits(rounded * scale); }

inline float decode_e2m1(uint32_t code) {
    const uint32_t magnitude = code & 7u;
    const uint32_t small = magnitude == 1u ? 0x3F000000u : 0u;
    return as_float((magnitude < 2u ? small : (magnitude + 0xFCu) << 22) | (code & 8u) << 28);
}

inline uint32_t nibble(const uint8_t* packed, int64_t column) { return (packed[column / 2] >> (4 * (column % 2))) & 15u; }

// Gives every element the value of its block, so that loops over elements are long.
inline void spread(const float* values, int blocks, float* elements) {
    for (int block = 0; block < blocks; ++block)
        for (int lane = 0; lane < kBlock; ++lane) elements[block * kBlock + lane] = values[block];
}

}  // namespace
