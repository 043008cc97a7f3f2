// Products of codes on AMX: a block of a panel and 16 rows of digits or 32 of bfloat16 at a time.
//
// Integers are multiplied as in codes_digits.h, with the same bits. Float8 becomes bfloat16, which is exact.
// Codes that are not in memory as tiles are written to a buffer one block ahead of their use, and sums are
// added to the totals while the next ones are computed: vectors and tiles exchange data through memory, and
// would wait for each other otherwise.
#pragma once
#include "codes_digits.h"
#include "codes_pairs.h"

#if defined(__AMX_INT8__)
#include "tiles_amx.h"

namespace lpx {

// A thread's products. The tile registers are in use from construction to destruction.
template <Code Kind>
class TilePanels {
public:
    static constexpr bool kInDigits = Kind != Code::kFloat8;
    using Rows = typename std::conditional<kInDigits, DigitRows, HalfRows>::type;

    // Up to as many rows more than there are are read.
    static constexpr int64_t kMoreRows = 8;
    static Rows rows_of(const CodedProduct& g, const bf16* x, int64_t ldx) {
        if constexpr (kInDigits) {
            return DigitRows(g, x, ldx, kMoreRows);
        } else {
            const int64_t padded = ceil_div(g.num_inputs, kTileInputs) * kTileInputs;
            return HalfRows(g, Kind, x, ldx, padded, g.num_rows > 2 * kRows ? kMoreRows : 0);
        }
    }

    TilePanels(const CodedProduct& g, const Rows& rows) : g_(g), rows_(rows) {
        tile_inputs_ = smaller(g.block_size, kTileRows * kRowInputs);
        tile_bytes_ = tile_inputs_ / kRowInputs * kTileBytes;
        while (int64_t(1) << tile_bits_ < tile_inputs_) ++tile_bits_;
    }
    ~TilePanels() { _tile_release(); }

    // totals[end - begin][32] += the product of rows [begin, end) and a panel.
    void add(int64_t panel, int64_t begin, int64_t end, float* totals) {
        const int64_t num_groups = ceil_div(end - begin, 2 * kRows);
        const int64_t n = ceil_div(end - begin, num_groups);
        if (n != configured_) configure(configured_ = n);
        const int64_t num_blocks = g_.num_blocks;
        const Block<Kind>* last = nullptr;  // whose sums, of rows from last_row on, are not added yet
        int64_t last_row = 0;
        const auto add_last = [&] {
            which_ = 1 - which_;
            if (last == nullptr) return;
            add_sums(*last, last_row, smaller(n, end - last_row), sums_[which_],
                     totals + (last_row - begin) * kPanel);
        };
        prepare(panel, 0);
        for (int64_t b = 0; b < num_blocks; ++b) {
            if (b + 1 < num_blocks) prepare(panel, b + 1);
            ahead_ = blocks_[b % 3].codes + kAheadBytes;
            // One of the four slots for prefetches of each tile.
            if (Kind == Code::kInt8) ahead_lines_ = ceil_div(tile_inputs_ / kRowInputs, num_groups * 2);
            for (int64_t row = begin; row < end; row += n) {
                if (n > kRows) {
                    multiply<true>(b, row, sums_[which_]);
                } else {
                    multiply<false>(b, row, sums_[which_]);
                }
                add_last();
                last = &blocks_[b % 3];
                last_row = row;
            }
        }
        add_last();
    }

private:
    static constexpr int64_t kRowInputs = kInDigits ? 4 : 2;  // of a row of a tile
    static constexpr int64_t kDigits = kInDigits ? 2 : 1;
    static constexpr int64_t kRows = kTileRows / kDigits;  // of a tile, which has one for each digit
    static constexpr int64_t kMaxBlock = Kind == Code::kInt8 ? 256 : 128;
    static constexpr int64_t kSums = kTileRows * kTileRows;

    // Codes as tiles: those for 16 outputs, those for the other 16 `second` bytes later, and so on.
    struct Tiles {
        const uint8_t* from;
        int64_t num, stride, second, step;
    };

    // Sums in tiles 0 to 3 (0, 1: the first rows), rows in 4 and 5, codes in 6 and 7.
    void configure(int64_t num_rows) const {
        TileConfig config;
        const uint8_t code_rows = static_cast<uint8_t>(tile_inputs_ / kRowInputs);
        const uint8_t first = static_cast<uint8_t>(smaller(num_rows, kRows) * kDigits);
        const uint8_t second = static_cast<uint8_t>(num_rows > kRows ? (num_rows - kRows) * kDigits : 1);
        for (int tile : {0, 1}) config.set(tile, first, kTileBytes);
        for (int tile : {2, 3}) config.set(tile, second, kTileBytes);
        config.set(4, first, code_rows * 4);
        config.set(5, second, code_rows * 4);
        for (int tile : {6, 7}) config.set(tile, code_rows, kTileBytes);
        flush();
        _tile_loadconfig(&config);
    }

    // The compiler does not know that tiles are loaded from memory.
    static void flush() { asm volatile("" : : : "memory"); }

    void prepare(int64_t panel, int64_t b) {
        Block<Kind>& block = blocks_[b % 3];
        block.read(g_, panel, b);
        const int64_t num_quads = ceil_div(block.num_inputs, kQuad);
        const int64_t num_tiles = (block.num_inputs + tile_inputs_ - 1) >> tile_bits_;
        Tiles& tiles = tiles_[b % 2];
        if (Kind == Code::kInt8 && block.num_inputs == num_tiles * tile_inputs_) {
            const int64_t step = tile_inputs_ / kQuad * block.kQuadBytes;
            tiles = {block.codes, num_tiles, block.kQuadBytes, kTileBytes, step};
            return;
        }
        uint8_t* out = buffers_[b % 2];
        tiles = {out, num_tiles, kTileBytes, tile_bytes_, 2 * tile_bytes_};
        const int64_t tile_quads = tile_inputs_ / kQuad;
        for (int64_t quad = 0; quad < num_quads; out += 2 * tile_bytes_) {
            uint8_t* own = out;
            const int64_t end = smaller(quad + tile_quads, num_quads);
            if (!kInDigits && end < quad + tile_quads) std::memset(own, 0, 2 * tile_bytes_);
            for (; quad < end; ++quad, own += kQuad / kRowInputs * kTileBytes) {
                const uint8_t* from = block.codes + quad * block.kQuadBytes;
                prefetch_after<Kind>(from);
                unpack(from, own, own + tile_bytes_);
            }
        }
    }

    // The next lines of those that follow a block in memory some time later.
    void prefetch() {
        for (int64_t i = 0; i < ahead_lines_; ++i, ahead_ += kTileBytes) {
            __builtin_prefetch(ahead_, 0, 3);
        }
    }

    // A quad, to the next rows of two tiles.
    static void unpack(const uint8_t* quad, uint8_t* first, uint8_t* second) {
        if constexpr (Kind == Code::kInt8) {
            _mm512_store_si512(first, _mm512_loadu_si512(quad));
            _mm512_store_si512(second, _mm512_loadu_si512(quad + 64));
        } else if constexpr (Kind == Code::kInt4) {
            const __m512i pairs = _mm512_loadu_si512(quad), mask = _mm512_set1_epi8(15);
            _mm512_store_si512(first, _mm512_and_si512(pairs, mask));
            _mm512_store_si512(second, _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask));
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

    template <bool kTwo>
    void multiply(int64_t b, int64_t row, int32_t* sums) {
        const Block<Kind>& block = blocks_[b % 3];
        const Tiles& tiles = tiles_[b % 2];
        _tile_zero(0);
        _tile_zero(1);
        if (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
        flush();
        for (int64_t tile = 0; tile < tiles.num; ++tile) {
            const uint8_t* codes = tiles.from + tile * tiles.step;
            const int64_t first = block.first + tile * tile_inputs_;
            if constexpr (kInDigits) {
                const int64_t stride = rows_.padded;
                const int8_t* in = rows_.digits + row * 2 * stride + first;
                _tile_loadd(4, in, stride);
                _tile_loadd(6, codes, tiles.stride);
                _tile_dpbsud(0, 4, 6);
                prefetch();
                _tile_loadd(7, codes + tiles.second, tiles.stride);
                _tile_dpbsud(1, 4, 7);
                prefetch();
                if (kTwo) {
                    _tile_loadd(5, in + kTileRows * stride, stride);
                    _tile_dpbsud(2, 5, 6);
                    prefetch();
                    _tile_dpbsud(3, 5, 7);
                    prefetch();
                } else {
                    prefetch();
                    prefetch();
                }
            } else {
                const int64_t stride = rows_.ldx * int64_t(sizeof(bf16));
                const bf16* in = rows_.x + row * rows_.ldx + first;
                _tile_loadd(4, in, stride);
                _tile_loadd(6, codes, tiles.stride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, codes + tiles.second, tiles.stride);
                _tile_dpbf16ps(1, 4, 7);
                if (kTwo) {
                    _tile_loadd(5, in + kTileRows * rows_.ldx, stride);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        _tile_stored(0, sums, kTileBytes);
        _tile_stored(1, sums + kSums, kTileBytes);
        if (kTwo) {
            _tile_stored(2, sums + 2 * kSums, kTileBytes);
            _tile_stored(3, sums + 3 * kSums, kTileBytes);
        }
    }

    // totals[n][32] += the sums of a block's products with n rows.
    void add_sums(const Block<Kind>& block, int64_t row, int64_t n, const int32_t* sums,
                  float* totals) const {
        for (int64_t first = 0; first < n; first += kRows, sums += 2 * kSums) {
            const int64_t end = smaller(first + kRows, n);
            for (int v = 0; v < 2; ++v) {
                float* own = totals + first * kPanel + v * kTileRows;
                add_tile(block, row + first, row + end, v, sums + v * kSums, own);
            }
        }
    }

    // totals[end - row][32 to the next] += the sums of 16 outputs.
    void add_tile(const Block<Kind>& block, int64_t row, int64_t end, int v, const int32_t* sums,
                  float* totals) const {
        const Vec scale = load(block.scales + v * kTileRows), zero = load(block.zeros + v * kTileRows);
        if constexpr (kInDigits) {
            for (; row < end; ++row, sums += kDigits * kTileRows, totals += kPanel) {
                const DigitRows::Sums own{_mm512_load_si512(sums), _mm512_load_si512(sums + kTileRows)};
                rows_.add_sum(g_, row, block.index, own, scale, zero, totals);
            }
        } else {
#pragma GCC unroll 4
            for (; row < end; ++row, sums += kTileRows, totals += kPanel) {
                const Vec sum = load(reinterpret_cast<const float*>(sums));
                store(totals, fma(sum, scale, load(totals)));
            }
        }
    }

    const CodedProduct& g_;
    const Rows& rows_;
    int64_t tile_inputs_, tile_bytes_, tile_bits_ = 0, configured_ = 0;
    const uint8_t* ahead_ = nullptr;
    int64_t ahead_lines_ = 0;
    int which_ = 0;  // of the sums that are computed next
    Tiles tiles_[2];
    Block<Kind> blocks_[3];
    alignas(64) int32_t sums_[2][4 * kSums];  // as in tiles 0 to 3
    alignas(64) uint8_t buffers_[2][kMaxBlock / kRowInputs * 2 * kTileBytes];
};

}  // namespace lpx
#endif
