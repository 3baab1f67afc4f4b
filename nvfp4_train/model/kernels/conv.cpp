// Causal depthwise convolution within documents and SiLU, forward and backward, in one pass each. Called through ctypes.
//
// A unit is kTokens tokens of up to kChannels neighbouring channels. Sums over tokens run within units, and the caller adds
// those up: they do not depend on the threads.

#include "simd.h"

#include <vector>

extern "C" {

// Mirrored by `_Conv` in conv.py; tensors [rows, size, groups, width].
struct Conv {
    const void* x;
    const float *taps, *bias;  // [d_conv, groups * width], the last for the current token; bias null: none
    const int64_t* ids;        // [rows, size], or null: one document per row
    void* y;                   // contiguous
    const void* grad_y;        // contiguous
    void* grad_x;              // contiguous
    float* grad_taps;          // [rows, ceil(size / kTokens), d_conv + 1, groups * width]; the last is the bias
    int64_t rows, size, groups, width, d_conv;
    int64_t x_strides[3];      // of rows, tokens and groups
    int32_t is_fp32, threads;
};

void conv_forward(const Conv* conv);
void conv_backward(const Conv* conv);

}  // extern "C"

namespace {

constexpr int64_t kTokens = 128, kChannels = 256;

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T>
struct Unit {
    const Conv& c;
    int64_t row, block, group, channel;  // first channel of the group
    int64_t start, end, count;           // tokens, channels

    Unit(const Conv& conv, int64_t number) : c(conv) {
        const int64_t slabs = up(c.width, kChannels), blocks = up(c.size, kTokens);
        channel = number % slabs * kChannels;
        group = number / slabs % c.groups;
        block = number / slabs / c.groups % blocks;
        row = number / slabs / c.groups / blocks;
        start = block * kTokens, end = std::min(c.size, start + kTokens);
        count = std::min(kChannels, c.width - channel);
    }
    static int64_t number_of_units(const Conv& c) {
        return c.rows * up(c.size, kTokens) * c.groups * up(c.width, kChannels);
    }
    int64_t column() const { return group * c.width + channel; }
    const T* x(int64_t token) const {
        return static_cast<const T*>(c.x) + row * c.x_strides[0] + token * c.x_strides[1] + group * c.x_strides[2] + channel;
    }
    int64_t place(int64_t token) const { return (row * c.size + token) * c.groups * c.width + column(); }
    const float* tap(int64_t age) const { return c.taps + (c.d_conv - 1 - age) * c.groups * c.width + column(); }
    // How many tokens back a token sees.
    int64_t reach(int64_t token) const {
        const int64_t most = std::min(token, c.d_conv - 1);
        if (c.ids == nullptr) return most;
        const int64_t* ids = c.ids + row * c.size + token;
        int64_t age = 0;
        while (age < most && ids[-age - 1] == ids[0]) ++age;
        return age;
    }
    Vector convolve(int64_t token, int64_t reach, int64_t i) const {
        const int64_t left = count - i;
        Vector z = c.bias ? load_part(c.bias + column() + i, left) : Vector{};
        for (int64_t age = 0; age <= reach; ++age) z += load_part(x(token - age) + i, left) * load_part(tap(age) + i, left);
        return z;
    }

    void forward() const {
        for (int64_t token = start; token < end; ++token) {
            const int64_t far = reach(token);
            T* y = static_cast<T*>(c.y) + place(token);
            for (int64_t i = 0; i < count; i += kWide) {
                const Vector z = convolve(token, far, i);
                store_part(y + i, z * sigmoid(z), count - i);
            }
        }
    }

    // The gradient before SiLU, of the unit's tokens and of those after it that see them.
    void grads_inside(float* grads) const {
        const int64_t last = std::min(c.size, end + c.d_conv - 1);
        for (int64_t token = start; token < last; ++token) {
            const int64_t far = reach(token);
            const T* grad_y = static_cast<const T*>(c.grad_y) + place(token);
            for (int64_t i = 0; i < count; i += kWide) {
                const Vector z = convolve(token, far, i), sig = sigmoid(z);
                const Vector slope = sig * (1.0f + z * (1.0f - sig));
                store(grads + (token - start) * kChannels + i, load_part(grad_y + i, count - i) * slope);
            }
        }
    }

    void backward(float* grads) const {
        grads_inside(grads);
        const int64_t channels = c.groups * c.width;
        float* grad_taps = c.grad_taps + (row * up(c.size, kTokens) + block) * (c.d_conv + 1) * channels + column();
        for (int64_t i = 0; i < count; i += kWide) {
            const int64_t left = count - i;
            for (int64_t age = 0; age < c.d_conv; ++age) {
                Vector total = {};
                for (int64_t token = start; token < end; ++token)
                    if (age <= reach_[token - start]) total += load(grads + (token - start) * kChannels + i) * load_part(x(token - age) + i, left);
                store_part(grad_taps + (c.d_conv - 1 - age) * channels + i, total, left);
            }
            Vector total = {};
            for (int64_t token = start; token < end; ++token) total += load(grads + (token - start) * kChannels + i);
            store_part(grad_taps + c.d_conv * channels + i, total, left);
        }
        for (int64_t token = start; token < end; ++token) {
            T* grad_x = static_cast<T*>(c.grad_x) + place(token);
            for (int64_t i = 0; i < count; i += kWide) {
                Vector total = {};
                for (int64_t age = 0; age < c.d_conv && token + age < c.size; ++age)
                    if (age <= reach_[token + age - start])
                        total += load(grads + (token + age - start) * kChannels + i) * load_part(tap(age) + i, count - i);
                store_part(grad_x + i, total, count - i);
            }
        }
    }

    std::vector<int64_t> reach_;
    void find_reach() {
        const int64_t last = std::min(c.size, end + c.d_conv - 1);
        reach_.resize(size_t(last - start));
        for (int64_t token = start; token < last; ++token) reach_[size_t(token - start)] = reach(token);
    }
};

template <typename T>
void forward(const Conv& c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t number = 0; number < Unit<T>::number_of_units(c); ++number) Unit<T>(c, number).forward();
}

template <typename T>
void backward(const Conv& c) {
#pragma omp parallel num_threads(c.threads)
    {
        std::vector<float> grads(size_t((kTokens + c.d_conv) * kChannels + kWide));
#pragma omp for schedule(static)
        for (int64_t number = 0; number < Unit<T>::number_of_units(c); ++number) {
            Unit<T> unit(c, number);
            unit.find_reach();
            unit.backward(grads.data());
        }
    }
}

}  // namespace

extern "C" void conv_forward(const Conv* conv) { conv->is_fp32 ? forward<float>(*conv) : forward<BFloat16>(*conv); }
extern "C" void conv_backward(const Conv* conv) { conv->is_fp32 ? backward<float>(*conv) : backward<BFloat16>(*conv); }
