// y = x W^T where W[o][k] = (code[o][k] - zero[o][g]) * scale[o][g] for groups g of inputs, and codes are
// unsigned integers of eight or four bits, or float8 (e4m3, without zero points). Codes are widened in
// registers and never stored wide.
//
// A panel is 32 outputs. For every four inputs (a quad) it holds the codes of 16 outputs side by side,
// four bytes each, then those of the other 16; four-bit codes of the first 16 are the low halves of the
// bytes whose high halves are the other 16's. Of float8, the two bytes for the first two inputs of each
// of the 16 outputs come before those for the other two. Scales and zero points are [panel][group][32].
//
// Inputs are taken in blocks that no group's end lies in. In float32, a block is summed in the order of
// its inputs and then multiplied with the scale. Rows in bfloat16 have two other ways:
//
// - Where dot products of bfloat16 pairs are fast (see pairs.h), codes become bfloat16 in registers, which
//   is exact, and a block is summed in float32.
// - Elsewhere, processors with VNNI take a block's inputs as 16-bit integers with one factor, in two digits
//   of eight bits; the sum over a block is then exact, and the factor's rounding 2^-16 of the block's largest
//   input.
//
// In all of them a row's result does not depend on the rows beside it.
#include "pairs.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr int64_t kPanel = 32, kQuad = 4;
constexpr int64_t kTaskPanels = 2;
constexpr int64_t kTaskRows = 96;
constexpr int64_t kAheadBytes = 4096;

enum class Code : int64_t { kInt4, kInt8, kFloat8 };  // `CodeKind` of native/codes.py
constexpr int bits_of(Code kind) { return kind == Code::kInt4 ? 4 : 8; }
// Float8 is widened to 2^-8 of its value; scales make up for it.
constexpr float factor_of(Code kind) { return kind == Code::kFloat8 ? 256.0f : 1.0f; }

struct CodedProduct {
    const uint8_t* codes;
    const void* scales;
    int64_t scale_dtype;
    const void* zeros;  // or null: every one is `zero`
    int64_t zero_dtype, zero;
    void* y;
    int64_t dtype;  // of y
    int64_t num_rows, num_inputs, num_outputs;
    int64_t group_size, block_size;

    int64_t num_quads() const { return ceil_div(num_inputs, kQuad); }
    int64_t num_blocks() const { return ceil_div(num_inputs, block_size); }
    int64_t num_groups() const { return ceil_div(num_inputs, group_size); }
};

// One block of a panel.
template <Code Kind>
struct Block {
    const uint8_t* codes;
    float scales[kPanel], zeros[kPanel];
    int64_t first, num_inputs;  // inputs

    static constexpr int64_t kQuadBytes = kPanel * kQuad * bits_of(Kind) / 8;

    Block(const CodedProduct& g, int64_t panel, int64_t block) {
        first = block * g.block_size;
        num_inputs = smaller(g.block_size, g.num_inputs - first);
        codes = g.codes + (panel * g.num_quads() + first / kQuad) * kQuadBytes;
        const int64_t at = (panel * g.num_groups() + first / g.group_size) * kPanel;
        with_weight(g.scale_dtype, [&](auto s) {
            const auto* from = static_cast<const decltype(s)*>(g.scales) + at;
            for (int64_t i = 0; i < kPanel; i += kLanes) {
                store(scales + i, mul(load(from + i), set1(factor_of(Kind))));
            }
        });
        if (g.zeros == nullptr) {
            for (int64_t i = 0; i < kPanel; ++i) zeros[i] = static_cast<float>(g.zero);
            return;
        }
        with_weight(g.zero_dtype, [&](auto z) {
            const auto* from = static_cast<const decltype(z)*>(g.zeros) + at;
            for (int64_t i = 0; i < kPanel; i += kLanes) store(zeros + i, load(from + i));
        });
    }
};

// Float8 in the upper halves of 16-bit words, as half precision of 2^-8 times the value: it has the same
// sign, one bit more of the exponent, and seven more of the mantissa.
#if defined(__AVX512F__)
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    const __m256i codes = is_upper ? raw : _mm256_slli_epi16(raw, 8);
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(codes, 1), mask))};
}
#elif defined(__AVX2__)
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs));
    const __m128i codes = is_upper ? raw : _mm_slli_epi16(raw, 8);
    const __m128i mask = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
    return {_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(codes, 1), mask))};
}
#elif defined(LPX_NEON)
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    const int16x8_t raw = vreinterpretq_s16_u8(vld1q_u8(pairs));
    const int16x8_t codes = is_upper ? raw : vshlq_n_s16(raw, 8);
    const uint16x8_t shifted = vreinterpretq_u16_s16(vshrq_n_s16(codes, 1));
    return widened_halves(vandq_u16(shifted, vdupq_n_u16(0xbf80)));
}
#else
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    Vec values;
    for (int i = 0; i < kLanes; ++i) {
        const int code = pairs[2 * i + is_upper];
        values.v[i] = widened(half{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)});
    }
    return values;
}
#endif

// Code `j` of a quad, of kLanes outputs from `first` on, as floats.
template <Code Kind>
inline Vec decode(const uint8_t* quad, int first, int j) {
    if (Kind == Code::kFloat8) {
        return widen_float8(quad + first / 16 * 64 + j / 2 * 32 + first % 16 * 2, j % 2 == 1);
    }
    constexpr int kBits = bits_of(Kind), kMask = (1 << kBits) - 1;
    const uint8_t* from = quad + (kBits == 8 ? first : first % 16) * kQuad;
    const int shift = 8 * j + (kBits == 4 && first >= 16 ? 4 : 0);
#if defined(__AVX512F__)
    const __m512i words = _mm512_srli_epi32(_mm512_loadu_si512(from), shift);
    return {_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(kMask)))};
#elif defined(__AVX2__)
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i words = _mm256_srli_epi32(raw, shift);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(kMask)))};
#elif defined(LPX_NEON)
    const auto values = [&](const uint8_t* four) {
        const uint32x4_t raw = vreinterpretq_u32_u8(vld1q_u8(four));
        return vcvtq_f32_u32(vandq_u32(vshlq_u32(raw, vdupq_n_s32(-shift)), vdupq_n_u32(kMask)));
    };
    return {values(from), values(from + 16)};
#else
    Vec values;
    for (int i = 0; i < kLanes; ++i) {
        values.v[i] = static_cast<float>(from[i * kQuad + shift / 8] >> (shift % 8) & kMask);
    }
    return values;
#endif
}

// Rows of floats.
struct WideRows {
    static constexpr int kMaxRows = kLanes == 16 ? 8 : 4;
    const float* x;
    int64_t ldx;

    // totals[r][32] += the block's product with R rows.
    template <int R, Code Kind>
    void add(const CodedProduct&, const Block<Kind>& block, int64_t row, float* totals) const {
        for (int first = 0; first < kPanel; first += 2 * kLanes) {
            add_part<R>(block, row, first, totals + first);
        }
    }

private:
    // Two vectors of outputs.
    template <int R, Code Kind>
    void add_part(const Block<Kind>& block, int64_t row, int first, float* totals) const {
        Vec sums[R][2], zeros[2];
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = lpx::zero();
        for (int v = 0; v < 2; ++v) zeros[v] = load(block.zeros + first + v * kLanes);
        const float* in = x + row * ldx + block.first;
        const auto step = [&](int64_t quad, int j) {
            const uint8_t* codes = block.codes + quad * block.kQuadBytes;
            Vec low = decode<Kind>(codes, first, j), high = decode<Kind>(codes, first + kLanes, j);
            if (Kind != Code::kFloat8) {
                low = sub(low, zeros[0]);
                high = sub(high, zeros[1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec input = set1(in[r * ldx + quad * kQuad + j]);
                sums[r][0] = fma(input, low, sums[r][0]);
                sums[r][1] = fma(input, high, sums[r][1]);
            }
        };
        const int64_t num_whole = block.num_inputs / kQuad;
        for (int64_t quad = 0; quad < num_whole; ++quad) {
            __builtin_prefetch(block.codes + quad * block.kQuadBytes + kAheadBytes, 0, 3);
            if (bits_of(Kind) == 8) {
                __builtin_prefetch(block.codes + quad * block.kQuadBytes + kAheadBytes + 64, 0, 3);
            }
#pragma GCC unroll 4
            for (int j = 0; j < kQuad; ++j) step(quad, j);
        }
        for (int j = 0; j < block.num_inputs % kQuad; ++j) step(num_whole, j);
        for (int v = 0; v < 2; ++v) {
            const Vec scale = load(block.scales + first + v * kLanes);
            for (int r = 0; r < R; ++r) {
                float* total = totals + r * kPanel + v * kLanes;
                store(total, fma(sums[r][v], scale, load(total)));
            }
        }
    }
};

#if defined(LPX_HAS_PAIRS)

// [vector of outputs][inputs 0 and 1, inputs 2 and 3] of a quad.
using QuadPairs = Pairs[2][2];

// The value that is subtracted from codes where they become pairs.
constexpr float pair_zero_of(Code kind) {
    return kind == Code::kInt8 ? 128.0f : kind == Code::kInt4 ? 8.0f : 0.0f;
}

// Of two vectors of outputs from `first` on.
template <Code Kind>
inline void decode_pairs(const uint8_t* quad, int first, QuadPairs& pairs) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const auto value = [&](int j) {
            const Vec code = decode<Kind>(quad, first + i / 2 * kLanes, i % 2 * 2 + j);
            return Kind == Code::kFloat8 ? code : sub(code, set1(pair_zero_of(Kind)));
        };
        pairs[i / 2][i % 2] = pair_of(value(0), value(1));
    }
}

#if defined(__AVX512BF16__)

template <>
inline void decode_pairs<Code::kInt8>(const uint8_t* quad, int, QuadPairs& pairs) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
        const __m512i codes =
            _mm512_xor_si512(_mm512_loadu_si512(quad + v * 64), _mm512_set1_epi8(-128));
        const auto value = [&](int j) {
            const __m512i shifted = _mm512_slli_epi32(codes, 24 - 8 * j);
            return Vec{_mm512_cvtepi32_ps(_mm512_srai_epi32(shifted, 24))};
        };
        pairs[v][0] = pair_of(value(0), value(1));
        pairs[v][1] = pair_of(value(2), value(3));
    }
}

// A code's two bytes come from tables.
template <>
inline void decode_pairs<Code::kInt4>(const uint8_t* quad, int, QuadPairs& pairs) {
    const auto table = [](const uint8_t (&bytes)[16]) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    };
    alignas(16) static constexpr uint8_t kUpper[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                                       0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};
    alignas(16) static constexpr uint8_t kLower[16] = {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80,
                                                       0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0};
    const __m512i both = _mm512_loadu_si512(quad), mask = _mm512_set1_epi8(15);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
        const __m512i codes = _mm512_and_si512(v == 0 ? both : _mm512_srli_epi16(both, 4), mask);
        const __m512i upper = _mm512_shuffle_epi8(table(kUpper), codes);
        const __m512i lower = _mm512_shuffle_epi8(table(kLower), codes);
        // All four inputs of two outputs in every 128 bits, and those of the next two.
        const __m512 even = _mm512_castsi512_ps(_mm512_unpacklo_epi8(lower, upper));
        const __m512 odd = _mm512_castsi512_ps(_mm512_unpackhi_epi8(lower, upper));
        pairs[v][0] = {(__m512bh)_mm512_shuffle_ps(even, odd, 0x88)};
        pairs[v][1] = {(__m512bh)_mm512_shuffle_ps(even, odd, 0xdd)};
    }
}

#endif

// Rows of bfloat16, as they are.
template <Code Kind>
struct PairRows {
    // As many as hide the widening of eight-bit codes; four-bit codes need less for it, and registers for
    // their tables.
    static constexpr int kMaxRows = kLanes < 16 ? 4 : bits_of(Kind) == 8 ? 12 : 8;
    static constexpr float kZero = pair_zero_of(Kind);
    const bf16* x;
    int64_t ldx, num_blocks;
    const float* sums = nullptr;  // [row][block]: of the inputs, where zero points need them

    PairRows(const CodedProduct& g, const bf16* rows, int64_t stride)
        : x(rows), ldx(stride), num_blocks(g.num_blocks()) {
        const bool has_zeros = Kind != Code::kFloat8;
        const bool needs_sums =
            has_zeros && (g.zeros != nullptr || static_cast<float>(g.zero) != kZero);
        const int64_t padded = g.num_quads() * kQuad;
        const bool copies = padded != g.num_inputs;
        if (!needs_sums && !copies) return;
        const int64_t num_sums = g.num_rows * num_blocks;
        float* own = scratch(3, num_sums + (copies ? g.num_rows * padded / 2 : 0));
        if (copies) {
            bf16* copy = reinterpret_cast<bf16*>(own + num_sums);
            for (int64_t row = 0; row < g.num_rows; ++row) {
                std::memcpy(copy + row * padded, x + row * ldx, g.num_inputs * sizeof(bf16));
                std::memset(copy + row * padded + g.num_inputs, 0,
                            (padded - g.num_inputs) * sizeof(bf16));
            }
            x = copy;
            ldx = padded;
        }
        if (!needs_sums) return;
        sums = own;
        parallel_for(g.num_rows, [&](int64_t row) {
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size;
                own[row * num_blocks + block] =
                    sum_of(x + row * ldx + first, smaller(g.block_size, g.num_inputs - first));
            }
        });
    }

    template <int R>
    void add(const CodedProduct& g, const Block<Kind>& block, int64_t row, float* totals) const {
        const int64_t at = row * num_blocks + block.first / g.block_size;
        for (int first = 0; first < kPanel; first += 2 * kLanes) {
            add_part<R>(block, row, at, first, totals + first);
        }
    }

private:
    // Two vectors of outputs; `at` is where the sums of the first row's inputs are.
    template <int R>
    void add_part(const Block<Kind>& block, int64_t row, int64_t at, int first, float* totals) const {
        Vec own[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) own[r][0] = own[r][1] = lpx::zero();
        const bf16* in = x + row * ldx + block.first;
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        for (int64_t quad = 0; quad < num_quads; ++quad) {
            const uint8_t* from = block.codes + quad * block.kQuadBytes;
            __builtin_prefetch(from + kAheadBytes, 0, 3);
            if (bits_of(Kind) == 8) __builtin_prefetch(from + kAheadBytes + 64, 0, 3);
            QuadPairs codes;
            decode_pairs<Kind>(from, first, codes);
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Pairs input = broadcast_pair(in + r * ldx + quad * kQuad + 2 * pair);
                    own[r][0] = dot(input, codes[0][pair], own[r][0]);
                    own[r][1] = dot(input, codes[1][pair], own[r][1]);
                }
            }
        }
        for (int v = 0; v < 2; ++v) {
            const Vec scale = load(block.scales + first + v * kLanes);
            const Vec zero = sub(set1(kZero), load(block.zeros + first + v * kLanes));
            for (int r = 0; r < R; ++r) {
                Vec sum = own[r][v];
                if (sums != nullptr) sum = fma(zero, set1(sums[at + r * num_blocks]), sum);
                float* total = totals + r * kPanel + v * kLanes;
                store(total, fma(sum, scale, load(total)));
            }
        }
    }

    static float sum_of(const bf16* from, int64_t n) {
        Vec partial = lpx::zero();
        for (int64_t i = 0; i < n; i += kLanes) {
            partial = lpx::add(partial, load_n(from + i, n - i));
        }
        return lpx::sum(partial);
    }
};

#endif

#if defined(__AVX512VNNI__)

// Rows of 16-bit integers in two digits, with a factor for each block.
struct DigitRows {
    static constexpr int kMaxRows = 6;
    static constexpr float kLargest = 32639.0f;  // both digits of it fit into eight bits
    static constexpr float kLargestZero = 256.0f;  // times 128 inputs, it fits into 32 bits
    int8_t* digits;   // [row][high, low][padded inputs]
    float* factors;   // [row][block]
    int32_t* sums;    // [row][block]: of the integers
    int64_t padded, num_blocks;

    DigitRows(const CodedProduct& g, const bf16* x, int64_t ldx) {
        padded = ceil_div(g.num_inputs, 128) * 128;
        num_blocks = g.num_blocks();
        const int64_t row_words = padded / 2 + 2 * num_blocks;
        float* buffer = scratch(3, g.num_rows * row_words);
        factors = buffer;
        sums = reinterpret_cast<int32_t*>(factors + g.num_rows * num_blocks);
        digits = reinterpret_cast<int8_t*>(sums + g.num_rows * num_blocks);
        parallel_for(g.num_rows, [&](int64_t row) {
            int8_t* high = digits + row * 2 * padded;
            std::memset(high, 0, 2 * padded);
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size;
                split(x + row * ldx + first, smaller(g.block_size, g.num_inputs - first), high + first,
                      row * num_blocks + block);
            }
        });
    }

    template <int R, Code Kind>
    void add(const CodedProduct& g, const Block<Kind>& block, int64_t row, float* totals) const {
        __m512i high[R][2], low[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < 2; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
        }
        const int8_t* in = digits + row * 2 * padded + block.first;
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        for (int64_t quad = 0; quad < num_quads; ++quad) {
            const uint8_t* from = block.codes + quad * block.kQuadBytes;
            _mm_prefetch(from + kAheadBytes, _MM_HINT_T0);
            __m512i codes[2];
            if constexpr (Kind == Code::kInt8) {
                _mm_prefetch(from + kAheadBytes + 64, _MM_HINT_T0);
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
                high[r][0] = _mm512_dpbusd_epi32(high[r][0], codes[0], first);
                high[r][1] = _mm512_dpbusd_epi32(high[r][1], codes[1], first);
                low[r][0] = _mm512_dpbusd_epi32(low[r][0], codes[0], second);
                low[r][1] = _mm512_dpbusd_epi32(low[r][1], codes[1], second);
            }
        }
        const int64_t at = row * num_blocks + block.first / g.block_size;
        for (int v = 0; v < 2; ++v) {
            const Vec scale = load(block.scales + v * 16);
            // Zero points are subtracted as integers, which is exact, and what is left of others as floats.
            const Vec exact = load(block.zeros + v * 16);
            const Vec whole_zero = round(min(max(exact, set1(-kLargestZero)), set1(kLargestZero)));
            const __m512i zero = _mm512_cvtps_epi32(whole_zero.v);
            const Vec rest = sub(whole_zero, exact);
            for (int r = 0; r < R; ++r) {
                const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]);
                const __m512i inputs = _mm512_set1_epi32(sums[at + r * num_blocks]);
                const __m512i shifted = _mm512_sub_epi32(whole, _mm512_mullo_epi32(zero, inputs));
                const Vec sum = fma(rest, {_mm512_cvtepi32_ps(inputs)}, {_mm512_cvtepi32_ps(shifted)});
                float* total = totals + r * kPanel + v * 16;
                store(total, fma(mul(sum, set1(factors[at + r * num_blocks])), scale, load(total)));
            }
        }
    }

private:
    static __m512i broadcast(const int8_t* p) {
        int32_t quad;
        std::memcpy(&quad, p, sizeof quad);
        return _mm512_set1_epi32(quad);
    }

    void split(const bf16* x, int64_t n, int8_t* high, int64_t at) const {
        __m512 largest = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i += 16) {
            largest = _mm512_max_ps(largest, _mm512_abs_ps(load_n(x + i, n - i).v));
        }
        const float top = _mm512_reduce_max_ps(largest);
        const __m512 inverse = _mm512_set1_ps(top > 0.0f ? kLargest / top : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 16) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load_n(x + i, n - i).v, inverse));
            const __m512i digit =
                _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
            const __m512i rest = _mm512_sub_epi32(whole, _mm512_slli_epi32(digit, 8));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(digit));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(high + padded + i),
                             _mm512_cvtepi32_epi8(rest));
            sum = _mm512_add_epi32(sum, whole);
        }
        factors[at] = top / kLargest;
        sums[at] = _mm512_reduce_add_epi32(sum);
    }
};

#endif

template <int R, Code Kind, class Rows>
void add_rows(int64_t n, const CodedProduct& g, const Block<Kind>& block, const Rows& rows,
              int64_t row, float* totals) {
    if constexpr (R > 1) {
        if (n < R) return add_rows<R - 1>(n, g, block, rows, row, totals);
    }
    rows.template add<R>(g, block, row, totals);
}

// y[row, end)[panel] = totals[end - row][32].
void store_totals(const CodedProduct& g, const float* totals, int64_t row, int64_t end,
                  int64_t panel) {
    with_activation(g.dtype, [&](auto t) {
        using T = decltype(t);
        for (; row < end; ++row, totals += kPanel) {
            for (int64_t i = panel * kPanel; i < smaller(panel * kPanel + kPanel, g.num_outputs);
                 i += kLanes) {
                T* out = static_cast<T*>(g.y) + row * g.num_outputs + i;
                store_n(out, load(totals + i % kPanel), g.num_outputs - i);
            }
        }
    });
}

template <Code Kind, class Rows>
void multiply(const CodedProduct& g, const Rows& rows) {
    const int64_t num_panels = ceil_div(g.num_outputs, kPanel);
    const int64_t num_row_tasks = ceil_div(g.num_rows, kTaskRows);
    parallel_for(ceil_div(num_panels, kTaskPanels) * num_row_tasks, [&](int64_t task) {
        const int64_t first = task / num_row_tasks * kTaskPanels;
        const int64_t begin = task % num_row_tasks * kTaskRows;
        const int64_t end = smaller(begin + kTaskRows, g.num_rows);
        float* totals = scratch(0, (end - begin) * kPanel);
        for (int64_t panel = first; panel < smaller(first + kTaskPanels, num_panels); ++panel) {
            std::memset(totals, 0, (end - begin) * kPanel * sizeof(float));
            for (int64_t b = 0; b < g.num_blocks(); ++b) {
                const Block<Kind> block(g, panel, b);
                int64_t row = begin;
                for (int64_t left = ceil_div(end - begin, Rows::kMaxRows); left > 0; --left) {
                    const int64_t n = ceil_div(end - row, left);
                    add_rows<Rows::kMaxRows>(n, g, block, rows, row, totals + (row - begin) * kPanel);
                    row += n;
                }
            }
            store_totals(g, totals, begin, end, panel);
        }
    });
}

template <Code Kind, class T>
void multiply_rows(const CodedProduct& g, const T* x, int64_t ldx) {
#if defined(LPX_HAS_PAIRS)
    if constexpr (std::is_same<T, bf16>::value) {
        if (uses_pairs()) return multiply<Kind>(g, PairRows<Kind>(g, x, ldx));
    }
#endif
#if defined(__AVX512VNNI__)
    if constexpr (std::is_same<T, bf16>::value && Kind != Code::kFloat8) {
        return multiply<Kind>(g, DigitRows(g, x, ldx));
    }
#endif
    const bool copies = sizeof(T) != sizeof(float);
    float* buffer = copies ? scratch(3, g.num_rows * g.num_inputs) : nullptr;
    const WideRows rows{widen(x, ldx, g.num_rows, g.num_inputs, buffer),
                        widened_stride(x, ldx, g.num_inputs)};
    multiply<Kind>(g, rows);
}

}  // namespace
}  // namespace lpx

// Bytes that `lpx_pack_codes` writes.
LPX_EXPORT int64_t lpx_code_bytes(int64_t num_outputs, int64_t num_inputs, int64_t kind) {
    using namespace lpx;
    const int64_t num_codes = ceil_div(num_outputs, kPanel) * ceil_div(num_inputs, kQuad) * kPanel * kQuad;
    return num_codes * bits_of(static_cast<Code>(kind)) / 8;
}

// From one byte for each code, [num_outputs, num_inputs].
LPX_EXPORT void lpx_pack_codes(const void* codes, int64_t num_outputs, int64_t num_inputs, int64_t kind,
                               void* packed) {
    using namespace lpx;
    const Code code = static_cast<Code>(kind);
    const uint8_t* from = static_cast<const uint8_t*>(codes);
    const int64_t num_quads = ceil_div(num_inputs, kQuad);
    const int64_t quad_bytes = kPanel * kQuad * bits_of(code) / 8;
    parallel_for(ceil_div(num_outputs, kPanel), [&](int64_t panel) {
        uint8_t* out = static_cast<uint8_t*>(packed) + panel * num_quads * quad_bytes;
        std::memset(out, 0, num_quads * quad_bytes);
        for (int64_t i = 0; i < smaller(kPanel, num_outputs - panel * kPanel); ++i) {
            const uint8_t* row = from + (panel * kPanel + i) * num_inputs;
            for (int64_t k = 0; k < num_inputs; ++k) {
                uint8_t* quad = out + k / kQuad * quad_bytes;
                const int64_t j = k % kQuad;
                if (code == Code::kInt8) {
                    quad[i * kQuad + j] = row[k];
                } else if (code == Code::kInt4) {
                    quad[i % 16 * kQuad + j] |= static_cast<uint8_t>(row[k] << (i < 16 ? 0 : 4));
                } else {
                    quad[i / 16 * 64 + j / 2 * 32 + i % 16 * 2 + j % 2] = row[k];
                }
            }
        }
    });
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T. Scales and zero points (null = all are `zero`)
// as [panel][group][32]. Blocks divide groups, and hold at most 128 inputs.
LPX_EXPORT void lpx_linear_codes(const void* x, int64_t ldx, const void* packed, int64_t kind,
                                 const void* scales, int64_t scale_dtype, const void* zeros,
                                 int64_t zero_dtype, int64_t zero, int64_t group_size, int64_t block_size, void* y, int64_t dtype,
                                 int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
    using namespace lpx;
    const CodedProduct g{static_cast<const uint8_t*>(packed), scales, scale_dtype, zeros, zero_dtype, zero,
                         y, dtype, num_rows, num_inputs, num_outputs, group_size, block_size};
    with_activation(dtype, [&](auto t) {
        const auto* in = static_cast<const decltype(t)*>(x);
        switch (static_cast<Code>(kind)) {
            case Code::kInt4: return multiply_rows<Code::kInt4>(g, in, ldx);
            case Code::kInt8: return multiply_rows<Code::kInt8>(g, in, ldx);
            case Code::kFloat8: return multiply_rows<Code::kFloat8>(g, in, ldx);
        }
    });
}
