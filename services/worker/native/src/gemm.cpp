// y = x W^T for a few to a few thousand rows, W packed once at load.
//
// A panel holds kPanel = 2 * kLanes outputs: for each input k, the panel's weights side by side, so
// a step of the inner loop is one load, one broadcast per row, two multiply-adds per row. Weights
// stay in the type they were published in and widen in registers: float32 arithmetic at half the
// bytes. bfloat16 pairs lanes (low half of word i = output i, high half = output kLanes + i), so one
// shift and one mask widen a whole panel row.
//
// A task is up to 96 or 192 rows and a few panels. For few rows, its loops are blocks of up to 6 or 12 rows,
// panels (several at a time for one to three rows), and k. For more, they are panels (two at a time with 16
// lanes), chunks of k that stay in the first-level cache when they are widened, blocks of 6 rows, and k.
//
// Every output is summed in the order of k in one accumulator, whatever the number of rows: a row's
// result does not depend on its neighbours.
#include <type_traits>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;  // of a block whose weights are widened for it alone
// Rows and panels of a block whose weights other blocks use as well. With 16 lanes, six rows of two panels
// load less for each multiplication than twelve rows of one.
constexpr int kBlockRows = 6;
constexpr int kBlockPanels = kLanes == 16 ? 2 : 1;
// Fewest rows of a block in registers, so that its additions do not wait for each other.
constexpr int kMinRows = kLanes == 16 ? 2 : 4;
// Most rows of a product that widens weights for each block.
constexpr int64_t kFewRows = kLanes == 16 ? 24 : kMaxRows;
// Outputs and rows of one task: enough to outweigh claiming it, few enough for all threads to have one.
constexpr int64_t kTaskPanels = 4;
constexpr int64_t kTaskRows = 16 * kMaxRows;
// Most rows that are not divided: the fewer tasks share a panel, the less often it is widened.
constexpr int64_t kWholeRows = 192;
// Panels of one task where all rows are in one: each is still in the first-level cache for the next rows.
constexpr int64_t kFewPanels = 2;
constexpr int64_t kWidenedRows = 64;  // of one task
// Most inputs of a chunk, whose weights (20 or 24 KB as floats) stay in the first-level cache for all rows.
constexpr int64_t kChunkInputs = kLanes == 16 ? 96 : 320;
constexpr int64_t kLineInputs = 16;  // of a cache line
// How far ahead of its use a panel is prefetched, unless it is read in chunks: the hardware's prefetchers
// alone reach less than half of the bandwidth alongside this many other instructions.
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

// Adds n inputs of R rows times P panels, `stride` items apart, to sums[R][P * kPanel], or to zeros if that
// is null, and writes them to `to`, whose rows are ld floats apart. Calls before(k) for each line of inputs,
// and meanwhile(k, p, from, low, high) for each pair of vectors of weights.
template <int R, int P, class W, class Before, class F>
void multiply_block(const float* x, int64_t ldx, const W* weights, int64_t stride, int64_t n,
                    const float* sums, float* to, int64_t ld, const Before& before,
                    const F& meanwhile) {
    Vec totals[R][P][2];
    if (sums == nullptr) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) totals[r][p][0] = totals[r][p][1] = zero();
        }
    } else {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                totals[r][p][0] = load(sums + (r * P + p) * kPanel);
                totals[r][p][1] = load(sums + (r * P + p) * kPanel + kLanes);
            }
        }
    }
    for (int64_t begin = 0; begin < n; begin += kLineInputs) {
        const int64_t end = smaller(begin + kLineInputs, n);
        before(begin);
#pragma GCC unroll 4
        for (int64_t k = begin; k < end; ++k) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                Vec low, high;
                const W* from = weights + p * stride + k * kPanel;
                load_pair(from, low, high);
                meanwhile(k, p, from, low, high);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Vec input = set1(x[r * ldx + k]);
                    totals[r][p][0] = fma(input, low, totals[r][p][0]);
                    totals[r][p][1] = fma(input, high, totals[r][p][1]);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            store(to + r * ld + p * kPanel, totals[r][p][0]);
            store(to + r * ld + p * kPanel + kLanes, totals[r][p][1]);
        }
    }
}

// The R rows from `row` on times panels [begin, end).
template <int R, class W>
void multiply_rows(const Product& g, const W* packed, int64_t row, int64_t begin, int64_t end) {
    // Few rows need several panels at a time to hide the latency of their additions, as far as registers
    // allow.
    constexpr int P = R == 1 ? 4 : R == 2 || (R == 3 && kLanes == 16) ? 2 : 1;
    const int64_t stride = kPanel * g.num_inputs;
    const auto prefetch = [](int64_t, int, const W* from, Vec, Vec) {
        __builtin_prefetch(from + kAheadBytes / sizeof(W), 0, 3);
    };
    const auto multiply = [&](auto panels, int64_t panel) {
        constexpr int kCount = panels.value;
        alignas(64) float sums[R * kCount * kPanel];
        multiply_block<R, kCount>(g.x + row * g.ldx, g.ldx, packed + panel * stride, stride,
                                  g.num_inputs, nullptr, sums, kCount * kPanel, [](int64_t) {},
                                  prefetch);
        for (int p = 0; p < kCount; ++p) {
            store_sums(g, sums + p * kPanel, kCount * kPanel, row, R, panel + p);
        }
    };
    int64_t panel = begin;
    for (; panel + P <= end; panel += P) multiply(std::integral_constant<int, P>(), panel);
    for (; panel < end; ++panel) multiply(std::integral_constant<int, 1>(), panel);
}

// Rows of the next block, of which num_left are left: a last block of few rows would wait for its additions.
inline int64_t rows_of(int64_t num_left) {
    const bool is_rest_small = num_left > kBlockRows && num_left < kBlockRows + kMinRows;
    return is_rest_small ? num_left - kMinRows : smaller(num_left, kBlockRows);
}

// What a block prefetches for each line of its inputs.
struct Piece {
    const char* from;
    int64_t num_bytes;

    void prefetch(int64_t k) const {
        const char* line = from + k / kLineInputs * num_bytes;
        for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(line + i, 0, 2);
    }
};

// The piece of a block, of the next n inputs of P panels. Each of the first 2, 4 or 8 blocks reads a piece of
// one panel in order, which lets the hardware's prefetchers join in, and the others read nothing.
template <int P, class W>
Piece piece_of(int64_t block, int64_t num_blocks, const W* next, int64_t stride, int64_t n) {
    const int64_t num_pieces = (num_blocks >= 8 ? 8 : num_blocks >= 4 ? 4 : 2) / P;  // of a panel
    if (block >= P * num_pieces) return {nullptr, 0};
    const int64_t size = kLineInputs * kPanel / num_pieces;
    const W* from = next + block / num_pieces * stride;
    from += block % num_pieces * ceil_div(n, kLineInputs) * size;
    return {reinterpret_cast<const char*>(from), size * int64_t(sizeof(W))};
}

// R rows times n inputs of P panels that are widened to floats.
template <int R, int P>
void multiply_wide(const float* x, int64_t ldx, const float* wide, int64_t stride, int64_t n,
                   const float* sums, float* to, int64_t ld, Piece piece) {
    const auto prefetch = [=](int64_t k) { piece.prefetch(k); };
    multiply_block<R, P>(x, ldx, wide, stride, n, sums, to, ld, prefetch, [](auto...) {});
}

// The same for weights that are not widened yet, which it keeps in `wide`.
template <int R, int P, class W>
void widen_and_multiply(const float* x, int64_t ldx, const W* weights, int64_t stride, int64_t n,
                        const float* sums, float* to, int64_t ld, Piece piece, float* wide) {
    const auto prefetch = [=](int64_t k) { piece.prefetch(k); };
    const auto keep = [=](int64_t k, int p, const W*, Vec low, Vec high) {
        store(wide + (p * n + k) * kPanel, low);
        store(wide + (p * n + k) * kPanel + kLanes, high);
    };
    multiply_block<R, P>(x, ldx, weights, stride, n, sums, to, ld, prefetch, keep);
}

// Rows [row, last) times P panels, chunk by chunk, with `sums` for each. The first block of rows keeps the
// weights that it widens for the others.
template <int P, class W>
void multiply_panels(const Product& g, const W* packed, int64_t row, int64_t last, int64_t panel,
                     float* sums) {
    constexpr int64_t kUnrolled = 4, kWidth = P * kPanel;
    alignas(64) float wide[P * kChunkInputs * kPanel];
    const int64_t stride = kPanel * g.num_inputs, num_blocks = ceil_div(last - row, kBlockRows);
    const int64_t num_chunks = ceil_div(g.num_inputs, kChunkInputs);
    const int64_t chunk = ceil_div(g.num_inputs, num_chunks * kUnrolled) * kUnrolled;
    const bool is_direct = g.dtype == kFloat32 && (panel + P) * kPanel <= g.num_outputs;
    for (int64_t first = 0; first < g.num_inputs; first += chunk) {
        const int64_t n = smaller(chunk, g.num_inputs - first);
        const bool is_last = first + n == g.num_inputs;
        const W* weights = packed + panel * stride + first * kPanel;
        const W* next = is_last ? packed + (panel + P) * stride : weights + n * kPanel;
        int64_t block = 0, size;
        for (int64_t begin = row; begin < last; begin += size, ++block) {
            size = rows_of(last - begin);
            const Piece piece = piece_of<P>(block, num_blocks, next, stride, n);
            const float* x = g.x + begin * g.ldx + first;
            float* own = sums + (begin - row) * kWidth;
            const float* before = first > 0 ? own : nullptr;
            float* to = own;
            int64_t ld = kWidth;
            if (is_direct && is_last) {
                to = static_cast<float*>(g.y) + begin * g.ldy + panel * kPanel;
                ld = g.ldy;
            }
            with_count<kBlockRows>(size, [&](auto rows) {
                constexpr int R = rows.value;
                if (block > 0) {
                    multiply_wide<R, P>(x, g.ldx, wide, n * kPanel, n, before, to, ld, piece);
                } else {
                    widen_and_multiply<R, P>(x, g.ldx, weights, stride, n, before, to, ld, piece, wide);
                }
            });
            if (!is_last || is_direct) continue;
            for (int p = 0; p < P; ++p) store_sums(g, own + p * kPanel, kWidth, begin, size, panel + p);
        }
    }
}

// Tasks that the panels of a product are divided into. Of one with a task for all rows, narrow weights have
// so few panels that each thread needs the same number of tasks; one or two rows need four panels at a time.
int64_t panel_tasks(int64_t num_rows, int64_t num_panels) {
    if (num_rows <= 2 || num_rows > kWholeRows) return ceil_div(num_panels, kTaskPanels);
    return ceil_div(ceil_div(num_panels, kFewPanels), num_threads()) * num_threads();
}

// Consecutive tasks share their rows, which stay in the second-level cache while the weights pass by.
template <class W>
void multiply(const Product& g, const W* packed) {
    const int64_t num_panels = ceil_div(g.num_outputs, kPanel);
    const int64_t num_panel_tasks = panel_tasks(g.num_rows, num_panels);
    // Of one task for all rows, a panel that is left alone costs less than threads with unequal shares.
    const int64_t unit = g.num_rows > kWholeRows ? kBlockPanels : 1;
    const int64_t num_units = ceil_div(num_panels, unit);
    const int64_t num_row_tasks = g.num_rows > kWholeRows ? ceil_div(g.num_rows, kTaskRows) : 1;
    const int64_t task_rows = ceil_div(ceil_div(g.num_rows, num_row_tasks), kMaxRows) * kMaxRows;
    parallel_shares(num_panel_tasks * num_row_tasks, [&](int64_t task) {
        const int64_t share = task % num_panel_tasks;
        const int64_t begin = num_units * share / num_panel_tasks * unit;
        const int64_t end = smaller(num_panels, num_units * (share + 1) / num_panel_tasks * unit);
        int64_t row = task / num_panel_tasks * task_rows;
        const int64_t last = smaller(row + task_rows, g.num_rows);
        if (last - row > kFewRows) {
            float* sums = scratch(0, (last - row) * kBlockPanels * kPanel);
            int64_t panel = begin;
            for (; panel + kBlockPanels <= end; panel += kBlockPanels) {
                multiply_panels<kBlockPanels>(g, packed, row, last, panel, sums);
            }
            if (panel < end) multiply_panels<1>(g, packed, row, last, panel, sums);
            return;
        }
        for (; row < last; row += kMaxRows) {
            with_count<kMaxRows>(last - row, [&](auto rows) {
                multiply_rows<rows.value>(g, packed, row, begin, end);
            });
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
