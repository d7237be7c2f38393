// Dense arithmetic on gradients: the table of kernels that fits this processor.
// Every function works on plain pointers, counts in elements, and checks nothing: the binding has checked.
#pragma once
#include <cstdint>

namespace hpcps {

// One set of kernels. Weights come as double and are rounded to the element type once; product and sum are
// rounded separately (no fused multiply-add), so all tables give the same bits. Pointers must not overlap.
template <typename Real>
struct RealKernels {
    void (*accumulate)(Real* acc, const Real* x, double weight, int64_t numel);  // acc += weight * x
    void (*assign)(Real* out, const Real* x, double weight, int64_t numel);      // out = weight * x
    void (*combine)(Real* out, const Real* const* xs, const double* weights, int64_t num_xs, int64_t numel);
    void (*scale)(Real* x, double weight, int64_t numel);                        // x *= weight
};

struct Kernels {
    const char* isa;
    RealKernels<float> f32;
    RealKernels<double> f64;
};

// The table that HPCPS_ISA (portable, avx2, auto) and the processor allow.
// Throws std::runtime_error for an unknown name or one that the processor lacks.
const Kernels& select_kernels();

// 63-bit checksum of bytes; defined in checksum.cpp.
int64_t checksum(const uint8_t* data, int64_t num_bytes);

}  // namespace hpcps
