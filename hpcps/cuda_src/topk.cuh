// The CUDA kernels of top-k: selection, coding, checking and adding; kernels.cuh has the rules and the other codecs.
#pragma once
#include "kernels.cuh"

enum { HPCPS_BINS = 2048 };         // of a histogram; the three levels use 2048, 1024 and 1024

// Words of the state of a top-k payload that is read.
enum {
    HPCPS_READ_HEADER,          // its four words, as they are
    HPCPS_READ_SOUND = 4,       // the gaps fit the header and the number of elements
    HPCPS_READ_BROKEN,          // a gap that is coded too long or reaches too far
    HPCPS_READ_COUNT,           // gaps found
    HPCPS_READ_SPAN,            // elements up to the last one sent
    HPCPS_READ_WORDS,
};

// --- scan ------------------------------------------------------------------------------------------------------------

// Sum of the values of the threads before this one; `total` gets that of all. All threads of the block call it.
// sums: HPCPS_WARPS words of shared memory, free again when it returns.
HPCPS_DEVICE hpcps_word hpcps_block_scan(hpcps_word value, hpcps_word* sums, hpcps_word* total) {
    hpcps_word inclusive = value;
    for (int step = 1; step < HPCPS_WARP; step *= 2) {
        const hpcps_word other = __shfl_up_sync(HPCPS_ALL_LANES, inclusive, step);
        if (hpcps_lane() >= step) inclusive += other;
    }
    if (hpcps_lane() == HPCPS_WARP - 1) sums[hpcps_warp()] = inclusive;
    __syncthreads();
    hpcps_word before = 0, all = 0;
    for (int warp = 0; warp < HPCPS_WARPS; ++warp) {
        before += warp < hpcps_warp() ? sums[warp] : 0;
        all += sums[warp];
    }
    __syncthreads();
    *total = all;
    return before + inclusive - value;
}

// --- encode: topk ----------------------------------------------------------------------------------------------------
//
// The elements sent are those of the CPU (ext/topk.cpp): the first `keep` in the order size descending, index
// ascending, never a zero; size is the bits of the magnitude, with all that is not finite at infinity.
//
// histogram, choose    three times, 11 + 10 + 10 bits of the size: the threshold; passes after DONE do nothing
// count, scan          elements above and at the threshold in each tile and before it
// compact              index and half of those sent, in the order of the elements; what is left of all
// measure, scan        bytes of the gaps in each tile of elements sent and before it
// write                header, gaps, halves

HPCPS_DEVICE uint32_t hpcps_size(float value) {
    const uint32_t magnitude = hpcps_magnitude(value);
    return magnitude < HPCPS_INFINITY_BITS ? magnitude : HPCPS_INFINITY_BITS;
}

HPCPS_DEVICE int hpcps_level_shift(int level) { return level == 0 ? 20 : level == 1 ? 10 : 0; }

HPCPS_DEVICE int hpcps_level_bits(int level) { return level == 0 ? 11 : 10; }

// Adds to `bins` how often each value of the level's bits occurs among the sizes with the prefix found before.
HPCPS_KERNEL hpcps_topk_histogram_kernel(const float* x, const float* residual, int64_t numel, int32_t level,
                                         hpcps_word* state, uint32_t* bins) {
    __shared__ uint32_t own[HPCPS_BINS];
    if (state[HPCPS_STATE_DONE]) return;
    for (int bin = (int)threadIdx.x; bin < HPCPS_BINS; bin += HPCPS_THREADS) own[bin] = 0;
    __syncthreads();
    const int shift = hpcps_level_shift(level), bits = hpcps_level_bits(level);
    const uint32_t prefix = (uint32_t)state[HPCPS_STATE_PREFIX];
    uint32_t not_finite = 0, largest = 0;
    for (int64_t i = (int64_t)blockIdx.x * HPCPS_THREADS + threadIdx.x; i < numel;
         i += (int64_t)gridDim.x * HPCPS_THREADS) {
        const uint32_t size = hpcps_size(hpcps_owed(x, residual, i));
        not_finite += size == HPCPS_INFINITY_BITS;
        largest = size < HPCPS_INFINITY_BITS && size > largest ? size : largest;
        if (size != 0 && size >> shift >> bits == prefix) atomicAdd(&own[(size >> shift) & ((1u << bits) - 1u)], 1u);
    }
    if (level == 0) {
        hpcps_count_not_finite(state, not_finite);
        largest = hpcps_warp_max(largest);
        if (hpcps_lane() == 0) atomicMax(&state[HPCPS_STATE_LARGEST], (hpcps_word)largest);
    }
    __syncthreads();
    for (int bin = (int)threadIdx.x; bin < HPCPS_BINS; bin += HPCPS_THREADS)
        if (own[bin]) atomicAdd(&bins[bin], own[bin]);
}

// Finds the bin of the keep-th largest size; the threshold, where the bin is sent whole or holds one size. One block.
HPCPS_KERNEL hpcps_topk_choose_kernel(const uint32_t* bins, int32_t level, int64_t keep, hpcps_word* state) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    if (state[HPCPS_STATE_DONE]) return;
    const int shift = hpcps_level_shift(level), bits = hpcps_level_bits(level);
    const int each = (1 << bits) / HPCPS_THREADS, top = (1 << bits) - 1 - (int)threadIdx.x * each;
    const hpcps_word need = level == 0 ? (hpcps_word)keep : state[HPCPS_STATE_NEED];
    const hpcps_word prefix = state[HPCPS_STATE_PREFIX];
    hpcps_word mine = 0, total;
    for (int j = 0; j < each; ++j) mine += bins[top - j];
    hpcps_word above = hpcps_block_scan(mine, sums, &total);        // sizes in the bins above this thread's
    if (total < need) {                                             // fewer are not zero: all of them
        if (threadIdx.x == 0) {
            state[HPCPS_STATE_COUNT] = total;                       // threshold and ties stay 0
            state[HPCPS_STATE_DONE] = 1;
        }
        return;
    }
    for (int j = 0; j < each; ++j) {
        const hpcps_word count = bins[top - j];
        if (above < need && need <= above + count) {                // so in one bin of one thread
            const hpcps_word path = prefix << bits | (hpcps_word)(top - j), lowest = path << shift;
            const int whole = need == above + count;
            state[HPCPS_STATE_THRESHOLD] = whole && lowest ? lowest - 1 : lowest;
            state[HPCPS_STATE_TIES] = whole ? 0 : need - above;
            state[HPCPS_STATE_COUNT] = (hpcps_word)keep;
            state[HPCPS_STATE_PREFIX] = path;
            state[HPCPS_STATE_NEED] = need - above;
            state[HPCPS_STATE_DONE] = whole || level == 2;
        }
        above += count;
    }
}

// Replaces values by the sum of those before; `total` gets that of all. One block.
HPCPS_KERNEL hpcps_scan_kernel(hpcps_word* values, int64_t numel, hpcps_word* total) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    hpcps_word before = 0;
    for (int64_t begin = 0; begin < numel; begin += HPCPS_TILE) {
        const int64_t first = begin + (int64_t)threadIdx.x * HPCPS_ITEMS;
        hpcps_word mine = 0, all;
        for (int item = 0; item < HPCPS_ITEMS; ++item) mine += first + item < numel ? values[first + item] : 0;
        hpcps_word place = before + hpcps_block_scan(mine, sums, &all);
        for (int item = 0; item < HPCPS_ITEMS && first + item < numel; ++item) {
            const hpcps_word value = values[first + item];
            values[first + item] = place;
            place += value;
        }
        before += all;
    }
    if (threadIdx.x == 0) *total = before;
}

// Elements at the threshold in the high half of a word, those above it in the low half: one scan serves both.
HPCPS_DEVICE hpcps_word hpcps_split_count(uint32_t above, uint32_t ties) { return (hpcps_word)ties << 32 | above; }

HPCPS_KERNEL hpcps_topk_count_kernel(const float* x, const float* residual, int64_t numel, const hpcps_word* state,
                                     hpcps_word* tile_counts) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const uint32_t threshold = (uint32_t)state[HPCPS_STATE_THRESHOLD];
    hpcps_word mine = 0, total;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = (int64_t)blockIdx.x * HPCPS_TILE + item * HPCPS_THREADS + threadIdx.x;
        if (i >= numel) break;
        const uint32_t size = hpcps_size(hpcps_owed(x, residual, i));
        mine += hpcps_split_count(size > threshold, size == threshold);
    }
    hpcps_block_scan(mine, sums, &total);
    if (threadIdx.x == 0) tile_counts[blockIdx.x] = total;
}

// The exponent of what is sent; all that is not finite is sent before the largest that is.
HPCPS_DEVICE int32_t hpcps_exponent_sent(const hpcps_word* state) {
    const int finite = state[HPCPS_STATE_NOT_FINITE] < state[HPCPS_STATE_COUNT];
    return hpcps_topk_exponent(finite ? (uint32_t)state[HPCPS_STATE_LARGEST] : 0u);
}

// Writes index and half of the elements sent, and what is left of all. A warp takes 256 neighbours, 32 at a time, so
// that order is kept. room: elements that the arrays can hold, which the count never exceeds.
HPCPS_KERNEL hpcps_topk_compact_kernel(const float* x, float* residual, int64_t numel, const hpcps_word* state,
                                       const hpcps_word* tile_offsets, int64_t room, uint32_t* indices,
                                       uint16_t* halves) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const uint32_t below = (1u << hpcps_lane()) - 1u;               // lanes before this one
    const int64_t begin = (int64_t)blockIdx.x * HPCPS_TILE + hpcps_warp() * HPCPS_BLOCK + hpcps_lane();
    const uint32_t threshold = (uint32_t)state[HPCPS_STATE_THRESHOLD], ties = (uint32_t)state[HPCPS_STATE_TIES];
    const int32_t exponent = hpcps_exponent_sent(state);
    float values[HPCPS_ITEMS];
    hpcps_word of_warp = 0, total;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP;
        values[item] = i < numel ? hpcps_owed(x, residual, i) : 0.0f;
        const uint32_t size = hpcps_size(values[item]);
        of_warp += hpcps_split_count(__popc(__ballot_sync(HPCPS_ALL_LANES, size > threshold)),
                                     __popc(__ballot_sync(HPCPS_ALL_LANES, i < numel && size == threshold)));
    }
    const hpcps_word before = hpcps_block_scan(hpcps_lane() == 0 ? of_warp : 0, sums, &total);
    const hpcps_word place = tile_offsets[blockIdx.x] + __shfl_sync(HPCPS_ALL_LANES, before, 0);
    uint32_t num_above = (uint32_t)place, num_ties = (uint32_t)(place >> 32);
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t i = begin + item * HPCPS_WARP;
        const uint32_t size = hpcps_size(values[item]);
        const uint32_t above_lanes = __ballot_sync(HPCPS_ALL_LANES, size > threshold);
        const uint32_t tie_lanes = __ballot_sync(HPCPS_ALL_LANES, i < numel && size == threshold);
        const uint32_t rank = num_ties + (uint32_t)__popc(tie_lanes & below);
        const int64_t at = (int64_t)num_above + __popc(above_lanes & below) + (rank < ties ? rank : ties);
        num_above += (uint32_t)__popc(above_lanes);
        num_ties += (uint32_t)__popc(tie_lanes);
        if (i >= numel) continue;
        float decoded = 0.0f;
        if ((size > threshold || (size == threshold && rank < ties)) && at < room) {
            const uint16_t half = hpcps_topk_half(values[item], exponent);
            decoded = hpcps_topk_value(half, exponent);
            indices[at] = (uint32_t)i;
            halves[at] = half;
        }
        hpcps_leave(residual, i, values[item], decoded, hpcps_is_finite(values[item]));
    }
}

// Elements left out before the one that is sent as number j.
HPCPS_DEVICE uint32_t hpcps_gap(const uint32_t* indices, int64_t j) {
    return j == 0 ? indices[0] : indices[j] - indices[j - 1] - 1u;
}

HPCPS_DEVICE hpcps_word hpcps_gap_bytes(uint32_t gap) {
    return gap < 1u << 7 ? 1 : gap < 1u << 14 ? 2 : gap < 1u << 21 ? 3 : gap < 1u << 28 ? 4 : 5;
}

HPCPS_KERNEL hpcps_topk_measure_kernel(const uint32_t* indices, const hpcps_word* state, hpcps_word* tile_bytes) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t count = (int64_t)state[HPCPS_STATE_COUNT];
    hpcps_word mine = 0, total;
    for (int item = 0; item < HPCPS_ITEMS; ++item) {
        const int64_t j = (int64_t)blockIdx.x * HPCPS_TILE + item * HPCPS_THREADS + threadIdx.x;
        if (j < count) mine += hpcps_gap_bytes(hpcps_gap(indices, j));
    }
    hpcps_block_scan(mine, sums, &total);
    if (threadIdx.x == 0) tile_bytes[blockIdx.x] = total;
}

HPCPS_KERNEL hpcps_topk_write_kernel(const uint32_t* indices, const uint16_t* halves, const hpcps_word* tile_offsets,
                                     hpcps_word* state, uint8_t* out) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t count = (int64_t)state[HPCPS_STATE_COUNT], gap_bytes = (int64_t)state[HPCPS_STATE_GAP_BYTES];
    const int64_t first = (int64_t)blockIdx.x * HPCPS_TILE + (int64_t)threadIdx.x * HPCPS_ITEMS;
    hpcps_word mine = 0, total;
    for (int64_t j = first; j < first + HPCPS_ITEMS && j < count; ++j) mine += hpcps_gap_bytes(hpcps_gap(indices, j));
    uint8_t* at = out + HPCPS_TOPK_HEADER + tile_offsets[blockIdx.x] + hpcps_block_scan(mine, sums, &total);
    for (int64_t j = first; j < first + HPCPS_ITEMS && j < count; ++j) {
        uint32_t gap = hpcps_gap(indices, j);
        for (; gap >= 128u; gap >>= 7) *at++ = (uint8_t)(gap | 0x80u);
        *at++ = (uint8_t)gap;
        hpcps_store16(out + HPCPS_TOPK_HEADER + gap_bytes + 2 * j, halves[j]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        hpcps_store32(out, (uint32_t)count);
        hpcps_store32(out + 4, (uint32_t)gap_bytes);
        hpcps_store32(out + 8, (uint32_t)hpcps_exponent_sent(state));
        hpcps_store32(out + 12, 0);
        state[HPCPS_STATE_BYTES] = (hpcps_word)(HPCPS_TOPK_HEADER + gap_bytes + 2 * count);
    }
}

// --- decode: topk ----------------------------------------------------------------------------------------------------
//
// survey, scan, scan    gaps in each tile of gap bytes and before it, elements that they span
// check                 is the payload an encoding of numel elements? The host asks before anything is changed.
// add                   the values to their elements

// Gap bytes of a payload of so many bytes; 0 if its header does not fit its size.
HPCPS_DEVICE int64_t hpcps_topk_gap_bytes(const uint8_t* payload, int64_t num_bytes) {
    const int64_t count = hpcps_load32(payload), gap_bytes = hpcps_load32(payload + 4);
    return HPCPS_TOPK_HEADER + gap_bytes + 2 * count == num_bytes ? gap_bytes : 0;
}

// The gap whose last byte is byte `at`; -1 if it is coded too long or reaches beyond all elements.
HPCPS_DEVICE int64_t hpcps_gap_ending(const uint8_t* gaps, int64_t at, int64_t numel) {
    int64_t gap = gaps[at];
    int length = 1;
    for (; length <= HPCPS_TOPK_GAP_BYTES && at >= length && gaps[at - length] >= 128u; ++length)
        gap = gap << 7 | (gaps[at - length] & 127u);
    return length > HPCPS_TOPK_GAP_BYTES || gap >= numel ? -1 : gap;
}

// Gaps that end in this thread's bytes, and the elements that they span, the one sent included.
HPCPS_DEVICE int hpcps_survey(const uint8_t* gaps, int64_t gap_bytes, int64_t first, int64_t numel, hpcps_word* count,
                              hpcps_word* span) {
    int sound = 1;
    *count = *span = 0;
    for (int64_t at = first; at < first + HPCPS_ITEMS && at < gap_bytes; ++at) {
        if (gaps[at] >= 128u) continue;
        const int64_t gap = hpcps_gap_ending(gaps, at, numel);
        sound = sound && gap >= 0;
        *count += 1;
        *span += gap < 0 ? 0 : (hpcps_word)gap + 1;
    }
    return sound;
}

HPCPS_KERNEL hpcps_topk_survey_kernel(const uint8_t* payload, int64_t num_bytes, int64_t numel,
                                      hpcps_word* tile_counts, hpcps_word* tile_spans, hpcps_word* state) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const int64_t first = (int64_t)blockIdx.x * HPCPS_TILE + (int64_t)threadIdx.x * HPCPS_ITEMS;
    const int64_t gap_bytes = hpcps_topk_gap_bytes(payload, num_bytes);
    hpcps_word count, span, num_gaps, num_spanned;
    if (!hpcps_survey(payload + HPCPS_TOPK_HEADER, gap_bytes, first, numel, &count, &span))
        atomicMax(&state[HPCPS_READ_BROKEN], (hpcps_word)1);
    hpcps_block_scan(count, sums, &num_gaps);
    hpcps_block_scan(span, sums, &num_spanned);
    if (threadIdx.x == 0) {
        tile_counts[blockIdx.x] = num_gaps;
        tile_spans[blockIdx.x] = num_spanned;
    }
}

// Leaves the header's words, for the host to judge, and the verdict on the gaps. One block. Payloads have a header.
HPCPS_KERNEL hpcps_topk_check_kernel(const uint8_t* payload, int64_t num_bytes, int64_t numel, hpcps_word* state) {
    if (threadIdx.x != 0) return;
    for (int word = 0; word < HPCPS_READ_SOUND - HPCPS_READ_HEADER; ++word)
        state[HPCPS_READ_HEADER + word] = hpcps_load32(payload + 4 * word);
    const int64_t gap_bytes = hpcps_topk_gap_bytes(payload, num_bytes);
    const int ended = gap_bytes == 0 || payload[HPCPS_TOPK_HEADER + gap_bytes - 1] < 128u;
    state[HPCPS_READ_SOUND] = ended && !state[HPCPS_READ_BROKEN] && state[HPCPS_READ_SPAN] <= (hpcps_word)numel &&
                              state[HPCPS_READ_COUNT] == state[HPCPS_READ_HEADER];
}

// Adds the values to their elements, or assigns them. For payloads that were found valid.
HPCPS_KERNEL hpcps_topk_add_kernel(float* acc, int64_t numel, const uint8_t* payload, int64_t num_bytes,
                                   const hpcps_word* tile_counts, const hpcps_word* tile_spans, float weight,
                                   int32_t assign) {
    __shared__ hpcps_word sums[HPCPS_WARPS];
    const uint8_t* const gaps = payload + HPCPS_TOPK_HEADER;
    const int64_t first = (int64_t)blockIdx.x * HPCPS_TILE + (int64_t)threadIdx.x * HPCPS_ITEMS;
    const int64_t gap_bytes = hpcps_topk_gap_bytes(payload, num_bytes);
    const int32_t exponent = (int32_t)hpcps_load32(payload + 8);
    hpcps_word count, span, total;
    hpcps_survey(gaps, gap_bytes, first, numel, &count, &span);
    int64_t j = (int64_t)(tile_counts[blockIdx.x] + hpcps_block_scan(count, sums, &total));
    int64_t i = (int64_t)(tile_spans[blockIdx.x] + hpcps_block_scan(span, sums, &total));
    for (int64_t at = first; at < first + HPCPS_ITEMS && at < gap_bytes; ++at) {
        if (gaps[at] >= 128u) continue;
        i += hpcps_gap_ending(gaps, at, numel);
        const uint16_t half = (uint16_t)hpcps_load16(gaps + gap_bytes + 2 * j);
        const float product = hpcps_mul(weight, hpcps_topk_value(half, exponent));
        acc[i] = assign ? product : hpcps_add(acc[i], product);
        ++i;
        ++j;
    }
}
