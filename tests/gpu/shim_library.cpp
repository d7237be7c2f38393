// The CUDA kernels as a library for the CPU: by name, with their arguments behind pointers as cuLaunchKernel wants them.
#include "cuda_shim.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <type_traits>
#include <utility>

#include "packed.cuh"

namespace {

// Two kernels that are wrong, to show that the shim notices.
extern "C" __global__ void shim_divergent_kernel(uint32_t* out, int32_t ended) {
    if (threadIdx.x % 2 == 0) {
        __syncthreads();
    } else if (!ended) {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

extern "C" __global__ void shim_lost_lane_kernel(uint32_t* out) {
    if (threadIdx.x != 5) out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}

struct Entry {
    std::string kinds;          // a letter an argument: p pointer, i or u integer, f float
    std::vector<int> sizes;     // bytes
    std::function<void(dim3, dim3, void**)> launch;
};

template <typename T>
constexpr char kind_of() {
    return std::is_pointer<T>::value          ? 'p'
           : std::is_floating_point<T>::value ? 'f'
           : std::is_signed<T>::value         ? 'i'
                                              : 'u';
}

template <typename... Args, size_t... Index>
Entry make_entry(void (*kernel)(Args...), std::index_sequence<Index...>) {
    return {{kind_of<Args>()...}, {static_cast<int>(sizeof(Args))...}, [kernel](dim3 grid, dim3 block, void** args) {
                shim::launch(grid, block, [&] { kernel(*static_cast<Args*>(args[Index])...); });
            }};
}

template <typename... Args>
Entry entry(void (*kernel)(Args...)) {
    return make_entry(kernel, std::index_sequence_for<Args...>{});
}

const std::map<std::string, Entry>& entries() {
#define ENTRY(name) {#name, entry(name)}
    static const std::map<std::string, Entry> all = {
        ENTRY(hpcps_encode_fp32_kernel),  ENTRY(hpcps_encode_fp16_kernel),   ENTRY(hpcps_encode_bf16_kernel),
        ENTRY(hpcps_encode_int8_kernel),  ENTRY(hpcps_encode_onebit_kernel), ENTRY(hpcps_combine_kernel),
        ENTRY(hpcps_scan_kernel),         ENTRY(hpcps_topk_histogram_kernel), ENTRY(hpcps_topk_choose_kernel),
        ENTRY(hpcps_topk_count_kernel),   ENTRY(hpcps_topk_compact_kernel),  ENTRY(hpcps_topk_measure_kernel),
        ENTRY(hpcps_topk_write_kernel),   ENTRY(hpcps_topk_survey_kernel),   ENTRY(hpcps_topk_check_kernel),
        ENTRY(hpcps_topk_add_kernel),     ENTRY(hpcps_packed_count_kernel),  ENTRY(hpcps_packed_write_kernel),
        ENTRY(hpcps_packed_survey_kernel), ENTRY(hpcps_packed_check_kernel), ENTRY(hpcps_packed_add_kernel),
        ENTRY(shim_divergent_kernel),      ENTRY(shim_lost_lane_kernel),
    };
    return all;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void shim_set_seed(unsigned seed) { shim::machine().random.seed(seed * 7919u + 1u); }

EXPORT void shim_skip_barrier(int line) { shim::machine().skipped_line = line; }

// Kinds of the arguments, null where there is no such kernel; sizes gets their bytes.
EXPORT const char* shim_arguments(const char* name, int* sizes) {
    const auto found = entries().find(name);
    if (found == entries().end()) return nullptr;
    std::copy(found->second.sizes.begin(), found->second.sizes.end(), sizes);
    return found->second.kinds.c_str();
}

// 0, or 1 and a message.
EXPORT int shim_launch(const char* name, const unsigned* grid, const unsigned* block, void** args, char* message,
                       int capacity) {
    try {
        entries().at(name).launch({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, args);
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(message, static_cast<size_t>(capacity), "%s", error.what());
        return 1;
    }
}
