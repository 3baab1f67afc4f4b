// Quantization with AVX-512. Sixteen blocks are rounded at a time, a lane each: those of a row after a transposition in
// registers, those of neighbouring columns as they lie. Everything about a block is then arithmetic on whole vectors.

#pragma once

namespace {

// What 16 blocks need and get: the factors of the FP32 scales above them and their maxima; scales, factors that encode elements,
// and scale bytes. Without block scales the encode factors come from the FP32 scales alone.
struct Blocks {
    Floats amax_encode, amax_decode, largest, scale, encode;
    alignas(16) uint8_t code[kWide];
};

template <typename Element>
NVFP4_INLINE void block_scales(const Job& job, Blocks& b) {
    if (job.scale_kind == kE4m3Scale) {
        const Words code = encode_e4m3(b.largest * (b.amax_encode * job.reciprocal));
        b.scale = decode_e4m3(code);
        b.encode = encode_factor(b.scale, b.amax_decode);
        store_bytes(b.code, code);
    } else if (job.scale_kind == kE8m0Scale) {
        const uint32_t carry = job.scale_rule == kAmax ? 0x7FFFFFu - Element::kLargestMantissa : 0u;
        const Words code = encode_e8m0(b.largest, carry, int32_t(Element::kLargestExponent));
        b.scale = decode_e8m0(code);
        b.encode = floats_of(code == 0xFFu ? all(kQuietNan) : (254u - code) << 23);  // 2^(127 - code), a normal number
        store_bytes(b.code, code);
    } else {
        b.scale = all(1.0f);
        b.encode = b.amax_encode;
    }
}

struct Place { int64_t row, column; };

// The factors of the FP32 scale above each block; `place` gives where it is in the quantized matrix.
template <typename Function>
void spread_factors(const Job& job, Blocks& b, Function place) {
    if (job.outer == kNoAmax) return;
    for (int lane = 0; lane < kWide; ++lane) {
        const Place at = place(lane);
        const Factors factors = outer_factors(job, at.row, at.column);
        b.amax_encode[lane] = factors.encode;
        b.amax_decode[lane] = factors.decode;
    }
}

template <bool kOperand, typename Element, int kWidth>
constexpr int words_of_block() { return kWidth / (kOperand ? 2 : Element::kIsByte ? 4 : 8); }

// ------------------------------------------------------------------------------------------------- blocks along the rows

// Reads up to 16 blocks of a row; lanes without a block are zero.
template <int kWidth, typename T>
void load_blocks(const T* x, int blocks, Floats* v) {
    constexpr int bytes = kWidth * int(sizeof(T));
    alignas(64) T padded[kWide * kWidth];
    if (blocks < kWide) {
        std::memset(padded, 0, sizeof(padded));
        x = static_cast<const T*>(std::memcpy(padded, x, size_t(blocks * bytes)));
    }
    const uint8_t* source = reinterpret_cast<const uint8_t*>(x);
    if constexpr (sizeof(T) == 4) {
        for (int part = 0; part < kWidth / kWide; ++part)
            blocks_to_lanes<4>(source + 64 * part, bytes, reinterpret_cast<Words*>(v) + kWide * part);
    } else {
        Words pairs[kWidth / 2];
        blocks_to_lanes<bytes / 16>(source, bytes, pairs);
        for (int pair = 0; pair < kWidth / 2; ++pair) {
            v[2 * pair] = floats_of(pairs[pair] << 16);
            v[2 * pair + 1] = floats_of(pairs[pair] & 0xFFFF0000u);
        }
    }
}

template <int kWidth>
void load_blocks(const Job& job, int64_t row, int64_t column, int blocks, Floats* v) {
    const int64_t here = row * job.stride + column;
    if (job.is_fp32) load_blocks<kWidth>(static_cast<const float*>(job.x) + here, blocks, v);
    else load_blocks<kWidth>(static_cast<const BFloat16*>(job.x) + here, blocks, v);
}

// The random words of the blocks that start at (row, column).
template <int kWidth>
void random_words(const Job& job, int64_t row, int64_t column, Words* words) {
    const RowKey key = row_key(job, row);
    Words first = Words{NVFP4_SWAPPED} * uint32_t(kWidth / 4) + word_index(job, column);
    for (int part = 0; part < kWidth / 4; ++part) {
        if (job.column_segment)
            for (int lane = 0; lane < kWide; ++lane)
                first[lane] = word_index(job, column + kBlockOfLane[lane] * kWidth + 4 * part) - uint32_t(part);
        words[part] = random_word(first + uint32_t(part), all(key.low), all(key.high));
    }
}

// Writes what became of up to 16 blocks of a row, of kWords words each.
template <int kWords>
void store_blocks(Words* pieces, int blocks, uint8_t* target) {
    if (blocks == kWide) return lanes_to_blocks<kWords>(pieces, target);
    alignas(64) uint8_t padded[kWide * kWords * 4];
    lanes_to_blocks<kWords>(pieces, padded);
    std::memcpy(target, padded, size_t(blocks * kWords * 4));
}

void store_scales(const uint8_t* code, int blocks, uint8_t* target) {
    const Bytes lanes = load_vector<Bytes>(code);
    const Bytes ordered = __builtin_shufflevector(lanes, lanes, NVFP4_SWAPPED);
    std::memcpy(target, &ordered, size_t(blocks));
}

inline uint8_t* result_at(const Job& job, int64_t element, bool is_packed) {
    if (job.operand) return reinterpret_cast<uint8_t*>(job.operand + element);
    return job.codes + (is_packed ? element / 2 : element);
}

// Rounds up to 16 blocks of a row, starting at (row, column), whose values are in `v`.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
NVFP4_INLINE void round_blocks(const Job& job, int64_t row, int64_t column, int blocks, const Blocks& b, const Floats* v) {
    constexpr int kWords = words_of_block<kOperand, Element, kWidth>();
    Words words[kWidth / 4], pieces[kWords];
    const int64_t here = row * job.columns + column;
    if (kStochastic) random_words<kWidth>(job, row, column, words);
    round_lines<kStochastic, kOperand, Element, kWidth>(v, b.encode, b.scale, words, pieces);
    store_blocks<kWords>(pieces, blocks, result_at(job, here, !Element::kIsByte));
    if (!kOperand && job.scale_kind != kNoScale) store_scales(b.code, blocks, job.scales + here / kWidth);
}

constexpr int kGroups = 16;  // of 16 blocks: a band of tiles whose scales are found before its rows are rounded

// `height` rows that share scales (the width of a block for tiles) and up to kGroups groups of blocks of each. `b` holds the
// factors of the FP32 scale above the tensor.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void quantize_band(const Job& job, int64_t row, int height, int64_t column, int64_t last, Blocks* b) {
    constexpr int64_t step = kWide * kWidth;
    const auto blocks_at = [&](int64_t here) { return int(std::min<int64_t>(kWide, (last - here) / kWidth)); };
    Floats v[kWidth];
    for (int64_t here = column; here < last; here += step) {
        Blocks& own = b[height > 1 ? (here - column) / step : 0];
        Words largest = {};
        for (int line = 0; line < height; ++line) {
            load_blocks<kWidth>(job, row + line, here, blocks_at(here), v);
            if (job.scale_kind != kNoScale) largest = larger(largest, maxima(v, kWidth));
        }
        if (job.outer == kRowScale || job.outer == kChunkScale)
            spread_factors(job, own, [&](int lane) {
                return Place{row, here + std::min(kBlockOfLane[lane], blocks_at(here) - 1) * kWidth};
            });
        own.largest = floats_of(largest);
        block_scales<Element>(job, own);
        if (height == 1) round_blocks<kStochastic, kOperand, Element, kWidth>(job, row, here, blocks_at(here), own, v);
    }
    for (int line = 0; height > 1 && line < height; ++line)
        for (int64_t here = column; here < last; here += step) {
            load_blocks<kWidth>(job, row + line, here, blocks_at(here), v);
            const Blocks& own = b[(here - column) / step];
            round_blocks<kStochastic, kOperand, Element, kWidth>(job, row + line, here, blocks_at(here), own, v);
        }
}

template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void quantize_along_rows(const Job& job, const Region& region) {
    constexpr int64_t width = kGroups * kWide * kWidth;
    const int height = job.is_tile && job.scale_kind != kNoScale ? kWidth : 1;
    Blocks b[kGroups];
    if (job.outer == kTensorScale)
        for (int group = 0; group < (height > 1 ? kGroups : 1); ++group)
            spread_factors(job, b[group], [](int) { return Place{0, 0}; });
    for (int64_t row = region.row; row < region.last_row; row += height)
        for (int64_t column = region.column; column < region.last_column; column += width) {
            const int64_t last = std::min(region.last_column, column + width);
            quantize_band<kStochastic, kOperand, Element, kWidth>(job, row, height, column, last, b);
        }
}

// ---------------------------------------------------------------------------------------------- blocks down the columns

constexpr int kLineBytes = 128;  // of a column's results that are written at once

// What a strip of columns becomes: 32 lines of results and of scale bytes, in the order of the columns.
struct Results {
    alignas(64) uint8_t line[kLanes][kLineBytes];
    uint8_t scale[kLanes][kLineBytes / 8];
};

// Gives the columns of a tile its maximum.
void tile_maxima(const Job& job, Blocks (&b)[2]) {
    uint32_t largest[kLanes / kBlock] = {};
    for (int half = 0; half < 2; ++half)
        for (int lane = 0; lane < kWide; ++lane) {
            uint32_t& tile = largest[column_of(job, half, lane) / job.width];
            tile = larger(tile, bits_of(b[half].largest)[lane]);
        }
    for (int half = 0; half < 2; ++half)
        for (int lane = 0; lane < kWide; ++lane) b[half].largest[lane] = as_float(largest[column_of(job, half, lane) / job.width]);
}

// Where the keys of the columns' random words are.
struct Keys { Words low[2], high[2]; };

// One block of each of kLanes columns, from line `line` of `v` on; its results go to `offset` bytes in their lines.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void quantize_lanes(const Job& job, const Strip& v, int line, const Keys& keys, int64_t row, Blocks (&b)[2], Results& results,
                    int64_t offset) {
    constexpr int kWords = words_of_block<kOperand, Element, kWidth>();
    if (job.scale_kind != kNoScale) {
        for (int half = 0; half < 2; ++half) b[half].largest = floats_of(maxima(v[half] + line, kWidth));
        if (job.is_tile) tile_maxima(job, b);
    }
    for (int half = 0; half < 2; ++half) {
        Words words[kWidth / 4], pieces[kWords];
        block_scales<Element>(job, b[half]);
        if (kStochastic)
            for (int part = 0; part < kWidth / 4; ++part)
                words[part] = random_word(all(word_index(job, row + 4 * part)), keys.low[half], keys.high[half]);
        round_lines<kStochastic, kOperand, Element, kWidth>(v[half] + line, b[half].encode, b[half].scale, words, pieces);
        const int columns = job.is_fp32 ? 1 : 2, first = job.is_fp32 ? kWide * half : half;  // from lane to lane
        lanes_to_lines<kWords>(pieces, results.line[first] + offset, columns * kLineBytes);
        if (!kOperand && job.scale_kind != kNoScale)
            for (int lane = 0; lane < kWide; ++lane)
                results.scale[first + columns * lane][offset / (4 * kWords)] = b[half].code[lane];
    }
}

// Copies of the usual sizes without a call.
inline void copy(uint8_t* target, const uint8_t* source, int64_t bytes) {
    switch (bytes) {
        case 128: std::memcpy(target, source, 128); return;
        case 64: std::memcpy(target, source, 64); return;
        case 16: std::memcpy(target, source, 16); return;
        case 8: std::memcpy(target, source, 8); return;
        case 4: std::memcpy(target, source, 4); return;
        default: std::memcpy(target, source, size_t(bytes));
    }
}

// Writes `blocks` blocks of each column, the first of which is at (row, column) of x.
void store_lines(const Job& job, const Results& results, int64_t row, int64_t column, int lanes, int64_t bytes, int64_t blocks) {
    for (int lane = 0; lane < lanes; ++lane) {
        const int64_t here = (column + lane) * job.rows + row;
        copy(result_at(job, here, job.element == kE2m1), results.line[lane], bytes);
        if (!job.operand && job.scale_kind != kNoScale) copy(job.scales + here / job.width, results.scale[lane], blocks);
    }
}

// A strip of columns between two rows.
template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void quantize_strip(const Job& job, int64_t first, int64_t last, int64_t column, int lanes) {
    constexpr int64_t block_bytes = 4 * words_of_block<kOperand, Element, kWidth>(), kRows = kLineBytes / block_bytes * kWidth;
    const int height = std::max(kWidth, int(job.hadamard));  // rows that are transformed together hold whole blocks
    Strip v;
    Results results;
    Blocks b[2];
    Keys keys;
    const auto column_at = [&](int lane) { return column + std::min(column_of(job, lane / kWide, lane % kWide), lanes - 1); };
    if (kStochastic)
        for (int lane = 0; lane < kLanes; ++lane) {
            const RowKey key = row_key(job, column_at(lane));
            keys.low[lane / kWide][lane % kWide] = key.low;
            keys.high[lane / kWide][lane % kWide] = key.high;
        }
    int64_t start = first;  // of the rows whose results wait to be written
    for (int64_t row = first; row < last; row += height) {
        load_columns(job, row, height, column, lanes, v);
        for (int line = 0; line < height; line += kWidth) {
            const int64_t here = row + line;
            if (here == first || (job.outer == kChunkScale && here % kChunk == 0))
                for (int half = 0; half < 2; ++half)
                    spread_factors(job, b[half], [&](int lane) { return Place{column_at(kWide * half + lane), here}; });
            const int64_t done = here - start;
            quantize_lanes<kStochastic, kOperand, Element, kWidth>(job, v, line, keys, here, b, results,
                                                                   done / kWidth * block_bytes);
            if (done + kWidth < kRows && here + kWidth < last) continue;
            const int64_t blocks = done / kWidth + 1;
            store_lines(job, results, start, column, lanes, blocks * block_bytes, blocks);
            start = here + kWidth;
        }
    }
}

template <bool kStochastic, bool kOperand, typename Element, int kWidth>
void quantize_down_columns(const Job& job, const Region& region) {
    for (int64_t column = region.column; column < region.last_column; column += kLanes) {
        const int lanes = int(std::min<int64_t>(kLanes, region.last_column - column));
        quantize_strip<kStochastic, kOperand, Element, kWidth>(job, region.row, region.last_row, column, lanes);
    }
}

// -------------------------------------------------------------------------------------------------------- four over six

// What a scale makes of 16 blocks: codes, scale bytes, and errors added up in the order of the elements.
struct Candidate { Words pieces[2], scale; Floats error; };

NVFP4_INLINE Candidate try_scale(const Floats* v, Floats scaled, Floats decode, Floats amax, const Job& job) {
    Candidate result = {};
    result.scale = encode_e4m3(scaled);
    const Floats scale = decode_e4m3(result.scale), encode = encode_factor(scale, decode);
#pragma GCC unroll 16
    for (int line = 0; line < kBlock; ++line) {
        const Floats product = v[line] * encode;
        const Words size = smaller(bits_of(product) & ~kSign, all(as_bits(E2M1::kLargest)));
        const OnGrid at = to_grid<false, E2M1>(floats_of(size), Words{});
        const auto is_negative = product < 0.0f;
        const Words code = code_above<E2M1>(at) - code_excess<E2M1>(), sign = is_negative ? all(kSign) : Words{};
        result.pieces[line / 8] |= (code | sign >> 28) << uint32_t(4 * (line % 8));
        const Floats rounded = floats_of(bits_of(value_of(at)) | sign);
        const Floats difference = ((rounded * scale) * amax) / job.largest_product - v[line];
        const Floats size_of_it = floats_of(bits_of(difference) & ~kSign);
        result.error = result.error + (job.scale_rule == kFourOverSixMse ? difference * difference : size_of_it);
    }
    for (int piece = 0; piece < 2; ++piece) result.pieces[piece] = encode == encode ? result.pieces[piece] : Words{};
    return result;
}

// Both candidates for 16 blocks: the block maximum becomes 6, or 4.
struct Choice { Candidate six, four; };

NVFP4_INLINE Choice try_scales(const Floats* v, Floats largest, const Factors& factors, const Job& job) {
    const Floats base = (largest / 6.0f) * factors.encode;
    return {try_scale(v, base, all(factors.decode), all(factors.amax), job),
            try_scale(v, base * 1.5f, all(factors.decode), all(factors.amax), job)};
}

// Sums of 16 rows, the first and the ninth first.
template <typename Number>
NVFP4_INLINE Number tree_sum(Number* rows) {
    for (int half = kBlock / 2; half > 0; half /= 2)
        for (int row = 0; row < half; ++row) rows[row] = rows[row] + rows[row + half];
    return rows[0];
}

void four_over_six_rows(const Job& job, const Region& region) {
    const int height = job.is_tile ? kBlock : 1;
    const Factors factors = outer_factors(job, 0, 0);
    for (int64_t row = region.row; row < region.last_row; row += height)
        for (int64_t column = region.column; column < region.last_column; column += kWide * kBlock) {
            const int blocks = int(std::min<int64_t>(kWide, (region.last_column - column) / kBlock));
            Floats v[kBlock], six[kBlock], four[kBlock];
            Choice choice[kBlock];
            Words largest = {};
            for (int line = 0; line < height; ++line) {
                load_blocks<kBlock>(job, row + line, column, blocks, v);
                largest = larger(largest, maxima(v, kBlock));
            }
            for (int line = 0; line < height; ++line) {
                if (height > 1) load_blocks<kBlock>(job, row + line, column, blocks, v);
                choice[line] = try_scales(v, floats_of(largest), factors, job);
                six[line] = choice[line].six.error;
                four[line] = choice[line].four.error;
            }
            const auto takes_four = height > 1 ? tree_sum(four) < tree_sum(six) : four[0] < six[0];
            for (int line = 0; line < height; ++line) {
                const Candidate &a = choice[line].four, &b = choice[line].six;
                Words pieces[2] = {takes_four ? a.pieces[0] : b.pieces[0], takes_four ? a.pieces[1] : b.pieces[1]};
                alignas(16) uint8_t code[kWide];
                store_bytes(code, takes_four ? a.scale : b.scale);
                const int64_t here = (row + line) * job.columns + column;
                store_blocks<2>(pieces, blocks, job.codes + here / 2);
                store_scales(code, blocks, job.scales + here / kBlock);
            }
        }
}

// Whether the blocks of 32 columns, or the tiles that they form, take four.
void choose_columns(const Job& job, const Choice (&choice)[2], Ints (&takes_four)[2]) {
    for (int half = 0; half < 2; ++half) takes_four[half] = choice[half].four.error < choice[half].six.error;
    if (!job.is_tile) return;
    float six[kLanes], four[kLanes];
    for (int half = 0; half < 2; ++half)
        for (int lane = 0; lane < kWide; ++lane) {
            six[column_of(job, half, lane)] = choice[half].six.error[lane];
            four[column_of(job, half, lane)] = choice[half].four.error[lane];
        }
    const bool tiles[2] = {tree_sum(four) < tree_sum(six), tree_sum(four + kBlock) < tree_sum(six + kBlock)};
    for (int half = 0; half < 2; ++half)
        for (int lane = 0; lane < kWide; ++lane) takes_four[half][lane] = tiles[column_of(job, half, lane) / kBlock] ? -1 : 0;
}

void four_over_six_columns(const Job& job, const Region& region) {
    const Factors factors = outer_factors(job, 0, 0);
    for (int64_t column = region.column; column < region.last_column; column += kLanes) {
        const int lanes = int(std::min<int64_t>(kLanes, region.last_column - column));
        for (int64_t row = region.row; row < region.last_row; row += kBlock) {
            Strip v;
            Results results;
            Blocks b[2];
            Choice choice[2];
            Ints takes_four[2];
            load_columns(job, row, kBlock, column, lanes, v);
            for (int half = 0; half < 2; ++half) b[half].largest = floats_of(maxima(v[half], kBlock));
            if (job.is_tile) tile_maxima(job, b);
            for (int half = 0; half < 2; ++half) choice[half] = try_scales(v[half], b[half].largest, factors, job);
            choose_columns(job, choice, takes_four);
            for (int half = 0; half < 2; ++half) {
                const Candidate &four = choice[half].four, &six = choice[half].six;
                const auto chosen = takes_four[half] < 0;
                Words pieces[2] = {chosen ? four.pieces[0] : six.pieces[0], chosen ? four.pieces[1] : six.pieces[1]};
                const Words scale = chosen ? four.scale : six.scale;
                const int columns = job.is_fp32 ? 1 : 2, first = job.is_fp32 ? kWide * half : half;
                lanes_to_lines<2>(pieces, results.line[first], columns * kLineBytes);
                for (int lane = 0; lane < kWide; ++lane) results.scale[first + columns * lane][0] = uint8_t(scale[lane]);
            }
            store_lines(job, results, row, column, lanes, kBlock / 2, 1);
        }
    }
}

// ----------------------------------------------------------------------------------------------------- choosing a kernel

using Kernel = void (*)(const Job&, const Region&);

template <bool kStochastic, bool kOperand, typename Element, int kWidth>
Kernel kernel_in(bool column) {
    return column ? quantize_down_columns<kStochastic, kOperand, Element, kWidth>
                  : quantize_along_rows<kStochastic, kOperand, Element, kWidth>;
}

template <typename Element, int kWidth>
Kernel kernel_of(const Job& job, bool column) {
    if (job.stochastic && job.operand) return kernel_in<true, true, Element, kWidth>(column);
    if (job.stochastic) return kernel_in<true, false, Element, kWidth>(column);
    if (job.operand) return kernel_in<false, true, Element, kWidth>(column);
    return kernel_in<false, false, Element, kWidth>(column);
}

Kernel choose_kernel(const Job& job, bool column) {
    if (job.scale_rule == kFourOverSixMae || job.scale_rule == kFourOverSixMse)
        return column ? four_over_six_columns : four_over_six_rows;
    if (job.element == kE2m1) return job.width == 32 ? kernel_of<E2M1, 32>(job, column) : kernel_of<E2M1, 16>(job, column);
    return job.element == kE4m3 ? kernel_of<E4M3, 32>(job, column) : kernel_of<E5M2, 32>(job, column);
}

}  // namespace
