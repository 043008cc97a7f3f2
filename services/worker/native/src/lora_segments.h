// The adapters of a step's rows at a site, as C++ reads them, and how rows are divided into tasks.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "runs.h"

namespace lpx {

// Rows of one task: enough to outweigh reading the adapter again, few enough for all threads to have some.
#if defined(__AMX_BF16__)
constexpr int64_t kMinTaskRows = 16, kTaskRows = 64;  // 8 take as long to multiply by A
#else
constexpr int64_t kMinTaskRows = 8, kTaskRows = 48;
#endif

// As `cpu_records.py` writes them, in int64 words. A tile is a rectangle of a matrix, row after row: ranks by inputs
// of A, or ranks by outputs of B. It is not a register of AMX, which other files also call tile.
struct Tile {
    int64_t address, row_begin, row_end, col_begin, col_end, dtype;
};
struct Entry {
    int64_t rank, scales, num_a, num_b, num_lora_biases, num_gains, num_biases;
    const float* scale() const { return reinterpret_cast<const float*>(scales); }
    const Tile* a() const { return reinterpret_cast<const Tile*>(this + 1); }
    const Tile* b() const { return a() + num_a; }
    const Tile* lora_biases() const { return b() + num_b; }
    const Tile* gains() const { return lora_biases() + num_lora_biases; }
    const Tile* biases() const { return gains() + num_gains; }
};
static_assert(sizeof(Entry) == 7 * 8 && sizeof(Tile) == 6 * 8, "layout");

// Word 0 of a record is its number of sites; words 1.. are each site's entry as a word offset, or 0.
inline const Entry* entry_of(const Run& run, int64_t site) {
    const int64_t* record = reinterpret_cast<const int64_t*>(run.record);
    if (site >= record[0] || record[1 + site] == 0) return nullptr;
    return reinterpret_cast<const Entry*>(record + record[1 + site]);
}

struct Use {
    const Entry* entry;
    int64_t begin, end;
    float coef;
};

// Rows [begin, end) and the adapters that all of them use: used[first, first + count). `share` is that of the
// thread that computes them.
struct Segment {
    int64_t begin, end, first, count, share;
};

struct Work {
    std::vector<Use> uses;
    std::vector<Use> used;
    std::vector<Segment> segments;
    std::vector<int64_t> share_ends;
};

// Sets the uses of a site. Records are scattered in memory, so all are prefetched before any is read.
inline void list_uses(Work& work, const Run* runs, int64_t num_runs, int64_t site) {
    constexpr int64_t kEntryLines = 5, kLineWords = 8;
    work.uses.clear();
    for (int64_t i = 0; i < num_runs; ++i) {
        const int64_t* record = reinterpret_cast<const int64_t*>(runs[i].record);
        __builtin_prefetch(record, 0, 3);
        __builtin_prefetch(record + 1 + site, 0, 3);
    }
    for (int64_t i = 0; i < num_runs; ++i) {
        const Run& run = runs[i];
        const Entry* entry = run.begin < run.end ? entry_of(run, site) : nullptr;
        if (entry == nullptr) continue;
        const int64_t* words = reinterpret_cast<const int64_t*>(entry);
        for (int64_t line = 0; line < kEntryLines; ++line) {
            __builtin_prefetch(words + line * kLineWords, 0, 3);
        }
        work.uses.push_back({entry, run.begin, run.end, static_cast<float>(run.coef)});
    }
    for (const Use& use : work.uses) __builtin_prefetch(use.entry->scale(), 0, 3);
}

// Of one task, if all runs together have `num_rows`.
inline int64_t task_rows(int64_t num_rows) {
    const int64_t share = ceil_div(num_rows, 2 * num_threads());
    return smaller(kTaskRows, ceil_div(share, kMinTaskRows) * kMinTaskRows);
}

// Cuts at every begin and end of a run, in order, so each segment has one set of adapters. Rows without adapters
// have segments only below `num_all`.
inline void cut(Work& work, int64_t num_all) {
    work.used.clear();
    work.segments.clear();
    int64_t row = 0, num_rows = 0;
    for (const Use& use : work.uses) num_rows += use.end - use.begin;
    const int64_t most = task_rows(std::max(num_rows, num_all));
    for (;;) {
        int64_t next = INT64_MAX;
        const int64_t first = static_cast<int64_t>(work.used.size());
        for (const Use& use : work.uses) {
            if (use.begin > row) {
                if (use.begin < next) next = use.begin;
            } else if (use.end > row) {
                work.used.push_back(use);
                if (use.end < next) next = use.end;
            }
        }
        if (next == INT64_MAX) next = num_all;
        if (next <= row) return;
        const int64_t count = static_cast<int64_t>(work.used.size()) - first;
        const bool is_kept = count > 0 || num_all > 0;
        for (int64_t begin = row; is_kept && begin < next; begin += most) {
            work.segments.push_back({begin, smaller(begin + most, next), first, count, 0});
        }
        row = next;
    }
}

// A rough estimate of a segment's bytes and arithmetic.
inline int64_t cost_of(const Segment& segment, const Use* used) {
    int64_t rank = 0;
    for (int64_t i = 0; i < segment.count; ++i) rank += used[segment.first + i].entry->rank;
    return 1 + rank * (kTaskRows + segment.end - segment.begin);
}

// Orders segments by the shares of threads. The largest come first, and each joins the share that has least so
// far, so that all threads end at about the same time.
inline void divide(Work& work) {
    const Use* used = work.used.data();
    const auto order = [used](const Segment& a, const Segment& b) {
        return a.share != b.share ? a.share < b.share : cost_of(a, used) > cost_of(b, used);
    };
    std::sort(work.segments.begin(), work.segments.end(), order);
    int64_t costs[kMaxShares] = {};
    const int64_t num_shares = shares_of(work.segments.size());
    for (Segment& segment : work.segments) {
        segment.share = std::min_element(costs, costs + num_shares) - costs;
        costs[segment.share] += cost_of(segment, used);
    }
    std::sort(work.segments.begin(), work.segments.end(), order);
    work.share_ends.resize(num_shares);
    for (size_t i = 0; i < work.segments.size(); ++i) work.share_ends[work.segments[i].share] = i + 1;
}

}  // namespace lpx
