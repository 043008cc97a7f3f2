// Weights in codes as they lie in memory (see gemm_codes.cpp), and how a code is widened.
#pragma once
#include "vec.h"

namespace lpx {

constexpr int64_t kPanel = 32, kQuad = 4;
constexpr int64_t kTaskPanels = 2, kTaskRows = 96;
constexpr int64_t kGroupsAhead = 4;  // whose scales are prefetched, since they lie apart from codes
enum class Code : int64_t { kInt4, kInt8, kFloat8 };  // `CodeKind` of native/codes.py
constexpr int bits_of(Code kind) { return kind == Code::kInt4 ? 4 : 8; }
// Scales are multiplied by this factor, because float8 is widened to less than its value (see vec.h).
constexpr float factor_of(Code kind) { return kind == Code::kFloat8 ? kFloat8Factor : 1.0f; }

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
    // Kept, because divisions take a noticeable part of the time of a block.
    int64_t num_groups = ceil_div(num_inputs, group_size);
    int64_t num_blocks = ceil_div(num_inputs, block_size);
    int64_t group_blocks = ceil_div(group_size, block_size);

    // Of 16 or 8 outputs from `at` on, in the order of panels.
    Vec scale(int64_t at) const {
        Vec value;
        with_weight(scale_dtype, [&](auto s) {
            const auto* from = static_cast<const decltype(s)*>(scales) + at;
            __builtin_prefetch(from + kGroupsAhead * kPanel, 0, 3);
            value = load(from);
        });
        return value;
    }
    Vec zero_point(int64_t at) const {
        Vec value;
        with_weight(zero_dtype, [&](auto z) { value = load(static_cast<const decltype(z)*>(zeros) + at); });
        return value;
    }

    int64_t num_quads() const { return ceil_div(num_inputs, kQuad); }
    int64_t group_of(int64_t block) const { return group_blocks == 1 ? block : block / group_blocks; }
};

// One block of a panel.
template <Code Kind>
struct Block {
    alignas(64) float scales[kPanel], zeros[kPanel];
    const uint8_t* codes;
    int64_t index, first, num_inputs;  // among a panel's blocks; of its inputs

    static constexpr int64_t kQuadBytes = kPanel * kQuad * bits_of(Kind) / 8;

    void read(const CodedProduct& g, int64_t panel, int64_t block) {
        index = block;
        first = block * g.block_size;
        num_inputs = smaller(g.block_size, g.num_inputs - first);
        codes = g.codes + (panel * g.num_quads() + first / kQuad) * kQuadBytes;
        const int64_t at = (panel * g.num_groups + g.group_of(block)) * kPanel;
        with_weight(g.scale_dtype, [&](auto s) {
            const auto* from = static_cast<const decltype(s)*>(g.scales) + at;
            __builtin_prefetch(from + kGroupsAhead * kPanel, 0, 3);
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

// How far ahead of its use the second-level cache reads.
constexpr int64_t kFarBytes = 8192;
#if defined(__AMX_INT8__)
constexpr bool kHasCodeTiles = true;
#else
constexpr bool kHasCodeTiles = false;
#endif

// Prefetches what follows a quad in memory some time later. On Intel's processors, too few requests of the first-level
// cache can be under way to hide the memory's latency, so the second-level cache reads further ahead. Float8 takes long
// to widen, and more prefetches only slow it down. Always inlined: the compiler drops calls of a function that does nothing
// but prefetch.
template <Code Kind, bool kIsIntel = kHasCodeTiles>
[[gnu::always_inline]] inline void prefetch_after(const uint8_t* quad) {
    constexpr bool kTwice = kIsIntel && Kind != Code::kFloat8;
    constexpr int64_t kNearBytes = kTwice ? 1024 : kIsIntel ? 2048 : 8192;
    for (int64_t i = 0; i < kPanel * kQuad * bits_of(Kind) / 8; i += 64) {
        __builtin_prefetch(quad + i + kNearBytes, 0, 3);
        if (kTwice) __builtin_prefetch(quad + i + kFarBytes, 0, 2);
    }
}

// The lower or the upper bytes of 16-bit words.
#if defined(__AVX512F__)
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    const __m256i codes = is_upper ? raw : _mm256_slli_epi16(raw, 8);
    const __m256i mask = _mm256_set1_epi16(kFloat8InHalf);
    return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(codes, 1), mask))};
}
#elif defined(__AVX2__)
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs));
    const __m128i codes = is_upper ? raw : _mm_slli_epi16(raw, 8);
    const __m128i mask = _mm_set1_epi16(kFloat8InHalf);
    return {_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(codes, 1), mask))};
}
#elif defined(LPX_NEON)
inline Vec widen_float8(const uint8_t* pairs, bool is_upper) {
    const int16x8_t raw = vreinterpretq_s16_u8(vld1q_u8(pairs));
    const int16x8_t codes = is_upper ? raw : vshlq_n_s16(raw, 8);
    const uint16x8_t shifted = vreinterpretq_u16_s16(vshrq_n_s16(codes, 1));
    return widened_halves(vandq_u16(shifted, vdupq_n_u16(uint16_t(kFloat8InHalf))));
}
#endif

// Where the code for input `j` of a quad is: bytes are in the order of inputs 0, 2, 1, 3, so that a word of
// 16 bits and the same word shifted by a byte hold pairs of neighbours (see codes_pairs.h).
constexpr int byte_of(int j) { return j % 2 * 2 + j / 2; }

// Code `j` of a quad, of kLanes outputs from `first` on, as floats.
template <Code Kind>
inline Vec decode(const uint8_t* quad, int first, int j) {
    if (Kind == Code::kFloat8) {
        return widen_float8(quad + first / 16 * 64 + j / 2 * 32 + first % 16 * 2, j % 2 == 1);
    }
    constexpr int kBits = bits_of(Kind), kMask = (1 << kBits) - 1;
    const uint8_t* from = quad + (kBits == 8 ? first : first % 16) * kQuad;
    const int shift = 8 * byte_of(j) + (kBits == 4 && first >= 16 ? 4 : 0);
#if defined(__AVX512F__)
    const __m512i words = _mm512_srli_epi32(_mm512_loadu_si512(from), shift);
    return {_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(kMask)))};
#elif defined(__AVX2__)
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (kBits == 4) {
        codes = _mm256_and_si256(_mm256_srli_epi16(codes, shift % 8), _mm256_set1_epi8(kMask));
    }
    // One byte of each word, and zeros.
    const int index = static_cast<int>(0x80808000) + byte_of(j);
    const __m256i indices = _mm256_add_epi32(_mm256_set1_epi32(index),
                                            _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12));
    return {_mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes, indices))};
#elif defined(LPX_NEON)
    const auto values = [&](const uint8_t* four) {
        const uint32x4_t raw = vreinterpretq_u32_u8(vld1q_u8(four));
        return vcvtq_f32_u32(vandq_u32(vshlq_u32(raw, vdupq_n_s32(-shift)), vdupq_n_u32(kMask)));
    };
    return {values(from), values(from + 16)};
#endif
}

}  // namespace lpx
