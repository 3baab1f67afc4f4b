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
    int64_t rows, size, groups, width, d_conv;  // d_conv: at most 64
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
    // Pointers to what one token sees, as values of their own: a compiler must take a store for a change of anything else.
    // kReach is that of the token where a compiler should know it, else -1.
    template <int kReach>
    struct View {
        static constexpr int64_t kMost = kReach >= 0 ? kReach + 1 : 64;
        const T* x[kMost];
        const float *taps[kMost], *bias;
        int64_t ages, count;

        View(const Unit& u, int64_t token, int64_t reach)
            : bias(u.c.bias ? u.c.bias + u.column() : nullptr), ages(kReach >= 0 ? kReach + 1 : reach + 1), count(u.count) {
            for (int64_t age = 0; age < ages; ++age) x[age] = u.x(token - age), taps[age] = u.tap(age);
        }
        Vector convolve(int64_t i) const {
            const int64_t left = count - i;
            Vector z = bias ? load_part(bias + i, left) : Vector{};
            for (int64_t age = 0; age < ages; ++age) z += load_part(x[age] + i, left) * load_part(taps[age] + i, left);
            return z;
        }
    };

    template <int kReach>
    void forward_token(int64_t token, int64_t reach) const {
        T* y = static_cast<T*>(c.y) + place(token);
        const View<kReach> view(*this, token, reach);
        for (int64_t i = 0; i < view.count; i += kWide) {
            const Vector z = view.convolve(i);
            store_part(y + i, z * sigmoid(z), view.count - i);
        }
    }

    void forward() const {
        for (int64_t token = start; token < end; ++token) {
            const int64_t far = reach(token);
            if (far == 3) forward_token<3>(token, far);
            else forward_token<-1>(token, far);
        }
    }

    // The gradient before SiLU, and what the unit's own tokens add to those of the taps: `sums` [d_conv + 1, kChannels].
    template <int kReach>
    void grads_inside(int64_t token, int64_t reach, float* grads, float* sums) const {
        const T* grad_y = static_cast<const T*>(c.grad_y) + place(token);
        const View<kReach> view(*this, token, reach);
        const int64_t last = c.d_conv - 1;
        const bool is_own = token < end;
        grads += (token - start) * kChannels;
        for (int64_t i = 0; i < view.count; i += kWide) {
            const Vector z = view.convolve(i), sig = sigmoid(z);
            const Vector grad = load_part(grad_y + i, view.count - i) * (sig * (1.0f + z * (1.0f - sig)));
            store(grads + i, grad);
            if (!is_own) continue;
            for (int64_t age = 0; age < view.ages; ++age) {
                float* sum = sums + (last - age) * kChannels + i;
                store(sum, load(sum) + grad * load_part(view.x[age] + i, view.count - i));
            }
            float* bias = sums + (last + 1) * kChannels + i;
            store(bias, load(bias) + grad);
        }
    }

    // From the gradients of all tokens that see this one.
    template <int kTaps>
    void grad_of_token(int64_t token, const int64_t* reaches, const float* grads) const {
        T* grad_x = static_cast<T*>(c.grad_x) + place(token);
        constexpr int64_t kMost = kTaps > 0 ? kTaps : 64;
        const float *from[kMost], *taps[kMost];
        int64_t seen = 0;
        const int64_t most = std::min(kTaps > 0 ? kTaps : c.d_conv, c.size - token), channels = count;
        for (int64_t age = 0; age < most; ++age) {
            if (kTaps == 0 && age > reaches[token + age - start]) continue;
            from[seen] = grads + (token + age - start) * kChannels, taps[seen++] = tap(age);
        }
        const int64_t terms = kTaps > 0 ? kTaps : seen;
        for (int64_t i = 0; i < channels; i += kWide) {
            Vector total = {};
            for (int64_t term = 0; term < terms; ++term) total += load(from[term] + i) * load_part(taps[term] + i, channels - i);
            store_part(grad_x + i, total, channels - i);
        }
    }

    // `grads` holds [kTokens + d_conv, kChannels], `sums` [d_conv + 1, kChannels].
    void backward(float* grads, float* sums, std::vector<int64_t>& reaches) const {
        const int64_t last = std::min(c.size, end + c.d_conv - 1), channels = c.groups * c.width;
        std::fill_n(sums, (c.d_conv + 1) * kChannels, 0.0f);
        reaches.resize(size_t(last - start));
        for (int64_t token = start; token < last; ++token) {
            const int64_t far = reaches[size_t(token - start)] = reach(token);
            if (far == 3) grads_inside<3>(token, far, grads, sums);
            else grads_inside<-1>(token, far, grads, sums);
        }
        for (int64_t token = start; token < end; ++token) {
            bool all_see = c.d_conv == 4 && token + 3 < c.size;
            for (int64_t age = 0; all_see && age < 4; ++age) all_see = age <= reaches[size_t(token + age - start)];
            if (all_see) grad_of_token<4>(token, reaches.data(), grads);
            else grad_of_token<0>(token, reaches.data(), grads);
        }
        float* grad_taps = c.grad_taps + (row * up(c.size, kTokens) + block) * (c.d_conv + 1) * channels + column();
        for (int64_t tap = 0; tap <= c.d_conv; ++tap)
            std::memcpy(grad_taps + tap * channels, sums + tap * kChannels, sizeof(float) * size_t(count));
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
        std::vector<float> grads(size_t((kTokens + c.d_conv) * kChannels)), sums(size_t((c.d_conv + 1) * kChannels));
        std::vector<int64_t> reaches;
#pragma omp for schedule(static)
        for (int64_t number = 0; number < Unit<T>::number_of_units(c); ++number)
            Unit<T>(c, number).backward(grads.data(), sums.data(), reaches);
    }
}

}  // namespace

static size_t bytes_of(const Conv& c) { return size_t(c.rows * c.size * c.groups * c.width) * (c.is_fp32 ? 4 : 2); }

extern "C" void conv_forward(const Conv* conv) {
    prefer_large_pages(conv->y, bytes_of(*conv));
    conv->is_fp32 ? forward<float>(*conv) : forward<BFloat16>(*conv);
}

extern "C" void conv_backward(const Conv* conv) {
    prefer_large_pages(conv->grad_x, bytes_of(*conv));
    conv->is_fp32 ? backward<float>(*conv) : backward<BFloat16>(*conv);
}
