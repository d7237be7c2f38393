#include "packed.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../hpcps/cuda_src/elements.h"
#include "pool.h"

namespace hpcps {
namespace {

int32_t block_length(int64_t num_left) { return static_cast<int32_t>(std::min<int64_t>(num_left, HPCPS_BLOCK)); }

// What is wrong with the counts; adds up the bytes that they call for.
std::string counts_fault(const uint8_t* counts, int64_t numel, int64_t& num_bytes) {
    for (int64_t block = 0; block * HPCPS_BLOCK < numel; ++block) {
        const int32_t length = block_length(numel - block * HPCPS_BLOCK);
        const uint8_t count = read_once(counts + block);
        const int32_t size = hpcps_packed_bytes(count, length);
        if (size < 0)
            return "count " + std::to_string(count) + " of block " + std::to_string(block) + ", need 0 to " +
                   std::to_string(hpcps_packed_most(length)) + " or 255";
        num_bytes += size;
    }
    return "";
}

std::string marks_fault(const uint8_t* counts, const uint8_t* blocks, const uint8_t* end, int64_t numel) {
    Marks marks{};
    const int64_t wrong = select_codec_kernels().find_wrong_marks(counts, blocks, end, numel, &marks);
    if (wrong < 0) return "";
    const int32_t length = block_length(numel - wrong * HPCPS_BLOCK);
    const std::string who = "block " + std::to_string(wrong) + " marks ";
    if (are_beyond(marks, length)) return who + "elements beyond its " + std::to_string(length);
    return who + std::to_string(count_marks(marks)) + " elements, need " + std::to_string(counts[wrong]);
}

}  // namespace

// Every part goes to where it would stand if nothing before it were left out, and is then moved up.
Encoded encode_packed(const float* x, float* residual, uint8_t* out, int64_t numel) {
    const CodecKernels& kernels = select_codec_kernels();
    const int64_t num_parts = num_parts_of(numel);
    uint8_t* const blocks = out + hpcps_num_blocks(numel);
    std::vector<Encoded> parts(static_cast<size_t>(num_parts));
    for_parts(num_parts, numel, [&](int64_t number, int64_t begin, int64_t end) {
        Encoded& part = parts[static_cast<size_t>(number)];
        part.num_bytes =
            kernels.encode_packed(x + begin, residual != nullptr ? residual + begin : nullptr,
                                  out + begin / HPCPS_BLOCK, blocks + 4 * begin, end - begin, &part.num_not_finite);
    });
    Encoded encoded{blocks - out, 0};
    for (int64_t number = 0; number < num_parts; ++number) {
        const Encoded& part = parts[static_cast<size_t>(number)];
        const uint8_t* const from = blocks + 4 * part_begin(number, num_parts, numel);
        uint8_t* const to = out + encoded.num_bytes;
        if (to != from && part.num_bytes > 0) std::memmove(to, from, static_cast<size_t>(part.num_bytes));
        encoded.num_bytes += part.num_bytes;
        encoded.num_not_finite += part.num_not_finite;
    }
    return encoded;
}

std::string packed_fault(const uint8_t* payload, int64_t num_bytes, int64_t numel) {
    const std::string name = "packed payload of " + std::to_string(num_bytes) + " bytes";
    const std::string elements = std::to_string(numel) + " elements";
    const int64_t num_blocks = hpcps_num_blocks(numel);
    if (num_bytes < num_blocks)
        return name + ", need at least " + std::to_string(num_blocks) + " for the counts of " + elements;
    int64_t need = num_blocks;
    std::string why = counts_fault(payload, numel, need);
    if (why.empty() && need != num_bytes) return name + ", need " + std::to_string(need) + " for " + elements;
    if (why.empty()) why = marks_fault(payload, payload + num_blocks, payload + num_bytes, numel);
    if (why.empty()) return "";
    return name + " for " + elements + " is damaged: " + why;
}

PackedReader::PackedReader(const uint8_t* payload, int64_t num_bytes, int64_t numel)
    : kernels_(select_codec_kernels()),
      count_(payload),
      at_(payload + hpcps_num_blocks(numel)),
      end_(payload + num_bytes) {}

PackedReader::Block PackedReader::next(int64_t numel) {
    const uint8_t count = read_once(count_++);
    const int32_t size = hpcps_packed_bytes(count, block_length(numel));
    if (size <= 0 || size > end_ - at_) {
        if (size != 0) at_ = end_;  // it was changed: no byte of it can be told apart any more
        return {at_, 0, 0};
    }
    const Block block{at_, count, static_cast<int32_t>(std::min<int64_t>(end_ - at_, PACKED_ROOM))};
    at_ += size;
    return block;
}

void PackedReader::skip(int64_t num_blocks) {
    for (; num_blocks > 0; --num_blocks) next(HPCPS_BLOCK);
}

void PackedReader::add(float* acc, int64_t numel, float weight, bool assign) {
    for (int64_t begin = 0; begin < numel; begin += HPCPS_BLOCK) {
        const int32_t length = block_length(numel - begin);
        const Block block = next(length);
        if (block.count == HPCPS_PACKED_RAW)
            kernels_.add_fp32(acc + begin, block.bytes, weight, length, assign);
        else if (block.count != 0)
            kernels_.add_packed(acc + begin, block.bytes, block.count, block.room, weight, length, assign);
        else if (assign)
            std::fill(acc + begin, acc + begin + length, 0.0f);
    }
}

void PackedReader::copy(float* out, int64_t numel) {
    for (int64_t begin = 0; begin < numel; begin += HPCPS_BLOCK) {
        const int32_t length = block_length(numel - begin);
        const Block block = next(length);
        if (block.count == HPCPS_PACKED_RAW) {
            std::memcpy(out + begin, block.bytes, 4 * static_cast<size_t>(length));
            continue;
        }
        std::fill(out + begin, out + begin + length, 0.0f);
        if (block.count == 0) continue;
        const Marks marks = load_marks(block.bytes);
        if (!are_of(marks, block.count, length)) continue;
        const uint8_t* value = block.bytes + HPCPS_PACKED_BITMAP;
        for (int64_t word = 0; word < 4; ++word)
            for (uint64_t bits = marks.words[word]; bits != 0; bits &= bits - 1, value += 4)
                std::memcpy(out + begin + 64 * word + __builtin_ctzll(bits), value, 4);
    }
}

}  // namespace hpcps
