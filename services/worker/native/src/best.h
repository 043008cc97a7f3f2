// The index of each row's largest output, as numpy finds it: NaN is larger than any number, and the lowest
// index is taken among equals.
#pragma once
#include <cmath>
#include <cstdint>
#include <mutex>

#include "pool.h"

namespace lpx {

inline bool is_better(float score, int64_t output, float other_score, int64_t other) {
    const bool is_nan = std::isnan(score), other_is_nan = std::isnan(other_score);
    const bool is_equal = score == other_score || (is_nan && other_is_nan);
    if (is_equal) return output < other;
    return is_nan || score > other_score;
}

// Collects the best outputs of all threads.
class MergedBest {
public:
    MergedBest(int64_t num_rows, int64_t* outputs)
        : num_rows_(num_rows), scores_(scratch(2, num_rows)), outputs_(outputs) {
        for (int64_t row = 0; row < num_rows_; ++row) {
            scores_[row] = -INFINITY;
            outputs_[row] = 0;
        }
    }

    // A thread's best: a score for each row, and output_of(row).
    template <class F>
    void add(const float* scores, const F& output_of) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (int64_t row = 0; row < num_rows_; ++row) {
            const int64_t output = output_of(row);
            if (is_better(scores[row], output, scores_[row], outputs_[row])) {
                scores_[row] = scores[row];
                outputs_[row] = output;
            }
        }
    }

private:
    const int64_t num_rows_;
    float* const scores_;
    int64_t* const outputs_;
    std::mutex mutex_;
};

}  // namespace lpx
