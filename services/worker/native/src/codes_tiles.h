// Products of codes on AMX: a tile of codes and 16 rows of digits, or 32 of bfloat16, at a time.
//
// Integers are multiplied as in codes_digits.h, with the same bits. Float8 becomes bfloat16, which is exact.
// Codes that are not in memory as tiles are written to a buffer one block ahead of their use, and sums are
// added to the totals while the next ones are computed: vectors and tiles exchange data through memory, and
// would wait for each other otherwise. What is done for each block stays in registers as far as possible,
// because the number of instructions is what limits four rows and more.
//
// A tile's 16 rows are the high and low digits of 8 rows, or 16 rows in bfloat16. Up to 8 rows take one tile, and
// go through the blocks of a panel with totals in registers. More rows are cut into groups of two tiles: for each
// block of inputs, each group times the block gives 2 x 2 tiles of sums, which are added to totals in memory.
#pragma once
#include <utility>

#include "codes_digits.h"
#include "codes_pairs.h"

#if defined(__AMX_INT8__)
#include "codes_as_tiles.h"
#include "tiles_amx.h"

namespace lpx {

// A thread's products. The tile registers are in use from construction to destruction.
template <Code Kind>
class TilePanels {
public:
    static constexpr bool kInDigits = CodeTiles<Kind>::kInDigits;
    using Rows = typename std::conditional<kInDigits, DigitRows, HalfRows>::type;

    // How many rows after the last may be read.
    static constexpr int64_t kMoreRows = 8;
    static Rows rows_of(const CodedProduct& g, const bf16* x, int64_t ldx, bool is_alone) {
        const int64_t num_more = g.num_rows > 2 * kRows ? kMoreRows : 0;
        if constexpr (kInDigits) {
            return DigitRows(g, Kind, x, ldx, true, is_alone, num_more);
        } else {
            const int64_t padded = ceil_div(g.num_inputs, kTileInputs) * kTileInputs;
            return HalfRows(g, Kind, x, ldx, padded, is_alone, num_more);
        }
    }

    TilePanels(const CodedProduct& g, const Rows& rows) : g_(g), rows_(rows), codes_(g.block_size) {}
    ~TilePanels() { _tile_release(); }

    // The product of rows [begin, end) and a panel: [end - begin][32], valid until the next one.
    const float* multiply(int64_t panel, int64_t begin, int64_t end) {
        float* const totals = scratch(0, (end - begin) * kPanel);
        const bool has_zeros = g_.zeros != nullptr;
        if (end - begin <= kFewRows) {
            const auto multiply = [&](auto has_zeros, auto rows) {
                multiply_few<decltype(has_zeros)::value, decltype(rows)::value>(panel, begin, end - begin, totals);
            };
            const std::integral_constant<int, kFewRows> most{};
            const std::integral_constant<int, kFewRows / 2> half{};
            const bool are_half = end - begin <= kFewRows / 2;
            if (has_zeros) {
                are_half ? multiply(std::true_type(), half) : multiply(std::true_type(), most);
            } else {
                are_half ? multiply(std::false_type(), half) : multiply(std::false_type(), most);
            }
        } else if (has_zeros) {
            multiply_many<true>(panel, begin, end, totals);
        } else {
            multiply_many<false>(panel, begin, end, totals);
        }
        return totals;
    }

private:
    static constexpr int64_t kRowInputs = CodeTiles<Kind>::kRowInputs;
    static constexpr int64_t kDigits = kInDigits ? 2 : 1;
    static constexpr int64_t kRows = kTileRows / kDigits;  // of a tile, which has one for each digit
    // Whether codes are prefetched between the instructions of tiles. Float8 is prefetched where it is widened, which
    // takes most of the time.
    static constexpr bool kSpreads = kInDigits;
    static constexpr int64_t kNearBytes = 1024;  // how far ahead the first-level cache reads
    static constexpr int kFewRows = 8;  // fit into one tile, and their totals into registers
    static constexpr int64_t kItems = kTileRows * kTileRows;
    static constexpr int64_t kQuadBytes = Block<Kind>::kQuadBytes;

    // Which tiles have the sums of a block: all of them for many rows. For few rows, these are 0 and 1 and then 2
    // and 3 in turn, so that sums are stored while the next ones are computed.
    enum Which { kAll, kEven, kOdd };

    // Sums of a block that are not added yet.
    struct Waiting {
        int32_t* sums;
        int64_t block, row, num_rows;
        float* totals;
    };

    // At most R rows. Sums are stored one block after they are computed, and added one more block later, between the
    // instructions of tiles: the processor does not find the work for both together in time.
    template <bool kHasZeros, int R>
    [[gnu::flatten]] void multiply_few(int64_t panel, int64_t row, int64_t n, float* out) {
        configure(n, 0);
        Vec totals[R][2];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = zero();
        const int64_t block_bytes = g_.block_size / kQuad * kQuadBytes, last = g_.num_blocks - 1;
        const uint8_t* codes = g_.codes + panel * g_.num_quads() * kQuadBytes;
        codes_.template prepare<!kSpreads>(codes, inputs_of(0), 0);
        for (int64_t b = 0; b <= last + 2; ++b, codes += block_bytes) {
            if (b < last) codes_.template prepare<!kSpreads>(codes + block_bytes, inputs_of(b + 1), 1 - b % 2);
            const Scales by = scales_of<kHasZeros>(panel, b > 1 ? b - 2 : 0);
            const auto add_quarter = [&](auto quarter) __attribute__((always_inline)) {
                constexpr int i = decltype(quarter)::value;
                if (b > 1) add_rows<kHasZeros, R * i / 4, R * (i + 1) / 4>(by, b - 2, row, sums_[b % 2], totals);
                flush();
            };
            if (b % 2 == 0) {
                step_few<kEven>(b, row, codes, add_quarter);
            } else {
                step_few<kOdd>(b, row, codes, add_quarter);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r, out += kPanel) {
            store(out, totals[r][0]);
            store(out + kTileRows, totals[r][1]);
        }
    }

    // Multiplies block b and stores the sums of the one before, where there are such blocks. Calls meanwhile(i) for i
    // from 0 to 3.
    template <Which kWhich, class F>
    [[gnu::always_inline]] void step_few(int64_t b, int64_t row, const uint8_t* codes, const F& meanwhile) {
        constexpr Which kLast = kWhich == kEven ? kOdd : kEven;
        if (b < g_.num_blocks) {
            zero_sums<kWhich>();
            auto in = rows_.tile(row, b * g_.block_size);
            const int64_t stride = rows_.tile_stride();
            Tiles tiles = codes_.tiles[b % 2];
            for (; tiles.num > 1; --tiles.num, in = rows_.next_tile(in)) {
                multiply_tiles<kWhich>(in, stride, tiles, [&](auto) { codes = prefetch_quarter(codes); });
                codes = prefetch_quarter(prefetch_quarter(codes));
            }
            multiply_tiles<kWhich>(in, stride, tiles, [&](auto quarter) __attribute__((always_inline)) {
                codes = prefetch_quarter(codes);
                meanwhile(quarter);
            });
        } else {
            meanwhile(std::integral_constant<int, 0>());
            meanwhile(std::integral_constant<int, 1>());
        }
        const bool has_last = b > 0 && b <= g_.num_blocks;
        codes = prefetch_quarter(codes);
        meanwhile(std::integral_constant<int, 2>());
        if (has_last) store_tile<kLast, 0>(sums_[1 - b % 2]);
        codes = prefetch_quarter(codes);
        meanwhile(std::integral_constant<int, 3>());
        if (has_last) store_tile<kLast, 1>(sums_[1 - b % 2]);
        flush();
    }

    template <bool kHasZeros>
    [[gnu::flatten]] void multiply_many(int64_t panel, int64_t begin, int64_t end, float* totals) {
        std::memset(totals, 0, (end - begin) * kPanel * sizeof(float));
        const int64_t num_groups = ceil_div(end - begin, 2 * kRows), n = ceil_div(end - begin, num_groups);
        const int64_t first = ceil_div(n, 2);  // rows in one tile; the others are in another
        configure(first, n - first);
        const int64_t block_bytes = g_.block_size / kQuad * kQuadBytes, lines = lines_of(num_groups);
        const uint8_t* codes = g_.codes + panel * g_.num_quads() * kQuadBytes;
        const auto add_group = [&](const Waiting& own) {
            const Scales by = scales_of<kHasZeros>(panel, own.block);
            const int32_t* sums = own.sums;
            float* out = own.totals;
            for (int64_t r = 0; r < own.num_rows; ++r, sums += kDigits * kTileRows, out += kPanel) {
                if (r == first) sums = own.sums + 2 * kItems;
                Vec both[1][2] = {{load(out), load(out + kTileRows)}};
                add_rows<kHasZeros, 0, 1>(by, own.block, own.row + r, sums, both);
                store(out, both[0][0]);
                store(out + kTileRows, both[0][1]);
            }
        };
        Waiting last{};  // no rows yet
        int which = 0;
        codes_.template prepare<true>(codes, inputs_of(0), 0);
        for (int64_t b = 0; b < g_.num_blocks; ++b, codes += block_bytes) {
            const uint8_t* ahead = codes + kFarBytes;
            for (int64_t row = begin; row < end; row += n, which = 1 - which) {
                const Waiting own{sums_[which], b, row, smaller(n, end - row), totals + (row - begin) * kPanel};
                ahead = multiply_block(codes_.tiles[b % 2], row, b * g_.block_size, ahead, lines);
                if (row == begin && b + 1 < g_.num_blocks) {
                    codes_.template prepare<true>(codes + block_bytes, inputs_of(b + 1), (b + 1) % 2);
                }
                add_group(last);
                store_tile<kAll, 0>(own.sums);
                store_tile<kAll, 1>(own.sums);
                store_tile<kAll, 2>(own.sums);
                store_tile<kAll, 3>(own.sums);
                flush();
                last = own;
            }
        }
        add_group(last);
    }

    // Of a block, of which the last may have fewer.
    int64_t inputs_of(int64_t block) const {
        return smaller(g_.block_size, g_.num_inputs - block * g_.block_size);
    }

    // Lines of memory that are prefetched at each of two places in the work on a tile. Other kinds are prefetched
    // where they are unpacked.
    int64_t lines_of(int64_t num_groups) const {
        return Kind == Code::kInt8 ? ceil_div(codes_.tile_bytes / kTileBytes, num_groups) : 0;
    }

    // Sums in tiles 0 to 3 (0, 1: the first rows), rows in 4 and 5, codes in 6 and 7.
    void configure(int64_t first, int64_t second) {
        if (first == first_rows_ && second == second_rows_) return;
        first_rows_ = first;
        second_rows_ = second;
        TileConfig config;
        const uint8_t code_rows = static_cast<uint8_t>(codes_.tile_inputs / kRowInputs);
        const uint8_t own = static_cast<uint8_t>(first * kDigits);
        const uint8_t other = second > 0 ? static_cast<uint8_t>(second * kDigits) : own;
        for (int tile : {0, 1}) config.set(tile, own, kTileBytes);
        for (int tile : {2, 3}) config.set(tile, other, kTileBytes);
        config.set(4, own, code_rows * 4);
        config.set(5, other, code_rows * 4);
        for (int tile : {6, 7}) config.set(tile, code_rows, kTileBytes);
        config.load();
    }

    // The compiler does not know that tiles are loaded from memory and stored there.
    static void flush() { asm volatile("" : : : "memory"); }

    // A block's product with many rows. Returns what is prefetched next, from `ahead` on.
    const uint8_t* multiply_block(Tiles tiles, int64_t row, int64_t first, const uint8_t* ahead, int64_t lines) const {
        auto in = rows_.tile(row, first);
        const int64_t stride = rows_.tile_stride();
        zero_sums<kAll>();
        for (; tiles.num > 0; --tiles.num, in = rows_.next_tile(in)) {
            multiply_tiles<kAll>(in, stride, tiles, [](auto) {});
            ahead = prefetch(ahead, lines);
            _tile_loadd(5, reinterpret_cast<const char*>(in) + first_rows_ * kDigits * stride, stride);
            add_dots<kAll, 2>();
            add_dots<kAll, 3>();
            ahead = prefetch(ahead, lines);
        }
        return ahead;
    }

    // Prefetches what comes after a quarter of the codes of two tiles. Returns the next quarter.
    const uint8_t* prefetch_quarter(const uint8_t* codes) const {
        const uint8_t* const end = codes + codes_.quarter_bytes;
        if (!kSpreads) return end;
        for (; codes < end; codes += kTileBytes) {
            if (Kind == Code::kInt4) __builtin_prefetch(codes + kNearBytes, 0, 3);
            __builtin_prefetch(codes + kFarBytes, 0, 2);
        }
        return end;
    }

    template <Which kWhich>
    static void zero_sums() {
        if (kWhich != kOdd) {
            _tile_zero(0);
            _tile_zero(1);
        }
        if (kWhich != kEven) {
            _tile_zero(2);
            _tile_zero(3);
        }
        flush();
    }

    // Multiplies the first rows by two tiles of codes, and goes on to two more. Calls meanwhile(0) and meanwhile(1).
    template <Which kWhich, class In, class F>
    [[gnu::always_inline]] static void multiply_tiles(const In* in, int64_t stride, Tiles& tiles, const F& meanwhile) {
        _tile_loadd(4, in, stride);
        _tile_loadd(6, tiles.first, tiles.stride);
        meanwhile(std::integral_constant<int, 0>());
        add_dots<kWhich, 0>();
        _tile_loadd(7, tiles.second, tiles.stride);
        meanwhile(std::integral_constant<int, 1>());
        add_dots<kWhich, 1>();
        tiles.first += tiles.step;
        tiles.second += tiles.step;
    }

    // Returns what follows.
    static const uint8_t* prefetch(const uint8_t* from, int64_t num_lines) {
        const uint8_t* const end = from + num_lines * kTileBytes;
        for (; from < end; from += kTileBytes) __builtin_prefetch(from, 0, 2);
        return end;
    }

    // Tile i of the sums with the first rows (kAll: or the others, from 2 on).
    template <Which kWhich, int i>
    static void store_tile(int32_t* sums) {
        constexpr int kTile = kWhich == kOdd ? i + 2 : i;
        int32_t* const out = sums + i * kItems;
        if (kTile == 0) _tile_stored(0, out, kTileBytes);
        if (kTile == 1) _tile_stored(1, out, kTileBytes);
        if (kTile == 2) _tile_stored(2, out, kTileBytes);
        if (kTile == 3) _tile_stored(3, out, kTileBytes);
    }

    // Adds product `i`: the first rows with the first and the other codes, then the other rows. The operands of
    // these macros cannot be computed.
    template <Which kWhich, int i>
    static void add_dots() {
        constexpr int kProduct = kWhich == kOdd ? i + 4 : i;
        if constexpr (Kind == Code::kFloat8) {
            if (kProduct == 0) _tile_dpbf16ps(0, 4, 6);
            if (kProduct == 1) _tile_dpbf16ps(1, 4, 7);
            if (kProduct == 2) _tile_dpbf16ps(2, 5, 6);
            if (kProduct == 3) _tile_dpbf16ps(3, 5, 7);
            if (kProduct == 4) _tile_dpbf16ps(2, 4, 6);
            if (kProduct == 5) _tile_dpbf16ps(3, 4, 7);
        } else {
            if (kProduct == 0) _tile_dpbsud(0, 4, 6);
            if (kProduct == 1) _tile_dpbsud(1, 4, 7);
            if (kProduct == 2) _tile_dpbsud(2, 5, 6);
            if (kProduct == 3) _tile_dpbsud(3, 5, 7);
            if (kProduct == 4) _tile_dpbsud(2, 4, 6);
            if (kProduct == 5) _tile_dpbsud(3, 4, 7);
        }
    }

    // Products of a row's digits with 16 outputs and with the other 16, as integers.
    struct Products {
        __m512i first, second;

        explicit Products(const int32_t* sums) : first(joined(sums)), second(joined(sums + kItems)) {
            if constexpr (Kind == Code::kInt4) {
                // Without the other codes, and as many times too large as those.
                first = _mm512_slli_epi32(_mm512_sub_epi32(first, second), DigitRows::shift_of(Kind));
            }
        }
        static __m512i joined(const int32_t* sums) {
            const __m512i high = _mm512_load_si512(sums), low = _mm512_load_si512(sums + kTileRows);
            return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
        }
    };

    // What sums of a block are multiplied with, and zero points, for both tiles.
    struct Scales {
        Vec scales[2], zeros[2];
    };
    template <bool kHasZeros>
    [[gnu::always_inline]] Scales scales_of(int64_t panel, int64_t block) const {
        const int64_t outputs = (panel * g_.num_groups + g_.group_of(block)) * kPanel;
        Scales own;
        for (int v = 0; v < 2; ++v) {
            own.scales[v] = mul(g_.scale(outputs + v * kTileRows), set1(factor_of(Kind)));
            own.zeros[v] = kHasZeros ? g_.zero_point(outputs + v * kTileRows) : zero();
        }
        return own;
    }

    // Adds a block's sums to the totals of rows [kBegin, kEnd) after `row`.
    template <bool kHasZeros, int kBegin, int kEnd, int R>
    [[gnu::always_inline]] void add_rows(const Scales& by, int64_t block, int64_t row, const int32_t* sums,
                                         Vec (&totals)[R][2]) const {
#pragma GCC unroll 8
        for (int r = kBegin; r < kEnd; ++r) {
            const int32_t* const of_row = sums + r * kDigits * kTileRows;
            if constexpr (kInDigits) {
                const Products own(of_row);
                const int64_t at = (row + r) * g_.num_blocks + block;
                totals[r][0] = rows_.template added<kHasZeros>(own.first, at, by.scales[0], by.zeros[0], totals[r][0]);
                totals[r][1] = rows_.template added<kHasZeros>(own.second, at, by.scales[1], by.zeros[1], totals[r][1]);
            } else {
                const float* own = reinterpret_cast<const float*>(of_row);
                totals[r][0] = fma(load(own), by.scales[0], totals[r][0]);
                totals[r][1] = fma(load(own + kItems), by.scales[1], totals[r][1]);
            }
        }
    }

    const CodedProduct& g_;
    const Rows& rows_;
    CodeTiles<Kind> codes_;
    int64_t first_rows_ = 0, second_rows_ = 0;
    alignas(64) int32_t sums_[2][6 * kItems] = {};  // as in tiles 0 to 3; at two places of a page
};

}  // namespace lpx
#endif
