// Paged attention: writes a step's keys and values into the cache, then attends.
//
// A task is one sequence, one KV head and a few queries; the G query heads that share the KV head
// go through each block of keys together. The softmax is kept as a running maximum and sum, block by
// block from the first visible one, so a query's result depends neither on its neighbours nor on how
// its prompt was cut into chunks. Blocks begin at multiples of the block length. Hidden positions may hold
// any bytes: their scores are replaced, and their values are skipped, never multiplied by zero.
#include <cmath>

#include "attention.h"
#include "attention_codes.h"
#include "kernels.h"
#include "lane_sums.h"
#include "pool.h"
#include "prefetching.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr int64_t kTaskQueries = 8;
constexpr int64_t kMaxBlockTokens = 64;
// Query heads whose sums stay in registers while values pass by.
constexpr int64_t kValueRows = 3;

// Keys and values lie as [Hkv, block_tokens, D] in a block.
template <class T, class Stored>
void write_token(const AttentionCall<T, Stored>& call, const Sequence& sequence, int64_t token) {
    const Layout& l = call.layout;
    const int64_t position = sequence.start + token, row = sequence.row + token;
    const int64_t block = block_of(sequence, position / l.block_tokens);
    const int64_t slot = position % l.block_tokens;
    for (int64_t head = 0; head < l.num_kv_heads; ++head) {
        const int64_t offset = block * l.block_stride + (head * l.block_tokens + slot) * l.head_dim;
        const int64_t from = head * l.head_dim;
        keep(call.k + row * l.ldk + from, l.head_dim, call.keys + offset,
             scale_at(l, l.key_scales, block, head, slot));
        keep(call.v + row * l.ldv + from, l.head_dim, call.values + offset,
             scale_at(l, l.value_scales, block, head, slot));
    }
}

// values[j] times the scales of a block's tokens and a factor, for j in [begin, end).
inline void rescale(const bf16* scales, float factor, int64_t begin, int64_t end, float* values) {
    for (int64_t j = begin; j < end; ++j) values[j] *= widened_scale(scales[j]) * factor;
}

// Queries [first, last) of a sequence with the query heads of one KV head.
struct QueryTask {
    const Sequence* sequence;
    int64_t head, first, last;
};

// Keys that any query of a task sees.
inline Seen seen_by(const Layout& l, const QueryTask& task) {
    const int64_t start = task.sequence->start;
    return {seen_by(l, *task.sequence, start + task.first).begin,
            seen_by(l, *task.sequence, start + task.last - 1).end};
}

// Where a block of a task's keys or values begins in a plane.
inline int64_t offset_of(const Layout& l, const QueryTask& task, int64_t block) {
    return block_of(*task.sequence, block) * l.block_stride + task.head * l.block_tokens * l.head_dim;
}

// Running softmax of one query: the largest score, and the sum of the weights relative to it.
struct Running {
    float maximum, sum;
};

// scores[j] = q . keys[j] for j in [begin, end), and for other tokens of the same vectors.
template <class T>
void score(const float* q, const T* keys, int64_t head_dim, int64_t block_tokens, int64_t begin,
           int64_t end, float* scores) {
    int64_t j = begin / kLanes * kLanes;
    for (; j < end && j + kLanes <= block_tokens; j += kLanes) {
        Vec sums[kLanes];
#pragma GCC unroll 16
        for (Vec& total : sums) total = zero();
        const auto add = [&](int64_t d, auto load_at) {
            const Vec query = load(q + d);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                sums[i] = fma(query, load_at(keys + (j + i) * head_dim + d), sums[i]);
            }
        };
        int64_t d = 0;
        for (; d + kLanes <= head_dim; d += kLanes) add(d, [](const T* p) { return load(p); });
        if (d < head_dim) add(d, [n = head_dim - d](const T* p) { return load_n(p, n); });
        store(scores + j, sums_of(sums));
    }
    for (; j < end; ++j) {
        Vec total = zero();
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            total = fma(load(q + d), load_n(keys + j * head_dim + d, head_dim - d), total);
        }
        scores[j] = sum(total);
    }
}

inline float largest_lane(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int n = kLanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
    }
    return lanes[0];
}

// Turns scores [begin, end) into weights relative to the running maximum; rescales what was summed. Other scores
// of the same vectors are changed, too: they count as minus infinity.
void weigh(const Layout& l, int64_t begin, int64_t end, float* scores, Running& running, float* out,
           int64_t padded_dim) {
    const int64_t first = begin / kLanes * kLanes, last = ceil_div(end, kLanes) * kLanes;
    if (l.softcap != 0) {
        const float scale = static_cast<float>(l.scale), cap = static_cast<float>(l.softcap);
        for (int64_t j = begin; j < end; ++j) scores[j] = std::tanh(scores[j] * scale / cap) * cap;
    }
    for (int64_t j = first; j < begin; ++j) scores[j] = -INFINITY;
    for (int64_t j = end; j < last; ++j) scores[j] = -INFINITY;
    const Vec scale = set1(l.softcap != 0 ? 1.0f : static_cast<float>(l.scale));
    Vec most = set1(running.maximum);
    for (int64_t j = first; j < last; j += kLanes) {
        const Vec s = mul(load(scores + j), scale);
        store(scores + j, s);
        most = max(s, most);
    }
    const float maximum = largest_lane(most);
    if (maximum > running.maximum) {
        const float factor = std::exp(running.maximum - maximum);
        running.sum *= factor;
        for (int64_t d = 0; d < padded_dim; d += kLanes) {
            store(out + d, mul(load(out + d), set1(factor)));
        }
        running.maximum = maximum;
    }
    Vec total = zero();
    for (int64_t j = first; j < last; j += kLanes) {
        const Vec weight = exp(sub(load(scores + j), set1(maximum)));
        store(scores + j, weight);
        total = add(total, weight);
    }
    running.sum += sum(total);
}

// V vectors of R rows of out += sum of weights[row][j] * values[j] for j in [begin, end).
template <int R, int V, class T>
void gather_vectors(const float (*weights)[kMaxBlockTokens], const T* values, int64_t head_dim,
                    int64_t begin, int64_t end, int64_t left, float* out, int64_t stride) {
    Vec sums[R][V];
    for (int r = 0; r < R; ++r) {
        for (int i = 0; i < V; ++i) sums[r][i] = load(out + r * stride + i * kLanes);
    }
    for (int64_t j = begin; j < end; ++j) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            const T* from = values + j * head_dim + i * kLanes;
            const Vec value = V > 1 ? load(from) : load_n(from, left);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[r][i] = fma(set1(weights[r][j]), value, sums[r][i]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int i = 0; i < V; ++i) store(out + r * stride + i * kLanes, sums[r][i]);
    }
}

// The same for all dimensions.
template <int R, class T>
void gather(const float (*weights)[kMaxBlockTokens], const T* values, int64_t head_dim, int64_t begin,
            int64_t end, float* out, int64_t stride) {
    constexpr int V = R == 1 ? 64 / kLanes : 4;  // enough sums that none waits for the one before
    int64_t d = 0;
    for (; d + V * kLanes <= head_dim; d += V * kLanes) {
        gather_vectors<R, V>(weights, values + d, head_dim, begin, end, 0, out + d, stride);
    }
    for (; d < head_dim; d += kLanes) {
        gather_vectors<R, 1>(weights, values + d, head_dim, begin, end, head_dim - d, out + d, stride);
    }
}

template <class T>
void gather_rows(int64_t num_rows, const float (*weights)[kMaxBlockTokens], const T* values,
                 int64_t head_dim, int64_t begin, int64_t end, float* out, int64_t stride) {
    static_assert(kValueRows == 3, "cases");
    switch (num_rows) {
        case 1: return gather<1>(weights, values, head_dim, begin, end, out, stride);
        case 2: return gather<2>(weights, values, head_dim, begin, end, out, stride);
        default: return gather<3>(weights, values, head_dim, begin, end, out, stride);
    }
}

// Attention of a task's queries. Keys and values of the next block are prefetched meanwhile, and at the end those
// of `then`, the next task.
template <class T, class Stored>
void attend(const AttentionCall<T, Stored>& call, const QueryTask& task, const QueryTask& then) {
    const Layout& l = call.layout;
    const Sequence& sequence = *task.sequence;
    const int64_t head = task.head, first = task.first;
    const int64_t group = l.num_heads / l.num_kv_heads;
    const int64_t num_rows = (task.last - first) * group;
    const int64_t padded = (l.head_dim + kLanes - 1) / kLanes * kLanes;
    float* queries = scratch(0, num_rows * padded);
    float* outputs = scratch(1, num_rows * padded);
    Running* running = reinterpret_cast<Running*>(scratch(2, 2 * num_rows));
    std::memset(outputs, 0, num_rows * padded * sizeof(float));
    for (int64_t row = 0; row < num_rows; ++row) {
        running[row] = {-INFINITY, 0.0f};
        if (has_sinks(l)) running[row] = {sink_of(l, head * group + row % group), 1.0f};
        const T* q = call.q + (sequence.row + first + row / group) * l.ldq +
                     (head * group + row % group) * l.head_dim;
        for (int64_t d = 0; d < padded; d += kLanes) {
            store(queries + row * padded + d, load_n(q + d, l.head_dim - d));
        }
    }
    const int64_t low = sequence.start + first;
    const Seen all = seen_by(l, task);
    const int64_t block_bytes = l.block_tokens * l.head_dim * sizeof(Stored);
    for (int64_t block = all.begin / l.block_tokens; block * l.block_tokens < all.end; ++block) {
        const int64_t begin = block * l.block_tokens;
        const int64_t id = block_of(sequence, block), offset = offset_of(l, task, block);
        const bool is_last = begin + l.block_tokens >= all.end;
        const int64_t next = is_last ? offset_of(l, then, seen_by(l, then).begin / l.block_tokens)
                                     : offset_of(l, task, block + 1);
        Prefetching next_keys({call.keys + next, block_bytes}, num_rows);
        Prefetching next_values({call.values + next, block_bytes}, num_rows);
        for (int64_t row = 0, count; row < num_rows; row += count) {
            count = smaller(kValueRows, group - row % group);
            const Seen seen = seen_by(l, sequence, low + row / group);
            const int64_t from = seen.begin > begin ? seen.begin - begin : 0;
            const int64_t to = smaller(seen.end - begin, l.block_tokens);
            if (from >= to) continue;
            alignas(64) float weights[kValueRows][kMaxBlockTokens];
            float* out = outputs + row * padded;
            for (int64_t i = 0; i < count; ++i) {
                float* scores = weights[i];
                next_keys.step();
                next_values.step();
                score(queries + (row + i) * padded, call.keys + offset, l.head_dim, l.block_tokens, from,
                      to, scores);
                constexpr float kFactor = factor_of(Stored());
                if (l.key_scales) {
                    rescale(scale_at(l, l.key_scales, id, head, 0), kFactor, from, to, scores);
                }
                weigh(l, from, to, scores, running[row + i], out + i * padded, padded);
                if (l.key_scales) {
                    rescale(scale_at(l, l.value_scales, id, head, 0), kFactor, from, to, scores);
                }
            }
            gather_rows(count, weights, call.values + offset, l.head_dim, from, to, out, padded);
        }
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        const Vec factor = set1(1.0f / running[row].sum);
        T* y = call.y + (sequence.row + first + row / group) * l.ldy +
               (head * group + row % group) * l.head_dim;
        for (int64_t d = 0; d < l.head_dim; d += kLanes) {
            store_n(y + d, mul(load(outputs + row * padded + d), factor), l.head_dim - d);
        }
    }
}

template <class T, class Stored>
void run(const AttentionCall<T, Stored>& call, const Sequence* sequences, int64_t num_sequences,
         const int64_t* task_ends) {
    if (num_sequences == 0) return;
    const int64_t num_kv_heads = call.layout.num_kv_heads;
    parallel_for(num_sequences, [&](int64_t i) {
        for (int64_t t = 0; t < sequences[i].num_tokens; ++t) write_token(call, sequences[i], t);
    });
    const auto task_at = [&](int64_t index) {
        const int64_t task = index / num_kv_heads;
        int64_t i = 0, end = num_sequences - 1;
        while (i < end) {
            const int64_t middle = (i + end) / 2;
            if (task_ends[middle] > task) {
                end = middle;
            } else {
                i = middle + 1;
            }
        }
        const int64_t first = (task - (i ? task_ends[i - 1] : 0)) * kTaskQueries;
        const int64_t last = smaller(first + kTaskQueries, sequences[i].num_tokens);
        return QueryTask{&sequences[i], index % num_kv_heads, first, last};
    };
    const int64_t num_tasks = task_ends[num_sequences - 1] * num_kv_heads;
    parallel_shares(num_tasks, [&](int64_t index) {
        attend(call, task_at(index), task_at(smaller(index + 1, num_tasks - 1)));
    });
}

}  // namespace
}  // namespace lpx

// Queries of one task: a sequence of n tokens takes ceil(n / this) tasks a KV head.
LPX_EXPORT int64_t lpx_task_queries() { return lpx::kTaskQueries; }

// `task_ends[i]`: tasks, per KV head, of sequences 0 to i.
LPX_EXPORT void lpx_attend(const void* q, const void* k, const void* v, void* keys, void* values,
                           void* y, int64_t dtype, const void* layout, const void* sequences,
                           const void* task_ends, int64_t num_sequences) {
    using namespace lpx;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        const auto with_stored = [&](auto stored) {
            using Stored = decltype(stored);
            const AttentionCall<T, Stored> call{*static_cast<const Layout*>(layout),
                                                static_cast<const T*>(q),
                                                static_cast<const T*>(k),
                                                static_cast<const T*>(v),
                                                static_cast<Stored*>(keys),
                                                static_cast<Stored*>(values),
                                                static_cast<T*>(y)};
            const Sequence* all = static_cast<const Sequence*>(sequences);
            run(call, all, num_with_tokens(all, num_sequences),
                static_cast<const int64_t*>(task_ends));
        };
        switch (static_cast<const Layout*>(layout)->stored) {
            case kInt8: return with_stored(int8_t());
            case kFloat8: return with_stored(float8());
            default: return with_stored(T());
        }
    });
}
