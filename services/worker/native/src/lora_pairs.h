// Low-rank updates of bfloat16 rows by bfloat16 matrices, with dot products of pairs. Matrices and loops are those of
// lora_vectors.h: pairs of A lie side by side, and two rows of B become pairs in registers.
#pragma once
#include "lane_sums.h"
#include "pairs.h"

namespace lpx {

#if defined(LPX_HAS_PAIRS)
constexpr bool kHasPairs = true;

// How far ahead of its use a row that is read alone, or a pair of rows, is prefetched.
constexpr int64_t kStreamItems = 2048;
// The same for each of several rows of B: they are too many short streams for the hardware's prefetchers.
constexpr int64_t kAheadItems = 256;

// Vectors of sums that stay in registers.
constexpr int kSums = kLanes;

// out[x row][A row] += x . A over n columns, for X rows of x and R rows of A.
template <int X, int R>
void dot_pairs(const bf16* x, int64_t ldx, const bf16* a, int64_t n, float* out, int64_t ldout) {
    static_assert(X * R <= kSums, "registers");
    Vec sums[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = zero();
    const auto step = [&](int64_t k, auto load_at) {
        Pairs inputs[X];
#pragma GCC unroll 4
        for (int i = 0; i < X; ++i) inputs[i] = load_at(x + i * ldx + k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            __builtin_prefetch(a + (R + r) * n + k, 0, 3);
            const Pairs weights = load_at(a + r * n + k);
#pragma GCC unroll 4
            for (int i = 0; i < X; ++i) {
                sums[i * R + r] = dot(inputs[i], weights, sums[i * R + r]);
            }
        }
    };
    int64_t k = 0;
    for (; k + 2 * kLanes <= n; k += 2 * kLanes) step(k, [](const bf16* p) { return load_pairs(p); });
    if (k < n) step(k, [left = n - k](const bf16* p) { return load_pairs_n(p, left); });
    float totals[kSums];
    if constexpr (X * R > 4) {
        store(totals, sums_of(sums));
    } else {
        for (int i = 0; i < X * R; ++i) totals[i] = sum(sums[i]);
    }
    for (int i = 0; i < X; ++i) {
        for (int r = 0; r < R; ++r) out[i * ldout + r] += totals[i * R + r];
    }
}

// The same for num_a rows of A.
template <int X>
void dot_pair_rows(const bf16* x, int64_t ldx, const bf16* a, int64_t num_a, int64_t n, float* out,
                   int64_t ldout) {
    int64_t r = 0;
    const auto while_left = [&](auto count) {
        constexpr int R = count.value;
        for (; r + R <= num_a; r += R) dot_pairs<X, R>(x, ldx, a + r * n, n, out + r, ldout);
    };
    while_left(std::integral_constant<int, kSums / X>());
    while_left(std::integral_constant<int, kSums / 2 / X>());
    while_left(std::integral_constant<int, 1>());
}

// out[A row] += x . A over n columns, for one row of x and num_a rows of A. The rows are read one after
// another: memory is faster the fewer of them are read side by side, and there is little arithmetic.
inline void dot_row_pairs(const bf16* x, const bf16* a, int64_t num_a, int64_t n, float* out) {
    for (int64_t first = 0; first < num_a; first += kSums) {
        const int64_t count = smaller(num_a - first, kSums);
        Vec sums[kSums];
        for (int64_t r = 0; r < kSums; ++r) {
            Vec total = zero();
            const bf16* row = a + (first + r) * n;
            int64_t k = r < count ? 0 : n;
            for (; k + 2 * kLanes <= n; k += 2 * kLanes) {
                __builtin_prefetch(row + k + kStreamItems, 0, 3);
                total = dot(load_pairs(x + k), load_pairs(row + k), total);
            }
            if (k < n) total = dot(load_pairs_n(x + k, n - k), load_pairs_n(row + k, n - k), total);
            sums[r] = total;
        }
        float totals[kSums];
        store(totals, sums_of(sums));
        for (int64_t r = 0; r < count; ++r) out[first + r] += totals[r];
    }
}

// out[row][A row] += x[row] . A over n columns.
inline void shrink_pairs(const bf16* x, int64_t ldx, int64_t num_rows, const bf16* a, int64_t num_a,
                         int64_t n, float* out, int64_t ldout) {
    int64_t row = 0;
    const auto while_left = [&](auto count) {
        constexpr int X = count.value;
        for (; row + X <= num_rows; row += X) {
            dot_pair_rows<X>(x + row * ldx, ldx, a, num_a, n, out + row * ldout, ldout);
        }
    };
    while_left(std::integral_constant<int, 4>());
    while_left(std::integral_constant<int, 2>());
    if (row < num_rows) dot_row_pairs(x + row * ldx, a, num_a, n, out + row * ldout);
}

// y[row] += sum over the rows of B, up to 2 * P, of shrunk[row] * B, over n columns. Two rows of B are
// interleaved in registers; a last one without a partner is paired with zeros.
template <int P>
void expand_pair_rows(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b,
                      int64_t n, const bf16* shrunk, int64_t ld) {
    constexpr int64_t kColumns = 2 * kLanes;
    const bool is_odd = num_b % 2 != 0;
    const bf16 all_bits[2] = {{0xffff}, {static_cast<uint16_t>(is_odd ? 0 : 0xffff)}};
    const Pairs last_pair = broadcast_pair(all_bits);
    const auto step = [&](int64_t column, auto left) {
        Pairs weights[P][2];
        // A pair of rows is prefetched as one stream. Of more rows, the next few items of each are prefetched,
        // and near their ends the beginnings of the next ones.
        const int64_t next_rows = column + kAheadItems < n ? 0 : (num_b - 1) * n;
        const int64_t ahead = P == 1 ? kStreamItems + column : kAheadItems + next_rows;
        const int64_t between = P == 1 ? kColumns : n;
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            const bf16* first = b + 2 * p * n + column;
            const bool is_alone = p == P - 1 && is_odd;
            __builtin_prefetch(first + ahead, 0, 3);
            __builtin_prefetch(first + ahead + between, 0, 3);
            const Pairs one = load_pairs_n(first, left);
            const Pairs two = load_pairs_n(first + n, is_alone ? 0 : left);
            interleave(one, two, weights[p][0], weights[p][1]);
        }
        for (int64_t row = 0; row < num_rows; ++row) {
            float* out = y + row * ldy + column;
            Vec totals[2] = {load_n(out, left), load_n(out + kLanes, left - kLanes)};
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                const bf16* at = shrunk + row * ld + 2 * p;
                Pairs factor = broadcast_pair(at);
                if (p == P - 1) factor = common_bits(factor, last_pair);
                totals[0] = dot(factor, weights[p][0], totals[0]);
                totals[1] = dot(factor, weights[p][1], totals[1]);
            }
            store_n(out, totals[0], left);
            store_n(out + kLanes, totals[1], left - kLanes);
        }
    };
    int64_t column = 0;
    for (; column + kColumns <= n; column += kColumns) {
        step(column, std::integral_constant<int64_t, kColumns>());
    }
    if (column < n) step(column, n - column);
}

// y[row] += shrunk[row] B over n columns. One item behind the last row of `shrunk` may be read.
inline void expand_pairs(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b,
                         int64_t n, const bf16* shrunk, int64_t ld) {
    // One or two rows leave time to load and store their sums for each pair of rows of B, which then is one
    // stream. More rows take as many rows of B as registers hold.
    const int64_t most = num_rows <= 2 ? 2 : kSums;
    for (int64_t r = 0; r < num_b; r += most) {
        const int64_t count = smaller(num_b - r, most);
        with_count<kSums / 2>(ceil_div(count, 2), [&](auto pairs) {
            expand_pair_rows<pairs.value>(y, ldy, num_rows, b + r * n, count, n, shrunk + r, ld);
        });
    }
}

#else

// Declared for a processor without dot products; never called.
constexpr bool kHasPairs = false;
bool uses_pairs();
void shrink_pairs(const bf16* x, int64_t ldx, int64_t num_rows, const bf16* a, int64_t num_a,
                  int64_t n, float* out, int64_t ldout);
void expand_pairs(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b, int64_t n,
                  const bf16* shrunk, int64_t ld);

#endif

}  // namespace lpx
