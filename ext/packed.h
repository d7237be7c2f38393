// Packed: values without the zeros, block by block. The wire format stands in cuda_src/elements.h.
#pragma once
#include <cstdint>
#include <string>

#include "codec.h"
#include "codec_kernels.h"

namespace hpcps {

// As encode in codec.h, for PACKED.
Encoded encode_packed(const float* x, float* residual, uint8_t* out, int64_t numel);

// What is wrong with the bytes as a payload of numel elements, empty where nothing is; see payload_fault in codec.h.
std::string packed_fault(const uint8_t* payload, int64_t num_bytes, int64_t numel);

// Walks through the blocks of a payload. Whatever the bytes are, and even if they change meanwhile (a peer may write
// into a window), it reads inside the payload only.
class PackedReader {
public:
    // The payload has as many bytes as packed_fault was told.
    PackedReader(const uint8_t* payload, int64_t num_bytes, int64_t numel);

    // Moves on by so many whole blocks.
    void skip(int64_t num_blocks);

    // acc += weight * the next numel elements, or acc = that; whole blocks, but for the last one of all.
    void add(float* acc, int64_t numel, float weight, bool assign);

    // The next elements bit for bit.
    void copy(float* out, int64_t numel);

private:
    struct Block {
        const uint8_t* bytes;
        int32_t count, room;  // room: bytes that may be read from here on, at least those of the block
    };
    Block next(int64_t numel);

    const CodecKernels& kernels_;
    const uint8_t* count_;
    const uint8_t* at_;
    const uint8_t* end_;
};

}  // namespace hpcps
