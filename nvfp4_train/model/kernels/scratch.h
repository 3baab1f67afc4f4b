// Memory of a thread for the work on one unit.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Memory of one thread, handed out piece by piece and kept for the next unit.
class Scratch {
  public:
    void restart() { used_ = 0; }
    template <typename T>
    T* take(int64_t count) {
        const size_t bytes = (sizeof(T) * size_t(count) + 63) / 64 * 64;
        if (used_ == pieces_.size()) pieces_.emplace_back();
        std::vector<char>& piece = pieces_[used_++];
        if (piece.size() < bytes + 64) piece.resize(bytes + 64);
        return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(piece.data()) + 63) / 64 * 64);
    }
    float* zeros(int64_t count) {
        float* values = take<float>(count);
        std::memset(values, 0, sizeof(float) * size_t(count));
        return values;
    }

  private:
    std::vector<std::vector<char>> pieces_;
    size_t used_ = 0;
};

inline Scratch& own_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

}  // namespace
