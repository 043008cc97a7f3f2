// The routed experts of a layer: which ones each row goes to, and the sum of what these make of it.
//
// Experts are computed one after another, each over the rows that chose it, with their adapters. What they
// add to a row is summed in float32 in the order of the experts' numbers and rounded once, so a row's
// result does not depend on its neighbours.
#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"
#include "kernels.h"
#include "pool.h"
#include "runs.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr int64_t kTaskRows = 16;
constexpr int64_t kInTiles = -1, kInCodes = -2, kInFixed = -3;
constexpr int64_t kClamped = -1;

// As `native_experts.py` writes them, in int64 words.
struct Linear {
    // dtype kInTiles = as `lpx_pack_tiles` packs it, kInFixed = as `lpx_pack_fixed` does, kInCodes = Codes
    int64_t packed, dtype, site, bias;
};
// Arguments of `lpx_linear_codes`.
struct Codes {
    int64_t packed, kind, scales, scale_dtype, zeros, zero_dtype, zero, group_size, block_size;
};
struct Expert {
    Linear gate_up, down;
};
struct Gate {
    int64_t operation;  // of `lpx_elementwise`, or kClamped
    float alpha, limit;
};

// Of one call; kept from call to call.
struct Work {
    std::vector<int64_t> ends;      // of each expert's pairs in the two lists below
    std::vector<int64_t> rows;      // rows by expert; inside an expert, ascending
    std::vector<float> factors;     // what their experts' outputs are multiplied by
    std::vector<Run> runs;          // over one expert's rows
    std::vector<float> sums;        // [rows, hidden]
    std::vector<char> memory[4];    // of one expert: its inputs, gates and ups, products, outputs
};

// A buffer of n items of T.
template <class T>
T* buffer(Work& work, int which, int64_t n) {
    std::vector<char>& memory = work.memory[which];
    const size_t num_bytes = static_cast<size_t>(n) * sizeof(T);
    if (memory.size() < num_bytes) memory.resize(num_bytes);
    return reinterpret_cast<T*>(memory.data());
}

// Sorts the pairs of a row and an expert.
void sort_pairs(Work& work, const int64_t* chosen, const float* weights, int64_t num_rows,
                int64_t num_active, int64_t num_experts) {
    const int64_t num_pairs = num_rows * num_active;
    work.ends.assign(num_experts + 1, 0);
    for (int64_t i = 0; i < num_pairs; ++i) ++work.ends[chosen[i] + 1];
    for (int64_t e = 0; e < num_experts; ++e) work.ends[e + 1] += work.ends[e];
    work.rows.resize(num_pairs);
    work.factors.resize(num_pairs);
    for (int64_t i = 0; i < num_pairs; ++i) {
        const int64_t at = work.ends[chosen[i]]++;
        work.rows[at] = i / num_active;
        work.factors[at] = weights[i];
    }
}

// The runs over some ascending rows, numbered from 0.
void select_runs(Work& work, const Run* runs, int64_t num_runs, const int64_t* begin,
                 const int64_t* end) {
    work.runs.clear();
    for (const Run* run = runs; run < runs + num_runs; ++run) {
        const int64_t first = std::lower_bound(begin, end, run->begin) - begin;
        const int64_t last = std::lower_bound(begin, end, run->end) - begin;
        if (first < last) work.runs.push_back({run->record, first, last, run->coef});
    }
}

inline const void* address(int64_t word) { return reinterpret_cast<const void*>(word); }

// y = x W^T with the adapters of `work.runs`, and the bias; rows are dense.
void apply(const Work& work, const Linear& linear, const void* x, int64_t num_inputs, void* y,
           int64_t num_outputs, int64_t dtype, int64_t num_rows) {
    const void* packed = address(linear.packed);
    if (linear.dtype == kInCodes) {
        const Codes& own = *static_cast<const Codes*>(packed);
        lpx_linear_codes(x, num_inputs, address(own.packed), own.kind, address(own.scales),
                         own.scale_dtype, address(own.zeros), own.zero_dtype, own.zero, own.group_size,
                         own.block_size, y, dtype, num_rows, num_inputs, num_outputs);
    } else if (linear.dtype == kInTiles) {
        lpx_linear_tiles(x, num_inputs, packed, y, num_outputs, dtype, num_rows, num_inputs,
                         num_outputs);
    } else if (linear.dtype == kInFixed) {
        lpx_linear_fixed(x, num_inputs, packed, y, num_outputs, dtype, num_rows, num_inputs,
                         num_outputs);
    } else {
        lpx_linear(x, num_inputs, packed, linear.dtype, y, num_outputs, dtype, num_rows, num_inputs,
                   num_outputs);
    }
    if (!work.runs.empty()) {
        lpx_add_lora(x, num_inputs, num_inputs, y, num_outputs, num_outputs, dtype, linear.site,
                     work.runs.data(), static_cast<int64_t>(work.runs.size()));
    }
    if (linear.bias == 0) return;
    lpx_elementwise(kAdd, y, dtype, num_outputs, 0, y, dtype, num_outputs, 0, 1, address(linear.bias),
                    dtype, 0, 0, 1, num_rows, 1, num_outputs);
}

template <class Body>
void each_row(int64_t num_rows, const Body& body) {
    parallel_for(ceil_div(num_rows, kTaskRows), [&](int64_t task) {
        const int64_t end = smaller((task + 1) * kTaskRows, num_rows);
        for (int64_t row = task * kTaskRows; row < end; ++row) body(row);
    });
}

// The gate of gpt-oss, whose values lie next to each other: (up + 1) * gate * sigmoid(alpha * gate), both
// clamped.
template <class T>
void clamped_gate_row(const T* both, T* y, int64_t width, float alpha, float limit) {
    float gates[kLanes], ups[kLanes], pairs[2 * kLanes];
    const Vec most = set1(limit), least = set1(-limit);
    for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t n = smaller(width - i, kLanes);
        store(pairs, load_n(both + 2 * i, 2 * n));
        store(pairs + kLanes, load_n(both + 2 * i + kLanes, 2 * n - kLanes));
        for (int64_t j = 0; j < kLanes; ++j) gates[j] = pairs[2 * j], ups[j] = pairs[2 * j + 1];
        // NaN stays NaN, as in `exp`.
        const Vec gate = min(most, load(gates));
        const Vec up = add(max(least, min(most, load(ups))), set1(1.0f));
        store_n(y + i, mul(up, sigmoid_product(gate, mul(gate, set1(alpha)))), n);
    }
}

// inner = gates of both, [rows, 2 * width].
template <class T>
void gate_rows(const Gate& gate, const T* both, T* inner, int64_t dtype, int64_t num_rows, int64_t width) {
    if (gate.operation == kClamped) {
        each_row(num_rows, [&](int64_t i) {
            clamped_gate_row(both + i * 2 * width, inner + i * width, width, gate.alpha, gate.limit);
        });
        return;
    }
    lpx_elementwise(gate.operation, inner, dtype, width, 0, both, dtype, 2 * width, 0, 1, both + width,
                    dtype, 2 * width, 0, 1, num_rows, 1, width);
}

// Softmax of a row's scores, and its `num_active` largest, of which equal ones go by number.
template <class T>
void choose(const T* scores, int64_t num_experts, int64_t num_active, bool renormalise,
            const float* factors, int64_t* chosen, float* weights) {
    float* shares = scratch(0, num_experts + kLanes);
    float largest = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < num_experts; i += kLanes) {
        store(shares + i, load_n(scores + i, num_experts - i));
    }
    for (int64_t i = 0; i < num_experts; ++i) largest = shares[i] > largest ? shares[i] : largest;
    for (int64_t i = 0; i < num_experts; i += kLanes) {
        store(shares + i, exp(sub(load(shares + i), set1(largest))));
    }
    for (int64_t i = 0; i < num_experts; ++i) total += shares[i];
    float of_chosen = 0.0f;
    for (int64_t k = 0; k < num_active; ++k) {
        int64_t best = -1;
        for (int64_t i = 0; i < num_experts; ++i) {
            const bool is_taken = std::find(chosen, chosen + k, i) != chosen + k;
            if (!is_taken && (best < 0 || shares[i] > shares[best])) best = i;
        }
        chosen[k] = best;
        weights[k] = shares[best] / total;
        of_chosen += weights[k];
    }
    for (int64_t k = 0; renormalise && k < num_active; ++k) weights[k] /= of_chosen;
    for (int64_t k = 0; factors != nullptr && k < num_active; ++k) weights[k] *= factors[chosen[k]];
}

}  // namespace
}  // namespace lpx

// The experts of each row, int64 [num_rows, num_active], and their weights, float32, by scores of all.
// `factors`, unless null, multiply the weights: float32 [num_experts].
LPX_EXPORT void lpx_choose_experts(const void* scores, int64_t lds, int64_t dtype, int64_t num_rows,
                                   int64_t num_experts, int64_t num_active, int64_t renormalise,
                                   const void* factors, void* chosen, void* weights) {
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        each_row(num_rows, [&](int64_t row) {
            choose(static_cast<const T*>(scores) + row * lds, num_experts, num_active,
                   renormalise != 0, static_cast<const float*>(factors),
                   static_cast<int64_t*>(chosen) + row * num_active,
                   static_cast<float*>(weights) + row * num_active);
        });
    });
}

// y[row] = sum over k of weights[row][k] * expert chosen[row][k] of x[row], where an expert is
// down(gate of gate_up). `experts`: all, as Expert; `gate`, `alpha`, `limit`: as Gate.
LPX_EXPORT void lpx_experts(const void* x, int64_t ldx, const void* chosen, const void* weights,
                            int64_t num_active, const void* experts, int64_t num_experts,
                            int64_t hidden, int64_t width, int64_t gate, double alpha, double limit,
                            void* y, int64_t ldy, int64_t dtype, int64_t num_rows,
                            const void* all_runs, int64_t num_all_runs) {
    using namespace lpx;
    const Run* runs = static_cast<const Run*>(all_runs);
    const int64_t num_runs = num_with_rows(runs, num_all_runs);
    static thread_local Work work_of_thread;
    Work& work = work_of_thread;
    sort_pairs(work, static_cast<const int64_t*>(chosen), static_cast<const float*>(weights),
               num_rows, num_active, num_experts);
    work.sums.assign(num_rows * hidden, 0.0f);
    const Gate own{gate, static_cast<float>(alpha), static_cast<float>(limit)};
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        int64_t first = 0;
        for (int64_t e = 0; e < num_experts; ++e) {
            const int64_t n = work.ends[e] - first;
            if (n == 0) continue;
            const Expert& expert = static_cast<const Expert*>(experts)[e];
            const int64_t* rows = work.rows.data() + first;
            const float* factors = work.factors.data() + first;
            T* in = buffer<T>(work, 0, n * hidden);
            T* both = buffer<T>(work, 1, n * 2 * width);
            T* inner = buffer<T>(work, 2, n * width);
            T* out = buffer<T>(work, 3, n * hidden);
            each_row(n, [&](int64_t i) {
                std::memcpy(in + i * hidden, static_cast<const T*>(x) + rows[i] * ldx,
                            hidden * sizeof(T));
            });
            select_runs(work, runs, num_runs, rows, rows + n);
            apply(work, expert.gate_up, in, hidden, both, 2 * width, dtype, n);
            gate_rows(own, both, inner, dtype, n, width);
            apply(work, expert.down, inner, width, out, hidden, dtype, n);
            each_row(n, [&](int64_t i) {
                float* sums = work.sums.data() + rows[i] * hidden;
                for (int64_t c = 0; c < hidden; c += kLanes) {
                    const Vec value = load_n(out + i * hidden + c, hidden - c);
                    const Vec sum = load_n(sums + c, hidden - c);
                    store_n(sums + c, fma(set1(factors[i]), value, sum), hidden - c);
                }
            });
            first += n;
        }
        each_row(num_rows, [&](int64_t row) {
            T* out = static_cast<T*>(y) + row * ldy;
            for (int64_t c = 0; c < hidden; c += kLanes) {
                store_n(out + c, load_n(work.sums.data() + row * hidden + c, hidden - c), hidden - c);
            }
        });
    });
}
