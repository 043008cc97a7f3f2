// Low-rank updates of float32 rows by matrices of any type, which widen in registers.
//
// A is [rank][inputs] and B is [rank][outputs], row after row. Shrink takes a few rows of x; for each four rows of
// A (or one), it goes through the inputs. Expand takes a few rows of B; for each vector of outputs, it goes through
// the rows of y. In long runs it takes two vectors of outputs and 12 or 6 rows of y, and goes through B's rows.
#pragma once
#include <type_traits>

#include "vec.h"

namespace lpx {

// Rows of x that are multiplied by four rows of A at a time: as many sums as registers hold.
constexpr int kDotRows = kLanes == 16 ? 4 : 3;
// Rows of y at a time in long runs, of which two vectors stay in registers.
constexpr int kStripRows = kLanes == 16 ? 12 : 6;
// Rank rows whose part of a strip stays in the first-level cache.
constexpr int64_t kStripRanks = 64;

#if defined(__AVX512BF16__)
// One or two rows of activations read matrices in the order of memory, which Intel Xeons of the Sapphire
// Rapids kind do faster. What is prefetched goes to the second-level cache there, because the first waits for
// too few lines at a time. AMD's processors with these instructions multiply pairs instead.
constexpr bool kInOrder = true;
constexpr int kCacheHint = 2;
#else
constexpr bool kInOrder = false;  // slower at AVX2 on the same processor
constexpr int kCacheHint = 3;
#endif
// How far ahead of its use a row that is read alone, or a pair of rows, is prefetched.
constexpr int64_t kStreamBytes = 6144;

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, kCacheHint); }

// out[x row][A row] += x . A over whole vectors of n columns, for X rows of x and R rows of A.
template <int X, int R, class W>
void dot_block(const float* x, int64_t ldx, const W* a, int64_t n, float* out, int64_t ldout) {
    Vec sums[X][R];
    for (int i = 0; i < X; ++i) {
        for (int r = 0; r < R; ++r) sums[i][r] = zero();
    }
    for (int64_t k = 0; k + kLanes <= n; k += kLanes) {
        Vec inputs[X];
#pragma GCC unroll 8
        for (int i = 0; i < X; ++i) inputs[i] = load(x + i * ldx + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            prefetch(a + (R + r) * n + k);
            const Vec weights = load(a + r * n + k);
#pragma GCC unroll 8
            for (int i = 0; i < X; ++i) sums[i][r] = fma(inputs[i], weights, sums[i][r]);
        }
    }
    for (int i = 0; i < X; ++i) {
        for (int r = 0; r < R; ++r) out[i * ldout + r] += sum(sums[i][r]);
    }
}

// The same for one row of x and num_a rows of A, one after another.
template <class W>
void dot_in_order(const float* x, const W* a, int64_t num_a, int64_t n, float* out) {
    constexpr int64_t kLine = 64 / sizeof(W);
    for (int64_t r = 0; r < num_a; ++r, a += n) {
        Vec total = zero();
        for (int64_t k = 0; k + kLanes <= n; k += kLanes) {
            if (k % kLine == 0) prefetch(a + k + kStreamBytes / sizeof(W));
            total = fma(load(x + k), load(a + k), total);
        }
        out[r] += sum(total);
    }
}

// The same for X rows of x.
template <int X, class W>
void dot_rows(const float* x, int64_t ldx, const W* a, int64_t num_a, int64_t n, float* out,
              int64_t ldout) {
    if constexpr (X == 1 && kInOrder) return dot_in_order(x, a, num_a, n, out);
    constexpr int R = X < 3 ? 8 / X : 4;
    int64_t r = 0;
    for (; r + R <= num_a; r += R) dot_block<X, R>(x, ldx, a + r * n, n, out + r, ldout);
    for (; r < num_a; ++r) dot_block<X, 1>(x, ldx, a + r * n, n, out + r, ldout);
}

// The same over the columns behind the last whole vector, which real models do not have.
template <class W>
void dot_ends(const float* x, int64_t ldx, int64_t num_rows, const W* a, int64_t num_a, int64_t n,
              float* out, int64_t ldout) {
    const int64_t left = n % kLanes;
    if (left == 0) return;
    for (int64_t row = 0; row < num_rows; ++row) {
        const Vec inputs = load_n(x + row * ldx + n - left, left);
        for (int64_t r = 0; r < num_a; ++r) {
            out[row * ldout + r] += sum(mul(inputs, load_n(a + (r + 1) * n - left, left)));
        }
    }
}

// out[row][A row] += x[row] . A over n columns.
template <class W>
void shrink_vectors(const float* x, int64_t ldx, int64_t num_rows, const W* a, int64_t num_a,
                    int64_t n, float* out, int64_t ldout) {
    int64_t row = 0;
    const auto while_left = [&](auto count) {
        constexpr int X = count.value;
        for (; row + X <= num_rows; row += X) {
            dot_rows<X>(x + row * ldx, ldx, a, num_a, n, out + row * ldout, ldout);
        }
    };
    while_left(std::integral_constant<int, kDotRows>());
    while_left(std::integral_constant<int, 2>());
    while_left(std::integral_constant<int, 1>());
    dot_ends(x, ldx, num_rows, a, num_a, n, out, ldout);
}

// y[row] += sum over R rank rows of shrunk * B, over whole vectors of n columns from `begin` on.
template <int R, class W>
void expand_block(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t begin, int64_t n,
                  const float* shrunk, int64_t ld) {
    for (int64_t column = begin; column + kLanes <= n; column += kLanes) {
        Vec weights[R];
        // A pair of rank rows is prefetched as one stream. Of more, the next few items of each are
        // prefetched, and near their ends the beginnings of the next ones.
        const int64_t next_rows = column + kAheadItems < n ? 0 : (R - 1) * n;
        if (R == 2) prefetch(b + R * column + kStreamBytes / sizeof(W));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            if (R != 2) prefetch(b + r * n + column + kAheadItems + next_rows);
            weights[r] = load(b + r * n + column);
        }
        for (int64_t row = 0; row < num_rows; ++row) {
            float* out = y + row * ldy + column;
            Vec total = load(out);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                total = fma(set1(shrunk[row * ld + r]), weights[r], total);
            }
            store(out, total);
        }
    }
}

// The same over the columns behind the last whole vector.
template <class W>
void expand_ends(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t num_b, int64_t n,
                 const float* shrunk, int64_t ld) {
    const int64_t left = n % kLanes;
    if (left == 0) return;
    for (int64_t row = 0; row < num_rows; ++row) {
        float* out = y + row * ldy + n - left;
        Vec total = load_n(out, left);
        for (int64_t r = 0; r < num_b; ++r) {
            total = fma(set1(shrunk[row * ld + r]), load_n(b + (r + 1) * n - left, left), total);
        }
        store_n(out, total, left);
    }
}

// y[row] += shrunk[row] B for R rows and two vectors of columns.
template <int R>
void expand_strip(float* y, int64_t ldy, const float* b, int64_t num_b, const float* shrunk,
                  int64_t ld) {
    Vec sums[R][2];
    for (int i = 0; i < R; ++i) load_pair(y + i * ldy, sums[i][0], sums[i][1]);
    for (int64_t r = 0; r < num_b; ++r) {
        Vec low, high;
        load_pair(b + r * 2 * kLanes, low, high);
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i) {
            const Vec factor = set1(shrunk[i * ld + r]);
            sums[i][0] = fma(factor, low, sums[i][0]);
            sums[i][1] = fma(factor, high, sums[i][1]);
        }
    }
    for (int i = 0; i < R; ++i) {
        store(y + i * ldy, sums[i][0]);
        store(y + i * ldy + kLanes, sums[i][1]);
    }
}

template <int R = kStripRows>
void expand_n_rows(int64_t n, float* y, int64_t ldy, const float* b, int64_t num_b,
                   const float* shrunk, int64_t ld) {
    if constexpr (R > 1) {
        if (n < R) return expand_n_rows<R - 1>(n, y, ldy, b, num_b, shrunk, ld);
    }
    expand_strip<R>(y, ldy, b, num_b, shrunk, ld);
}

// The same for many rows over whole strips of n columns. Sums stay in registers for all rank rows: lines of
// y that lie a power of two apart, as those of wide sites do, would push each other out of the cache.
template <class W>
void expand_strips(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t num_b, int64_t n,
                   const float* shrunk, int64_t ld) {
    alignas(64) float strip[kStripRanks * 2 * kLanes];
    for (int64_t first = 0; first < num_b; first += kStripRanks) {
        const int64_t count = smaller(kStripRanks, num_b - first);
        for (int64_t column = 0; column + 2 * kLanes <= n; column += 2 * kLanes) {
            for (int64_t r = 0; r < count; ++r) {
                const W* from = b + (first + r) * n + column;
                store(strip + r * 2 * kLanes, load(from));
                store(strip + r * 2 * kLanes + kLanes, load(from + kLanes));
            }
            int64_t row = 0;
            for (int64_t blocks = ceil_div(num_rows, kStripRows); blocks > 0; --blocks) {
                const int64_t size = ceil_div(num_rows - row, blocks);
                expand_n_rows(size, y + row * ldy + column, ldy, strip, count,
                              shrunk + row * ld + first, ld);
                row += size;
            }
        }
    }
}

// y[row] += shrunk[row] B over n columns.
template <class W>
void expand_vectors(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t num_b, int64_t n,
                    const float* shrunk, int64_t ld) {
    int64_t r = 0, begin = 0;
    if (num_rows >= kStripRows) {
        expand_strips(y, ldy, num_rows, b, num_b, n, shrunk, ld);
        begin = n / (2 * kLanes) * (2 * kLanes);
    }
    // One or two rows leave time to load and store their sums for each pair of rank rows.
    if (kInOrder && num_rows <= 2) {
        for (; r + 2 <= num_b; r += 2) {
            expand_block<2>(y, ldy, num_rows, b + r * n, begin, n, shrunk + r, ld);
        }
    }
    for (; r + 8 <= num_b; r += 8) {
        expand_block<8>(y, ldy, num_rows, b + r * n, begin, n, shrunk + r, ld);
    }
    for (; r < num_b; ++r) {
        expand_block<1>(y, ldy, num_rows, b + r * n, begin, n, shrunk + r, ld);
    }
    expand_ends(y, ldy, num_rows, b, num_b, n, shrunk, ld);
}

}  // namespace lpx
