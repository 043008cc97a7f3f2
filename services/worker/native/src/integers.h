// Products of 16-bit integers, for processors with AVX2 but without AVX-512.
#pragma once
#include <cstring>

#include "vec.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define LPX_HAS_INTEGERS

namespace lpx {

// Two neighbouring integers in all lanes.
inline __m256i broadcast_integers(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
}

// Adds the two products of each lane to a sum of 32 bits. In assembly, because GCC 12 otherwise keeps some of many sums
// in memory.
inline void add_products(__m256i& sum, __m256i a, __m256i b) {
    const __m256i products = _mm256_madd_epi16(a, b);
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
}

}  // namespace lpx
#endif
