// y = x W^T for a few to a few thousand rows, W packed once at load.
//
// A panel holds kPanel = 2 * kLanes outputs: for each input k, the panel's weights side by side, so
// a step of the inner loop is one load, one broadcast per row, two multiply-adds per row. Weights
// stay in the type they were published in and widen in registers: float32 arithmetic at half the
// bytes. bfloat16 pairs lanes (low half of word i = output i, high half = output kLanes + i), so one
// shift and one mask widen a whole panel row.
//
// Every output is summed in the order of k in one accumulator, whatever the number of rows: a row's
// result does not depend on its neighbours.
#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;
// Outputs and rows of one task: enough to outweigh claiming it, few enough for all threads to have one.
constexpr int64_t kTaskPanels = 4;
constexpr int64_t kTaskRows = 16 * kMaxRows;
// Panels of one task where all rows are in one: each is still in the first-level cache for the next rows.
constexpr int64_t kFewPanels = 2;
constexpr int64_t kWidenedRows = 64;  // of one task
// How far ahead of its use a panel is prefetched: the hardware's prefetchers alone reach less than half of
// the bandwidth alongside this many other instructions.
constexpr int64_t kAheadBytes = 4096;

template <class T>
inline int index_in_panel(int output) {
    return output;
}
template <>
inline int index_in_panel<bf16>(int output) {
    return output < kLanes ? 2 * output : 2 * (output - kLanes) + 1;
}

template <class W>
void pack(const W* weight, int64_t num_outputs, int64_t num_inputs, W* packed) {
    parallel_for(ceil_div(num_outputs, kPanel), [&](int64_t panel) {
        W* out = packed + panel * kPanel * num_inputs;
        for (int i = 0; i < kPanel; ++i) {
            const int64_t row = panel * kPanel + i;
            const int index = index_in_panel<W>(i);
            for (int64_t k = 0; k < num_inputs; ++k) {
                out[k * kPanel + index] = row < num_outputs ? weight[row * num_inputs + k] : W();
            }
        }
    });
}

struct Product {
    const float* x;
    int64_t ldx;
    void* y;
    int64_t dtype, ldy;  // of y
    int64_t num_rows, num_inputs, num_outputs;
};

// y[row, row + num_rows)[panel] = sums[num_rows][stride].
void store_sums(const Product& g, const float* sums, int64_t stride, int64_t row, int64_t num_rows,
                int64_t panel) {
    const int64_t first = panel * kPanel, left = g.num_outputs - first;
    with_activation(g.dtype, [&](auto t) {
        using T = decltype(t);
        T* out = static_cast<T*>(g.y) + row * g.ldy + first;
        for (int64_t r = 0; r < num_rows; ++r, out += g.ldy, sums += stride) {
            store_n(out, load(sums), left);
            if (left > kLanes) store_n(out + kLanes, load(sums + kLanes), left - kLanes);
        }
    });
}

template <class W, int R, int P>
void multiply_block(const Product& g, const W* packed, int64_t row, int64_t panel) {
    const float* x = g.x + row * g.ldx;
    const W* weights = packed + panel * kPanel * g.num_inputs;
    const int64_t stride = kPanel * g.num_inputs;
    Vec sums[R][P][2];
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = zero();
    }
    for (int64_t k = 0; k < g.num_inputs; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            Vec low, high;
            const W* from = weights + p * stride + k * kPanel;
            __builtin_prefetch(from + kAheadBytes / sizeof(W), 0, 3);
            load_pair(from, low, high);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Vec input = set1(x[r * g.ldx + k]);
                sums[r][p][0] = fma(input, low, sums[r][p][0]);
                sums[r][p][1] = fma(input, high, sums[r][p][1]);
            }
        }
    }
    // Through memory, so that what is instantiated here does not depend on the type of y.
    alignas(64) float totals[R][P * kPanel];
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) {
            store(totals[r] + p * kPanel, sums[r][p][0]);
            store(totals[r] + p * kPanel + kLanes, sums[r][p][1]);
        }
    }
    for (int p = 0; p < P; ++p) store_sums(g, totals[0] + p * kPanel, P * kPanel, row, R, panel + p);
}

template <class W, int R>
void multiply_rows(const Product& g, const W* packed, int64_t row, int64_t begin, int64_t end) {
    // Few rows need several panels at a time to hide the latency of their additions, as far as registers
    // allow.
    constexpr int P = R == 1 ? 4 : R == 2 || (R == 3 && kLanes == 16) ? 2 : 1;
    int64_t panel = begin;
    for (; panel + P <= end; panel += P) multiply_block<W, R, P>(g, packed, row, panel);
    for (; panel < end; ++panel) multiply_block<W, R, 1>(g, packed, row, panel);
}

template <class W, int R = kMaxRows>
void multiply_n_rows(int64_t n, const Product& g, const W* packed, int64_t row, int64_t begin,
                     int64_t end) {
    if constexpr (R > 1) {
        if (n < R) return multiply_n_rows<W, R - 1>(n, g, packed, row, begin, end);
    }
    multiply_rows<W, R>(g, packed, row, begin, end);
}

// Tasks that the panels of a product are divided into. Of one with a task for all rows, narrow weights have
// so few panels that each thread needs the same number of tasks; one or two rows need four panels at a time.
int64_t panel_tasks(int64_t num_rows, int64_t num_panels) {
    if (num_rows <= 2 || num_rows > kTaskRows) return ceil_div(num_panels, kTaskPanels);
    return ceil_div(ceil_div(num_panels, kFewPanels), num_threads()) * num_threads();
}

// Consecutive tasks share their rows, which stay in the second-level cache while the weights pass by.
template <class W>
void multiply(const Product& g, const W* packed) {
    const int64_t num_panels = ceil_div(g.num_outputs, kPanel);
    const int64_t num_panel_tasks = panel_tasks(g.num_rows, num_panels);
    parallel_shares(num_panel_tasks * ceil_div(g.num_rows, kTaskRows), [&](int64_t task) {
        const int64_t share = task % num_panel_tasks;
        const int64_t begin = num_panels * share / num_panel_tasks;
        const int64_t end = num_panels * (share + 1) / num_panel_tasks;
        int64_t row = task / num_panel_tasks * kTaskRows;
        const int64_t last = smaller(row + kTaskRows, g.num_rows);
        for (; row < last; row += kMaxRows) {
            multiply_n_rows<W>(last - row, g, packed, row, begin, end);
        }
    });
}

}  // namespace
}  // namespace lpx

// Items that `lpx_pack` writes for a weight [num_outputs, num_inputs].
LPX_EXPORT int64_t lpx_packed_items(int64_t num_outputs, int64_t num_inputs) {
    return lpx::ceil_div(num_outputs, lpx::kPanel) * lpx::kPanel * num_inputs;
}

LPX_EXPORT void lpx_pack(const void* weight, int64_t dtype, int64_t num_outputs, int64_t num_inputs,
                         void* packed) {
    using namespace lpx;
    with_weight(dtype, [&](auto w) {
        using W = decltype(w);
        pack(static_cast<const W*>(weight), num_outputs, num_inputs, static_cast<W*>(packed));
    });
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T. Strides are in items; columns are dense.
LPX_EXPORT void lpx_linear(const void* x, int64_t ldx, const void* packed, int64_t weight_dtype,
                           void* y, int64_t ldy, int64_t activation_dtype, int64_t num_rows,
                           int64_t num_inputs, int64_t num_outputs) {
    using namespace lpx;
    Product g{nullptr, 0, y, activation_dtype, ldy, num_rows, num_inputs, num_outputs};
    with_activation(activation_dtype, [&](auto t) {
        using T = decltype(t);
        const T* inputs = static_cast<const T*>(x);
        const bool copies = sizeof(T) != sizeof(float);
        float* buffer = copies ? scratch(3, num_rows * num_inputs) : nullptr;
        g.ldx = widened_stride(inputs, ldx, num_inputs);
        g.x = copies ? buffer : reinterpret_cast<const float*>(inputs);
        if (copies) {
            parallel_for(ceil_div(num_rows, kWidenedRows), [&](int64_t task) {
                const int64_t row = task * kWidenedRows;
                widen(inputs + row * ldx, ldx, smaller(kWidenedRows, num_rows - row), num_inputs,
                      buffer + row * num_inputs);
            });
        }
    });
    with_weight(weight_dtype, [&](auto w) {
        using W = decltype(w);
        multiply(g, static_cast<const W*>(packed));
    });
}
