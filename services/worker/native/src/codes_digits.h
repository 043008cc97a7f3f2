// Products of codes with dot products of 8-bit integers (VNNI).
#pragma once
#include "codes.h"
#include "pool.h"

#if defined(__AVX512VNNI__)
namespace lpx {

// Rows of 16-bit integers in two digits, with a factor for each block.
struct DigitRows {
    static constexpr int kMaxRows = 6;
    static constexpr float kLargest = 32639.0f;  // both digits of it fit into eight bits
    int8_t* digits;   // [row][high, low][padded inputs]
    float* factors;   // [row][block]
    float* sums;      // [row][block]: of the integers, if outputs have zero points of their own
    int32_t* starts;  // [row][block], otherwise: what subtracts the zero point from a sum of products
    int64_t padded, num_blocks;

    // Up to num_more rows after the last may be read.
    DigitRows(const CodedProduct& g, const bf16* x, int64_t ldx, int64_t num_more = 0) {
        padded = ceil_div(g.num_inputs, 128) * 128;
        num_blocks = g.num_blocks;
        const int64_t row_words = padded / 2 + 2 * num_blocks;
        factors = scratch(3, (g.num_rows + num_more) * row_words);
        sums = factors + g.num_rows * num_blocks;
        starts = reinterpret_cast<int32_t*>(sums);
        digits = reinterpret_cast<int8_t*>(sums + g.num_rows * num_blocks);
        parallel_for(g.num_rows, [&](int64_t row) {
            int8_t* high = digits + row * 2 * padded;
            std::memset(high, 0, 2 * padded);
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size, at = row * num_blocks + block;
                const int32_t sum = split(x + row * ldx + first, smaller(g.block_size, g.num_inputs - first),
                                          high + first, factors[at]);
                if (g.zeros == nullptr) {
                    starts[at] = -static_cast<int32_t>(g.zero) * sum;
                } else {
                    sums[at] = static_cast<float>(sum);
                }
            }
        });
    }

    template <int R, Code Kind>
    void add(const CodedProduct& g, const Block<Kind>& block, int64_t row, float* totals) const {
        // Loops over these arrays are unrolled, so that they stay in registers.
        __m512i high[R][2], low[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm512_setzero_si512();
        }
        const int8_t* in = digits + row * 2 * padded + block.first;
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        for (int64_t quad = 0; quad < num_quads; ++quad) {
            const uint8_t* from = block.codes + quad * block.kQuadBytes;
            prefetch_after<Kind>(from);
            __m512i codes[2];
            if constexpr (Kind == Code::kInt8) {
                codes[0] = _mm512_loadu_si512(from);
                codes[1] = _mm512_loadu_si512(from + 64);
            } else {
                const __m512i pairs = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
                codes[0] = _mm512_and_si512(pairs, mask);
                codes[1] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const int8_t* own = in + r * 2 * padded + quad * kQuad;
                const __m512i first = broadcast(own), second = broadcast(own + padded);
                add_dots(high[r][0], codes[0], first);
                add_dots(high[r][1], codes[1], first);
                add_dots(low[r][0], codes[0], second);
                add_dots(low[r][1], codes[1], second);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const Vec scale = load(block.scales + v * 16), zero = load(block.zeros + v * 16);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                add_sum(g, row + r, block.index, {high[r][v], low[r][v]}, scale, zero,
                        totals + r * kPanel + v * 16);
            }
        }
    }

    // Sums of products of codes for 16 outputs and each digit.
    struct Sums {
        __m512i high, low;
    };

    // totals[16] += a row's product with a block of 16 outputs.
    void add_sum(const CodedProduct& g, int64_t row, int64_t block, const Sums& own, Vec scale, Vec zero,
                 float* totals) const {
        const int64_t at = row * num_blocks + block;
        __m512i product = _mm512_add_epi32(_mm512_slli_epi32(own.high, 8), own.low);
        if (g.zeros == nullptr) product = _mm512_add_epi32(product, _mm512_set1_epi32(starts[at]));
        Vec sum{_mm512_cvtepi32_ps(product)};
        if (g.zeros != nullptr) sum = sub(sum, mul(zero, set1(sums[at])));
        store(totals, fma(mul(scale, set1(factors[at])), sum, load(totals)));
    }

private:
    // With the builtin, GCC 12 copies sums between registers and to the stack.
    static void add_dots(__m512i& sum, __m512i codes, __m512i inputs) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(inputs));
    }

    static __m512i broadcast(const int8_t* p) {
        int32_t quad;
        std::memcpy(&quad, p, sizeof quad);
        return _mm512_set1_epi32(quad);
    }

    // In the order of codes (see `byte_of`).
    static void store_quads(int8_t* out, __m512i digits) {
        const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        const __m128i quads = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(digits), order);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), quads);
    }

    // Returns the sum of the integers.
    int32_t split(const bf16* x, int64_t n, int8_t* high, float& factor) const {
        __m512 largest = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i += 16) {
            largest = _mm512_max_ps(largest, _mm512_abs_ps(load_n(x + i, n - i).v));
        }
        const float top = _mm512_reduce_max_ps(largest);
        const __m512 inverse = _mm512_set1_ps(top > 0.0f ? kLargest / top : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 16) {
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load_n(x + i, n - i).v, inverse));
            const __m512i digit =
                _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)), 8);
            const __m512i rest = _mm512_sub_epi32(rounded, _mm512_slli_epi32(digit, 8));
            store_quads(high + i, digit);
            store_quads(high + padded + i, rest);
            sum = _mm512_add_epi32(sum, rounded);
        }
        factor = top / kLargest;
        return _mm512_reduce_add_epi32(sum);
    }
};

}  // namespace lpx
#endif
