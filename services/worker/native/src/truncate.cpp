// top_k, top_p and min_p: which tokens of a row may still be drawn (`sampling/masks.py`).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr float kRemoved = -std::numeric_limits<float>::infinity();
constexpr int kBins = 1024;        // of scores below the best one,
constexpr float kBinsPerUnit = 16; // bins for each e-fold of probability

struct Token {
    float score;
    int64_t id;
};
inline bool ahead(const Token& a, const Token& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// Whether tokens ahead that hold `before` of `total` reach top_p, as float32 sees it.
inline bool reaches(double before, double total, float top_p) {
    return top_p < 1.0f && static_cast<float>(before / total) >= top_p;
}

// The k first of a row, in order. Later equals come after earlier ones, so a full list takes only
// what is greater than its last.
std::vector<Token> first_k(const float* scores, int64_t n, int64_t k) {
    const size_t most = 2 * k + 256;
    std::vector<Token> tokens;
    tokens.reserve(std::min<size_t>(most, n));
    float least = kRemoved;
    for (int64_t i = 0; i < n; ++i) {
        if (!(scores[i] > least)) continue;
        tokens.push_back({scores[i], i});
        if (tokens.size() == most) {
            std::nth_element(tokens.begin(), tokens.begin() + (k - 1), tokens.end(), ahead);
            tokens.resize(k);
            least = tokens[k - 1].score;
        }
    }
    std::sort(tokens.begin(), tokens.end(), ahead);
    if (tokens.size() > static_cast<size_t>(k)) tokens.resize(k);
    return tokens;
}

void keep_first_k(float* scores, int64_t n, int64_t k, float top_p, float min_p) {
    const std::vector<Token> tokens = first_k(scores, n, k);
    std::vector<float> mass;
    double total = 0, before = 0;
    for (const Token& token : tokens) {
        mass.push_back(std::exp(token.score - tokens[0].score));
        total += mass.back();
    }
    std::fill(scores, scores + n, kRemoved);
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (i > 0 && (mass[i] < min_p || reaches(before, total, top_p))) break;
        scores[tokens[i].id] = tokens[i].score;
        before += mass[i];
    }
}

inline int bin_of(float score, float best) {
    const float bin = (best - score) * kBinsPerUnit;
    return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;
}

// Keeps the shortest prefix that reaches top_p: whole bins, then token by token in the bin where
// the sum crosses it.
void keep_nucleus(float* scores, const float* mass, int64_t n, float best, float top_p) {
    double sums[kBins] = {}, total = 0, before = 0;
    for (int64_t i = 0; i < n; ++i) sums[bin_of(scores[i], best)] += mass[i];
    for (double sum : sums) total += sum;
    int crossed = 0;
    while (crossed < kBins && !reaches(before + sums[crossed], total, top_p)) {
        before += sums[crossed++];
    }
    std::vector<Token> tokens;
    for (int64_t i = 0; i < n; ++i) {
        const int bin = bin_of(scores[i], best);
        if (bin == crossed && scores[i] > kRemoved) tokens.push_back({scores[i], i});
        if (bin > crossed) scores[i] = kRemoved;
    }
    std::sort(tokens.begin(), tokens.end(), ahead);
    for (const Token& token : tokens) {
        const bool is_first = before == 0;
        if (!is_first && reaches(before, total, top_p)) scores[token.id] = kRemoved;
        before += mass[token.id];
    }
}

void truncate_row(float* scores, int64_t n, int64_t top_k, float top_p, float min_p) {
    if (top_k < n) return keep_first_k(scores, n, top_k, top_p, min_p);
    if (top_p >= 1.0f && min_p <= 0.0f) return;
    const int64_t first = std::max_element(scores, scores + n) - scores;
    const float best = scores[first];
    if (best == kRemoved) return;
    float* mass = scratch(0, n);
    for (int64_t i = 0; i < n; i += kLanes) {
        store_n(mass + i, exp(sub(load_n(scores + i, n - i), set1(best))), n - i);
    }
    if (top_p < 1.0f) keep_nucleus(scores, mass, n, best, top_p);
    for (int64_t i = 0; i < n; ++i) {
        if (mass[i] < min_p && i != first) scores[i] = kRemoved;
    }
}

}  // namespace
}  // namespace lpx

// Sets scores [num_rows, width] that may not be drawn to -inf. limits [num_rows, 3] = top_k (width =
// all), top_p (1 = all), min_p (0 = all); the first token always stays.
LPX_EXPORT void lpx_truncate(void* scores, int64_t width, const void* limits, int64_t num_rows) {
    using namespace lpx;
    parallel_for(num_rows, [&](int64_t row) {
        const float* limit = static_cast<const float*>(limits) + 3 * row;
        truncate_row(static_cast<float*>(scores) + row * width, width,
                     static_cast<int64_t>(limit[0]), limit[1], limit[2]);
    });
}
