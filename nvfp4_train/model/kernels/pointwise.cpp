// Squared ReLU and cross-entropy, forward and backward, in one pass each. Called through ctypes.

#include "simd.h"

#include <cmath>

extern "C" {

void squared_relu_forward(const void* x, void* y, int64_t count, int32_t is_fp32, int32_t threads);
void squared_relu_backward(const void* x, const void* grad_y, void* grad_x, int64_t count, int32_t is_fp32, int32_t threads);

// Mirrored by `_Entropy` in pointwise.py.
struct Entropy {
    const void* logits;        // [tokens, vocabulary], rows of `stride`
    const int64_t* labels;     // [tokens]; negative: not counted
    float* log_sums;           // [tokens]: log of the sum of exponentials
    float* losses;             // [tokens]
    const float* grad_loss;    // one number
    void* grad_logits;         // rows of `grad_stride`; may be the logits
    int64_t tokens, vocabulary, stride, grad_stride;
    int32_t is_fp32, threads;
};

void entropy_forward(const Entropy* entropy);
void entropy_backward(const Entropy* entropy);

}  // extern "C"

namespace {

constexpr int64_t kPiece = 4096;

template <typename Function>
void for_each_piece(int64_t count, int threads, Function function) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < count; start += kPiece)
        for (int64_t i = start; i < std::min(count, start + kPiece); i += kWide) function(i, count - i);
}

// Written so that NaN stays.
inline Vector relu(Vector v) { return choose(v < Vector{}, Vector{}, v); }

template <typename T>
void squared_relu(const T* x, T* y, int64_t count, int threads) {
    for_each_piece(count, threads, [=](int64_t i, int64_t left) {
        const Vector v = relu(load_part(x + i, left));
        store_part(y + i, v * v, left);
    });
}

template <typename T>
void squared_relu_slope(const T* x, const T* grad_y, T* grad_x, int64_t count, int threads) {
    for_each_piece(count, threads, [=](int64_t i, int64_t left) {
        store_part(grad_x + i, 2.0f * relu(load_part(x + i, left)) * load_part(grad_y + i, left), left);
    });
}

inline Vector larger(Vector a, Vector b) { return choose(a > b, a, b); }

template <typename T>
void entropies(const Entropy& e) {
#pragma omp parallel for num_threads(e.threads) schedule(static)
    for (int64_t token = 0; token < e.tokens; ++token) {
        const T* logits = static_cast<const T*>(e.logits) + token * e.stride;
        const int64_t whole = e.vocabulary / kWide * kWide;
        float most = -INFINITY;
        Vector largest = splat(-INFINITY);
        for (int64_t i = 0; i < whole; i += kWide) largest = larger(load(logits + i), largest);
        for (int lane = 0; lane < kWide; ++lane) most = std::max(most, largest[lane]);
        for (int64_t i = whole; i < e.vocabulary; ++i) most = std::max(most, to_float(logits[i]));
        Vector total = {};
        for (int64_t i = 0; i < whole; i += kWide) total += exponential(load(logits + i) - most);
        double sums = 0;
        for (int lane = 0; lane < kWide; ++lane) sums += double(total[lane]);
        for (int64_t i = whole; i < e.vocabulary; ++i) sums += double(std::exp(to_float(logits[i]) - most));
        e.log_sums[token] = most + float(std::log(sums));
        const int64_t label = e.labels[token];
        e.losses[token] = label < 0 ? 0.0f : e.log_sums[token] - to_float(logits[label]);
    }
}

template <typename T>
void grads(const Entropy& e) {
#pragma omp parallel for num_threads(e.threads) schedule(static)
    for (int64_t token = 0; token < e.tokens; ++token) {
        const T* logits = static_cast<const T*>(e.logits) + token * e.stride;
        T* out = static_cast<T*>(e.grad_logits) + token * e.grad_stride;
        const int64_t label = e.labels[token];
        const float factor = label < 0 ? 0.0f : *e.grad_loss, log_sum = e.log_sums[token];
        const float chosen = label < 0 ? 0.0f : std::exp(to_float(logits[label]) - log_sum);
        for (int64_t i = 0; i < e.vocabulary; i += kWide) {
            const int64_t left = e.vocabulary - i;
            store_part(out + i, exponential(load_part(logits + i, left) - log_sum) * factor, left);
        }
        if (label >= 0) store_part(out + label, splat((chosen - 1.0f) * factor), 1);
    }
}

}  // namespace

extern "C" {

void squared_relu_forward(const void* x, void* y, int64_t count, int32_t is_fp32, int32_t threads) {
    prefer_large_pages(y, size_t(count) * (is_fp32 ? 4 : 2));
    if (is_fp32) squared_relu(static_cast<const float*>(x), static_cast<float*>(y), count, threads);
    else squared_relu(static_cast<const BFloat16*>(x), static_cast<BFloat16*>(y), count, threads);
}

void squared_relu_backward(const void* x, const void* grad_y, void* grad_x, int64_t count, int32_t is_fp32, int32_t threads) {
    prefer_large_pages(grad_x, size_t(count) * (is_fp32 ? 4 : 2));
    if (is_fp32)
        squared_relu_slope(static_cast<const float*>(x), static_cast<const float*>(grad_y), static_cast<float*>(grad_x), count,
                           threads);
    else
        squared_relu_slope(static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(grad_y), static_cast<BFloat16*>(grad_x),
                           count, threads);
}

void entropy_forward(const Entropy* entropy) { entropy->is_fp32 ? entropies<float>(*entropy) : entropies<BFloat16>(*entropy); }
void entropy_backward(const Entropy* entropy) { entropy->is_fp32 ? grads<float>(*entropy) : grads<BFloat16>(*entropy); }

}  // extern "C"
