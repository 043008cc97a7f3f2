// The kernels that a forward pass calls. Each is defined, and explained, in the file named here.
#pragma once
#include "abi.h"

namespace lpx {

// What `lpx_elementwise` computes, as Python numbers it.
enum Operation : int64_t { kCopy = 0, kAdd = 1, kMultiply = 2, kSilu = 3, kGeluTanh = 4, kSigmoid = 5 };

}  // namespace lpx

// gemm.cpp
LPX_EXPORT void lpx_linear(const void* x, int64_t ldx, const void* packed, int64_t weight_dtype,
                           void* y, int64_t ldy, int64_t activation_dtype, int64_t num_rows,
                           int64_t num_inputs, int64_t num_outputs);
// gemm_codes.cpp
LPX_EXPORT void lpx_linear_codes(const void* x, int64_t ldx, const void* packed, int64_t kind,
                                 const void* scales, int64_t scale_dtype, const void* zeros,
                                 int64_t zero_dtype, int64_t zero, int64_t group_size,
                                 int64_t block_size, void* y, int64_t dtype, int64_t num_rows,
                                 int64_t num_inputs, int64_t num_outputs);
LPX_EXPORT void lpx_gate_codes(int64_t operation, const void* x, int64_t ldx, const void* packed, int64_t kind,
                               const void* scales, int64_t scale_dtype, const void* zeros,
                               int64_t zero_dtype, int64_t zero, int64_t group_size, int64_t block_size,
                               void* y, int64_t dtype, int64_t num_rows, int64_t num_inputs,
                               int64_t num_outputs);
// gemm_tiles.cpp
LPX_EXPORT int64_t lpx_tile_items(int64_t num_outputs, int64_t num_inputs);
LPX_EXPORT void lpx_pack_tiles(const void* weight, int64_t num_outputs, int64_t num_inputs,
                               void* packed);
LPX_EXPORT void lpx_linear_tiles(const void* x, int64_t ldx, const void* packed, void* y,
                                 int64_t ldy, int64_t dtype, int64_t num_rows, int64_t num_inputs,
                                 int64_t num_outputs);
LPX_EXPORT void lpx_linear_gates(int64_t operation, const void* x, int64_t ldx, const void* packed,
                                 void* y, int64_t ldy, int64_t num_rows, int64_t num_inputs,
                                 int64_t width);
// gemm_fixed.cpp
LPX_EXPORT void lpx_linear_fixed(const void* x, int64_t ldx, const void* packed, void* y, int64_t ldy,
                                 int64_t dtype, int64_t num_rows, int64_t num_inputs, int64_t num_outputs);
// lora.cpp
LPX_EXPORT void lpx_add_lora(const void* x, int64_t ldx, int64_t num_inputs, void* y, int64_t ldy,
                             int64_t num_outputs, int64_t activation_dtype, int64_t site,
                             const void* runs, int64_t num_runs);
LPX_EXPORT void lpx_add_lora_gates(int64_t operation, const void* x, int64_t ldx, int64_t num_inputs,
                                   const void* y, int64_t ldy, int64_t num_outputs, void* out, int64_t ldo,
                                   int64_t num_rows, int64_t site, const void* runs,
                                   int64_t num_runs);
// experts.cpp
LPX_EXPORT void lpx_choose_experts(const void* scores, int64_t lds, int64_t dtype, int64_t num_rows,
                                   int64_t num_experts, int64_t num_active, int64_t renormalise,
                                   const void* factors, void* chosen, void* weights);
LPX_EXPORT void lpx_experts(const void* x, int64_t ldx, const void* chosen, const void* weights,
                            int64_t num_active, const void* experts, int64_t num_experts,
                            int64_t hidden, int64_t width, int64_t gate, double alpha, double limit,
                            void* y, int64_t ldy, int64_t dtype, int64_t num_rows, const void* runs,
                            int64_t num_runs);
// attention.cpp
LPX_EXPORT void lpx_attend(const void* q, const void* k, const void* v, void* keys, void* values,
                           void* y, int64_t dtype, const void* layout, const void* sequences,
                           const void* task_ends, int64_t num_sequences);
// attention_tiles.cpp
LPX_EXPORT void lpx_attend_tiles(const void* q, const void* k, const void* v, void* keys,
                                 void* values, void* y, const void* layout, const void* sequences,
                                 int64_t num_sequences);
// elementwise.cpp
LPX_EXPORT void lpx_norm(void* x, int64_t ldx, const void* update, int64_t ldu, const void* weight,
                         void* y, int64_t ldy, int64_t dtype, int64_t num_rows, int64_t num_heads,
                         int64_t width, double eps, int64_t in_float32);
LPX_EXPORT void lpx_rotate(void* x, int64_t ldx, const void* cos, const void* sin, int64_t dtype,
                           int64_t num_rows, int64_t num_heads, int64_t head_dim, int64_t half);
LPX_EXPORT void lpx_elementwise(int64_t operation, void* y, int64_t y_dtype, int64_t y_rows,
                                int64_t y_groups, const void* a, int64_t a_dtype, int64_t a_rows,
                                int64_t a_groups, int64_t a_items, const void* b, int64_t b_dtype,
                                int64_t b_rows, int64_t b_groups, int64_t b_items, int64_t num_rows,
                                int64_t num_groups, int64_t num_items);
// recurrence.cpp
LPX_EXPORT void lpx_delta_net(const void* qkv, int64_t ldq, const void* a, int64_t lda, const void* b,
                              int64_t ldb, int64_t dtype, const void* taps, const void* rates,
                              const void* bias, void* mixed, void* y, void* arena, const void* layout,
                              const void* sources, const void* targets, const void* words,
                              const void* row_ends, int64_t num_rows);
