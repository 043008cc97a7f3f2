// y = x W^T in bfloat16, accumulated in float32, with AMX or dot products of pairs. W is packed once at
// load.
//
// A panel is 32 outputs: for every 32 inputs two tiles of 1 KiB (see tiles.h), one after another. A
// product streams its panels from memory in order. Inputs are padded with zeros to whole tiles.
//
// A block of rows times a panel is the unit of computation: on AMX 32 rows by 32 outputs, whose sums fill 2 x 2
// tile registers; with pairs 12 or 6 rows. If all rows are in one block, a thread takes one panel after another.
// Otherwise a task has some hundred rows and a few panels. Its loops are chunks of inputs, of which all rows stay in
// the second-level cache; panels; parts of a panel that stay in the first-level cache; and blocks.
//
// Every output is summed in the order of its inputs in one accumulator, whatever the number of rows:
// a row's result does not depend on its neighbours.
#include <utility>

#include "activations.h"
#include "kernels.h"
#include "pairs.h"
#include "pool.h"
#include "tiles.h"
#include "vec.h"

// Whether low-rank updates and products of codes in bfloat16 use dot products from now on: 1, 0, or -1 =
// where they are fast. Returns what was chosen.
LPX_EXPORT int64_t lpx_choose_pairs([[maybe_unused]] int64_t choice) {
#if defined(LPX_HAS_PAIRS)
    lpx::chosen_pairs = static_cast<int>(choice);
    return lpx::uses_pairs();
#else
    return 0;
#endif
}

#if defined(LPX_HAS_PAIRS)
#if defined(__AMX_BF16__)
#include "tiles_amx.h"
#else
#include "tiles_pairs.h"
#endif

namespace lpx {
namespace {

constexpr int64_t kTasksPerThread = 6;

struct TileProduct {
    const bf16* x;
    int64_t ldx;
    const bf16* packed;
    int64_t num_rows, num_tiles, num_panels;
};

// A row's outputs of a panel. In bfloat16 they are one cache line, which is written at once.
template <class T>
void store_panel(T* out, const float* sums) {
    for (int64_t i = 0; i < kTilePanel; i += kLanes) store(out + i, load(sums + i));
}
#if defined(__AVX512BF16__)
inline void store_panel(bf16* out, const float* sums) {
    const __m512 first = _mm512_loadu_ps(sums), last = _mm512_loadu_ps(sums + kLanes);
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(last, first));
}
#endif

// What becomes of the sums of a panel's outputs in rows [row, row + num_rows): they are stored ...
template <class T>
struct Outputs {
    T* y;
    int64_t ldy, num_outputs;

    void take(const float* sums, int64_t row, int64_t num_rows, int64_t panel) const {
        const int64_t first = panel * kTilePanel;
        const int64_t left = smaller(num_outputs - first, kTilePanel);
        T* out = y + row * ldy + first;
        for (int64_t r = 0; r < num_rows; ++r, out += ldy, sums += kTilePanel) {
            if (left == kTilePanel) {
                store_panel(out, sums);
            } else {
                for (int64_t i = 0; i < left; i += kLanes) store_n(out + i, load(sums + i), left - i);
            }
        }
    }
};

// ... or, where a panel's tiles are 16 gates and the 16 outputs that they multiply, the gates are stored
// side by side, and the other outputs after all gates ...
struct GatesAndOthers {
    bf16* y;
    int64_t ldy, width;

    void take(const float* sums, int64_t row, int64_t num_rows, int64_t panel) const {
        bf16* out = y + row * ldy + panel * kTileRows;
        for (int64_t r = 0; r < num_rows; ++r, out += ldy, sums += kTilePanel) {
            for (int64_t i = 0; i < kTileRows; i += kLanes) {
                store(out + i, load(sums + i));
                store(out + width + i, load(sums + kTileRows + i));
            }
        }
    }
};

// ... or their products are, with the bits that `lpx_elementwise` gives.
template <class Activation>
struct Gated {
    bf16* y;
    int64_t ldy;
    Activation activation;

    void take(const float* sums, int64_t row, int64_t num_rows, int64_t panel) const {
        bf16* out = y + row * ldy + panel * kTileRows;
        for (int64_t r = 0; r < num_rows; ++r, out += ldy, sums += kTilePanel) {
            for (int64_t i = 0; i < kTileRows; i += kLanes) {
                const Vec gate = rounded(load(sums + i), bf16());
                const Vec other = rounded(load(sums + kTileRows + i), bf16());
                store(out + i, gated<bf16>(activation, gate, other));
            }
        }
    }
};

// What the block of rows number `block` of `num_blocks` prefetches. A single block prefetches what
// follows in memory a few tiles later. Several blocks prefetch equal parts of the next panel, because memory
// delivers it no faster than all of them compute.
Ahead ahead_of(const bf16* weights, const bf16* next, int64_t num_tiles, int64_t block,
               int64_t num_blocks) {
    const int64_t num_bytes = num_tiles * 2 * kTileItems * sizeof(bf16);
    if (num_blocks == 1) {
        return {reinterpret_cast<const char*>(weights + PanelProduct::kAheadItems), num_bytes};
    }
    const int64_t part = ceil_div(num_bytes, num_blocks);
    return {reinterpret_cast<const char*>(next) + block * part, part};
}

// Tiles of inputs that stay in the cache for all panels of a task of `num_rows`.
int64_t chunk_of(const TileProduct& g, int64_t num_rows) {
    if (num_rows <= PanelProduct::kMaxRows) return g.num_tiles;
    const int64_t fitting = PanelProduct::kCachedBytes / (num_rows * kTileBytes);
    return smaller(g.num_tiles, smaller(fitting < 1 ? 1 : fitting, PanelProduct::kSharedTiles));
}

// A part of a product: rows [row, row + num_rows) and panels [begin, end).
struct TileTask {
    int64_t row, num_rows, begin, end;
};

// Adds the products with a panel's tiles [tile, end) to `sums`, or begins them; the last are taken by `to`.
// These tiles stay in the first-level cache while the blocks of rows pass by.
template <class To>
void multiply_part(PanelProduct& product, const TileProduct& g, const TileTask& task, int64_t panel,
                   int64_t tile, int64_t end, float* sums, const To& to) {
    const int64_t num_blocks = ceil_div(task.num_rows, PanelProduct::kMaxRows);
    const bf16* weights = g.packed + (panel * g.num_tiles + tile) * 2 * kTileItems;
    const bf16* next = weights + g.num_tiles * 2 * kTileItems;
    const bool are_kept = tile > 0 || end < g.num_tiles;
    int64_t n;
    for (int64_t block = 0, done = 0; block < num_blocks; ++block, done += n) {
        n = PanelProduct::rows_of(task.num_rows - done, num_blocks - block);
        float* out = are_kept ? sums + done * kTilePanel : sums;
        product.multiply(n, g.x + (task.row + done) * g.ldx + tile * kTileInputs, g.ldx, weights,
                         end - tile, out, tile > 0,
                         ahead_of(weights, next, end - tile, block, num_blocks), [](int64_t) {});
        if (end == g.num_tiles) to.take(out, task.row + done, n, panel);
    }
}

// Long inputs are taken in chunks. The sums are kept in float32 in between, so that chunks do not change the
// result.
template <class To>
void multiply_panels(PanelProduct& product, const TileProduct& g, const To& to, const TileTask& task) {
    const int64_t chunk = chunk_of(g, task.num_rows), panel_sums = task.num_rows * kTilePanel;
    const bool is_whole = chunk == g.num_tiles;
    float* const all_sums = scratch(0, (is_whole ? 1 : task.end - task.begin) * panel_sums);
    for (int64_t first = 0; first < g.num_tiles; first += chunk) {
        const int64_t end = smaller(first + chunk, g.num_tiles);
        for (int64_t panel = task.begin; panel < task.end; ++panel) {
            float* sums = is_whole ? all_sums : all_sums + (panel - task.begin) * panel_sums;
            for (int64_t tile = first, next; tile < end; tile = next) {
                next = tile + smaller(PanelProduct::kPartTiles, end - tile);
                multiply_part(product, g, task, panel, tile, next, sums, to);
            }
        }
    }
}

// A thread's panels of a product of a single block of rows. A panel's sums are rounded and stored while the
// next panel is multiplied, because the memory would wait for the processor otherwise.
template <class To>
class FewRows {
public:
    FewRows(const TileProduct& g, const To& to) : g_(g), to_(to) {
        for (float*& sums : sums_) sums = scratch(0, 2 * kPanelSums);
        sums_[1] += kPanelSums;
    }
    ~FewRows() { store(0, g_.num_rows); }

    void multiply(int64_t panel) {
        const bf16* weights = g_.packed + panel * g_.num_tiles * 2 * kTileItems;
        const int64_t rows = ceil_div(g_.num_rows, g_.num_tiles);
        product_.multiply(g_.num_rows, g_.x, g_.ldx, weights, g_.num_tiles, sums_[1], false,
                          ahead_of(weights, nullptr, g_.num_tiles, 0, 1), [&](int64_t tile) {
                              store(tile * rows, smaller(rows, g_.num_rows - tile * rows));
                          });
        std::swap(sums_[0], sums_[1]);
        stored_ = panel;
    }

private:
    static constexpr int64_t kPanelSums = PanelProduct::kMaxRows * kTilePanel;

    void store(int64_t row, int64_t num_rows) const {
        if (stored_ >= 0) to_.take(sums_[0] + row * kTilePanel, row, num_rows, stored_);
    }

    const TileProduct& g_;
    const To& to_;
    PanelProduct product_;
    float* sums_[2];       // of the panel that is stored, and of the one that is multiplied
    int64_t stored_ = -1;  // a panel
};

template <class To>
void multiply(const TileProduct& g, const To& to) {
    if (g.num_rows <= PanelProduct::kMaxRows) {
        const auto make = [&] { return FewRows<To>(g, to); };
        return parallel_shares(g.num_panels, make,
                               [](FewRows<To>& rows, int64_t panel) { rows.multiply(panel); });
    }
    const int64_t num_row_tasks = ceil_div(g.num_rows, PanelProduct::task_rows(g.num_tiles));
    const int64_t num_blocks = ceil_div(g.num_rows, PanelProduct::kMaxRows);
    const int64_t rows = ceil_div(num_blocks, num_row_tasks) * PanelProduct::kMaxRows;
    int64_t panels = 1;
    if (num_row_tasks > 1 || chunk_of(g, g.num_rows) < g.num_tiles) {
        panels = g.num_panels * num_row_tasks / (num_threads() * kTasksPerThread);
        panels = panels < 1 ? 1 : smaller(panels, PanelProduct::kMaxTaskPanels);
    }
    const int64_t num_panel_tasks = ceil_div(g.num_panels, panels);
    // A thread's tasks share the tile registers, whose configuration waits for all instructions before it.
    const auto make = [] { return PanelProduct(); };
    parallel_shares(num_panel_tasks * num_row_tasks, make, [&](PanelProduct& product, int64_t task) {
        const bool keeps_rows = PanelProduct::kKeepsRows;
        const int64_t row = (keeps_rows ? task / num_panel_tasks : task % num_row_tasks) * rows;
        const int64_t begin =
            (keeps_rows ? task % num_panel_tasks : task / num_row_tasks) * panels;
        if (row >= g.num_rows) return;
        multiply_panels(product, g, to, {row, smaller(g.num_rows - row, rows), begin,
                                smaller(begin + panels, g.num_panels)});
    });
}

// Rows of x with zeros up to whole tiles.
const bf16* padded(const bf16* x, int64_t ldx, int64_t num_rows, int64_t num_inputs,
                   int64_t padded_inputs) {
    bf16* copy = reinterpret_cast<bf16*>(scratch(3, num_rows * padded_inputs / 2));
    for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(copy + row * padded_inputs, x + row * ldx, num_inputs * sizeof(bf16));
        std::memset(copy + row * padded_inputs + num_inputs, 0,
                    (padded_inputs - num_inputs) * sizeof(bf16));
    }
    return copy;
}

TileProduct product_of(const void* x, int64_t ldx, const void* packed, int64_t num_rows,
                       int64_t num_inputs, int64_t num_panels) {
    TileProduct g{static_cast<const bf16*>(x), ldx, static_cast<const bf16*>(packed), num_rows,
                  tiles_of(num_inputs),        num_panels};
    if (num_inputs % kTileInputs != 0) {
        g.ldx = g.num_tiles * kTileInputs;
        g.x = padded(g.x, ldx, num_rows, num_inputs, g.ldx);
    }
    return g;
}

// One tile of a weight, of which num_rows outputs and num_inputs inputs are left; zeros for the rest.
void pack_tile(const bf16* from, int64_t ld, int64_t num_rows, int64_t num_inputs, bf16* tile) {
    if (num_rows < kTileRows || num_inputs < kTileInputs) {
        std::memset(tile, 0, kTileItems * sizeof(bf16));
    }
    const int64_t num_pairs = smaller(num_inputs, kTileInputs) / 2;
    for (int64_t row = 0; row < num_rows; ++row) {
        bf16* out = tile + 2 * row;
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            std::memcpy(out + pair * kTileInputs, from + row * ld + 2 * pair, 2 * sizeof(bf16));
        }
        if (num_inputs < kTileInputs && num_inputs % 2 != 0) {
            out[num_pairs * kTileInputs] = from[row * ld + num_inputs - 1];
        }
    }
}

}  // namespace
}  // namespace lpx

// Whether products on tiles are faster than those of gemm.cpp here.
LPX_EXPORT int64_t lpx_prefers_tiles() { return lpx::prefers_tiles(); }

// Items that `lpx_pack_tiles` writes for a weight [num_outputs, num_inputs].
LPX_EXPORT int64_t lpx_tile_items(int64_t num_outputs, int64_t num_inputs) {
    using namespace lpx;
    return ceil_div(num_outputs, kTilePanel) * 2 * tiles_of(num_inputs) * kTileItems;
}

LPX_EXPORT void lpx_pack_tiles(const void* weight, int64_t num_outputs, int64_t num_inputs,
                               void* packed) {
    using namespace lpx;
    const bf16* from = static_cast<const bf16*>(weight);
    const int64_t num_tiles = tiles_of(num_inputs);
    parallel_for(ceil_div(num_outputs, kTilePanel), [&](int64_t panel) {
        bf16* out = static_cast<bf16*>(packed) + panel * num_tiles * 2 * kTileItems;
        for (int64_t tile = 0; tile < 2 * num_tiles; ++tile, out += kTileItems) {
            const int64_t row = panel * kTilePanel + tile % 2 * kTileRows;
            const int64_t column = tile / 2 * kTileInputs;
            pack_tile(from + row * num_inputs + column, num_inputs,
                      smaller(num_outputs - row, kTileRows), num_inputs - column, out);
        }
    });
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T; x in bfloat16, y in `dtype`.
LPX_EXPORT void lpx_linear_tiles(const void* x, int64_t ldx, const void* packed, void* y,
                                 int64_t ldy, int64_t dtype, int64_t num_rows, int64_t num_inputs,
                                 int64_t num_outputs) {
    using namespace lpx;
    const TileProduct g =
        product_of(x, ldx, packed, num_rows, num_inputs, ceil_div(num_outputs, kTilePanel));
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        multiply(g, Outputs<T>{static_cast<T*>(y), ldy, num_outputs});
    });
}

// The product with a weight of `width` gates and as many other outputs, packed in groups of 16 gates and the
// 16 outputs that they multiply; x and y in bfloat16. y[num_rows, width] = activation(gates) * others; if the
// operation is kCopy, y[num_rows, 2 * width] = gates and others.
LPX_EXPORT void lpx_linear_gates(int64_t operation, const void* x, int64_t ldx, const void* packed,
                                 void* y, int64_t ldy, int64_t num_rows, int64_t num_inputs,
                                 int64_t width) {
    using namespace lpx;
    const TileProduct g = product_of(x, ldx, packed, num_rows, num_inputs, width / kTileRows);
    bf16* out = static_cast<bf16*>(y);
    const auto multiply_gated = [&](auto activation) {
        multiply(g, Gated<decltype(activation)>{out, ldy, activation});
    };
    switch (operation) {
        case kCopy: return multiply(g, GatesAndOthers{out, ldy, width});
        case kSilu: return multiply_gated([](Vec z) { return silu(z); });
        default: return multiply_gated([](Vec z) { return gelu_tanh(z); });
    }
}

#else

// Built for a processor without tiles: 0 items say so, and nobody calls the rest.
LPX_EXPORT int64_t lpx_prefers_tiles() { return 0; }
LPX_EXPORT int64_t lpx_tile_items(int64_t, int64_t) { return 0; }
LPX_EXPORT void lpx_pack_tiles(const void*, int64_t, int64_t, void*) {}
LPX_EXPORT void lpx_linear_tiles(const void*, int64_t, const void*, void*, int64_t, int64_t, int64_t,
                                 int64_t, int64_t) {}
LPX_EXPORT void lpx_linear_gates(int64_t, const void*, int64_t, const void*, void*, int64_t, int64_t,
                                 int64_t, int64_t) {}

#endif
