// The small operators between products, each one pass over its rows.
#include <cmath>

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

template <class T>
void silu_multiply_row(const T* gate, const T* up, T* y, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec g = load_n(gate + i, n - i);
        const Vec silu = div(g, add(set1(1.0f), exp(sub(zero(), g))));
        store_n(y + i, mul(rounded(silu, T()), load_n(up + i, n - i)), n - i);
    }
}

}  // namespace
}  // namespace lpx

// y[row] = norm(x[row] + update[row]); x is mutated unless `update` is null.
LPX_EXPORT void lpx_norm(void* x, int64_t ldx, const void* update, int64_t ldu, const void* weight,
                         void* y, int64_t ldy, int64_t dtype, int64_t num_rows, int64_t width,
                         double eps, int64_t in_float32) {
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        const T* updates = static_cast<const T*>(update);
        each_row(num_rows, [&](int64_t row) {
            norm_row(static_cast<T*>(x) + row * ldx, updates ? updates + row * ldu : nullptr,
                     static_cast<const float*>(weight), static_cast<T*>(y) + row * ldy, width,
                     static_cast<float>(eps), in_float32 != 0);
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
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        each_row(num_rows, [&](int64_t row) {
            const T* gate = static_cast<const T*>(x) + row * ldx;
            silu_multiply_row(gate, gate + width, static_cast<T*>(y) + row * ldy, width);
        });
    });
}
