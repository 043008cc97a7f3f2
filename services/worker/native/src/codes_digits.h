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
    static constexpr int64_t kMoreFactors = 8;  // rows of zeros that tiles may read
    // Sums of products are 2^shift times as large as they should be, and factors as small: tiles of AMX multiply
    // four-bit codes as the upper halves of bytes.
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
              bool is_alone, int64_t num_more = 0) {
        const int64_t num_chunks = ceil_div(g.num_inputs, kChunk), padded = num_chunks * kChunk;
        const int64_t num_all = g.num_rows + num_more;
        low_bytes = in_tiles ? kChunk : padded;
        row_bytes = 2 * low_bytes;
        chunk_bytes = in_tiles ? num_all * row_bytes : kChunk;
        num_blocks = g.num_blocks;
        // Digits come first, because tiles are loaded fastest from whole cache lines.
        const int64_t num_factors = g.num_rows * num_blocks, num_zeros = in_tiles ? kMoreFactors * num_blocks : 0;
        digits = reinterpret_cast<int8_t*>(scratch(3, num_all * padded / 2 + 3 * (num_factors + num_zeros)));
        factors = reinterpret_cast<float*>(digits + 2 * num_all * padded);
        sums = factors + num_factors + num_zeros;
        starts = reinterpret_cast<int32_t*>(sums + num_factors + num_zeros);
        for (float* own : {factors, sums, reinterpret_cast<float*>(starts)}) {
            std::memset(own + num_factors, 0, num_zeros * sizeof(float));
        }
        const int32_t times = 1 << shift_of(kind), zero = g.zeros == nullptr ? static_cast<int32_t>(g.zero) : 0;

        loop(g.num_rows, is_alone, [&](int64_t row) {
            int8_t* last = at(row, padded - kChunk);
            std::memset(last, 0, kChunk);
            std::memset(last + low_bytes, 0, kChunk);
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size, at = row * num_blocks + block;
                const int32_t sum = split(x + row * ldx + first, smaller(g.block_size, g.num_inputs - first),
                                          row, first, factors[at]);
                factors[at] /= static_cast<float>(times);
                sums[at] = static_cast<float>(times * sum);
                starts[at] = -zero * times * sum;
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
        const auto add_all = [&](auto has_zeros) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const Vec scale = load(block.scales + v * 16), zero = load(block.zeros + v * 16);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    const int64_t at = (row + r) * num_blocks + block.index;
                    __m512i product = _mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]);
                    product = _mm512_slli_epi32(product, shift_of(Kind));
                    float* const out = totals + r * kPanel + v * 16;
                    store(out, added<decltype(has_zeros)::value>(product, at, scale, zero, load(out)));
                }
            }
        };
        if (g.zeros == nullptr) {
            add_all(std::false_type());
        } else {
            add_all(std::true_type());
        }
    }

    // The total plus a row's product with a block of 16 outputs; `at` is that of the row and the block.
    template <bool kHasZeros>
    [[gnu::always_inline]] Vec added(__m512i product, int64_t at, Vec scale, Vec zero, Vec total) const {
        if constexpr (!kHasZeros) product = _mm512_add_epi32(product, _mm512_set1_epi32(starts[at]));
        Vec value{_mm512_cvtepi32_ps(product)};
        if constexpr (kHasZeros) value = sub(value, mul(zero, set1(sums[at])));
        return fma(mul(scale, set1(factors[at])), value, total);
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

    // The largest magnitude of n inputs, a multiple of 32.
    static float largest_of(const bf16* x, int64_t n) {
        __m512i largest = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 32) {
            const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff));
            largest = _mm512_max_epu16(largest, bits);
        }
        const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
        const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1)));
        const uint32_t bits = ~uint32_t(_mm_cvtsi128_si32(least)) << 16;
        float top;
        std::memcpy(&top, &bits, sizeof top);
        return top;
    }

    // `split` for a multiple of 32 inputs.
    int32_t split_halves(const bf16* x, int64_t n, int64_t row, int64_t first, float& factor) const {
        // In each quarter of a vector, packing leaves two quads of high digits and two of low ones: `order` and `bytes`
        // put high ones first, and their inputs in the order of codes.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i bytes = _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200);
        const float top = largest_of(x, n);
        const __m512 inverse = _mm512_set1_ps(top > 0.0f ? kLargest / top : 0.0f);
        const auto rounded = [&](const bf16* from) {
            return _mm512_cvtps_epi32(_mm512_mul_ps(load(from).v, inverse));
        };
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 32) {
            const __m512i words = _mm512_packs_epi32(rounded(x + i), rounded(x + i + 16));
            const __m512i high = _mm512_srli_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
            const __m512i low = _mm512_and_si512(words, _mm512_set1_epi16(255));
            const __m512i digits = _mm512_shuffle_epi8(_mm512_packus_epi16(high, low), bytes);
            const __m512i both = _mm512_permutexvar_epi32(order, digits);
            int8_t* const out = at(row, first + i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(both));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + low_bytes), _mm512_extracti64x4_epi64(both, 1));
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
        }
        factor = top / kLargest;
        return _mm512_reduce_add_epi32(sum);
    }

    // Stores the digits of a row from input `first` on. Returns the sum of the integers.
    int32_t split(const bf16* x, int64_t n, int64_t row, int64_t first, float& factor) const {
        if (n % 32 == 0) return split_halves(x, n, row, first, factor);
        const int64_t low = low_bytes, step = chunk_bytes - kChunk + 16;
        int8_t* high = at(row, first);
        // Compared as integers: of numbers, the larger has the larger bits, and NaN has larger ones than any.
        __m512i largest = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 16) {
            const __m512 magnitude = _mm512_abs_ps(load_n(x + i, n - i).v);
            largest = _mm512_max_epi32(largest, _mm512_castps_si512(magnitude));
        }
        const int32_t bits = _mm512_reduce_max_epi32(largest);
        float top;
        std::memcpy(&top, &bits, sizeof top);
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
