// The CUDA kernels of the codecs; those of top-k and packed stand in topk.cuh and packed.cuh. Three compilers read this
// text: nvcc (ext/cuda_launch.cu), NVRTC (CuPy's RawModule, elements.h before it) and g++ under the shim of tests/gpu.
// One dimension of blocks, HPCPS_THREADS threads a block, static shared memory. Payloads and residuals have the bits of
// the CPU kernels, except for the digits of a NaN.
//
// What must not change bits is written as hpcps_add, hpcps_sub and hpcps_mul: the compiler may fuse a * b + c, but not
// these. Payload bytes stand at any address: words go through hpcps_load and hpcps_store.
//
// An encoder's `state` is HPCPS_STATE_WORDS words that start as zero; the host reads the first two when all is done.
#pragma once
#include "elements.h"

#define HPCPS_DEVICE static __device__ __forceinline__
#define HPCPS_KERNEL extern "C" __global__ void __launch_bounds__(HPCPS_THREADS)
#define HPCPS_ALL_LANES 0xffffffffu

typedef unsigned long long hpcps_word;

enum {
    HPCPS_WARP = 32,
    HPCPS_THREADS = 256,
    HPCPS_WARPS = HPCPS_THREADS / HPCPS_WARP,
    HPCPS_ITEMS = 8,                                // elements or bytes a thread
    HPCPS_TILE = HPCPS_THREADS * HPCPS_ITEMS,       // elements or bytes a block
};

// Words of an encoder's state.
enum {
    HPCPS_STATE_BYTES,          // of the payload, topk and packed only
    HPCPS_STATE_NOT_FINITE,     // elements
    HPCPS_STATE_LARGEST,        // finite size
    HPCPS_STATE_DONE,           // threshold, ties and count are known
    HPCPS_STATE_THRESHOLD,      // sizes above it are sent
    HPCPS_STATE_TIES,           // and so many, the first ones, of those that equal it
    HPCPS_STATE_COUNT,          // elements sent
    HPCPS_STATE_PREFIX,         // high bits of the size that is the keep-th largest, as far as found
    HPCPS_STATE_NEED,           // its rank among the sizes with that prefix
    HPCPS_STATE_SCANNED,        // where a scan leaves a total that nobody needs
    HPCPS_STATE_GAP_BYTES,
    HPCPS_STATE_WORDS,
};

// --- arithmetic, bytes, lanes ----------------------------------------------------------------------------------------

HPCPS_ELEMENT float hpcps_add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

HPCPS_ELEMENT float hpcps_sub(float a, float b) { return hpcps_add(a, -b); }

HPCPS_ELEMENT float hpcps_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

HPCPS_DEVICE uint32_t hpcps_load16(const uint8_t* at) {
    if ((hpcps_word)at % 2 == 0) return *(const uint16_t*)at;
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

HPCPS_DEVICE uint32_t hpcps_load32(const uint8_t* at) {
    if ((hpcps_word)at % 4 == 0) return *(const uint32_t*)at;
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

HPCPS_DEVICE void hpcps_store16(uint8_t* at, uint32_t word) {
    if ((hpcps_word)at % 2 == 0) {
        *(uint16_t*)at = (uint16_t)word;
    } else {
        at[0] = (uint8_t)word;
        at[1] = (uint8_t)(word >> 8);
    }
}

HPCPS_DEVICE void hpcps_store32(uint8_t* at, uint32_t word) {
    if ((hpcps_word)at % 4 == 0) {
        *(uint32_t*)at = word;
    } else {
        hpcps_store16(at, word);
        hpcps_store16(at + 2, word >> 16);
    }
}

HPCPS_DEVICE int hpcps_lane() { return (int)(threadIdx.x % HPCPS_WARP); }

HPCPS_DEVICE int hpcps_warp() { return (int)(threadIdx.x / HPCPS_WARP); }

HPCPS_DEVICE uint32_t hpcps_warp_max(uint32_t value) {
    for (int step = HPCPS_WARP / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(HPCPS_ALL_LANES, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// --- what goes out and what stays ------------------------------------------------------------------------------------

// The value to encode: the gradient and what is owed of it; residual may be null.
HPCPS_DEVICE float hpcps_owed(const float* x, const float* residual, int64_t i) {
    return residual ? hpcps_add(x[i], residual[i]) : x[i];
}

// Replaces a residual by what `decoded` leaves of `value`; where the payload is not finite it stays as it was.
HPCPS_DEVICE void hpcps_leave(float* residual, int64_t i, float value, float decoded, int finite) {
    if (!residual) return;
    const float old = residual[i];
    residual[i] = finite ? hpcps_sub(value, decoded) : hpcps_is_finite(old) ? old : 0.0f;
}

HPCPS_DEVICE void hpcps_count_not_finite(hpcps_word* state, uint32_t count) {
    if (count) atomicAdd(&state[HPCPS_STATE_NOT_FINITE], (hpcps_word)count);
}

// --- encode: fp32, fp16, bf16; a thread takes every HPCPS_THREADS-th element of a tile -------------------------------

HPCPS_KERNEL hpcps_encode_fp32_kernel(const float* x, float* residual, uint8_t* out, int64_t numel,
                                      hpcps_word* state) {
    uint32_t not_finite = 0;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = (int64_t)blockIdx.x * HPCPS_TILE + item * HPCPS_THREADS + threadIdx.x;
        if (i >= numel) break;
        const float value = hpcps_owed(x, residual, i);
        const int finite = hpcps_is_finite(value);
        not_finite += !finite;
        hpcps_store32(out + 4 * i, hpcps_bits(value));
        hpcps_leave(residual, i, value, value, finite);
    }
    hpcps_count_not_finite(state, not_finite);
}

HPCPS_DEVICE void hpcps_encode_16(const float* x, float* residual, uint8_t* out, int64_t numel, hpcps_word* state,
                                  int bfloat) {
    uint32_t not_finite = 0;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = (int64_t)blockIdx.x * HPCPS_TILE + item * HPCPS_THREADS + threadIdx.x;
        if (i >= numel) break;
        const float value = hpcps_owed(x, residual, i);
        const int finite = hpcps_is_finite(value);
        not_finite += !finite;
        const uint16_t word = bfloat ? hpcps_bfloat_sent(value) : hpcps_half_sent(value);
        hpcps_store16(out + 2 * i, word);
        hpcps_leave(residual, i, value, bfloat ? hpcps_of_bfloat(word) : hpcps_of_half(word), finite);
    }
    hpcps_count_not_finite(state, not_finite);
}

HPCPS_KERNEL hpcps_encode_fp16_kernel(const float* x, float* residual, uint8_t* out, int64_t numel,
                                      hpcps_word* state) {
    hpcps_encode_16(x, residual, out, numel, state, 0);
}

HPCPS_KERNEL hpcps_encode_bf16_kernel(const float* x, float* residual, uint8_t* out, int64_t numel,
                                      hpcps_word* state) {
    hpcps_encode_16(x, residual, out, numel, state, 1);
}

// --- encode: int8, onebit; a warp takes a block of 256, lane l its elements l, l + 32, ... ---------------------------

// The values of this warp's block; those that are missing are zero. Returns how many of the lane's are not finite.
HPCPS_DEVICE uint32_t hpcps_load_block(const float* x, const float* residual, int64_t begin, int64_t numel,
                                       float* values) {
    uint32_t not_finite = 0;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP + hpcps_lane();
        values[item] = i < numel ? hpcps_owed(x, residual, i) : 0.0f;
        not_finite += !hpcps_is_finite(values[item]);
    }
    return not_finite;
}

HPCPS_KERNEL hpcps_encode_int8_kernel(const float* x, float* residual, uint8_t* out, int64_t numel,
                                      hpcps_word* state) {
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp(), begin = block * HPCPS_BLOCK;
    if (begin >= numel) return;
    float values[HPCPS_ITEMS];
    hpcps_count_not_finite(state, hpcps_load_block(x, residual, begin, numel, values));
    uint32_t largest = 0;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const uint32_t magnitude = hpcps_magnitude(values[item]);
        largest = magnitude > largest ? magnitude : largest;
    }
    largest = hpcps_warp_max(largest);
    const uint8_t byte = hpcps_int8_scale_byte(largest);
    const int finite = byte != HPCPS_INT8_NOT_FINITE, some = finite && byte != 0;
    const float scale = hpcps_int8_scale(byte), inverse = some ? hpcps_int8_inverse(byte) : 0.0f;
    if (hpcps_lane() == 0) out[block] = byte;
    uint8_t* const bytes = out + hpcps_num_blocks(numel);
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP + hpcps_lane();
        if (i >= numel) break;
        const int32_t level = some ? hpcps_int8_sent(hpcps_mul(values[item], inverse), byte) : 0;
        bytes[i] = (uint8_t)level;
        hpcps_leave(residual, i, values[item], hpcps_mul(scale, (float)level), finite);
    }
}

HPCPS_KERNEL hpcps_encode_onebit_kernel(const float* x, float* residual, uint8_t* out, int64_t numel,
                                        hpcps_word* state) {
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp(), begin = block * HPCPS_BLOCK;
    if (begin >= numel) return;
    const int lane = hpcps_lane();
    float values[HPCPS_ITEMS];
    hpcps_count_not_finite(state, hpcps_load_block(x, residual, begin, numel, values));
    float sum = 0.0f;
    uint32_t signs = 0;                 // of the 32 elements that this lane's byte is part of
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        sum = hpcps_add(sum, hpcps_float(hpcps_magnitude(values[item])));
        const uint32_t word = __ballot_sync(HPCPS_ALL_LANES, (int)(hpcps_bits(values[item]) >> 31));
        signs = item == lane / 4 ? word : signs;
    }
    // the halves of hpcps_onebit_scale: lane 0 ends with the sum that it takes
    for (int half = HPCPS_LANES / 2; half > 0; half /= 2)
        sum = hpcps_add(sum, __shfl_down_sync(HPCPS_ALL_LANES, sum, half));
    const int64_t left = numel - begin;
    const float mean = __shfl_sync(HPCPS_ALL_LANES, sum, 0) / (float)(left < HPCPS_BLOCK ? (int32_t)left : (int32_t)HPCPS_BLOCK);
    const int finite = hpcps_is_finite(mean);
    const float scale = finite ? mean : hpcps_float(HPCPS_NAN_BITS);
    if (lane == 0) hpcps_store32(out + 4 * block, hpcps_bits(scale));
    if (begin + 8 * lane < numel)
        out[4 * hpcps_num_blocks(numel) + begin / 8 + lane] = finite ? (uint8_t)(signs >> (lane % 4 * 8)) : 0;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP + lane;
        if (i >= numel) break;
        const int minus = (int)(hpcps_bits(values[item]) >> 31);
        hpcps_leave(residual, i, values[item], minus ? -scale : scale, finite);
    }
}

// --- decode: dense ---------------------------------------------------------------------------------------------------

// Numbers of the codecs on the wire (hpcps.plan.Codec).
enum { HPCPS_NONE = 0, HPCPS_FP32 = 1, HPCPS_FP16 = 2, HPCPS_BF16 = 3, HPCPS_INT8 = 4, HPCPS_ONEBIT = 5 };

// A term of a sum: address of the payload, then the codec and, in the low half, the bits of the weight.
HPCPS_DEVICE const uint8_t* hpcps_term_payload(const hpcps_word* terms, int32_t t) {
    return (const uint8_t*)terms[2 * t];
}

HPCPS_DEVICE int32_t hpcps_term_codec(const hpcps_word* terms, int32_t t) { return (int32_t)(terms[2 * t + 1] >> 32); }

HPCPS_DEVICE float hpcps_term_weight(const hpcps_word* terms, int32_t t) {
    return hpcps_float((uint32_t)terms[2 * t + 1]);
}

// Terms from t on that are int8 with equal weight and equal scale byte in this block.
HPCPS_DEVICE int32_t hpcps_int8_run(const hpcps_word* terms, int32_t num_terms, int32_t t, int64_t block) {
    const uint8_t byte = hpcps_term_payload(terms, t)[block];
    int32_t end = t + 1;
    while (end < num_terms && terms[2 * end + 1] == terms[2 * t + 1] && hpcps_term_payload(terms, end)[block] == byte)
        ++end;
    return end - t;
}

// This lane's elements of a block, i and every 32nd after it, without the weight: of a run of int8 terms their sums.
HPCPS_DEVICE void hpcps_decode_block(const hpcps_word* terms, int32_t t, int32_t run, int64_t numel, int64_t i,
                                     float* values) {
    const uint8_t* const payload = hpcps_term_payload(terms, t);
    const int32_t codec = hpcps_term_codec(terms, t);
    if (codec == HPCPS_INT8) {
        int32_t levels[HPCPS_ITEMS] = {};
        for (int32_t other = t; other < t + run; ++other) {
            const uint8_t* const bytes = hpcps_term_payload(terms, other) + hpcps_num_blocks(numel);
            for (int item = 0; item < HPCPS_ITEMS; ++item)
                if (i + item * HPCPS_WARP < numel) levels[item] += (int8_t)bytes[i + item * HPCPS_WARP];
        }
        for (int item = 0; item < HPCPS_ITEMS; ++item) values[item] = (float)levels[item];
    } else if (codec == HPCPS_ONEBIT) {
        const uint8_t* const bits = payload + 4 * hpcps_num_blocks(numel);
        const float scale = hpcps_float(hpcps_load32(payload + 4 * (i / HPCPS_BLOCK)));
        for (int item = 0; item < HPCPS_ITEMS; ++item) {
            const int64_t at = i + item * HPCPS_WARP;
            if (at < numel) values[item] = bits[at / 8] >> (at % 8) & 1 ? -scale : scale;
        }
    } else if (codec == HPCPS_FP16 || codec == HPCPS_BF16) {
        for (int item = 0; item < HPCPS_ITEMS; ++item) {
            const int64_t at = i + item * HPCPS_WARP;
            if (at >= numel) break;
            const uint16_t word = (uint16_t)hpcps_load16(payload + 2 * at);
            values[item] = codec == HPCPS_FP16 ? hpcps_of_half(word) : hpcps_of_bfloat(word);
        }
    } else {
        for (int item = 0; item < HPCPS_ITEMS; ++item)
            if (i + item * HPCPS_WARP < numel)
                values[item] = hpcps_float(hpcps_load32(payload + 4 * (i + item * HPCPS_WARP)));
    }
}

// acc += sum of the terms, in their order, acc once through memory; assign: acc = that sum. A warp takes a block of
// 256. Runs of int8 terms are added as integers first.
HPCPS_KERNEL hpcps_combine_kernel(float* acc, int64_t numel, const hpcps_word* terms, int32_t num_terms,
                                  int32_t assign) {
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp();
    const int64_t begin = block * HPCPS_BLOCK + hpcps_lane();
    float sums[HPCPS_ITEMS], values[HPCPS_ITEMS] = {};
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP;
        sums[item] = !assign && i < numel ? acc[i] : 0.0f;
    }
    int32_t run;
    for (int32_t t = 0; t < num_terms && block < hpcps_num_blocks(numel); t += run) {
        const int int8 = hpcps_term_codec(terms, t) == HPCPS_INT8;
        run = int8 ? hpcps_int8_run(terms, num_terms, t, block) : 1;
        float factor = hpcps_term_weight(terms, t);
        if (int8) factor = hpcps_mul(factor, hpcps_int8_scale(hpcps_term_payload(terms, t)[block]));
        hpcps_decode_block(terms, t, run, numel, begin, values);
        for (int item = 0; item < HPCPS_ITEMS; ++item) {
            const float product = hpcps_mul(factor, values[item]);
            sums[item] = assign && t == 0 ? product : hpcps_add(sums[item], product);
        }
    }
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP;
        if (i < numel) acc[i] = sums[item];
    }
}
