// Products of codes with dot products of bfloat16 pairs. The loops are those of `RegisterPanels` in
// gemm_codes.cpp: blocks of a panel, groups of rows, two vectors of outputs, and the quads of the block.
#pragma once
#include "codes.h"
#include "pairs.h"
#include "pool.h"
#include "tiles.h"

#if defined(LPX_HAS_PAIRS)
namespace lpx {

// [vector of outputs][inputs 0 and 1, inputs 2 and 3] of a quad.
using QuadPairs = Pairs[2][2];

// The value that is subtracted from codes where they become pairs.
constexpr float pair_zero_of(Code kind) {
    return kind == Code::kInt8 ? 128.0f : kind == Code::kInt4 ? 8.0f : 0.0f;
}

// Of two vectors of outputs from `first` on.
template <Code Kind>
[[gnu::always_inline]] inline void decode_pairs(const uint8_t* quad, int first, QuadPairs& pairs) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const auto value = [&](int j) {
            const Vec code = decode<Kind>(quad, first + i / 2 * kLanes, i % 2 * 2 + j);
            return Kind == Code::kFloat8 ? code : sub(code, set1(pair_zero_of(Kind)));
        };
        pairs[i / 2][i % 2] = pair_of(value(0), value(1));
    }
}

#if defined(__AVX512BF16__)

// The four lower bits of a word choose a value. The next bit is another code's, and the table holds every
// value twice.
template <>
inline void decode_pairs<Code::kInt4>(const uint8_t* quad, int, QuadPairs& pairs) {
    alignas(64) static constexpr uint16_t kValues[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i values = _mm512_load_si512(kValues), codes = _mm512_loadu_si512(quad);
    const auto chosen = [&](__m512i words) {
        return Pairs{(__m512bh)_mm512_permutexvar_epi16(words, values)};
    };
    pairs[0][0] = chosen(codes);
    pairs[1][0] = chosen(_mm512_srli_epi16(codes, 4));
    pairs[0][1] = chosen(_mm512_srli_epi16(codes, 8));
    pairs[1][1] = chosen(_mm512_srli_epi16(codes, 12));
}

#endif

// Rows of bfloat16, as they are or copied.
struct HalfRows {
    const bf16* x;
    int64_t ldx, num_blocks;
    const float* sums = nullptr;  // [row][block]: of the inputs, where zero points need them

    // Rows of `padded` inputs, zeros after the last. Up to num_more rows after the last may be read.
    HalfRows(const CodedProduct& g, Code kind, const bf16* rows, int64_t stride, int64_t padded,
             bool is_alone, int64_t num_more = 0)
        : x(rows), ldx(stride), num_blocks(g.num_blocks) {
        const bool has_zeros = kind != Code::kFloat8;
        const bool needs_sums =
            has_zeros && (g.zeros != nullptr || static_cast<float>(g.zero) != pair_zero_of(kind));
        const bool copies = padded != g.num_inputs || num_more > 0;
        if (!needs_sums && !copies) return;
        const int64_t num_sums = needs_sums ? g.num_rows * num_blocks : 0;
        const int64_t num_copied = copies ? ceil_div((g.num_rows + num_more) * padded, 2) : 0;
        float* own = scratch(3, num_sums + num_copied);
        bf16* copy = reinterpret_cast<bf16*>(own + num_sums);
        loop(g.num_rows, is_alone, [&](int64_t row) {
            if (copies) {
                bf16* out = copy + row * padded;
                std::memcpy(out, rows + row * stride, g.num_inputs * sizeof(bf16));
                std::memset(out + g.num_inputs, 0, (padded - g.num_inputs) * sizeof(bf16));
            }
            if (!needs_sums) return;
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t first = block * g.block_size;
                own[row * num_blocks + block] =
                    sum_of(rows + row * stride + first, smaller(g.block_size, g.num_inputs - first));
            }
        });
        if (needs_sums) sums = own;
        if (copies) {
            x = copy;
            ldx = padded;
        }
    }

    // Rows of tiles.
    const bf16* tile(int64_t row, int64_t first) const { return x + row * ldx + first; }
    const bf16* next_tile(const bf16* tile) const { return tile + kTileInputs; }
    int64_t tile_stride() const { return ldx * int64_t(sizeof(bf16)); }

private:
    static float sum_of(const bf16* from, int64_t n) {
        Vec partial = lpx::zero();
        for (int64_t i = 0; i < n; i += kLanes) {
            partial = lpx::add(partial, load_n(from + i, n - i));
        }
        return lpx::sum(partial);
    }
};

// An output is added up in one sum, or in two: of the pairs of inputs 0 and 1 of each quad, and of those of
// inputs 2 and 3. Two hide the latency of additions with few rows, and each block takes one addition more.
template <Code Kind, int Sums>
struct PairRows : HalfRows {
    // As many as hide the widening of eight-bit codes; four-bit codes need less for it.
    static constexpr int kMaxRows = kLanes < 16 ? 4 : bits_of(Kind) == 8 ? 12 : 8 - 2 * (Sums - 1);
    static constexpr float kZero = pair_zero_of(Kind);

    PairRows(const CodedProduct& g, const bf16* rows, int64_t stride, bool is_alone)
        : HalfRows(g, Kind, rows, stride, g.num_quads() * kQuad, is_alone) {}

    template <int R>
    void add(const CodedProduct&, const Block<Kind>& block, int64_t row, float* totals) const {
        const int64_t at = row * num_blocks + block.index;
        for (int first = 0; first < kPanel; first += 2 * kLanes) {
            add_part<R>(block, row, at, first, totals + first);
        }
    }

private:
    // Two vectors of outputs; `at` is where the sums of the first row's inputs are.
    template <int R>
    void add_part(const Block<Kind>& block, int64_t row, int64_t at, int first, float* totals) const {
        Vec own[Sums][R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int s = 0; s < Sums; ++s) own[s][r][0] = own[s][r][1] = lpx::zero();
        }
        const bf16* in = x + row * ldx + block.first;
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        for (int64_t quad = 0; quad < num_quads; ++quad) {
            const uint8_t* from = block.codes + quad * block.kQuadBytes;
            prefetch_after<Kind>(from);
            QuadPairs codes;
            decode_pairs<Kind>(from, first, codes);
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Pairs input = broadcast_pair(in + r * ldx + quad * kQuad + 2 * pair);
                    Vec(&sum)[2] = own[pair % Sums][r];
                    sum[0] = dot(input, codes[0][pair], sum[0]);
                    sum[1] = dot(input, codes[1][pair], sum[1]);
                }
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const Vec scale = load(block.scales + first + v * kLanes);
            const Vec zero = sub(set1(kZero), load(block.zeros + first + v * kLanes));
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                Vec sum = own[0][r][v];
                if (Sums == 2) sum = lpx::add(sum, own[Sums - 1][r][v]);
                if (sums != nullptr) sum = fma(zero, set1(sums[at + r * num_blocks]), sum);
                float* total = totals + r * kPanel + v * kLanes;
                store(total, fma(sum, scale, load(total)));
            }
        }
    }
};

}  // namespace lpx
#endif
