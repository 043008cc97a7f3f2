// y = x W^T in bfloat16 on AMX tiles, accumulated in float32. W is packed once at load.
//
// A panel is 32 outputs: for every 32 inputs two tiles of 1 KiB, one after another, each 16 rows of
// (16 outputs x 2 neighbouring inputs), as TDPBF16PS reads its right operand. A product streams its
// panels from memory in order. Inputs are padded with zeros to whole tiles.
//
// Every output is summed in the order of its inputs in one accumulator, whatever the number of rows:
// a row's result does not depend on its neighbours.
#include "pool.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#include "tiles.h"

namespace lpx {
namespace {

constexpr int64_t kPanel = 2 * kTileRows;
constexpr int64_t kBlockRows = 2 * kTileRows;
// Rows of one task when there are many: their inputs stay in the second-level cache.
constexpr int64_t kTaskRows = 256;
// Outputs of one task: few enough to share out, enough to outweigh claiming it.
constexpr int64_t kTasksPerThread = 6;
constexpr int64_t kMaxTaskPanels = 12;

struct TileProduct {
    const bf16* x;
    int64_t ldx;
    const bf16* packed;
    int64_t num_rows, num_tiles, num_outputs, ldy;
};

// sums[32][32] = the product of up to 32 rows and one panel.
template <bool kTwo>
void multiply_tiles(const TileProduct& g, const bf16* x, const bf16* panel, float* sums) {
    const int64_t stride = g.ldx * int64_t(sizeof(bf16));
    _tile_zero(0);
    _tile_zero(1);
    if (kTwo) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < g.num_tiles; ++k) {
        const bf16* weights = panel + k * 2 * kTileItems;
        _tile_loadd(4, x + k * kTileInputs, stride);
        _tile_loadd(6, weights, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + kTileItems, kTileBytes);
        _tile_dpbf16ps(1, 4, 7);
        if (kTwo) {
            _tile_loadd(5, x + kTileRows * g.ldx + k * kTileInputs, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    constexpr int64_t kStride = kPanel * sizeof(float);
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + kTileRows, kStride);
    if (kTwo) {
        _tile_stored(2, sums + kTileRows * kPanel, kStride);
        _tile_stored(3, sums + kTileRows * kPanel + kTileRows, kStride);
    }
}

template <class T>
void multiply_panels(const TileProduct& g, T* y, int64_t row, int64_t num_rows, int64_t begin,
                     int64_t end) {
    alignas(64) float sums[kBlockRows * kPanel];
    int64_t configured = 0;
    for (int64_t panel = begin; panel < end; ++panel) {
        const bf16* weights = g.packed + panel * g.num_tiles * 2 * kTileItems;
        const int64_t first = panel * kPanel;
        const int64_t left = g.num_outputs - first < kPanel ? g.num_outputs - first : kPanel;
        for (int64_t block = 0; block < num_rows; block += kBlockRows) {
            const int64_t n = num_rows - block < kBlockRows ? num_rows - block : kBlockRows;
            const bf16* x = g.x + (row + block) * g.ldx;
            if (n != configured) configure_tiles(configured = n);
            if (n > kTileRows) {
                multiply_tiles<true>(g, x, weights, sums);
            } else {
                multiply_tiles<false>(g, x, weights, sums);
            }
            for (int64_t r = 0; r < n; ++r) {
                T* out = y + (row + block + r) * g.ldy + first;
                store_n(out, load(sums + r * kPanel), left);
                if (left > kLanes) {
                    store_n(out + kLanes, load(sums + r * kPanel + kLanes), left - kLanes);
                }
            }
        }
    }
    _tile_release();
}

template <class T>
void multiply(const TileProduct& g, T* y) {
    const int64_t num_panels = (g.num_outputs + kPanel - 1) / kPanel;
    const int64_t num_row_tasks = (g.num_rows + kTaskRows - 1) / kTaskRows;
    int64_t panels = num_panels * num_row_tasks / (num_threads() * kTasksPerThread);
    panels = panels < 1 ? 1 : panels > kMaxTaskPanels ? kMaxTaskPanels : panels;
    parallel_for((num_panels + panels - 1) / panels * num_row_tasks, [&](int64_t task) {
        const int64_t begin = task / num_row_tasks * panels;
        const int64_t end = begin + panels < num_panels ? begin + panels : num_panels;
        const int64_t row = task % num_row_tasks * kTaskRows;
        const int64_t left = g.num_rows - row;
        multiply_panels(g, y, row, left < kTaskRows ? left : kTaskRows, begin, end);
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

}  // namespace
}  // namespace lpx

// Items that `lpx_pack_tiles` writes for a weight [num_outputs, num_inputs].
LPX_EXPORT int64_t lpx_tile_items(int64_t num_outputs, int64_t num_inputs) {
    using namespace lpx;
    return (num_outputs + kPanel - 1) / kPanel * 2 * tiles_of(num_inputs) * kTileItems;
}

LPX_EXPORT void lpx_pack_tiles(const void* weight, int64_t num_outputs, int64_t num_inputs,
                               void* packed) {
    using namespace lpx;
    const bf16* from = static_cast<const bf16*>(weight);
    const int64_t num_tiles = tiles_of(num_inputs);
    parallel_for((num_outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
        bf16* out = static_cast<bf16*>(packed) + panel * num_tiles * 2 * kTileItems;
        for (int64_t i = 0; i < num_tiles * 2 * kTileItems; ++i) {
            const int64_t k = i / (2 * kTileItems) * kTileInputs + i % kTileItems / 32 * 2 + i % 2;
            const int64_t row =
                panel * kPanel + i / kTileItems % 2 * kTileRows + i % 32 / 2;
            out[i] = row < num_outputs && k < num_inputs ? from[row * num_inputs + k] : bf16();
        }
    });
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T; x in bfloat16, y in `dtype`.
LPX_EXPORT void lpx_linear_tiles(const void* x, int64_t ldx, const void* packed, void* y,
                                 int64_t ldy, int64_t dtype, int64_t num_rows, int64_t num_inputs,
                                 int64_t num_outputs) {
    using namespace lpx;
    TileProduct g{static_cast<const bf16*>(x), ldx, static_cast<const bf16*>(packed), num_rows,
                  tiles_of(num_inputs),        num_outputs, ldy};
    if (num_inputs % kTileInputs != 0) {
        g.ldx = g.num_tiles * kTileInputs;
        g.x = padded(g.x, ldx, num_rows, num_inputs, g.ldx);
    }
    with_activation(dtype, [&](auto t) { multiply(g, static_cast<decltype(t)*>(y)); });
}

#else

// Built for a processor without tiles: 0 items say so, and nobody calls the rest.
LPX_EXPORT int64_t lpx_tile_items(int64_t, int64_t) { return 0; }
LPX_EXPORT void lpx_pack_tiles(const void*, int64_t, int64_t, void*) {}
LPX_EXPORT void lpx_linear_tiles(const void*, int64_t, const void*, void*, int64_t, int64_t, int64_t,
                                 int64_t, int64_t) {}

#endif
