// Causal grouped-query attention within documents and windows, forward and backward. Called through ctypes.
//
// A unit is kTokens queries of one head, or kTokens keys of one key-value head; its scores stay in the caches in FP32. The
// backward computes them twice, once by queries and once by keys, so that no unit adds to what another writes: results do not
// depend on the number of threads.

#include "products.h"
#include "scratch.h"

#include <cmath>

extern "C" {

// Mirrored by `_Attention` in attention.py. Strides of rows, heads and tokens.
struct Attention {
    const void *query, *key, *value;           // [B, H, S, P], [B, G, S, P] twice
    const int64_t* first;                      // [B, S]: the first token that each token sees
    void* out;                                 // like the query
    float* log_sums;                           // [B, H, S]
    const void* grad_out;                      // like the query
    float* products;                           // [B, H, S]: of the output and its gradient
    void *grad_query, *grad_key, *grad_value;  // contiguous [B, S, heads, P]
    void *turned, *paired;                     // words of key, value, query and output gradient, see `Layouts`
    int64_t rows, heads, kv_heads, size, width;
    int64_t query_strides[3], key_strides[3], value_strides[3], out_strides[3], grad_out_strides[3];
    int32_t is_fp32, threads;
};

void attention_forward(const Attention* attention);
void attention_backward(const Attention* attention);

}  // extern "C"

namespace {

constexpr int64_t kTokens = 64;

template <typename T>
const T* at(const void* base, const int64_t* strides, int64_t row, int64_t head, int64_t token) {
    return static_cast<const T*>(base) + row * strides[0] + head * strides[1] + token * strides[2];
}

// Right operands made once per head: rows of `wide` words, and after them room for a vector that reaches beyond.
template <typename T>
struct Layouts {
    using W = typename Word<T>::type;
    static constexpr int kNumbers = Word<T>::kNumbers;
    const Attention& a;
    int64_t wide = whole(a.size) + kWide, width_wide = whole(a.width), words = up(a.width, kNumbers);
    int64_t turned_size = words * wide, paired_size = up(a.size + kTokens, kNumbers) * width_wide;

    // [words along a token, tokens]: contracts channels. `slot` counts heads of all tensors.
    W* turned(int64_t slot) const { return static_cast<W*>(a.turned) + slot * turned_size; }
    // [pairs of tokens, channels]: contracts tokens.
    W* paired(int64_t slot) const { return static_cast<W*>(a.paired) + slot * paired_size; }

    void make(int64_t slot, const T* from, int64_t stride, Scratch& scratch) const {
        scratch.restart();
        T* numbers = scratch.take<T>((a.size + 1) * width_wide);
        gather(from, stride, a.size, a.width, nullptr, numbers, width_wide);
        transpose(words_of(numbers), a.size, words, width_wide / kNumbers, turned(slot), wide);
        const W* pairs = pair_rows(numbers, a.size, width_wide, paired(slot));
        if (static_cast<const void*>(pairs) == numbers) std::memcpy(paired(slot), pairs, sizeof(W) * size_t(a.size * width_wide));
    }
};

template <typename T>
struct Unit {
    using W = typename Word<T>::type;
    static constexpr int kNumbers = Word<T>::kNumbers;
    const Attention& a;
    Layouts<T> layouts;
    Scratch& scratch;
    int64_t row, head, start, count;
    const int64_t* first;
    float scale;

    Unit(const Attention& attention, Scratch& memory, int64_t number, int64_t heads)
        : a(attention), layouts{attention}, scratch(memory), scale(1.0f / std::sqrt(float(attention.width))) {
        scratch.restart();
        const int64_t blocks = up(a.size, kTokens);
        start = number % blocks * kTokens;
        head = number / blocks % heads, row = number / blocks / heads;
        count = std::min(kTokens, a.size - start);
        first = a.first + row * a.size;
    }
    static int64_t number_of_units(const Attention& a, int64_t heads) { return a.rows * heads * up(a.size, kTokens); }

    int64_t kv_head() const { return head / (a.heads / a.kv_heads); }
    int64_t key_slot() const { return row * a.kv_heads + kv_head(); }
    int64_t value_slot() const { return a.rows * a.kv_heads + key_slot(); }
    int64_t query_slot(int64_t query_head) const { return a.rows * (2 * a.kv_heads) + row * a.heads + query_head; }
    int64_t grad_slot(int64_t query_head) const { return a.rows * a.heads + query_slot(query_head); }
    int64_t token_place(int64_t query_head) const { return (row * a.heads + query_head) * a.size; }
    // Contractions over tokens begin at a whole word.
    static int64_t even(int64_t token) { return token / 2 * 2; }

    T* rows_of(const void* base, const int64_t* strides, int64_t which) const {
        T* out = scratch.take<T>((count + 1) * layouts.width_wide);
        gather(at<T>(base, strides, row, which, start), strides[2], count, a.width, nullptr, out, layouts.width_wide);
        return out;
    }
    Left<W> left(const T* rows, int64_t wide) const { return {words_of(rows), wide / kNumbers, 1}; }
    Right<W> turned(int64_t slot, int64_t from) const { return {layouts.turned(slot) + from, layouts.wide}; }
    Right<W> paired(int64_t slot, int64_t from) const {
        return {layouts.paired(slot) + from / kNumbers * layouts.width_wide, layouts.width_wide};
    }
    // rows [count] times columns from .. from + columns, contracting channels.
    void products(const T* rows, int64_t slot, int64_t from, int64_t columns, float* out, int64_t wide) const {
        multiply(count, columns, layouts.words, left(rows, layouts.width_wide), turned(slot, from), Out{out, wide, false});
    }
    // weights [count, columns] times tokens from .. from + columns.
    void mix(const T* weights, int64_t wide, int64_t slot, int64_t from, int64_t columns, float* out, bool adds) const {
        multiply(count, a.width, up(columns, kNumbers), left(weights, wide), paired(slot, from),
                 Out{out, layouts.width_wide, adds});
    }
    void store_out(const float* values, T* out, int64_t stride) const {
        for (int64_t t = 0; t < count; ++t)
            for (int64_t p = 0; p < a.width; p += kWide)
                store_part(out + t * stride + p, load(values + t * layouts.width_wide + p), a.width - p);
    }
};

inline Ints lanes_from(int64_t token) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lane + int32_t(token);
}
inline Ints within(Ints tokens, int64_t first, int64_t last) {
    return (tokens >= int32_t(first)) & (tokens <= int32_t(last));
}

template <typename T>
void attend(const Unit<T>& u) {
    const int64_t from = u.even(u.first[u.start]), columns = u.start + u.count - from, wide = whole(columns);
    float* scores = u.scratch.template take<float>(u.count * wide);
    T* weights = u.scratch.template take<T>((u.count + 1) * wide);
    float* out = u.scratch.template take<float>(u.count * u.layouts.width_wide);
    u.products(u.rows_of(u.a.query, u.a.query_strides, u.head), u.key_slot(), from, columns, scores, wide);
    for (int64_t t = 0; t < u.count; ++t) {
        float* row = scores + t * wide;
        const int64_t token = u.start + t, first = u.first[token];
        Vector largest = splat(-INFINITY);
        for (int64_t i = 0; i < wide; i += kWide) {
            const Vector score = choose(within(lanes_from(from + i), first, token), load(row + i) * u.scale, splat(-INFINITY));
            largest = choose(score > largest, score, largest);
            store(row + i, score);
        }
        const float most = *std::max_element(reinterpret_cast<float*>(&largest), reinterpret_cast<float*>(&largest) + kWide);
        Vector total = {};
        for (int64_t i = 0; i < wide; i += kWide) {
            const Vector weight = exponential(load(row + i) - most);
            total += weight;
            store(weights + t * wide + i, weight);
        }
        const float all = sum(total);
        u.a.log_sums[u.token_place(u.head) + token] = most + std::log(all);
        scores[t * wide] = 1.0f / all;  // its row has been read
    }
    u.mix(weights, wide, u.value_slot(), from, columns, out, false);
    for (int64_t t = 0; t < u.count; ++t)
        for (int64_t p = 0; p < u.layouts.width_wide; p += kWide) {
            float* place = out + t * u.layouts.width_wide + p;
            store(place, load(place) * scores[t * wide]);
        }
    u.store_out(out, const_cast<T*>(at<T>(u.a.out, u.a.out_strides, u.row, u.head, u.start)), u.a.out_strides[2]);
}

// The gradient of the queries, and the products that both passes need.
template <typename T>
void grad_of_queries(const Unit<T>& u) {
    const Attention& a = u.a;
    const int64_t from = u.even(u.first[u.start]), columns = u.start + u.count - from, wide = whole(columns);
    float* scores = u.scratch.template take<float>(u.count * wide);
    float* grads = u.scratch.template take<float>(u.count * wide);
    T* weights = u.scratch.template take<T>((u.count + 1) * wide);
    float* out = u.scratch.template take<float>(u.count * u.layouts.width_wide);
    const T* grad_out = u.rows_of(a.grad_out, a.grad_out_strides, u.head);
    const T* outputs = u.rows_of(a.out, a.out_strides, u.head);
    u.products(u.rows_of(a.query, a.query_strides, u.head), u.key_slot(), from, columns, scores, wide);
    u.products(grad_out, u.value_slot(), from, columns, grads, wide);
    for (int64_t t = 0; t < u.count; ++t) {
        const int64_t token = u.start + t, first = u.first[token], place = u.token_place(u.head) + token;
        Vector total = {};
        for (int64_t p = 0; p < u.layouts.width_wide; p += kWide)
            total += load(grad_out + t * u.layouts.width_wide + p) * load(outputs + t * u.layouts.width_wide + p);
        const float product = a.products[place] = sum(total), log_sum = a.log_sums[place];
        for (int64_t i = 0; i < wide; i += kWide) {
            const Ints sees = within(lanes_from(from + i), first, token);
            const Vector weight = exponential(choose(sees, load(scores + t * wide + i) * u.scale - log_sum, splat(-INFINITY)));
            const Vector grad = choose(sees, load(grads + t * wide + i), Vector{});
            store(weights + t * wide + i, weight * (grad - product) * u.scale);
        }
    }
    u.mix(weights, wide, u.key_slot(), from, columns, out, false);
    T* to = static_cast<T*>(a.grad_query) + ((u.row * a.size + u.start) * a.heads + u.head) * a.width;
    u.store_out(out, to, a.heads * a.width);
}

// The gradients of keys and values, from the queries that see them.
template <typename T>
void grad_of_keys(const Unit<T>& u) {
    const Attention& a = u.a;
    const int64_t from = u.even(u.start);
    int64_t end = u.start + u.count;
    while (end < a.size && u.first[end] < u.start + u.count) ++end;  // what tokens see begins ever later
    const int64_t columns = end - from, wide = whole(columns), heads = a.heads / a.kv_heads;
    float* scores = u.scratch.template take<float>(u.count * wide);
    float* grads = u.scratch.template take<float>(u.count * wide);
    T* weights = u.scratch.template take<T>((u.count + 1) * wide);
    T* slopes = u.scratch.template take<T>((u.count + 1) * wide);
    float* grad_key = u.scratch.zeros(u.count * u.layouts.width_wide);
    float* grad_value = u.scratch.zeros(u.count * u.layouts.width_wide);
    const T* key = u.rows_of(a.key, a.key_strides, u.head);
    const T* value = u.rows_of(a.value, a.value_strides, u.head);
    float *log_sums = u.scratch.zeros(wide), *products = u.scratch.zeros(wide);
    int32_t* first = u.scratch.template take<int32_t>(wide);
    for (int64_t i = 0; i < wide; ++i) first[i] = i < columns ? int32_t(u.first[from + i]) : INT32_MAX;
    for (int64_t query_head = u.head * heads; query_head < (u.head + 1) * heads; ++query_head) {
        std::memcpy(log_sums, a.log_sums + u.token_place(query_head) + from, sizeof(float) * size_t(columns));
        std::memcpy(products, a.products + u.token_place(query_head) + from, sizeof(float) * size_t(columns));
        u.products(key, u.query_slot(query_head), from, columns, scores, wide);
        u.products(value, u.grad_slot(query_head), from, columns, grads, wide);
        for (int64_t t = 0; t < u.count; ++t) {
            const int32_t token = int32_t(u.start + t);
            for (int64_t i = 0; i < wide; i += kWide) {
                Ints firsts;
                std::memcpy(&firsts, first + i, sizeof firsts);
                const Ints sees = (lanes_from(from + i) >= token) & (firsts <= token);
                const Vector exponent = load(scores + t * wide + i) * u.scale - load(log_sums + i);
                const Vector weight = exponential(choose(sees, exponent, splat(-INFINITY)));
                const Vector grad = choose(sees, load(grads + t * wide + i) - load(products + i), Vector{});
                store(weights + t * wide + i, weight);
                store(slopes + t * wide + i, weight * grad * u.scale);
            }
        }
        u.mix(weights, wide, u.grad_slot(query_head), from, columns, grad_value, true);
        u.mix(slopes, wide, u.query_slot(query_head), from, columns, grad_key, true);
    }
    const int64_t place = ((u.row * a.size + u.start) * a.kv_heads + u.head) * a.width;
    u.store_out(grad_key, static_cast<T*>(a.grad_key) + place, a.kv_heads * a.width);
    u.store_out(grad_value, static_cast<T*>(a.grad_value) + place, a.kv_heads * a.width);
}

template <typename T, typename Function>
void for_each_unit(const Attention& a, int64_t heads, Function function) {
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
    for (int64_t number = 0; number < Unit<T>::number_of_units(a, heads); ++number)
        function(Unit<T>(a, own_scratch(), number, heads));
}

// Lays heads out; the slots of a tensor begin at `slot`.
template <typename T>
void lay_out(const Attention& a, const void* base, const int64_t* strides, int64_t heads, int64_t slot) {
    const Layouts<T> layouts = {a};
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t number = 0; number < a.rows * heads; ++number)
        layouts.make(slot + number, at<T>(base, strides, number / heads, number % heads, 0), strides[2], own_scratch());
}

template <typename T>
void forward(const Attention& a) {
    lay_out<T>(a, a.key, a.key_strides, a.kv_heads, 0);
    lay_out<T>(a, a.value, a.value_strides, a.kv_heads, a.rows * a.kv_heads);
    for_each_unit<T>(a, a.heads, [](const Unit<T>& unit) { attend(unit); });
}

template <typename T>
void backward(const Attention& a) {
    lay_out<T>(a, a.key, a.key_strides, a.kv_heads, 0);
    lay_out<T>(a, a.value, a.value_strides, a.kv_heads, a.rows * a.kv_heads);
    lay_out<T>(a, a.query, a.query_strides, a.heads, a.rows * 2 * a.kv_heads);
    lay_out<T>(a, a.grad_out, a.grad_out_strides, a.heads, a.rows * (2 * a.kv_heads + a.heads));
    for_each_unit<T>(a, a.heads, [](const Unit<T>& unit) { grad_of_queries(unit); });
    for_each_unit<T>(a, a.kv_heads, [](const Unit<T>& unit) { grad_of_keys(unit); });
}

}  // namespace

extern "C" void attention_forward(const Attention* attention) {
    attention->is_fp32 ? forward<float>(*attention) : forward<BFloat16>(*attention);
}
extern "C" void attention_backward(const Attention* attention) {
    attention->is_fp32 ? backward<float>(*attention) : backward<BFloat16>(*attention);
}
