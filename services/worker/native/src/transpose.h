// Transposed blocks of 32-bit items, for operands of tiles.
#pragma once
#include <immintrin.h>

#include "abi.h"
#include "tiles.h"

namespace lpx {

// to[i][row] = item i of rows of 16 items, for four rows.
inline void transpose_four(const __m512i (&rows)[4], int32_t* to, int64_t ld) {
    const __m512i low = _mm512_unpacklo_epi32(rows[0], rows[1]);
    const __m512i high = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i low2 = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i high2 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    const __m512i items[4] = {
        _mm512_unpacklo_epi64(low, low2), _mm512_unpackhi_epi64(low, low2),
        _mm512_unpacklo_epi64(high, high2), _mm512_unpackhi_epi64(high, high2)};
    for (int i = 0; i < 4; ++i, to += ld) {
        const auto at = [&](int j) { return reinterpret_cast<__m128i*>(to + 4 * j * ld); };
        _mm_storeu_si128(at(0), _mm512_castsi512_si128(items[i]));
        _mm_storeu_si128(at(1), _mm512_extracti32x4_epi32(items[i], 1));
        _mm_storeu_si128(at(2), _mm512_extracti32x4_epi32(items[i], 2));
        _mm_storeu_si128(at(3), _mm512_extracti32x4_epi32(items[i], 3));
    }
}

// to[i][row] = pair i of 16 rows of 16 pairs, of which those after num_rows are anything.
inline void transpose_pairs(const bf16* rows, int64_t ld, int64_t num_rows, int32_t* to) {
    const auto lane = [&](int64_t row, int64_t item) {
        const bf16* from = rows + smaller(row, num_rows - 1) * ld + 2 * item;
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    };
    for (int64_t item = 0; item < kTileRows; item += 4, to += 4 * kTileRows) {
        __m512i rows_of[4];  // row i of each four
        for (int64_t i = 0; i < 4; ++i) {
            __m512i four = _mm512_castsi128_si512(lane(i, item));
            four = _mm512_mask_broadcast_i32x4(four, 0x00f0, lane(i + 4, item));
            four = _mm512_mask_broadcast_i32x4(four, 0x0f00, lane(i + 8, item));
            rows_of[i] = _mm512_mask_broadcast_i32x4(four, 0xf000, lane(i + 12, item));
        }
        const __m512i low = _mm512_unpacklo_epi32(rows_of[0], rows_of[1]);
        const __m512i high = _mm512_unpackhi_epi32(rows_of[0], rows_of[1]);
        const __m512i low2 = _mm512_unpacklo_epi32(rows_of[2], rows_of[3]);
        const __m512i high2 = _mm512_unpackhi_epi32(rows_of[2], rows_of[3]);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi64(low, low2));
        _mm512_storeu_si512(to + kTileRows, _mm512_unpackhi_epi64(low, low2));
        _mm512_storeu_si512(to + 2 * kTileRows, _mm512_unpacklo_epi64(high, high2));
        _mm512_storeu_si512(to + 3 * kTileRows, _mm512_unpackhi_epi64(high, high2));
    }
}

inline __mmask16 first_lanes(int64_t n) { return (1u << n) - 1; }

}  // namespace lpx
