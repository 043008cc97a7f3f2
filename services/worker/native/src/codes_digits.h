// Products of codes with dot products of 8-bit integers (VNNI).
#pragma once
#include <type_traits>

#include "codes.h"
#include "pool.h"

#if defined(__AVX512VNNI__)
namespace lpx {

// Rows of 16-bit integers in two digits, with a factor for each block.
struct DigitRows {
    static constexpr int kMaxRows = 6;
    static constexpr float kLargest = 32639.0f;  // both digits of it fit into eight bits
    int8_t* digits;   // high and low ones of a row, at the distances below
    float* factors;   // [row][block]
    float* sums;      // [row][block]: of the integers, if outputs have zero points of their own
    int32_t* starts;  // [row][block]: added to a sum of products, for what all codes are less or more
    int64_t num_blocks;
    int64_t row_bytes, low_bytes, chunk_bytes;  // from row to row, from high to low, between chunks

    static constexpr int64_t kChunk = 64;  // inputs
    static constexpr int32_t kMiddle = 8;  // of four-bit codes
    // Sums of products are 2^shift times as large as they should be, and factors as small. AMX multiplies
    // four-bit codes as the upper halves of bytes, less the middle.
    static constexpr int shift_of([[maybe_unused]] Code kind) {
#if defined(__AMX_INT8__)
        return kind == Code::kInt4 ? 4 : 0;
#else
        return 0;
#endif
    }

    // For tiles, chunks have all rows: [chunk][row][high, low][64]. Otherwise: [row][high, low][padded inputs].
    // Up to num_more rows after the last may be read.
    DigitRows(const CodedProduct& g, Code kind, const bf16* x, int64_t ldx, bool in_tiles,
              int64_t num_more = 0) {
        const int64_t num_chunks = ceil_div(g.num_inputs, kChunk), padded = num_chunks * kChunk;
        const int64_t num_all = g.num_rows + num_more;
        low_bytes = in_tiles ? kChunk : padded;
        row_bytes = 2 * low_bytes;
        chunk_bytes = in_tiles ? num_all * row_bytes : kChunk;
        num_blocks = g.num_blocks;
        // Digits come first, because tiles are loaded fastest from whole cache lines.
        digits = reinterpret_cast<int8_t*>(scratch(3, num_all * padded / 2 + 3 * g.num_rows * num_blocks));
        factors = reinterpret_cast<float*>(digits + 2 * num_all * padded);
        sums = factors + g.num_rows * num_blocks;
        starts = reinterpret_cast<int32_t*>(sums + g.num_rows * num_blocks);
        const int32_t times = 1 << shift_of(kind), zero = g.zeros == nullptr ? static_cast<int32_t>(g.zero) : 0;
        const int32_t middle = in_tiles && kind == Code::kInt4 ? kMiddle : 0;
        parallel_for(g.num_rows, [&](int64_t row) {
            int8_t* last = at(row, padded - kChunk);
            std::memset(last, 0, kChunk);
            std::memset(last + low_bytes, 0, kChunk);
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size, at = row * num_blocks + block;
                const int32_t sum = split(x + row * ldx + first, smaller(g.block_size, g.num_inputs - first),
                                          row, first, factors[at]);
                factors[at] /= static_cast<float>(times);
                sums[at] = static_cast<float>(times * sum);
                starts[at] = (middle - zero) * times * sum;
            }
        });
    }

    // Where a row's digits are, from input `first` of a chunk on.
    int8_t* at(int64_t row, int64_t first) const {
        return digits + first / kChunk * chunk_bytes + row * row_bytes + first % kChunk;
    }

    // A row's digits are two rows of a tile.
    const int8_t* tile(int64_t row, int64_t first) const { return at(row, first); }
    const int8_t* next_tile(const int8_t* tile) const { return tile + chunk_bytes; }
    int64_t tile_stride() const { return kChunk; }

    template <int R, Code Kind>
    void add(const CodedProduct& g, const Block<Kind>& block, int64_t row, float* totals) const {
        // Loops over these arrays are unrolled, so that they stay in registers.
        __m512i high[R][2], low[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm512_setzero_si512();
        }
        const int8_t* in = digits + row * row_bytes + block.first;
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        for (int64_t quad = 0; quad < num_quads; ++quad) {
            const uint8_t* from = block.codes + quad * block.kQuadBytes;
            // AMD's processors multiply pairs of four-bit codes instead.
            prefetch_after<Kind, kHasCodeTiles || Kind == Code::kInt4>(from);
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
                const int8_t* own = in + r * row_bytes + quad * kQuad;
                const __m512i first = broadcast(own), second = broadcast(own + low_bytes);
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
                const int64_t at = (row + r) * num_blocks + block.index;
                constexpr int kShift = shift_of(Kind);
                const Sums own{_mm512_slli_epi32(high[r][v], kShift), _mm512_slli_epi32(low[r][v], kShift)};
                float* const out = totals + r * kPanel + v * 16;
                if (g.zeros == nullptr) {
                    add_sum<false, true>(own, at, scale, zero, out);
                } else {
                    add_sum<true, false>(own, at, scale, zero, out);
                }
            }
        }
    }

    // Sums of products of codes for 16 outputs and each digit.
    struct Sums {
        __m512i high, low;
    };

    // totals[16] += a row's product with a block of 16 outputs; `at` is that of the row and the block.
    template <bool kHasZeros, bool kHasStarts>
    void add_sum(const Sums& own, int64_t at, Vec scale, Vec zero, float* totals) const {
        __m512i product = _mm512_add_epi32(_mm512_slli_epi32(own.high, 8), own.low);
        if constexpr (kHasStarts) product = _mm512_add_epi32(product, _mm512_set1_epi32(starts[at]));
        Vec value{_mm512_cvtepi32_ps(product)};
        if constexpr (kHasZeros) value = sub(value, mul(zero, set1(sums[at])));
        store(totals, fma(mul(scale, set1(factors[at])), value, load(totals)));
    }

    // The same for n rows: own[n][high, low][16], totals[n][32].
    template <bool kHasZeros, bool kHasStarts>
    [[gnu::always_inline]] void add_sums(int64_t row, int64_t n, int64_t block, const int32_t* own, Vec scale,
                                         Vec zero, float* totals) const {
        const DigitRows local = *this;  // totals may not be among its members
        int64_t at = row * num_blocks + block;
#pragma GCC unroll 4
        for (int64_t r = 0; r < n; ++r, own += 2 * 16, at += local.num_blocks, totals += kPanel) {
            const Sums both{_mm512_load_si512(own), _mm512_load_si512(own + 16)};
            local.add_sum<kHasZeros, kHasStarts>(both, at, scale, zero, totals);
        }
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

    // Stores the digits of a row from input `first` on. Returns the sum of the integers.
    int32_t split(const bf16* x, int64_t n, int64_t row, int64_t first, float& factor) const {
        const int64_t low = low_bytes, step = chunk_bytes - kChunk + 16;
        int8_t* high = at(row, first);
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
            store_quads(high, digit);
            store_quads(high + low, rest);
            high += (first + i + 16) % kChunk == 0 ? step : 16;
            sum = _mm512_add_epi32(sum, rounded);
        }
        factor = top / kLargest;
        return _mm512_reduce_add_epi32(sum);
    }
};

}  // namespace lpx
#endif
