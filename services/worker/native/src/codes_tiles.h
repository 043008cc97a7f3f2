// Products of codes on AMX: a tile of codes and 16 rows of digits, or 32 of bfloat16, at a time.
//
// Integers are multiplied as in codes_digits.h, with the same bits. Float8 becomes bfloat16, which is exact.
// Codes that are not in memory as tiles are written to a buffer one block ahead of their use, and sums are
// added to the totals while the next ones are computed: vectors and tiles exchange data through memory, and
// would wait for each other otherwise. What is done for each block stays in registers as far as possible,
// because the number of instructions is what limits four rows and more.
#pragma once
#include <utility>

#include "codes_digits.h"
#include "codes_pairs.h"

#if defined(__AMX_INT8__)
#include "tiles_amx.h"

namespace lpx {

// A thread's products. The tile registers are in use from construction to destruction.
template <Code Kind, class To>
class TilePanels {
public:
    static constexpr bool kInDigits = Kind != Code::kFloat8;
    using Rows = typename std::conditional<kInDigits, DigitRows, HalfRows>::type;

    // How many rows after the last may be read.
    static constexpr int64_t kMoreRows = 8;
    static Rows rows_of(const CodedProduct& g, const bf16* x, int64_t ldx) {
        const int64_t num_more = g.num_rows > 2 * kRows ? kMoreRows : 0;
        if constexpr (kInDigits) {
            return DigitRows(g, Kind, x, ldx, true, num_more);
        } else {
            const int64_t padded = ceil_div(g.num_inputs, kTileInputs) * kTileInputs;
            return HalfRows(g, Kind, x, ldx, padded, num_more);
        }
    }

    // make_to() makes what takes the sums.
    template <class MakeTo>
    TilePanels(const CodedProduct& g, const Rows& rows, const MakeTo& make_to)
        : g_(g), rows_(rows), to_(make_to()) {
        tile_inputs_ = smaller(g.block_size, kTileRows * kRowInputs);
        tile_bytes_ = tile_inputs_ / kRowInputs * kTileBytes;
        while (int64_t(1) << tile_bits_ < tile_inputs_) ++tile_bits_;
    }
    ~TilePanels() { _tile_release(); }

    // The product of rows [begin, end) and a panel.
    void multiply(int64_t panel, int64_t begin, int64_t end) {
        float* const totals = scratch(0, (end - begin) * kPanel);
        std::memset(totals, 0, (end - begin) * kPanel * sizeof(float));
        const int64_t num_groups = ceil_div(end - begin, 2 * kRows);
        const int64_t n = ceil_div(end - begin, num_groups);
        if (n != configured_) configure(configured_ = n);
        const int64_t num_blocks = g_.num_blocks, block_bytes = g_.block_size / kQuad * kQuadBytes;
        const uint8_t* codes = g_.codes + panel * g_.num_quads() * kQuadBytes;
        Waiting last{}, next{};  // no rows yet
        int which = 0;
        prepare(codes, smaller(g_.block_size, g_.num_inputs), 0);
        for (int64_t b = 0; b < num_blocks; ++b, codes += block_bytes) {
            const int64_t left = g_.num_inputs - (b + 1) * g_.block_size;
            bool has_next = left > 0;
            const Tiles tiles = tiles_[b % 2];
            const uint8_t* ahead = codes + kFarBytes;
            // At each of two places in the work on a tile. Other kinds are prefetched where they are unpacked.
            const int64_t lines = Kind == Code::kInt8 ? ceil_div(tile_bytes_ / kTileBytes, num_groups) : 0;
            for (int64_t row = begin; row < end; row += n) {
                const Waiting own{sums_[which], b, row, smaller(n, end - row),
                                  totals + (row - begin) * kPanel};
                const int64_t first = b * g_.block_size;
                if (n > kRows) {
                    ahead = multiply_block<kAll>(tiles, row, first, ahead, lines);
                } else if (which == 0) {
                    ahead = multiply_block<kEven>(tiles, row, first, ahead, lines);
                    if (next.num_rows > 0) store_sums<kOdd>(next.sums);
                } else {
                    ahead = multiply_block<kOdd>(tiles, row, first, ahead, lines);
                    store_sums<kEven>(next.sums);
                }
                if (has_next) prepare(codes + block_bytes, smaller(g_.block_size, left), (b + 1) % 2);
                has_next = false;
                add(panel, last);
                if (n > kRows) {
                    store_sums<kAll>(own.sums);
                    last = own;
                } else {
                    last = next;
                    next = own;
                }
                which = 1 - which;
            }
        }
        add(panel, last);
        if (next.num_rows > 0) {
            if (which == 1) {
                store_sums<kEven>(next.sums);
            } else {
                store_sums<kOdd>(next.sums);
            }
            add(panel, next);
        }
        to_.take(totals, begin, end, panel);
    }

private:
    static constexpr int64_t kRowInputs = kInDigits ? 4 : 2;  // of a row of a tile
    static constexpr int64_t kDigits = kInDigits ? 2 : 1;
    static constexpr int64_t kRows = kTileRows / kDigits;  // of a tile, which has one for each digit
    static constexpr int64_t kMaxBlock = Kind == Code::kInt8 ? 256 : 128;
    static constexpr int64_t kItems = kTileRows * kTileRows;
    static constexpr int64_t kQuadBytes = Block<Kind>::kQuadBytes;

    // Which tiles have the sums of a product: all, or 0 and 1 and then 2 and 3 in turn, so that sums are stored
    // while the next ones are computed.
    enum Which { kAll, kEven, kOdd };

    // Codes as tiles: those for 16 outputs, those for the other 16 `second` bytes later, and so on.
    struct Tiles {
        const uint8_t* from;
        int64_t num, stride, second, step;
    };
    // Sums of a block that are not added yet.
    struct Waiting {
        int32_t* sums;
        int64_t block, row, num_rows;
        float* totals;
    };

    // Sums in tiles 0 to 3 (0, 1: the first rows), rows in 4 and 5, codes in 6 and 7.
    void configure(int64_t num_rows) const {
        TileConfig config;
        const uint8_t code_rows = static_cast<uint8_t>(tile_inputs_ / kRowInputs);
        const uint8_t first = static_cast<uint8_t>(smaller(num_rows, kRows) * kDigits);
        const bool two = num_rows > kRows;
        const uint8_t second = two ? static_cast<uint8_t>((num_rows - kRows) * kDigits) : first;
        for (int tile : {0, 1}) config.set(tile, first, kTileBytes);
        for (int tile : {2, 3}) config.set(tile, second, kTileBytes);
        config.set(4, first, code_rows * 4);
        config.set(5, second, code_rows * 4);
        for (int tile : {6, 7}) config.set(tile, code_rows, kTileBytes);
        flush();
        _tile_loadconfig(&config);
    }

    // The compiler does not know that tiles are loaded from memory and stored there.
    static void flush() { asm volatile("" : : : "memory"); }

    // Makes tiles number `which` of a block's codes.
    void prepare(const uint8_t* codes, int64_t num_inputs, int which) {
        const int64_t num_tiles = (num_inputs + tile_inputs_ - 1) >> tile_bits_;
        Tiles& tiles = tiles_[which];
        if (Kind == Code::kInt8 && num_inputs == num_tiles << tile_bits_) {
            tiles = {codes, num_tiles, kQuadBytes, kTileBytes, tile_inputs_ / kQuad * kQuadBytes};
            return;
        }
        uint8_t* out = buffers_[which];
        const int64_t tile_bytes = tile_bytes_, num_quads = ceil_div(num_inputs, kQuad);
        tiles = {out, num_tiles, kTileBytes, tile_bytes, 2 * tile_bytes};
        const int64_t tile_quads = tile_inputs_ / kQuad;
        const uint8_t* const end = codes + num_quads * kQuadBytes;
        while (codes < end) {
            const int64_t n = smaller(tile_quads, (end - codes) / kQuadBytes);
            if (!kInDigits && n < tile_quads) std::memset(out, 0, 2 * tile_bytes);
            uint8_t* own = out;
#pragma GCC unroll 4
            for (int64_t i = 0; i < n; ++i, codes += kQuadBytes, own += kQuad / kRowInputs * kTileBytes) {
                prefetch_after<Kind>(codes);
                unpack(codes, own, own + tile_bytes);
            }
            out += 2 * tile_bytes;
        }
    }

    // A quad, to the next rows of two tiles. Four-bit codes become 16 times what they are after 8 is
    // subtracted, which is signed.
    static void unpack(const uint8_t* quad, uint8_t* first, uint8_t* second) {
        if constexpr (Kind == Code::kInt8) {
            _mm512_store_si512(first, _mm512_loadu_si512(quad));
            _mm512_store_si512(second, _mm512_loadu_si512(quad + 64));
        } else if constexpr (Kind == Code::kInt4) {
            const __m512i pairs = _mm512_loadu_si512(quad);
            const __m512i flipped = _mm512_set1_epi8(int8_t(0x80)), mask = _mm512_set1_epi8(int8_t(0xf0));
            constexpr int kXorAnd = 0x28;  // (a ^ b) & c
            const auto times_16 = [&](__m512i a) {
                return _mm512_ternarylogic_epi32(a, flipped, mask, kXorAnd);
            };
            _mm512_store_si512(first, times_16(_mm512_slli_epi16(pairs, 4)));
            _mm512_store_si512(second, times_16(pairs));
        } else {
            _mm512_store_si512(first, widened(quad));
            _mm512_store_si512(first + 64, widened(quad + 32));
            _mm512_store_si512(second, widened(quad + 64));
            _mm512_store_si512(second + 64, widened(quad + 96));
        }
    }

    // 2^-8 of float8, as bfloat16: the bits after the sign move by four and the exponent grows by 112. Numbers
    // whose exponent is 0 are chosen from a table.
    static __m512i widened(const uint8_t* codes) {
        alignas(64) static constexpr uint16_t kSmall[32] = {0,      0x3700, 0x3780, 0x37c0,
                                                            0x3800, 0x3820, 0x3840, 0x3860};
        const __m512i words =
            _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x7f0));
        const __m512i normal = _mm512_add_epi16(shifted, _mm512_set1_epi16(0x3800));
        const __mmask32 is_small = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
        const __m512i value =
            _mm512_mask_permutexvar_epi16(normal, is_small, words, _mm512_load_si512(kSmall));
        constexpr int kOrAnd = 0xf8;  // a | (b & c)
        return _mm512_ternarylogic_epi32(value, words, _mm512_set1_epi16(int16_t(0x8000)), kOrAnd);
    }

    // A block's product with n rows. Returns what is prefetched next, from `ahead` on.
    template <Which kWhich>
    const uint8_t* multiply_block(const Tiles& tiles, int64_t row, int64_t first, const uint8_t* ahead,
                                  int64_t lines) const {
        auto in = rows_.tile(row, first);
        const int64_t stride = rows_.tile_stride();
        const uint8_t* codes = tiles.from;
        if (kWhich != kOdd) {
            _tile_zero(0);
            _tile_zero(1);
        }
        if (kWhich != kEven) {
            _tile_zero(2);
            _tile_zero(3);
        }
        flush();
        for (int64_t i = 0; i < tiles.num; ++i, codes += tiles.step, in = rows_.next_tile(in)) {
            _tile_loadd(4, in, stride);
            _tile_loadd(6, codes, tiles.stride);
            add_dots<kWhich, 0>();
            _tile_loadd(7, codes + tiles.second, tiles.stride);
            add_dots<kWhich, 1>();
            ahead = prefetch(ahead, lines);
            if (kWhich == kAll) {
                _tile_loadd(5, reinterpret_cast<const char*>(in) + kTileRows * stride, stride);
                add_dots<kWhich, 2>();
                add_dots<kWhich, 3>();
            }
            ahead = prefetch(ahead, lines);
        }
        return ahead;
    }

    // Returns what follows.
    static const uint8_t* prefetch(const uint8_t* from, int64_t num_lines) {
        const uint8_t* const end = from + num_lines * kTileBytes;
        for (; from < end; from += kTileBytes) __builtin_prefetch(from, 0, 2);
        return end;
    }

    template <Which kWhich>
    static void store_sums(int32_t* sums) {
        if (kWhich != kOdd) {
            _tile_stored(0, sums, kTileBytes);
            _tile_stored(1, sums + kItems, kTileBytes);
        }
        if (kWhich == kAll) sums += 2 * kItems;
        if (kWhich != kEven) {
            _tile_stored(2, sums, kTileBytes);
            _tile_stored(3, sums + kItems, kTileBytes);
        }
        flush();
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
        } else if constexpr (Kind == Code::kInt8) {
            if (kProduct == 0) _tile_dpbsud(0, 4, 6);
            if (kProduct == 1) _tile_dpbsud(1, 4, 7);
            if (kProduct == 2) _tile_dpbsud(2, 5, 6);
            if (kProduct == 3) _tile_dpbsud(3, 5, 7);
            if (kProduct == 4) _tile_dpbsud(2, 4, 6);
            if (kProduct == 5) _tile_dpbsud(3, 4, 7);
        } else {
            if (kProduct == 0) _tile_dpbssd(0, 4, 6);
            if (kProduct == 1) _tile_dpbssd(1, 4, 7);
            if (kProduct == 2) _tile_dpbssd(2, 5, 6);
            if (kProduct == 3) _tile_dpbssd(3, 5, 7);
            if (kProduct == 4) _tile_dpbssd(2, 4, 6);
            if (kProduct == 5) _tile_dpbssd(3, 4, 7);
        }
    }

    // Adds sums to the totals.
    [[gnu::always_inline]] void add(int64_t panel, const Waiting& own) const {
        const int64_t at = (panel * g_.num_groups + g_.group_of(own.block)) * kPanel;
        for (int v = 0; v < 2; ++v) {
            const Vec scale = mul(g_.scale(at + v * kTileRows), set1(factor_of(Kind)));
            const Vec zero_point = g_.zeros == nullptr ? zero() : g_.zero_point(at + v * kTileRows);
            const int32_t* sums = own.sums + v * kItems;
            float* totals = own.totals + v * kTileRows;
            add_tile(own.block, own.row, smaller(own.num_rows, kRows), sums, scale, zero_point, totals);
            if (own.num_rows > kRows) {
                add_tile(own.block, own.row + kRows, own.num_rows - kRows, sums + 2 * kItems, scale,
                         zero_point, totals + kRows * kPanel);
            }
        }
    }

    // Those of one tile.
    [[gnu::always_inline]] void add_tile(int64_t block, int64_t row, int64_t n, const int32_t* sums,
                                         Vec scale, Vec zero_point, float* totals) const {
        if constexpr (kInDigits) {
            constexpr bool kFromMiddle = Kind == Code::kInt4;
            if (g_.zeros != nullptr) {
                rows_.template add_sums<true, kFromMiddle>(row, n, block, sums, scale, zero_point, totals);
            } else if (kFromMiddle && g_.zero == DigitRows::kMiddle) {
                rows_.template add_sums<false, false>(row, n, block, sums, scale, zero_point, totals);
            } else {
                rows_.template add_sums<false, true>(row, n, block, sums, scale, zero_point, totals);
            }
        } else {
#pragma GCC unroll 4
            for (int64_t r = 0; r < n; ++r, sums += kTileRows, totals += kPanel) {
                const Vec sum = load(reinterpret_cast<const float*>(sums));
                store(totals, fma(sum, scale, load(totals)));
            }
        }
    }

    const CodedProduct& g_;
    const Rows& rows_;
    To to_;
    int64_t tile_inputs_, tile_bytes_, tile_bits_ = 0, configured_ = 0;
    Tiles tiles_[2];
    alignas(64) int32_t sums_[2][6 * kItems];  // as in tiles 0 to 3; at two places of a page
    alignas(64) uint8_t buffers_[2][kMaxBlock / kRowInputs * 2 * kTileBytes];
};

}  // namespace lpx
#endif
