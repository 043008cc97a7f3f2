// B times few rows as instructions on tiles compute it, in vectors.
#pragma once
#include "pairs.h"
#include "prefetching.h"
#include "tiles.h"

namespace lpx {

#if defined(__AMX_BF16__)

// y[row] += factors[row] B for X rows, over up to 32 columns, which are divided into even and odd ones. `left`
// is how many, a constant for 32.
template <int X, class Left>
inline void expand_columns(float* y, int64_t ldy, const bf16* b, int64_t num_b, int64_t ldb,
                           const float (&factors)[X][kTileRows], Left left) {
    Vec sums[2][X][2];  // of even and odd rows of B
#pragma GCC unroll 16
    for (int i = 0; i < 4 * X; ++i) sums[i % 2][i / 4][i / 2 % 2] = zero();
    const auto add_row = [&](int parity, int64_t r, Pairs row) {
        const __m512i items = (__m512i)row.v;
        const Vec weights[2] = {
            {_mm512_castsi512_ps(_mm512_slli_epi32(items, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(items, _mm512_set1_epi32(int(0xffff0000))))}};
#pragma GCC unroll 4
        for (int i = 0; i < X; ++i) {
            const Vec factor = set1(factors[i][r]);
            sums[parity][i][0] = fma(factor, weights[0], sums[parity][i][0]);
            sums[parity][i][1] = fma(factor, weights[1], sums[parity][i][1]);
        }
    };
    const auto row_at = [&](int64_t r) {
        if constexpr (std::is_same<Left, int64_t>::value) return load_pairs_n(b + r * ldb, left);
        return load_pairs(b + r * ldb);
    };
    int64_t r = 0;
    for (; r + 2 <= num_b; r += 2) {
        add_row(0, r, row_at(r));
        add_row(1, r + 1, row_at(r + 1));
    }
    if (r < num_b) {
        add_row(0, r, row_at(r));
        add_row(1, r + 1, load_pairs_n(b, 0));
    }
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(4 * 2));
#pragma GCC unroll 4
    for (int i = 0; i < X; ++i) {
        const Vec even = add(sums[0][i][0], sums[1][i][0]);
        const Vec odd = add(sums[0][i][1], sums[1][i][1]);
        const Vec low{_mm512_permutex2var_ps(even.v, first, odd.v)};
        const Vec high{_mm512_permutex2var_ps(even.v, last, odd.v)};
        float* out = y + i * ldy;
        store_n(out, add(load_n(out, left), low), left);
        store_n(out + kLanes, add(load_n(out + kLanes, left - kLanes), high), left - kLanes);
    }
}

// The same over columns [begin, n). Never inlined: the compiler might compute it before tiny
// numbers are zero.
template <int X>
__attribute__((noinline)) void expand_few(float* y, int64_t ldy, const bf16* b, int64_t num_b,
                                          int64_t begin, int64_t n, int64_t ldb,
                                          const bf16* factors, int64_t ldf,
                                          Prefetching& ahead) {
    alignas(64) float wide[X][kTileRows];
    for (int i = 0; i < X; ++i) store(wide[i], load(factors + i * ldf));
    int64_t column = begin;
    for (; column + kTileInputs <= n; column += kTileInputs) {
        ahead.step();
        expand_columns<X>(y + column, ldy, b + column, num_b, ldb, wide,
                          std::integral_constant<int64_t, kTileInputs>());
    }
    if (column < n) expand_columns<X>(y + column, ldy, b + column, num_b, ldb, wide, n - column);
}

#endif

}  // namespace lpx
