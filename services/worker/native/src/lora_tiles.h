// Low-rank updates of bfloat16 rows by bfloat16 matrices on AMX.
//
// For every 32 inputs, or up to 16 rows of B, an instruction adds up the products of even items in their order
// and those of odd items in theirs, then both sums, and adds that to what the tile holds. Numbers too small for
// the usual precision are zero. `expand_few` computes the same in vectors, so that a row has the same bits
// alone, where vectors are faster, and among others.
//
// A row of activations leaves little to compute, so the time is that of memory. Matrices are prefetched in the order
// of memory, one ahead of the one at hand, which instructions then read as 16 streams from the second-level cache.
#pragma once
#include "lora_few.h"

#if defined(__AMX_BF16__)
#include <utility>

#include "pool.h"
#include "tiles_amx.h"

namespace lpx {

constexpr bool kHasUpdateTiles = true;

// Makes the compiler write to memory what instructions on tiles are about to read.
inline void before_tiles() { asm volatile("" ::: "memory"); }

// to[i][row] = item i of rows of 16 items, for four rows.
inline void transpose_four(const __m512i (&rows)[4], int32_t* to, int64_t ld) {
    const __m512i low = _mm512_unpacklo_epi32(rows[0], rows[1]);
    const __m512i high = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i low2 = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i high2 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    const __m512i items[4] = {
        _mm512_unpacklo_epi64(low, low2), _mm512_unpackhi_epi64(low, low2),
        _mm512_unpacklo_epi64(high, high2), _mm512_unpackhi_epi64(high, high2)};
    for (int i = 0; i < 4; ++i, to += ld) {
        const auto at = [&](int j) { return reinterpret_cast<__m128i*>(to + 4 * j * ld); };
        _mm_storeu_si128(at(0), _mm512_castsi512_si128(items[i]));
        _mm_storeu_si128(at(1), _mm512_extracti32x4_epi32(items[i], 1));
        _mm_storeu_si128(at(2), _mm512_extracti32x4_epi32(items[i], 2));
        _mm_storeu_si128(at(3), _mm512_extracti32x4_epi32(items[i], 3));
    }
}

inline __mmask16 first_lanes(int64_t n) { return (1u << n) - 1; }

// A thread's updates. The registers are in use from the first to destruction.
class TileUpdates {
public:
    static constexpr int64_t kMaxRows = 3 * kTileRows;
    // Rows that are expanded in vectors.
    static constexpr int kFewRows = 4;

    // Changing how vectors treat tiny numbers waits for all loads, so it happens once, if `is_used` at all.
    explicit TileUpdates(bool is_used) : before_(_mm_getcsr()) {
        if (is_used) _mm_setcsr(before_ | kTinyIsZero);
    }
    TileUpdates(const TileUpdates&) = delete;
    ~TileUpdates() {
        _mm_setcsr(before_);
        if (configured_ != 0) _tile_release();
    }

    // out[row][A row] += x[row] . A over n columns, for up to kMaxRows rows. `next` is read after A.
    void shrink(const bf16* x, int64_t ldx, int64_t num_rows, const bf16* a, int64_t num_a,
                int64_t n, float* out, int64_t ldout, const Following& next) {
        const Inputs in = inputs_of(x, ldx, num_rows, n);
        for (int64_t r = 0; r < num_a; r += kTileRows) {
            const int64_t count = smaller(num_a - r, kTileRows);
            configure_shrink(count, num_rows);
            Prefetching ahead(after(a, num_a, r + count, n, next), tiles_of(n));
            with_count<3>(ceil_div(num_rows, kTileRows), [&](auto blocks) {
                shrink_rows<blocks.value>(in, num_rows, a + r * n, count, n, out + r, ldout, ahead);
            });
        }
    }

    // y[row] += shrunk[row] B over n columns of ldb, which `left` follow, for up to kMaxRows rows. `next` is read
    // after B.
    void expand(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b, int64_t n,
                int64_t ldb, int64_t left, const float* shrunk, int64_t ld, const Following& next) {
        alignas(64) bf16 factors[kMaxRows * kTileRows];
        for (int64_t r = 0; r < num_b; r += kTileRows) {
            const int64_t count = smaller(num_b - r, kTileRows);
            for (int64_t row = 0; row < num_rows; ++row) {
                const float* from = shrunk + row * ld + r;
                store(factors + row * kTileRows,
                      Vec{_mm512_maskz_loadu_ps(first_lanes(count), from)});
            }
            const bf16* rows = b + r * ldb;
            const bool ends = r + count == num_b && left == 0;
            Prefetching ahead(n == ldb ? after(b, num_b, r + count, n, next)
                                       : ends ? next : Following{nullptr, 0},
                              ceil_div(n, kTileInputs));
            const bool in_tiles = num_rows > kFewRows;
            const int64_t whole = in_tiles ? n / kTileInputs * kTileInputs : 0;
            if (in_tiles) expand_tiles(y, ldy, num_rows, rows, count, n, ldb, left, factors, ahead);
            if (whole < n) expand_vectors(y, ldy, num_rows, rows, count, whole, n, ldb, factors, ahead);
        }
    }

private:
    // Pairs of up to 16 rows of activations: those of a block of rows begin at + block * block_items, and each
    // line has the same pair of all rows.
    struct Inputs {
        const bf16* at;
        int64_t line_items, block_items;
    };

    static constexpr unsigned kTinyIsZero = 0x8040;  // of operands and of results
    // Columns whose pairs are interleaved before they are multiplied.
    static constexpr int64_t kStripColumns = 512;

    static Following after(const bf16* rows, int64_t num_rows, int64_t row, int64_t n,
                           const Following& next) {
        const int64_t count = smaller(num_rows - row, kTileRows);
        if (count == 0) return next;
        return {rows + row * n, count * n * int64_t(sizeof(bf16))};
    }

    // A single row has its pairs in order. Others are copied, with zeros behind the last.
    static Inputs inputs_of(const bf16* x, int64_t ldx, int64_t num_rows, int64_t n) {
        if (num_rows == 1 && n % kTileInputs == 0) return {x, 2, 0};
        const int64_t width = smaller(ceil_div(num_rows, 4) * 4, kTileRows);
        const int64_t block = tiles_of(n) * kTileRows * width;
        int32_t* to =
            reinterpret_cast<int32_t*>(scratch(3, ceil_div(num_rows, kTileRows) * block));
        for (int64_t row = 0; row < num_rows; row += 4) {
            int32_t* out = to + row / kTileRows * block + row % kTileRows;
            for (int64_t k = 0; k < n; k += kTileInputs) {
                __m512i rows[4];
                for (int i = 0; i < 4; ++i) {
                    const bf16* from = x + (row + i) * ldx + k;
                    rows[i] = (__m512i)load_pairs_n(from, row + i < num_rows ? n - k : 0).v;
                }
                transpose_four(rows, out + k / 2 * width, width);
            }
        }
        return {reinterpret_cast<const bf16*>(to), 2 * width, 2 * block};
    }

    // Sums of blocks of rows in tiles 0 to 2, their pairs in 3 to 5, rows of A in 6.
    void configure_shrink(int64_t num_a, int64_t num_rows) {
        if (!begin_configuring(1, num_a, num_rows)) return;
        TileConfig config;
        for (int block = 0; block < 3 && block * kTileRows < num_rows; ++block) {
            const int64_t count = smaller(num_rows - block * kTileRows, kTileRows);
            config.set(block, static_cast<uint8_t>(num_a), static_cast<uint16_t>(4 * count));
            config.set(3 + block, kTileRows, static_cast<uint16_t>(4 * count));
        }
        config.set(6, static_cast<uint8_t>(num_a), kTileBytes);
        config.load();
    }

    // Sums of two tiles of columns in tiles 0 and 1, factors in 4, pairs of rows of B in 6 and 7. The last rows that
    // fill no tile have their sums in 2 and 3 and their factors in 5.
    void configure_expand(int64_t num_pairs, int64_t num_rows) {
        if (!begin_configuring(2, num_pairs, num_rows)) return;
        TileConfig config;
        const uint16_t bytes = static_cast<uint16_t>(4 * num_pairs);
        const uint8_t rest = static_cast<uint8_t>(num_rows % kTileRows);
        if (num_rows >= kTileRows) {
            for (int tile : {0, 1}) config.set(tile, kTileRows, kTileBytes);
            config.set(4, kTileRows, bytes);
        }
        if (rest > 0) {
            for (int tile : {2, 3}) config.set(tile, rest, kTileBytes);
            config.set(5, rest, bytes);
        }
        for (int tile : {6, 7}) config.set(tile, static_cast<uint8_t>(num_pairs), kTileBytes);
        config.load();
    }

    // Whether the registers have another configuration, which this one then replaces.
    bool begin_configuring(int64_t kind, int64_t rows, int64_t columns) {
        const int64_t wanted = (kind * 64 + rows) * 64 + columns;
        return std::exchange(configured_, wanted) != wanted;
    }

    // For up to 16 rows of A and B blocks of rows of activations.
    template <int B>
    static void shrink_rows(const Inputs& in, int64_t num_rows, const bf16* a, int64_t num_a,
                            int64_t n, float* out, int64_t ldout, Prefetching& ahead) {
        alignas(64) bf16 last[kTileItems];
        const int64_t whole = n / kTileInputs, left = n % kTileInputs;
        for (int64_t r = 0; left > 0 && r < num_a; ++r) {
            store_pairs(last + r * kTileInputs, load_pairs_n(a + r * n + whole * kTileInputs, left));
        }
        before_tiles();
        _tile_zero(0);
        if (B > 1) _tile_zero(1);
        if (B > 2) _tile_zero(2);
        const int64_t line = in.line_items * sizeof(bf16);
        for (int64_t k = 0; k < tiles_of(n); ++k) {
            ahead.step();
            const bf16* pairs = in.at + k * kTileRows * in.line_items;
            if (k < whole) {
                _tile_loadd(6, a + k * kTileInputs, n * sizeof(bf16));
            } else {
                _tile_loadd(6, last, kTileBytes);
            }
            _tile_loadd(3, pairs, line);
            _tile_dpbf16ps(0, 6, 3);
            if (B > 1) {
                _tile_loadd(4, pairs + in.block_items, line);
                _tile_dpbf16ps(1, 6, 4);
            }
            if (B > 2) {
                _tile_loadd(5, pairs + 2 * in.block_items, line);
                _tile_dpbf16ps(2, 6, 5);
            }
        }
        alignas(64) float sums[B][kTileRows * kTileRows];
        if (num_rows == 1) {
            _tile_stored(0, sums[0], sizeof(float));
            return add_sums(sums[0], num_a, out);
        }
        _tile_stored(0, sums[0], kTileBytes);
        if (B > 1) _tile_stored(1, sums[B > 1], kTileBytes);
        if (B > 2) _tile_stored(2, sums[B > 2 ? 2 : 0], kTileBytes);
        for (int block = 0; block < B; ++block) {
            const int64_t first = block * kTileRows;
            add_block(sums[block], smaller(num_rows - first, kTileRows), num_a,
                      out + first * ldout, ldout);
        }
    }

    // out[i] += sums[i]
    static void add_sums(const float* sums, int64_t count, float* out) {
        const __mmask16 mask = first_lanes(count);
        const __m512 before = _mm512_maskz_loadu_ps(mask, out);
        _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(before, _mm512_loadu_ps(sums)));
    }

    // out[row][A row] += sums[A row][row]; rows of 16 sums, of which those of missing rows are anything.
    static void add_block(const float* sums, int64_t num_rows, int64_t num_a, float* out,
                          int64_t ldout) {
        alignas(64) float turned[kTileRows * kTileRows];
        for (int64_t r = 0; r < num_a; r += 4) {
            __m512i rows[4];
            for (int i = 0; i < 4; ++i) rows[i] = _mm512_loadu_si512(sums + (r + i) * kTileRows);
            transpose_four(rows, reinterpret_cast<int32_t*>(turned) + r, kTileRows);
        }
        for (int64_t row = 0; row < num_rows; ++row) {
            add_sums(turned + row * kTileRows, num_a, out + row * ldout);
        }
    }

    // For up to 16 rows of B, over whole tiles of columns.
    void expand_tiles(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b,
                      int64_t n, int64_t ldb, int64_t left, const bf16* factors,
                      Prefetching& ahead) {
        alignas(64) bf16 strip[kStripColumns * kTileRows];
        const int64_t num_pairs = ceil_div(num_b, 2), rest = num_rows % kTileRows;
        configure_expand(num_pairs, num_rows);
        const int64_t tile_items = num_pairs * kTileInputs, end = n / kTileInputs * kTileInputs;
        for (int64_t first = 0; first < end; first += kStripColumns) {
            const int64_t width = smaller(kStripColumns, end - first);
            for (int64_t column = 0; column < width; column += kTileInputs) {
                ahead.step();
                // The same of the next n columns, which are read after all rows of these.
                const bf16* later = b + n + first + column;
                for (int64_t r = 0; first + column < left && r < num_b; ++r) {
                    __builtin_prefetch(later + r * ldb, 0, 2);
                }
                interleave_rows(b + first + column, num_b, ldb, strip + column * 2 * num_pairs);
            }
            before_tiles();
            for (int64_t column = 0; column < width; column += kTileInputs) {
                const bf16* pairs = strip + column * 2 * num_pairs;
                float* out = y + first + column;
                const bf16* from = factors;
                _tile_loadd(6, pairs, kTileBytes);
                _tile_loadd(7, pairs + tile_items, kTileBytes);
                const int64_t stride = ldy * sizeof(float);
                for (int64_t row = kTileRows; row <= num_rows; row += kTileRows) {
                    _tile_loadd(4, from, kTileRows * sizeof(bf16));
                    _tile_loadd(0, out, stride);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(1, out + kTileRows, stride);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_stored(0, out, stride);
                    _tile_stored(1, out + kTileRows, stride);
                    out += kTileRows * ldy;
                    from += kTileRows * kTileRows;
                }
                if (rest == 0) continue;
                _tile_loadd(5, from, kTileRows * sizeof(bf16));
                _tile_loadd(2, out, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_loadd(3, out + kTileRows, stride);
                _tile_dpbf16ps(3, 5, 7);
                _tile_stored(2, out, stride);
                _tile_stored(3, out + kTileRows, stride);
            }
        }
    }

    // Two tiles of pairs of rows of B, for 32 columns. A last row without a partner is paired with zeros.
    static void interleave_rows(const bf16* b, int64_t num_b, int64_t n, bf16* tiles) {
        const int64_t num_pairs = ceil_div(num_b, 2);
        for (int64_t pair = 0; pair < num_pairs; ++pair, b += 2 * n, tiles += kTileInputs) {
            Pairs first, last;
            const bool is_alone = 2 * pair + 1 == num_b;
            interleave(load_pairs(b), load_pairs_n(b + n, is_alone ? 0 : kTileInputs), first, last);
            store_pairs(tiles, first);
            store_pairs(tiles + num_pairs * kTileInputs, last);
        }
    }

    // The same for any number of columns, [begin, end) of n.
    static void expand_vectors(float* y, int64_t ldy, int64_t num_rows, const bf16* b,
                               int64_t num_b, int64_t begin, int64_t n, int64_t ldb,
                               const bf16* factors, Prefetching& ahead) {
        for (int64_t row = 0; row < num_rows; row += kFewRows) {
            with_count<kFewRows>(num_rows - row, [&](auto count) {
                expand_few<count.value>(y + row * ldy, ldy, b, num_b, begin, n, ldb,
                                        factors + row * kTileRows, ahead);
            });
        }
    }

    const unsigned before_;
    int64_t configured_ = 0;
};

}  // namespace lpx

#else

namespace lpx {

// Declared for a processor without AMX; never called.
constexpr bool kHasUpdateTiles = false;
struct TileUpdates {
    explicit TileUpdates(bool) {}
    static constexpr int64_t kMaxRows = INT64_MAX, kFewRows = INT64_MAX;
    void shrink(const bf16* x, int64_t ldx, int64_t num_rows, const bf16* a, int64_t num_a,
                int64_t n, float* out, int64_t ldout, const Following& next);
    void expand(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b, int64_t n,
                int64_t ldb, int64_t left, const float* shrunk, int64_t ld, const Following& next);
};
inline void prefetch_all(const Following&) {}

}  // namespace lpx

#endif
