// The activations of gates.
#pragma once
#include "vec.h"

namespace lpx {

// z / (1 + exp(-u)): silu has u = z.
inline Vec sigmoid_product(Vec z, Vec u) {
    return div(z, add(set1(1.0f), exp(sub(zero(), u))));
}
inline Vec sigmoid(Vec z) { return sigmoid_product(set1(1.0f), z); }
inline Vec silu(Vec z) { return sigmoid_product(z, z); }
// gelu by its tanh formula: 0.5 z (1 + tanh(v)) = z / (1 + exp(-2 v)), v = sqrt(2 / pi) (z + 0.044715 z^3).
inline Vec gelu_tanh(Vec z) {
    const Vec cubic = fma(mul(z, z), set1(0.044715f * 1.5957691216f), set1(1.5957691216f));
    return sigmoid_product(z, mul(z, cubic));
}

// As torch rounds: to T and back.
inline Vec rounded(Vec a, float) { return a; }
inline Vec rounded(Vec a, bf16) {
    bf16 lanes[kLanes];
    store(lanes, a);
    return load(lanes);
}

// activation(a) * b, where the activation is rounded to T.
template <class T, class Activation>
inline Vec gated(const Activation& activation, Vec a, Vec b) {
    return mul(rounded(activation(a), T()), b);
}

}  // namespace lpx
