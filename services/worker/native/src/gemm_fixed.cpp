// y = x W^T in fixed point, for processors with AVX2 but without dot products of bfloat16: VPMADDWD multiplies twice
// as many integers of 16 bits as an FMA multiplies floats.
//
// Up to 256 inputs of an output, or of a row, are a block: integers, and the power of two that scales them. A weight
// has 13 bits and a sign: in bfloat16, at least 1/32 of a block's largest is exact, and smaller weights are rounded to
// multiples of at most 1/4096 of it. Inputs have up to 15 bits and a sign, as many as keep every sum of a block
// within 32 bits: the magnitudes of a row's block add up to less than 2^18.
//
// A panel holds kPanel = 2 * kLanes outputs: for each block, its scales, and for each pair of inputs the panel's pairs
// of weights side by side. A task is up to kTaskRows rows, in fixed point already, and a few panels. Its loops are
// groups of panels, blocks, groups of up to six rows, panels, and pairs.
//
// The sum of a block is exact, and every output adds its blocks in order in float32: a row's result does not depend on
// its neighbours.
#include <algorithm>
#include <limits>

#include "integers.h"
#include "kernels.h"
#include "pool.h"
#include "vec.h"

#if defined(LPX_HAS_INTEGERS)

namespace lpx {
namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int64_t kMaxInputs = 256;  // of a block
constexpr int kUnrolled = 4;         // pairs of a step
constexpr int64_t kLineBytes = 64;   // of a cache line, which one pair of a panel fills
constexpr int64_t kScaleItems = kPanel * int64_t(sizeof(float) / sizeof(int16_t));
constexpr int kWeightBits = 13, kInputBits = 15;  // without the sign
constexpr int kSumBits = 31 - kWeightBits;        // of the magnitudes of a row's block
constexpr int kAnySum = 1000;  // no limit
constexpr float kRounding = 1 + 1.0f / 1024;  // 256 integers of 18 bits in all gain at most 128 from rounding
constexpr int kMaxRows = 6;                   // whose sums fit into registers
constexpr int64_t kTaskRows = 192;
constexpr int64_t kPanelsAtOnce = 2;  // that read some rows while these are in the first-level cache
constexpr int64_t kConvertedRows = 8;  // of one task

// The blocks that inputs are divided into, all of one size but the last.
struct Blocks {
    explicit Blocks(int64_t num_inputs)
        : size(whole_steps(ceil_div(num_inputs, ceil_div(num_inputs, kMaxInputs)))),
          count(ceil_div(num_inputs, size)),
          panel_items(count * kScaleItems + whole_steps(num_inputs) * kPanel) {}

    // Items of a panel before one of its blocks.
    int64_t items_before(int64_t block) const { return block * (kScaleItems + size * kPanel); }

    // The least number of inputs in whole steps that is not less than n.
    static int64_t whole_steps(int64_t n) { return ceil_div(n, 2 * kUnrolled) * 2 * kUnrolled; }

    int64_t size, count, panel_items;
};

// The exponent of a positive float: 2^e <= x < 2^(e + 1), or -127 if x < 2^-126.
inline int exponent_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return int(bits >> 23) - 127;
}

// For exponents from -126 to 127.
inline float power_of_two(int exponent) {
    const uint32_t bits = uint32_t(exponent + 127) << 23;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline Vec magnitude(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }

inline float largest(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// values[size] = n items in fixed point, and zeros. Magnitudes have at most `num_bits`, and their sum `sum_bits`. The
// scale is NaN unless all items are finite.
template <class T>
void convert_block(const T* x, int64_t n, int64_t size, int num_bits, int sum_bits, int16_t* values, float* scale) {
    alignas(64) float items[kMaxInputs];
    Vec total = zero(), most = zero();
    convert_n(x, n, items);
    std::fill(items + n, items + size, 0.0f);
    for (int64_t i = 0; i < size; i += kLanes) {
        const Vec part = magnitude(load(items + i));
        total = add(total, part);
        most = max(most, part);
    }
    const float all = sum(total) * kRounding;
    if (!(all <= std::numeric_limits<float>::max())) {
        std::memset(values, 0, size * sizeof(int16_t));
        *scale = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const int for_sum = sum_bits - 1 - exponent_of(all), for_items = num_bits - 1 - exponent_of(largest(most));
    const int shift = smaller(smaller(for_sum, for_items), 126);
    *scale = power_of_two(-shift);
    const Vec factor = set1(power_of_two(shift));
    for (int64_t i = 0; i < size; i += kLanes) {
        const __m256i integers = _mm256_cvtps_epi32(mul(load(items + i), factor).v);
        const __m128i low = _mm256_castsi256_si128(integers), high = _mm256_extracti128_si256(integers, 1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), _mm_packs_epi32(low, high));
    }
}

template <class W>
void pack(const W* weight, int64_t num_outputs, int64_t num_inputs, int16_t* packed) {
    const Blocks blocks(num_inputs);
    parallel_for(ceil_div(num_outputs, kPanel), [&](int64_t panel) {
        int16_t* out = packed + panel * blocks.panel_items;
        std::memset(out, 0, blocks.panel_items * sizeof(int16_t));
        const int64_t first_output = panel * kPanel, count = smaller(kPanel, num_outputs - first_output);
        for (int64_t i = 0; i < count; ++i) {
            const W* row = weight + (first_output + i) * num_inputs;
            for (int64_t block = 0; block < blocks.count; ++block) {
                const int64_t first = block * blocks.size, n = smaller(blocks.size, num_inputs - first);
                int16_t values[kMaxInputs];
                int16_t* to = out + blocks.items_before(block);
                float* scales = reinterpret_cast<float*>(to);
                convert_block(row + first, n, blocks.size, kWeightBits, kAnySum, values, scales + i);
                int16_t* pairs = to + kScaleItems + 2 * i;
                for (int64_t k = 0; k < n; ++k) pairs[k / 2 * 2 * kPanel + k % 2] = values[k];
            }
        }
    });
}

// Rows in fixed point.
struct Inputs {
    int16_t* values;  // [blocks, rows, kMaxInputs]
    float* scales;    // [blocks, rows]
};

template <class T>
void convert(const T* x, int64_t ldx, int64_t num_rows, int64_t num_inputs, const Inputs& to) {
    const Blocks blocks(num_inputs);
    parallel_for(ceil_div(num_rows, kConvertedRows), [&](int64_t task) {
        const int64_t last = smaller((task + 1) * kConvertedRows, num_rows);
        for (int64_t row = task * kConvertedRows; row < last; ++row) {
            for (int64_t block = 0; block < blocks.count; ++block) {
                const int64_t first = block * blocks.size, at = block * num_rows + row;
                const int64_t n = smaller(blocks.size, num_inputs - first);
                convert_block(x + row * ldx + first, n, blocks.size, kInputBits, kSumBits,
                              to.values + at * kMaxInputs, to.scales + at);
            }
        }
    });
}

// sums[R][kPanel], or zeros unless it `continues`, plus the product of a block of R rows and a panel. Prefetches
// kLines lines from `ahead` on for each kUnrolled pairs.
template <int R, int kLines>
void multiply_block(const int16_t* x, const float* x_scales, const int16_t* block, int64_t num_pairs, float* sums,
                    bool continues, const char* ahead) {
    const float* scales = reinterpret_cast<const float*>(block);
    const __m256i* weights = reinterpret_cast<const __m256i*>(block + kScaleItems);
    __m256i totals[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm256_setzero_si256();
    for (int64_t first = 0; first < num_pairs; first += kUnrolled) {
#pragma GCC unroll 4
        for (int i = 0; i < kUnrolled; ++i, x += 2, weights += 2) {
            if (i < kLines) __builtin_prefetch(ahead + i * kLineBytes, 0, 3);
            const __m256i low = _mm256_load_si256(weights), high = _mm256_load_si256(weights + 1);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const __m256i input = broadcast_integers(x + r * kMaxInputs);
                add_products(totals[r][0], input, low);
                add_products(totals[r][1], input, high);
            }
        }
        ahead += kLines * kLineBytes;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            float* to = sums + r * kPanel + half * kLanes;
            const Vec scale = mul(load(scales + half * kLanes), set1(x_scales[r]));
            const Vec total{_mm256_cvtepi32_ps(totals[r][half])};
            store(to, fma(total, scale, continues ? load(to) : zero()));
        }
    }
}

struct Product {
    void* y;
    int64_t dtype, ldy;  // of y
    int64_t num_rows, num_inputs, num_outputs;
};

// y[row, last)[panel] = sums.
void store_sums(const Product& g, const float* sums, int64_t row, int64_t last, int64_t panel) {
    const int64_t first = panel * kPanel, left = g.num_outputs - first;
    with_activation(g.dtype, [&](auto t) {
        using T = decltype(t);
        T* out = static_cast<T*>(g.y) + row * g.ldy + first;
        for (int64_t r = row; r < last; ++r, out += g.ldy, sums += kPanel) {
            store_n(out, load(sums), left);
            if (left > kLanes) store_n(out + kLanes, load(sums + kLanes), left - kLanes);
        }
    });
}

// Rows [row, last) times panels [begin, end). The first four, two or one groups of rows share the prefetching of
// what the same panel, or the next ones, multiply with after all rows.
void multiply_panels(const Product& g, const Inputs& inputs, const int16_t* packed, int64_t row, int64_t last,
                     int64_t begin, int64_t end) {
    const Blocks blocks(g.num_inputs);
    const int64_t num_groups = ceil_div(last - row, kMaxRows);
    const int num_sharing = num_groups >= 4 ? 4 : num_groups >= 2 ? 2 : 1;
    float* sums = scratch(0, (end - begin) * (last - row) * kPanel);
    for (int64_t block = 0; block < blocks.count; ++block) {
        const int64_t left = smaller(g.num_inputs - block * blocks.size, blocks.size);
        const int64_t num_pairs = Blocks::whole_steps(left) / 2;
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = row + (last - row) * group / num_groups;
            const int64_t num_rows = row + (last - row) * (group + 1) / num_groups - first;
            const int64_t at = block * g.num_rows + first;
            for (int64_t panel = begin; panel < end; ++panel) {
                const int16_t* weights = packed + panel * blocks.panel_items + blocks.items_before(block);
                const int16_t* next = block + 1 < blocks.count ? weights + blocks.items_before(1)
                                                               : packed + (panel + end - begin) * blocks.panel_items;
                const char* ahead = reinterpret_cast<const char*>(next);
                ahead += group * (blocks.size / 2 / num_sharing) * kLineBytes;
                float* own = sums + ((panel - begin) * (last - row) + first - row) * kPanel;
                with_count<kMaxRows>(num_rows, [&](auto count) {
                    constexpr int R = count.value;
                    const auto multiply = group >= num_sharing ? multiply_block<R, 0>
                                          : num_sharing == 4   ? multiply_block<R, 1>
                                          : num_sharing == 2   ? multiply_block<R, 2>
                                                               : multiply_block<R, 4>;
                    multiply(inputs.values + at * kMaxInputs, inputs.scales + at, weights, num_pairs, own,
                             block > 0, ahead);
                });
            }
        }
    }
    for (int64_t panel = begin; panel < end; ++panel) {
        store_sums(g, sums + (panel - begin) * (last - row) * kPanel, row, last, panel);
    }
}

// Consecutive tasks share their rows, which stay in the second-level cache while the weights pass by.
void multiply(const Product& g, const Inputs& inputs, const int16_t* packed) {
    const int64_t num_panels = ceil_div(g.num_outputs, kPanel);
    const int64_t at_once = g.num_rows > kMaxRows ? kPanelsAtOnce : 1;
    // Narrow weights have so few panels that each thread needs the same number of tasks.
    const int64_t num_panel_tasks = ceil_div(ceil_div(num_panels, kPanelsAtOnce), num_threads()) * num_threads();
    const int64_t num_row_tasks = ceil_div(g.num_rows, kTaskRows);
    parallel_shares(num_panel_tasks * num_row_tasks, [&](int64_t task) {
        const int64_t share = task % num_panel_tasks, part = task / num_panel_tasks;
        const int64_t end = num_panels * (share + 1) / num_panel_tasks;
        const int64_t row = g.num_rows * part / num_row_tasks, last = g.num_rows * (part + 1) / num_row_tasks;
        for (int64_t panel = num_panels * share / num_panel_tasks; panel < end; panel += at_once) {
            multiply_panels(g, inputs, packed, row, last, panel, smaller(panel + at_once, end));
        }
    });
}

}  // namespace
}  // namespace lpx

// Items that `lpx_pack_fixed` writes for a weight [num_outputs, num_inputs].
LPX_EXPORT int64_t lpx_fixed_items(int64_t num_outputs, int64_t num_inputs) {
    return lpx::ceil_div(num_outputs, lpx::kPanel) * lpx::Blocks(num_inputs).panel_items;
}

LPX_EXPORT void lpx_pack_fixed(const void* weight, int64_t dtype, int64_t num_outputs, int64_t num_inputs,
                               void* packed) {
    using namespace lpx;
    with_weight(dtype, [&](auto w) {
        pack(static_cast<const decltype(w)*>(weight), num_outputs, num_inputs, static_cast<int16_t*>(packed));
    });
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T. Strides are in items; columns are dense.
LPX_EXPORT void lpx_linear_fixed(const void* x, int64_t ldx, const void* packed, void* y, int64_t ldy,
                                 int64_t dtype, int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
    using namespace lpx;
    const int64_t num_scales = ceil_div(Blocks(num_inputs).count * num_rows, kLanes) * kLanes;
    const int64_t num_values = Blocks(num_inputs).count * num_rows * kMaxInputs;
    float* buffer = scratch(3, num_scales + num_values / 2);
    const Inputs inputs{reinterpret_cast<int16_t*>(buffer + num_scales), buffer};
    with_activation(dtype, [&](auto t) {
        convert(static_cast<const decltype(t)*>(x), ldx, num_rows, num_inputs, inputs);
    });
    multiply({y, dtype, ldy, num_rows, num_inputs, num_outputs}, inputs, static_cast<const int16_t*>(packed));
}

#else

// Built for another processor: 0 items say so, and nobody calls the rest.
LPX_EXPORT int64_t lpx_fixed_items(int64_t, int64_t) { return 0; }
LPX_EXPORT void lpx_pack_fixed(const void*, int64_t, int64_t, int64_t, void*) {}
LPX_EXPORT void lpx_linear_fixed(const void*, int64_t, const void*, void*, int64_t, int64_t, int64_t, int64_t,
                                 int64_t) {}

#endif
