// AMX tiles: 8 registers of 16 rows of 64 bytes.
#pragma once
#include <immintrin.h>

#include <initializer_list>

#include "abi.h"

namespace lpx {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row
constexpr int64_t kTileInputs = 32;
constexpr int64_t kTileItems = kTileRows * kTileInputs;

inline int64_t tiles_of(int64_t num_inputs) { return (num_inputs + kTileInputs - 1) / kTileInputs; }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    void set(int tile, uint8_t rows, uint16_t bytes) {
        num_rows[tile] = rows;
        row_bytes[tile] = bytes;
    }
};

// For products of up to 32 rows: sums in tiles 0 to 3 (0, 1: the first 16 rows), left operands in 4
// and 5, right operands in 6 and 7. Zeroes all tiles.
inline void configure_tiles(int64_t num_rows) {
    TileConfig config;
    const uint8_t first = static_cast<uint8_t>(num_rows < kTileRows ? num_rows : kTileRows);
    const uint8_t second = static_cast<uint8_t>(num_rows > kTileRows ? num_rows - kTileRows : 1);
    for (int tile : {0, 1, 4}) config.set(tile, first, kTileBytes);
    for (int tile : {2, 3, 5}) config.set(tile, second, kTileBytes);
    for (int tile : {6, 7}) config.set(tile, kTileRows, kTileBytes);
    _tile_loadconfig(&config);
}

}  // namespace lpx
