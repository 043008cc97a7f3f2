// y[t] = gain * (y[t] + sum over t's adapters of coef * (scale * B (A x[t]) + lora bias)) + bias
// delta, in place.
//
// The batch is cut into segments, rows that the same runs cover, and segments into tasks of a few
// rows. A task computes A x of its rows, scales it and adds B times it, to a window of outputs at a time. The
// adapter's tiles are read from memory once and stay in cache for the task's other rows and for its
// neighbours. Sums run in one order whatever the segments are, so a row's result does not depend on the
// batch. Rows and matrices in bfloat16 are multiplied on tiles where the processor has them, and in pairs
// where it has fast dot products of them; A x is then rounded to bfloat16 as well.
#include <algorithm>

#include "kernels.h"
#include "lora_outputs.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

static_assert(kTaskRows <= TileUpdates::kMaxRows, "tiles");

// The first rows of the next task, which others have pushed out of the second-level cache.
template <class T>
void prefetch_rows(const T* rows, int64_t ld, int64_t num_columns, const Segment& segment) {
    constexpr int64_t kRows = 4, kLineItems = 64 / sizeof(T);
    for (int64_t row = 0; row < smaller(segment.end - segment.begin, kRows); ++row) {
        for (int64_t k = 0; k < num_columns; k += kLineItems) {
            __builtin_prefetch(rows + row * ld + k, 0, 2);
        }
    }
}

// The next window of a row.
void prefetch_outputs(const bf16* row, int64_t num_outputs) {
    constexpr int64_t kLineItems = 64 / sizeof(bf16);
    for (int64_t c = 0; c < num_outputs; c += kLineItems) __builtin_prefetch(row + c, 1, 2);
}

// What a task reads first, or null.
const Tile* first_tile(const Work& work, int64_t segment) {
    if (work.segments[segment].count == 0) return nullptr;
    const Entry& entry = *work.used[work.segments[segment].first].entry;
    return entry.num_a + entry.num_b > 0 ? entry.a() : nullptr;
}

// shrunk[row][rank] += x[row] . A[rank] over the tile.
template <class W>
void shrink_tile(const float* x, int64_t ldx, int64_t num_rows, const Tile& tile, float* shrunk,
                 int64_t ld, const Following& next) {
    shrink_vectors(x + tile.col_begin, ldx, num_rows, reinterpret_cast<const W*>(tile.address),
                   tile.row_end - tile.row_begin, tile.col_end - tile.col_begin,
                   shrunk + tile.row_begin, ld, next);
}

// Rows of a segment.
template <class T>
class Inputs {
public:
    Inputs(const T* x, int64_t ldx, int64_t num_rows, int64_t num_columns)
        : x(x), ldx(ldx), num_rows(num_rows), num_columns_(num_columns) {}

    // As floats, which are made when they are first asked for.
    const float* wide() {
        if (wide_ == nullptr) {
            const bool copies = sizeof(T) != sizeof(float);
            float* buffer = copies ? scratch(1, num_rows * num_columns_) : nullptr;
            wide_ = widen(x, ldx, num_rows, num_columns_, buffer);
        }
        return wide_;
    }
    int64_t wide_stride() const { return widened_stride(x, ldx, num_columns_); }

    const T* const x;
    const int64_t ldx, num_rows;

private:
    int64_t num_columns_;
    const float* wide_ = nullptr;
};

template <class T>
void shrink(Inputs<T>& in, const Tile& tile, float* shrunk, int64_t ld, TileUpdates& tiles,
            const Following& next) {
    if constexpr (kMayTile<T>) {
        if (on_tiles<T>(tile)) {
            return tiles.shrink(in.x + tile.col_begin, in.ldx, in.num_rows, matrix_of(tile),
                                tile.row_end - tile.row_begin, tile.col_end - tile.col_begin,
                                shrunk + tile.row_begin, ld, next);
        }
    }
    if constexpr (kMayPair<T>) {
        if (in_pairs<T>(tile)) {
            return shrink_pairs(in.x + tile.col_begin, in.ldx, in.num_rows, matrix_of(tile),
                                tile.row_end - tile.row_begin, tile.col_end - tile.col_begin,
                                shrunk + tile.row_begin, ld);
        }
    }
    with_tile(tile.dtype, [&](auto w) {
        shrink_tile<decltype(w)>(in.wide(), in.wide_stride(), in.num_rows, tile, shrunk, ld, next);
    });
}

template <class T>
void shrink(Inputs<T>& in, const Entry& entry, float* shrunk, Thread& thread) {
    std::memset(shrunk, 0, in.num_rows * entry.rank * sizeof(float));
    for (const Tile* tile = entry.a(); tile < entry.b(); ++tile) {
        shrink(in, *tile, shrunk, entry.rank, thread.tiles, following(entry, *tile, thread));
    }
}

// Rows of a segment at the embedding, whose A x is a column of A for each token.
template <class T>
struct Columns {
    const float* values;
    int64_t num_rows;
};

template <class T>
void shrink(Columns<T>& in, const Entry& entry, float* shrunk, Thread&) {
    std::memcpy(shrunk, in.values, in.num_rows * entry.rank * sizeof(float));
}

// coef * scale * A x of all adapters of a segment, one after another.
template <template <class> class In, class T>
const float* shrink_all(const Use* begin, const Use* end, In<T>& in, Thread& thread) {
    int64_t num_ranks = 0;
    for (const Use* use = begin; use < end; ++use) num_ranks += use->entry->rank;
    float* const all = scratch(0, in.num_rows * num_ranks);
    float* shrunk = all;
    for (const Use* use = begin; use < end; ++use) {
        const int64_t rank = use->entry->rank;
        shrink(in, *use->entry, shrunk, thread);
        for (int64_t row = 0; row < in.num_rows; ++row, shrunk += rank) {
            for (int64_t r = 0; r < rank; ++r) shrunk[r] *= use->entry->scale()[r] * use->coef;
        }
    }
    return all;
}

template <template <class> class In>
void add_rows(const Segment& segment, const Use* used, In<float>& in, float* y, int64_t ldy,
              int64_t num_outputs, Thread& thread) {
    const Use *begin = used + segment.first, *end = begin + segment.count;
    const float* shrunk = shrink_all(begin, end, in, thread);
    add_window<float>(begin, end, shrunk, nullptr, y, ldy, in.num_rows, {0, num_outputs}, thread);
}

// bfloat16 rows are summed as floats and rounded once. Gates and what they multiply are windows of their own, side
// by side.
template <template <class> class In>
void add_rows(const Segment& segment, const Use* used, In<bf16>& in, bf16* y, int64_t ldy,
              int64_t num_outputs, Thread& thread, const Gates* gates = nullptr) {
    const Use *begin = used + segment.first, *end = begin + segment.count;
    const float* shrunk = shrink_all(begin, end, in, thread);
    bf16* const factors = narrow_all<bf16>(begin, end, in.num_rows, shrunk);
    const int64_t num_parts = gates == nullptr ? 1 : 2, part = num_outputs / num_parts;
    const int64_t width = window_of(begin, end, in.num_rows, num_outputs) / num_parts;
    // No power of two, at which lines of all rows would push each other out of the cache.
    const int64_t stride = (ceil_div(num_parts * width, kLanes) | 1) * kLanes;
    float* out = scratch(2, in.num_rows * stride);
    const auto add = [&](float* to, const Window& window) {
        add_window<bf16>(begin, end, shrunk, factors, to, stride, in.num_rows, window, thread);
    };
    for (int64_t first = 0; first < part; first += width) {
        const int64_t n = smaller(width, part - first);
        for (int64_t i = 0; i < num_parts; ++i) {
            for (int64_t row = 0; row < in.num_rows; ++row) {
                const bf16* from = y + row * ldy + i * part + first;
                widen(from, ldy, 1, n, out + row * stride + i * width);
                prefetch_outputs(from + n, smaller(width, part - first - n));
            }
        }
        if (width == part) {
            add(out, {0, num_outputs});
        } else {
            for (int64_t i = 0; i < num_parts; ++i) {
                add(out + i * width, {i * part + first, i * part + first + n});
            }
        }
        if (gates != nullptr) {
            bf16* to = gates->out + segment.begin * gates->ld + first;
            const auto store = [&](auto activation) {
                store_gated(activation, out, out + width, stride, in.num_rows, n, to, gates->ld);
            };
            if (gates->operation == kSilu) {
                store([](Vec z) { return silu(z); });
            } else {
                store([](Vec z) { return gelu_tanh(z); });
            }
            continue;
        }
        for (int64_t row = 0; row < in.num_rows; ++row) {
            convert_n(out + row * stride, n, y + row * ldy + first);
        }
    }
}

// A step's updates at a site: calls add(thread, segment, rows of x, rows of y) for each segment. Rows without
// adapters have segments only below `num_all`.
template <class T, class Add>
void add_all(const T* x, int64_t ldx, int64_t num_inputs, T* y, int64_t ldy, int64_t num_outputs,
             int64_t site, const void* all_runs, int64_t num_runs, int64_t num_all, const Add& add) {
    static thread_local Work work;
    const Run* runs = static_cast<const Run*>(all_runs);
    list_uses(work, runs, num_with_rows(runs, num_runs), site);
    if (work.uses.empty() && num_all == 0) return;
    cut(work, num_all);
    divide(work);
    const Work& plan = work;
    const auto make = [] { return Thread(kMayTile<T>); };
    const auto end_of = [&](int64_t share) { return plan.share_ends[share]; };
    parallel_shares(plan.share_ends.size(), end_of, make, [&](Thread& thread, int64_t i) {
        const Segment& segment = plan.segments[i];
        const Tile* first = first_tile(plan, i);
        if (first != thread.after) prefetch_all(beginning_of(first));
        const bool is_last = i + 1 == end_of(segment.share);
        thread.after = is_last ? nullptr : first_tile(plan, i + 1);
        if (kHasUpdateTiles && !is_last) {
            const Segment& next = plan.segments[i + 1];
            prefetch_rows(x + next.begin * ldx, ldx, num_inputs, next);
            prefetch_rows(y + next.begin * ldy, ldy, num_outputs, next);
        }
        Inputs<T> in(x + segment.begin * ldx, ldx, segment.end - segment.begin, num_inputs);
        add(thread, segment, plan.used.data(), in, y + segment.begin * ldy);
    });
}

}  // namespace
}  // namespace lpx

LPX_EXPORT void lpx_add_lora(const void* x, int64_t ldx, int64_t num_inputs, void* y, int64_t ldy,
                             int64_t num_outputs, int64_t activation_dtype, int64_t site,
                             const void* runs, int64_t num_runs) {
    using namespace lpx;
    with_activation(activation_dtype, [&](auto t) {
        using T = decltype(t);
        add_all(static_cast<const T*>(x), ldx, num_inputs, static_cast<T*>(y), ldy, num_outputs,
                site, runs, num_runs, 0,
                [=](Thread& thread, const Segment& segment, const Use* used, Inputs<T>& in, T* out) {
                    add_rows(segment, used, in, out, ldy, num_outputs, thread);
                });
    });
}

// Updates of a site whose outputs in bfloat16 are gates and as many others that they multiply:
// out[num_rows, num_outputs / 2] = activation(gates) * others. y has the base's outputs, and is not changed.
LPX_EXPORT void lpx_add_lora_gates(int64_t operation, const void* x, int64_t ldx, int64_t num_inputs,
                                   const void* y, int64_t ldy, int64_t num_outputs, void* out, int64_t ldo,
                                   int64_t num_rows, int64_t site, const void* runs,
                                   int64_t num_runs) {
    using namespace lpx;
    const Gates gates{operation, static_cast<bf16*>(out), ldo};
    add_all(static_cast<const bf16*>(x), ldx, num_inputs,
            static_cast<bf16*>(const_cast<void*>(y)), ldy, num_outputs, site, runs, num_runs, num_rows,
            [&](Thread& thread, const Segment& segment, const Use* used, Inputs<bf16>& in, bf16* own) {
                add_rows(segment, used, in, own, ldy, num_outputs, thread, &gates);
            });
}

// Updates at the embedding, for one run over all rows; `columns` are A's, float32 [rows, rank].
LPX_EXPORT void lpx_add_lora_embedding(const void* columns, int64_t rank, void* y, int64_t ldy,
                                       int64_t num_outputs, int64_t activation_dtype, int64_t site,
                                       const void* only_run) {
    using namespace lpx;
    const Run& run = *static_cast<const Run*>(only_run);
    const Entry* entry = entry_of(run, site);
    if (entry == nullptr) return;
    const Use use{entry, 0, run.end, static_cast<float>(run.coef)};
    with_activation(activation_dtype, [&](auto t) {
        using T = decltype(t);
        parallel_for((run.end + kTaskRows - 1) / kTaskRows, [&](int64_t i) {
            const int64_t begin = i * kTaskRows, end = std::min(begin + kTaskRows, run.end);
            Thread thread(kMayTile<T>);
            Columns<T> in{static_cast<const float*>(columns) + begin * rank, end - begin};
            add_rows(Segment{begin, end, 0, 1, 0}, &use, in, static_cast<T*>(y) + begin * ldy, ldy,
                     num_outputs, thread);
        });
    });
}

// products[row][i] += x[row] . weights[i], in float32.
LPX_EXPORT void lpx_add_products(const void* x, int64_t ldx, int64_t activation_dtype,
                                 int64_t num_rows, const void* weights, int64_t weights_dtype,
                                 int64_t num_weights, int64_t num_columns, void* products,
                                 int64_t ldp) {
    using namespace lpx;
    constexpr int64_t kTaskWeights = 64;
    with_activation(activation_dtype, [&](auto t) {
        using T = decltype(t);
        parallel_for((num_weights + kTaskWeights - 1) / kTaskWeights, [&](int64_t i) {
            const int64_t first = i * kTaskWeights;
            const Tile tile{reinterpret_cast<int64_t>(weights), first,
                            std::min(first + kTaskWeights, num_weights), 0, num_columns,
                            weights_dtype};
            for (int64_t row = 0; row < num_rows; row += kTaskRows) {
                Inputs<T> in(static_cast<const T*>(x) + row * ldx, ldx,
                             std::min(kTaskRows, num_rows - row), num_columns);
                float* out = static_cast<float*>(products) + row * ldp;
                with_tile(weights_dtype, [&](auto w) {
                    using W = decltype(w);
                    Tile own = tile;
                    own.address += first * num_columns * static_cast<int64_t>(sizeof(W));
                    shrink_tile<W>(in.wide(), in.wide_stride(), in.num_rows, own, out, ldp, {});
                });
            }
        });
    });
}
