// Vectors of 16 FP32 or 32-bit lanes for CPUs with AVX-512, and the transpositions between blocks in memory and blocks in lanes.

#pragma once

#include "formats.h"

#include <immintrin.h>

#define NVFP4_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kWide = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Bytes = uint8_t __attribute__((vector_size(16)));

NVFP4_INLINE Words bits_of(Floats x) { return (Words)x; }
NVFP4_INLINE Floats floats_of(Words x) { return (Floats)x; }
NVFP4_INLINE Words all(uint32_t x) { return Words{} + x; }
NVFP4_INLINE Floats all(float x) { return floats_of(all(as_bits(x))); }
NVFP4_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
NVFP4_INLINE Words smaller(Words a, Words b) { return a < b ? a : b; }

template <typename Vector>
NVFP4_INLINE Vector load_vector(const void* source) {
    Vector value;
    std::memcpy(&value, source, sizeof(value));
    return value;
}

template <typename Vector>
NVFP4_INLINE void store_vector(void* target, Vector value) { std::memcpy(target, &value, sizeof(value)); }

// a + b, rounded toward zero; both are not negative, and the sum is far from overflow.
NVFP4_INLINE Floats add_toward_zero(Floats a, Floats b) {
    return (Floats)_mm512_maskz_add_round_ps(0xFFFFu, (__m512)a, (__m512)b, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}

// Rounds to BF16, kept as FP32. The second form is for numbers that come from BF16 ones, whose NaN need no care.
NVFP4_INLINE Floats bf16_of_clean(Floats x) {
    const Words bits = bits_of(x);
    return floats_of((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}
NVFP4_INLINE Floats bf16_of(Floats x) { return x == x ? bf16_of_clean(x) : all(as_float(kQuietNan)); }

// ---------------------------------------------------------------------------------------------------------- transpositions

// Lane 4j + i holds block 4i + j, the order that transpositions of 4 x 4 leave; so does lane 4i + j for block 4j + i.
#define NVFP4_SWAPPED 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15
constexpr int kBlockOfLane[kWide] = {NVFP4_SWAPPED};

// Four groups of four words out of the eight of two vectors.
template <int kA, int kB, int kC, int kD>
NVFP4_INLINE Words pick(Words x, Words y) {
    return __builtin_shufflevector(x, y, 4 * kA, 4 * kA + 1, 4 * kA + 2, 4 * kA + 3, 4 * kB, 4 * kB + 1, 4 * kB + 2, 4 * kB + 3,
                                   4 * kC, 4 * kC + 1, 4 * kC + 2, 4 * kC + 3, 4 * kD, 4 * kD + 1, 4 * kD + 2, 4 * kD + 3);
}

// Transposes 4 x 4 groups of four words.
NVFP4_INLINE void transpose_groups(Words* v) {
    const Words a = pick<0, 1, 4, 5>(v[0], v[1]), b = pick<2, 3, 6, 7>(v[0], v[1]);
    const Words c = pick<0, 1, 4, 5>(v[2], v[3]), d = pick<2, 3, 6, 7>(v[2], v[3]);
    v[0] = pick<0, 2, 4, 6>(a, c);
    v[1] = pick<1, 3, 5, 7>(a, c);
    v[2] = pick<0, 2, 4, 6>(b, d);
    v[3] = pick<1, 3, 5, 7>(b, d);
}

// Transposes 4 x 4 words inside each group of four.
NVFP4_INLINE void transpose_words(Words* v) {
    constexpr auto low = [](Words x, Words y) {
        return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    };
    constexpr auto high = [](Words x, Words y) {
        return __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    };
    constexpr auto low_pairs = [](Words x, Words y) {
        return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    };
    constexpr auto high_pairs = [](Words x, Words y) {
        return __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    };
    const Words a = low(v[0], v[1]), b = high(v[0], v[1]), c = low(v[2], v[3]), d = high(v[2], v[3]);
    v[0] = low_pairs(a, c);
    v[1] = high_pairs(a, c);
    v[2] = low_pairs(b, d);
    v[3] = high_pairs(b, d);
}

// Reads 16 blocks of kGroups groups of four words, which lie `stride` bytes apart, and gives each a lane: out[i] holds word i.
template <int kGroups>
NVFP4_INLINE void blocks_to_lanes(const uint8_t* source, int64_t stride, Words* out) {
    static_assert(kGroups == 2 || kGroups == 4, "two blocks or one to a vector");
    for (int part = 0; part < 4; ++part) {
        Words v[4];
        if (kGroups == 2) {
            const Words first = load_vector<Words>(source + 128 * part), second = load_vector<Words>(source + 128 * part + 64);
            v[0] = pick<0, 2, 4, 6>(first, second);
            v[1] = pick<1, 3, 5, 7>(first, second);
        } else {
            for (int block = 0; block < 4; ++block) v[block] = load_vector<Words>(source + (4 * part + block) * stride);
            transpose_groups(v);
        }
        for (int group = 0; group < kGroups; ++group) out[4 * group + part] = v[group];
    }
    for (int group = 0; group < kGroups; ++group) transpose_words(out + 4 * group);
}

// The way back: writes 16 blocks of kWords words each, one after the other.
template <int kWords>
NVFP4_INLINE void lanes_to_blocks(Words* v, uint8_t* target) {
    static_assert(kWords == 2 || kWords == 4 || kWords == 8 || kWords == 16, "whole vectors");
    if constexpr (kWords == 2) {
        store_vector(target, __builtin_shufflevector(v[0], v[1], 0, 16, 4, 20, 8, 24, 12, 28, 1, 17, 5, 21, 9, 25, 13, 29));
        store_vector(target + 64, __builtin_shufflevector(v[0], v[1], 2, 18, 6, 22, 10, 26, 14, 30, 3, 19, 7, 23, 11, 27, 15, 31));
    } else {
        for (int group = 0; group < kWords / 4; ++group) transpose_words(v + 4 * group);
        for (int part = 0; part < 4; ++part) {
            uint8_t* here = target + part * 16 * kWords;
            if constexpr (kWords == 4) store_vector(here, v[part]);
            if constexpr (kWords == 8) {
                store_vector(here, pick<0, 4, 1, 5>(v[part], v[4 + part]));
                store_vector(here + 64, pick<2, 6, 3, 7>(v[part], v[4 + part]));
            }
            if constexpr (kWords == 16) {
                Words four[4] = {v[part], v[4 + part], v[8 + part], v[12 + part]};
                transpose_groups(four);
                for (int block = 0; block < 4; ++block) store_vector(here + 64 * block, four[block]);
            }
        }
    }
}

// Writes kWords words of each lane to a line of its own, `stride` bytes apart.
template <int kWords>
NVFP4_INLINE void lanes_to_lines(Words* v, uint8_t* target, int64_t stride) {
    if constexpr (kWords == 2) {
        alignas(64) uint64_t pairs[kWide];
        store_vector(pairs, __builtin_shufflevector(v[0], v[1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
        store_vector(pairs + 8, __builtin_shufflevector(v[0], v[1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
        for (int lane = 0; lane < kWide; ++lane) std::memcpy(target + lane * stride, pairs + lane, 8);
    } else {
        for (int group = 0; group < kWords / 4; ++group) {
            transpose_words(v + 4 * group);
            for (int part = 0; part < 4; ++part) {
                alignas(64) uint32_t words[kWide];
                store_vector(words, v[4 * group + part]);
                for (int i = 0; i < 4; ++i) std::memcpy(target + (4 * i + part) * stride + 16 * group, words + 4 * i, 16);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------ scales, as in formats.h

NVFP4_INLINE Words encode_e4m3(Floats value) {
    const Floats saturated = value > 448.0f ? all(448.0f) : value;
    const Words bits = bits_of(saturated);
    const Words normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    const Words subnormal = bits_of(saturated + 16384.0f) - as_bits(16384.0f);
    return value == value ? (saturated < 0.015625f ? subnormal : normal) : all(0x7Fu);
}

// Of codes without a sign.
NVFP4_INLINE Floats decode_e4m3(Words code) {
    const Floats subnormal = __builtin_convertvector((Ints)code, Floats) * 0.001953125f;
    const Floats value = code < 8u ? subnormal : floats_of((code + (120u << 3)) << 20);
    return code == 0x7Fu ? all(as_float(kQuietNan)) : value;
}

NVFP4_INLINE Words encode_e8m0(Floats largest, uint32_t carry, int32_t largest_exponent) {
    const Words bits = bits_of(largest);
    const Ints exponent = (Ints)((bits + carry) >> 23) - largest_exponent;
    return bits >= kExponent ? all(0xFFu) : exponent < 0 ? Words{} : (Words)exponent;
}

NVFP4_INLINE Floats decode_e8m0(Words code) {
    return floats_of(code == 0xFFu ? all(kQuietNan) : code == 0u ? all(0x00400000u) : code << 23);
}

NVFP4_INLINE Floats encode_factor(Floats scale, Floats decode) {
    const Floats factor = 1.0f / (scale * decode);
    return factor > FLT_MAX ? all(FLT_MAX) : factor;
}

NVFP4_INLINE void store_bytes(uint8_t* target, Words words) {
    store_vector(target, __builtin_convertvector(words, Bytes));
}

// ---------------------------------------------------------------------------------------------------------------- rounding

NVFP4_INLINE Words random_word(Words word, Words low, Words high) {
    Words state = word + low;
    state = (state ^ (state >> 16)) * 0x7FEB352Du;
    state = ((state ^ (state >> 15)) + high) * 0x846CA68Bu;
    return state ^ (state >> 16);
}

// Adding a power of two whose spacing is the grid's step leaves the number of steps in the last bits of the sum:
// (sum - magic) of them lie below the magnitude's own power of two, so that the code is that number plus the exponent, shifted.
struct OnGrid { Words sum, magic; };

// Rounds magnitudes that do not exceed the largest element: to nearest even, or after a move up by byte/256 of a step down.
template <bool kStochastic, typename Element>
NVFP4_INLINE OnGrid to_grid(Floats size, Words byte) {
    constexpr uint32_t smallest = Element::kSmallest << 23, to_magic = uint32_t(23 - Element::kMantissa) << 23;
    if (kStochastic) {
        const Words power = larger(bits_of(size) & kExponent, all(smallest));
        const Floats step = floats_of(power - (uint32_t(8 + Element::kMantissa) << 23));  // of 1/256
        size = size + __builtin_convertvector((Ints)byte, Floats) * step;
    }
    const Words magic = larger(bits_of(size) & kExponent, all(smallest)) + to_magic;
    const Floats sum = kStochastic ? add_toward_zero(size, floats_of(magic)) : size + floats_of(magic);
    return {bits_of(sum), magic};
}

// What `code_above` is too large by; a constant, so that codes can be put together before it is subtracted.
template <typename Element>
constexpr uint32_t code_excess() { return (Element::kSmallest + 23u - uint32_t(Element::kMantissa)) << Element::kMantissa; }

template <typename Element>
NVFP4_INLINE Words code_above(OnGrid at) { return (at.sum - at.magic) + (at.magic >> (23 - Element::kMantissa)); }

NVFP4_INLINE Floats value_of(OnGrid at) { return floats_of(at.sum) - floats_of(at.magic); }

// Rounds kWidth lines of 16 blocks: `words` hold a random byte for each of four lines. `pieces` get what becomes of a block,
// 32 bits after the other: pairs of BF16 numbers, four bytes, or eight codes.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
NVFP4_INLINE void round_lines(const Floats* v, Floats encode, Floats scale, const Words* words, Words* pieces) {
    constexpr int per_piece = kOperand ? 2 : Element::kIsByte ? 4 : 8, shift = 32 / per_piece;
    constexpr bool keeps_zero_sign = Element::kIsByte || kStochastic;
    constexpr uint32_t excess = code_excess<Element>(), sign = Element::kIsByte ? 0x80u : 8u;
#pragma GCC unroll 16
    for (int piece = 0; piece < kWidth / per_piece; ++piece) {
        Words result = {};
#pragma GCC unroll 8
        for (int part = 0; part < per_piece; ++part) {
            const int line = piece * per_piece + part;
            const Floats scaled = v[line] * encode;
            const Words size = bits_of(scaled) & ~kSign;
            const Words byte = kStochastic ? (words[line / 4] >> uint32_t(8 * (line % 4))) & 0xFFu : Words{};
            const OnGrid at = to_grid<kStochastic, Element>(floats_of(smaller(size, all(as_bits(Element::kLargest)))), byte);
            const auto is_negative = keeps_zero_sign ? (Ints)scaled < 0 : scaled < 0.0f;
            if (kOperand) {
                const Words signed_value = bits_of(value_of(at)) | (is_negative ? all(kSign) : Words{});
                Words value = bits_of(floats_of(signed_value) * scale);
                if (Element::kIsByte) {
                    value = bits_of(bf16_of_clean(floats_of(value)));
                    value = size >= kExponent || (Words)(scale != scale) != 0u ? all(kQuietNan) : value;
                }
                result = part == 0 ? value >> 16 : result | (value & 0xFFFF0000u);
            } else {
                Words code = code_above<Element>(at);
                code = is_negative ? code + sign : code;
                if (Element::kIsByte) code = size >= kExponent ? all(0x7Fu + excess) : code;
                result = result + (code << uint32_t(shift * part));
            }
        }
        if (!kOperand) {
            constexpr uint32_t ones = Element::kIsByte ? 0x01010101u : 0x11111111u;
            result = result - excess * ones;
            // a block that holds NaN has a NaN scale and factor; E2M1 has no code for it
            if (!Element::kIsByte) result = encode == encode ? result : Words{};
        }
        pieces[piece] = result;
    }
}

NVFP4_INLINE Words maxima(const Floats* v, int count) {
    Words largest = {};
    for (int line = 0; line < count; ++line) largest = larger(largest, bits_of(v[line]) & ~kSign);
    return largest;
}

}  // namespace
