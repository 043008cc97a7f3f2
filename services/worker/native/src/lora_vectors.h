// Low-rank updates of float32 rows by matrices of any type, which widen in registers.
#pragma once
#include "vec.h"

namespace lpx {

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

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

template <int X, class W>
void dot_rows(const float* x, int64_t ldx, const W* a, int64_t num_a, int64_t n, float* out,
              int64_t ldout) {
    constexpr int R = 8 / X;
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
    for (; row + 4 <= num_rows; row += 4) {
        dot_rows<4>(x + row * ldx, ldx, a, num_a, n, out + row * ldout, ldout);
    }
    for (; row + 2 <= num_rows; row += 2) {
        dot_rows<2>(x + row * ldx, ldx, a, num_a, n, out + row * ldout, ldout);
    }
    if (row < num_rows) dot_rows<1>(x + row * ldx, ldx, a, num_a, n, out + row * ldout, ldout);
    dot_ends(x, ldx, num_rows, a, num_a, n, out, ldout);
}

// y[row] += sum over R rank rows of shrunk * B, over whole vectors of n columns.
template <int R, class W>
void expand_block(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t n,
                  const float* shrunk, int64_t ld) {
    for (int64_t column = 0; column + kLanes <= n; column += kLanes) {
        Vec weights[R];
        // Near the ends of these rank rows, prefetch the beginnings of the next ones.
        const int64_t ahead = column + kAheadItems < n ? kAheadItems : kAheadItems + (R - 1) * n;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            prefetch(b + r * n + column + ahead);
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

// y[row] += shrunk[row] B over n columns.
template <class W>
void expand_vectors(float* y, int64_t ldy, int64_t num_rows, const W* b, int64_t num_b, int64_t n,
                    const float* shrunk, int64_t ld) {
    int64_t r = 0;
    for (; r + 8 <= num_b; r += 8) {
        expand_block<8>(y, ldy, num_rows, b + r * n, n, shrunk + r, ld);
    }
    for (; r < num_b; ++r) expand_block<1>(y, ldy, num_rows, b + r * n, n, shrunk + r, ld);
    expand_ends(y, ldy, num_rows, b, num_b, n, shrunk, ld);
}

}  // namespace lpx
