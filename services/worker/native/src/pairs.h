// Registers of bfloat16 pairs, for processors with dot products of them: each lane of float32 adds the
// products of two pairs.
#pragma once
#include <time.h>

#include <type_traits>

#include "vec.h"

#if defined(__AVX512BF16__)
#define LPX_HAS_PAIRS

namespace lpx {

struct Pairs {
    __m512bh v;
};
inline Pairs load_pairs(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
// The first n of 2 * kLanes items, then zeros.
inline Pairs load_pairs_n(const bf16* p, int64_t n) {
    const __mmask32 mask = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
    return {(__m512bh)_mm512_maskz_loadu_epi16(mask, p)};
}
// One pair in all lanes.
inline Pairs broadcast_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return {(__m512bh)_mm512_set1_epi32(pair)};
}
// What both have set.
inline Pairs common_bits(Pairs a, Pairs b) {
    return {(__m512bh)_mm512_and_si512((__m512i)a.v, (__m512i)b.v)};
}
// Lane by lane, two floats that bfloat16 holds exactly.
inline Pairs pair_of(Vec first, Vec second) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
    return {(__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(second.v))};
}
// Pairs of item i of one and item i of the other: the first kLanes items, and the last.
inline void interleave(Pairs one, Pairs two, Pairs& first, Pairs& last) {
    alignas(64) static constexpr uint16_t kFirst[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                                        37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i indices = _mm512_load_si512(kFirst);
    const __m512i later = _mm512_add_epi16(indices, _mm512_set1_epi16(16));
    first = {(__m512bh)_mm512_permutex2var_epi16((__m512i)one.v, indices, (__m512i)two.v)};
    last = {(__m512bh)_mm512_permutex2var_epi16((__m512i)one.v, later, (__m512i)two.v)};
}
inline void store_pairs(bf16* p, Pairs a) { _mm512_storeu_si512(p, (__m512i)a.v); }
inline Vec dot(Pairs a, Pairs b, Vec sum) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }

// Functions of Vec that only code with pairs uses.
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
// `value` in the lanes where a > b, zeros elsewhere.
inline Vec where_greater(Vec a, Vec b, Vec value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), value.v)};
}
// `value` in the lanes where a > b, `other` elsewhere.
inline Vec select_greater(Vec a, Vec b, Vec value, Vec other) {
    return {_mm512_mask_mov_ps(other.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), value.v)};
}
// Makes the compiler assume that `a` has changed.
inline void touch(Vec& a) { asm volatile("" : "+v"(a.v)); }

}  // namespace lpx

#elif defined(LPX_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LPX_HAS_PAIRS

namespace lpx {

struct Pairs {
    bfloat16x8_t low, high;
};
inline Pairs load_pairs(const bf16* p) {
    return {vreinterpretq_bf16_u16(vld1q_u16(&p->bits)), vreinterpretq_bf16_u16(vld1q_u16(&p[8].bits))};
}
inline Pairs load_pairs_n(const bf16* p, int64_t n) {
    if (n >= 2 * kLanes) return load_pairs(p);
    bf16 items[2 * kLanes] = {};
    std::memcpy(items, p, n * sizeof(bf16));
    return load_pairs(items);
}
inline Pairs broadcast_pair(const bf16* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    const bfloat16x8_t all = vreinterpretq_bf16_u32(vdupq_n_u32(pair));
    return {all, all};
}
inline bfloat16x8_t common_bits(bfloat16x8_t a, bfloat16x8_t b) {
    return vreinterpretq_bf16_u16(vandq_u16(vreinterpretq_u16_bf16(a), vreinterpretq_u16_bf16(b)));
}
inline Pairs common_bits(Pairs a, Pairs b) {
    return {common_bits(a.low, b.low), common_bits(a.high, b.high)};
}
inline bfloat16x8_t pair_of(float32x4_t first, float32x4_t second) {
    return vreinterpretq_bf16_u16(
        vtrn2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second)));
}
inline Pairs pair_of(Vec first, Vec second) {
    return {pair_of(first.low, second.low), pair_of(first.high, second.high)};
}
inline Pairs interleaved(bfloat16x8_t one, bfloat16x8_t two) {
    const uint16x8_t a = vreinterpretq_u16_bf16(one), b = vreinterpretq_u16_bf16(two);
    return {vreinterpretq_bf16_u16(vzip1q_u16(a, b)), vreinterpretq_bf16_u16(vzip2q_u16(a, b))};
}
inline void interleave(Pairs one, Pairs two, Pairs& first, Pairs& last) {
    first = interleaved(one.low, two.low);
    last = interleaved(one.high, two.high);
}
inline void store_pairs(bf16* p, Pairs a) {
    vst1q_u16(&p->bits, vreinterpretq_u16_bf16(a.low));
    vst1q_u16(&p[8].bits, vreinterpretq_u16_bf16(a.high));
}
inline Vec dot(Pairs a, Pairs b, Vec sum) {
    return {vbfdotq_f32(sum.low, a.low, b.low), vbfdotq_f32(sum.high, a.high, b.high)};
}
inline float largest(Vec a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }
inline float32x4_t where_greater(float32x4_t a, float32x4_t b, float32x4_t value) {
    return vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(a, b), vreinterpretq_u32_f32(value)));
}
inline Vec where_greater(Vec a, Vec b, Vec value) {
    return {where_greater(a.low, b.low, value.low), where_greater(a.high, b.high, value.high)};
}
inline Vec select_greater(Vec a, Vec b, Vec value, Vec other) {
    return {vbslq_f32(vcgtq_f32(a.low, b.low), value.low, other.low),
            vbslq_f32(vcgtq_f32(a.high, b.high), value.high, other.high)};
}
inline void touch(Vec& a) { asm volatile("" : "+w"(a.low), "+w"(a.high)); }

}  // namespace lpx

#endif

#if defined(LPX_HAS_PAIRS)
namespace lpx {

// Nanoseconds of processor time that `step`, on twelve independent sums, takes a thousand times; the
// least of eight tries.
template <class F>
int64_t time_steps(const F& step) {
    const auto now_ns = [] {
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
    };
    Vec sums[12];
#pragma GCC unroll 12
    for (Vec& s : sums) s = zero();
    int64_t least = INT64_MAX;
    for (int i = 0; i < 8; ++i) {
        const int64_t begin = now_ns();
        for (int turn = 0; turn < 1000; ++turn) {
#pragma GCC unroll 12
            for (Vec& s : sums) {
                s = step(s);
                touch(s);
            }
        }
        least = smaller(least, now_ns() - begin);
    }
    return least;
}

// Whether dot products of pairs do clearly (by a third) more multiplications a second than float32
// vectors. On AMD Zen 4 and 5 they do twice as many, on Intel Xeons of the Sapphire Rapids kind half as many.
inline bool pairs_are_fast() {
    Vec nothing = zero();
    touch(nothing);
    const Pairs pairs = pair_of(nothing, nothing);
    const int64_t pairs_ns = time_steps([=](Vec s) { return dot(pairs, pairs, s); });
    const int64_t vectors_ns = time_steps([=](Vec s) { return fma(nothing, nothing, s); });
    return 3 * vectors_ns > 2 * pairs_ns;
}

// Whether products that could be either use pairs; -1 until it is measured or chosen, which Python does
// when it loads the library.
inline int chosen_pairs = -1;
inline bool uses_pairs() {
    if (chosen_pairs < 0) chosen_pairs = pairs_are_fast();
    return chosen_pairs != 0;
}

}  // namespace lpx
#endif
