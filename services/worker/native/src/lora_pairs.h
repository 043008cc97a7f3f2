// Low-rank updates of bfloat16 rows by bfloat16 matrices, with AVX-512's pairwise dot products.
#pragma once
#include "pairs.h"
#include "vec.h"

namespace lpx {

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

// The 16 sums of vectors s[0..15], in order. Lanes are added as `sum` adds them: halves first.
inline __m512 sums_of(const __m512 (&s)[16]) {
    __m512 v[16];
    // The folds below transpose a 4 x 4 matrix of vectors, so they are given the transposed one.
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = s[4 * (i % 4) + i / 4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512 a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512 a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
}

// out[x row][A row] += x . A over n columns, for X rows of x and R rows of A.
template <int X, int R>
void dot_pairs(const bf16* x, int64_t ldx, const bf16* a, int64_t n, float* out, int64_t ldout) {
    static_assert(X * R <= 16, "one register of sums");
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    const auto step = [&](int64_t k, auto load_at) {
        __m512bh inputs[X];
#pragma GCC unroll 4
        for (int i = 0; i < X; ++i) inputs[i] = load_at(x + i * ldx + k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            __builtin_prefetch(a + (R + r) * n + k, 0, 3);
            const __m512bh weights = load_at(a + r * n + k);
#pragma GCC unroll 4
            for (int i = 0; i < X; ++i) {
                sums[i * R + r] = _mm512_dpbf16_ps(sums[i * R + r], inputs[i], weights);
            }
        }
    };
    int64_t k = 0;
    for (; k + 32 <= n; k += 32) step(k, [](const bf16* p) { return load_pairs(p); });
    if (k < n) step(k, [left = n - k](const bf16* p) { return load_pairs_n(p, left); });
    float totals[16];
    if constexpr (X * R > 4) {
        _mm512_storeu_ps(totals, sums_of(sums));
    } else {
        for (int i = 0; i < X * R; ++i) totals[i] = sum(Vec{sums[i]});
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
    while_left(std::integral_constant<int, 16 / X>());
    while_left(std::integral_constant<int, 8 / X>());
    while_left(std::integral_constant<int, 1>());
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
    while_left(std::integral_constant<int, 1>());
}

// y[row] += sum over the rows of B, up to 2 * P, of shrunk[row] * B, over n columns. Two rows of B are
// interleaved in registers; a last one without a partner is paired with zeros.
template <int P>
void expand_pair_rows(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b,
                      int64_t n, const bf16* shrunk, int64_t ld) {
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const bool is_odd = num_b % 2 != 0;
    const __m512i last_pair = _mm512_set1_epi32(is_odd ? 0xffff : -1);
    const auto step = [&](int64_t column, int64_t left) {
        __m512bh weights[P][2];
        const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
        // Past the ends of these rows, the beginnings of the next ones.
        const int64_t ahead = column + kAheadItems < n ? kAheadItems : kAheadItems + (num_b - 1) * n;
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            const bf16* first = b + 2 * p * n + column;
            const bool is_alone = p == P - 1 && is_odd;
            __builtin_prefetch(first + ahead, 0, 3);
            __builtin_prefetch(first + n + ahead, 0, 3);
            const __m512i one = _mm512_maskz_loadu_epi16(mask, first);
            const __m512i two = _mm512_maskz_loadu_epi16(is_alone ? 0 : mask, first + n);
            weights[p][0] = (__m512bh)_mm512_permutex2var_epi16(one, low, two);
            weights[p][1] = (__m512bh)_mm512_permutex2var_epi16(one, high, two);
        }
        const __mmask16 first_half = static_cast<__mmask16>(mask);
        const __mmask16 second_half = static_cast<__mmask16>(mask >> 16);
        for (int64_t row = 0; row < num_rows; ++row) {
            float* out = y + row * ldy + column;
            __m512 totals[2] = {_mm512_maskz_loadu_ps(first_half, out),
                                _mm512_maskz_loadu_ps(second_half, out + 16)};
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                __m512bh factor = broadcast_pair(shrunk + row * ld + 2 * p);
                if (p == P - 1) factor = (__m512bh)_mm512_and_si512((__m512i)factor, last_pair);
                totals[0] = _mm512_dpbf16_ps(totals[0], factor, weights[p][0]);
                totals[1] = _mm512_dpbf16_ps(totals[1], factor, weights[p][1]);
            }
            _mm512_mask_storeu_ps(out, first_half, totals[0]);
            _mm512_mask_storeu_ps(out + 16, second_half, totals[1]);
        }
    };
    int64_t column = 0;
    for (; column + 32 <= n; column += 32) step(column, 32);
    if (column < n) step(column, n - column);
}

// y[row] += shrunk[row] B over n columns. One item behind the last row of `shrunk` may be read.
inline void expand_pairs(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b,
                         int64_t n, const bf16* shrunk, int64_t ld) {
    constexpr int64_t kRows = 16;
    for (int64_t r = 0; r < num_b; r += kRows) {
        const int64_t count = smaller(num_b - r, kRows);
        with_count<kRows / 2>(ceil_div(count, 2), [&](auto pairs) {
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
