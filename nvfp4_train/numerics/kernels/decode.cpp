// From codes and scales back to numbers, the reference GEMM, and the tables of the formats. Called through ctypes.

#include "lanes.h"

namespace {

// Up to kRowChunk columns of a row, with scales that are already numbers.
template <typename Element>
void unpack_row(const uint8_t* codes, const float* scales, int columns, uint16_t* out) {
    alignas(64) uint8_t unpacked[kRowChunk];
    if (!Element::kIsByte)
        for (int pair = 0; pair < columns / 2; ++pair) {
            unpacked[2 * pair] = codes[pair] & 15u;
            unpacked[2 * pair + 1] = codes[pair] >> 4;
        }
    const uint8_t* source = Element::kIsByte ? codes : unpacked;
#pragma omp simd
    for (int lane = 0; lane < columns; ++lane)
        out[lane] = uint16_t(operand_of<Element>(decode<Element>(source[lane]), scales[lane]) >> 16);
}

// scale_kind: 0 E4M3 for 16 elements, 1 E8M0 for 32, 2 none.
void spread_scales(const uint8_t* codes, int scale_kind, int columns, float* scales) {
    float scale[kRowChunk / kBlock];
    if (scale_kind == 0) {
        const int blocks = (columns + 15) / 16;
        for (int block = 0; block < blocks; ++block) scale[block] = decode_e4m3(codes[block]);
        spread<16>(scale, blocks, scales);
    } else if (scale_kind == 1) {
        const int blocks = (columns + 31) / 32;
        for (int block = 0; block < blocks; ++block) scale[block] = decode_e8m0(codes[block]);
        spread<32>(scale, blocks, scales);
    } else {
        std::fill_n(scales, columns, 1.0f);
    }
}

}  // namespace

extern "C" {

// codes [rows, bytes of a row], scales [at least rows, blocks rounded up]; out = code * scale. `element` and `scale_kind` are
// those of `Job`.
void nvfp4_operand(const uint8_t* codes, const uint8_t* scales, int element, int scale_kind, int64_t rows, int64_t columns,
                   uint16_t* out, int threads) {
    const int64_t width = scale_kind == 0 ? 16 : 32, blocks = scale_kind == 2 ? 0 : (columns + width - 1) / width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t first = 0; first < columns; first += kRowChunk) {
            alignas(64) float factors[kRowChunk];
            const int count = int(std::min<int64_t>(kRowChunk, columns - first));
            const int64_t here = row * columns + first;
            spread_scales(scales + row * blocks + first / width, scale_kind, count, factors);
            if (element == 0) unpack_row<E2M1>(codes + here / 2, factors, count, out + here);
            else if (element == 1) unpack_row<E4M3>(codes + here, factors, count, out + here);
            else unpack_row<E5M2>(codes + here, factors, count, out + here);
        }
}

void nvfp4_dequantize(const uint8_t* codes, const uint8_t* scales, const float* amax, int amax_per_row, float inverse,
                      int64_t rows, int64_t columns, float* out, int threads) {
    const int64_t blocks = (columns + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column) {
            const float scale = decode_e4m3(scales[row * blocks + column / kBlock]);
            const float factor = (scale * amax[amax_per_row ? row : 0]) * inverse;
            out[row * columns + column] = decode_e2m1(nibble(codes + row * columns / 2, column)) * factor;
        }
}

void nvfp4_reference_gemm(const uint8_t* codes_a, const uint8_t* scales_a, int64_t rows_a, const uint8_t* codes_b,
                          const uint8_t* scales_b, int64_t rows_b, int64_t columns, float* out, int threads) {
    const int64_t blocks = (columns + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < rows_a; ++i)
        for (int64_t j = 0; j < rows_b; ++j) {
            float total = 0.0f;
            for (int64_t block = 0; block < blocks; ++block) {
                float product = 0.0f;
                for (int64_t k = block * kBlock; k < std::min(columns, (block + 1) * kBlock); ++k) {
                    const float a = decode_e2m1(nibble(codes_a + i * columns / 2, k));
                    product += a * decode_e2m1(nibble(codes_b + j * columns / 2, k));
                }
                const float scale = decode_e4m3(scales_a[i * blocks + block]) * decode_e4m3(scales_b[j * blocks + block]);
                total = total + scale * product;
            }
            out[i * rows_b + j] = total;
        }
}

void nvfp4_round_nearest(const float* scaled, int64_t pairs, uint8_t* packed) {
    for (int64_t pair = 0; pair < pairs; ++pair)
        packed[pair] = uint8_t(code_of<E2M1>(round_nearest<E2M1>(scaled[2 * pair])) |
                               code_of<E2M1>(round_nearest<E2M1>(scaled[2 * pair + 1])) << 4);
}

// The bytes that `job` draws for its rows and columns.
void nvfp4_random_bytes(const Job* job, uint8_t* out) {
    for (int64_t row = 0; row < job->rows; ++row)
        for (int64_t column = 0; column < job->columns; column += kRowChunk)
            random_row(*job, row_key(*job, row), column, int(std::min<int64_t>(kRowChunk, job->columns - column)),
                       out + row * job->columns + column);
}

void nvfp4_e2m1_values(float* out) {
    for (uint32_t code = 0; code < 16; ++code) out[code] = decode_e2m1(code);
}

// scales [rows, columns] of 4-byte elements, whole atoms of 128 x 4.
void nvfp4_swizzle(const uint32_t* scales, int64_t rows, int64_t columns, uint32_t* out) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column) {
            const int64_t atom = row / 128 * (columns / 4) + column / 4;
            out[(atom * 32 + row % 32) * 16 + row % 128 / 32 * 4 + column % 4] = scales[row * columns + column];
        }
}

}  // extern "C"
