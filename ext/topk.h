// Top-k: choosing the elements that are sent, writing them, and reading a payload that nobody vouches for.
#pragma once
#include <cstdint>
#include <string>

#include "codec.h"

namespace hpcps {

// As encode in codec.h, for TOPK and at least one element.
Encoded encode_topk(const float* x, float* residual, uint8_t* out, int64_t numel, int64_t keep);

// What is wrong with the bytes as a payload of numel elements, empty where nothing is; see payload_fault in codec.h.
std::string topk_fault(const uint8_t* payload, int64_t num_bytes, int64_t numel);

// Walks through the elements of a payload in ascending order. Whatever the bytes are, and even if they change
// meanwhile (a peer may write into a window), it reads inside the payload only and its index never falls back.
class TopkReader {
public:
    TopkReader(const uint8_t* payload, int64_t num_bytes);

    int64_t index() const { return index_; }  // of the present element; END past the last one
    float value() const;
    void advance();

    static constexpr int64_t END = INT64_MAX;

private:
    const uint8_t* gap_;
    const uint8_t* gaps_end_;
    const uint8_t* half_;
    int64_t num_left_;  // the present element included
    int64_t index_ = -1;
    float unit_ = 0;    // 2^exponent
};

}  // namespace hpcps
