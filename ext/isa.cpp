#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if HPCPS_HAS_AVX2_TABLE
#include <cpuid.h>
#endif

namespace hpcps {
namespace {

bool processor_has_avx2() {
#if HPCPS_HAS_AVX2_TABLE
    __builtin_cpu_init();
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;  // older clang: no name
    return f16c && __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

Isa pick() {
    const char* setting = std::getenv("HPCPS_ISA");
    const std::string name = setting != nullptr && *setting != '\0' ? setting : "auto";
    if (name == "portable") return Isa::PORTABLE;
    if (name != "auto" && name != "avx2")
        throw std::runtime_error("cannot choose kernels: HPCPS_ISA is '" + name +
                                 "', need portable, avx2 or auto; correct or unset it");
    if (processor_has_avx2()) return Isa::AVX2;
    if (name == "avx2")
        throw std::runtime_error(
            "cannot choose kernels: HPCPS_ISA is 'avx2', this processor has no AVX2 with F16C; set HPCPS_ISA=auto");
    return Isa::PORTABLE;
}

}  // namespace

Isa chosen_isa() {
    static const Isa chosen = pick();
    return chosen;
}

}  // namespace hpcps
