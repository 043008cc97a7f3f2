// Products of tiles with dot products of bfloat16 pairs.
#pragma once
#include "attention.h"
#include "pairs.h"
#include "tiles.h"

namespace lpx {

inline bool prefers_tiles() { return uses_pairs(); }

class PanelProduct {
public:
    // Two vectors of sums for each row, two weights and an input fill the registers.
    static constexpr int64_t kMaxRows = kLanes == 16 ? 12 : 6;
    // Tiles of a panel that several blocks of rows read one after another: they stay in the
    // second-level cache alongside the next panel's and the rows.
    static constexpr int64_t kSharedTiles = 64;
    // How far ahead of its use a weight of a single block of rows is prefetched.
    static constexpr int64_t kAheadItems = 16 * kTileItems;
    static constexpr int64_t kCachedBytes = 512 << 10;  // of a task's inputs, for all of its panels
    static constexpr int64_t kPartTiles = INT64_MAX;
    // Neighbouring tasks have the same panels and other rows.
    static constexpr bool kKeepsRows = false;
    static constexpr int64_t kMaxTaskPanels = 12;  // each task reads its rows again

    // Rows of a task when there are many.
    static int64_t task_rows(int64_t) { return 240; }

    // Of the next block, where num_left rows are left for num_blocks.
    static int64_t rows_of(int64_t num_left, int64_t num_blocks) { return ceil_div(num_left, num_blocks); }

    // sums[n][32], or what they hold if `continues`, plus the product of n rows and a panel. Calls
    // meanwhile(tile) once for each tile.
    template <class F>
    void multiply(int64_t n, const bf16* x, int64_t ldx, const bf16* panel, int64_t num_tiles,
                  float* sums, bool continues, const Ahead& ahead, const F& meanwhile) {
        for (int64_t tile = 0; tile < num_tiles; ++tile) meanwhile(tile);
        with_count<kMaxRows>(n, [&](auto count) {
            for (int64_t first = 0; first < kTilePanel; first += 2 * kLanes) {
                multiply_rows<count.value>(x, ldx, panel + first * kTileInputs, num_tiles, sums + first,
                                           continues, ahead);
            }
        });
    }

private:
    // Items between the weights of one vector of outputs and the next.
    static constexpr int64_t kNextVector = kLanes == kTileRows ? kTileItems : 2 * kLanes;

    // Two vectors of outputs.
    template <int R>
    static void multiply_rows(const bf16* x, int64_t ldx, const bf16* panel, int64_t num_tiles,
                              float* sums, bool continues, const Ahead& ahead) {
        const int64_t step = ceil_div(ahead.num_bytes, num_tiles * kTileRows);
        const char* from_ahead = ahead.from;
        Vec totals[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const float* from = sums + r * kTilePanel;
            totals[r][0] = continues ? load(from) : zero();
            totals[r][1] = continues ? load(from + kLanes) : zero();
        }
        for (int64_t k = 0; k < num_tiles; ++k) {
            const bf16* weights = panel + k * 2 * kTileItems;
            for (int64_t pair = 0; pair < kTileRows; ++pair) {
                const Pairs low = load_pairs(weights + pair * kTileInputs);
                const Pairs high = load_pairs(weights + kNextVector + pair * kTileInputs);
                __builtin_prefetch(from_ahead, 0, 3);
                __builtin_prefetch(from_ahead + step / 2, 0, 3);
                from_ahead += step;
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Pairs input = broadcast_pair(x + r * ldx + k * kTileInputs + 2 * pair);
                    totals[r][0] = dot(input, low, totals[r][0]);
                    totals[r][1] = dot(input, high, totals[r][1]);
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            store(sums + r * kTilePanel, totals[r][0]);
            store(sums + r * kTilePanel + kLanes, totals[r][1]);
        }
    }
};

// Rows go through the blocks in groups of up to four, and each group's sums stay in registers.
class RowProducts {
public:
    // How many rows the next calls have.
    void set_rows(int64_t num_rows) { num_rows_ = num_rows; }

    // scores[row][16 * (block - first) ...] = q . k
    template <class Keys>
    void score(const bf16* queries, const Keys& keys, int64_t head_dim, float* scores,
               int64_t width) const {
        for (int64_t block = keys.first; block < keys.end; block += kBlocks) {
            with_count<kBlocks>(keys.end - block, [&](auto blocks) {
                each_group([&](auto rows, int64_t row) {
                    score_group<rows.value, blocks.value>(
                        queries + row * head_dim, keys, head_dim, block,
                        scores + row * width + (block - keys.first) * kTokens, width);
                });
            });
        }
    }

    // out[row][d], or 0 unless it `continues`, plus weights . values.
    template <class Values>
    void gather(const bf16* weights, const Values& values, int64_t head_dim, float* out, int64_t width,
                bool continues) const {
        each_group([&](auto rows, int64_t row) {
            for (int64_t d = 0; d < head_dim; d += kValues * kLanes) {
                const auto run = [&](auto vectors) {
                    gather_group<rows.value, vectors.value>(
                        weights + row * width, values, head_dim, d, out + row * head_dim + d, width,
                        continues);
                };
                if (d + kValues / 2 * kLanes < head_dim) {
                    run(std::integral_constant<int, kValues>());
                } else {
                    run(std::integral_constant<int, kValues / 2>());
                }
            }
        });
    }

private:
    // Blocks of keys, and vectors of values, whose sums stay in registers.
    static constexpr int kRows = 4, kBlocks = kLanes == 16 ? 4 : 1, kValues = kLanes == 16 ? 4 : 2;
    static constexpr int kBlockVectors = kTokens / kLanes;
    // How far ahead of its use a block is prefetched, line by line: lines that are asked for all at once are
    // partly ignored.
    static constexpr int64_t kAheadBlocks = 4;

    template <class F>
    void each_group(const F& f) const {
        for (int64_t row = 0; row < num_rows_; row += kRows) {
            with_count<kRows>(num_rows_ - row, [&](auto rows) { f(rows, row); });
        }
    }

    template <int R, int B, class Keys>
    static void score_group(const bf16* queries, const Keys& keys, int64_t head_dim, int64_t block,
                            float* scores, int64_t width) {
        constexpr int V = B * kBlockVectors;
        const bf16* from[V];
        const bf16* ahead[V];
        Vec totals[R][V];
        for (int v = 0; v < V; ++v) {
            const int64_t offset = v % kBlockVectors * 2 * kLanes;
            from[v] = keys.at(block + v / kBlockVectors) + offset;
            ahead[v] = keys.ahead(block + kAheadBlocks + v / kBlockVectors) + offset;
            for (int r = 0; r < R; ++r) totals[r][v] = zero();
        }
        for (int64_t d = 0; d < head_dim; d += 2) {
            Pairs pairs[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) pairs[r] = broadcast_pair(queries + r * head_dim + d);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                __builtin_prefetch(ahead[v] + d * kTokens, 0, 3);
                const Pairs tokens = load_pairs(from[v] + d * kTokens);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) totals[r][v] = dot(pairs[r], tokens, totals[r][v]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) store(scores + r * width + v * kLanes, totals[r][v]);
        }
    }

    // V vectors of dimensions from d on.
    template <int R, int V, class Values>
    static void gather_group(const bf16* weights, const Values& values, int64_t head_dim, int64_t d,
                             float* out, int64_t width, bool continues) {
        Vec totals[R][V];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                totals[r][v] = continues ? load(out + r * head_dim + v * kLanes) : zero();
            }
        }
        for (int64_t block = values.first; block < values.end; ++block) {
            const bf16* from = values.at(block) + 2 * d;
            const bf16* ahead = values.ahead(block + kAheadBlocks) + 2 * d;
            for (int64_t pair = 0; pair < kTokens / 2; ++pair) {
                Pairs dims[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const int64_t offset = pair * 2 * head_dim + v * 2 * kLanes;
                    __builtin_prefetch(ahead + offset, 0, 3);
                    dims[v] = load_pairs(from + offset);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const Pairs weight =
                        broadcast_pair(weights + r * width + (block - values.first) * kTokens + 2 * pair);
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) {
                        totals[r][v] = dot(weight, dims[v], totals[r][v]);
                    }
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                store(out + r * head_dim + v * kLanes, totals[r][v]);
            }
        }
    }

    int64_t num_rows_ = 0;
};

}  // namespace lpx
