// What becomes of the sums of products of codes.
#pragma once
#include "activations.h"
#include "best.h"
#include "codes.h"
#include "kernels.h"

namespace lpx {

// Takes the sums of a panel, totals[end - row][32] for rows [row, end), and stores them.
struct Outputs {
    const CodedProduct& g;

    void take(const float* totals, int64_t row, int64_t end, int64_t panel) const {
        with_activation(g.dtype, [&](auto t) {
            using T = decltype(t);
            for (; row < end; ++row, totals += kPanel) {
                for (int64_t i = panel * kPanel; i < smaller(panel * kPanel + kPanel, g.num_outputs);
                     i += kLanes) {
                    T* out = static_cast<T*>(g.y) + row * g.num_outputs + i;
                    store_n(out, load(totals + i % kPanel), g.num_outputs - i);
                }
            }
        });
    }
};

// Takes them, too, and keeps only the best of a thread's panels, rounded as `Outputs` stores it.
class BestOutputs {
public:
    BestOutputs(const CodedProduct& g, MergedBest& merged) : g_(g), merged_(merged) {
        static_assert(sizeof(float) == sizeof(int32_t), "one buffer for both");
        scores_ = scratch(1, 2 * g.num_rows);
        outputs_ = reinterpret_cast<int32_t*>(scores_ + g.num_rows);
        for (int64_t row = 0; row < g.num_rows; ++row) {
            scores_[row] = -INFINITY;
            outputs_[row] = 0;
        }
    }
    ~BestOutputs() {
        merged_.add(scores_, [&](int64_t row) { return int64_t{outputs_[row]}; });
    }

    void take(const float* totals, int64_t row, int64_t end, int64_t panel) {
        with_activation(g_.dtype, [&](auto t) {
            using T = decltype(t);
            for (; row < end; ++row, totals += kPanel) {
                alignas(64) float values[kPanel];
                for (int64_t i = 0; i < kPanel; i += kLanes) store(values + i, rounded(load(totals + i), T()));
                int any = 0;  // of these is not worse
                for (int64_t i = 0; i < kPanel; ++i) any |= !(values[i] < scores_[row]);
                if (any) choose(values, row, panel * kPanel);
            }
        });
    }

private:
    void choose(const float* values, int64_t row, int64_t first) {
        for (int64_t i = 0; i < smaller(kPanel, g_.num_outputs - first); ++i) {
            if (is_better(values[i], first + i, scores_[row], outputs_[row])) {
                scores_[row] = values[i];
                outputs_[row] = static_cast<int32_t>(first + i);
            }
        }
    }

    const CodedProduct& g_;
    MergedBest& merged_;
    float* scores_;
    int32_t* outputs_;
};

// Takes the sums of 16 gates and of the 16 outputs that they multiply, and stores the products of activated gates
// and outputs, with the bits that `lpx_elementwise` gives; or both, all gates first.
struct GatedOutputs {
    const CodedProduct& g;
    int64_t operation;

    void take(const float* totals, int64_t row, int64_t end, int64_t panel) const {
        switch (operation) {
            case kCopy: return store_both(totals, row, end, panel);
            case kSilu: return store_gated([](Vec z) { return silu(z); }, totals, row, end, panel);
            default: return store_gated([](Vec z) { return gelu_tanh(z); }, totals, row, end, panel);
        }
    }

private:
    static constexpr int64_t kGates = kPanel / 2;

    template <class Activation>
    void store_gated(const Activation& activation, const float* totals, int64_t row, int64_t end,
                     int64_t panel) const {
        with_activation(g.dtype, [&](auto t) {
            using T = decltype(t);
            T* out = static_cast<T*>(g.y) + row * (g.num_outputs / 2) + panel * kGates;
            for (; row < end; ++row, totals += kPanel, out += g.num_outputs / 2) {
                for (int64_t i = 0; i < kGates; i += kLanes) {
                    const Vec gate = rounded(load(totals + i), T()), other = rounded(load(totals + kGates + i), T());
                    store(out + i, gated<T>(activation, gate, other));
                }
            }
        });
    }

    void store_both(const float* totals, int64_t row, int64_t end, int64_t panel) const {
        with_activation(g.dtype, [&](auto t) {
            using T = decltype(t);
            T* out = static_cast<T*>(g.y) + row * g.num_outputs + panel * kGates;
            for (; row < end; ++row, totals += kPanel, out += g.num_outputs) {
                for (int64_t i = 0; i < kGates; i += kLanes) {
                    store(out + i, load(totals + i));
                    store(out + g.num_outputs / 2 + i, load(totals + kGates + i));
                }
            }
        });
    }
};

}  // namespace lpx
