// One table of the codecs' inner loops an instruction set, all in this translation unit.
#include "codec_kernels.h"

#include "../hpcps/cuda_src/elements.h"
#include "isa.h"

#if HPCPS_HAS_AVX2_TABLE
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian; on this processor hpcps runs with numpy (HPCPS_EXT=off)"
#endif

namespace hpcps {

namespace portable {
#include "codec_plain.inc"
static const CodecKernels codec_table = {encode_fp16_plain, encode_bf16_plain, encode_int8_plain, encode_onebit_plain,
                                         encode_packed_plain, collect_plain,   add_fp32_plain,    add_fp16_plain,
                                         add_bf16_plain,    add_onebit_plain,  add_int8_plain,    find_wrong_marks,
                                         add_packed_plain};
}  // namespace portable

#if HPCPS_HAS_AVX2_TABLE
HPCPS_AVX2_BEGIN
namespace avx2 {
#include "codec_plain.inc"
#include "codec_avx2.inc"
#include "codec_avx2_packed.inc"
}  // namespace avx2
HPCPS_AVX2_END
namespace avx2 {
static const CodecKernels codec_table = {encode_fp16, encode_bf16, encode_int8, encode_onebit, encode_packed, collect,
                                         add_fp32_plain, add_fp16, add_bf16, add_onebit, add_int8, find_wrong_marks,
                                         add_packed};
}
#endif

const CodecKernels& select_codec_kernels() {
#if HPCPS_HAS_AVX2_TABLE
    if (chosen_isa() == Isa::AVX2) return avx2::codec_table;
#endif
    chosen_isa();  // refuses a wrong setting
    return portable::codec_table;
}

}  // namespace hpcps
