// Codecs on plain pointers: encode with error feedback, check, decode and add. No Python in here, so that fuzzers and
// sanitizer drivers can link it (codec, codec_kernels, topk, packed, pool, isa). Formats and element functions stand
// in cuda_src/elements.h. What that leaves open is settled here, for every implementation:
//
//   encode             int8: a block that is not finite gets zeros as its elements. onebit: the bit is the sign bit
//                      (-0 counts as minus); a block whose scale is NaN gets bits 0; unused bits are 0.
//                      fp32 of float64: a finite value beyond the range is sent as +-FLT_MAX.
//                      none, packed: residual becomes +0 where v is finite.
//                      num_not_finite counts elements of v, not blocks. Where x and residual are both NaN, which of
//                      the two is sent is left open. topk: see topk.cpp.
//   decode_accumulate  term = weight * value, the weight rounded to acc's type; int8: (weight * scale) * q;
//                      onebit: (weight * scale) with the sign flipped where the bit is set. The first term is assigned
//                      where assign is set; topk then assigns +0 to all elements that it does not hold, and a later
//                      topk adds nothing to those. packed likewise: zeros that it left out add nothing, those of a
//                      block that is sent as it is are added (+0 to -0 gives +0).
//                      int8 run: consecutive payloads in the list, all int8, whose weights have the same float32 bits
//                      and whose scale bytes are equal in this block: acc += (weight * scale) * (float)(sum of q), the
//                      sum being int32. Runs are as long as they can be, found block by block.
//   decode             the values themselves; as decode_accumulate with one term, weight 1 and assign, but that none,
//                      fp32 of float32 and packed keep all bits of a NaN.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace hpcps {

enum Codec : int { NONE = 0, FP32 = 1, FP16 = 2, BF16 = 3, INT8 = 4, ONEBIT = 5, TOPK = 6, PACKED = 7, NUM_CODECS = 8 };

const char* codec_name(Codec codec);

// Most elements that one array may have with top-k: its counts have 32 bits.
constexpr int64_t TOPK_MOST_ELEMS = 0xffffffff;

// Largest payload; keep matters for top-k only, itemsize (4 or 8) for none only. Same as CodecSpec.wire_bytes.
int64_t wire_bytes(Codec codec, int64_t numel, int64_t itemsize, int64_t keep);

struct Encoded {
    int64_t num_bytes;
    int64_t num_not_finite;
};

// out has room for wire_bytes; residual may be null; nothing overlaps. float64: none and fp32 only.
// keep: 1 to numel for top-k (0 where numel is 0), else ignored. Throws std::bad_alloc before any effect.
Encoded encode(Codec codec, const float* x, float* residual, uint8_t* out, int64_t numel, int64_t keep);
Encoded encode(Codec codec, const double* x, double* residual, uint8_t* out, int64_t numel, int64_t keep);

// Empty where the bytes are a valid payload of numel elements, else what is wrong: got and need. Messages:
//   "fp16 payload of 9 bytes, need 10 for 5 elements"
//   "topk payload of 9 bytes, need at least 16 for its header"
//   "topk payload of 99 bytes for 50 elements is damaged: its last header word is 1, need 0"
//   "...: exponent 113, need -126 to 112"         "...: 51 values, need at most 50"
//   "topk payload of 99 bytes, need 100 for 20 values in 44 gap bytes"
//   "...: its 44 gap bytes are not 20 gaps"       (too few or too many, or a gap of more than 5 bytes)
//   "...: element 50, need at most 49"            (the first one beyond the end)
// In this order: header, last word, exponent, count, size, then the gaps from the first to the last.
//   "packed payload of 3 bytes, need at least 4 for the counts of 1000 elements"
//   "packed payload of 99 bytes for 1000 elements is damaged: count 250 of block 1, need 0 to 247 or 255"
//   "packed payload of 99 bytes, need 100 for 1000 elements"
//   "...: block 1 marks 7 elements, need 6"       "...: block 3 marks elements beyond its 232"
// In this order: the counts from the first to the last, size, then the bitmaps, marks beyond the end first.
std::string payload_fault(Codec codec, const uint8_t* payload, int64_t num_bytes, int64_t numel, int64_t itemsize);

struct Term {
    Codec codec;
    const uint8_t* payload;  // any alignment; payload_fault found nothing
    int64_t num_bytes;
    double weight;
};

// acc += sum of weight * decoded, in the order given, or acc = that sum. At least one term. float64: none, fp32 only.
void decode_accumulate(float* acc, int64_t numel, const std::vector<Term>& terms, bool assign);
void decode_accumulate(double* acc, int64_t numel, const std::vector<Term>& terms, bool assign);

void decode(Codec codec, const uint8_t* payload, int64_t num_bytes, float* out, int64_t numel);
void decode(Codec codec, const uint8_t* payload, int64_t num_bytes, double* out, int64_t numel);

}  // namespace hpcps
