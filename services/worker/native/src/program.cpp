// Runs kernels one after another, as a program lists their calls (`native/program.py`).
//
// A program is a vector of words. Each call is the number of its kernel, as `lpx_kernel_number`
// gives it, and the kernel's arguments: integers, addresses, and the bits of float64 values.
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace lpx {
namespace {

template <class T>
T argument(int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else {
        static_assert(sizeof(T) == sizeof(word));
        T value;
        std::memcpy(&value, &word, sizeof(word));
        return value;
    }
}

template <class... Ts, size_t... I>
void call(void (*kernel)(Ts...), const int64_t* words, std::index_sequence<I...>) {
    kernel(argument<Ts>(words[I])...);
}

template <class... Ts>
constexpr size_t num_arguments(void (*)(Ts...)) {
    return sizeof...(Ts);
}

struct Kernel {
    const char* name;
    size_t num_arguments;
    void (*run)(const int64_t* words);
};

template <auto kernel>
constexpr Kernel describe(const char* name) {
    constexpr size_t n = num_arguments(kernel);
    return {name, n, [](const int64_t* words) { call(kernel, words, std::make_index_sequence<n>()); }};
}

constexpr Kernel kKernels[] = {
    describe<lpx_linear>("lpx_linear"),
    describe<lpx_linear_fixed>("lpx_linear_fixed"),
    describe<lpx_linear_codes>("lpx_linear_codes"),
    describe<lpx_gate_codes>("lpx_gate_codes"),
    describe<lpx_linear_tiles>("lpx_linear_tiles"),
    describe<lpx_linear_gates>("lpx_linear_gates"),
    describe<lpx_add_lora>("lpx_add_lora"),
    describe<lpx_add_lora_gates>("lpx_add_lora_gates"),
    describe<lpx_choose_experts>("lpx_choose_experts"),
    describe<lpx_experts>("lpx_experts"),
    describe<lpx_attend>("lpx_attend"),
    describe<lpx_attend_tiles>("lpx_attend_tiles"),
    describe<lpx_norm>("lpx_norm"),
    describe<lpx_rotate>("lpx_rotate"),
    describe<lpx_elementwise>("lpx_elementwise"),
    describe<lpx_delta_net>("lpx_delta_net"),
};

}  // namespace
}  // namespace lpx

// The number of a kernel in programs; -1 = programs cannot call it.
LPX_EXPORT int64_t lpx_kernel_number(const char* name) {
    int64_t number = 0;
    for (const lpx::Kernel& kernel : lpx::kKernels) {
        if (std::strcmp(kernel.name, name) == 0) return number;
        ++number;
    }
    return -1;
}

LPX_EXPORT void lpx_run_program(const void* words, int64_t num_words) {
    const int64_t* next = static_cast<const int64_t*>(words);
    const int64_t* const end = next + num_words;
    while (next < end) {
        const lpx::Kernel& kernel = lpx::kKernels[*next];
        kernel.run(next + 1);
        next += 1 + kernel.num_arguments;
    }
}
