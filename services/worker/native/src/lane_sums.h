// The sums of all lanes of several vectors at once.
#pragma once
#include "vec.h"

namespace lpx {

// Lane i is the sum of s[i], with the bits that `sum` gives: halves are added first.
#if defined(__AVX512F__)
inline Vec sums_of(const Vec (&s)[16]) {
    __m512 v[16];
    // The folds below transpose a 4 x 4 matrix of vectors, so they are given the transposed one.
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = s[4 * (i % 4) + i / 4].v;
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
    return {_mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd))};
}
#elif defined(__AVX2__)
inline Vec sums_of(const Vec (&s)[8]) {
    __m256 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m256 a = s[i].v, b = s[i + 4].v;
        v[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m256 a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    }
    return {_mm256_add_ps(_mm256_shuffle_ps(v[0], v[1], 0x88), _mm256_shuffle_ps(v[0], v[1], 0xdd))};
}
#else
inline Vec sums_of(const Vec (&s)[kLanes]) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = sum(s[i]);
    return load(lanes);
}
#endif

}  // namespace lpx
