// Products of tiles on AMX: 8 registers of 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <initializer_list>

#include "attention.h"
#include "tiles.h"

namespace lpx {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    void set(int tile, uint8_t rows, uint16_t bytes) {
        num_rows[tile] = rows;
        row_bytes[tile] = bytes;
    }
    // Makes it that of this thread. GCC 12 knows of 8 bytes only that the instruction reads, and may drop what is
    // stored to the others.
    void load() const {
        asm volatile("" : : : "memory");
        _tile_loadconfig(this);
    }
};

// Makes the compiler write to memory what instructions on tiles are about to read.
inline void before_tiles() { asm volatile("" ::: "memory"); }

// An instruction has 16 times the multiplications of one with float32 vectors.
inline bool prefers_tiles() { return true; }

// The registers are in use from construction to destruction.
class PanelProduct {
public:
    static constexpr int64_t kMaxRows = 2 * kTileRows;
    // Bytes of a task's inputs that stay in the second-level cache while the task's panels pass by.
    static constexpr int64_t kCachedBytes = 850 << 10;
    static constexpr int64_t kSharedTiles = INT64_MAX;
    // How far ahead of its use a weight of a single block of rows is prefetched. One core reads 19 GB/s with
    // this distance, and 15 with 8 KB or without prefetching.
    static constexpr int64_t kAheadItems = kTileItems;
    // Tiles of a panel that stay in the first-level cache while a task's rows pass by: 36 KiB.
    static constexpr int64_t kPartTiles = 18;
    // Neighbouring tasks have the same rows and other panels, which are prefetched.
    static constexpr bool kKeepsRows = true;
    static constexpr int64_t kMaxTaskPanels = 16;

    // Rows of a task when there are many: their inputs, and their outputs of a panel, stay in the second-level cache.
    static int64_t task_rows(int64_t num_tiles) {
        return std::clamp<int64_t>(kCachedBytes / (num_tiles * kTileBytes), 256, 512);
    }

    // Of the next block, where num_left rows are left for num_blocks.
    static int64_t rows_of(int64_t num_left, int64_t) { return smaller(num_left, kMaxRows); }

    ~PanelProduct() { _tile_release(); }

    // sums[n][32], or what they hold if `continues`, plus the product of n rows and a panel. Calls
    // meanwhile(tile) once for each tile.
    template <class F>
    void multiply(int64_t n, const bf16* x, int64_t ldx, const bf16* panel, int64_t num_tiles,
                  float* sums, bool continues, const Ahead& ahead, const F& meanwhile) {
        if (n != configured_) configure(configured_ = n);
        if (n > kTileRows) {
            multiply_tiles<true>(x, ldx, panel, num_tiles, sums, continues, ahead, meanwhile);
        } else {
            multiply_tiles<false>(x, ldx, panel, num_tiles, sums, continues, ahead, meanwhile);
        }
    }

private:
    // Sums in tiles 0 to 3 (0, 1: the first 16 rows), left operands in 4 and 5, right operands in 6
    // and 7.
    static void configure(int64_t num_rows) {
        TileConfig config;
        const uint8_t first = static_cast<uint8_t>(num_rows < kTileRows ? num_rows : kTileRows);
        const uint8_t second =
            static_cast<uint8_t>(num_rows > kTileRows ? num_rows - kTileRows : 1);
        for (int tile : {0, 1, 4}) config.set(tile, first, kTileBytes);
        for (int tile : {2, 3, 5}) config.set(tile, second, kTileBytes);
        for (int tile : {6, 7}) config.set(tile, kTileRows, kTileBytes);
        config.load();
    }

    template <bool kTwo, class F>
    static void multiply_tiles(const bf16* x, int64_t ldx, const bf16* panel, int64_t num_tiles,
                               float* sums, bool continues, const Ahead& ahead,
                               const F& meanwhile) {
        constexpr int64_t kStride = kTilePanel * sizeof(float);
        const int64_t stride = ldx * int64_t(sizeof(bf16));
        const int64_t num_lines = ceil_div(ahead.num_bytes, num_tiles * kTileBytes);
        float* second = sums + kTileRows * kTilePanel;
        if (continues) {
            _tile_loadd(0, sums, kStride);
            _tile_loadd(1, sums + kTileRows, kStride);
            if (kTwo) {
                _tile_loadd(2, second, kStride);
                _tile_loadd(3, second + kTileRows, kStride);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (kTwo) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        // The hint that rows are not read again soon keeps them from pushing the panel out of the first-level cache.
        for (int64_t k = 0; k < num_tiles; ++k) {
            const bf16* weights = panel + k * 2 * kTileItems;
            prefetch(ahead, k, num_lines);
            meanwhile(k);
            _tile_stream_loadd(4, x + k * kTileInputs, stride);
            _tile_loadd(6, weights, kTileBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + kTileItems, kTileBytes);
            _tile_dpbf16ps(1, 4, 7);
            if (kTwo) {
                _tile_stream_loadd(5, x + kTileRows * ldx + k * kTileInputs, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, kStride);
        _tile_stored(1, sums + kTileRows, kStride);
        if (kTwo) {
            _tile_stored(2, second, kStride);
            _tile_stored(3, second + kTileRows, kStride);
        }
    }

    // To the second-level cache: the first has the weights and rows of this product.
    static void prefetch(const Ahead& ahead, int64_t tile, int64_t num_lines) {
        const char* from = ahead.from + tile * num_lines * kTileBytes;
        for (int64_t i = 0; i < num_lines; ++i) __builtin_prefetch(from + i * kTileBytes, 0, 2);
    }

    int64_t configured_ = 0;
};

// Tiles: 0 to 3 sums, 4 left operand of scores (32 dimensions), 5 left operand of values (16
// tokens), 6 keys, 7 values. In use until destruction.
class RowProducts {
public:
    // How many rows the next calls have.
    void set_rows(int64_t num_rows) {
        if (num_rows == configured_) return;
        configured_ = num_rows;
        TileConfig config;
        const uint8_t rows = static_cast<uint8_t>(num_rows);
        for (int i = 0; i < 4; ++i) config.set(i, rows, 64);
        config.set(4, rows, 64);
        config.set(5, rows, 2 * kTokens);
        config.set(6, 16, 64);
        config.set(7, kTokens / 2, 64);
        config.load();
    }
    ~RowProducts() { _tile_release(); }

    // scores[row][16 * (block - first) ...] = q . k
    template <class Keys>
    void score(const bf16* queries, const Keys& keys, int64_t head_dim, float* scores,
               int64_t width) const {
        for (int64_t block = keys.first; block < keys.end; ++block) {
            if (block + 1 < keys.end) keys.prefetch(block + 1);
            _tile_zero(0);
            for (int64_t d = 0; d < head_dim; d += kTileInputs) {
                _tile_loadd(4, queries + d, head_dim * sizeof(bf16));
                _tile_loadd(6, keys.at(block) + d * kTokens, kTileBytes);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, scores + (block - keys.first) * kTokens, width * sizeof(float));
        }
    }

    // out[row][d], or 0 unless it `continues`, plus weights . values, four tiles of dimensions at a time.
    template <class Values>
    void gather(const bf16* weights, const Values& values, int64_t head_dim, float* out, int64_t width,
                bool continues) const {
        const int64_t stride = 2 * head_dim * sizeof(bf16);
        const int64_t out_stride = head_dim * sizeof(float);
        for (int64_t d = 0; d < head_dim; d += 4 * 16) {
            const bool more = d + 32 < head_dim;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            if (continues) {
                _tile_loadd(0, out + d, out_stride);
                _tile_loadd(1, out + d + 16, out_stride);
                if (more) {
                    _tile_loadd(2, out + d + 32, out_stride);
                    _tile_loadd(3, out + d + 48, out_stride);
                }
            }
            for (int64_t block = values.first; block < values.end; ++block) {
                const bf16* from = values.at(block) + 2 * d;
                if (block + 1 < values.end) values.prefetch(block + 1);
                _tile_loadd(5, weights + (block - values.first) * kTokens, width * sizeof(bf16));
                _tile_loadd(7, from, stride);
                _tile_dpbf16ps(0, 5, 7);
                _tile_loadd(7, from + 32, stride);
                _tile_dpbf16ps(1, 5, 7);
                if (more) {
                    _tile_loadd(7, from + 64, stride);
                    _tile_dpbf16ps(2, 5, 7);
                    _tile_loadd(7, from + 96, stride);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, out + d, out_stride);
            _tile_stored(1, out + d + 16, out_stride);
            if (more) {
                _tile_stored(2, out + d + 32, out_stride);
                _tile_stored(3, out + d + 48, out_stride);
            }
        }
    }

private:
    int64_t configured_ = 0;
};

}  // namespace lpx
