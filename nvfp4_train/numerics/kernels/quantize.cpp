// Quantization on a CPU: codes and scales, or GEMM operands, along rows or down columns. Called through ctypes.

#include "lanes.h"
#include "pages.h"

namespace {

enum ScaleKind { kE4m3Scale = 0, kE8m0Scale = 1, kNoScale = 2 };

// What `count` blocks need and get: maxima in; scales, factors that encode elements, and scale bytes out. Without block scales
// the encode factors come from the FP32 scales alone.
template <int kCount>
struct Blocks {
    alignas(64) float largest[kCount], amax_encode[kCount], amax_decode[kCount], scale[kCount], encode[kCount];
    uint8_t code[kCount];
};

template <typename Element, int kCount>
void block_scales(const Job& job, int count, Blocks<kCount>& b) {
    if (job.scale_kind == kE4m3Scale) {
#pragma omp simd
        for (int lane = 0; lane < count; ++lane) {
            const uint32_t code = encode_e4m3(b.largest[lane] * (b.amax_encode[lane] * job.reciprocal));
            b.scale[lane] = decode_e4m3(code);
            b.encode[lane] = encode_factor(b.scale[lane], b.amax_decode[lane]);
            b.code[lane] = uint8_t(code);
        }
    } else if (job.scale_kind == kE8m0Scale) {
        const uint32_t carry = job.scale_rule == kAmax ? 0x7FFFFFu - Element::kLargestMantissa : 0u;
#pragma omp simd
        for (int lane = 0; lane < count; ++lane) {
            const uint32_t code = encode_e8m0(b.largest[lane], carry, int32_t(Element::kLargestExponent));
            b.scale[lane] = decode_e8m0(code);
            b.encode[lane] = as_float(code == 0xFFu ? kQuietNan : (254u - code) << 23);  // 2^(127 - code), a normal number
            b.code[lane] = uint8_t(code);
        }
    } else {
#pragma omp simd
        for (int lane = 0; lane < count; ++lane) {
            b.scale[lane] = 1.0f;
            b.encode[lane] = b.amax_encode[lane];
        }
    }
}

// Where round_line finds the random byte in a word, and where it puts its result in what `out` already holds.
struct Placement { int byte_shift, out_shift; uint32_t keep; };

// The one loop over elements: out gets codes or the BF16 bits of operands.
template <bool kStochastic, bool kOperand, typename Element, typename T>
void round_line(const T* x, const float* encode, const float* scale, const uint32_t* words, int count, Placement place,
                uint32_t* out) {
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) {
        const float scaled = load(x[lane]) * encode[lane];
        const float rounded = kStochastic ? round_stochastic<Element>(scaled, (words[lane] >> place.byte_shift) & 0xFFu)
                                          : round_nearest<Element>(scaled);
        const uint32_t part = kOperand ? operand_of<Element>(rounded, scale[lane]) >> 16 : code_of<Element>(rounded);
        out[lane] = (out[lane] & place.keep) | part << place.out_shift;
    }
}

// ------------------------------------------------------------------------------------------------- blocks along the rows

constexpr int kRowBlocks = kRowChunk / kBlock;

template <int kWidth, typename T>
void row_maxima(const T* x, int blocks, uint32_t* bits) {
    for (int block = 0; block < blocks; ++block) {
        uint32_t largest = 0;
        for (int lane = 0; lane < kWidth; ++lane) largest = larger(largest, size_bits(x[block * kWidth + lane]));
        bits[block] = larger(bits[block], largest);
    }
}

void store_operand(const uint32_t* parts, int count, uint16_t* out) {
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) out[lane] = uint16_t(parts[lane]);
}

template <typename Element>
void store_codes(const uint32_t* parts, int count, uint8_t* out) {
    if (Element::kIsByte) {
#pragma omp simd
        for (int lane = 0; lane < count; ++lane) out[lane] = uint8_t(parts[lane]);
        return;
    }
    uint64_t pairs[kRowChunk / 2];
    std::memcpy(pairs, parts, sizeof(uint32_t) * size_t(count));
#pragma omp simd
    for (int pair = 0; pair < count / 2; ++pair) out[pair] = uint8_t(pairs[pair] | pairs[pair] >> 28);
}

// Factors of the FP32 scales above the blocks of a row, starting at `column`.
void row_factors(const Job& job, int64_t row, int64_t column, int blocks, Blocks<kRowBlocks>& b) {
    const int per_factor = job.outer == kChunkScale ? kChunk / job.width : blocks;
    for (int block = 0; block < blocks; block += per_factor) {
        const Factors factors = outer_factors(job, row, column + block * job.width);
        for (int here = block; here < std::min(block + per_factor, blocks); ++here) {
            b.amax_encode[here] = factors.encode;
            b.amax_decode[here] = factors.decode;
        }
    }
}

// `height` rows that share scales (the width of a block for tiles) and up to kRowChunk columns, starting at (row, column).
template <bool kStochastic, bool kOperand, typename Element, int kWidth, typename T>
void quantize_rows(const Job& job, int64_t row, int height, int64_t column, int columns) {
    const int blocks = columns / kWidth;
    uint32_t bits[kRowBlocks] = {};
    Blocks<kRowBlocks> b;
    uint8_t bytes[kRowChunk];
    alignas(64) float scales[kRowChunk], encodes[kRowChunk];
    alignas(64) uint32_t words[kRowChunk], parts[kRowChunk] = {};
    const T* x = static_cast<const T*>(job.x) + row * job.stride + column;
    if (job.scale_kind != kNoScale)
        for (int line = 0; line < height; ++line) row_maxima<kWidth>(x + line * job.stride, blocks, bits);
    for (int block = 0; block < blocks; ++block) b.largest[block] = size_value(bits[block], T{});
    if (job.outer != kNoAmax) row_factors(job, row, column, blocks, b);
    block_scales<Element>(job, blocks, b);
    spread<kWidth>(b.scale, blocks, scales);
    spread<kWidth>(b.encode, blocks, encodes);
    for (int line = 0; line < height; ++line) {
        const int64_t here = (row + line) * job.columns + column;
        if (kStochastic) {
            random_row(job, row_key(job, row + line), column, columns, bytes);
#pragma omp simd
            for (int lane = 0; lane < columns; ++lane) words[lane] = bytes[lane];
        }
        const T* source = x + line * job.stride;
        round_line<kStochastic, kOperand, Element>(source, encodes, scales, words, columns, {0, 0, 0u}, parts);
        if (kOperand) store_operand(parts, columns, job.operand + here);
        else store_codes<Element>(parts, columns, job.codes + (Element::kIsByte ? here : here / 2));
        if (!kOperand && job.scale_kind != kNoScale) std::memcpy(job.scales + here / kWidth, b.code, size_t(blocks));
    }
}

template <bool kStochastic, bool kOperand, typename Element, int kWidth, typename T>
void quantize_along_rows(const Job& job, const Region& region) {
    const int height = job.is_tile && job.scale_kind != kNoScale ? kWidth : 1;
    for (int64_t row = region.row; row < region.last_row; row += height)
        for (int64_t column = region.column; column < region.last_column; column += kRowChunk) {
            const int columns = int(std::min<int64_t>(kRowChunk, region.last_column - column));
            quantize_rows<kStochastic, kOperand, Element, kWidth, T>(job, row, height, column, columns);
        }
}

// ---------------------------------------------------------------------------------------------- blocks down the columns

void tile_maxima(uint32_t* bits, int width) {
    for (int first = 0; first < kLanes; first += width)
        std::fill_n(bits + first, width, *std::max_element(bits + first, bits + first + width));
}

// Rounds a block of kWidth x kLanes elements. `out` gets 32-bit pieces of what each lane's block becomes: pairs of BF16 numbers,
// four bytes, or eight codes of four bits.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void round_lanes(const float (*v)[kLanes], const Blocks<kLanes>& b, const uint32_t (*words)[kLanes], uint32_t (*out)[kLanes]) {
    constexpr int per_piece = kOperand ? 2 : Element::kIsByte ? 4 : 8;
    for (int line = 0; line < kWidth; ++line) {
        const int shift = 32 / per_piece * (line % per_piece);
        const Placement place = {8 * (line % 4), shift, shift == 0 ? 0u : 0xFFFFFFFFu};
        uint32_t* piece = out[line / per_piece];
        round_line<kStochastic, kOperand, Element>(v[line], b.encode, b.scale, words[line / 4], kLanes, place, piece);
    }
}

// One block of each of up to kLanes columns: row `column + lane` of the transposed result.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void quantize_lanes(const Job& job, const float (*v)[kLanes], const RowKey* keys, int64_t row, int64_t column, int lanes,
                    Blocks<kLanes>& b) {
    constexpr int per_piece = kOperand ? 2 : Element::kIsByte ? 4 : 8, pieces = kWidth / per_piece;
    alignas(64) uint32_t bits[kLanes] = {}, words[kWidth / 4][kLanes], out[pieces][kLanes] = {};
    if (job.scale_kind != kNoScale) {
        lane_maxima(v, kWidth, bits);
        if (job.is_tile) tile_maxima(bits, kWidth);
    }
    for (int lane = 0; lane < kLanes; ++lane) b.largest[lane] = as_float(bits[lane]);
    block_scales<Element>(job, kLanes, b);
    if (kStochastic)
        for (int part = 0; part < kWidth / 4; ++part) {
            const uint32_t word = word_index(job, row + 4 * part);
#pragma omp simd
            for (int lane = 0; lane < kLanes; ++lane) words[part][lane] = random_word(word, keys[lane].low, keys[lane].high);
        }
    round_lanes<kStochastic, kOperand, Element, kWidth>(v, b, words, out);
    for (int lane = 0; lane < lanes; ++lane) {
        const int64_t here = (column + lane) * job.rows + row;
        uint32_t line[pieces];
        for (int part = 0; part < pieces; ++part) line[part] = out[part][lane];
        if (kOperand) std::memcpy(job.operand + here, line, sizeof(line));
        else std::memcpy(job.codes + (Element::kIsByte ? here : here / 2), line, sizeof(line));
        if (!kOperand && job.scale_kind != kNoScale) job.scales[here / kWidth] = b.code[lane];
    }
}

// Factors of the FP32 scales above the blocks that start at `row` in each of up to kLanes columns.
void lane_factors(const Job& job, int64_t row, int64_t column, int lanes, Blocks<kLanes>& b) {
    const bool is_shared = job.outer == kTensorScale;
    for (int lane = 0; lane < kLanes; ++lane) {
        const Factors factors = outer_factors(job, is_shared ? 0 : column + std::min(lane, lanes - 1), row);
        b.amax_encode[lane] = factors.encode;
        b.amax_decode[lane] = factors.decode;
    }
}

// A strip of columns between two rows.
template <bool kStochastic, bool kOperand, typename Element, int kWidth, typename T>
void quantize_strip(const Job& job, int64_t first, int64_t last, int64_t column, int lanes) {
    const int height = std::max(kWidth, int(job.hadamard));  // rows that are transformed together hold whole blocks
    alignas(64) float v[kMostRows][kLanes];
    Blocks<kLanes> b;
    RowKey keys[kLanes] = {};
    if (kStochastic)
        for (int lane = 0; lane < lanes; ++lane) keys[lane] = row_key(job, column + lane);
    for (int64_t row = first; row < last; row += height) {
        if (job.outer != kNoAmax && (row == first || (job.outer == kChunkScale && row % kChunk == 0)))
            lane_factors(job, row, column, lanes, b);
        load_lanes<T>(job, row, height, column, lanes, v);
        for (int block = 0; block < height; block += kWidth)
            quantize_lanes<kStochastic, kOperand, Element, kWidth>(job, v + block, keys, row + block, column, lanes, b);
    }
}

template <bool kStochastic, bool kOperand, typename Element, int kWidth, typename T>
void quantize_down_columns(const Job& job, const Region& region) {
    for (int64_t column = region.column; column < region.last_column; column += kLanes) {
        const int lanes = int(std::min<int64_t>(kLanes, region.last_column - column));
        quantize_strip<kStochastic, kOperand, Element, kWidth, T>(job, region.row, region.last_row, column, lanes);
    }
}

// -------------------------------------------------------------------------------------------------------- four over six

struct Candidate { uint8_t code[kBlock][kBlock]; uint32_t scale; float error; };

// `v` holds `height` rows of one block.
Candidate try_scale(const float (*v)[kBlock], int height, float scaled, const Factors& factors, const Job& job) {
    Candidate result;
    result.scale = encode_e4m3(scaled);
    const float scale = decode_e4m3(result.scale), encode = encode_factor(scale, factors.decode);
    float row_error[kBlock] = {};
    for (int line = 0; line < height; ++line)
        for (int lane = 0; lane < kBlock; ++lane) {
            const float rounded = round_nearest<E2M1>(v[line][lane] * encode);
            result.code[line][lane] = uint8_t(code_of<E2M1>(rounded));
            const float decoded = ((rounded * scale) * factors.amax) / job.largest_product;
            const float difference = decoded - v[line][lane];
            const float error = job.scale_rule == kFourOverSixMse ? difference * difference : std::fabs(difference);
            row_error[line] = row_error[line] + error;
        }
    for (int half = height / 2; half > 0; half /= 2)
        for (int line = 0; line < half; ++line) row_error[line] = row_error[line] + row_error[line + half];
    result.error = row_error[0];
    return result;
}

template <typename T>
void quantize_four_over_six(const Job& job, const Region& region) {
    const int height = job.is_tile ? kBlock : 1;
    const Factors factors = outer_factors(job, 0, 0);
    for (int64_t row = region.row; row < region.last_row; row += height)
        for (int64_t column = region.column; column < region.last_column; column += kBlock) {
            float v[kBlock][kBlock];
            uint32_t bits = 0;
            for (int line = 0; line < height; ++line)
                for (int lane = 0; lane < kBlock; ++lane) {
                    v[line][lane] = load(static_cast<const T*>(job.x)[(row + line) * job.stride + column + lane]);
                    bits = larger(bits, as_bits(v[line][lane]) & ~kSign);
                }
            const float base = (as_float(bits) / 6.0f) * factors.encode;
            const Candidate six = try_scale(v, height, base, factors, job);
            const Candidate four = try_scale(v, height, base * 1.5f, factors, job);
            const Candidate& best = four.error < six.error ? four : six;
            for (int line = 0; line < height; ++line) {
                const int64_t here = (row + line) * job.columns + column;
                for (int pair = 0; pair < kBlock / 2; ++pair)
                    job.codes[here / 2 + pair] = uint8_t(best.code[line][2 * pair] | best.code[line][2 * pair + 1] << 4);
                job.scales[here / kBlock] = uint8_t(best.scale);
            }
        }
}

// ----------------------------------------------------------------------------------------------------- choosing a kernel

using Kernel = void (*)(const Job&, const Region&);

template <bool kStochastic, bool kOperand, typename Element, int kWidth, typename T>
Kernel kernel_in(bool column) {
    return column ? quantize_down_columns<kStochastic, kOperand, Element, kWidth, T>
                  : quantize_along_rows<kStochastic, kOperand, Element, kWidth, T>;
}

template <typename Element, int kWidth, typename T>
Kernel kernel_of(const Job& job, bool column) {
    if (job.stochastic && job.operand) return kernel_in<true, true, Element, kWidth, T>(column);
    if (job.stochastic) return kernel_in<true, false, Element, kWidth, T>(column);
    if (job.operand) return kernel_in<false, true, Element, kWidth, T>(column);
    return kernel_in<false, false, Element, kWidth, T>(column);
}

template <typename T>
Kernel typed_kernel(const Job& job, bool column) {
    if (job.scale_rule == kFourOverSixMae || job.scale_rule == kFourOverSixMse) return quantize_four_over_six<T>;
    if (job.element == kE2m1) return job.width == 32 ? kernel_of<E2M1, 32, T>(job, column) : kernel_of<E2M1, 16, T>(job, column);
    return job.element == kE4m3 ? kernel_of<E4M3, 32, T>(job, column) : kernel_of<E5M2, 32, T>(job, column);
}

Kernel choose(const Job& job, bool column) {
    const size_t count = size_t(job.rows) * size_t(job.columns);
    prefer_large_pages(job.operand, 2 * count);
    prefer_large_pages(job.codes, job.element == kE2m1 ? count / 2 : count);
    return job.is_fp32 ? typed_kernel<float>(job, column) : typed_kernel<BFloat16>(job, column);
}

}  // namespace

extern "C" {

void nvfp4_quantize(const Job* job, int column) {
    const Kernel kernel = choose(*job, column);
    for_each_region(*job, column ? kColumnRegion : kRowRegion, [&](const Region& region) { kernel(*job, region); });
}

// Both directions of one x: each region is read from memory once and from the cache afterwards.
void nvfp4_quantize_both(const Job* rows, const Job* columns) {
    const Kernel along_rows = choose(*rows, false), down_columns = choose(*columns, true);
    for_each_region(*rows, kColumnRegion, [&](const Region& region) {
        along_rows(*rows, region);
        down_columns(*columns, region);
    });
}

}  // extern "C"
