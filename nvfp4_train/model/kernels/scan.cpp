// The selective scan of Mamba-2, forward and backward, chunk by chunk in the caches. Called through ctypes.
//
// A unit of work is one group of heads in one chunk of tokens. What a unit adds to the state, and what the state adds to it,
// meets in a short pass over the chunks of each head. Nothing of size tokens x chunk leaves the caches, and results do not
// depend on the number of threads.
//
//   step  = clamp(softplus(dt + bias)),  sums[t] = sum of -step * exp(a_log) since the chunk's or the document's start
//   y[t]  = sum over s <= t of the same document: (c_t . b_s) exp(sums[t] - sums[s]) step[s] x[s]
//         + exp(sums[t]) c_t state  +  skip x[t]
//   state' = exp(sums[last]) state + sum over s: exp(sums[last] - sums[s]) step[s] b_s x[s]^T
//
// Terms between documents are exact zeros.

#include "products.h"
#include "scratch.h"

#include <cmath>

extern "C" {

// Mirrored by `_Scan` in scan.py. B rows of S tokens in L chunks; G groups of R heads; heads of P channels and N states.
struct Scan {
    const void *x, *b, *c, *dt;               // [B, S, G, R*P], [B, S, G, N], [B, S, G, N], [B, S, G, R]
    const float *bias, *a_log, *skip;         // [G, R]
    const int64_t* ids;                       // [B, S]
    const float* initial;                     // [B, G, R, N, P] or null
    void *y, *states;                         // [B, S, G, R*P]; [B, L, G, R, N, P]: at the start of each chunk
    // [B, L, G, R, C'], C' is C in whole vectors; [B, L, G, R, 2, C']: sums, and what rounding took from them; [B, L, G, R]
    float *steps, *sums, *decays;
    const void* grad_y;                       // [B, S, G, R*P]
    void* grad_states;                        // [B, L, G, R, N, P]
    float *grad_decays, *grad_initial;        // [B, L, G, R]; like initial
    void *grad_x, *grad_b, *grad_c, *grad_dt; // contiguous
    float *grad_bias, *grad_a_log, *grad_skip;  // [B, L, G, R]
    int64_t rows, size, chunk, groups, heads, width, depth;
    int64_t x_strides[3], b_strides[3], c_strides[3], dt_strides[3];  // of rows, tokens and groups
    float dt_min, dt_max;
    int32_t is_fp32, threads;
};

void scan_forward(const Scan* scan);
void scan_backward(const Scan* scan);

}  // extern "C"

namespace {

int64_t num_chunks(const Scan& s) { return up(s.size, s.chunk); }

// One group of heads in one chunk.
template <typename T>
struct Unit {
    using W = typename Word<T>::type;
    static constexpr int kNumbers = Word<T>::kNumbers;

    const Scan& s;
    Scratch& scratch;
    int64_t row, index, group;  // of the batch, of the chunk, of the heads
    int64_t start, count;       // tokens
    int64_t tokens_wide, states_wide, width_wide;
    const int64_t* ids;
    bool carries_in;      // the state at the chunk's start belongs to its first token's document
    int64_t* first;       // of each token's document, in this chunk
    float *from_start, *to_end;  // factors of one head: of the state in each output, of each token in the state

    Unit(const Scan& scan, Scratch& memory, int64_t number) : s(scan), scratch(memory) {
        scratch.restart();
        group = number % s.groups;
        index = number / s.groups % num_chunks(s);
        row = number / s.groups / num_chunks(s);
        start = index * s.chunk;
        count = std::min(s.chunk, s.size - start);
        tokens_wide = whole(s.chunk), states_wide = whole(s.depth), width_wide = whole(s.width);
        ids = s.ids + row * s.size + start;
        carries_in = index == 0 ? s.initial != nullptr : ids[0] == ids[-1];
        first = scratch.take<int64_t>(count);
        for (int64_t t = 0; t < count; ++t) first[t] = t && ids[t] == ids[t - 1] ? first[t - 1] : t;
        from_start = scratch.zeros(tokens_wide), to_end = scratch.zeros(tokens_wide);
    }

    int64_t head_place(int64_t head) const {
        return ((row * num_chunks(s) + index) * s.groups + group) * s.heads + head;
    }
    const T* tokens(const void* base, const int64_t* strides) const {
        return static_cast<const T*>(base) + row * strides[0] + start * strides[1] + group * strides[2];
    }
    // Of a contiguous [B, S, G, per_group].
    int64_t place(int64_t token, int64_t per_group) const {
        return ((row * s.size + start + token) * s.groups + group) * per_group;
    }
    float* steps(int64_t head) const { return s.steps + head_place(head) * tokens_wide; }
    float* sums(int64_t head) const { return s.sums + head_place(head) * 2 * tokens_wide; }
    T* state(void* base, int64_t head) const { return static_cast<T*>(base) + head_place(head) * s.depth * s.width; }
    const T* x(int64_t head) const { return tokens(s.x, s.x_strides) + head * s.width; }
    float rate(int64_t head) const { return std::exp(s.a_log[group * s.heads + head]); }
    static float softplus(float v) { return v > 20.0f ? v : std::log1p(std::exp(v)); }
    float raw_step(int64_t token, int64_t head) const {
        return to_float(tokens(s.dt, s.dt_strides)[token * s.dt_strides[1] + head]) + s.bias[group * s.heads + head];
    }

    // The time steps and the sums of log-decays, which all other passes read.
    void prepare(int64_t head) const {
        float *step = steps(head), *total = sums(head);
        const double speed = -double(rate(head));
        double so_far = 0;
        for (int64_t t = 0; t < tokens_wide; ++t) {
            step[t] = t < count ? std::min(std::max(softplus(raw_step(t, head)), s.dt_min), s.dt_max) : 0.0f;
            if (t < count) so_far = (first[t] == t ? 0.0 : so_far) + double(float(speed * double(step[t])));
            total[t] = t < count ? float(so_far) : 0.0f;
            total[tokens_wide + t] = t < count ? float(so_far - double(total[t])) : 0.0f;
        }
        const bool survives = first[count - 1] == 0 && (carries_in || index == 0);
        s.decays[head_place(head)] = survives ? std::exp(total[count - 1]) : 0.0f;
    }

    void set_factors(int64_t head) const {
        const float* total = sums(head);
        const Vector end = splat(total[count - 1]);
        for (int64_t t = 0; t < tokens_wide; t += kWide) {
            store(from_start + t, exponential(load(total + t)));
            Vector left = end - load(total + t);
            if constexpr (sizeof(T) == sizeof(float)) left += total[tokens_wide + count - 1] - load(total + tokens_wide + t);
            store(to_end + t, exponential(left));
        }
        for (int64_t t = 0; t < tokens_wide; ++t) {
            if (t >= count || first[t] != 0 || !carries_in) from_start[t] = 0;
            if (t >= count || t < first[count - 1]) to_end[t] = 0;
        }
    }

    // Rows of a tensor as numbers, [count + 1, wide].
    T* rows_of(const T* from, int64_t stride, int64_t rows, int64_t columns, const float* factors = nullptr) const {
        T* out = scratch.take<T>((rows + 1) * whole(columns));
        gather(from, stride, rows, columns, factors, out, whole(columns));
        return out;
    }
    Left<W> along_rows(const T* x, int64_t wide) const { return {words_of(x), wide / kNumbers, 1}; }
    const W* paired(const T* x, int64_t rows, int64_t wide) const {
        return pair_rows(x, rows, wide, scratch.take<W>(up(rows, 2) * wide));
    }
    Left<W> down_columns(const T* x, int64_t rows, int64_t wide) const { return {paired(x, rows, wide), 1, wide}; }
    Right<W> right(const T* x, int64_t rows, int64_t wide) const { return {paired(x, rows, wide), wide}; }
    // Contracts the columns.
    Right<W> right_transposed(const T* x, int64_t rows, int64_t columns, int64_t wide) const {
        const int64_t words = up(columns, kNumbers), to = whole(rows);
        return {transpose(words_of(x), rows, words, wide / kNumbers, scratch.take<W>(words * to), to), to};
    }
    int64_t depth_of(int64_t numbers) const { return up(numbers, kNumbers); }

    void store_rows(const float* values, int64_t wide, int64_t rows, int64_t columns, T* out, int64_t stride) const {
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t column = 0; column < columns; column += kWide)
                store_part(out + row * stride + column, load(values + row * wide + column), columns - column);
    }

    T* b_rows() const { return rows_of(tokens(s.b, s.b_strides), s.b_strides[1], count, s.depth); }
    T* c_rows() const { return rows_of(tokens(s.c, s.c_strides), s.c_strides[1], count, s.depth); }
    // c_t . b_s for s <= t.
    float* scores(const T* b, const T* c) const {
        float* out = scratch.take<float>(count * tokens_wide);
        multiply(count, count, depth_of(s.depth), along_rows(c, states_wide),
                 right_transposed(b, count, s.depth, states_wide), Out{out, tokens_wide, false}, Part::columns_to_row);
        return out;
    }
};


// exp(sums[t] - sums[s]) for the lanes that token t sees, zero for the others. Neighbours late in a chunk have large sums
// that differ by little: in FP32 their rounding would be an error of the decay, so what it took follows them.
template <typename T>
inline Vector decay_between(const float* sums, int64_t tokens_wide, int64_t t, int64_t s, Ints sees) {
    Vector difference = sums[t] - load(sums + s);
    if constexpr (sizeof(T) == sizeof(float)) difference += sums[tokens_wide + t] - load(sums + tokens_wide + s);
    return choose(sees, exponential(choose(difference > Vector{}, Vector{}, difference)), Vector{});
}

inline Ints lanes_seen(int64_t s, int64_t first, int64_t last) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints token = lane + int32_t(s);
    return (token >= int32_t(first)) & (token <= int32_t(last));
}

// ---------------------------------------------------------------------------------------------------------------- forward

// What the tokens of a chunk add to the state; time steps and decays on the way.
template <typename T>
void add_to_states(const Unit<T>& u) {
    const Scan& s = u.s;
    const auto b = u.down_columns(u.b_rows(), u.count, u.states_wide);
    float* added = u.scratch.template take<float>(s.depth * u.width_wide);
    float* factors = u.scratch.template take<float>(u.tokens_wide);
    T* leaving = u.scratch.template take<T>((u.count + 1) * u.width_wide);
    auto* words = u.scratch.template take<typename Unit<T>::W>(up(u.count, 2) * u.width_wide);
    for (int64_t head = 0; head < s.heads; ++head) {
        u.prepare(head);
        u.set_factors(head);
        for (int64_t t = 0; t < u.count; ++t) factors[t] = u.steps(head)[t] * u.to_end[t];
        gather(u.x(head), s.x_strides[1], u.count, s.width, factors, leaving, u.width_wide);
        multiply(s.depth, s.width, u.depth_of(u.count), b,
                 Right<typename Unit<T>::W>{pair_rows(leaving, u.count, u.width_wide, words), u.width_wide},
                 Out{added, u.width_wide, false});
        u.store_rows(added, u.width_wide, s.depth, s.width, u.state(s.states, head), s.width);
    }
}

// Runs over the chunks of one head: each gets the state at its start in place of what it adds.
template <typename T>
void pass_states(const Scan& s, Scratch& scratch, int64_t row, int64_t head) {
    scratch.restart();
    const int64_t numbers = s.depth * s.width, heads = s.groups * s.heads;
    float* state = scratch.zeros(numbers);
    if (s.initial) std::memcpy(state, s.initial + (row * heads + head) * numbers, sizeof(float) * size_t(numbers));
    for (int64_t chunk = 0; chunk < num_chunks(s); ++chunk) {
        const int64_t place = (row * num_chunks(s) + chunk) * heads + head;
        const Vector decay = splat(s.decays[place]);
        T* kept = static_cast<T*>(s.states) + place * numbers;
        for (int64_t i = 0; i < numbers; i += kWide) {
            const Vector before = load_part(state + i, numbers - i);
            store_part(state + i, before * decay + load_part(kept + i, numbers - i), numbers - i);
            store_part(kept + i, before, numbers - i);
        }
    }
}

// The weights of one head, [count + 1, tokens_wide].
template <typename T>
void weigh(const Unit<T>& u, const float* scores, const float* steps, const float* sums, T* out) {
    for (int64_t t = 0; t < u.count; ++t) {
        T* weights = out + t * u.tokens_wide;
        for (int64_t from = 0; from < u.tokens_wide; from += kWide) {
            const Ints sees = lanes_seen(from, u.first[t], t);
            const Vector score = from > t ? Vector{} : choose(sees, load(scores + t * u.tokens_wide + from), Vector{});
            const bool is_seen = from <= t && from + kWide > u.first[t];
            store(weights + from, is_seen ? score * decay_between<T>(sums, u.tokens_wide, t, from, sees) * load(steps + from)
                                           : Vector{});
        }
    }
    if (u.count % 2) std::memset(static_cast<void*>(out + u.count * u.tokens_wide), 0, sizeof(T) * size_t(u.tokens_wide));
}

template <typename T>
void outputs(const Unit<T>& u) {
    using W = typename Unit<T>::W;
    const Scan& s = u.s;
    const T* c = u.c_rows();
    const float* scores = u.scores(u.b_rows(), c);
    float* inside = u.scratch.template take<float>(u.count * u.width_wide);
    float* read = u.scratch.zeros(u.count * u.width_wide);
    T* weights = u.scratch.template take<T>((u.count + 1) * u.tokens_wide);
    T* x = u.scratch.template take<T>((u.count + 1) * u.width_wide);
    T* state = u.scratch.template take<T>((s.depth + 1) * u.width_wide);
    W* words = u.scratch.template take<W>(up(std::max(u.count, s.depth), 2) * u.width_wide);
    for (int64_t head = 0; head < s.heads; ++head) {
        u.set_factors(head);
        weigh(u, scores, u.steps(head), u.sums(head), weights);
        gather(u.x(head), s.x_strides[1], u.count, s.width, nullptr, x, u.width_wide);
        multiply(u.count, s.width, u.depth_of(u.count), u.along_rows(weights, u.tokens_wide),
                 Right<W>{pair_rows(x, u.count, u.width_wide, words), u.width_wide}, Out{inside, u.width_wide, false},
                 Part::depth_to_row);
        if (u.carries_in) {
            gather(static_cast<const T*>(u.state(s.states, head)), s.width, s.depth, s.width, nullptr, state, u.width_wide);
            multiply(u.count, s.width, u.depth_of(s.depth), u.along_rows(c, u.states_wide),
                     Right<W>{pair_rows(state, s.depth, u.width_wide, words), u.width_wide}, Out{read, u.width_wide, false});
        }
        const float skip = s.skip[u.group * s.heads + head];
        for (int64_t t = 0; t < u.count; ++t) {
            T* y = static_cast<T*>(s.y) + u.place(t, s.heads * s.width) + head * s.width;
            for (int64_t p = 0; p < s.width; p += kWide) {
                const int64_t at = t * u.width_wide + p;
                store_part(y + p, load(inside + at) + load(read + at) * u.from_start[t] + load(x + at) * skip, s.width - p);
            }
        }
    }
}

// --------------------------------------------------------------------------------------------------------------- backward

// The gradient of the state at the chunk's start from the outputs that read it.
template <typename T>
void grad_of_reading(const Unit<T>& u) {
    using W = typename Unit<T>::W;
    const Scan& s = u.s;
    if (!u.carries_in) {
        for (int64_t head = 0; head < s.heads; ++head)
            std::memset(static_cast<void*>(u.state(s.grad_states, head)), 0, sizeof(T) * size_t(s.depth * s.width));
        return;
    }
    const auto c = u.down_columns(u.c_rows(), u.count, u.states_wide);
    float* grad = u.scratch.template take<float>(s.depth * u.width_wide);
    T* grad_read = u.scratch.template take<T>((u.count + 1) * u.width_wide);
    W* words = u.scratch.template take<W>(up(u.count, 2) * u.width_wide);
    const T* grad_y = static_cast<const T*>(s.grad_y) + u.place(0, s.heads * s.width);
    for (int64_t head = 0; head < s.heads; ++head) {
        u.set_factors(head);
        gather(grad_y + head * s.width, s.groups * s.heads * s.width, u.count, s.width, u.from_start, grad_read, u.width_wide);
        multiply(s.depth, s.width, u.depth_of(u.count), c,
                 Right<W>{pair_rows(grad_read, u.count, u.width_wide, words), u.width_wide}, Out{grad, u.width_wide, false});
        u.store_rows(grad, u.width_wide, s.depth, s.width, u.state(s.grad_states, head), s.width);
    }
}

// Back over the chunks of one head: each gets the gradient of what it adds in place of that of the state at its start.
template <typename T>
void pass_grad_states(const Scan& s, Scratch& scratch, int64_t row, int64_t head) {
    scratch.restart();
    const int64_t numbers = s.depth * s.width, heads = s.groups * s.heads;
    float* grad = scratch.zeros(numbers);
    for (int64_t chunk = num_chunks(s) - 1; chunk >= 0; --chunk) {
        const int64_t place = (row * num_chunks(s) + chunk) * heads + head;
        const Vector decay = splat(s.decays[place]);
        const T* state = static_cast<const T*>(s.states) + place * numbers;
        T* kept = static_cast<T*>(s.grad_states) + place * numbers;
        Vector grad_decay = {};
        for (int64_t i = 0; i < numbers; i += kWide) {
            const Vector after = load_part(grad + i, numbers - i);
            grad_decay += after * load_part(state + i, numbers - i);
            store_part(grad + i, after * decay + load_part(kept + i, numbers - i), numbers - i);
            store_part(kept + i, after, numbers - i);
        }
        s.grad_decays[place] = sum(grad_decay);
    }
    if (s.grad_initial) std::memcpy(s.grad_initial + (row * heads + head) * numbers, grad, sizeof(float) * size_t(numbers));
}

// Gradients of one unit, head by head; b and c gather those of all heads.
template <typename T>
class Backward {
    using W = typename Unit<T>::W;
    const Unit<T>& u;
    const Scan& s;
    const T *b, *c;
    Left<W> b_left;
    const float* scores;
    float *grad_scores, *grad_b, *grad_c;                          // [count, wide]
    float *grad_weights, *grad_x, *leaving_grad, *grad_read;        // of one head
    float *grad_steps, *grad_sums, *flow_out, *factors;             // [tokens_wide]
    T *weights, *x, *grad_y, *scaled, *state;
    W *words, *turned;

  public:
    explicit Backward(const Unit<T>& unit) : u(unit), s(unit.s) {
        b = u.b_rows(), c = u.c_rows();
        scores = u.scores(b, c);
        b_left = u.along_rows(b, u.states_wide);
        grad_scores = u.scratch.zeros(u.count * u.tokens_wide);
        grad_b = u.scratch.zeros(u.count * u.states_wide), grad_c = u.scratch.zeros(u.count * u.states_wide);
        grad_weights = floats(u.count * u.tokens_wide), grad_x = floats(u.count * u.width_wide);
        leaving_grad = floats(u.count * u.width_wide), grad_read = floats(u.count * u.states_wide);
        grad_steps = floats(u.tokens_wide), grad_sums = floats(u.tokens_wide), flow_out = floats(u.tokens_wide);
        factors = floats(u.tokens_wide);
        weights = numbers(u.count, u.tokens_wide), x = numbers(u.count, u.width_wide);
        grad_y = numbers(u.count, u.width_wide), scaled = numbers(u.count, u.width_wide);
        state = numbers(s.depth, u.width_wide);
        const int64_t most = std::max(u.count, s.depth) + 1;
        words = u.scratch.template take<W>(most * std::max({u.width_wide, u.tokens_wide, u.states_wide}));
        turned = u.scratch.template take<W>(whole(most) * std::max({u.width_wide, u.tokens_wide, u.states_wide}));
    }

    void run() {
        for (int64_t head = 0; head < s.heads; ++head) {
            std::fill_n(grad_steps, u.tokens_wide, 0.0f), std::fill_n(grad_sums, u.tokens_wide, 0.0f);
            u.set_factors(head);
            load_head(head);
            inside_chunk(head);
            if (u.carries_in) from_state(head);
            if (u.index + 1 < num_chunks(s)) to_state(head);
            finish_head(head);
        }
        finish_group();
    }

  private:
    float* floats(int64_t count) { return u.scratch.template take<float>(count); }
    T* numbers(int64_t rows, int64_t wide) { return u.scratch.template take<T>((rows + 1) * wide); }
    Right<W> pairs(const T* from, int64_t rows, int64_t wide) { return {pair_rows(from, rows, wide, words), wide}; }
    Right<W> transposed(const T* from, int64_t rows, int64_t columns, int64_t wide) {
        const int64_t count = u.depth_of(columns), to = whole(rows);
        return {transpose(words_of(from), rows, count, wide / Unit<T>::kNumbers, turned, to), to};
    }

    const T* grad_y_of(int64_t head) const {
        return static_cast<const T*>(s.grad_y) + u.place(0, s.heads * s.width) + head * s.width;
    }
    int64_t grad_y_stride() const { return s.groups * s.heads * s.width; }

    void load_head(int64_t head) {
        gather(u.x(head), s.x_strides[1], u.count, s.width, nullptr, x, u.width_wide);
        gather(grad_y_of(head), grad_y_stride(), u.count, s.width, nullptr, grad_y, u.width_wide);
    }

    // What tokens of the chunk received from each other.
    void inside_chunk(int64_t head) {
        multiply(u.count, u.count, u.depth_of(s.width), u.along_rows(grad_y, u.width_wide),
                 transposed(x, u.count, s.width, u.width_wide), Out{grad_weights, u.tokens_wide, false}, Part::columns_to_row);
        std::fill_n(flow_out, u.tokens_wide, 0.0f);
        for (int64_t t = 0; t < u.count; ++t) grad_of_row(t, u.steps(head), u.sums(head));
        if (u.count % 2) std::memset(static_cast<void*>(weights + u.count * u.tokens_wide), 0, sizeof(T) * size_t(u.tokens_wide));
        for (int64_t t = 0; t < u.count; ++t) grad_sums[t] -= flow_out[t];
        W* paired_weights = turned;  // free again
        const Left<W> left = {pair_rows(weights, u.count, u.tokens_wide, paired_weights), 1, u.tokens_wide};
        multiply(u.count, s.width, u.depth_of(u.count), left, pairs(grad_y, u.count, u.width_wide),
                 Out{grad_x, u.width_wide, false}, Part::depth_from_row);
    }

    // What a sum of log-decays gains at its end it loses at its start: both of the same numbers.
    void grad_of_row(int64_t t, const float* steps, const float* sums) {
        Vector flow_in = {};
        for (int64_t from = 0; from < u.tokens_wide; from += kWide) {
            const int64_t at = t * u.tokens_wide + from;
            if (from > t || from + kWide <= u.first[t]) {
                store(weights + at, Vector{});
                continue;
            }
            const Ints sees = lanes_seen(from, u.first[t], t);
            const Vector decay = decay_between<T>(sums, u.tokens_wide, t, from, sees), step = load(steps + from);
            const Vector decayed = choose(sees, load(scores + at), Vector{}) * decay, weight = decayed * step;
            const Vector grad = choose(sees, load(grad_weights + at), Vector{}), flow = grad * weight;
            store(weights + at, weight);
            store(grad_scores + at, load(grad_scores + at) + grad * (decay * step));
            store(grad_steps + from, load(grad_steps + from) + grad * decayed);
            store(flow_out + from, load(flow_out + from) + flow);
            flow_in += flow;
        }
        grad_sums[t] += sum(flow_in);
    }

    // What the outputs read from the state at the chunk's start.
    void from_state(int64_t head) {
        gather(grad_y_of(head), grad_y_stride(), u.count, s.width, u.from_start, scaled, u.width_wide);
        gather(static_cast<const T*>(u.state(s.states, head)), s.width, s.depth, s.width, nullptr, state, u.width_wide);
        multiply(u.count, s.depth, u.depth_of(s.width), u.along_rows(scaled, u.width_wide),
                 transposed(state, s.depth, s.width, u.width_wide), Out{grad_read, u.states_wide, false});
        for (int64_t t = 0; t < u.count; ++t) {
            Vector total = {};
            for (int64_t n = 0; n < u.states_wide; n += kWide) {
                const int64_t at = t * u.states_wide + n;
                const Vector grad = load(grad_read + at);
                store(grad_c + at, load(grad_c + at) + grad);
                total += grad * load(c + at);
            }
            grad_sums[t] += sum(total);
        }
    }

    // What the tokens of the chunk left for later chunks.
    void to_state(int64_t head) {
        const float* steps = u.steps(head);
        gather(static_cast<const T*>(u.state(s.grad_states, head)), s.width, s.depth, s.width, nullptr, state, u.width_wide);
        multiply(u.count, s.width, u.depth_of(s.depth), b_left, pairs(state, s.depth, u.width_wide),
                 Out{leaving_grad, u.width_wide, false});
        float at_end = s.decays[u.head_place(head)] * s.grad_decays[u.head_place(head)];
        for (int64_t t = 0; t < u.count; ++t) {
            const float factor = factors[t] = steps[t] * u.to_end[t];
            Vector total = {};
            for (int64_t p = 0; p < u.width_wide; p += kWide) {
                const int64_t at = t * u.width_wide + p;
                const Vector grad = load(leaving_grad + at);
                total += grad * load(x + at);
                store(grad_x + at, load(grad_x + at) + grad * factor);
            }
            const float product = sum(total);
            grad_steps[t] += product * u.to_end[t];
            grad_sums[t] -= product * factor;
            at_end += product * factor;
        }
        grad_sums[u.count - 1] += at_end;
        gather(u.x(head), s.x_strides[1], u.count, s.width, factors, scaled, u.width_wide);
        multiply(u.count, s.depth, u.depth_of(s.width), u.along_rows(scaled, u.width_wide),
                 transposed(state, s.depth, s.width, u.width_wide), Out{grad_b, u.states_wide, true});
    }

    void finish_head(int64_t head) {
        const int64_t number = u.group * s.heads + head;
        const float skip = s.skip[number];
        Vector grad_skip = {};
        for (int64_t t = 0; t < u.count; ++t) {
            T* out = static_cast<T*>(s.grad_x) + u.place(t, s.heads * s.width) + head * s.width;
            for (int64_t p = 0; p < s.width; p += kWide) {
                const int64_t at = t * u.width_wide + p;
                grad_skip += load(grad_y + at) * load(x + at);
                store_part(out + p, load(grad_x + at) + load(grad_y + at) * skip, s.width - p);
            }
        }
        s.grad_skip[u.head_place(head)] = sum(grad_skip);
        finish_steps(head);
    }

    // From sums of log-decays to log-decays, to time steps, to their raw values.
    void finish_steps(int64_t head) {
        const float speed = -u.rate(head), *steps = u.steps(head);
        double running = 0, grad_a_log = 0;  // of terms that cancel
    float grad_bias = 0;
        for (int64_t t = u.count - 1; t >= 0; --t) {
            if (t + 1 < u.count && u.first[t + 1] == t + 1) running = 0;  // the next token begins a document
            running += grad_sums[t];
            grad_a_log += running * double(speed * steps[t]);
            const float raw = u.raw_step(t, head), unclamped = Unit<T>::softplus(raw);
            const bool is_free = unclamped >= s.dt_min && unclamped <= s.dt_max;
            const float grad = is_free ? (grad_steps[t] + float(running) * speed) / (1.0f + std::exp(-raw)) : 0.0f;
            grad_bias += grad;
            T* out = static_cast<T*>(s.grad_dt) + u.place(t, s.heads) + head;
            store_part(out, splat(grad), 1);
        }
        s.grad_a_log[u.head_place(head)] = float(grad_a_log);
        s.grad_bias[u.head_place(head)] = grad_bias;
    }

    void finish_group() {
        narrow(grad_scores, u.count, u.tokens_wide, weights);
        multiply(u.count, s.depth, u.depth_of(u.count), u.along_rows(weights, u.tokens_wide),
                 pairs(b, u.count, u.states_wide), Out{grad_c, u.states_wide, true}, Part::depth_to_row);
        const Left<W> left = {pair_rows(weights, u.count, u.tokens_wide, turned), 1, u.tokens_wide};
        multiply(u.count, s.depth, u.depth_of(u.count), left, pairs(c, u.count, u.states_wide),
                 Out{grad_b, u.states_wide, true}, Part::depth_from_row);
        const int64_t stride = s.groups * s.depth, place = u.place(0, s.depth);
        u.store_rows(grad_b, u.states_wide, u.count, s.depth, static_cast<T*>(s.grad_b) + place, stride);
        u.store_rows(grad_c, u.states_wide, u.count, s.depth, static_cast<T*>(s.grad_c) + place, stride);
    }
};

// ---------------------------------------------------------------------------------------------------------------- threads

template <typename T, typename Function>
void for_each_unit(const Scan& s, Function function) {
    const int64_t units = s.rows * num_chunks(s) * s.groups;
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
    for (int64_t number = 0; number < units; ++number) function(Unit<T>(s, own_scratch(), number));
}

template <typename Function>
void for_each_head(const Scan& s, Function function) {
    const int64_t heads = s.groups * s.heads;
#pragma omp parallel for num_threads(s.threads) schedule(static)
    for (int64_t number = 0; number < s.rows * heads; ++number) function(own_scratch(), number / heads, number % heads);
}

template <typename T>
void forward(const Scan& s) {
    for_each_unit<T>(s, [](const Unit<T>& unit) { add_to_states(unit); });
    for_each_head(s, [&](Scratch& scratch, int64_t row, int64_t head) { pass_states<T>(s, scratch, row, head); });
    for_each_unit<T>(s, [](const Unit<T>& unit) { outputs(unit); });
}

template <typename T>
void backward(const Scan& s) {
    for_each_unit<T>(s, [](const Unit<T>& unit) { grad_of_reading(unit); });
    for_each_head(s, [&](Scratch& scratch, int64_t row, int64_t head) { pass_grad_states<T>(s, scratch, row, head); });
    for_each_unit<T>(s, [](const Unit<T>& unit) { Backward<T>(unit).run(); });
}

}  // namespace

static size_t bytes_of_tokens(const Scan& s, int64_t per_group) {
    return size_t(s.rows * s.size * s.groups * per_group) * (s.is_fp32 ? 4 : 2);
}
static size_t bytes_of_states(const Scan& s) {
    return size_t(s.rows * num_chunks(s) * s.groups * s.heads * s.depth * s.width) * (s.is_fp32 ? 4 : 2);
}

extern "C" void scan_forward(const Scan* scan) {
    prefer_large_pages(scan->y, bytes_of_tokens(*scan, scan->heads * scan->width));
    prefer_large_pages(scan->states, bytes_of_states(*scan));
    scan->is_fp32 ? forward<float>(*scan) : forward<BFloat16>(*scan);
}

extern "C" void scan_backward(const Scan* scan) {
    prefer_large_pages(scan->grad_states, bytes_of_states(*scan));
    prefer_large_pages(scan->grad_x, bytes_of_tokens(*scan, scan->heads * scan->width));
    for (void* grad : {scan->grad_b, scan->grad_c}) prefer_large_pages(grad, bytes_of_tokens(*scan, scan->depth));
    scan->is_fp32 ? backward<float>(*scan) : backward<BFloat16>(*scan);
}
