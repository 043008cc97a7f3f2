// Registers of bfloat16 pairs for AVX-512's dot products (VDPBF16PS): each of 16 lanes of float32 adds
// the products of two pairs.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>
#include <time.h>

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

// Nanoseconds of processor time that `step`, on twelve independent sums, takes a thousand times; the
// least of eight tries.
template <class F>
int64_t time_steps(const F& step) {
    const auto now_ns = [] {
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
    };
    __m512 sums[12];
    for (__m512& s : sums) s = _mm512_setzero_ps();
    int64_t least = INT64_MAX;
    for (int i = 0; i < 8; ++i) {
        const int64_t begin = now_ns();
        for (int turn = 0; turn < 1000; ++turn) {
#pragma GCC unroll 12
            for (__m512& s : sums) {
                s = step(s);
                asm volatile("" : "+v"(s));
            }
        }
        least = smaller(least, now_ns() - begin);
    }
    return least;
}

// Whether dot products of pairs do clearly (by a third) more multiplications a second than float32
// vectors. On AMD Zen 4 and 5 they do twice as many, on Intel Xeons of the Sapphire Rapids kind half as many.
inline bool pairs_are_fast() {
    const int64_t pairs_ns = time_steps([](__m512 s) {
        return _mm512_dpbf16_ps(s, (__m512bh)_mm512_setzero_si512(), (__m512bh)_mm512_setzero_si512());
    });
    const int64_t vectors_ns = time_steps(
        [](__m512 s) { return _mm512_fmadd_ps(_mm512_setzero_ps(), _mm512_setzero_ps(), s); });
    return 3 * vectors_ns > 2 * pairs_ns;
}

// Whether products that could be either use pairs; -1 until it is measured or chosen, which Python does
// when it loads the library.
inline int chosen_pairs = -1;
inline bool uses_pairs() {
    if (chosen_pairs < 0) chosen_pairs = pairs_are_fast();
    return chosen_pairs != 0;
}

}  // namespace lpx
#endif
