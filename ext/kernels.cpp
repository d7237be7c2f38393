// One table of kernels an instruction set, all in this translation unit, chosen when the module loads.
// The sets differ by target pragma only: no compiler flag a file, no ifunc.
#include "kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#define HPCPS_HAS_AVX2_TABLE 1
#endif

#define HPCPS_TABLE(name) \
    { name, {f32::accumulate, f32::assign, f32::combine, f32::scale}, {f64::accumulate, f64::assign, f64::combine, f64::scale} }

namespace hpcps {

namespace portable {
namespace f32 {
#define REAL float
#include "kernels.inc"
#undef REAL
}  // namespace f32
namespace f64 {
#define REAL double
#include "kernels.inc"
#undef REAL
}  // namespace f64
static const Kernels table = HPCPS_TABLE("portable");
}  // namespace portable

#if HPCPS_HAS_AVX2_TABLE
// avx2 without fma: even a compiler that ignores -ffp-contract cannot fuse a product and a sum.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
namespace f32 {
#define REAL float
#include "kernels.inc"
#undef REAL
}  // namespace f32
namespace f64 {
#define REAL double
#include "kernels.inc"
#undef REAL
}  // namespace f64
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace avx2 {
static const Kernels table = HPCPS_TABLE("avx2");
}
#endif

static const Kernels* avx2_table() {
#if HPCPS_HAS_AVX2_TABLE
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return &avx2::table;
#endif
    return nullptr;
}

static const Kernels& pick() {
    const char* setting = std::getenv("HPCPS_ISA");
    const std::string name = setting != nullptr && *setting != '\0' ? setting : "auto";
    if (name == "portable") return portable::table;
    if (name != "auto" && name != "avx2")
        throw std::runtime_error("cannot choose kernels: HPCPS_ISA is '" + name +
                                 "', need portable, avx2 or auto; correct or unset it");
    const Kernels* fast = avx2_table();
    if (fast != nullptr) return *fast;
    if (name == "avx2")
        throw std::runtime_error(
            "cannot choose kernels: HPCPS_ISA is 'avx2', this processor has no AVX2; set HPCPS_ISA=auto");
    return portable::table;
}

const Kernels& select_kernels() {
    static const Kernels& chosen = pick();
    return chosen;
}

}  // namespace hpcps
