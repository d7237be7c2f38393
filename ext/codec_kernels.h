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

// A payload is judged by what is read of it once: a peer may change it meanwhile. A count of a packed payload:
HPCPS_ELEMENT uint8_t read_once(const uint8_t* count) { return *(const volatile uint8_t*)count; }

// The bitmap of a packed block.
struct Marks {
    uint64_t words[HPCPS_PACKED_BITMAP / 8];
};

HPCPS_ELEMENT Marks load_marks(const uint8_t* bitmap) {
    Marks marks;
    __builtin_memcpy(&marks, bitmap, sizeof marks);
    __asm__ volatile("" ::: "memory");  // or the compiler may read it again
    return marks;
}

HPCPS_ELEMENT int32_t count_marks(const Marks& marks) {
    int32_t number = 0;
    for (const uint64_t word : marks.words) number += __builtin_popcountll(word);
    return number;
}

// True if an element beyond the block's numel is marked.
HPCPS_ELEMENT bool are_beyond(const Marks& marks, int64_t numel) {
    uint64_t beyond = 0;
    for (int64_t word = 0, begin = 0; word < HPCPS_PACKED_BITMAP / 8; ++word, begin += 64)
        beyond |= numel <= begin ? marks.words[word] : numel < begin + 64 ? marks.words[word] >> (numel - begin) : 0;
    return beyond != 0;
}

// True if these are the marks of a block of so many elements with this count.
HPCPS_ELEMENT bool are_of(const Marks& marks, int32_t count, int64_t numel) {
    return count_marks(marks) == count && !are_beyond(marks, numel);
}

constexpr int32_t PACKED_ROOM = 4 * HPCPS_BLOCK + 32;  // more bytes of a block need not be readable

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

    // Writes the count of every block and the blocks; returns the bytes of those and adds to num_not_finite. out has
    // room for 4 * numel bytes.
    int64_t (*encode_packed)(const float* x, float* residual, uint8_t* counts, uint8_t* out, int64_t numel,
                             int64_t* num_not_finite);

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
    // The first block whose marks are not those of its count, with its marks; -1 where there is none. Counts and sizes
    // were found valid. Reads up to end only, whatever they are now.
    int64_t (*find_wrong_marks)(const uint8_t* counts, const uint8_t* blocks, const uint8_t* end, int64_t numel,
                                Marks* wrong);
    // One block with a bitmap; one whose marks are not those of its count adds nothing. room: bytes that may be read.
    void (*add_packed)(float* acc, const uint8_t* block, int32_t count, int32_t room, float weight, int64_t numel,
                       bool assign);
};

// The table that HPCPS_ISA and the processor allow; throws as chosen_isa does.
const CodecKernels& select_codec_kernels();

}  // namespace hpcps
