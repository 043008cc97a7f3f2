// Seeded draws: the argmax of scores + noise. The noise is that of `sampling/philox.py`, bit for bit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

constexpr int kBlock = 64;               // tokens whose random words are made together
constexpr int64_t kTaskTokens = 1 << 14; // of a row, for one task
constexpr float kMostNoise = 22.9f;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

constexpr int kFraction = 38, kMantissa = 43, kIndex = 7, kSeries = 30, kReduced = 53, kNoise = 24;

// Tables of `sampling/fixed_log.py`.
struct Logs {
    const int64_t* inverses;
    const int64_t* logs;
    int64_t ln2;
};

// ln(value) in units of 2^-38, for 1 <= value < 2^44. Shifts of negative numbers round down.
inline int64_t ln_fixed(int64_t value, const Logs& tables) {
    constexpr int64_t unit = int64_t(1) << kSeries;
    const int exponent = 63 - __builtin_clzll(value);
    const int64_t mantissa = value << (kMantissa - exponent);
    const int64_t interval = (mantissa >> (kMantissa - kIndex)) - (1 << kIndex);
    const int64_t reduced = mantissa * tables.inverses[interval] - (int64_t(1) << kReduced);
    const int64_t r = reduced >> (kReduced - kFraction);
    const int64_t square = (r * r) >> kFraction;
    int64_t series = unit / 4 - ((r * (unit / 5)) >> kFraction);
    series = unit / 3 - ((r * series) >> kFraction);
    series = unit / 2 - ((r * series) >> kFraction);
    return exponent * tables.ln2 + tables.logs[interval] + r - ((square * series) >> kSeries);
}

inline float gumbel(uint32_t word, const Logs& tables) {
    const int64_t exponential = 33 * tables.ln2 - ln_fixed(2 * int64_t(word) + 1, tables);
    const int64_t noise = kFraction * tables.ln2 - ln_fixed(exponential, tables);
    return static_cast<float>(noise >> (kFraction - kNoise)) * 0x1p-24f;
}

struct Key {
    uint32_t seed_low, seed_high, position, sample;
};

// The first word of Philox4x32-10 for kBlock tokens from `token`.
void philox(uint32_t token, Key key, uint32_t* words) {
    uint32_t c0[kBlock], c1[kBlock], c2[kBlock], c3[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        c0[i] = token + i;
        c1[i] = key.position;
        c2[i] = key.sample;
        c3[i] = 0;
    }
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < kBlock; ++i) {
            const uint64_t p0 = uint64_t(0xD2511F53) * c0[i], p1 = uint64_t(0xCD9E8D57) * c2[i];
            c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = uint32_t(p1);
            c3[i] = uint32_t(p0);
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    std::copy(c0, c0 + kBlock, words);
}

// A word below this gives less noise than `needed`: noise of at least t asks for
// u >= exp(-exp(-t)) > 1 - 2^-k where k <= t / ln 2.
inline uint32_t least_word(float needed) {
    if (!(needed > 0.7f)) return 0;
    const int k = std::min(static_cast<int>(needed * 1.4426950f), 31);
    return 0xffffffffu - (0xffffffffu >> k);
}

inline float largest(const float* scores, int64_t n) {
    Vec top = set1(kNoScore);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) top = max(top, load(scores + i));
    float lanes[kLanes];
    store(lanes, top);
    const float best = *std::max_element(lanes, lanes + kLanes);
    return i < n ? std::max(best, *std::max_element(scores + i, scores + n)) : best;
}

struct Best {
    float score = kNoScore;
    int64_t token = -1;
};

// The best of columns [begin, end), the lowest among equals; -1 where no score is left. Column 0 is
// the token `first`. Blocks and tokens that cannot win are passed over. That changes no result: sums
// round monotonically, and the noise that a token needs is reduced by what rounding can add.
Best draw(const float* scores, int64_t begin, int64_t end, int64_t first, Key key,
          const Logs& tables) {
    Best best;
    uint32_t words[kBlock];
    for (int64_t block = begin; block < end; block += kBlock) {
        const int64_t n = std::min<int64_t>(kBlock, end - block);
        const float top = largest(scores + block, n);
        if (!(top + kMostNoise > best.score)) continue;
        philox(static_cast<uint32_t>(first + block), key, words);
        const float slack = 0.01f + std::fabs(best.score) * 0x1p-22f;
        const uint32_t least = best.token < 0 ? 0 : least_word(best.score - top - slack);
        uint32_t any = 0;
        for (int i = 0; i < kBlock; ++i) any |= words[i] >= least;
        if (!any) continue;
        for (int i = 0; i < n; ++i) {
            if (words[i] < least || scores[block + i] == kNoScore) continue;
            const float score = scores[block + i] + gumbel(words[i], tables);
            if (score > best.score) best = {score, block + i};
        }
    }
    return best;
}

}  // namespace
}  // namespace lpx

// tokens[row] = argmax over i < width of scores[row, i] + noise of token first + i, 0 where every
// score is -inf. keys [num_rows, 3] = seed, output position, sample index.
LPX_EXPORT void lpx_draw(const void* scores, int64_t width, int64_t first, const void* keys,
                         const void* inverses, const void* logs, int64_t ln2, void* tokens,
                         int64_t num_rows) {
    using namespace lpx;
    const Logs tables = {static_cast<const int64_t*>(inverses), static_cast<const int64_t*>(logs),
                         ln2};
    const int64_t num_parts = (width + kTaskTokens - 1) / kTaskTokens;
    std::vector<Best> parts(num_rows * num_parts);
    parallel_for(num_rows * num_parts, [&](int64_t task) {
        const int64_t row = task / num_parts, begin = task % num_parts * kTaskTokens;
        const int64_t* k = static_cast<const int64_t*>(keys) + 3 * row;
        const Key key = {static_cast<uint32_t>(k[0]), static_cast<uint32_t>(k[0] >> 32),
                         static_cast<uint32_t>(k[1]), static_cast<uint32_t>(k[2])};
        const int64_t end = std::min(begin + kTaskTokens, width);
        const float* row_scores = static_cast<const float*>(scores) + row * width;
        parts[task] = draw(row_scores, begin, end, first, key, tables);
    });
    for (int64_t row = 0; row < num_rows; ++row) {
        Best best;
        for (int64_t part = 0; part < num_parts; ++part) {
            const Best& other = parts[row * num_parts + part];
            if (other.score > best.score) best = other;
        }
        static_cast<int64_t*>(tokens)[row] = std::max<int64_t>(best.token, 0);
    }
}
