// The CUDA kernels of hpcps/cuda_src as plain C entry points: launch by name, and what a program without CuPy or torch
// needs to hand them memory. Built by nvcc with a static CUDA run-time, so it loads where there is no driver.
// A function that returns int returns 0, or a CUDA error that hpcps_cuda_error describes.
#pragma once
#include <stddef.h>

extern "C" {

// Devices that can be used; where there is none, `why_none` says why.
int hpcps_cuda_device_count(char* why_none, size_t capacity);

const char* hpcps_cuda_error(int error);

// Kinds of a kernel's arguments, a letter each: p pointer, l int64, i int32, f float. Null where there is no such kernel.
const char* hpcps_cuda_arguments(const char* name);

// args[i] points to argument i. stream: a cudaStream_t, null for the default one. Returns when the launch is queued.
int hpcps_cuda_launch(const char* name, unsigned num_blocks, unsigned num_threads, void** args, void* stream);

int hpcps_cuda_allocate(void** memory, size_t num_bytes);
int hpcps_cuda_free(void* memory);
int hpcps_cuda_fill(void* memory, int byte, size_t num_bytes);
int hpcps_cuda_copy(void* to, const void* from, size_t num_bytes);      // any of them on the device or the host
int hpcps_cuda_synchronize();

}  // extern "C"
