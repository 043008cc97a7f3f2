// One vector of floats: 8 lanes with AVX2, 8 in two registers with NEON, 16 with AVX-512. Half types widen on load and
// round to nearest even on store. Float8 widens to 2^-8 of its value: as half precision, it has the same sign, one bit
// more of the exponent, and seven more of the mantissa.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#define LPX_NEON
#include <arm_neon.h>
#else
#error "there are no vectors for this processor"
#endif

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "abi.h"

namespace lpx {

constexpr int16_t kFloat8InHalf = int16_t(0xbf80);  // the bits of a half that float8 has
constexpr float kFloat8Factor = 256.0f;             // corrects what float8 is widened to

#if defined(__AVX512F__)

constexpr int kLanes = 16;
struct Vec {
    __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec load(const bf16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec load(const int8_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw))};
}
inline Vec load(const float8* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(kFloat8InHalf)))};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
#if defined(__AVX512BF16__)
inline void store(bf16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
#else
inline void store(bf16* p, Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
#endif
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n.
inline Vec scale2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
// Two neighbouring vectors of a weight panel in the panel's order (see gemm.cpp).
inline void load_pair(const bf16* p, Vec& low, Vec& high) {
    const __m512i raw = _mm512_loadu_si512(p);
    low = {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16))};
    high = {_mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(0xffff0000)))};
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
struct Vec {
    __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec load(const bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline Vec load(const int8_t* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw))};
}
inline Vec load(const float8* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(raw), 7);
    return {_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(kFloat8InHalf)))};
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(bf16* p, Vec a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m256i packed = _mm256_packus_epi32(rounded, rounded);
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n in [-126, 127].
inline Vec scale2(Vec a, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline float sum(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// Two neighbouring vectors of a weight panel in the panel's order (see gemm.cpp).
inline void load_pair(const bf16* p, Vec& low, Vec& high) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    low = {_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16))};
    high = {_mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000))))};
}

#elif defined(LPX_NEON)

constexpr int kLanes = 8;
struct Vec {
    float32x4_t low, high;
};
inline Vec zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Vec set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline Vec widened_halves(uint16x8_t bits) {
    const float16x8_t halves = vreinterpretq_f16_u16(bits);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline Vec load(const half* p) { return widened_halves(vld1q_u16(&p->bits)); }
inline Vec load(const bf16* p) {
    const uint16x8_t raw = vld1q_u16(&p->bits);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(raw), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(raw, 16))};
}
inline Vec load(const int8_t* p) {
    const int16x8_t raw = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(raw))), vcvtq_f32_s32(vmovl_high_s16(raw))};
}
inline Vec load(const float8* p) {
    const int16x8_t raw = vmovl_s8(vreinterpret_s8_u8(vld1_u8(&p->bits)));
    const uint16x8_t shifted = vreinterpretq_u16_s16(vshlq_n_s16(raw, 7));
    return widened_halves(vandq_u16(shifted, vdupq_n_u16(uint16_t(kFloat8InHalf))));
}
inline void store(float* p, Vec a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline void store(bf16* p, Vec a) {
    const bfloat16x8_t rounded = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a.low), a.high);
    vst1q_u16(&p->bits, vreinterpretq_u16_bf16(rounded));
}
#else
inline uint32x4_t rounded_to_bf16(float32x4_t a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc00000));
}
inline void store(bf16* p, Vec a) {
    const uint16x4_t low = vshrn_n_u32(rounded_to_bf16(a.low), 16);
    vst1q_u16(&p->bits, vshrn_high_n_u32(low, rounded_to_bf16(a.high), 16));
}
#endif
inline Vec fma(Vec a, Vec b, Vec c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Vec max(Vec a, Vec b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
inline Vec round(Vec a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
// a * 2^n for integral n in [-126, 127].
inline float32x4_t scale2(float32x4_t a, float32x4_t n) {
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(a, vreinterpretq_f32_s32(exponent));
}
inline Vec scale2(Vec a, Vec n) { return {scale2(a.low, n.low), scale2(a.high, n.high)}; }
inline float sum(Vec a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
// Two neighbouring vectors of a weight panel in the panel's order (see gemm.cpp).
inline void load_pair(const bf16* p, Vec& low, Vec& high) {
    const uint32x4_t first = vreinterpretq_u32_u16(vld1q_u16(&p->bits));
    const uint32x4_t second = vreinterpretq_u32_u16(vld1q_u16(&p[8].bits));
    const uint32x4_t mask = vdupq_n_u32(0xffff0000);
    low = {vreinterpretq_f32_u32(vshlq_n_u32(first, 16)),
           vreinterpretq_f32_u32(vshlq_n_u32(second, 16))};
    high = {vreinterpretq_f32_u32(vandq_u32(first, mask)),
            vreinterpretq_f32_u32(vandq_u32(second, mask))};
}

#endif

template <class T>
inline void load_pair(const T* p, Vec& low, Vec& high) {
    low = load(p);
    high = load(p + kLanes);
}

// The first n lanes, none if n is negative; the rest are zeros (load) or left as they are (store).
template <class T>
inline Vec load_n(const T* p, int64_t n) {
    if (n >= kLanes) return load(p);
    T lanes[kLanes] = {};
    if (n > 0) std::memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}
template <class T>
inline void store_n(T* p, Vec a, int64_t n) {
    if (n >= kLanes) return store(p, a);
    T lanes[kLanes];
    store(lanes, a);
    if (n > 0) std::memcpy(p, lanes, n * sizeof(T));
}

// to[0, n) = from, of another type or the same.
template <class From, class To>
inline void convert_n(const From* from, int64_t n, To* to) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
    if (i < n) store_n(to + i, load_n(from + i, n - i), n - i);
}

// e^x to 2 ulp, for x <= 88; about 1e-38 below -87. On x86, min and max return their second argument if one
// is NaN, so x comes second.
inline Vec exp(Vec x) {
    x = max(set1(-87.3f), min(set1(88.0f), x));
    const Vec n = round(mul(x, set1(1.44269504f)));
    Vec r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f}) {
        p = fma(p, r, set1(c));
    }
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return scale2(p, n);
}

// Calls f(integral_constant<n>) for 1 <= n <= N, and for N where n is larger.
template <int N, class F>
inline void with_count(int64_t n, const F& f) {
    if constexpr (N > 1) {
        if (n < N) return with_count<N - 1>(n, f);
    }
    f(std::integral_constant<int, N>());
}

// Rows of activations as floats: x itself when it is float32, else a copy in `buffer`.
inline const float* widen(const float* x, int64_t, int64_t, int64_t, float*) { return x; }
inline const float* widen(const bf16* x, int64_t ldx, int64_t num_rows, int64_t num_columns,
                          float* buffer) {
    for (int64_t row = 0; row < num_rows; ++row) {
        convert_n(x + row * ldx, num_columns, buffer + row * num_columns);
    }
    return buffer;
}
// Distance between the rows that `widen` returns.
inline int64_t widened_stride(const float*, int64_t ldx, int64_t) { return ldx; }
inline int64_t widened_stride(const bf16*, int64_t, int64_t num_columns) { return num_columns; }

}  // namespace lpx
