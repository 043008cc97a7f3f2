// Products of codes with 16-bit integers (VPMADDWD), for processors without dot products of 8-bit ones.
#pragma once
#include <type_traits>

#include "codes.h"
#include "integers.h"
#include "pool.h"

#if defined(LPX_HAS_INTEGERS)
namespace lpx {

// Rows of 16-bit integers with a factor for each block: those that codes_digits.h writes as two digits, so both have
// the same bits.
struct IntegerRows {
    static constexpr int kMaxRows = 6;
    static constexpr float kLargest = 32639.0f;
    int16_t* integers;  // [row][row_items]
    float* factors;     // [row][block]
    float* sums;        // [row][block]: of the integers, if outputs have zero points of their own
    int32_t* starts;    // [row][block]: added to a sum of products, for what all codes are less or more
    int64_t num_blocks, row_items;

    IntegerRows(const CodedProduct& g, const bf16* x, int64_t ldx, bool is_alone) {
        num_blocks = g.num_blocks;
        row_items = ceil_div(g.num_inputs, kLanes) * kLanes;
        const int64_t num_factors = g.num_rows * num_blocks, num_items = g.num_rows * row_items;
        integers = reinterpret_cast<int16_t*>(scratch(3, num_items / 2 + 3 * num_factors));
        factors = reinterpret_cast<float*>(integers + num_items);
        sums = factors + num_factors;
        starts = reinterpret_cast<int32_t*>(sums + num_factors);
        const int32_t zero = g.zeros == nullptr ? static_cast<int32_t>(g.zero) : 0;
        loop(g.num_rows, is_alone, [&](int64_t row) {
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size, at = row * num_blocks + block;
                const int32_t sum = round(x + row * ldx + first, smaller(g.block_size, g.num_inputs - first),
                                          integers + row * row_items + first, factors[at]);
                sums[at] = static_cast<float>(sum);
                starts[at] = -zero * sum;
            }
        });
    }

    template <int R, Code Kind>
    void add(const CodedProduct& g, const Block<Kind>& block, int64_t row, float* totals) const {
        // One or two rows take a whole panel at a time, as it lies in memory.
        constexpr int V = R <= 2 ? kPanel / kLanes : 2;
        const auto add_all = [&](auto has_zeros) {
            add_part<R, V, Kind, 0, decltype(has_zeros)::value>(block, row, totals);
            if constexpr (V * kLanes < kPanel) {
                add_part<R, V, Kind, V * kLanes, decltype(has_zeros)::value>(block, row, totals);
            }
        };
        if (g.zeros == nullptr) {
            add_all(std::false_type());
        } else {
            add_all(std::true_type());
        }
    }

private:
    // V vectors of outputs, from output `kFirst` of the panel on. Not inlined, because GCC 12 then keeps the sums in
    // memory.
    template <int R, int V, Code Kind, int kFirst, bool kHasZeros>
    [[gnu::noinline]] void add_part(const Block<Kind>& block, int64_t row, float* totals) const {
        __m256i products[R][V];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) products[r][v] = _mm256_setzero_si256();
        }
        const int16_t* in = integers + row * row_items + block.first;
        const uint8_t* quad = block.codes;
        const uint8_t* const end = quad + ceil_div(block.num_inputs, kQuad) * block.kQuadBytes;
        for (; quad < end; quad += block.kQuadBytes) {
            if (kFirst == 0) prefetch_after<Kind>(quad);
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair, in += 2) {
                // Sums of many rows leave no registers for codes that the next pair reads again.
                if (R > 4) asm("" : "+r"(quad));
                __m256i codes[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) codes[v] = read<Kind>(quad, kFirst + v * kLanes, pair);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    const __m256i input = broadcast_integers(in + r * row_items);
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) add_products(products[r][v], input, codes[v]);
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const int first = kFirst + v * kLanes;
            const Vec scale = load(block.scales + first), zero = load(block.zeros + first);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const int64_t at = (row + r) * num_blocks + block.index;
                __m256i product = products[r][v];
                if (!kHasZeros) product = _mm256_add_epi32(product, _mm256_set1_epi32(starts[at]));
                Vec value{_mm256_cvtepi32_ps(product)};
                if (kHasZeros) value = sub(value, mul(zero, set1(sums[at])));
                float* const out = totals + r * kPanel + first;
                store(out, fma(mul(scale, set1(factors[at])), value, load(out)));
            }
        }
    }

    // The codes of eight outputs, from `output` of the panel on, for the first two inputs of a quad (pair 0) or for the
    // last two (see `byte_of`).
    template <Code Kind>
    [[gnu::always_inline]] static __m256i read(const uint8_t* quad, int output, int pair) {
        constexpr int kBits = bits_of(Kind);
        const uint8_t* from = quad + (kBits == 8 ? output : output % 16) * kQuad;
        const int shift = pair * 8 + (kBits == 4 && output >= 16 ? 4 : 0);
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm256_and_si256(_mm256_srli_epi16(raw, shift), _mm256_set1_epi16((1 << kBits) - 1));
    }

    // Writes a block of n inputs, and zeros to the end of a vector. Returns the sum of the integers.
    static int32_t round(const bf16* x, int64_t n, int16_t* to, float& factor) {
        // Compared as integers: of magnitudes, the larger has the larger bits, and NaN has larger ones than any.
        __m256i largest = _mm256_setzero_si256(), sum = largest;
        for (int64_t i = 0; i < n; i += kLanes) {
            const __m256i bits = _mm256_castps_si256(load_n(x + i, n - i).v);
            largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
        }
        alignas(32) float tops[kLanes];
        alignas(32) int32_t all[kLanes], lanes[kLanes];
        _mm256_store_si256(reinterpret_cast<__m256i*>(all), largest);
        for (int i = 1; i < kLanes; ++i) all[0] = all[i] > all[0] ? all[i] : all[0];
        std::memcpy(tops, all, sizeof(float));
        const float top = tops[0];
        const Vec inverse = set1(top > 0.0f ? kLargest / top : 0.0f);
        for (int64_t i = 0; i < n; i += kLanes) {
            const __m256i rounded = _mm256_cvtps_epi32(mul(load_n(x + i, n - i), inverse).v);
            const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi32(low, high));
            sum = _mm256_add_epi32(sum, rounded);
        }
        factor = top / kLargest;
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
        for (int i = 1; i < kLanes; ++i) lanes[0] += lanes[i];
        return lanes[0];
    }
};

}  // namespace lpx
#endif
