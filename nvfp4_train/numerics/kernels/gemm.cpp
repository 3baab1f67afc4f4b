// BF16 x BF16 GEMM with FP32 sums for CPUs with AVX-512 BF16, on BF16 values or straight on packed codes. Called through ctypes.
//
// out = alpha * a b^T, rounded once. The sum of an output element always runs over k in ascending order, in one FP32 register
// lane, whatever the shape, the blocking and the number of threads: rows of the result do not depend on which other rows are
// computed with them.
//
// Blocking: b is repacked once into panels of 32 rows that all threads share (cache level 3), a into panels of 12 rows that one
// thread uses (level 2). A tile of 12 x 32 sums stays in registers for kPairs pairs of k, then in a buffer in level 1. Both
// operands are repacked to pairs of BF16 numbers, what the dot-product instruction takes; packed codes are decoded on the way.

#include "formats.h"
#include "pages.h"

#include <atomic>
#include <cstdlib>
#include <memory>

extern "C" {

// One operand [rows, k]; mirrored by `Side` in gemm.py.
struct Side {
    const void* data;       // BF16 numbers, or bytes of codes
    const uint8_t* scales;  // of blocks of codes along a line of memory
    const float* factors;   // of every 128 k of a row: a [rows, chunks], b [chunks, rows]; null where there are none
    int64_t rows;
    int64_t stride;         // from one line of memory to the next, in BF16 numbers or bytes
    int64_t scale_stride;   // the same for the scales
    int64_t factor_stride;  // the same for the factors
    int32_t is_transposed;  // a line of memory holds one k of all rows, not one row
    int32_t element;        // of codes: 0 E2M1, two to a byte, 1 E4M3, 2 E5M2; -1 for BF16 numbers
    int32_t scale_kind;     // 0 E4M3 for 16 codes, 1 E8M0 for 32, 2 none
};

// Mirrored by `Gemm` in gemm.py.
struct Gemm {
    Side a, b;
    int64_t depth;  // k
    const float* alpha;
    int64_t alpha_row_stride, alpha_column_stride;  // 0 where one factor serves all rows or all columns; else 1 for columns
    void* out;                                      // [a.rows, b.rows]
    int32_t is_fp32, threads;
};

// Whether nvfp4_gemm was compiled for a CPU that has its instructions.
int nvfp4_has_gemm() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    return 1;
#else
    return 0;
#endif
}

void nvfp4_gemm(const Gemm* gemm);

}  // extern "C"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>
#include <omp.h>

namespace {

constexpr int kWide = 16;             // 32-bit lanes of a register
constexpr int kRows = 12, kColumns = 32;  // of a tile: 24 registers of sums
constexpr int64_t kPairs = 192;       // pairs of k between two visits of the sums' buffer; a panel of b takes 24 KiB of them
constexpr int64_t kLevel2 = 400 << 10, kLevel3 = 8 << 20;  // bytes of packed a of a thread, and of packed b

using Vector = __m512i;

// Grows only; keeps its pages, since getting new ones from the system costs as much as filling them.
struct Buffer {
    uint32_t* data = nullptr;
    size_t size = 0;
    uint32_t* reserve(size_t count) {
        if (count > size) {
            std::free(data);
            size = (count + 1023) / 1024 * 1024;
            data = static_cast<uint32_t*>(std::aligned_alloc(4096, size * sizeof(uint32_t)));
            if (data == nullptr) std::abort();
            prefer_large_pages(data, size * sizeof(uint32_t));
        }
        return data;
    }
    ~Buffer() { std::free(data); }
};

// -------------------------------------------------------------------------------------------------------------- packing

// The lowest `count` bits; none for a negative count.
inline uint64_t first_bits(int64_t count) { return count >= 64 ? ~0ull : (1ull << std::max<int64_t>(count, 0)) - 1ull; }
inline __mmask16 first_lanes(int64_t count) { return __mmask16(first_bits(std::min<int64_t>(count, 16))); }
inline __mmask32 first_words(int64_t count) { return __mmask32(first_bits(std::min<int64_t>(count, 32))); }
inline __mmask64 first_bytes(int64_t count) { return first_bits(count); }

// Transposes 16 x 16 words.
inline void transpose(Vector (&v)[kWide]) {
    Vector t[kWide];
    for (int i = 0; i < kWide; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < kWide; i += 4)
        for (int j = 0; j < 2; ++j) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        t[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
        t[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
    }
    for (int j = 0; j < 4; ++j) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
        v[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
        v[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xDD);
    }
}

// Up to 16 rows of an operand, to be written to dst[pair * width + row].
struct Strip {
    const Side& side;
    int64_t first;  // row
    int rows, width;
    uint32_t* dst;
    void store(int64_t pair, Vector words) const { _mm512_mask_storeu_epi32(dst + pair * width, first_lanes(rows), words); }
};

void pack_values(const Strip& strip, int64_t depth) {
    const uint16_t* x = static_cast<const uint16_t*>(strip.side.data) + strip.first * strip.side.stride;
    for (int64_t k = 0; k < depth; k += 32) {
        const __mmask32 mask = first_words(depth - k);
        Vector v[kWide] = {};
        for (int row = 0; row < strip.rows; ++row) v[row] = _mm512_maskz_loadu_epi16(mask, x + row * strip.side.stride + k);
        transpose(v);
        const int64_t pairs = std::min<int64_t>(kWide, (depth - k + 1) / 2);
        for (int64_t pair = 0; pair < pairs; ++pair) strip.store(k / 2 + pair, v[pair]);
    }
}

void pack_values_transposed(const Strip& strip, int64_t depth) {
    const __mmask16 mask = first_lanes(strip.rows);
    const uint16_t* x = static_cast<const uint16_t*>(strip.side.data) + strip.first;
    for (int64_t k = 0; k < depth; k += 2, x += 2 * strip.side.stride) {
        const Vector even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
        const __mmask16 has_odd = k + 1 < depth ? mask : __mmask16(0);
        const Vector odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_odd, x + (has_odd ? strip.side.stride : 0)));
        strip.store(k / 2, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

struct Tables {
    alignas(64) float e2m1[16], e4m3[256], e8m0[256];
    Tables() {
        for (uint32_t code = 0; code < 16; ++code) e2m1[code] = decode_e2m1(code);
        for (uint32_t code = 0; code < 256; ++code) {
            e4m3[code] = decode_e4m3(code);
            e8m0[code] = decode_e8m0(code);
        }
    }
};
const Tables kTables;

// Rounds to nearest even, in the upper halves; the instruction for this would flush subnormal results.
inline Vector round_to_bf16(__m512 x) {
    const Vector bits = _mm512_castps_si512(x);
    const Vector even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Vector rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(int(kQuietNan)));
}

// What codes of an element format and their scales stand for: FP32 bits of code * scale with 16 bits of BF16 above, from the
// lowest bits of each lane. Exact, except where an 8-bit code times a tiny power of two is a subnormal number of BF16.
template <typename Element>
struct Decoder {
    static constexpr int kBits = 8;
    static Vector values(Vector codes, __m512 scale, bool has_scale) {
        const Vector size = _mm512_and_si512(codes, _mm512_set1_epi32(0x7F));
        const Vector sign = _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(0x80)), 24);
        const Vector exponents = _mm512_set1_epi32(int((Element::kSmallest - 1u) << Element::kMantissa));
        const Vector normal = _mm512_slli_epi32(_mm512_add_epi32(size, exponents), 23 - Element::kMantissa);
        const __m512 step = _mm512_set1_ps(power_of_two<Element::kSmallest>() / float(1 << Element::kMantissa));
        const __m512 subnormal = _mm512_mul_ps(_mm512_cvtepi32_ps(size), step);
        const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(1 << Element::kMantissa));
        Vector bits = _mm512_mask_mov_epi32(normal, is_small, _mm512_castps_si512(subnormal));
        const Vector largest = _mm512_set1_epi32(int(as_bits(Element::kLargest)));
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmpgt_epi32_mask(bits, largest), _mm512_set1_epi32(int(kQuietNan)));
        bits = _mm512_or_si512(bits, sign);
        return has_scale ? round_to_bf16(_mm512_mul_ps(_mm512_castsi512_ps(bits), scale)) : bits;
    }
};

template <>
struct Decoder<E2M1> {
    static constexpr int kBits = 4;
    static Vector values(Vector codes, __m512 scale, bool) {
        const __m512 table = _mm512_load_ps(kTables.e2m1);
        return _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale));
    }
};

inline Vector pair_of(Vector even, Vector odd) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(even, 16), odd);
}

inline int block_width(const Side& side) { return side.scale_kind == 0 ? 16 : 32; }
inline const float* scale_table(const Side& side) { return side.scale_kind == 0 ? kTables.e4m3 : kTables.e8m0; }

// 64 bytes of codes of 16 rows at a time: they are transposed four to a word.
template <typename Element>
void pack_codes(const Strip& strip, int64_t depth) {
    constexpr int bits = Decoder<Element>::kBits, pairs_of_word = 16 / bits, per_vector = 512 / bits;
    const Side& side = strip.side;
    const uint8_t* codes = static_cast<const uint8_t*>(side.data) + strip.first * side.stride;
    const bool has_scale = side.scale_kind != 2;
    const int64_t width = block_width(side), bytes = (depth * bits + 7) / 8;
    for (int64_t k = 0; k < depth; k += per_vector) {
        const int64_t first_byte = k * bits / 8;
        const __mmask64 mask = first_bytes(bytes - first_byte);
        Vector v[kWide] = {};
        for (int row = 0; row < strip.rows; ++row) v[row] = _mm512_maskz_loadu_epi8(mask, codes + row * side.stride + first_byte);
        transpose(v);
        for (int64_t start = k; start < std::min<int64_t>(depth, k + per_vector); start += width) {
            alignas(64) float scale[kWide] = {};
            if (has_scale)
                for (int row = 0; row < strip.rows; ++row)
                    scale[row] = scale_table(side)[side.scales[(strip.first + row) * side.scale_stride + start / width]];
            const __m512 factors = _mm512_load_ps(scale);
            for (int64_t here = start; here < std::min<int64_t>(depth, start + width); here += 2) {
                const int64_t place = (here - k) / 2;
                const Vector word = _mm512_srli_epi32(v[place / pairs_of_word], unsigned(2 * bits * (place % pairs_of_word)));
                const Vector even = Decoder<Element>::values(word, factors, has_scale);
                strip.store(here / 2, pair_of(even, Decoder<Element>::values(_mm512_srli_epi32(word, bits), factors, has_scale)));
            }
        }
    }
}

// Codes of one k in 16 lanes, which may belong to two blocks.
template <typename Element>
Vector transposed_line(const Strip& strip, int64_t k) {
    const Side& side = strip.side;
    const uint8_t* codes = static_cast<const uint8_t*>(side.data) + k * side.stride + strip.first * Decoder<Element>::kBits / 8;
    const int count = (strip.rows * Decoder<Element>::kBits + 7) / 8;
    const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1u), codes);
    const bool is_packed = Decoder<Element>::kBits == 4;
    const __m512i lanes = _mm512_cvtepu8_epi32(is_packed ? _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)) : bytes);
    if (side.scale_kind == 2) return Decoder<Element>::values(lanes, _mm512_setzero_ps(), false);
    const uint8_t* scales = side.scales + k * side.scale_stride;
    const int64_t width = block_width(side), block = strip.first / width, last = (strip.first + strip.rows - 1) / width;
    const __mmask16 in_last = __mmask16(0xFFFFu << std::min<int64_t>((block + 1) * width - strip.first, 16));
    const __m512 scale = _mm512_set1_ps(scale_table(side)[scales[block]]);
    const __m512 last_scale = _mm512_set1_ps(scale_table(side)[scales[last]]);
    return Decoder<Element>::values(lanes, _mm512_mask_blend_ps(in_last, scale, last_scale), true);
}

template <typename Element>
void pack_codes_transposed(const Strip& strip, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 2) {
        const Vector odd = k + 1 < depth ? transposed_line<Element>(strip, k + 1) : _mm512_setzero_si512();
        strip.store(k / 2, pair_of(transposed_line<Element>(strip, k), odd));
    }
}

template <typename Element>
void pack_element(const Strip& strip, int64_t depth) {
    strip.side.is_transposed ? pack_codes_transposed<Element>(strip, depth) : pack_codes<Element>(strip, depth);
}

// Packs `width` rows from `first` on; rows beyond the operand become zero.
void pack_panel(const Side& side, int64_t first, int width, int64_t depth, uint32_t* dst) {
    const int64_t pairs = (depth + 1) / 2, present = std::min<int64_t>(width, side.rows - first);
    if (present < width) std::memset(dst, 0, size_t(pairs * width) * sizeof(uint32_t));
    for (int64_t row = 0; row < present; row += kWide) {
        const Strip strip = {side, first + row, int(std::min<int64_t>(kWide, present - row)), width, dst + row};
        switch (side.element) {
            case 0: pack_element<E2M1>(strip, depth); break;
            case 1: pack_element<E4M3>(strip, depth); break;
            case 2: pack_element<E5M2>(strip, depth); break;
            default: side.is_transposed ? pack_values_transposed(strip, depth) : pack_values(strip, depth);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- tiles

// The factors of a chunk of k: of 12 rows of a and of 32 columns; null where an operand has none.
struct ChunkFactors { const float *a, *b; };

// Adds `pairs` products to the sums of kCount rows; those of a chunk are summed up apart and multiplied by its factors.
template <int kCount, bool kIsChunk>
inline __attribute__((always_inline)) void multiply(int64_t pairs, const uint32_t* a, const uint32_t* b, float* sums,
                                                    bool is_first, const ChunkFactors& factors) {
    __m512 left[kCount], right[kCount];
    const bool starts = is_first || kIsChunk;
#pragma GCC unroll 12
    for (int row = 0; row < kCount; ++row) {
        left[row] = starts ? _mm512_setzero_ps() : _mm512_load_ps(sums + row * kColumns);
        right[row] = starts ? _mm512_setzero_ps() : _mm512_load_ps(sums + row * kColumns + kWide);
    }
    for (int64_t pair = 0; pair < pairs; ++pair, a += kRows, b += kColumns) {
        const __m512bh b_left = (__m512bh)_mm512_load_si512(b), b_right = (__m512bh)_mm512_load_si512(b + kWide);
#pragma GCC unroll 12
        for (int row = 0; row < kCount; ++row) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(int(a[row]));
            left[row] = _mm512_dpbf16_ps(left[row], both, b_left);
            right[row] = _mm512_dpbf16_ps(right[row], both, b_right);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kCount; ++row) {
        float* target = sums + row * kColumns;
        if (kIsChunk) {
            const __m512 own = _mm512_set1_ps(factors.a ? factors.a[row] : 1.0f), zero = _mm512_setzero_ps();
            const __m512 factor_left = factors.b ? _mm512_mul_ps(own, _mm512_load_ps(factors.b)) : own;
            const __m512 factor_right = factors.b ? _mm512_mul_ps(own, _mm512_load_ps(factors.b + kWide)) : own;
            left[row] = _mm512_add_ps(is_first ? zero : _mm512_load_ps(target), _mm512_mul_ps(factor_left, left[row]));
            right[row] = _mm512_add_ps(is_first ? zero : _mm512_load_ps(target + kWide), _mm512_mul_ps(factor_right, right[row]));
        }
        _mm512_store_ps(target, left[row]);
        _mm512_store_ps(target + kWide, right[row]);
    }
}

template <bool kIsChunk>
void multiply_tile(int rows, int64_t pairs, const uint32_t* a, const uint32_t* b, float* sums, bool is_first,
                   const ChunkFactors& factors) {
    if (rows > 8) multiply<12, kIsChunk>(pairs, a, b, sums, is_first, factors);
    else if (rows > 4) multiply<8, kIsChunk>(pairs, a, b, sums, is_first, factors);
    else multiply<4, kIsChunk>(pairs, a, b, sums, is_first, factors);
}

inline __m256i to_bf16(__m512 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(x), 16)); }

// Scales the sums of a tile and writes them.
void finish_tile(const Gemm& gemm, int64_t row, int64_t column, const float* sums) {
    const int rows = int(std::min<int64_t>(kRows, gemm.a.rows - row));
    for (int half = 0; half < 2; ++half) {
        const int64_t here = column + half * kWide;
        const __mmask16 mask = first_lanes(gemm.b.rows - here);
        if (mask == 0) return;
        for (int line = 0; line < rows; ++line) {
            const float* alpha = gemm.alpha + (row + line) * gemm.alpha_row_stride;
            const __m512 factor = gemm.alpha_column_stride ? _mm512_maskz_loadu_ps(mask, alpha + here) : _mm512_set1_ps(*alpha);
            const __m512 value = _mm512_mul_ps(_mm512_load_ps(sums + line * kColumns + half * kWide), factor);
            const int64_t place = (row + line) * gemm.b.rows + here;
            if (gemm.is_fp32) _mm512_mask_storeu_ps(static_cast<float*>(gemm.out) + place, mask, value);
            else _mm256_mask_storeu_epi16(static_cast<uint16_t*>(gemm.out) + place, mask, to_bf16(value));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- blocks

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The same with the factors that belong to the chunk of k at `pair`, for the tile at (row, column).
void multiply_chunk(const Gemm& gemm, int64_t row, int64_t column, int64_t pair, int64_t pairs, const uint32_t* a,
                    const uint32_t* b, float* sums) {
    const int rows = int(std::min<int64_t>(kRows, gemm.a.rows - row));
    const int64_t chunk = 2 * pair / kChunk;
    alignas(64) float own_a[kRows] = {}, own_b[kColumns] = {};
    for (int line = 0; line < rows && gemm.a.factors && pairs; ++line)
        own_a[line] = gemm.a.factors[(row + line) * gemm.a.factor_stride + chunk];
    for (int lane = 0; lane < std::min<int64_t>(kColumns, gemm.b.rows - column) && gemm.b.factors && pairs; ++lane)
        own_b[lane] = gemm.b.factors[chunk * gemm.b.factor_stride + column + lane];
    multiply_tile<true>(rows, pairs, a, b, sums, pair == 0,
                        {gemm.a.factors ? own_a : nullptr, gemm.b.factors ? own_b : nullptr});
}

// Rows first .. first + count of a times the packed panels of b from `column` on. `packed` and `sums` are this thread's.
void multiply_block(const Gemm& gemm, int64_t first, int64_t count, int64_t column, int64_t panels, const uint32_t* b,
                    uint32_t* packed, float* sums) {
    const int64_t pairs = (gemm.depth + 1) / 2, tiles = up(count, kRows);
    const bool has_chunks = gemm.a.factors || gemm.b.factors;
    const int64_t most = has_chunks ? kChunk / 2 : kPairs;
    for (int64_t tile = 0; tile < tiles; ++tile)
        pack_panel(gemm.a, first + tile * kRows, kRows, gemm.depth, packed + tile * kRows * pairs);
    for (int64_t panel = 0; panel < panels; ++panel) {
        for (int64_t pair = 0; pair == 0 || pair < pairs; pair += most) {
            const int64_t length = std::min(most, pairs - pair);
            const uint32_t* right = b + (panel * pairs + pair) * kColumns;
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const uint32_t* left = packed + (tile * pairs + pair) * kRows;
                float* own = sums + tile * kRows * kColumns;
                if (has_chunks)
                    multiply_chunk(gemm, first + tile * kRows, column + panel * kColumns, pair, length, left, right, own);
                else
                    multiply_tile<false>(int(std::min<int64_t>(kRows, count - tile * kRows)), length, left, right, own,
                                         pair == 0, {});
            }
        }
        for (int64_t tile = 0; tile < tiles; ++tile)
            finish_tile(gemm, first + tile * kRows, column + panel * kColumns, sums + tile * kRows * kColumns);
    }
}

// How the work is cut: rows of a per unit, and units side by side along the columns where the rows do not suffice.
struct Plan { int64_t block, blocks, chunk, sides; };

Plan plan_of(const Gemm& gemm) {
    const int64_t bytes = 2 * std::max<int64_t>(gemm.depth, 1);
    const int64_t most = std::clamp<int64_t>(kLevel2 / (bytes * kRows), 1, 12) * kRows;
    int64_t blocks = up(up(gemm.a.rows, most), gemm.threads) * gemm.threads;  // as many for each thread
    const int64_t block = up(up(gemm.a.rows, blocks), kRows) * kRows;
    blocks = up(gemm.a.rows, block);
    const int64_t chunk = std::max<int64_t>(kLevel3 / (bytes * kColumns), 4);  // panels of b packed at a time
    return {block, blocks, chunk, blocks >= gemm.threads ? 1 : up(gemm.threads, blocks)};
}

void run(const Gemm& gemm, uint32_t* b) {
    const int64_t pairs = (gemm.depth + 1) / 2, all = up(gemm.b.rows, kColumns);
    const Plan plan = plan_of(gemm);
#pragma omp parallel num_threads(gemm.threads)
    {
        thread_local Buffer own_a, own_sums;
        uint32_t* packed = own_a.reserve(size_t(plan.block * pairs));
        float* sums = reinterpret_cast<float*>(own_sums.reserve(size_t(plan.block * kColumns)));
        for (int64_t first = 0; first < all; first += plan.chunk) {
            const int64_t panels = std::min(plan.chunk, all - first), side = up(panels, plan.sides);
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < panels; ++panel)
                pack_panel(gemm.b, (first + panel) * kColumns, kColumns, gemm.depth, b + panel * pairs * kColumns);
#pragma omp for schedule(static)
            for (int64_t unit = 0; unit < plan.blocks * plan.sides; ++unit) {
                const int64_t row = unit / plan.sides * plan.block, start = unit % plan.sides * side;
                multiply_block(gemm, row, std::min(plan.block, gemm.a.rows - row), (first + start) * kColumns,
                               std::min(side, panels - start), b + start * pairs * kColumns, packed, sums);
            }
        }
    }
}

}  // namespace

extern "C" void nvfp4_gemm(const Gemm* gemm) {
    static Buffer shared;  // for one call at a time; another that comes meanwhile gets its own
    static std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
    if (gemm->a.rows == 0 || gemm->b.rows == 0) return;
    prefer_large_pages(gemm->out, size_t(gemm->a.rows * gemm->b.rows) * (gemm->is_fp32 ? 4 : 2));
    const int64_t pairs = (gemm->depth + 1) / 2;
    const size_t size = size_t(std::min(plan_of(*gemm).chunk, up(gemm->b.rows, kColumns)) * kColumns * pairs);
    if (is_taken.test_and_set(std::memory_order_acquire)) {
        Buffer own;
        run(*gemm, own.reserve(size));
        return;
    }
    run(*gemm, shared.reserve(size));
    is_taken.clear(std::memory_order_release);
}

#else

extern "C" void nvfp4_gemm(const Gemm*) { std::abort(); }  // nvfp4_has_gemm says so first

#endif
