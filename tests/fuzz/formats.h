// The sizes, and the formats of top-k and packed, written a second time from their definition (hpcps/plan.py,
// cuda_src/elements.h): the targets compare ext/ with this. Slow and plain.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codecs.h"

// CodecSpec.wire_bytes
inline int64_t bound_of(int codec, int64_t numel, int64_t itemsize, int64_t keep) {
    const int64_t num_blocks = (numel + 255) / 256, most = keep * 51 / 50;
    switch (codec) {
        case NONE: return numel * itemsize;
        case FP32: return numel * 4;
        case FP16: return numel * 2;
        case BF16: return numel * 2;
        case INT8: return num_blocks + numel;
        case ONEBIT: return 4 * num_blocks + (numel + 7) / 8;
        case PACKED: return num_blocks + 4 * numel;
        default: return 16 + std::min(5 * most, most + numel / 127) + 2 * most;
    }
}

// Whether all payloads of so many elements have the same size.
inline bool is_fixed(int codec) { return codec != TOPK && codec != PACKED; }

template <typename Word>
Word word_at(const uint8_t* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Finds the elements that a top-k payload holds; false where it is not one of numel elements.
inline bool read_topk(const uint8_t* bytes, int64_t num_bytes, int64_t numel, std::vector<int64_t>& indices) {
    if (num_bytes < 16) return false;
    const int64_t count = word_at<uint32_t>(bytes), gap_bytes = word_at<uint32_t>(bytes + 4);
    const int32_t exponent = word_at<int32_t>(bytes + 8);
    if (word_at<uint32_t>(bytes + 12) != 0 || exponent < -126 || exponent > 112) return false;
    if (count > numel || num_bytes != 16 + gap_bytes + 2 * count) return false;
    int64_t place = 16, next = 0;
    indices.clear();
    while (static_cast<int64_t>(indices.size()) < count) {
        int64_t gap = 0, num_digits = 0;
        bool more = true;
        while (more) {
            if (place == 16 + gap_bytes || num_digits == 5) return false;
            gap += static_cast<int64_t>(bytes[place] % 128) << (7 * num_digits++);
            more = bytes[place++] >= 128;
        }
        if (next + gap >= numel) return false;
        indices.push_back(next + gap);
        next += gap + 1;
    }
    return place == 16 + gap_bytes;
}

inline bool is_packed(const uint8_t* bytes, int64_t num_bytes, int64_t numel) {
    const int64_t num_blocks = (numel + 255) / 256;
    int64_t place = num_blocks;
    if (num_bytes < num_blocks) return false;
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t count = bytes[block], length = std::min<int64_t>(256, numel - 256 * block);
        int64_t num_marked = 0;
        if (count == 255) place += 4 * length;
        if (count == 0 || count == 255) continue;
        if (32 + 4 * count >= 4 * length || place + 32 > num_bytes) return false;
        for (int64_t i = 0; i < 256; ++i) {
            const bool is_marked = bytes[place + i / 8] >> (i % 8) & 1;
            if (is_marked && i >= length) return false;
            num_marked += is_marked;
        }
        if (num_marked != count) return false;
        place += 32 + 4 * count;
    }
    return place == num_bytes;
}

inline bool is_valid(const Payload& payload, int64_t numel, int64_t itemsize) {
    std::vector<int64_t> indices;
    if (payload.codec == TOPK) return read_topk(payload.bytes, payload.num_bytes, numel, indices);
    if (payload.codec == PACKED) return is_packed(payload.bytes, payload.num_bytes, numel);
    return payload.num_bytes == bound_of(payload.codec, numel, itemsize, 0);
}
