// Products of codes with rows of floats: codes are widened to floats, in the order of inputs.
#pragma once
#include "codes.h"

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

}  // namespace lpx
