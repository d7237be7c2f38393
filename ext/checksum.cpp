// A checksum that finds accidental damage: flipped bits, moved, lost or torn blocks. It is no defence against
// an adversary. The same bytes give the same value on every machine, whatever its byte order.
//
//   data   |-- block 0 --|-- block 1 --|- ... -|-- tail, filled with zero bytes --|
//   block  16 bytes: two little-endian words, even and odd
//
//   START + sum over blocks i of fold((even ^ key_even(i)) * (odd ^ key_odd(i)))        fold(p) = high(p) ^ low(p)
//   key_even(i) = EVEN_START + i * EVEN_STEP, key_odd(i) = ODD_START + i * ODD_STEP      (all modulo 2^64)
//
// The product is 128 bits wide, so a changed bit changes about half of the term; the keys tie a block to its
// place. Length and a last mix follow. The terms are summed, so a reader may take them in any order or in
// parallel, and array code gives the same value (the numpy reference does).
#include "kernels.h"

#include <cstring>

namespace hpcps {
namespace {

// Arbitrary odd constants with about half of the bits set (hexadecimal digits of pi's fraction, made odd).
constexpr uint64_t START = 0xC0AC29B7C97C50DDu;  // so that no bytes at all do not give 0
constexpr uint64_t EVEN_START = 0x243F6A8885A308D3u;
constexpr uint64_t EVEN_STEP = 0x13198A2E03707345u;
constexpr uint64_t ODD_START = 0xA4093822299F31D1u;
constexpr uint64_t ODD_STEP = 0x082EFA98EC4E6C89u;
constexpr uint64_t MIX_LENGTH = 0x452821E638D01377u;
constexpr uint64_t MIX_LAST = 0xBE5466CF34E90C6Du;
constexpr int64_t BLOCK_BYTES = 16;

inline uint64_t load_word(const uint8_t* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

inline uint64_t fold_product(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    const wide product = static_cast<wide>(a) * b;
    return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

inline uint64_t finish(uint64_t sum, uint64_t num_bytes) {
    sum ^= num_bytes * MIX_LENGTH;
    sum ^= sum >> 32;
    sum *= MIX_LAST;
    sum ^= sum >> 29;
    sum *= MIX_LENGTH;
    sum ^= sum >> 32;
    return sum & 0x7FFFFFFFFFFFFFFFu;
}

}  // namespace

int64_t checksum(const uint8_t* data, int64_t num_bytes) {
    uint64_t sum = START, key_even = EVEN_START, key_odd = ODD_START;
    int64_t at = 0;
    for (; at + BLOCK_BYTES <= num_bytes; at += BLOCK_BYTES) {
        sum += fold_product(load_word(data + at) ^ key_even, load_word(data + at + 8) ^ key_odd);
        key_even += EVEN_STEP;
        key_odd += ODD_STEP;
    }
    if (at < num_bytes) {
        uint8_t tail[BLOCK_BYTES] = {};
        std::memcpy(tail, data + at, static_cast<size_t>(num_bytes - at));
        sum += fold_product(load_word(tail) ^ key_even, load_word(tail + 8) ^ key_odd);
    }
    return static_cast<int64_t>(finish(sum, static_cast<uint64_t>(num_bytes)));
}

}  // namespace hpcps
