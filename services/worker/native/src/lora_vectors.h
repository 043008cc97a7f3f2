// Low-rank updates of float32 rows by matrices of any type, which widen in registers.
//
// A is [rank][inputs] and B is [rank][outputs], row after row. Shrink takes a few rows of x; for each few rows of
// A, it goes through the inputs. Expand takes a few rows of B; for each vector of outputs, it goes through
// the rows of y. In long runs it takes two vectors of outputs and 12 or 6 rows of y, and goes through B's rows.
//
// With one row, the time is that of memory. While a few rows of a matrix are multiplied, the next ones are
// prefetched in the order of memory, and at the end of a matrix those of the one that follows.
#pragma once
#include <type_traits>

#include "prefetching.h"
#include "vec.h"

namespace lpx {

// Rows of x that are multiplied by four rows of A at a time: as many sums as registers hold.
constexpr int kDotRows = kLanes == 16 ? 4 : 3;
// Most rows of A or B at a time.
constexpr int kSideRows = 8;
// Rows of y at a time in long runs, of which two vectors stay in registers.
constexpr int kStripRows = kLanes == 16 ? 12 : 6;
// Rank rows whose part of a strip stays in the first-level cache.
constexpr int64_t kStripRanks = 64;

#if defined(__AVX512BF16__)
// One or two rows of activations read rows of matrices one after another, which Intel Xeons of the Sapphire
// Rapids kind do faster. AMD's processors with these instructions multiply pairs instead.
constexpr bool kInOrder = true;
#else
constexpr bool kInOrder = false;  // slower at AVX2 on the same processor
#endif
// How far ahead of its use a row that is read alone, or a pair of rows, is prefetched.
constexpr int64_t kStreamBytes = 6144;

template <class W>
constexpr int64_t kLineItems = 64 / sizeof(W);

// Calls f(column) for each whole vector of columns [begin, end), and ahead.step() for each line of W.
template <class W, class F>
inline void each_vector(int64_t begin, int64_t end, Prefetching& ahead, const F& f) {
    for (int64_t last; begin + kLanes <= end; begin = last) {
        ahead.step();
        last = smaller(begin + kLineItems<W>, begin + (end - begin) / kLanes * kLanes);
#pragma GCC unroll 4
        for (int64_t column = begin; column < last; column += kLanes) f(column);
    }
}

// out[x row][A row] += x . A over whole vectors of n columns, for X rows of x and R rows of A.
template <int X, int R, class W>
void dot_block(const float* x, int64_t ldx, const W* a, int64_t n, float* out, int64_t ldout,
               Prefetching ahead) {
    Vec sums[X][R];
    for (int i = 0; i < X; ++i) {
        for (int r = 0; r < R; ++r) sums[i][r] = zero();
    }
    each_vector<W>(0, n, ahead, [&](int64_t k) {
        Vec inputs[X];
#pragma GCC unroll 8
        for (int i = 0; i < X; ++i) inputs[i] = load(x + i * ldx + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec weights = load(a + r * n + k);
#pragma GCC unroll 8
            for (int i = 0; i < X; ++i) sums[i][r] = fma(inputs[i], weights, sums[i][r]);
        }
    });
    for (int i = 0; i < X; ++i) {
        for (int r = 0; r < R; ++r) out[i * ldout + r] += sum(sums[i][r]);
    }
}

// The same for one row of x and num_a rows of A, one after another.
template <class W>
void dot_in_order(const float* x, const W* a, int64_t num_a, int64_t n, float* out) {
    for (int64_t r = 0; r < num_a; ++r, a += n) {
        Vec total = zero();
        for (int64_t k = 0; k + kLanes <= n; k += kLanes) {
            if (k % kLineItems<W> == 0) __builtin_prefetch(a + k + kStreamBytes / sizeof(W), 0, 2);
            total = fma(load(x + k), load(a + k), total);
        }
        out[r] += sum(total);
    }
}

// The same for X rows of x.
template <int X, class W>
void dot_rows(const float* x, int64_t ldx, const W* a, int64_t num_a, int64_t n, float* out,
              int64_t ldout, const Following& next) {
    if constexpr (X == 1 && kInOrder) return dot_in_order(x, a, num_a, n, out);
    constexpr int R = X < 3 ? kSideRows / X : 4;
    int64_t r = 0;
    const auto while_left = [&](auto count) {
        constexpr int C = count.value;
        for (; r + C <= num_a; r += C) {
            const Following after = rows_after(a, num_a, r + C, R, n, next);
            const Prefetching ahead(after, ceil_div(n, kLineItems<W>));
            dot_block<X, C>(x, ldx, a + r * n, n, out + r, ldout, ahead);
        }
    };
    while_left(std::integral_constant<int, R>());
    while_left(std::integral_constant<int, 1>());
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

// out[row][A row] += x[row] . A over n columns. `next` is read after A.
template <class W>
void shrink_vectors(const float* x, int64_t ldx, int64_t num_rows, const W* a, int64_t num_a,
                    int64_t n, float* out, int64_t ldout, const Following& next) {
    int64_t row = 0;
    const auto while_left = [&](auto count) {
        constexpr int X = count.value;
        for (; row + X <= num_rows; row += X) {
            dot_rows<X>(x + row * ldx, ldx, a, num_a, n, out + row * ldout, ldout, next);
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
                  const float* shrunk, int64_t ld, Prefetching ahead) {
    each_vector<W>(begin, n, ahead, [&](int64_t column) {
        Vec weights[R];
        if (R == 2) __builtin_prefetch(b + R * column + kStreamBytes / sizeof(W), 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) weights[r] = load(b + r * n + column);
        for (int64_t row = 0; row < num_rows; ++row) {
            float* out = y + row * ldy + column;
            Vec total = load(out);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                total = fma(set1(shrunk[row * ld + r]), weights[r], total);
            }
            store(out, total);
        }
    });
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
                __builtin_prefetch(from + kLineItems<W>, 0, 2);  // of the next strips
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

// y[row] += shrunk[row] B over n columns. `next` is read after B.
template <class W>
void expand_vectors(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t num_b, int64_t n,
                    const float* shrunk, int64_t ld, const Following& next) {
    int64_t r = 0, begin = 0;
    if (num_rows >= kStripRows) {
        expand_strips(y, ldy, num_rows, b, num_b, n, shrunk, ld);
        begin = n / (2 * kLanes) * (2 * kLanes);
    }
    const auto while_left = [&](auto count) {
        constexpr int R = count.value;
        for (; r + R <= num_b; r += R) {
            const Following after = R == 2 ? Following{b, 0} : rows_after(b, num_b, r + R, kSideRows, n, next);
            const Prefetching ahead(after, ceil_div(n, kLineItems<W>));
            expand_block<R>(y, ldy, num_rows, b + r * n, begin, n, shrunk + r, ld, ahead);
        }
    };
    // One or two rows leave time to load and store their sums for each pair of rank rows, which is prefetched
    // as one stream.
    if (kInOrder && num_rows <= 2) while_left(std::integral_constant<int, 2>());
    while_left(std::integral_constant<int, kSideRows>());
    while_left(std::integral_constant<int, 1>());
    expand_ends(y, ldy, num_rows, b, num_b, n, shrunk, ld);
}

}  // namespace lpx
