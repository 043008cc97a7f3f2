// The arguments of both kinds of attention.
#pragma once
#include "abi.h"

namespace lpx {

struct Sequence {
    int64_t row, num_tokens, start, blocks;  // blocks: address of int64 ids from position 0 on
};

// Programs have as many sequences as rows, of which the last ones may have no tokens.
inline int64_t num_with_tokens(const Sequence* sequences, int64_t num_sequences) {
    while (num_sequences > 0 && sequences[num_sequences - 1].num_tokens == 0) --num_sequences;
    return num_sequences;
}

struct Layout {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t block_tokens, block_stride;  // items from a plane's block to the next
    int64_t ldq, ldk, ldv, ldy;
    double scale, softcap;  // softcap 0 = none
    int64_t window;         // 0 = none
    int64_t is_chunked;     // 1: windows do not slide but begin at multiples of their size
    int64_t sinks;          // address of a float for each head; 0 = none
    int64_t is_full;        // 1: a query sees all keys of its sequence, whatever the window
    int64_t stored;         // Dtype of keys and values: that of the queries, or codes
    // Addresses of the bf16 scales of codes, [Hkv, block_tokens] in a block; 0 = no codes.
    int64_t key_scales, value_scales;
};
static_assert(sizeof(Sequence) == 4 * 8 && sizeof(Layout) == 18 * 8, "attention/cpu.py writes these");

template <class T, class Stored = T>
struct AttentionCall {
    const Layout& layout;
    const T* q;
    const T* k;
    const T* v;
    Stored* keys;  // plane of the layer, block_stride items a block
    Stored* values;
    T* y;
};

// A sink is a score without a value: it takes a share of a head's weights.
inline bool has_sinks(const Layout& l) { return l.sinks != 0; }

inline float sink_of(const Layout& l, int64_t head) {
    return reinterpret_cast<const float*>(l.sinks)[head];
}

// Keys [begin, end) that the query at a position sees.
struct Seen {
    int64_t begin, end;
};

inline Seen seen_by(const Layout& l, const Sequence& sequence, int64_t position) {
    if (l.is_full) return {0, sequence.start + sequence.num_tokens};
    if (l.window == 0 || position < l.window) return {0, position + 1};
    const int64_t begin = l.is_chunked ? position / l.window * l.window : position - l.window + 1;
    return {begin, position + 1};
}

inline int64_t block_of(const Sequence& sequence, int64_t index) {
    return reinterpret_cast<const int64_t*>(sequence.blocks)[index];
}

// Tokens of a block whose keys and values are packed in tiles (see attention_tiles.cpp).
constexpr int64_t kTokens = 16;

// One KV head's keys or values in the blocks [first, end) of a sequence.
template <class Stored>
struct Blocks {
    const Sequence& sequence;
    const Stored* plane;
    int64_t stride, items, offset;
    int64_t first, end;
    const Blocks* then;  // what is read afterwards; null = nothing

    const Stored* at(int64_t block) const {
        return plane + block_of(sequence, block) * stride + offset;
    }
    // What to prefetch for a block that may lie behind the last one.
    const Stored* ahead(int64_t block) const {
        if (block < end) return at(block);
        if (then == nullptr) return at(end - 1);
        const int64_t index = then->first + block - end;
        return then->at(index < then->end ? index : then->end - 1);
    }
    void prefetch(int64_t block) const {
        const Stored* p = at(block);
        for (int64_t i = 0; i < items; i += 64 / sizeof(Stored)) __builtin_prefetch(p + i, 0, 3);
    }
};

}  // namespace lpx
