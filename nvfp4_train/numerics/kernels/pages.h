// Memory for results. The system hands out fresh memory page by page when it is first written: with 4 KiB pages that takes
// several times as long as writing a tensor, with 2 MiB pages a fraction.

#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

// Asks for large pages where `data` has not been written yet; a hint, which changes no value and may be ignored.
inline void prefer_large_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t small = 4096, large = 2 << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + small - 1) / small * small;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / small * small;
    if (data != nullptr && last >= first + 2 * large) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

}  // namespace
