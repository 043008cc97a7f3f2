// What every exported function has in common. Python calls them through ctypes with raw pointers
// and 64-bit integers; `bindings.py` holds the signatures.
#pragma once
#include <cstdint>

#define LPX_EXPORT extern "C" __attribute__((visibility("default")))

namespace lpx {

// Element types as Python numbers them.
enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3, kFloat8 = 4 };

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct bf16 {
    uint16_t bits;
};
struct half {
    uint16_t bits;
};
struct float8 {  // e4m3
    uint8_t bits;
};

// Calls f(T()) with the C++ type of an activation, which is float32 or bfloat16.
template <class F>
void with_activation(int64_t dtype, const F& f) {
    if (dtype == kBfloat16) {
        f(bf16());
    } else {
        f(float());
    }
}

// Calls f(T()) with the C++ type of a stored weight.
template <class F>
void with_weight(int64_t dtype, const F& f) {
    if (dtype == kFloat16) {
        f(half());
    } else {
        with_activation(dtype, f);
    }
}

// The same for an adapter's matrix, which may be integers.
template <class F>
void with_tile(int64_t dtype, const F& f) {
    if (dtype == kInt8) {
        f(int8_t());
    } else {
        with_weight(dtype, f);
    }
}

}  // namespace lpx
