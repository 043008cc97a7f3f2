// Products in bfloat16 with a plain weight on AMX: those of a head, which may share its weight with the
// embedding.
//
// Rows of the weight are left operands as they lie in memory. The rows of x, which are few, are packed as
// right operands. Every output is summed in the order of its inputs in one accumulator and then rounded, so
// it has the bits that `lpx_linear_tiles` gives.
#include <cmath>

#include "activations.h"
#include "best.h"
#include "kernels.h"
#include "pool.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#include "tiles_amx.h"

namespace lpx {
namespace {

constexpr int64_t kBlock = PanelProduct::kMaxRows;  // outputs

struct HeadProduct {
    const bf16* weight;  // [num_outputs, num_tiles * kTileInputs]
    const bf16* rows;    // panels of rows of x
    int64_t num_rows, num_tiles, num_outputs;

    HeadProduct(const void* x, const void* weights, int64_t num_rows, int64_t num_inputs,
                int64_t num_outputs)
        : weight(static_cast<const bf16*>(weights)),
          num_rows(num_rows),
          num_tiles(num_inputs / kTileInputs),
          num_outputs(num_outputs) {
        void* packed = scratch(3, lpx_tile_items(num_rows, num_inputs) / 2);
        lpx_pack_tiles(x, num_rows, num_inputs, packed);
        rows = static_cast<const bf16*>(packed);
    }
    int64_t num_panels() const { return ceil_div(num_rows, kTilePanel); }
    int64_t num_blocks() const { return ceil_div(num_outputs, kBlock); }

    // Calls f(panel, sums) for each panel of rows; sums[output of the block][row of the panel].
    template <class F>
    void multiply(PanelProduct& product, int64_t block, const F& f) const {
        const int64_t num_inputs = num_tiles * kTileInputs, first = block * kBlock;
        const bf16* own = weight + first * num_inputs;
        const char* next = reinterpret_cast<const char*>(own + kBlock * num_inputs);
        float* sums = scratch(0, kBlock * kTilePanel);
        for (int64_t panel = 0; panel < num_panels(); ++panel) {
            const Ahead ahead{next, panel == 0 ? kBlock * num_inputs * int64_t(sizeof(bf16)) : 0};
            product.multiply(smaller(num_outputs - first, kBlock), own, num_inputs,
                             rows + panel * num_tiles * 2 * kTileItems, num_tiles, sums, false, ahead,
                             [](int64_t) {});
            f(panel, sums);
        }
    }
};

// Column `row` of the sums of n outputs, rounded to bfloat16.
template <class T>
void store_column(const float* sums, int64_t row, int64_t n, T* y) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i items = _mm512_slli_epi32(lanes, 5);
    static_assert(kTilePanel == 32, "a shift by 5");
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec column = {_mm512_i32gather_ps(items, sums + i * kTilePanel + row, 4)};
        store_n(y + i, rounded(column, bf16()), n - i);
    }
}

// The best output of each row so far.
struct Best {
    float* scores;  // [num_panels * kTilePanel]
    float* outputs;  // exact, because a head has fewer than 2^24

    Best(const HeadProduct& h) {
        const int64_t num_rows = h.num_panels() * kTilePanel;
        scores = scratch(1, 2 * num_rows);
        outputs = scores + num_rows;
        for (int64_t row = 0; row < num_rows; ++row) {
            scores[row] = -INFINITY;
            outputs[row] = 0.0f;
        }
    }

    // Outputs of a block ascend, so the first of equals stays. A thread that helps with the shares of others
    // may get lower blocks later.
    void add(int64_t panel, const float* sums, int64_t first, int64_t n) {
        for (int64_t row = 0; row < kTilePanel; row += kLanes) {
            __m512 best = _mm512_set1_ps(-INFINITY), output = _mm512_setzero_ps();
            for (int64_t i = 0; i < n; ++i) {
                const __m512 sum = _mm512_loadu_ps(sums + i * kTilePanel + row);
                const __m256i half = (__m256i)_mm512_cvtneps_pbh(sum);
                const __m512 score =
                    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
                // Not less or equal: NaN is better than any number.
                const __mmask16 is_number = _mm512_cmp_ps_mask(best, best, _CMP_ORD_Q);
                const __mmask16 wins = _mm512_mask_cmp_ps_mask(is_number, score, best, _CMP_NLE_UQ);
                best = _mm512_mask_mov_ps(best, wins, score);
                output = _mm512_mask_mov_ps(output, wins, _mm512_set1_ps(static_cast<float>(first + i)));
            }
            float* const own = scores + panel * kTilePanel + row;
            float* const own_outputs = outputs + panel * kTilePanel + row;
            const __m512 before = _mm512_loadu_ps(own), before_output = _mm512_loadu_ps(own_outputs);
            const __mmask16 was_number = _mm512_cmp_ps_mask(before, before, _CMP_ORD_Q);
            const __mmask16 is_nan = _mm512_cmp_ps_mask(best, best, _CMP_UNORD_Q);
            const __mmask16 is_greater = _mm512_mask_cmp_ps_mask(was_number, best, before, _CMP_NLE_UQ);
            const __mmask16 is_equal =
                _mm512_mask_cmp_ps_mask(_kor_mask16(was_number, is_nan), best, before, _CMP_EQ_UQ);
            const __mmask16 is_lower =
                _mm512_mask_cmp_ps_mask(is_equal, output, before_output, _CMP_LT_OQ);
            const __mmask16 wins = _kor_mask16(is_greater, is_lower);
            _mm512_mask_storeu_ps(own, wins, best);
            _mm512_mask_storeu_ps(own_outputs, wins, output);
        }
    }
};

// A thread's blocks.
class BestOfShare {
public:
    BestOfShare(const HeadProduct& h, MergedBest& merged) : h_(h), merged_(merged), best_(h) {}
    ~BestOfShare() {
        merged_.add(best_.scores, [&](int64_t row) { return static_cast<int64_t>(best_.outputs[row]); });
    }

    void take(int64_t block) {
        const int64_t first = block * kBlock, n = smaller(h_.num_outputs - first, kBlock);
        h_.multiply(product_, block, [&](int64_t panel, const float* sums) {
            best_.add(panel, sums, first, n);
        });
    }

private:
    const HeadProduct& h_;
    MergedBest& merged_;
    PanelProduct product_;
    Best best_;
};

}  // namespace
}  // namespace lpx

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T, dense; x in bfloat16, y in `dtype` but rounded to
// bfloat16. num_inputs is a multiple of 32.
LPX_EXPORT void lpx_linear_plain(const void* x, const void* weight, void* y, int64_t dtype,
                                 int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
    using namespace lpx;
    const HeadProduct h(x, weight, num_rows, num_inputs, num_outputs);
    const auto make = [] { return PanelProduct(); };
    const auto multiply = [&](auto* out) {
        parallel_shares(h.num_blocks(), make, [&](PanelProduct& product, int64_t block) {
            const int64_t first = block * kBlock, n = smaller(num_outputs - first, kBlock);
            h.multiply(product, block, [&](int64_t panel, const float* sums) {
                const int64_t begin = panel * kTilePanel, left = smaller(num_rows - begin, kTilePanel);
                for (int64_t row = 0; row < left; ++row) {
                    store_column(sums, row, n, out + (begin + row) * num_outputs + first);
                }
            });
        });
    };
    with_activation(dtype, [&](auto t) { multiply(static_cast<decltype(t)*>(y)); });
}

// outputs[num_rows] = the index of each row's largest output, as `lpx_linear_plain` rounds it; the lowest
// among equals. As numpy has it, NaN is larger than any number.
LPX_EXPORT void lpx_best_plain(const void* x, const void* weight, void* outputs, int64_t num_rows,
                               int64_t num_inputs, int64_t num_outputs) {
    using namespace lpx;
    const HeadProduct h(x, weight, num_rows, num_inputs, num_outputs);
    MergedBest merged(num_rows, static_cast<int64_t*>(outputs));
    const auto make = [&] { return BestOfShare(h, merged); };
    parallel_shares(h.num_blocks(), make, [](BestOfShare& best, int64_t block) { best.take(block); });
}

#else

// Built for a processor without AMX; never called.
LPX_EXPORT void lpx_linear_plain(const void*, const void*, void*, int64_t, int64_t, int64_t,
                                 int64_t) {}
LPX_EXPORT void lpx_best_plain(const void*, const void*, void*, int64_t, int64_t, int64_t) {}

#endif
