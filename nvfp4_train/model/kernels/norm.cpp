// RMS norm and gated RMS norm, forward and backward: each activation is read once and written once. Called through ctypes.
//
// A token's channels lie in pieces of `width` neighbours; `pieces` of them share one mean square, and there are `norms` of
// those. Sums over tokens run within blocks of kBlock tokens, which the caller adds up: they do not depend on the threads.

#include "simd.h"

#include <cmath>
#include <vector>

extern "C" {

// Mirrored by `_Norm` in norm.py; tensors [tokens, norms * pieces, width].
struct Norm {
    const void *x, *gate;    // gate null: not gated
    const float* weight;     // [norms * pieces * width]
    void* y;                 // contiguous
    float* inverse;          // [tokens, norms]
    const void* grad_y;      // contiguous
    void *grad_x, *grad_gate;  // contiguous
    float* grad_weight;      // [ceil(tokens / kBlock), channels]
    int64_t tokens, norms, pieces, width;
    int64_t x_strides[2], gate_strides[2];  // of tokens and pieces
    float eps;
    int32_t is_fp32, threads;
};

void norm_forward(const Norm* norm);
void norm_backward(const Norm* norm);

}  // extern "C"

namespace {

constexpr int64_t kBlock = 64;

// What a gate does to a channel, and the slope of that.
struct Gate { Vector open, slope; };
inline Gate gate_of(Vector g) {
    const Vector sig = sigmoid(g), open = g * sig;
    return {open, sig + open * (1.0f - sig)};
}

template <typename T>
struct Rows {
    const Norm& n;
    int64_t channels = n.norms * n.pieces * n.width;
    const T* x(int64_t token, int64_t piece) const {
        return static_cast<const T*>(n.x) + token * n.x_strides[0] + piece * n.x_strides[1];
    }
    const T* gate(int64_t token, int64_t piece) const {
        return static_cast<const T*>(n.gate) + token * n.gate_strides[0] + piece * n.gate_strides[1];
    }
};

template <typename T, bool kGated>
void forward_token(const Rows<T>& rows, int64_t token, float* gated) {
    const Norm& n = rows.n;
    const int64_t span = n.pieces * n.width;
    for (int64_t norm = 0; norm < n.norms; ++norm) {
        Vector squares = {};
        for (int64_t piece = 0; piece < n.pieces; ++piece) {
            const T* x = rows.x(token, norm * n.pieces + piece);
            const T* gate = kGated ? rows.gate(token, norm * n.pieces + piece) : nullptr;
            for (int64_t i = 0; i < n.width; i += kWide) {
                Vector v = load_part(x + i, n.width - i);
                if (kGated) {
                    const Vector g = load_part(gate + i, n.width - i);
                    v *= g * sigmoid(g);
                }
                squares += v * v;
                store_part(gated + piece * n.width + i, v, n.width - i);
            }
        }
        const float inverse = 1.0f / std::sqrt(sum(squares) / float(span) + n.eps);
        n.inverse[token * n.norms + norm] = inverse;
        T* y = static_cast<T*>(n.y) + token * rows.channels + norm * span;
        const float* weight = n.weight + norm * span;
        for (int64_t i = 0; i < span; i += kWide)
            store_part(y + i, load_part(gated + i, span - i) * inverse * load_part(weight + i, span - i), span - i);
    }
}

// `normed` holds the normalized channels of a span, `slopes` the gate's and `opens` its values.
template <typename T, bool kGated>
void backward_token(const Rows<T>& rows, int64_t token, float* scratch, float* grad_weight) {
    const Norm& n = rows.n;
    const int64_t span = n.pieces * n.width;
    float *gated = scratch, *opens = scratch + span, *slopes = scratch + 2 * span;
    for (int64_t norm = 0; norm < n.norms; ++norm) {
        const T* grad_y = static_cast<const T*>(n.grad_y) + token * rows.channels + norm * span;
        const float inverse = n.inverse[token * n.norms + norm];
        const float* weight = n.weight + norm * span;
        Vector along = {};
        for (int64_t piece = 0; piece < n.pieces; ++piece) {
            const T* x = rows.x(token, norm * n.pieces + piece);
            const T* gate = kGated ? rows.gate(token, norm * n.pieces + piece) : nullptr;
            for (int64_t i = 0; i < n.width; i += kWide) {
                const int64_t at = piece * n.width + i, left = n.width - i;
                const Vector value = load_part(x + i, left);
                Vector normed = value * inverse;
                if (kGated) {
                    const Gate opened = gate_of(load_part(gate + i, left));
                    normed *= opened.open;
                    store_part(opens + at, opened.open, left);
                    store_part(slopes + at, opened.slope * value, left);
                }
                const Vector grad = load_part(grad_y + at, left), product = grad * normed;
                along += product * load_part(weight + at, left);
                float* to = grad_weight + norm * span + at;
                store_part(to, load_part(to, left) + product, left);
                store_part(gated + at, normed, left);
            }
        }
        const float mean = sum(along) / float(span);
        T* grad_x = static_cast<T*>(n.grad_x) + token * rows.channels + norm * span;
        T* grad_gate = static_cast<T*>(n.grad_gate) + token * rows.channels + norm * span;
        for (int64_t i = 0; i < span; i += kWide) {
            const int64_t left = span - i;
            const Vector grad = load_part(grad_y + i, left) * load_part(weight + i, left);
            const Vector grad_gated = (grad - load_part(gated + i, left) * mean) * inverse;
            store_part(grad_x + i, kGated ? grad_gated * load_part(opens + i, left) : grad_gated, left);
            if (kGated) store_part(grad_gate + i, grad_gated * load_part(slopes + i, left), left);
        }
    }
}

template <typename T, bool kGated>
void forward(const Norm& n) {
    const Rows<T> rows = {n};
#pragma omp parallel num_threads(n.threads)
    {
        std::vector<float> gated(size_t(n.pieces * n.width));
#pragma omp for schedule(static)
        for (int64_t token = 0; token < n.tokens; ++token) forward_token<T, kGated>(rows, token, gated.data());
    }
}

template <typename T, bool kGated>
void backward(const Norm& n) {
    const Rows<T> rows = {n};
#pragma omp parallel num_threads(n.threads)
    {
        std::vector<float> scratch(size_t(3 * n.pieces * n.width));
#pragma omp for schedule(static)
        for (int64_t block = 0; block < (n.tokens + kBlock - 1) / kBlock; ++block) {
            float* grad_weight = n.grad_weight + block * rows.channels;
            std::fill_n(grad_weight, rows.channels, 0.0f);
            for (int64_t token = block * kBlock; token < std::min(n.tokens, (block + 1) * kBlock); ++token)
                backward_token<T, kGated>(rows, token, scratch.data(), grad_weight);
        }
    }
}

}  // namespace

static size_t bytes_of(const Norm& n) { return size_t(n.tokens * n.norms * n.pieces * n.width) * (n.is_fp32 ? 4 : 2); }

extern "C" void norm_forward(const Norm* norm) {
    prefer_large_pages(norm->y, bytes_of(*norm));
    if (norm->is_fp32) norm->gate ? forward<float, true>(*norm) : forward<float, false>(*norm);
    else norm->gate ? forward<BFloat16, true>(*norm) : forward<BFloat16, false>(*norm);
}

extern "C" void norm_backward(const Norm* norm) {
    prefer_large_pages(norm->grad_x, bytes_of(*norm));
    if (norm->gate) prefer_large_pages(norm->grad_gate, bytes_of(*norm));
    if (norm->is_fp32) norm->gate ? backward<float, true>(*norm) : backward<float, false>(*norm);
    else norm->gate ? backward<BFloat16, true>(*norm) : backward<BFloat16, false>(*norm);
}
