// One table of kernels an instruction set, all in this translation unit, chosen when the module loads.
#include "kernels.h"

#include "isa.h"

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
HPCPS_AVX2_BEGIN
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
HPCPS_AVX2_END
namespace avx2 {
static const Kernels table = HPCPS_TABLE("avx2");
}
#endif

const Kernels& select_kernels() {
#if HPCPS_HAS_AVX2_TABLE
    if (chosen_isa() == Isa::AVX2) return avx2::table;
#endif
    chosen_isa();  // refuses a wrong setting
    return portable::table;
}

}  // namespace hpcps
