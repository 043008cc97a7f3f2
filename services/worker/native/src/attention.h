// The arguments of both kinds of attention.
#pragma once
#include "abi.h"

namespace lpx {

struct Sequence {
    int64_t row, num_tokens, start, blocks;  // blocks: address of int64 ids from position 0 on
};

struct Layout {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t block_tokens, block_stride;  // items from a plane's block to the next
    int64_t ldq, ldk, ldv, ldy;
    double scale, softcap;  // softcap 0 = none
    int64_t window;         // 0 = none
};
static_assert(sizeof(Sequence) == 4 * 8 && sizeof(Layout) == 12 * 8, "library.py writes these");

template <class T>
struct AttentionCall {
    const Layout& layout;
    const T* q;
    const T* k;
    const T* v;
    T* keys;  // plane of the layer, block_stride items a block
    T* values;
    T* y;
};

inline int64_t block_of(const Sequence& sequence, int64_t index) {
    return reinterpret_cast<const int64_t*>(sequence.blocks)[index];
}

// Tokens of a block whose keys and values are packed in tiles (see attention_tiles.cpp).
constexpr int64_t kTokens = 16;

// One KV head's keys or values in the blocks of a sequence.
struct Blocks {
    const Sequence& sequence;
    const bf16* plane;
    int64_t stride, items, offset;

    const bf16* at(int64_t block) const {
        return plane + block_of(sequence, block) * stride + offset;
    }
    void prefetch(int64_t block) const {
        const bf16* p = at(block);
        for (int64_t i = 0; i < items; i += 32) __builtin_prefetch(p + i, 0, 3);
    }
};

}  // namespace lpx
