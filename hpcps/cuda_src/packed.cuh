// The CUDA kernels of packed: a warp takes a block of the format, lane l its elements l, l + 32, ...; kernels.cuh has
// the rules. Every kernel here has one CUDA block for HPCPS_WARPS blocks of the format, a tile.
#pragma once
#include "topk.cuh"

enum { HPCPS_PACKED_WORDS = HPCPS_PACKED_BITMAP / 4 };  // of a bitmap: bit l of word j is lane l's element number j
static_assert(HPCPS_PACKED_WORDS == HPCPS_ITEMS, "a word of the bitmap for each element of a lane");

// Words of the state of a packed payload that is read. A fault is the number of blocks from the first faulty one on.
enum {
    HPCPS_PACKED_FAULTY_COUNT,  // no encoder writes that count
    HPCPS_PACKED_FAULTY_MARKS,  // the bitmap does not fit its count, or marks elements beyond the end
    HPCPS_PACKED_SPAN,          // bytes of all blocks
};

HPCPS_DEVICE int32_t hpcps_packed_length(int64_t begin, int64_t numel) {
    const int64_t left = numel - begin;
    return left <= 0 ? 0 : left < HPCPS_BLOCK ? (int32_t)left : (int32_t)HPCPS_BLOCK;
}

// Bytes of the tile's blocks before this warp's. Every thread of the CUDA block calls it.
HPCPS_DEVICE int64_t hpcps_packed_before(int32_t num_bytes, hpcps_word* sums, hpcps_word* total) {
    const hpcps_word before = hpcps_block_scan(hpcps_lane() == 0 ? (hpcps_word)num_bytes : 0, sums, total);
    return (int64_t)__shfl_sync(HPCPS_ALL_LANES, before, 0);
}

// --- encode ----------------------------------------------------------------------------------------------------------
//
// count, scan    the counts; bytes of the blocks in each tile and before it
// write          the blocks, and what is left

// Which elements of this warp's block are not zero, as words of its bitmap; returns how many.
HPCPS_DEVICE int32_t hpcps_packed_marks(const float* values, uint32_t* words) {
    int32_t count = 0;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        words[item] = __ballot_sync(HPCPS_ALL_LANES, (int)(hpcps_bits(values[item]) != 0u));
        count += __popc(words[item]);
    }
    return count;
}

HPCPS_KERNEL hpcps_packed_count_kernel(const float* x, const float* residual, int64_t numel, uint8_t* out,
                                       hpcps_word* state, hpcps_word* tile_bytes) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp(), begin = block * HPCPS_BLOCK;
    const int32_t length = hpcps_packed_length(begin, numel);
    float values[HPCPS_ITEMS];
    uint32_t words[HPCPS_ITEMS];
    hpcps_word total;
    hpcps_count_not_finite(state, hpcps_load_block(x, residual, begin, numel, values));
    const uint8_t count = hpcps_packed_count(hpcps_packed_marks(values, words), length);
    if (hpcps_lane() == 0 && length != 0) out[block] = count;
    hpcps_packed_before(hpcps_packed_bytes(count, length), sums, &total);
    if (threadIdx.x == 0) tile_bytes[blockIdx.x] = total;
}

HPCPS_KERNEL hpcps_packed_write_kernel(const float* x, float* residual, int64_t numel, const hpcps_word* tile_offsets,
                                       hpcps_word* state, uint8_t* out) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp(), begin = block * HPCPS_BLOCK;
    const int32_t length = hpcps_packed_length(begin, numel);
    const uint32_t below = (1u << hpcps_lane()) - 1u;               // lanes before this one
    float values[HPCPS_ITEMS];
    uint32_t words[HPCPS_ITEMS];
    hpcps_word total;
    hpcps_load_block(x, residual, begin, numel, values);
    const uint8_t count = hpcps_packed_count(hpcps_packed_marks(values, words), length);
    const int64_t before = hpcps_packed_before(hpcps_packed_bytes(count, length), sums, &total);
    uint8_t* const bytes = out + hpcps_num_blocks(numel) + tile_offsets[blockIdx.x] + before;
    const int raw = count == HPCPS_PACKED_RAW;
    uint8_t* first = raw ? bytes : bytes + HPCPS_PACKED_BITMAP;     // value of the item's first element that is sent
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP + hpcps_lane();
        if (!raw && count != 0 && hpcps_lane() == item) hpcps_store32(bytes + 4 * item, words[item]);
        const int mine = (int)(words[item] >> hpcps_lane() & 1u);
        const int rank = raw ? hpcps_lane() : __popc(words[item] & below);
        if ((raw || mine) && i < numel) hpcps_store32(first + 4 * rank, hpcps_bits(values[item]));
        first += raw ? 4 * HPCPS_WARP : 4 * __popc(words[item]);
        if (i < numel) hpcps_leave(residual, i, values[item], values[item], hpcps_is_finite(values[item]));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        state[HPCPS_STATE_BYTES] = (hpcps_word)hpcps_num_blocks(numel) + state[HPCPS_STATE_SCANNED];
}

// --- decode ----------------------------------------------------------------------------------------------------------
//
// survey, scan    are the counts those of numel elements; bytes of the blocks in each tile and before it
// check           do the bitmaps fit the counts? The host asks before anything is changed.
// add             the values to their elements
//
// Payloads have as many bytes as there are counts, at least.

// The count of this warp's block, 0 where there is none or it is not valid.
HPCPS_DEVICE uint8_t hpcps_packed_count_at(const uint8_t* payload, int64_t block, int32_t length) {
    const uint8_t count = length != 0 ? payload[block] : 0;
    return hpcps_packed_bytes(count, length) < 0 ? 0 : count;
}

HPCPS_KERNEL hpcps_packed_survey_kernel(const uint8_t* payload, int64_t numel, hpcps_word* state,
                                        hpcps_word* tile_bytes) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp();
    const int32_t length = hpcps_packed_length(block * HPCPS_BLOCK, numel);
    const uint8_t count = hpcps_packed_count_at(payload, block, length);
    hpcps_word total;
    if (hpcps_lane() == 0 && length != 0 && count != payload[block])
        atomicMax(&state[HPCPS_PACKED_FAULTY_COUNT], (hpcps_word)(hpcps_num_blocks(numel) - block));
    hpcps_packed_before(hpcps_packed_bytes(count, length), sums, &total);
    if (threadIdx.x == 0) tile_bytes[blockIdx.x] = total;
}

// Does nothing where the counts already do not fit the payload.
HPCPS_KERNEL hpcps_packed_check_kernel(const uint8_t* payload, int64_t num_bytes, int64_t numel,
                                       const hpcps_word* tile_offsets, hpcps_word* state) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t num_blocks = hpcps_num_blocks(numel);
    if (state[HPCPS_PACKED_FAULTY_COUNT] || num_blocks + (int64_t)state[HPCPS_PACKED_SPAN] != num_bytes) return;
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp();
    const int32_t length = hpcps_packed_length(block * HPCPS_BLOCK, numel);
    const uint8_t count = hpcps_packed_count_at(payload, block, length);
    hpcps_word total;
    const int64_t before = hpcps_packed_before(hpcps_packed_bytes(count, length), sums, &total);
    if (count == 0 || count == HPCPS_PACKED_RAW || hpcps_lane() != 0) return;
    const uint8_t* const bitmap = payload + num_blocks + tile_offsets[blockIdx.x] + before;
    int32_t marked = 0;
    uint32_t beyond = 0;
    for (int word = 0; word < HPCPS_PACKED_WORDS; ++word) {
        const uint32_t bits = hpcps_load32(bitmap + 4 * word);
        const int32_t left = length - 32 * word;
        marked += __popc(bits);
        beyond |= left <= 0 ? bits : left < 32 ? bits >> left : 0u;
    }
    if (marked != count || beyond)
        atomicMax(&state[HPCPS_PACKED_FAULTY_MARKS], (hpcps_word)(num_blocks - block));
}

// Adds the values to their elements; assign: assigns them, and +0 to all others. For payloads that were found valid.
HPCPS_KERNEL hpcps_packed_add_kernel(float* acc, int64_t numel, const uint8_t* payload, const hpcps_word* tile_offsets,
                                     float weight, int32_t assign) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t block = (int64_t)blockIdx.x * HPCPS_WARPS + hpcps_warp(), begin = block * HPCPS_BLOCK;
    const int32_t length = hpcps_packed_length(begin, numel);
    const uint8_t count = hpcps_packed_count_at(payload, block, length);
    const uint32_t below = (1u << hpcps_lane()) - 1u;
    hpcps_word total;
    const int64_t before = hpcps_packed_before(hpcps_packed_bytes(count, length), sums, &total);
    const uint8_t* const bytes = payload + hpcps_num_blocks(numel) + tile_offsets[blockIdx.x] + before;
    const int raw = count == HPCPS_PACKED_RAW;
    const uint8_t* first = raw ? bytes : bytes + HPCPS_PACKED_BITMAP;
    for (int item = 0; item < HPCPS_ITEMS && begin + item * HPCPS_WARP < numel; ++item) {
        const int64_t i = begin + item * HPCPS_WARP + hpcps_lane();
        const uint32_t word = raw ? HPCPS_ALL_LANES : count != 0 ? hpcps_load32(bytes + 4 * item) : 0u;
        const uint8_t* const value = first + 4 * __popc(word & below);
        first += 4 * __popc(word);
        if (i >= numel) continue;
        if (word >> hpcps_lane() & 1u) {
            const float product = hpcps_mul(weight, hpcps_float(hpcps_load32(value)));
            acc[i] = assign ? product : hpcps_add(acc[i], product);
        } else if (assign) {
            acc[i] = 0.0f;
        }
    }
}
