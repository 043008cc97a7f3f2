// The adapters of a step's rows.
#pragma once
#include <cstdint>

namespace lpx {

// Rows [begin, end) that an adapter computes, as `cpu_records.py` writes them. `record`: its address.
struct Run {
    int64_t record, begin, end;
    double coef;
};
static_assert(sizeof(Run) == 4 * 8, "layout");

// Programs have as many runs as rows, of which the last ones may have no rows.
inline int64_t num_with_rows(const Run* runs, int64_t num_runs) {
    while (num_runs > 0 && runs[num_runs - 1].begin == runs[num_runs - 1].end) --num_runs;
    return num_runs;
}

}  // namespace lpx
