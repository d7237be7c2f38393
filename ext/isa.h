// Which instruction set the kernels use. The sets differ by target pragma only: no compiler flag a file, no ifunc.
#pragma once

#if defined(__x86_64__)
#define HPCPS_HAS_AVX2_TABLE 1
#endif

// Around the code of the avx2 set. avx2 and f16c without fma: even a compiler that ignores -ffp-contract cannot fuse a
// product and a sum.
#if defined(__clang__)
#define HPCPS_AVX2_BEGIN _Pragma("clang attribute push(__attribute__((target(\"avx2,f16c\"))), apply_to = function)")
#define HPCPS_AVX2_END _Pragma("clang attribute pop")
#else
#define HPCPS_AVX2_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,f16c\")")
#define HPCPS_AVX2_END _Pragma("GCC pop_options")
#endif

namespace hpcps {

enum class Isa { PORTABLE, AVX2 };

// The set that HPCPS_ISA (portable, avx2, auto) and the processor allow; read once.
// Throws std::runtime_error for an unknown name or one that the processor lacks.
Isa chosen_isa();

}  // namespace hpcps
