// Sixteen FP32 lanes at a time: loads and stores of FP32 and BF16 tensors, and the functions that activations need.
//
// GCC's vector types, so that the same code serves every CPU; sums are FP32, and so is everything between a load and a store.

#pragma once

#include "../../numerics/kernels/pages.h"

#include <cstdint>
#include <cstring>

#include <algorithm>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kWide = 16;

typedef float Vector __attribute__((vector_size(64), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), may_alias));

struct BFloat16 { uint16_t bits; };

inline Vector splat(float x) { return Vector{} + x; }
inline Vector choose(Ints where, Vector yes, Vector no) { return where ? yes : no; }

inline Vector load(const float* x) { Vector v; std::memcpy(&v, x, sizeof v); return v; }
inline void store(float* x, Vector v) { std::memcpy(x, &v, sizeof v); }

inline Vector load(const BFloat16* x) {
#if defined(__AVX512F__)  // GCC 12 converts vectors of 16 in halves
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16);
#else
    Halves halves;
    std::memcpy(&halves, x, sizeof halves);
    return (Vector)(__builtin_convertvector(halves, Bits) << 16);
#endif
}

// Rounds to nearest even.
inline Bits bf16_bits(Vector v) {
    const Bits bits = (Bits)v, rounded = bits + (((bits >> 16) & 1u) + 0x7FFFu);
    return (v == v ? rounded : Bits{} + 0x7FC00000u) >> 16;
}
inline void store(BFloat16* x, Vector v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_cvtepi32_epi16((__m512i)bf16_bits(v)));
#else
    const Halves halves = __builtin_convertvector(bf16_bits(v), Halves);
    std::memcpy(x, &halves, sizeof halves);
#endif
}

// The first `count` lanes; the others are zero, and are not written.
template <typename T>
inline Vector load_part(const T* x, int64_t count) {
    if (count >= kWide) return load(x);
    T part[kWide] = {};
    std::memcpy(part, x, sizeof(T) * size_t(count));
    return load(part);
}
template <typename T>
inline void store_part(T* x, Vector v, int64_t count) {
    if (count >= kWide) return store(x, v);
    T part[kWide];
    store(part, v);
    std::memcpy(x, part, sizeof(T) * size_t(count));
}

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { const uint32_t bits = uint32_t(x.bits) << 16; float v; std::memcpy(&v, &bits, 4); return v; }

inline float sum(Vector v) {
    float total = 0;
    for (int lane = 0; lane < kWide; ++lane) total += v[lane];
    return total;
}

// e^x to the last digits of FP32; zero below -87.3, at most e^88.3. NaN stays NaN.
inline Vector exponential(Vector x) {
    const Vector bounded = choose(x > splat(88.3762626f), splat(88.3762626f), x);
    const Vector shifted = bounded * 1.44269504f + 12582912.0f;  // rounds to an integer, which stands in the low bits
    const Vector n = shifted - 12582912.0f;
    const Vector r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Bits power = ((Bits)shifted + (127u - 0x4B400000u)) << 23;
    return choose(x < splat(-87.3f), Vector{}, p * (Vector)power);
}

inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace
