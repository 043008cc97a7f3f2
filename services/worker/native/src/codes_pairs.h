// Products of codes with dot products of bfloat16 pairs.
#pragma once
#include "codes.h"
#include "pairs.h"
#include "pool.h"

#if defined(LPX_HAS_PAIRS)
namespace lpx {

// Codes of a quad and kLanes outputs: every output has two neighbouring pairs, for inputs 0 and 1 and for
// inputs 2 and 3. `fold_quads` adds the sums of these.
using Quads = Pairs[2];

// The two bytes of each integer from -8 to 7 in bfloat16.
constexpr float kInt4Zero = 8.0f;
alignas(16) constexpr uint8_t kInt4Lower[16] = {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80,
                                                0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0};
alignas(16) constexpr uint8_t kInt4Upper[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                                0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};

#if defined(__AVX512BF16__)

inline Pairs broadcast_quad(const bf16* p) {
    int64_t quad;
    std::memcpy(&quad, p, sizeof quad);
    return {(__m512bh)_mm512_set1_epi64(quad)};
}
inline Vec fold_quads(Vec one, Vec two) {
    return {_mm512_add_ps(_mm512_shuffle_ps(one.v, two.v, 0x88),
                          _mm512_shuffle_ps(one.v, two.v, 0xdd))};
}
inline void join_bytes(__m512i lower, __m512i upper, Quads& quads) {
    quads[0] = {(__m512bh)_mm512_unpacklo_epi8(lower, upper)};
    quads[1] = {(__m512bh)_mm512_unpackhi_epi8(lower, upper)};
}

// The two bytes of 128 numbers in bfloat16, which holds them exactly.
struct ByteTables {
    alignas(64) uint8_t lower[128], upper[128];

    template <class F>
    constexpr explicit ByteTables(const F& number_of) : lower(), upper() {
        for (int i = 0; i < 128; ++i) {
            float number = number_of(i);
            int exponent = number == 0.0f ? 0 : 127;
            for (; number >= 2.0f; number /= 2.0f) ++exponent;
            for (; exponent > 0 && number < 1.0f; number *= 2.0f) --exponent;
            const int mantissa = number == 0.0f ? 0 : static_cast<int>(number * 128.0f) - 128;
            lower[i] = static_cast<uint8_t>(exponent << 7 | mantissa);
            upper[i] = static_cast<uint8_t>(exponent >> 1);
        }
    }

    // With the signs of `signs`.
    void look_up(__m512i indices, __m512i signs, Quads& quads) const {
        const auto find = [&](const uint8_t* table) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), indices,
                                            _mm512_load_si512(table + 64));
        };
        constexpr int kFirstOrBoth = 0xf8;  // a | (b & c)
        join_bytes(find(lower),
                   _mm512_ternarylogic_epi64(find(upper), signs, _mm512_set1_epi8(-128), kFirstOrBoth),
                   quads);
    }
};

// What is subtracted from a code where it becomes bfloat16. Eight-bit integers less 127.5 need only a table
// of half as many numbers: from 0.5 to 127.5.
constexpr float pair_zero_of(Code kind) {
    return kind == Code::kInt8 ? 127.5f : kind == Code::kInt4 ? kInt4Zero : 0.0f;
}

template <Code Kind>
void decode_quads(const uint8_t* quad, int first, Quads& quads);

template <>
inline void decode_quads<Code::kInt8>(const uint8_t* quad, int first, Quads& quads) {
    static constexpr ByteTables kTables([](int i) { return static_cast<float>(i) + 0.5f; });
    const __m512i codes = _mm512_loadu_si512(quad + first * kQuad);
    constexpr int kNot = 0x0f;  // of a register, which takes no constant
    const __m512i flipped = _mm512_ternarylogic_epi64(codes, codes, codes, kNot);
    kTables.look_up(_mm512_max_epu8(codes, flipped), flipped, quads);
}

template <>
inline void decode_quads<Code::kInt4>(const uint8_t* quad, int first, Quads& quads) {
    const auto table = [](const uint8_t (&bytes)[16]) {
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    };
    const __m512i both = _mm512_loadu_si512(quad), mask = _mm512_set1_epi8(15);
    const __m512i codes = _mm512_and_si512(first == 0 ? both : _mm512_srli_epi16(both, 4), mask);
    join_bytes(_mm512_shuffle_epi8(table(kInt4Lower), codes),
               _mm512_shuffle_epi8(table(kInt4Upper), codes), quads);
}

// The position in a quad of each code of 16 outputs.
struct Float8Order {
    alignas(64) uint8_t bytes[64];
    constexpr Float8Order() : bytes() {
        for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i % 4 / 2 * 32 + i / 4 * 2 + i % 2);
    }
};

template <>
inline void decode_quads<Code::kFloat8>(const uint8_t* quad, int first, Quads& quads) {
    static constexpr Float8Order kPlaces;
    // 2^-8 of their values, as `decode` has them.
    static constexpr ByteTables kTables([](int i) {
        float number = static_cast<float>(i < 8 ? i : i % 8 + 8) / 131072.0f;
        for (int exponent = i / 8; exponent > 1; --exponent) number *= 2.0f;
        return number;
    });
    const __m512i codes = _mm512_permutexvar_epi8(_mm512_load_si512(kPlaces.bytes),
                                                  _mm512_loadu_si512(quad + first * kQuad));
    kTables.look_up(codes, codes, quads);
}

#else

constexpr float pair_zero_of(Code kind) {
    return kind == Code::kInt8 ? 128.0f : kind == Code::kInt4 ? kInt4Zero : 0.0f;
}
inline Pairs broadcast_quad(const bf16* p) {
    const bfloat16x8_t both = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(&p->bits), vld1_u16(&p->bits)));
    return {both, both};
}
inline Vec fold_quads(Vec one, Vec two) {
    return {vpaddq_f32(one.low, one.high), vpaddq_f32(two.low, two.high)};
}

template <Code Kind>
void decode_quads(const uint8_t* quad, int first, Quads& quads);

template <>
inline void decode_quads<Code::kInt8>(const uint8_t* quad, int first, Quads& quads) {
    const auto widened = [](int8x8_t codes) {
        const int16x8_t words = vmovl_s8(codes);
        const float32x4_t one = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
        const float32x4_t two = vcvtq_f32_s32(vmovl_high_s16(words));
        return vreinterpretq_bf16_u16(vuzp2q_u16(vreinterpretq_u16_f32(one), vreinterpretq_u16_f32(two)));
    };
    for (int i = 0; i < 2; ++i) {
        const uint8x16_t raw = vld1q_u8(quad + (first + 4 * i) * kQuad);
        const int8x16_t codes = vreinterpretq_s8_u8(veorq_u8(raw, vdupq_n_u8(128)));
        quads[i] = {widened(vget_low_s8(codes)), widened(vget_high_s8(codes))};
    }
}

template <>
inline void decode_quads<Code::kInt4>(const uint8_t* quad, int first, Quads& quads) {
    for (int i = 0; i < 2; ++i) {
        const uint8x16_t both = vld1q_u8(quad + (first % 16 + 4 * i) * kQuad);
        const uint8x16_t codes = first < 16 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
        const uint8x16_t lower = vqtbl1q_u8(vld1q_u8(kInt4Lower), codes);
        const uint8x16_t upper = vqtbl1q_u8(vld1q_u8(kInt4Upper), codes);
        quads[i] = {vreinterpretq_bf16_u8(vzip1q_u8(lower, upper)),
                    vreinterpretq_bf16_u8(vzip2q_u8(lower, upper))};
    }
}

template <>
inline void decode_quads<Code::kFloat8>(const uint8_t* quad, int first, Quads& quads) {
    const auto pairs_from = [&](int j) {
        return pair_of(decode<Code::kFloat8>(quad, first, j), decode<Code::kFloat8>(quad, first, j + 1));
    };
    const Pairs one = pairs_from(0), two = pairs_from(2);
    const auto joined = [](bfloat16x8_t a, bfloat16x8_t b) -> Pairs {
        const uint32x4_t x = vreinterpretq_u32_bf16(a), y = vreinterpretq_u32_bf16(b);
        return {vreinterpretq_bf16_u32(vzip1q_u32(x, y)), vreinterpretq_bf16_u32(vzip2q_u32(x, y))};
    };
    quads[0] = joined(one.low, two.low);
    quads[1] = joined(one.high, two.high);
}

#endif

// Rows of bfloat16, as they are.
template <Code Kind>
struct PairRows {
    static constexpr int kMaxRows = kLanes == 16 ? 12 : 6;
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
        constexpr int V = vectors_of(R);
        const int64_t at = row * num_blocks + block.first / g.block_size;
        for (int first = 0; first < kPanel; first += V * kLanes) {
            add_part<R, V>(block, row, at, first, totals + first);
        }
    }

private:
    // Vectors of outputs whose sums stay in registers for `num_rows` rows. Few rows need several to hide the
    // latency of dot products.
    static constexpr int vectors_of(int num_rows) {
        int vectors = kPanel / kLanes;
        while (vectors > 1 && num_rows * vectors > (kLanes == 16 ? 12 : 6)) vectors /= 2;
        return vectors;
    }

    // V vectors of outputs; `at` is where the sums of the first row's inputs are.
    template <int R, int V>
    void add_part(const Block<Kind>& block, int64_t row, int64_t at, int first, float* totals) const {
        Vec own[R][V][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) own[r][v][0] = own[r][v][1] = lpx::zero();
        }
        const bf16* in = x + row * ldx + block.first;
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        // Each pass over the block prefetches its share of the bytes that follow.
        constexpr int64_t kStep = block.kQuadBytes * V * kLanes / kPanel;
        const uint8_t* ahead = block.codes + kAheadBytes + first / (V * kLanes) * num_quads * kStep;
        for (int64_t quad = 0; quad < num_quads; ++quad) {
            __builtin_prefetch(ahead, 0, 3);
            if (kStep > 64) __builtin_prefetch(ahead + 64, 0, 3);
            ahead += kStep;
            Quads codes[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                decode_quads<Kind>(block.codes + quad * block.kQuadBytes, first + v * kLanes, codes[v]);
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Pairs input = broadcast_quad(in + r * ldx + quad * kQuad);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    own[r][v][0] = dot(input, codes[v][0], own[r][v][0]);
                    own[r][v][1] = dot(input, codes[v][1], own[r][v][1]);
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Vec scale = load(block.scales + first + v * kLanes);
            const Vec zero = sub(set1(kZero), load(block.zeros + first + v * kLanes));
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                Vec sum = fold_quads(own[r][v][0], own[r][v][1]);
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

}  // namespace lpx
#endif
