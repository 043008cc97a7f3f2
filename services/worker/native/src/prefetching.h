// Prefetches what is read next, spread over the work before it.
#pragma once
#include "abi.h"

namespace lpx {

// What is read next: num_bytes from `from` on.
struct Following {
    const void* from;
    int64_t num_bytes;
};

// What is read after `row` rows of a matrix: up to `most` more rows of n items, or `next` after the last.
template <class W>
inline Following rows_after(const W* rows, int64_t num_rows, int64_t row, int64_t most, int64_t n,
                            const Following& next) {
    const int64_t count = smaller(num_rows - row, most);
    if (count <= 0) return next;
    return {rows + row * n, count * n * int64_t(sizeof(W))};
}

// Prefetches what is read next to the second-level cache, an equal part in each of num_steps steps.
class Prefetching {
public:
    Prefetching(const Following& next, int64_t num_steps)
        : at_(static_cast<const char*>(next.from)),
          end_(at_ + next.num_bytes),
          step_(ceil_div(ceil_div(next.num_bytes, kLine), num_steps) * kLine) {}

    void step() {
        const char* end = at_ + smaller(step_, end_ - at_);
        for (; at_ < end; at_ += kLine) {
            __builtin_prefetch(at_, 0, 2);
            if (kEarlier > 0) __builtin_prefetch(at_ + kEarlier, 0, 2);
        }
    }

private:
    static constexpr int64_t kLine = 64;
#if defined(__AMX_BF16__)
    // On the processors that have AMX, it is faster to ask for each line twice than once, early or late.
    static constexpr int64_t kEarlier = 2048;
#else
    static constexpr int64_t kEarlier = 0;
#endif
    const char *at_, *end_;
    int64_t step_;
};

inline void prefetch_all(const Following& next) { Prefetching(next, 1).step(); }

}  // namespace lpx
