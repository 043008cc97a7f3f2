// Products of codes with rows of floats: codes are widened to floats, in the order of inputs.
#pragma once
#include "codes.h"
#include "pool.h"

namespace lpx {

// Rows of floats.
struct WideRows {
    static constexpr int kMaxRows = kLanes == 16 ? 8 : 4;
    const float* x;
    int64_t ldx;

    // totals[r][32] += the block's product with R rows.
    template <int R, Code Kind>
    void add(const CodedProduct&, const Block<Kind>& block, int64_t row, float* totals) const {
        // One or two rows alone need a whole panel to hide the latency of their additions.
        constexpr int V = R <= 2 ? kPanel / kLanes : 2;
        for (int first = 0; first < kPanel; first += V * kLanes) {
            add_part<R, V>(block, row, first, totals + first);
        }
    }

private:
    // V vectors of outputs.
    template <int R, int V, Code Kind>
    void add_part(const Block<Kind>& block, int64_t row, int first, float* totals) const {
        Vec sums[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] = lpx::zero();
        }
        const float* in = x + row * ldx + block.first;
        const auto step = [&](int64_t quad, int j) {
            const uint8_t* codes = block.codes + quad * block.kQuadBytes;
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                Vec value = decode<Kind>(codes, first + v * kLanes, j);
                if (Kind != Code::kFloat8) value = sub(value, load(block.zeros + first + v * kLanes));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    sums[r][v] = fma(set1(in[r * ldx + quad * kQuad + j]), value, sums[r][v]);
                }
            }
        };
        const int64_t num_whole = block.num_inputs / kQuad;
        for (int64_t quad = 0; quad < num_whole; ++quad) {
            prefetch_after<Kind>(block.codes + quad * block.kQuadBytes);
#pragma GCC unroll 4
            for (int j = 0; j < kQuad; ++j) step(quad, j);
        }
        for (int j = 0; j < block.num_inputs % kQuad; ++j) step(num_whole, j);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Vec scale = load(block.scales + first + v * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                float* total = totals + r * kPanel + v * kLanes;
                store(total, fma(sums[r][v], scale, load(total)));
            }
        }
    }
};

// Products of many rows: the codes of a block are widened once for all of them. The sums are those of WideRows.
template <Code Kind>
class WidePanels {
public:
    static constexpr int64_t kFewRows = 2 * WideRows::kMaxRows;  // which WideRows multiplies faster

    WidePanels(const CodedProduct& g, const WideRows& rows) : g_(g), rows_(rows) {}

    // The product of rows [begin, end) and a panel: [end - begin][32], valid until the next one.
    const float* multiply(int64_t panel, int64_t begin, int64_t end) {
        float* totals = scratch(0, (end - begin) * kPanel);
        std::memset(totals, 0, (end - begin) * kPanel * sizeof(float));
        Block<Kind> block;
        for (int64_t b = 0; b < g_.num_blocks; ++b) {
            block.read(g_, panel, b);
            widen(block);
            for (int64_t row = begin; row < end; row += kRows) {
                with_count<kRows>(end - row, [&](auto count) {
                    for (int first = 0; first < kPanel; first += 2 * kLanes) {
                        add<count.value>(block, row, first, totals + (row - begin) * kPanel + first);
                    }
                });
            }
        }
        return totals;
    }

private:
    static constexpr int kRows = kLanes == 16 ? 12 : 6;  // at once
    static constexpr int64_t kMaxInputs = 256;           // of a block

    void widen(const Block<Kind>& block) {
        for (int64_t quad = 0; quad < ceil_div(block.num_inputs, kQuad); ++quad) {
            const uint8_t* codes = block.codes + quad * block.kQuadBytes;
            prefetch_after<Kind>(codes);
#pragma GCC unroll 4
            for (int j = 0; j < kQuad; ++j) {
#pragma GCC unroll 4
                for (int first = 0; first < kPanel; first += kLanes) {
                    Vec value = decode<Kind>(codes, first, j);
                    if (Kind != Code::kFloat8) value = sub(value, load(block.zeros + first));
                    store(wide_[quad * kQuad + j] + first, value);
                }
            }
        }
    }

    // totals[R][2 * kLanes] += the block's product with R rows, for the outputs from `first` on. Not inlined, because
    // GCC 12 then keeps the sums in memory.
    template <int R>
    [[gnu::noinline]] void add(const Block<Kind>& block, int64_t row, int first, float* totals) const {
        Vec sums[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = lpx::zero();
        const float* in = rows_.x + row * rows_.ldx + block.first;
        for (int64_t k = 0; k < block.num_inputs; ++k, ++in) {
            const Vec values[2] = {load(wide_[k] + first), load(wide_[k] + first + kLanes)};
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Vec input = set1(in[r * rows_.ldx]);
                sums[r][0] = fma(input, values[0], sums[r][0]);
                sums[r][1] = fma(input, values[1], sums[r][1]);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const Vec scale = load(block.scales + first + v * kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                float* total = totals + r * kPanel + v * kLanes;
                store(total, fma(sums[r][v], scale, load(total)));
            }
        }
    }

    const CodedProduct& g_;
    const WideRows& rows_;
    alignas(64) float wide_[kMaxInputs][kPanel];
};

}  // namespace lpx
