// Registers of bfloat16 pairs for AVX-512's dot products (VDPBF16PS): each of 16 lanes of float32 adds
// the products of two pairs.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "abi.h"

namespace lpx {

inline __m512bh load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// The first n of 32 items, zeros behind them.
inline __m512bh load_pairs_n(const bf16* p, int64_t n) {
    const __mmask32 mask = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}

// One pair in all 16 lanes.
inline __m512bh broadcast_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

// Calls f(integral_constant<n>) for 1 <= n <= N, and for N where n is larger.
template <int N, class F>
inline void with_count(int64_t n, const F& f) {
    if constexpr (N > 1) {
        if (n < N) return with_count<N - 1>(n, f);
    }
    f(std::integral_constant<int, N>());
}

}  // namespace lpx
#endif
