// Keys and values in codes of eight bits, with a scale for each token and head.
#pragma once
#include <cmath>

#include "attention.h"
#include "vec.h"

namespace lpx {

// The scale of a token and head: planes of bytes are counted in bytes, those of scales in pairs.
inline bf16* scale_at(const Layout& l, int64_t scales, int64_t block, int64_t head, int64_t slot) {
    return reinterpret_cast<bf16*>(scales) + block * l.block_stride / 2 + head * l.block_tokens +
           slot;
}

inline float widened_scale(bf16 scale) {
    const uint32_t bits = uint32_t(scale.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
void keep(const T* from, int64_t n, T* to, bf16*) {
    std::memcpy(to, from, n * sizeof(T));
}

// What scores and weights are multiplied with besides the scales.
template <class Stored>
constexpr float factor_of(Stored) { return 1.0f; }
constexpr float factor_of(float8) { return kFloat8Factor; }
constexpr float largest_of(int8_t) { return 127.0f; }
constexpr float largest_of(float8) { return 448.0f; }

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
// Floats at 1.5 * 2^23 are integers, whose lowest bits are those of the code.
inline int8_t nearest(float x, int8_t) { return static_cast<int8_t>(bits_of(x + 0x1.8p23f)); }
// Of magnitudes up to 448. Below 2^-6, codes are multiples of 2^-9, the distance of floats at 2^14.
inline float8 nearest(float x, float8) {
    const uint32_t bits = bits_of(x), small = bits_of(std::fabs(x) + 0x1p14f);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    const uint32_t code = magnitude < 0x3c800000 ? small & 15 : (rounded >> 20) - (120 << 3);
    return {static_cast<uint8_t>(code | (bits >> 24 & 0x80))};
}

// Nearest codes, with the largest magnitude as the largest code. What is not finite leaves a scale that
// is none.
template <class T, class Stored>
void keep(const T* from, int64_t n, Stored* to, bf16* scale) {
    constexpr float kLargest = largest_of(Stored());
    Vec largest = zero(), nothing = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec x = load_n(from + i, n - i);
        largest = max(largest, max(x, sub(zero(), x)));
        nothing = fma(x, zero(), nothing);
    }
    float lanes[kLanes], most = 0.0f;
    store(lanes, largest);
    for (float lane : lanes) most = lane > most ? lane : most;
    store_n(scale, set1(most / kLargest + sum(nothing)), 1);
    const float step = widened_scale(*scale);
    const Vec divisor = set1(step > 0 ? step : 1.0f);
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec x = div(load_n(from + i, n - i), divisor);
        store(lanes, min(max(x, set1(-kLargest)), set1(kLargest)));
        Stored codes[kLanes];
#pragma GCC unroll 1  // or the compiler does not vectorise it
        for (int j = 0; j < kLanes; ++j) codes[j] = nearest(lanes[j], Stored());
        if (n - i >= kLanes) {
            std::memcpy(to + i, codes, kLanes);
        } else {
            std::memcpy(to + i, codes, n - i);
        }
    }
}

}  // namespace lpx
