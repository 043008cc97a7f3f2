// Codes as the right operands of AMX tiles. Those that are not in memory as tiles are written to a buffer.
#pragma once
#include "codes.h"
#include "tiles.h"

#if defined(__AMX_INT8__)
namespace lpx {

// Tiles for 16 outputs and for the other 16 of a panel, `step` bytes from one to the next.
struct Tiles {
    const uint8_t *first, *second;
    int64_t num, stride, step;
};

// The tiles of two blocks: one is multiplied while the next is made.
template <Code Kind>
struct CodeTiles {
    static constexpr bool kInDigits = Kind != Code::kFloat8;
    static constexpr int64_t kRowInputs = kInDigits ? 4 : 2;  // of a row of a tile

    Tiles tiles[2];
    int64_t tile_inputs, tile_bytes, tile_bits = 0;
    int64_t quarter_bytes;  // a quarter of the codes of two tiles

    explicit CodeTiles(int64_t block_size) {
        tile_inputs = smaller(block_size, kTileRows * kRowInputs);
        tile_bytes = tile_inputs / kRowInputs * kTileBytes;
        quarter_bytes = tile_inputs / kQuad * kQuadBytes / 4;
        while (int64_t(1) << tile_bits < tile_inputs) ++tile_bits;
    }

    // Makes tiles number `which` of a block's codes.
    template <bool kPrefetches>
    void prepare(const uint8_t* codes, int64_t num_inputs, int which) {
        const int64_t num_tiles = (num_inputs + tile_inputs - 1) >> tile_bits;
        Tiles& own = tiles[which];
        const bool is_whole = num_inputs == num_tiles << tile_bits;
        if (Kind == Code::kInt8 && is_whole) {
            own = {codes, codes + kTileBytes, num_tiles, kQuadBytes, tile_inputs / kQuad * kQuadBytes};
            return;
        }
        uint8_t* out = buffers_[which];
        const int64_t num_quads = ceil_div(num_inputs, kQuad);
        const uint8_t* const end = codes + num_quads * kQuadBytes;
        if (Kind == Code::kInt4 && is_whole) {
            own = {codes, out, num_tiles, kTileBytes, tile_bytes};
#pragma GCC unroll 4
            for (; codes < end; codes += kQuadBytes, out += kTileBytes) {
                if (kPrefetches) prefetch_after<Kind>(codes);
                _mm512_store_si512(out, upper_halves(_mm512_loadu_si512(codes)));
            }
            return;
        }
        own = {out, out + tile_bytes, num_tiles, kTileBytes, 2 * tile_bytes};
        const int64_t tile_quads = tile_inputs / kQuad;
        while (codes < end) {
            const int64_t n = smaller(tile_quads, (end - codes) / kQuadBytes);
            if (!kInDigits && n < tile_quads) std::memset(out, 0, 2 * tile_bytes);
            uint8_t* to = out;
#pragma GCC unroll 4
            for (int64_t i = 0; i < n; ++i, codes += kQuadBytes, to += kQuad / kRowInputs * kTileBytes) {
                if (kPrefetches) prefetch_after<Kind>(codes);
                unpack(codes, to, to + tile_bytes);
            }
            out += 2 * tile_bytes;
        }
    }

private:
    static constexpr int64_t kQuadBytes = Block<Kind>::kQuadBytes;
    static constexpr int64_t kMaxBlock = Kind == Code::kInt8 ? 256 : 128;

    // A quad, to the next rows of two tiles. Four-bit codes are multiplied as complete bytes, which are those of
    // the first 16 outputs plus 16 times the others', and as the latter alone.
    static void unpack(const uint8_t* quad, uint8_t* first, uint8_t* second) {
        if constexpr (Kind == Code::kInt8) {
            _mm512_store_si512(first, _mm512_loadu_si512(quad));
            _mm512_store_si512(second, _mm512_loadu_si512(quad + 64));
        } else if constexpr (Kind == Code::kInt4) {
            const __m512i pairs = _mm512_loadu_si512(quad);
            _mm512_store_si512(first, pairs);
            _mm512_store_si512(second, upper_halves(pairs));
        } else {
            _mm512_store_si512(first, widened(quad));
            _mm512_store_si512(first + 64, widened(quad + 32));
            _mm512_store_si512(second, widened(quad + 64));
            _mm512_store_si512(second + 64, widened(quad + 96));
        }
    }

    static __m512i upper_halves(__m512i codes) {
        return _mm512_and_si512(codes, _mm512_set1_epi8(int8_t(0xf0)));
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

    alignas(64) uint8_t buffers_[2][kMaxBlock / kRowInputs * 2 * kTileBytes];
};

}  // namespace lpx
#endif
