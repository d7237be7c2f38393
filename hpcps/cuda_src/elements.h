// Element functions and wire formats, once for all: the CPU build, nvcc, NVRTC (CuPy's RawModule, this text as it
// is) and the host shim of the tests. Includes nothing where NVRTC reads it. Every function gives the same bits on
// every processor, except that the digits of a NaN may differ on a GPU. Words on the wire are little-endian and stand
// at any address.
//
// codec   payload of n elements                                                                  element
// fp16    | n half |                                                                             2 B
// bf16    | n bfloat16 |                                                                         2 B
// int8    | ceil(n/256) scale bytes | n int8 |              value = int8 * 2^(scale byte - 127)    1.004 B
// onebit  | ceil(n/256) float scales | ceil(n/8) bytes |    value = +-scale, bit set: minus        0.141 B
// topk    | count, gap bytes, exponent, 0: 4 B each | gaps | count half |                         about 3.3 B a value sent
//         a gap is the number of elements left out before this one, in base 128, low digits first, high bit set
//         on all digits but the last; value = half * 2^exponent
// packed  | ceil(n/256) counts | blocks |                                                  4 B a value that is not zero
//         count 0: a block of +0, no bytes; 1 to 247: | bitmap: 32 B | count float |, where that is shorter than the
//         block, bit i % 8 of byte i / 8 set: element i is sent, else it is +0; 255: | float each | for all other blocks
//
// What is not finite stays visible: fp16 and bf16 carry it; an int8 block gets the scale byte 255 and a onebit block
// a scale of NaN, and all of their elements then read as NaN; topk and packed send it. What is finite stays finite:
// a value beyond the largest half or bfloat16 is sent as that, and the rest is the residual's.
#pragma once
#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define HPCPS_ELEMENT static __host__ __device__ __forceinline__
#else
#define HPCPS_ELEMENT static inline __attribute__((always_inline))
#endif

// --- formats --------------------------------------------------------------------------------------------------------

enum {
    HPCPS_BLOCK = 256,               // elements that share a scale (int8, onebit) or a count (packed)
    HPCPS_LANES = 32,                // partial sums of a onebit block, see hpcps_onebit_scale
    HPCPS_TOPK_HEADER = 16,          // bytes
    HPCPS_TOPK_GAP_BYTES = 5,        // longest coded gap
    HPCPS_INT8_NOT_FINITE = 255,     // scale byte of a block that holds infinity or NaN
    HPCPS_INT8_BIAS = 127,           // scale byte of scale 1
    HPCPS_INT8_SMALLEST = 1,         // smallest scale byte of a block that is not all zero: 2^-126
    HPCPS_INT8_LARGEST = 249,        // largest scale byte of a finite block: 2^122, for magnitudes from 127.5 * 2^121
    HPCPS_TOPK_LEAST_EXPONENT = -126,
    HPCPS_TOPK_MOST_EXPONENT = 112,  // of the largest float
    HPCPS_PACKED_BITMAP = 32,        // bytes
    HPCPS_PACKED_RAW = 255,          // count of a block that is sent as it is
};
#define HPCPS_HALF_MAX 65504.0f
#define HPCPS_HALF_MAX_BITS 0x477fe000u      // 65504 as a float
#define HPCPS_BFLOAT_MAX_BITS 0x7f7f0000u    // largest bfloat16 as a float
#define HPCPS_INFINITY_BITS 0x7f800000u
#define HPCPS_NAN_BITS 0x7fc00000u

HPCPS_ELEMENT int64_t hpcps_num_blocks(int64_t numel) { return (numel + HPCPS_BLOCK - 1) / HPCPS_BLOCK; }

// --- bits -----------------------------------------------------------------------------------------------------------

HPCPS_ELEMENT uint32_t hpcps_bits(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
#endif
}

HPCPS_ELEMENT float hpcps_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
#endif
}

HPCPS_ELEMENT uint32_t hpcps_magnitude(float value) { return hpcps_bits(value) & 0x7fffffffu; }

HPCPS_ELEMENT int hpcps_is_finite(float value) { return hpcps_magnitude(value) < HPCPS_INFINITY_BITS; }

// 2^exponent, exponent -126 to 127.
HPCPS_ELEMENT float hpcps_power_of_two(int32_t exponent) { return hpcps_float((uint32_t)(exponent + 127) << 23); }

// --- fp16 -----------------------------------------------------------------------------------------------------------

// Nearest, ties to even, as processors do; infinity and NaN are kept.
HPCPS_ELEMENT uint16_t hpcps_half_of(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    const uint32_t bits = hpcps_bits(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    const uint32_t normal = (size - 0x38000000u + 0x0fffu + ((size >> 13) & 1u)) >> 13;   // exponent bias 127 to 15
    const uint32_t small = hpcps_bits(hpcps_float(size) + 0.5f) - 0x3f000000u;            // the adder rounds subnormals
    uint32_t half = size < 0x38800000u ? small : normal;
    half = size >= 0x477ff000u ? 0x7c00u : half;
    half = size > HPCPS_INFINITY_BITS ? 0x7e00u | ((size >> 13) & 0x3ffu) : half;
    return (uint16_t)(sign | half);
#endif
}

HPCPS_ELEMENT float hpcps_of_half(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, size = half & 0x7fffu;
    const uint32_t small = hpcps_bits(hpcps_float((size << 13) + 0x38800000u) - hpcps_float(0x38800000u));
    uint32_t bits = size < 0x400u ? small : (size << 13) + 0x38000000u;
    bits = size >= 0x7c00u ? (size << 13) | 0x7f800000u | (size > 0x7c00u ? 0x00400000u : 0u) : bits;
    return hpcps_float(sign | bits);
#endif
}

// What codecs send: finite values beyond the range become the largest half.
HPCPS_ELEMENT uint16_t hpcps_half_sent(float value) {
    const uint32_t size = hpcps_magnitude(value);
    const int beyond = size > HPCPS_HALF_MAX_BITS && size < HPCPS_INFINITY_BITS;
    const uint16_t largest = (uint16_t)(0x7bffu | ((hpcps_bits(value) >> 16) & 0x8000u));
    return beyond ? largest : hpcps_half_of(value);
}

// --- bf16 -----------------------------------------------------------------------------------------------------------

HPCPS_ELEMENT float hpcps_of_bfloat(uint16_t bfloat) { return hpcps_float((uint32_t)bfloat << 16); }

// Nearest, ties to even; finite values beyond the range become the largest bfloat16; infinity and NaN are kept.
HPCPS_ELEMENT uint16_t hpcps_bfloat_sent(float value) {
    const uint32_t bits = hpcps_bits(value), size = bits & 0x7fffffffu;
    uint32_t bfloat = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    bfloat = size > HPCPS_BFLOAT_MAX_BITS ? (0x7f7fu | ((bits >> 16) & 0x8000u)) : bfloat;
    bfloat = size >= HPCPS_INFINITY_BITS ? (bits >> 16) | (size > HPCPS_INFINITY_BITS ? 0x40u : 0u) : bfloat;
    return (uint16_t)bfloat;
}

// --- int8 -----------------------------------------------------------------------------------------------------------

// Scale byte of a block whose largest magnitude has these bits: the smallest power of two that keeps all elements
// within 127 when they are rounded. Products with it are exact, and blocks of several senders often share it. What is
// left is exact too: at most half a scale, or a whole one where hpcps_int8_limit cuts.
HPCPS_ELEMENT uint8_t hpcps_int8_scale_byte(uint32_t largest) {
    if (largest >= HPCPS_INFINITY_BITS) return HPCPS_INT8_NOT_FINITE;
    if (largest == 0u) return 0;
    const int32_t over = (largest & 0x007fffffu) >= 0x007f0000u;          // 1.9921875 * 2^e / 2^(e-6) = 127.5
    const int32_t byte = (int32_t)(largest >> 23) - 6 + over;
    return (uint8_t)(byte < HPCPS_INT8_SMALLEST ? HPCPS_INT8_SMALLEST : byte);
}

// Largest magnitude of the elements of a block: at the largest scale byte 64 would already read as infinity.
HPCPS_ELEMENT int32_t hpcps_int8_limit(uint8_t byte) { return byte == HPCPS_INT8_LARGEST ? 63 : 127; }

// Factor of the elements; a byte that no encoder writes reads as some finite power of two or NaN.
HPCPS_ELEMENT float hpcps_int8_scale(uint8_t byte) {
    return byte == HPCPS_INT8_NOT_FINITE ? hpcps_float(HPCPS_NAN_BITS)
           : byte == 0                   ? 0.0f
                                         : hpcps_float((uint32_t)byte << 23);
}

// 1 / scale, for bytes from HPCPS_INT8_SMALLEST to HPCPS_INT8_LARGEST.
HPCPS_ELEMENT float hpcps_int8_inverse(uint8_t byte) { return hpcps_float((uint32_t)(254 - byte) << 23); }

// Nearest, ties to even: adding and taking away 1.5 * 2^23 rounds any |x| < 2^22.
HPCPS_ELEMENT int32_t hpcps_round(float value) {
    return (int32_t)(hpcps_bits(value + 12582912.0f) - 0x4b400000u);
}

// What is sent of a value, given its product with 1 / scale and the scale byte of its block.
HPCPS_ELEMENT int32_t hpcps_int8_sent(float scaled, uint8_t byte) {
    const int32_t level = hpcps_round(scaled), limit = hpcps_int8_limit(byte);
    return level > limit ? limit : level < -limit ? -limit : level;
}

// --- onebit ---------------------------------------------------------------------------------------------------------

// Scale of a block from the 32 partial sums of its magnitudes, lane l summing elements l, l + 32, ... in order. The
// partial sums are halved pairwise: 16, 8, 4, 2, 1. An element that is missing counts as zero. A sum beyond the range
// counts as not finite. Overwrites the lanes.
HPCPS_ELEMENT float hpcps_onebit_scale(float* lanes, int32_t numel) {
    for (int32_t half = HPCPS_LANES / 2; half > 0; half /= 2)
        for (int32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    const float mean = lanes[0] / (float)numel;
    return hpcps_is_finite(mean) ? mean : hpcps_float(HPCPS_NAN_BITS);
}

// --- topk -----------------------------------------------------------------------------------------------------------

// Exponent of a payload whose largest finite magnitude has these bits (0: there is none): the halves of that magnitude
// then lie in [2^15, 2^16), so that as many as possible of the smaller ones keep all 11 digits.
HPCPS_ELEMENT int32_t hpcps_topk_exponent(uint32_t largest) {
    const int32_t exponent = (int32_t)(largest >> 23) - 127 - 15;
    if (largest == 0u) return 0;
    return exponent < HPCPS_TOPK_LEAST_EXPONENT ? (int32_t)HPCPS_TOPK_LEAST_EXPONENT : exponent;
}

// What is sent of a value: beyond 65504 the largest half. The product is exact unless it is far too small for a half.
HPCPS_ELEMENT uint16_t hpcps_topk_half(float value, int32_t exponent) {
    return hpcps_half_sent(value * hpcps_power_of_two(-exponent));
}

// Exact, and finite for every half that is.
HPCPS_ELEMENT float hpcps_topk_value(uint16_t half, int32_t exponent) {
    return hpcps_of_half(half) * hpcps_power_of_two(exponent);
}

// --- packed ---------------------------------------------------------------------------------------------------------

// Most elements that a block of so many sends with a bitmap: 32 + 4 * count < 4 * numel.
HPCPS_ELEMENT int32_t hpcps_packed_most(int32_t numel) {
    return numel > HPCPS_PACKED_BITMAP / 4 + 1 ? numel - HPCPS_PACKED_BITMAP / 4 - 1 : 0;
}

// Count byte of a block; any bit set makes an element one that is not zero: -0 too.
HPCPS_ELEMENT uint8_t hpcps_packed_count(int32_t num_not_zero, int32_t numel) {
    return (uint8_t)(num_not_zero <= hpcps_packed_most(numel) ? num_not_zero : (int32_t)HPCPS_PACKED_RAW);
}

// Bytes of a block by its count, -1 where no encoder writes that count for so many elements.
HPCPS_ELEMENT int32_t hpcps_packed_bytes(uint8_t count, int32_t numel) {
    if (count == 0) return 0;
    if (count == HPCPS_PACKED_RAW) return 4 * numel;
    return count <= hpcps_packed_most(numel) ? HPCPS_PACKED_BITMAP + 4 * count : -1;
}
