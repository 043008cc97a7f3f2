// Attention in bfloat16, with AMX or dot products of pairs, over blocks of 16 tokens and heads of whole
// tiles.
//
// In a block, a KV head's keys lie as [pair of dimensions][token][2] and its values as [pair of
// tokens][dimension][2], as both read their right operand. Codes lie as [dimension][token] and
// [token][dimension]: two neighbouring rows become one of pairs when they are widened. No other file knows
// these layouts. A task is some query rows that share a KV head (some queries of one sequence, all heads of
// the group). It scores all visible keys, takes the softmax of whole rows and multiplies with the values, so
// a row's result depends neither on its neighbours nor on how its prompt was cut. Hidden positions get weight
// 0; a block's values are zeroed when its first token is written, so 0 never meets a stale NaN. Codes need
// no zeros: whatever their bits, they are widened to numbers.
#include <cmath>
#include <vector>

#include "attention.h"
#include "attention_codes.h"
#include "kernels.h"
#include "pairs.h"
#include "pool.h"
#include "tiles.h"
#include "vec.h"

#if defined(LPX_HAS_PAIRS)
#if defined(__AMX_BF16__)
#include "tiles_amx.h"
#else
#include "tiles_pairs.h"
#endif

namespace lpx {
namespace {

template <class Stored>
constexpr bool kHasCodes = sizeof(Stored) == 1;

// Rows of a task, if a query does not have more. Codes are widened once for all of them.
template <class Stored>
constexpr int64_t kTaskRows = kHasCodes<Stored> ? 4 * kTileRows : kTileRows;

struct QueryTask {
    int64_t sequence, head, first, last;  // queries [first, last)
};

// A head's key, or its value, of the token in a slot of a block.
void write_key(const bf16* key, int64_t slot, int64_t head_dim, bf16* block) {
    for (int64_t d = 0; d < head_dim; d += 2) {
        std::memcpy(block + (d / 2 * kTokens + slot) * 2, key + d, 2 * sizeof(bf16));
    }
}
void write_value(const bf16* value, int64_t slot, int64_t head_dim, bf16* block) {
    for (int64_t d = 0; d < head_dim; ++d) {
        block[(slot / 2 * head_dim + d) * 2 + slot % 2] = value[d];
    }
}

// Writes a token, or two whose values are pairs; returns how many.
int64_t write_tokens(const AttentionCall<bf16>& call, const Sequence& sequence, int64_t token) {
    const Layout& l = call.layout;
    const int64_t position = sequence.start + token, row = sequence.row + token;
    const int64_t slot = position % kTokens;
    const int64_t n = slot % 2 == 0 && token + 1 < sequence.num_tokens ? 2 : 1;
    for (int64_t head = 0; head < l.num_kv_heads; ++head) {
        const int64_t offset = block_of(sequence, position / kTokens) * l.block_stride +
                              head * kTokens * l.head_dim;
        const bf16* key = call.k + row * l.ldk + head * l.head_dim;
        const bf16* value = call.v + row * l.ldv + head * l.head_dim;
        for (int64_t i = 0; i < n; ++i) {
            write_key(key + i * l.ldk, slot + i, l.head_dim, call.keys + offset);
        }
        bf16* block = call.values + offset;
        if (slot == 0) std::memset(block, 0, kTokens * l.head_dim * sizeof(bf16));
        if (n == 1) {
            write_value(value, slot, l.head_dim, block);
            continue;
        }
        block += slot * l.head_dim;
        for (int64_t d = 0; d < l.head_dim; d += 2 * kLanes) {
            Pairs first, last;
            interleave(load_pairs(value + d), load_pairs(value + l.ldv + d), first, last);
            store_pairs(block + 2 * d, first);
            store_pairs(block + 2 * d + 2 * kLanes, last);
        }
    }
    return n;
}

template <class Stored>
int64_t write_tokens(const AttentionCall<bf16, Stored>& call, const Sequence& sequence, int64_t token) {
    const Layout& l = call.layout;
    const int64_t position = sequence.start + token, row = sequence.row + token;
    const int64_t block = block_of(sequence, position / kTokens), slot = position % kTokens;
    Stored* codes = reinterpret_cast<Stored*>(scratch(0, l.head_dim));
    for (int64_t head = 0; head < l.num_kv_heads; ++head) {
        const int64_t offset = block * l.block_stride + head * kTokens * l.head_dim;
        keep(call.k + row * l.ldk + head * l.head_dim, l.head_dim, codes,
             scale_at(l, l.key_scales, block, head, slot));
        for (int64_t d = 0; d < l.head_dim; ++d) call.keys[offset + d * kTokens + slot] = codes[d];
        keep(call.v + row * l.ldv + head * l.head_dim, l.head_dim,
             call.values + offset + slot * l.head_dim,
             scale_at(l, l.value_scales, block, head, slot));
    }
    return 1;
}

// Blocks that were codes.
struct Widened {
    const bf16* tiles;
    int64_t items, first, end;

    const bf16* at(int64_t block) const { return tiles + (block - first) * items; }
    const bf16* ahead(int64_t) const { return tiles; }
    void prefetch(int64_t) const {}
};

// Blocks that are widened before the first of them is read, and how far ahead a block's codes are
// prefetched.
constexpr int64_t kPartBlocks = 4, kAheadBlocks = 4;

// A block whose rows have `width` codes.
template <class Stored>
void widen(const Stored* codes, const Stored* ahead, int64_t items, int64_t width, bf16* pairs) {
    for (int64_t row = 0; row < items; row += 2 * width) {
        for (int64_t i = 0; i < width; i += kLanes) {
            const Stored* from = codes + row + i;
            __builtin_prefetch(ahead + row + 2 * i, 0, 3);
            store_pairs(pairs + row + 2 * i, pair_of(load(from), load(from + width)));
        }
    }
}

// Calls f with all blocks, some at a time, as `RowProducts` reads them.
template <class F>
void each_part(const Blocks<bf16>& blocks, int64_t, const F& f) {
    f(blocks);
}
template <class Stored, class F>
void each_part(const Blocks<Stored>& blocks, int64_t width, const F& f) {
    bf16* buffer = reinterpret_cast<bf16*>(scratch(3, kPartBlocks * blocks.items / 2));
    for (int64_t first = blocks.first; first < blocks.end; first += kPartBlocks) {
        const int64_t end = smaller(first + kPartBlocks, blocks.end);
        for (int64_t block = first; block < end; ++block) {
            widen(blocks.at(block), blocks.ahead(block + kAheadBlocks), blocks.items, width,
                  buffer + (block - first) * blocks.items);
        }
        f(Widened{buffer, blocks.items, first, end});
    }
}

// The scales of a head's tokens, block after block.
template <class Stored>
void copy_scales(const Layout& l, int64_t scales, const Blocks<Stored>& blocks, int64_t head, bf16* to) {
    for (int64_t block = blocks.first; block < blocks.end; ++block, to += kTokens) {
        const bf16* own = scale_at(l, scales, block_of(blocks.sequence, block), head, 0);
        std::memcpy(to, own, kTokens * sizeof(bf16));
    }
}

Vec capped(Vec s, float cap) {
    float lanes[kLanes];
    store(lanes, s);
    for (float& lane : lanes) lane = std::tanh(lane / cap) * cap;
    return load(lanes);
}

// -infinity in the lanes outside [begin, end).
Vec hidden_outside(Vec s, int64_t begin, int64_t end) {
    static constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec lane = load(kNumbers), nothing = set1(-INFINITY);
    s = select_greater(set1(static_cast<float>(end)), lane, s, nothing);
    return select_greater(lane, set1(static_cast<float>(begin - 1)), s, nothing);
}

// Softmax of scores[begin, end) and the sink of a query head, zeros elsewhere, as bfloat16; returns
// 1 / sum. Scores of codes lack the scales of keys, and get weights that have those of values.
template <class Stored>
float weigh(const Layout& l, int64_t query_head, const bf16* key_scales, const bf16* value_scales,
            float* scores, int64_t begin, int64_t end, int64_t width, bf16* weights) {
    constexpr float kFactor = factor_of(Stored());
    const Vec scale = set1(static_cast<float>(l.scale) * kFactor);
    Vec most = set1(-INFINITY);
    for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
        Vec s = mul(load(scores + j), scale);
        if constexpr (kHasCodes<Stored>) s = mul(s, load(key_scales + j));
        if (l.softcap != 0) s = capped(s, static_cast<float>(l.softcap));
        if (j < begin || j + kLanes > end) s = hidden_outside(s, begin - j, end - j);
        store(scores + j, s);
        most = max(most, s);
    }
    float maximum = largest(most), sink = 0.0f;
    if (has_sinks(l)) {
        const float score = sink_of(l, query_head);
        if (score > maximum) maximum = score;
        sink = std::exp(score - maximum);
    }
    const Vec top = set1(maximum);
    Vec total = zero();
    for (int64_t j = 0; j < width; j += kLanes) {
        if (j + kLanes <= begin || j >= end) {
            store(weights + j, zero());
            continue;
        }
        const Vec s = load(scores + j);
        const Vec e = where_greater(s, set1(-INFINITY), exp(sub(s, top)));
        total = add(total, e);
        if constexpr (kHasCodes<Stored>) {
            const Vec scaled = mul(mul(e, load(value_scales + j)), set1(kFactor));
            store(weights + j, where_greater(s, set1(-INFINITY), scaled));
        } else {
            store(weights + j, e);
        }
    }
    return 1.0f / (sum(total) + sink);
}

// What the queries of a task see of a plane.
template <class Stored>
Blocks<Stored> blocks_of(const Layout& l, const Stored* plane, const Sequence& sequence,
                         const QueryTask& task, const Blocks<Stored>* then) {
    const int64_t oldest = seen_by(l, sequence, sequence.start + task.first).begin;
    const int64_t high = seen_by(l, sequence, sequence.start + task.last - 1).end;
    const int64_t items = kTokens * l.head_dim;
    return {sequence, plane, l.block_stride, items, task.head * items, oldest / kTokens,
            ceil_div(high, kTokens), then};
}

// `next`: the keys of the task that probably follows.
template <class Stored>
void attend(RowProducts& products, const AttentionCall<bf16, Stored>& call, const Sequence& sequence,
            const QueryTask& task, const Blocks<Stored>* next) {
    const Layout& l = call.layout;
    const int64_t group = l.num_heads / l.num_kv_heads, head = task.head, dim = l.head_dim;
    const int64_t num_rows = (task.last - task.first) * group;
    const int64_t low = sequence.start + task.first;
    const Blocks<Stored> values = blocks_of<Stored>(l, call.values, sequence, task, next);
    const Blocks<Stored> keys = blocks_of<Stored>(l, call.keys, sequence, task, &values);
    const int64_t first = keys.first, width = (keys.end - first) * kTokens;
    float* scores = scratch(0, num_rows * width);
    bf16* weights = reinterpret_cast<bf16*>(scratch(1, (num_rows + 2) * width / 2));
    bf16* key_scales = weights + num_rows * width;
    bf16* value_scales = key_scales + width;
    float* out = scratch(2, num_rows * (2 * dim + 1));
    bf16* queries = reinterpret_cast<bf16*>(out + num_rows * dim);
    float* factors = out + num_rows * dim * 3 / 2;
    if constexpr (kHasCodes<Stored>) {
        copy_scales(l, l.key_scales, keys, head, key_scales);
        copy_scales(l, l.value_scales, values, head, value_scales);
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* q = call.q + (sequence.row + task.first + row / group) * l.ldq +
                        (head * group + row % group) * dim;
        std::memcpy(queries + row * dim, q, dim * sizeof(bf16));
    }
    const auto each_tile = [&](const auto& f) {
        for (int64_t row = 0; row < num_rows; row += kTileRows) {
            products.set_rows(smaller(num_rows - row, kTileRows));
            f(row);
        }
    };
    each_part(keys, kTokens, [&](const auto& part) {
        float* own = scores + (part.first - first) * kTokens;
        each_tile([&](int64_t row) {
            products.score(queries + row * dim, part, dim, own + row * width, width);
        });
    });
    for (int64_t row = 0; row < num_rows; ++row) {
        const Seen seen = seen_by(l, sequence, low + row / group);
        const int64_t skipped = first * kTokens;
        const int64_t from = seen.begin > skipped ? seen.begin - skipped : 0;
        factors[row] = weigh<Stored>(l, head * group + row % group, key_scales, value_scales,
                                     scores + row * width, from, seen.end - skipped, width,
                                     weights + row * width);
    }
    each_part(values, dim, [&](const auto& part) {
        const bf16* own = weights + (part.first - first) * kTokens;
        each_tile([&](int64_t row) {
            products.gather(own + row * width, part, dim, out + row * dim, width, part.first > first);
        });
    });
    for (int64_t row = 0; row < num_rows; ++row) {
        bf16* y = call.y + (sequence.row + task.first + row / group) * l.ldy +
                  (head * group + row % group) * dim;
        for (int64_t d = 0; d < dim; d += kLanes) {
            store(y + d, mul(load(out + row * dim + d), set1(factors[row])));
        }
    }
}

template <class Stored>
void run(const AttentionCall<bf16, Stored>& call, const Sequence* all, int64_t num_sequences) {
    const Layout& l = call.layout;
    const int64_t group = l.num_heads / l.num_kv_heads;
    const int64_t queries = group < kTaskRows<Stored> ? kTaskRows<Stored> / group : 1;
    static thread_local std::vector<QueryTask> tasks;
    tasks.clear();
    for (int64_t i = 0; i < num_sequences; ++i) {
        for (int64_t first = 0; first < all[i].num_tokens; first += queries) {
            const int64_t last = smaller(first + queries, all[i].num_tokens);
            for (int64_t head = 0; head < l.num_kv_heads; ++head) {
                tasks.push_back({i, head, first, last});
            }
        }
    }
    // A decode step's threads mostly attend to the sequences that they write to.
    parallel_shares(num_sequences, [&](int64_t i) {
        for (int64_t t = 0; t < all[i].num_tokens;) t += write_tokens(call, all[i], t);
    });
    const std::vector<QueryTask>& plan = tasks;
    const int64_t num_tasks = static_cast<int64_t>(plan.size());
    // A thread's tasks share the tile registers, whose configuration waits for all instructions before it.
    const auto make = [] { return RowProducts(); };
    parallel_shares(num_tasks, make, [&](RowProducts& products, int64_t i) {
        const QueryTask& after = plan[i + 1 < num_tasks ? i + 1 : i];
        const Blocks<Stored> next =
            blocks_of<Stored>(l, call.keys, all[after.sequence], after, nullptr);
        attend(products, call, all[plan[i].sequence], plan[i], &next);
    });
}

}  // namespace
}  // namespace lpx

// As `lpx_attend`, in bfloat16, for heads of 32 * n dimensions and blocks of 16 tokens.
LPX_EXPORT void lpx_attend_tiles(const void* q, const void* k, const void* v, void* keys,
                                 void* values, void* y, const void* layout, const void* sequences,
                                 int64_t num_sequences) {
    using namespace lpx;
    const Layout& l = *static_cast<const Layout*>(layout);
    const auto with_stored = [&](auto stored) {
        using Stored = decltype(stored);
        const AttentionCall<bf16, Stored> call{l,
                                               static_cast<const bf16*>(q),
                                               static_cast<const bf16*>(k),
                                               static_cast<const bf16*>(v),
                                               static_cast<Stored*>(keys),
                                               static_cast<Stored*>(values),
                                               static_cast<bf16*>(y)};
        const Sequence* all = static_cast<const Sequence*>(sequences);
        run(call, all, num_with_tokens(all, num_sequences));
    };
    switch (l.stored) {
        case kInt8: return with_stored(int8_t());
        case kFloat8: return with_stored(float8());
        default: return with_stored(bf16());
    }
}

#else

// Built for a processor without tiles; never called.
LPX_EXPORT void lpx_attend_tiles(const void*, const void*, const void*, void*, void*, void*,
                                 const void*, const void*, int64_t) {}

#endif
