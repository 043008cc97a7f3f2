// The second half of an update, B times what A leaves, added to a window of outputs at a time.
#pragma once
#include <algorithm>

#include "activations.h"
#include "kernels.h"
#include "lora_pairs.h"
#include "lora_segments.h"
#include "lora_tiles.h"
#include "lora_vectors.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

// What a thread keeps from task to task.
struct Thread {
    explicit Thread(bool uses_tiles) : tiles(uses_tiles) {}

    TileUpdates tiles;
    const Tile* after = nullptr;  // what is read after the adapter at hand, or null
};

// Rows of a tile that are read first, side by side.
constexpr int64_t kFirstRows = kHasUpdateTiles ? kTileRows : kSideRows;

// These rows of a tile, or nothing if it is null.
Following beginning_of(const Tile* tile) {
    if (tile == nullptr) return {nullptr, 0};
    const int64_t num_rows = smaller(tile->row_end - tile->row_begin, kFirstRows);
    int64_t num_bytes = num_rows * (tile->col_end - tile->col_begin);
    with_tile(tile->dtype, [&](auto w) { num_bytes *= sizeof w; });
    return {reinterpret_cast<const void*>(tile->address), num_bytes};
}

// What is read after a tile of A or B.
Following following(const Entry& entry, const Tile& tile, const Thread& thread) {
    const bool is_last = &tile + 1 == entry.b() + entry.num_b;
    return beginning_of(is_last ? thread.after : &tile + 1);
}

// Whether rows of T may be multiplied on tiles or in pairs, and whether they are with this matrix.
template <class T>
constexpr bool kMayTile = kHasUpdateTiles && std::is_same<T, bf16>::value;
template <class T>
constexpr bool kMayPair = kHasPairs && !kHasUpdateTiles && std::is_same<T, bf16>::value;
template <class T>
bool on_tiles(const Tile& tile) {
    return kMayTile<T> && tile.dtype == kBfloat16;
}
template <class T>
bool in_pairs(const Tile& tile) {
    if constexpr (kMayPair<T>) return tile.dtype == kBfloat16 && uses_pairs();
    return false;
}

inline const bf16* matrix_of(const Tile& tile) { return reinterpret_cast<const bf16*>(tile.address); }

template <class W>
void expand_tile(float* y, int64_t ldy, int64_t num_rows, const Tile& tile, const float* shrunk,
                 int64_t ld, const Following& next) {
    expand_vectors(y + tile.col_begin, ldy, num_rows, reinterpret_cast<const W*>(tile.address),
                   tile.row_end - tile.row_begin, tile.col_end - tile.col_begin,
                   shrunk + tile.row_begin, ld, next);
}

// Outputs [begin, end) of a site, whose sums a task keeps as floats at the same time.
struct Window {
    int64_t begin, end;
};

// Calls f(tile, factors) for each tile of B, with its place among `factors` of num_rows rows where it is multiplied
// on tiles.
template <class T, class F>
void each_b(const Entry& entry, int64_t num_rows, bf16*& factors, const F& f) {
    for (const Tile* tile = entry.b(); tile < entry.b() + entry.num_b; ++tile) {
        f(*tile, factors);
        if constexpr (kMayTile<T>) {
            if (!on_tiles<T>(*tile)) continue;
            factors += num_rows * TileUpdates::factors_of(tile->row_end - tile->row_begin);
        }
    }
}

// `shrunk` of all adapters of a segment in bfloat16, in the order of `each_b`.
template <class T>
bf16* narrow_all(const Use* begin, const Use* end, int64_t num_rows, const float* shrunk) {
    if constexpr (kMayTile<T>) {
        int64_t num_items = 0;
        for (const Use* use = begin; use < end; ++use) {
            const Entry& entry = *use->entry;
            for (const Tile* tile = entry.b(); tile < entry.b() + entry.num_b; ++tile) {
                num_items += num_rows * TileUpdates::factors_of(tile->row_end - tile->row_begin);
            }
        }
        bf16* const all = reinterpret_cast<bf16*>(scratch(3, num_items / 2 + 1));
        bf16* factors = all;
        for (const Use* use = begin; use < end; ++use) {
            const int64_t ld = use->entry->rank;
            each_b<T>(*use->entry, num_rows, factors, [&](const Tile& tile, bf16* to) {
                if (!on_tiles<T>(tile)) return;
                TileUpdates::narrow(shrunk + tile.row_begin, ld, num_rows,
                                    tile.row_end - tile.row_begin, to);
            });
            shrunk += num_rows * ld;
        }
        return all;
    }
    return nullptr;
}

// y += shrunk B for all tiles of B in a window, at which y begins. Only tiles of bfloat16 are divided. Takes what
// is the adapter's of `factors`.
template <class T>
void expand(const Entry& entry, float* y, int64_t ldy, int64_t num_rows, const Window& window,
            const float* shrunk, bf16*& factors, Thread& thread) {
    const int64_t ld = entry.rank, num_items = num_rows * entry.rank;
    bf16* narrow = nullptr;
    each_b<T>(entry, num_rows, factors, [&](const Tile& tile, const bf16* own) {
        if constexpr (kMayTile<T>) {
            if (on_tiles<T>(tile)) {
                const int64_t begin = std::max(tile.col_begin, window.begin);
                const int64_t end = std::min(tile.col_end, window.end);
                if (begin >= end) return;
                return thread.tiles.expand(
                    y + begin - window.begin, ldy, num_rows,
                    matrix_of(tile) + begin - tile.col_begin, tile.row_end - tile.row_begin,
                    end - begin, tile.col_end - tile.col_begin, tile.col_end - end, own,
                    following(entry, tile, thread));
            }
        }
        if constexpr (kMayPair<T>) {
            if (in_pairs<T>(tile)) {
                if (narrow == nullptr) {
                    narrow = reinterpret_cast<bf16*>(scratch(3, num_items / 2 + 1));
                    for (int64_t i = 0; i < num_items; i += kLanes) {
                        store_n(narrow + i, load_n(shrunk + i, num_items - i), num_items - i);
                    }
                }
                return expand_pairs(y + tile.col_begin, ldy, num_rows, matrix_of(tile),
                                    tile.row_end - tile.row_begin, tile.col_end - tile.col_begin,
                                    narrow + tile.row_begin, ld);
            }
        }
        with_tile(tile.dtype, [&](auto w) {
            expand_tile<decltype(w)>(y, ldy, num_rows, tile, shrunk, ld,
                                     following(entry, tile, thread));
        });
    });
}

// Calls f(y, value) for each output in a window that the one-row float32 tiles cover, in every row.
template <class F>
void each_output(const Tile* tiles, int64_t num_tiles, float* y, int64_t ldy, int64_t num_rows,
                 const Window& window, const F& f) {
    for (int64_t i = 0; i < num_tiles; ++i) {
        const Tile& tile = tiles[i];
        const float* values = reinterpret_cast<const float*>(tile.address) - tile.col_begin;
        const int64_t begin = std::max(tile.col_begin, window.begin);
        const int64_t end = std::min(tile.col_end, window.end);
        for (int64_t row = 0; row < num_rows; ++row) {
            float* out = y + row * ldy;
            for (int64_t c = begin; c < end; ++c) f(out[c - window.begin], values[c]);
        }
    }
}

// Adds all adapters of a segment to y, where the window begins.
template <class T>
void add_window(const Use* begin, const Use* end, const float* shrunk, bf16* factors, float* y,
                int64_t ldy, int64_t num_rows, const Window& window, Thread& thread) {
    for (const Use* use = begin; use < end; ++use) {
        const Entry& entry = *use->entry;
        expand<T>(entry, y, ldy, num_rows, window, shrunk, factors, thread);
        shrunk += num_rows * entry.rank;
        each_output(entry.lora_biases(), entry.num_lora_biases, y, ldy, num_rows, window,
                    [use](float& out, float bias) { out += use->coef * bias; });
    }
    for (const Use* use = begin; use < end; ++use) {
        each_output(use->entry->gains(), use->entry->num_gains, y, ldy, num_rows, window,
                    [](float& out, float gain) { out *= gain; });
    }
    for (const Use* use = begin; use < end; ++use) {
        each_output(use->entry->biases(), use->entry->num_biases, y, ldy, num_rows, window,
                    [](float& out, float bias) { out += bias; });
    }
}

// Where act(gates) * others goes: rows of half as many outputs as a site has, which are gates and as many others
// that they multiply. Null = outputs stay outputs.
struct Gates {
    int64_t operation;
    bf16* out;
    int64_t ld;
};

// Stores act(gates) * others for n outputs of each row, with the bits that `lpx_elementwise` gives.
template <class Activation>
void store_gated(const Activation& activation, const float* gates, const float* others, int64_t ldy,
                 int64_t num_rows, int64_t n, bf16* out, int64_t ld) {
    for (int64_t row = 0; row < num_rows; ++row, gates += ldy, others += ldy, out += ld) {
        for (int64_t c = 0; c < n; c += kLanes) {
            const Vec gate = rounded(load_n(gates + c, n - c), bf16());
            const Vec other = rounded(load_n(others + c, n - c), bf16());
            store_n(out + c, gated<bf16>(activation, gate, other), n - c);
        }
    }
}

// Outputs of a window: as many as the first-level cache holds for all rows. Few rows need none, and read B in
// the order of memory.
inline int64_t window_of(const Use* begin, const Use* end, int64_t num_rows, int64_t num_outputs) {
    constexpr int64_t kBytes = 32 << 10, kItems = 64;
    if (num_rows <= TileUpdates::kFewRows) return num_outputs;
    for (const Use* use = begin; use < end; ++use) {
        const Entry& entry = *use->entry;
        for (const Tile* tile = entry.b(); tile < entry.b() + entry.num_b; ++tile) {
            if (!on_tiles<bf16>(*tile)) return num_outputs;
        }
    }
    return smaller(num_outputs, kBytes / int64_t(sizeof(float)) / num_rows / kItems * kItems);
}

}  // namespace
}  // namespace lpx
