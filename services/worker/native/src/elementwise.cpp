// The small operators between products, each one pass over its rows.
#include <cmath>

#include "activations.h"
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

// Distances between rows, groups and items, which are 0 where values repeat.
struct Strides {
    int64_t rows, groups, items;  // items lie next to each other, or all are the first
};

// The items of one group.
template <class T>
struct Items {
    const T* first;
    bool repeat;

    Vec load(int64_t i, int64_t n) const {
        if (!repeat) return load_n(first + i, n);
        return set1(sum(load_n(first, 1)));  // the other lanes are 0
    }
};

template <class T>
struct Operand {
    const T* data;
    Strides strides;

    Items<T> items(int64_t row, int64_t group) const {
        return {data + row * strides.rows + group * strides.groups, strides.items == 0};
    }
};

// y[row, group, i] = operation(a[row, group, i], b[row, group, i]).
template <class T, class A, class B, class Operation>
void each_item(T* y, const Strides& strides, const Operand<A>& a, const Operand<B>& b, int64_t num_rows,
               int64_t num_groups, int64_t num_items, const Operation& operation) {
    each_head(num_rows, num_groups, [&](int64_t row, int64_t group) {
        T* out = y + row * strides.rows + group * strides.groups;
        const Items<A> left = a.items(row, group);
        const Items<B> right = b.items(row, group);
        for (int64_t i = 0; i < num_items; i += kLanes) {
            const int64_t n = num_items - i;
            store_n(out + i, operation(left.load(i, n), right.load(i, n)), n);
        }
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

// y = a, a + b, a * b, or act(a) * b, where act(a) is rounded to y's dtype; each [rows, groups, items].
// The arguments of y, a and b end with their strides. a has y's dtype unless it is copied, and so has b in
// a product with an activation.
LPX_EXPORT void lpx_elementwise(int64_t operation, void* y, int64_t y_dtype, int64_t y_rows,
                                int64_t y_groups, const void* a, int64_t a_dtype, int64_t a_rows,
                                int64_t a_groups, int64_t a_items, const void* b, int64_t b_dtype,
                                int64_t b_rows, int64_t b_groups, int64_t b_items, int64_t num_rows,
                                int64_t num_groups, int64_t num_items) {
    using namespace lpx;
    with_activation(y_dtype, [&](auto item) {
        using T = decltype(item);
        const auto each = [&](auto of_a, auto of_b, const auto& function) {
            using A = decltype(of_a);
            using B = decltype(of_b);
            const Operand<A> left{static_cast<const A*>(a), {a_rows, a_groups, a_items}};
            const Operand<B> right{static_cast<const B*>(b), {b_rows, b_groups, b_items}};
            each_item(static_cast<T*>(y), {y_rows, y_groups, 1}, left, right, num_rows, num_groups,
                      num_items, function);
        };
        const auto with_b = [&](const auto& function) {
            with_activation(b_dtype, [&](auto of_b) { each(T(), of_b, function); });
        };
        const auto gate = [&](const auto& activation) {
            each(T(), T(), [&](Vec x, Vec z) { return gated<T>(activation, x, z); });
        };
        switch (operation) {
            case kCopy:
                with_activation(a_dtype, [&](auto of_a) { each(of_a, of_a, [](Vec x, Vec) { return x; }); });
                break;
            case kAdd: with_b([](Vec x, Vec z) { return add(x, z); }); break;
            case kMultiply: with_b([](Vec x, Vec z) { return mul(x, z); }); break;
            case kSilu: gate(silu); break;
            case kGeluTanh: gate(gelu_tanh); break;
            default: gate(sigmoid);
        }
    });
}
