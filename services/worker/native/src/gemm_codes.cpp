// y = x W^T where W[o][k] = (code[o][k] - zero[o][g]) * scale[o][g] for groups g of inputs, and codes are
// unsigned integers of eight or four bits, or float8 (e4m3, without zero points). Codes are widened in
// registers, or a block at a time in the cache, and stay packed in memory.
//
// A panel is 32 outputs. For every four inputs (a quad) it holds the codes of 16 outputs side by side,
// four bytes each (see `byte_of`), then those of the other 16; four-bit codes of the first 16 are the low halves of the
// bytes whose high halves are the other 16's. Of float8, the two bytes for the first two inputs of each
// of the 16 outputs come before those for the other two. Scales and zero points are [panel][group][32].
//
// Inputs are taken in blocks that lie within one group. In float32, a block is summed in the order of
// its inputs and then multiplied with the scale; many rows share its codes, widened once. There are four
// other ways for rows in bfloat16:
//
// - Processors with VNNI take a block's inputs as 16-bit integers with one factor, in two digits of eight
//   bits; the sum of products over a block is then exact, and the factor's rounding 2^-16 of the block's
//   largest input. AMX multiplies the same digits in tiles.
// - Processors with AVX2 alone multiply the same integers as wholes.
// - AMX multiplies float8 in tiles of bfloat16, which is exact.
// - Codes become bfloat16 in registers, which is exact, and a block is summed in float32 by dot products of
//   pairs: without AMX where these are fast (see pairs.h), for float8 and four-bit codes, and for all codes
//   without VNNI.
//
// In all of them a row's result does not depend on the other rows.
#include <optional>

#include "activations.h"
#include "codes.h"
#include "codes_digits.h"
#include "codes_floats.h"
#include "codes_integers.h"
#include "codes_outputs.h"
#include "codes_pairs.h"
#include "codes_tiles.h"
#include "kernels.h"
#include "pool.h"

namespace lpx {
namespace {

template <int R, Code Kind, class Rows>
void add_rows(int64_t n, const CodedProduct& g, const Block<Kind>& block, const Rows& rows,
              int64_t row, float* totals) {
    if constexpr (R > 1) {
        if (n < R) return add_rows<R - 1>(n, g, block, rows, row, totals);
    }
    rows.template add<R>(g, block, row, totals);
}

// Products of a block and as many rows as registers hold.
template <Code Kind, class Rows>
struct RegisterPanels {
    const CodedProduct& g;
    const Rows& rows;

    // The product of rows [begin, end) and a panel: [end - begin][32], valid until the next one.
    const float* multiply(int64_t panel, int64_t begin, int64_t end) {
        float* totals = scratch(0, (end - begin) * kPanel);
        std::memset(totals, 0, (end - begin) * kPanel * sizeof(float));
        Block<Kind> block;
        for (int64_t b = 0; b < g.num_blocks; ++b) {
            block.read(g, panel, b);
            int64_t row = begin;
            for (int64_t left = ceil_div(end - begin, Rows::kMaxRows); left > 0; --left) {
                const int64_t n = ceil_div(end - row, left);
                add_rows<Rows::kMaxRows>(n, g, block, rows, row, totals + (row - begin) * kPanel);
                row += n;
            }
        }
        return totals;
    }
};

// What a thread has of its own.
template <class Panels, class Rows, class To>
struct Own {
    const Rows rows;
    Panels panels;
    To to;

    template <class MakeTo>
    Own(const CodedProduct& g, const Rows& own, const MakeTo& make_to) : rows(own), panels{g, rows}, to(make_to()) {}
    Own(const Own&) = delete;
};

// How many rows each thread writes in the form that it multiplies. It takes longer to fetch them from another core.
constexpr int64_t kOwnRows = 8;

// Each thread makes `Panels` of g and rows, and what takes the sums. make_rows(is_alone) makes the rows.
template <class Panels, class MakeRows, class MakeTo>
void multiply_panels(const CodedProduct& g, const MakeRows& make_rows, const MakeTo& make_to) {
    using Rows = decltype(make_rows(true));
    const bool are_shared = g.num_rows > kOwnRows;
    std::optional<Rows> shared;
    if (are_shared) shared.emplace(make_rows(false));
    const int64_t num_panels = ceil_div(g.num_outputs, kPanel);
    const int64_t num_row_tasks = ceil_div(g.num_rows, kTaskRows);
    const auto make = [&] {
        return Own<Panels, Rows, decltype(make_to())>(g, are_shared ? *shared : make_rows(true), make_to);
    };
    parallel_shares(ceil_div(num_panels, kTaskPanels) * num_row_tasks, make, [&](auto& own, int64_t task) {
        const int64_t first = task / num_row_tasks * kTaskPanels;
        const int64_t begin = task % num_row_tasks * kTaskRows;
        const int64_t end = smaller(begin + kTaskRows, g.num_rows);
        for (int64_t panel = first; panel < smaller(first + kTaskPanels, num_panels); ++panel) {
            own.to.take(own.panels.multiply(panel, begin, end), begin, end, panel);
        }
    });
}

template <Code Kind, class MakeRows, class MakeTo>
void multiply(const CodedProduct& g, const MakeRows& make_rows, const MakeTo& make_to) {
    multiply_panels<RegisterPanels<Kind, decltype(make_rows(true))>>(g, make_rows, make_to);
}

template <Code Kind, class T, class MakeTo>
void multiply_wide(const CodedProduct& g, const T* x, int64_t ldx, const MakeTo& make_to) {
    const bool copies = sizeof(T) != sizeof(float);
    float* buffer = copies ? scratch(3, g.num_rows * g.num_inputs) : nullptr;
    const WideRows rows{widen(x, ldx, g.num_rows, g.num_inputs, buffer),
                        widened_stride(x, ldx, g.num_inputs)};
    const auto make_rows = [&](bool) { return rows; };
    if (g.num_rows > WidePanels<Kind>::kFewRows) return multiply_panels<WidePanels<Kind>>(g, make_rows, make_to);
    multiply<Kind>(g, make_rows, make_to);
}

// Whether products of pairs, where they are fast, are preferred to products of digits: always, if there are
// none of digits. Those need no widening, which costs most for eight-bit integers, but each block's sums
// take more work.
constexpr bool prefers_pairs([[maybe_unused]] Code kind) {
#if defined(__AVX512VNNI__)
    return kind != Code::kInt8;
#else
    return true;
#endif
}

#if defined(__AMX_INT8__)

// The fewest rows of digits that are multiplied in tiles. Fewer are multiplied in registers, with the same
// bits.
constexpr int64_t kMinTileRows = 3;

template <Code Kind, class MakeTo>
void multiply_rows(const CodedProduct& g, const bf16* x, int64_t ldx, const MakeTo& make_to) {
    if constexpr (Kind != Code::kFloat8) {
        if (g.num_rows < kMinTileRows) {
            const auto rows = [&](bool is_alone) { return DigitRows(g, Kind, x, ldx, false, is_alone); };
            return multiply<Kind>(g, rows, make_to);
        }
    }
    using Panels = TilePanels<Kind>;
    const auto rows = [&](bool is_alone) { return Panels::rows_of(g, x, ldx, is_alone); };
    multiply_panels<Panels>(g, rows, make_to);
}

#else

template <Code Kind, class MakeTo>
void multiply_rows(const CodedProduct& g, const bf16* x, int64_t ldx, const MakeTo& make_to) {
#if defined(LPX_HAS_PAIRS)
    if (uses_pairs() && prefers_pairs(Kind)) {
        if constexpr (Kind == Code::kInt4 && kLanes == 16) {
            if (g.block_size >= 64) {
                const auto rows = [&](bool is_alone) { return PairRows<Kind, 2>(g, x, ldx, is_alone); };
                return multiply<Kind>(g, rows, make_to);
            }
        }
        const auto rows = [&](bool is_alone) { return PairRows<Kind, 1>(g, x, ldx, is_alone); };
        return multiply<Kind>(g, rows, make_to);
    }
#endif
#if defined(__AVX512VNNI__)
    if constexpr (Kind != Code::kFloat8) {
        const auto rows = [&](bool is_alone) { return DigitRows(g, Kind, x, ldx, false, is_alone); };
        return multiply<Kind>(g, rows, make_to);
    }
#endif
#if defined(LPX_HAS_INTEGERS)
    if constexpr (Kind != Code::kFloat8) {
        const auto rows = [&](bool is_alone) { return IntegerRows(g, x, ldx, is_alone); };
        return multiply<Kind>(g, rows, make_to);
    }
#endif
    multiply_wide<Kind>(g, x, ldx, make_to);
}

#endif

template <Code Kind, class MakeTo>
void multiply_rows(const CodedProduct& g, const float* x, int64_t ldx, const MakeTo& make_to) {
    multiply_wide<Kind>(g, x, ldx, make_to);
}

// `make_to`: see multiply_panels.
template <class MakeTo>
void multiply_codes(const CodedProduct& g, int64_t kind, const void* x, int64_t ldx, const MakeTo& make_to) {
    with_activation(g.dtype, [&](auto t) {
        const auto* in = static_cast<const decltype(t)*>(x);
        switch (static_cast<Code>(kind)) {
            case Code::kInt4: return multiply_rows<Code::kInt4>(g, in, ldx, make_to);
            case Code::kInt8: return multiply_rows<Code::kInt8>(g, in, ldx, make_to);
            case Code::kFloat8: return multiply_rows<Code::kFloat8>(g, in, ldx, make_to);
        }
    });
}

}  // namespace
}  // namespace lpx

// Bytes that `lpx_pack_codes` writes.
LPX_EXPORT int64_t lpx_code_bytes(int64_t num_outputs, int64_t num_inputs, int64_t kind) {
    using namespace lpx;
    const int64_t num_codes = ceil_div(num_outputs, kPanel) * ceil_div(num_inputs, kQuad) * kPanel * kQuad;
    return num_codes * bits_of(static_cast<Code>(kind)) / 8;
}

// Packs codes [num_outputs, num_inputs] of one byte each.
LPX_EXPORT void lpx_pack_codes(const void* codes, int64_t num_outputs, int64_t num_inputs, int64_t kind,
                               void* packed) {
    using namespace lpx;
    const Code code = static_cast<Code>(kind);
    const uint8_t* from = static_cast<const uint8_t*>(codes);
    const int64_t num_quads = ceil_div(num_inputs, kQuad);
    const int64_t quad_bytes = kPanel * kQuad * bits_of(code) / 8;
    parallel_for(ceil_div(num_outputs, kPanel), [&](int64_t panel) {
        uint8_t* out = static_cast<uint8_t*>(packed) + panel * num_quads * quad_bytes;
        std::memset(out, 0, num_quads * quad_bytes);
        for (int64_t i = 0; i < smaller(kPanel, num_outputs - panel * kPanel); ++i) {
            const uint8_t* row = from + (panel * kPanel + i) * num_inputs;
            for (int64_t k = 0; k < num_inputs; ++k) {
                uint8_t* quad = out + k / kQuad * quad_bytes;
                const int64_t j = k % kQuad;
                if (code == Code::kInt8) {
                    quad[i * kQuad + byte_of(j)] = row[k];
                } else if (code == Code::kInt4) {
                    quad[i % 16 * kQuad + byte_of(j)] |= static_cast<uint8_t>(row[k] << (i < 16 ? 0 : 4));
                } else {
                    quad[i / 16 * 64 + j / 2 * 32 + i % 16 * 2 + j % 2] = row[k];
                }
            }
        }
    });
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] W^T. Scales and zero points (null = all are `zero`)
// as [panel][group][32]. Blocks divide groups, and hold at most 128 inputs, as much as buffers of tiles have
// room for. Those of int8 hold 256: more could overflow a sum of digits.
LPX_EXPORT void lpx_linear_codes(const void* x, int64_t ldx, const void* packed, int64_t kind,
                                 const void* scales, int64_t scale_dtype, const void* zeros,
                                 int64_t zero_dtype, int64_t zero, int64_t group_size,
                                 int64_t block_size, void* y, int64_t dtype, int64_t num_rows,
                                 int64_t num_inputs, int64_t num_outputs) {
    using namespace lpx;
    const CodedProduct g{static_cast<const uint8_t*>(packed), scales, scale_dtype, zeros, zero_dtype, zero,
                         y, dtype, num_rows, num_inputs, num_outputs, group_size, block_size};
    multiply_codes(g, kind, x, ldx, [&] { return Outputs{g}; });
}

// The product with a weight of gates and as many other outputs, packed in groups of 16 gates and the 16 outputs
// that they multiply. y[num_rows, num_outputs / 2] = activation(gates) * others; if the operation is kCopy,
// y[num_rows, num_outputs] = gates and others.
LPX_EXPORT void lpx_gate_codes(int64_t operation, const void* x, int64_t ldx, const void* packed, int64_t kind,
                               const void* scales, int64_t scale_dtype, const void* zeros,
                               int64_t zero_dtype, int64_t zero, int64_t group_size, int64_t block_size,
                               void* y, int64_t dtype, int64_t num_rows, int64_t num_inputs,
                               int64_t num_outputs) {
    using namespace lpx;
    const CodedProduct g{static_cast<const uint8_t*>(packed), scales, scale_dtype, zeros, zero_dtype, zero,
                         y, dtype, num_rows, num_inputs, num_outputs, group_size, block_size};
    multiply_codes(g, kind, x, ldx, [&] { return GatedOutputs{g, operation}; });
}

// outputs[num_rows] = the index of each row's largest output, as `lpx_linear_codes` rounds it to `dtype`; the
// lowest among equals. As numpy has it, NaN is larger than any number.
LPX_EXPORT void lpx_best_codes(const void* x, int64_t ldx, const void* packed, int64_t kind,
                               const void* scales, int64_t scale_dtype, const void* zeros,
                               int64_t zero_dtype, int64_t zero, int64_t group_size, int64_t block_size,
                               void* outputs, int64_t dtype, int64_t num_rows, int64_t num_inputs,
                               int64_t num_outputs) {
    using namespace lpx;
    const CodedProduct g{static_cast<const uint8_t*>(packed), scales, scale_dtype, zeros, zero_dtype, zero,
                         nullptr, dtype, num_rows, num_inputs, num_outputs, group_size, block_size};
    MergedBest merged(num_rows, static_cast<int64_t*>(outputs));
    multiply_codes(g, kind, x, ldx, [&] { return BestOutputs(g, merged); });
}
