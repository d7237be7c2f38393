// Compiles the kernels of hpcps/cuda_src and finds them by name.
#include "cuda_launch.h"

#include <cuda_runtime.h>
#include <stdio.h>

#include <map>
#include <string>
#include <type_traits>

#include "packed.cuh"

namespace {

struct Entry {
    const void* kernel;
    std::string kinds;
};

template <typename T>
constexpr char kind_of() {
    static_assert(std::is_pointer<T>::value || std::is_same<T, int64_t>::value || std::is_same<T, int32_t>::value ||
                      std::is_same<T, float>::value,
                  "an argument of a kind that the binding does not know");
    return std::is_pointer<T>::value ? 'p' : std::is_same<T, float>::value ? 'f' : sizeof(T) == 8 ? 'l' : 'i';
}

template <typename... Args>
Entry entry(void (*kernel)(Args...)) {
    return {reinterpret_cast<const void*>(kernel), {kind_of<Args>()...}};
}

const std::map<std::string, Entry>& entries() {
#define ENTRY(name) {#name, entry(name)}
    static const std::map<std::string, Entry> all = {
        ENTRY(hpcps_encode_fp32_kernel),    ENTRY(hpcps_encode_fp16_kernel),   ENTRY(hpcps_encode_bf16_kernel),
        ENTRY(hpcps_encode_int8_kernel),    ENTRY(hpcps_encode_onebit_kernel), ENTRY(hpcps_combine_kernel),
        ENTRY(hpcps_scan_kernel),           ENTRY(hpcps_topk_histogram_kernel), ENTRY(hpcps_topk_choose_kernel),
        ENTRY(hpcps_topk_count_kernel),     ENTRY(hpcps_topk_compact_kernel),  ENTRY(hpcps_topk_measure_kernel),
        ENTRY(hpcps_topk_write_kernel),     ENTRY(hpcps_topk_survey_kernel),   ENTRY(hpcps_topk_check_kernel),
        ENTRY(hpcps_topk_add_kernel),       ENTRY(hpcps_packed_count_kernel),  ENTRY(hpcps_packed_write_kernel),
        ENTRY(hpcps_packed_survey_kernel),  ENTRY(hpcps_packed_check_kernel),  ENTRY(hpcps_packed_add_kernel),
    };
#undef ENTRY
    return all;
}

}  // namespace

int hpcps_cuda_device_count(char* why_none, size_t capacity) {
    int num_devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&num_devices);
    snprintf(why_none, capacity, "%s", error != cudaSuccess ? cudaGetErrorString(error) : "");
    if (error != cudaSuccess) cudaGetLastError();  // so that the next call does not report it
    return error == cudaSuccess ? num_devices : 0;
}

const char* hpcps_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

const char* hpcps_cuda_arguments(const char* name) {
    const auto found = entries().find(name);
    return found == entries().end() ? nullptr : found->second.kinds.c_str();
}

int hpcps_cuda_launch(const char* name, unsigned num_blocks, unsigned num_threads, void** args, void* stream) {
    const auto found = entries().find(name);
    if (found == entries().end()) return cudaErrorInvalidDeviceFunction;
    return cudaLaunchKernel(found->second.kernel, dim3(num_blocks), dim3(num_threads), args, 0,
                            static_cast<cudaStream_t>(stream));
}

int hpcps_cuda_allocate(void** memory, size_t num_bytes) { return cudaMalloc(memory, num_bytes); }

int hpcps_cuda_free(void* memory) { return cudaFree(memory); }

int hpcps_cuda_fill(void* memory, int byte, size_t num_bytes) { return cudaMemset(memory, byte, num_bytes); }

int hpcps_cuda_copy(void* to, const void* from, size_t num_bytes) {
    return cudaMemcpy(to, from, num_bytes, cudaMemcpyDefault);
}

int hpcps_cuda_synchronize() { return cudaDeviceSynchronize(); }
