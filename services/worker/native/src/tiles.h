// The order in which bfloat16 weights, keys and values are packed for pairwise dot products.
//
// A tile is 16 rows of 64 bytes: 16 outputs by 2 neighbouring inputs in each row, 32 inputs in all.
// TDPBF16PS (AMX) reads a whole tile as its right operand, and a dot product of pairs one row. Both
// instruction sets share this layout, and everything but the innermost loops.
#pragma once
#include "abi.h"

namespace lpx {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row
constexpr int64_t kTileInputs = 32;
constexpr int64_t kTileItems = kTileRows * kTileInputs;

// Outputs of a panel: two tiles side by side.
constexpr int64_t kTilePanel = 2 * kTileRows;

inline int64_t tiles_of(int64_t num_inputs) { return ceil_div(num_inputs, kTileInputs); }

// Bytes that a product prefetches, a part with each of its tiles. The hardware's prefetchers alone reach a third
// of the bandwidth there.
struct Ahead {
    const char* from;
    int64_t num_bytes;
};

}  // namespace lpx
