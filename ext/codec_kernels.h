// The inner loops of the codecs for one instruction set, on one stretch of an array. They check nothing.
#pragma once
#include <cstdint>

#include "../hpcps/cuda_src/elements.h"

namespace hpcps {

// Bits of the nearest value of 11 significant bits, as which top-k sends v unless its half is subnormal or cut.
HPCPS_ELEMENT uint32_t rounded_to_half(float v) {
    const uint32_t bits = hpcps_bits(v);
    return (bits + 0x0fffu + ((bits >> 13) & 1u)) & ~0x1fffu;
}

// An element that may be sent by top-k.
struct Candidate {
    uint32_t index;
    float value;
};

// Encoders: v = x + residual is sent, residual (may be null) becomes what is left; see codec.h for what is not finite.
// They return how many elements of v are not finite. Payload pointers have any alignment.
struct CodecKernels {
    int64_t (*encode_fp16)(const float* x, float* residual, uint8_t* out, int64_t numel);
    int64_t (*encode_bf16)(const float* x, float* residual, uint8_t* out, int64_t numel);
    int64_t (*encode_int8)(const float* x, float* residual, uint8_t* scales, uint8_t* values, int64_t numel);
    int64_t (*encode_onebit)(const float* x, float* residual, uint8_t* scales, uint8_t* bits, int64_t numel);

    // Top-k: appends every element whose |v| has at least the bits of the threshold (1 to infinity's), which takes in
    // every one that is not finite. out has room for numel. Returns how many were appended. The residual becomes v,
    // and from the likely size on v - rounded_to_half(v): what stays if it is sent, written while it is in the cache.
    int64_t (*collect)(const float* x, float* residual, int64_t numel, uint32_t first_index, uint32_t threshold,
                       uint32_t likely, Candidate* out);

    // acc += term, or acc = term where assign is set.
    void (*add_fp32)(float* acc, const uint8_t* values, float weight, int64_t numel, bool assign);
    void (*add_fp16)(float* acc, const uint8_t* values, float weight, int64_t numel, bool assign);
    void (*add_bf16)(float* acc, const uint8_t* values, float weight, int64_t numel, bool assign);
    void (*add_onebit)(float* acc, const uint8_t* scales, const uint8_t* bits, float weight, int64_t numel,
                       bool assign);
    // Consecutive payloads of one weight; summed as integers where their scale bytes are equal.
    void (*add_int8)(float* acc, const uint8_t* const* scales, const uint8_t* const* values, int64_t num_payloads,
                     float weight, int64_t numel, bool assign);
};

// The table that HPCPS_ISA and the processor allow; throws as chosen_isa does.
const CodecKernels& select_codec_kernels();

}  // namespace hpcps
