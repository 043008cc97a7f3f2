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
#include "transpose.h"

namespace lpx {

constexpr bool kHasUpdateTiles = true;

// A thread's updates. The registers are in use from the first to destruction.
class TileUpdates {
public:
    static constexpr int64_t kMaxRows = 4 * kTileRows;
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

    // out[row][A row] += x[row] . A over n columns, for up to kMaxRows rows. `next` is read after A. The rows and
    // columns at an address are the same until `expand` is called.
    void shrink(const bf16* x, int64_t ldx, int64_t num_rows, const bf16* a, int64_t num_a,
                int64_t n, float* out, int64_t ldout, const Following& next) {
        if (x != turned_ || n != num_turned_) in_ = inputs_of(x, ldx, num_rows, n);
        turned_ = x;
        num_turned_ = n;
        const Inputs in = in_;
        for (int64_t r = 0; r < num_a; r += kTileRows) {
            const int64_t count = smaller(num_a - r, kTileRows);
            configure_shrink(count, num_rows);
            Prefetching ahead(rows_after(a, num_a, r + count, kTileRows, n, next), tiles_of(n));
            with_count<4>(ceil_div(num_rows, kTileRows), [&](auto blocks) {
                shrink_rows<blocks.value>(in, num_rows, a + r * n, count, n, out + r, ldout, ahead);
            });
        }
    }

    // Items of a row of factors of num_b rows of B: zeros fill the last 16.
    static int64_t factors_of(int64_t num_b) { return ceil_div(num_b, kTileRows) * kTileRows; }

    // Makes rows of factors: `shrunk` in bfloat16.
    static void narrow(const float* shrunk, int64_t ld, int64_t num_rows, int64_t num_b,
                       bf16* factors) {
        for (int64_t row = 0; row < num_rows; ++row, shrunk += ld) {
            for (int64_t r = 0; r < num_b; r += kTileRows, factors += kTileRows) {
                const __mmask16 lanes = first_lanes(smaller(num_b - r, kTileRows));
                store(factors, Vec{_mm512_maskz_loadu_ps(lanes, shrunk + r)});
            }
        }
    }

    // y[row] += factors[row] B over n columns of ldb, which `left` follow, for up to kMaxRows rows. `next` is read
    // after B.
    void expand(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b, int64_t n,
                int64_t ldb, int64_t left, const bf16* factors, const Following& next) {
        turned_ = nullptr;
        const int64_t whole = num_rows > kFewRows ? n / kTileInputs * kTileInputs : 0;
        if (whole > 0) expand_tiles(y, ldy, num_rows, b, num_b, whole, n, ldb, left, factors, next);
        for (int64_t r = 0; whole < n && r < num_b; r += kTileRows) {
            const int64_t count = smaller(num_b - r, kTileRows);
            const bool ends = r + count == num_b && left == 0;
            Prefetching ahead(n == ldb ? rows_after(b, num_b, r + count, kTileRows, n, next)
                                       : ends ? next : Following{nullptr, 0},
                              ceil_div(n, kTileInputs));
            expand_vectors(y, ldy, num_rows, b + r * ldb, count, whole, n, ldb, factors + r,
                           factors_of(num_b), ahead);
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
    // Rows of B whose products are added before the sums are stored.
    static constexpr int64_t kStripRows = 4 * kTileRows;
    static constexpr int64_t kStripItems = kStripRows * kTileInputs;

    // A single row has its pairs in order. Others are copied, with zeros behind the last.
    static Inputs inputs_of(const bf16* x, int64_t ldx, int64_t num_rows, int64_t n) {
        if (num_rows == 1 && n % kTileInputs == 0) return {x, 2, 0};
        const int64_t width = smaller(ceil_div(num_rows, 4) * 4, kTileRows);
        const int64_t block = tiles_of(n) * kTileRows * width;
        int32_t* to =
            reinterpret_cast<int32_t*>(scratch(3, ceil_div(num_rows, kTileRows) * block));
        for (int64_t row = 0; width == kTileRows && row < num_rows; row += kTileRows) {
            const int64_t count = smaller(num_rows - row, kTileRows);
            int32_t* out = to + row / kTileRows * block;
            const bf16* from = x + row * ldx;
            for (int64_t k = 0; k < n; k += kTileInputs, out += kTileRows * kTileRows) {
                transpose_tile(from + k, ldx, count, n - k, out);
            }
        }
        for (int64_t row = 0; width < kTileRows && row < num_rows; row += 4) {
            int32_t* out = to + row;
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

    // Pairs of 32 inputs, of which `left` are left, and zeros after those.
    static void transpose_tile(const bf16* x, int64_t ldx, int64_t num_rows, int64_t left,
                               int32_t* to) {
        alignas(64) bf16 last[kTileItems];
        if (left < kTileInputs) {
            for (int64_t row = 0; row < num_rows; ++row) {
                store_pairs(last + row * kTileInputs, load_pairs_n(x + row * ldx, left));
            }
            return transpose_pairs(last, kTileInputs, num_rows, to);
        }
        transpose_pairs(x, ldx, num_rows, to);
    }

    // Sums of blocks of rows in tiles 0 to 3, pairs of the last block in 4, of others in 5 and 6, rows of A in 7.
    void configure_shrink(int64_t num_a, int64_t num_rows) {
        if (!begin_configuring(1, num_a, num_rows)) return;
        TileConfig config;
        const int64_t last = (num_rows - 1) / kTileRows;
        const uint16_t bytes = static_cast<uint16_t>(4 * (num_rows - last * kTileRows));
        for (int block = 0; block <= last; ++block) {
            config.set(block, static_cast<uint8_t>(num_a), block < last ? kTileBytes : bytes);
        }
        config.set(4, kTileRows, bytes);
        for (int tile : {5, 6}) config.set(tile, kTileRows, kTileBytes);
        config.set(7, static_cast<uint8_t>(num_a), kTileBytes);
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
        if (B > 3) _tile_zero(3);
        const int64_t line = in.line_items * sizeof(bf16);
        for (int64_t k = 0; k < tiles_of(n); ++k) {
            ahead.step();
            const bf16* pairs = in.at + k * kTileRows * in.line_items;
            if (k < whole) {
                _tile_loadd(7, a + k * kTileInputs, n * sizeof(bf16));
            } else {
                _tile_loadd(7, last, kTileBytes);
            }
            _tile_loadd(4, pairs + (B - 1) * in.block_items, line);
            if (B > 1) {
                _tile_loadd(5, pairs, line);
                _tile_dpbf16ps(0, 7, 5);
            }
            if (B > 2) {
                _tile_loadd(6, pairs + in.block_items, line);
                _tile_dpbf16ps(1, 7, 6);
            }
            if (B > 3) {
                _tile_loadd(5, pairs + 2 * in.block_items, line);
                _tile_dpbf16ps(2, 7, 5);
            }
            if (B == 1) _tile_dpbf16ps(0, 7, 4);
            if (B == 2) _tile_dpbf16ps(1, 7, 4);
            if (B == 3) _tile_dpbf16ps(2, 7, 4);
            if (B == 4) _tile_dpbf16ps(3, 7, 4);
        }
        alignas(64) float sums[B][kTileRows * kTileRows];
        if (num_rows == 1) {
            _tile_stored(0, sums[0], sizeof(float));
            return add_sums(sums[0], num_a, out);
        }
        _tile_stored(0, sums[0], kTileBytes);
        if (B > 1) _tile_stored(1, sums[B > 1], kTileBytes);
        if (B > 2) _tile_stored(2, sums[B > 2 ? 2 : 0], kTileBytes);
        if (B > 3) _tile_stored(3, sums[B > 3 ? 3 : 0], kTileBytes);
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

    // Over `whole` of n columns, which fill tiles. Columns are put in pairs while those before are multiplied.
    void expand_tiles(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b,
                      int64_t whole, int64_t n, int64_t ldb, int64_t left, const bf16* factors,
                      const Following& next) {
        alignas(64) bf16 strips[2][kStripItems];
        const int64_t num_pairs = smaller(ceil_div(num_b, 2), kTileRows / 2);
        configure_expand(num_pairs, num_rows);
        for (int64_t r = 0; r < num_b; r += kStripRows) {
            const int64_t count = smaller(num_b - r, kStripRows);
            const Factors from{factors + r, factors_of(num_b), ceil_div(count, kTileRows), num_pairs};
            const bool ends = r + count == num_b && left == 0;
            Prefetching ahead(ends ? next : Following{nullptr, 0}, whole / kTileInputs);
            int which = 0;
            for (int64_t column = 0; column < whole; column += kTileInputs, which ^= 1) {
                ahead.step();
                const bf16* rows = b + r * ldb + column;
                // The same of the next n columns, which are read after all rows of these.
                for (int64_t i = 0; column < left && i < count; ++i) {
                    __builtin_prefetch(rows + n + i * ldb, 0, 2);
                }
                for (int64_t i = 0; i < from.num_groups; ++i) {
                    interleave_rows(rows + i * kTileRows * ldb,
                                    smaller(count - i * kTileRows, kTileRows), ldb, num_pairs,
                                    strips[which] + i * 2 * num_pairs * kTileInputs);
                }
                if (column > 0) {
                    multiply_strip(strips[which ^ 1], from, num_rows, y + column - kTileInputs, ldy);
                }
            }
            multiply_strip(strips[which ^ 1], from, num_rows, y + whole - kTileInputs, ldy);
        }
    }

    // Rows of factors of groups of num_pairs pairs of rows of B.
    struct Factors {
        const bf16* at;
        int64_t stride, num_groups, num_pairs;
    };

    // Adds the products with a strip, two tiles for each group of rows of B, to 32 columns.
    static void multiply_strip(const bf16* strip, const Factors& from, int64_t num_rows, float* out,
                               int64_t ldy) {
        const int64_t stride = ldy * sizeof(float), line = from.stride * sizeof(bf16);
        const int64_t tile_items = from.num_pairs * kTileInputs;
        before_tiles();
        int64_t row = 0;
        for (; row + kTileRows <= num_rows; row += kTileRows, out += kTileRows * ldy) {
            _tile_loadd(0, out, stride);
            _tile_loadd(1, out + kTileRows, stride);
            for (int64_t i = 0; i < from.num_groups; ++i) {
                const bf16* pairs = strip + i * 2 * tile_items;
                _tile_loadd(4, from.at + row * from.stride + i * kTileRows, line);
                _tile_loadd(6, pairs, kTileBytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, pairs + tile_items, kTileBytes);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, out, stride);
            _tile_stored(1, out + kTileRows, stride);
        }
        if (row == num_rows) return;
        _tile_loadd(2, out, stride);
        _tile_loadd(3, out + kTileRows, stride);
        for (int64_t i = 0; i < from.num_groups; ++i) {
            const bf16* pairs = strip + i * 2 * tile_items;
            _tile_loadd(5, from.at + row * from.stride + i * kTileRows, line);
            _tile_loadd(6, pairs, kTileBytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(7, pairs + tile_items, kTileBytes);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out, stride);
        _tile_stored(3, out + kTileRows, stride);
    }

    // Two tiles of num_pairs pairs of rows of B, for 32 columns. Zeros stand for rows after the last.
    static void interleave_rows(const bf16* b, int64_t num_b, int64_t n, int64_t num_pairs,
                                bf16* tiles) {
        for (int64_t pair = 0; pair < num_pairs; ++pair, b += 2 * n, tiles += kTileInputs) {
            Pairs first, last;
            const int64_t left = num_b - 2 * pair;
            interleave(load_pairs_n(b, left > 0 ? kTileInputs : 0),
                       load_pairs_n(b + n, left > 1 ? kTileInputs : 0), first, last);
            store_pairs(tiles, first);
            store_pairs(tiles + num_pairs * kTileInputs, last);
        }
    }

    // The same for any number of columns, [begin, end) of n.
    static void expand_vectors(float* y, int64_t ldy, int64_t num_rows, const bf16* b,
                               int64_t num_b, int64_t begin, int64_t n, int64_t ldb,
                               const bf16* factors, int64_t ldf, Prefetching& ahead) {
        for (int64_t row = 0; row < num_rows; row += kFewRows) {
            with_count<kFewRows>(num_rows - row, [&](auto count) {
                expand_few<count.value>(y + row * ldy, ldy, b, num_b, begin, n, ldb,
                                        factors + row * ldf, ldf, ahead);
            });
        }
    }

    const unsigned before_;
    int64_t configured_ = 0;
    Inputs in_{};
    const bf16* turned_ = nullptr;  // what `in_` has the rows of
    int64_t num_turned_ = 0;
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
    static int64_t factors_of(int64_t num_b);
    static void narrow(const float*, int64_t ld, int64_t num_rows, int64_t num_b, bf16* factors);
    void expand(float* y, int64_t ldy, int64_t num_rows, const bf16* b, int64_t num_b, int64_t n,
                int64_t ldb, int64_t left, const bf16* factors, const Following& next);
};

}  // namespace lpx

#endif
