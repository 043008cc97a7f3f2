// Gated delta nets: see ops/recurrence/README.md. States lie in cells of the arena.
//
// Tokens are computed one after the other, each with the same operations whatever the lengths of
// spans are, so that a state does not depend on how a prompt was cut into chunks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace lpx {
namespace {

// Vectors of a strip: its columns of a state stay in the first cache from token to token.
constexpr int64_t kStripVectors = 4;
constexpr int64_t kStrip = kStripVectors * kLanes;
// Channels of one task of the convolution.
constexpr int64_t kTaskChannels = 512;
constexpr float kEps = 1e-6f;

struct Shape {
    int64_t key_heads, value_heads, key_dim, value_dim, taps;
    int64_t first_cell;    // of the layer, among the cells of a state
    int64_t cell_items, block_cells, block_items;
    int64_t state_blocks;  // blocks of the state of a sequence, of all layers
    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// The states of a step, of one layer.
struct States {
    float* arena;
    const int64_t* sources;  // [spans, state_blocks]; -1 = zeros
    const int64_t* targets;
    const int64_t* words;     // [spans, 2]: token rows [begin, end)
    const int64_t* row_ends;  // [rows]
};

// The item of the arena at which a cell of the layer begins, in a state with these blocks.
inline int64_t item_of(const int64_t* blocks, const Shape& shape, int64_t cell) {
    cell += shape.first_cell;
    const int64_t block = blocks[cell / shape.block_cells];
    return block * shape.block_items + cell % shape.block_cells * shape.cell_items;
}

// Copies items [begin, begin + n) of the convolution's inputs between its cells and `buffer`.
void copy_inputs(float* arena, const int64_t* blocks, const Shape& shape, int64_t begin, int64_t n,
                 float* buffer, bool is_read) {
    while (n > 0) {
        const int64_t cell = begin / shape.cell_items, first = begin % shape.cell_items;
        const int64_t count = std::min(n, shape.cell_items - first);
        float* items = arena + item_of(blocks, shape, shape.value_heads + cell) + first;
        if (is_read) std::memcpy(buffer, items, count * sizeof(float));
        else std::memcpy(items, buffer, count * sizeof(float));
        begin += count, buffer += count, n -= count;
    }
}

// silu(convolution) of some channels of one row's tokens.
template <class T>
void convolve(const T* x, int64_t ldx, const float* taps, float* y, const States& states,
              const Shape& shape, int64_t row, int64_t channel, int64_t width) {
    const int64_t channels = shape.channels(), before = shape.taps - 1;
    float* inputs = scratch(0, shape.taps * kTaskChannels);  // a ring of the last `taps` rows
    for (int64_t span = row == 0 ? 0 : states.row_ends[row - 1]; span < states.row_ends[row]; ++span) {
        const int64_t* source = states.sources + span * shape.state_blocks;
        const int64_t* target = states.targets + span * shape.state_blocks;
        const int64_t begin = states.words[2 * span], end = states.words[2 * span + 1];
        for (int64_t i = 0; i < before; ++i) {
            float* slot = inputs + i * kTaskChannels;
            if (source[0] < 0) std::fill(slot, slot + width, 0.0f);
            else copy_inputs(states.arena, source, shape, i * channels + channel, width, slot, true);
        }
        for (int64_t t = begin; t < end; ++t) {
            const int64_t newest = (t - begin + before) % shape.taps;
            for (int64_t c = 0; c < width; c += kLanes) {
                const int64_t n = width - c;
                store_n(inputs + newest * kTaskChannels + c, load_n(x + t * ldx + channel + c, n), n);
                Vec sum = zero();
                for (int64_t i = 0; i < shape.taps; ++i) {
                    const int64_t slot = (t - begin + i) % shape.taps;
                    sum = fma(load_n(inputs + slot * kTaskChannels + c, n),
                              load_n(taps + i * channels + channel + c, n), sum);
                }
                const Vec silu = div(sum, add(set1(1.0f), exp(sub(zero(), sum))));
                store_n(y + t * channels + channel + c, silu, n);
            }
        }
        for (int64_t i = 0; i < before; ++i) {
            const int64_t slot = (end - begin + i) % shape.taps;
            copy_inputs(states.arena, target, shape, i * channels + channel, width,
                        inputs + slot * kTaskChannels, false);
        }
    }
}

// x / length of x * scale.
void normalise(const float* x, float* y, int64_t n, float scale) {
    Vec squares = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec value = load_n(x + i, n - i);
        squares = fma(value, value, squares);
    }
    const Vec factor = set1(scale / std::sqrt(sum(squares) + kEps));
    for (int64_t i = 0; i < n; i += kLanes) {
        store_n(y + i, mul(load_n(x + i, n - i), factor), n - i);
    }
}

float dot(const float* x, const float* y, int64_t n) {
    Vec total = zero();
    for (int64_t i = 0; i < n; i += kLanes) total = fma(load_n(x + i, n - i), load_n(y + i, n - i), total);
    return sum(total);
}

// What the recurrence of a head needs of one token: q, k, and these.
struct Token {
    float decay, beta, qk, unused;
};

// Columns [0, n) of one token's update. `from` = null: the state before is zero.
template <class T, int kVectors>
void advance(const float* from, float* to, int64_t ld, const float* q, const float* k,
             const Token& token, const float* v, T* y, int64_t key_dim, int64_t n) {
    Vec known[kVectors], read[kVectors], correction[kVectors];
    for (int j = 0; j < kVectors; ++j) known[j] = read[j] = zero();
    if (from != nullptr) {
        for (int64_t i = 0; i < key_dim; ++i) {
            const Vec ki = set1(k[i]), qi = set1(q[i]);
            for (int j = 0; j < kVectors; ++j) {
                const Vec state = load_n(from + i * ld + j * kLanes, n - j * kLanes);
                known[j] = fma(ki, state, known[j]);
                read[j] = fma(qi, state, read[j]);
            }
        }
    }
    const Vec decay = set1(token.decay), beta = set1(token.beta), qk = set1(token.qk);
    for (int j = 0; j < kVectors; ++j) {
        const int64_t left = n - j * kLanes;
        const Vec error = sub(load_n(v + j * kLanes, left), mul(decay, known[j]));
        correction[j] = mul(beta, error);
        store_n(y + j * kLanes, fma(qk, correction[j], mul(decay, read[j])), left);
    }
    for (int64_t i = 0; i < key_dim; ++i) {
        const Vec ki = set1(k[i]);
        for (int j = 0; j < kVectors; ++j) {
            const int64_t left = n - j * kLanes;
            Vec state = mul(ki, correction[j]);
            if (from != nullptr) {
                state = fma(decay, load_n(from + i * ld + j * kLanes, left), state);
            }
            store_n(to + i * ld + j * kLanes, state, left);
        }
    }
}

template <class T>
struct Inputs {
    const float* mixed;  // [T, channels]
    const T *a, *b;
    int64_t lda, ldb;
    const float *rates, *bias;
    T* y;
};

inline float widened_scalar(float x) { return x; }
inline float widened_scalar(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// All tokens of one row, for one value head.
template <class T>
void recur(const Inputs<T>& in, const States& states, const Shape& shape, int64_t row, int64_t head) {
    const int64_t dk = shape.key_dim, dv = shape.value_dim, channels = shape.channels();
    const int64_t key_head = head / (shape.value_heads / shape.key_heads);
    const int64_t keys = shape.key_heads * dk;
    for (int64_t span = row == 0 ? 0 : states.row_ends[row - 1]; span < states.row_ends[row]; ++span) {
        const int64_t begin = states.words[2 * span], count = states.words[2 * span + 1] - begin;
        float* q = scratch(0, count * dk);
        float* k = scratch(1, count * dk);
        Token* tokens = reinterpret_cast<Token*>(scratch(2, count * 4));
        for (int64_t t = 0; t < count; ++t) {
            const float* x = in.mixed + (begin + t) * channels + key_head * dk;
            normalise(x, q + t * dk, dk, 1.0f / std::sqrt(static_cast<float>(dk)));
            normalise(x + keys, k + t * dk, dk, 1.0f);
            const float step = widened_scalar(in.a[(begin + t) * in.lda + head]) + in.bias[head];
            const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
            const float gate = widened_scalar(in.b[(begin + t) * in.ldb + head]);
            tokens[t] = {std::exp(in.rates[head] * softplus), 1.0f / (1.0f + std::exp(-gate)),
                         dot(q + t * dk, k + t * dk, dk), 0.0f};
        }
        const int64_t* source = states.sources + span * shape.state_blocks;
        const float* before = source[0] < 0 ? nullptr : states.arena + item_of(source, shape, head);
        const int64_t* blocks = states.targets + span * shape.state_blocks;
        float* target = states.arena + item_of(blocks, shape, head);
        for (int64_t column = 0; column < dv; column += kStrip) {
            const float* from = before == nullptr ? nullptr : before + column;
            const int64_t n = std::min(kStrip, dv - column);
            for (int64_t t = 0; t < count; ++t) {
                const float* v = in.mixed + (begin + t) * channels + 2 * keys + head * dv + column;
                T* y = in.y + ((begin + t) * shape.value_heads + head) * dv + column;
                const auto step = [&](auto vectors) {
                    advance<T, decltype(vectors)::value>(from, target + column, dv, q + t * dk,
                                                         k + t * dk, tokens[t], v, y, dk, n);
                };
                switch ((n + kLanes - 1) / kLanes) {
                    case 1: step(std::integral_constant<int, 1>()); break;
                    case 2: step(std::integral_constant<int, 2>()); break;
                    case 3: step(std::integral_constant<int, 3>()); break;
                    default: step(std::integral_constant<int, 4>());
                }
                from = target + column;
            }
        }
    }
}

}  // namespace
}  // namespace lpx

// y = the outputs of a step; the states advance. `layout` = the fields of `Shape`, int64, in their
// order. `taps` are [K, channels], `mixed` is [T, channels] to work in.
LPX_EXPORT void lpx_delta_net(const void* qkv, int64_t ldq, const void* a, int64_t lda, const void* b,
                              int64_t ldb, int64_t dtype, const void* taps, const void* rates,
                              const void* bias, void* mixed, void* y, void* arena, const void* layout,
                              const void* sources, const void* targets, const void* words,
                              const void* row_ends, int64_t num_rows) {
    using namespace lpx;
    const Shape shape = *static_cast<const Shape*>(layout);
    const States states{static_cast<float*>(arena), static_cast<const int64_t*>(sources),
                        static_cast<const int64_t*>(targets), static_cast<const int64_t*>(words),
                        static_cast<const int64_t*>(row_ends)};
    // Programs have as many rows as tokens, of which the last ones may have no spans.
    while (num_rows > 1 && states.row_ends[num_rows - 2] == states.row_ends[num_rows - 1]) --num_rows;
    const int64_t channels = shape.channels();
    const int64_t pieces = (channels + kTaskChannels - 1) / kTaskChannels;
    with_activation(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_for(num_rows * pieces, [&](int64_t task) {
            const int64_t channel = task % pieces * kTaskChannels;
            convolve(static_cast<const T*>(qkv), ldq, static_cast<const float*>(taps),
                     static_cast<float*>(mixed), states, shape, task / pieces, channel,
                     std::min(kTaskChannels, channels - channel));
        });
        const Inputs<T> in{static_cast<const float*>(mixed), static_cast<const T*>(a),
                           static_cast<const T*>(b), lda, ldb,
                           static_cast<const float*>(rates), static_cast<const float*>(bias),
                           static_cast<T*>(y)};
        parallel_for(num_rows * shape.value_heads, [&](int64_t task) {
            recur(in, states, shape, task / shape.value_heads, task % shape.value_heads);
        });
    });
}
