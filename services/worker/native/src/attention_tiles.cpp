// Attention in bfloat16, with AMX or dot products of pairs, over blocks of 16 tokens and heads of whole
// tiles.
//
// In a block, a KV head's keys lie as [pair of dimensions][token][2] and its values as [pair of
// tokens][dimension][2], as both read their right operand. No other file knows this layout. A task is 16
// query rows at most that share a KV head (some queries of one sequence, all heads of the group). It
// scores all visible keys, takes the softmax of whole rows and multiplies with the values, so a row's
// result depends neither on its neighbours nor on how its prompt was cut. Hidden positions get weight 0;
// a block's values are zeroed when its first token is written, so 0 never meets a stale NaN.
#include <cmath>
#include <vector>

#include "attention.h"
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

struct QueryTask {
    int64_t sequence, head, first, last;  // queries [first, last)
};

void write_token(const AttentionCall<bf16>& call, const Sequence& sequence, int64_t token) {
    const Layout& l = call.layout;
    const int64_t position = sequence.start + token, row = sequence.row + token;
    const int64_t slot = position % kTokens;
    bf16* block = nullptr;
    for (int64_t head = 0; head < l.num_kv_heads; ++head) {
        const int64_t offset = block_of(sequence, position / kTokens) * l.block_stride +
                              head * kTokens * l.head_dim;
        const bf16* key = call.k + row * l.ldk + head * l.head_dim;
        const bf16* value = call.v + row * l.ldv + head * l.head_dim;
        block = call.keys + offset;
        for (int64_t d = 0; d < l.head_dim; d += 2) {
            std::memcpy(block + (d / 2 * kTokens + slot) * 2, key + d, 2 * sizeof(bf16));
        }
        block = call.values + offset;
        if (slot == 0) std::memset(block, 0, kTokens * l.head_dim * sizeof(bf16));
        for (int64_t d = 0; d < l.head_dim; ++d) {
            block[(slot / 2 * l.head_dim + d) * 2 + slot % 2] = value[d];
        }
    }
}

// Softmax of scores[begin, end) and the sink of a query head, zeros elsewhere, as bfloat16; returns
// 1 / sum.
float weigh(const Layout& l, int64_t query_head, float* scores, int64_t begin, int64_t end,
            int64_t width, bf16* weights) {
    const Vec scale = set1(static_cast<float>(l.scale));
    Vec most = set1(-INFINITY);
    for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
        Vec s = mul(load(scores + j), scale);
        if (l.softcap != 0 || j < begin || j + kLanes > end) {
            float lanes[kLanes];
            store(lanes, s);
            for (int64_t i = 0; i < kLanes; ++i) {
                if (l.softcap != 0) {
                    const float cap = static_cast<float>(l.softcap);
                    lanes[i] = std::tanh(lanes[i] / cap) * cap;
                }
                if (j + i < begin || j + i >= end) lanes[i] = -INFINITY;
            }
            s = load(lanes);
        }
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
        store(weights + j, e);
    }
    return 1.0f / (sum(total) + sink);
}

// What the queries of a task see of a plane.
Blocks blocks_of(const Layout& l, const bf16* plane, const Sequence& sequence, const QueryTask& task,
                 const Blocks* then) {
    const int64_t oldest = seen_by(l, sequence, sequence.start + task.first).begin;
    const int64_t high = seen_by(l, sequence, sequence.start + task.last - 1).end;
    const int64_t items = kTokens * l.head_dim;
    return {sequence, plane, l.block_stride, items, task.head * items, oldest / kTokens,
            ceil_div(high, kTokens), then};
}

// `next`: the keys of the task that probably follows.
void attend(const AttentionCall<bf16>& call, const Sequence& sequence, const QueryTask& task,
            const Blocks* next) {
    const Layout& l = call.layout;
    const int64_t group = l.num_heads / l.num_kv_heads, head = task.head;
    const int64_t num_rows = (task.last - task.first) * group;
    const int64_t low = sequence.start + task.first;
    const Blocks values = blocks_of(l, call.values, sequence, task, next);
    const Blocks keys = blocks_of(l, call.keys, sequence, task, &values);
    const int64_t first = keys.first, end = keys.end;
    const int64_t width = (end - first) * kTokens;
    float* scores = scratch(0, num_rows * width);
    bf16* weights = reinterpret_cast<bf16*>(scratch(1, num_rows * width / 2));
    float* out = scratch(2, num_rows * l.head_dim * 2);
    bf16* queries = reinterpret_cast<bf16*>(out + num_rows * l.head_dim);
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* q = call.q + (sequence.row + task.first + row / group) * l.ldq +
                        (head * group + row % group) * l.head_dim;
        std::memcpy(queries + row * l.head_dim, q, l.head_dim * sizeof(bf16));
    }
    float factors[kTileRows];
    for (int64_t begin = 0; begin < num_rows; begin += kTileRows) {
        const int64_t n = num_rows - begin < kTileRows ? num_rows - begin : kTileRows;
        const RowProducts products(n);
        products.score(queries + begin * l.head_dim, keys, l.head_dim, first, end, scores, width);
        for (int64_t row = 0; row < n; ++row) {
            const Seen seen = seen_by(l, sequence, low + (begin + row) / group);
            const int64_t skipped = first * kTokens;
            const int64_t from = seen.begin > skipped ? seen.begin - skipped : 0;
            factors[row] = weigh(l, head * group + (begin + row) % group, scores + row * width, from,
                                 seen.end - skipped, width, weights + row * width);
        }
        products.gather(weights, values, l.head_dim, first, end, out, width);
        for (int64_t row = 0; row < n; ++row) {
            bf16* y = call.y + (sequence.row + task.first + (begin + row) / group) * l.ldy +
                      (head * group + (begin + row) % group) * l.head_dim;
            for (int64_t d = 0; d < l.head_dim; d += kLanes) {
                store(y + d, mul(load(out + row * l.head_dim + d), set1(factors[row])));
            }
        }
    }
}

}  // namespace
}  // namespace lpx

// As `lpx_attend`, in bfloat16, for heads of 32 * n dimensions and blocks of 16 tokens.
LPX_EXPORT void lpx_attend_tiles(const void* q, const void* k, const void* v, void* keys,
                                 void* values, void* y, const void* layout, const void* sequences,
                                 int64_t num_sequences) {
    using namespace lpx;
    const AttentionCall<bf16> call{*static_cast<const Layout*>(layout),
                                   static_cast<const bf16*>(q),
                                   static_cast<const bf16*>(k),
                                   static_cast<const bf16*>(v),
                                   static_cast<bf16*>(keys),
                                   static_cast<bf16*>(values),
                                   static_cast<bf16*>(y)};
    const Layout& l = call.layout;
    const Sequence* all = static_cast<const Sequence*>(sequences);
    const int64_t group = l.num_heads / l.num_kv_heads;
    const int64_t queries = group < kTileRows ? kTileRows / group : 1;
    static thread_local std::vector<QueryTask> tasks;
    tasks.clear();
    for (int64_t i = 0; i < num_sequences; ++i) {
        for (int64_t first = 0; first < all[i].num_tokens; first += queries) {
            const int64_t last = first + queries;
            const int64_t end = last < all[i].num_tokens ? last : all[i].num_tokens;
            for (int64_t head = 0; head < l.num_kv_heads; ++head) {
                tasks.push_back({i, head, first, end});
            }
        }
    }
    parallel_for(num_sequences, [&](int64_t i) {
        for (int64_t t = 0; t < all[i].num_tokens; ++t) write_token(call, all[i], t);
    });
    const std::vector<QueryTask>& plan = tasks;
    const int64_t num_tasks = static_cast<int64_t>(plan.size());
    parallel_shares(num_tasks, [&](int64_t i) {
        const QueryTask& after = plan[i + 1 < num_tasks ? i + 1 : i];
        const Blocks next = blocks_of(l, call.keys, all[after.sequence], after, nullptr);
        attend(call, all[plan[i].sequence], plan[i], &next);
    });
}

#else

// Built for a processor without tiles; never called.
LPX_EXPORT void lpx_attend_tiles(const void*, const void*, const void*, void*, void*, void*,
                                 const void*, const void*, int64_t) {}

#endif
