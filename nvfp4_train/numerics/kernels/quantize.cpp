// Quantization on a CPU: amax, codes and scales, and GEMM operands, along rows or down columns. Called through ctypes.

#include "formats.h"

extern "C" {

// One quantization; mirrored by `Job` in native.py. Rows and columns are those of x; all dims are whole blocks.
struct Job {
    const void* x;
    const float* amax;  // [1], or one per row of x
    uint8_t* codes;     // outputs: packed codes and scale bytes, or the operand
    uint8_t* scales;
    uint16_t* operand;
    int64_t rows, columns, stride;
    uint64_t key;
    int64_t row_offset, column_offset;  // of the quantized matrix
    int32_t is_fp32, amax_per_row, tile, stochastic, hadamard, sign_mask, scale_rule, block_scale_max, threads;
};

}  // extern "C"

namespace {

enum ScaleRule { kAmax = 0, kFourOverSixMae = 1, kFourOverSixMse = 2 };

Factors row_factors(const Job& job, int64_t row) {
    return global_factors(job.amax[job.amax_per_row ? row : 0], 6.0f * float(job.block_scale_max));
}

// Scales and encode factors of `count` blocks that share global factors.
void block_scales(const float* largest, int count, const Factors& factors, float* scale, float* encode, uint8_t* codes) {
    const float multiplier = factors.block, decode = factors.decode;
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) {
        const uint32_t code = encode_e4m3(largest[lane] * multiplier);
        scale[lane] = decode_e4m3(code);
        encode[lane] = encode_factor(scale[lane], decode);
        codes[lane] = uint8_t(code);
    }
}

// Where round_line finds the random byte in a word, and where it puts its result in what `out` already holds.
struct Placement { int byte_shift, out_shift; uint32_t keep; };

// The one loop over elements: out gets codes or the BF16 bits of operands.
template <bool kStochastic, bool kOperand, typename T>
void round_line(const T* x, const float* encode, const float* scale, const uint32_t* words, int count, Placement place,
                uint32_t* out) {
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) {
        const float scaled = load(x[lane]) * encode[lane];
        const float rounded =
            kStochastic ? round_stochastic(scaled, (words[lane] >> place.byte_shift) & 0xFFu) : round_nearest(scaled);
        const uint32_t part = kOperand ? operand_of(rounded, scale[lane]) >> 16 : code_of(rounded);
        out[lane] = (out[lane] & place.keep) | part << place.out_shift;
    }
}

// ------------------------------------------------------------------------------------------------- blocks along the rows

template <typename T>
void row_maxima(const T* x, int blocks, uint32_t* bits) {
    for (int block = 0; block < blocks; ++block) {
        uint32_t largest = 0;
        for (int lane = 0; lane < kBlock; ++lane) largest = larger(largest, size_bits(x[block * kBlock + lane]));
        bits[block] = larger(bits[block], largest);
    }
}

void store_operand(const uint32_t* parts, int count, uint16_t* out) {
#pragma omp simd
    for (int lane = 0; lane < count; ++lane) out[lane] = uint16_t(parts[lane]);
}

void store_codes(const uint32_t* parts, int count, uint8_t* out) {
    uint64_t pairs[kRowChunk / 2];
    std::memcpy(pairs, parts, sizeof(uint32_t) * size_t(count));
#pragma omp simd
    for (int pair = 0; pair < count / 2; ++pair) out[pair] = uint8_t(pairs[pair] | pairs[pair] >> 28);
}

// `height` rows that share scales (16 for tiles) and up to kRowChunk columns, starting at (row, column).
template <bool kStochastic, bool kOperand, typename T>
void quantize_rows(const Job& job, int64_t row, int height, int64_t column, int columns) {
    const int blocks = columns / kBlock;
    uint32_t bits[kRowChunk / kBlock] = {};
    float largest[kRowChunk / kBlock], scale[kRowChunk / kBlock], encode[kRowChunk / kBlock];
    uint8_t scale_codes[kRowChunk / kBlock], bytes[kRowChunk];
    alignas(64) float scales[kRowChunk], encodes[kRowChunk];
    alignas(64) uint32_t words[kRowChunk], parts[kRowChunk] = {};
    const T* x = static_cast<const T*>(job.x) + row * job.stride + column;
    for (int line = 0; line < height; ++line) row_maxima(x + line * job.stride, blocks, bits);
    for (int block = 0; block < blocks; ++block) largest[block] = size_value(bits[block], T{});
    block_scales(largest, blocks, row_factors(job, row), scale, encode, scale_codes);
    spread(scale, blocks, scales);
    spread(encode, blocks, encodes);
    for (int line = 0; line < height; ++line) {
        const int64_t here = (row + line) * job.columns + column;
        if (kStochastic) {
            const RowKey key = row_key(job.key, uint64_t(job.row_offset + row + line));
            random_row(key, uint32_t((job.column_offset + column) / 4), columns, bytes);
#pragma omp simd
            for (int lane = 0; lane < columns; ++lane) words[lane] = bytes[lane];
        }
        round_line<kStochastic, kOperand>(x + line * job.stride, encodes, scales, words, columns, {0, 0, 0u}, parts);
        if (kOperand) store_operand(parts, columns, job.operand + here);
        else store_codes(parts, columns, job.codes + here / 2);
        if (!kOperand) std::memcpy(job.scales + here / kBlock, scale_codes, size_t(blocks));
    }
}

template <bool kStochastic, bool kOperand, typename T>
void quantize_along_rows(const Job& job) {
    const int height = job.tile ? kBlock : 1;
    const int64_t bands = job.rows / height, chunks = (job.columns + kRowChunk - 1) / kRowChunk;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t unit = 0; unit < bands * chunks; ++unit) {
        const int64_t column = unit % chunks * kRowChunk;
        const int columns = int(std::min<int64_t>(kRowChunk, job.columns - column));
        quantize_rows<kStochastic, kOperand, T>(job, unit / chunks * height, height, column, columns);
    }
}

// ---------------------------------------------------------------------------------------------- blocks down the columns

using Lanes = float[kBlock][kLanes];

// Rounds to BF16, kept as fp32.
inline float to_bf16(float x) {
    const uint32_t bits = as_bits(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
    return x == x ? as_float(rounded) : as_float(kQuietNan);
}

// Two butterfly stages at once, with distances `d` and 2 * d, on rows first, first + d, first + 2d, first + 3d.
void two_stages(Lanes& v, int first, int d) {
    float *a = v[first], *b = v[first + d], *c = v[first + 2 * d], *e = v[first + 3 * d];
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

void butterfly(Lanes& v) {
    for (int group = 0; group < 4; ++group) two_stages(v, 4 * group, 1);
    for (int group = 0; group < 4; ++group) two_stages(v, group, 4);
    for (int line = 0; line < kBlock; ++line)
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) v[line][lane] = to_bf16(v[line][lane]);
}

inline float bf16_value(BFloat16 x) { return load(x); }
inline float bf16_value(float x) { return to_bf16(x); }

// Reads 16 rows of up to kLanes columns, transformed if asked; the other lanes are zero.
template <typename T>
void load_lanes(const Job& job, int64_t row, int64_t column, int lanes, Lanes& v) {
    const T* x = static_cast<const T*>(job.x) + row * job.stride + column;
    T partial[kLanes] = {};
    for (int line = 0; line < kBlock; ++line, x += job.stride) {
        const T* source = x;
        if (lanes < kLanes) source = static_cast<const T*>(std::memcpy(partial, x, sizeof(T) * size_t(lanes)));
        const float factor = (uint32_t(job.sign_mask) >> line & 1u) ? -0.25f : 0.25f;
        if (job.hadamard) {
#pragma omp simd
            for (int lane = 0; lane < kLanes; ++lane) v[line][lane] = bf16_value(source[lane]) * factor;
        } else {
#pragma omp simd
            for (int lane = 0; lane < kLanes; ++lane) v[line][lane] = load(source[lane]);
        }
    }
    if (job.hadamard) butterfly(v);
}

void lane_maxima(const Lanes& v, uint32_t* bits) {
    for (int line = 0; line < kBlock; ++line)
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) bits[lane] = larger(bits[lane], as_bits(v[line][lane]) & ~kSign);
}

void tile_maxima(uint32_t* bits) {
    for (int first = 0; first < kLanes; first += kBlock)
        std::fill_n(bits + first, kBlock, *std::max_element(bits + first, bits + first + kBlock));
}

// Rounds 16 x kLanes elements. `out` gets 32-bit pieces of what each lane's block becomes: eight pairs of BF16 numbers, or
// two groups of eight codes.
template <bool kStochastic, bool kOperand>
void round_lanes(const Lanes& v, const float* encode, const float* scale, const uint32_t (*words)[kLanes],
                 uint32_t (*out)[kLanes]) {
    for (int line = 0; line < kBlock; ++line) {
        const int shift = kOperand ? 16 * (line % 2) : 4 * (line % 8);
        const Placement place = {8 * (line % 4), shift, shift == 0 ? 0u : 0xFFFFFFFFu};
        uint32_t* piece = out[kOperand ? line / 2 : line / 8];
        round_line<kStochastic, kOperand>(v[line], encode, scale, words[line / 4], kLanes, place, piece);
    }
}

template <bool kStochastic, bool kOperand, typename T>
void quantize_lanes(const Job& job, const Factors& factors, const RowKey* keys, int64_t row, int64_t column, int lanes) {
    alignas(64) Lanes v;
    alignas(64) uint32_t bits[kLanes] = {}, words[4][kLanes], out[8][kLanes] = {};
    alignas(64) float largest[kLanes], scale[kLanes], encode[kLanes];
    uint8_t scale_codes[kLanes];
    load_lanes<T>(job, row, column, lanes, v);
    lane_maxima(v, bits);
    if (job.tile) tile_maxima(bits);
    for (int lane = 0; lane < kLanes; ++lane) largest[lane] = as_float(bits[lane]);
    block_scales(largest, kLanes, factors, scale, encode, scale_codes);
    if (kStochastic)
        for (int part = 0; part < 4; ++part) {
            const uint32_t word = uint32_t((job.column_offset + row) / 4 + part);
#pragma omp simd
            for (int lane = 0; lane < kLanes; ++lane) words[part][lane] = random_word(word, keys[lane].low, keys[lane].high);
        }
    round_lanes<kStochastic, kOperand>(v, encode, scale, words, out);
    for (int lane = 0; lane < lanes; ++lane) {  // row `column + lane` of the transposed result
        const int64_t here = (column + lane) * job.rows + row;
        uint32_t pieces[8];
        for (int part = 0; part < (kOperand ? 8 : 2); ++part) pieces[part] = out[part][lane];
        if (kOperand) std::memcpy(job.operand + here, pieces, 32);
        else std::memcpy(job.codes + here / 2, pieces, 8);
        if (!kOperand) job.scales[here / kBlock] = scale_codes[lane];
    }
}

template <bool kStochastic, bool kOperand, typename T>
void quantize_down_columns(const Job& job) {
    constexpr int kBand = 16;  // blocks of a lane that one thread handles in a row, so that it writes whole cache lines
    const Factors factors = row_factors(job, 0);
    const int64_t blocks = job.rows / kBlock, bands = (blocks + kBand - 1) / kBand;
    const int64_t strips = (job.columns + kLanes - 1) / kLanes;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t unit = 0; unit < strips * bands; ++unit) {
        const int64_t column = unit / bands * kLanes, first = unit % bands * kBand;
        const int lanes = int(std::min<int64_t>(kLanes, job.columns - column));
        RowKey keys[kLanes] = {};
        if (kStochastic)
            for (int lane = 0; lane < lanes; ++lane) keys[lane] = row_key(job.key, uint64_t(job.row_offset + column + lane));
        for (int64_t block = first; block < std::min(first + kBand, blocks); ++block)
            quantize_lanes<kStochastic, kOperand, T>(job, factors, keys, block * kBlock, column, lanes);
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
            const uint32_t code = code_of(round_nearest(v[line][lane] * encode));
            result.code[line][lane] = uint8_t(code);
            const float decoded = ((decode_e2m1(code) * scale) * factors.amax) / (6.0f * float(job.block_scale_max));
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
void quantize_four_over_six(const Job& job) {
    const int height = job.tile ? kBlock : 1;
    const Factors factors = row_factors(job, 0);
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t row = 0; row < job.rows; row += height)
        for (int64_t column = 0; column < job.columns; column += kBlock) {
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

template <bool kStochastic, bool kOperand, typename T>
void quantize_job(const Job& job, bool column) {
    if (job.scale_rule != kAmax) quantize_four_over_six<T>(job);
    else if (column) quantize_down_columns<kStochastic, kOperand, T>(job);
    else quantize_along_rows<kStochastic, kOperand, T>(job);
}

template <typename T>
void quantize_typed(const Job& job, bool column) {
    if (job.stochastic) job.operand ? quantize_job<true, true, T>(job, column) : quantize_job<true, false, T>(job, column);
    else job.operand ? quantize_job<false, true, T>(job, column) : quantize_job<false, false, T>(job, column);
}

// ----------------------------------------------------------------------------------------------------------------- amax

template <typename T>
void amax_rows(const Job& job, float* out) {
    uint32_t largest = 0;
#pragma omp parallel for num_threads(job.threads) schedule(static) reduction(max : largest)
    for (int64_t row = 0; row < job.rows; ++row) {
        const T* x = static_cast<const T*>(job.x) + row * job.stride;
        uint32_t bits = 0;
        for (int64_t column = 0; column < job.columns; ++column) bits = larger(bits, size_bits(x[column]));
        if (job.amax_per_row) out[row] = quiet(size_value(bits, T{}));
        largest = larger(largest, bits);
    }
    if (!job.amax_per_row) out[0] = quiet(size_value(largest, T{}));
}

template <typename T>
void amax_transformed(const Job& job, float* out) {
    uint32_t largest = 0;
    const int64_t strips = (job.columns + kLanes - 1) / kLanes, blocks = job.rows / kBlock;
#pragma omp parallel for num_threads(job.threads) schedule(static) reduction(max : largest)
    for (int64_t unit = 0; unit < strips * blocks; ++unit) {
        alignas(64) Lanes v;
        alignas(64) uint32_t bits[kLanes] = {};
        const int64_t column = unit % strips * kLanes;
        load_lanes<T>(job, unit / strips * kBlock, column, int(std::min<int64_t>(kLanes, job.columns - column)), v);
        lane_maxima(v, bits);
        largest = std::max(largest, *std::max_element(bits, bits + kLanes));
    }
    out[0] = quiet(as_float(largest));
}

template <typename T>
void transform(const Job& job) {
    const int64_t strips = (job.columns + kLanes - 1) / kLanes;
#pragma omp parallel for num_threads(job.threads) schedule(static)
    for (int64_t unit = 0; unit < strips * (job.rows / kBlock); ++unit) {
        alignas(64) Lanes v;
        const int64_t column = unit % strips * kLanes, row = unit / strips * kBlock;
        const int lanes = int(std::min<int64_t>(kLanes, job.columns - column));
        load_lanes<T>(job, row, column, lanes, v);
        for (int lane = 0; lane < lanes; ++lane)
            for (int line = 0; line < kBlock; ++line)
                job.operand[(column + lane) * job.rows + row + line] = uint16_t(as_bits(v[line][lane]) >> 16);
    }
}

}  // namespace

extern "C" {

void nvfp4_amax(const Job* job, float* out) {
    if (job->hadamard) job->is_fp32 ? amax_transformed<float>(*job, out) : amax_transformed<BFloat16>(*job, out);
    else job->is_fp32 ? amax_rows<float>(*job, out) : amax_rows<BFloat16>(*job, out);
}

void nvfp4_quantize(const Job* job, int column) {
    job->is_fp32 ? quantize_typed<float>(*job, column) : quantize_typed<BFloat16>(*job, column);
}

// Transforms down the columns of x [rows, columns] into operand [columns, rows].
void nvfp4_hadamard(const Job* job) { job->is_fp32 ? transform<float>(*job) : transform<BFloat16>(*job); }

}  // extern "C"
