// The small operators between products, each one pass over its rows.
#include <cmath>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

// Rows of one task: small batches run on the caller's thread alone.
constexpr int64_t kTaskRows = 16;

template <class Body>
void each_row(int64_t num_rows, const Body& body) {
    parallel_for((num_rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
        const int64_t end = (task + 1) * kTaskRows < num_rows ? (task + 1) * kTaskRows : num_rows;
        for (int64_t row = task * kTaskRows; row < end; ++row) body(row);
    });
}

// The same for num_heads heads in each row, which lie side by side: f(row, head).
template <class Body>
void each_head(int64_t num_rows, int64_t num_heads, const Body& body) {
    each_row(num_rows * num_heads, [&](int64_t i) { body(i / num_heads, i % num_heads); });
}

// As torch rounds: to T and back.
inline Vec rounded(Vec a, float) { return a; }
inline Vec rounded(Vec a, bf16) {
    bf16 lanes[kLanes];
    store(lanes, a);
    return load(lanes);
}

// y = x / rms(x) * weight; `update` (or null) is added to x first.
template <class T>
void norm_row(T* x, const T* update, const float* weight, T* y, int64_t n, float eps,
              bool in_float32) {
    Vec squares = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        Vec value = load_n(x + i, n - i);
        if (update != nullptr) {
            value = rounded(add(value, load_n(update + i, n - i)), T());
            store_n(x + i, value, n - i);
        }
        squares = fma(value, value, squares);
    }
    const Vec factor = set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps));
    for (int64_t i = 0; i < n; i += kLanes) {
        Vec value = mul(load_n(x + i, n - i), factor);
        if (!in_float32) value = rounded(value, T());
        store_n(y + i, mul(value, load_n(weight + i, n - i)), n - i);
    }
}

// Rotates pairs (i, i + half) of a head in place.
template <class T>
void rotate_head(T* x, const T* cos, const T* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = half - i;
        const Vec first = load_n(x + i, n), second = load_n(x + half + i, n);
        const Vec c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(x + i, sub(mul(first, c), mul(second, s)), n);
        store_n(x + half + i, add(mul(second, c), mul(first, s)), n);
    }
}

// z / (1 + exp(-u)): silu has u = z.
inline Vec sigmoid_product(Vec z, Vec u) {
    return div(z, add(set1(1.0f), exp(sub(zero(), u))));
}
inline Vec silu(Vec z) { return sigmoid_product(z, z); }
// gelu by its tanh formula: 0.5 z (1 + tanh(v)) = z / (1 + exp(-2 v)), v = sqrt(2 / pi) (z + 0.044715 z^3).
inline Vec gelu_tanh(Vec z) {
    const Vec cubic = fma(mul(z, z), set1(0.044715f * 1.5957691216f), set1(1.5957691216f));
    return sigmoid_product(z, mul(z, cubic));
}

template <class T, class Activation>
void gate_row(const T* gate, const T* up, T* y, int64_t n, const Activation& activation) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec active = rounded(activation(load_n(gate + i, n - i)), T());
        store_n(y + i, mul(active, load_n(up + i, n - i)), n - i);
    }
}

template <class Activation>
void gate_rows(const void* x, int64_t ldx, void* y, int64_t ldy, int64_t dtype, int64_t num_rows,
               int64_t width, const Activation& activation) {
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        each_row(num_rows, [&](int64_t row) {
            const T* gate = static_cast<const T*>(x) + row * ldx;
            gate_row(gate, gate + width, static_cast<T*>(y) + row * ldy, width, activation);
        });
    });
}

}  // namespace
}  // namespace lpx

// y[row] = norm(x[row] + update[row]) for each head of a row, which has `width` items; x is mutated
// unless `update` is null.
LPX_EXPORT void lpx_norm(void* x, int64_t ldx, const void* update, int64_t ldu, const void* weight,
                         void* y, int64_t ldy, int64_t dtype, int64_t num_rows, int64_t num_heads,
                         int64_t width, double eps, int64_t in_float32) {
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        const T* updates = static_cast<const T*>(update);
        each_head(num_rows, num_heads, [&](int64_t row, int64_t head) {
            const int64_t begin = head * width;
            norm_row(static_cast<T*>(x) + row * ldx + begin,
                     updates ? updates + row * ldu + begin : nullptr,
                     static_cast<const float*>(weight), static_cast<T*>(y) + row * ldy + begin,
                     width, static_cast<float>(eps), in_float32 != 0);
        });
    });
}

// Rotates the first 2 * half items of every head of x[row], which lie head_dim apart.
LPX_EXPORT void lpx_rotate(void* x, int64_t ldx, const void* cos, const void* sin, int64_t dtype,
                           int64_t num_rows, int64_t num_heads, int64_t head_dim, int64_t half) {
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        each_row(num_rows, [&](int64_t row) {
            for (int64_t head = 0; head < num_heads; ++head) {
                rotate_head(static_cast<T*>(x) + row * ldx + head * head_dim,
                            static_cast<const T*>(cos) + row * half,
                            static_cast<const T*>(sin) + row * half, half);
            }
        });
    });
}

// y[row] = silu(x[row, :width]) * x[row, width:].
LPX_EXPORT void lpx_silu_multiply(const void* x, int64_t ldx, void* y, int64_t ldy, int64_t dtype,
                                  int64_t num_rows, int64_t width) {
    lpx::gate_rows(x, ldx, y, ldy, dtype, num_rows, width, lpx::silu);
}

// y[row] = gelu(x[row, :width]) * x[row, width:], gelu by its tanh formula.
LPX_EXPORT void lpx_gelu_tanh_multiply(const void* x, int64_t ldx, void* y, int64_t ldy,
                                       int64_t dtype, int64_t num_rows, int64_t width) {
    lpx::gate_rows(x, ldx, y, ldy, dtype, num_rows, width, lpx::gelu_tanh);
}

// y[row] += bias, in place.
LPX_EXPORT void lpx_add_bias(void* y, int64_t ldy, const void* bias, int64_t dtype, int64_t num_rows,
                             int64_t width) {
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        const T* values = static_cast<const T*>(bias);
        each_row(num_rows, [&](int64_t row) {
            T* out = static_cast<T*>(y) + row * ldy;
            for (int64_t i = 0; i < width; i += kLanes) {
                const int64_t n = width - i;
                store_n(out + i, add(load_n(out + i, n), load_n(values + i, n)), n);
            }
        });
    });
}
