// Fuzz target: payloads that nobody vouches for, added to an array.
//
// Input:  flags | number of elements: 4 B | payloads        flags: 1 assign, 2 float64, 4 torn, 8 * misalignment (0-7)
// payload: codec | weight: 8 B | length: 2 B | bytes        codec + 8: as long as it must be
//
// Torn: the bytes change between check and use, as those of a window may in which a peer writes. Then the sums may be
// anything, but no other memory may be touched.
#include <vector>

#include "codecs.h"
#include "formats.h"
#include "input.h"

namespace {

constexpr int64_t MOST_ELEMS = 2600;  // more than two of the blocks in which acc is added to
constexpr size_t MOST_PAYLOADS = 8;

struct Case {
    bool assign, torn;
    int64_t unused, wide_numel, numel;
    std::vector<Block<uint8_t>> bytes;
    std::vector<Payload> payloads;
};

template <typename Real>
void read_payload(Input& input, Case& its) {
    const int kind = input.take<uint8_t>(), codec = kind % 8 % (sizeof(Real) == 8 ? FP32 + 1 : NUM_CODECS);
    const double weight = input.take<double>();
    int64_t length = std::min<int64_t>(input.take<uint16_t>(), input.left());
    if (kind & 8 && is_fixed(codec)) length = bound_of(codec, its.numel, sizeof(Real), 0);
    its.bytes.emplace_back(length, its.unused);
    input.take_into(its.bytes.back().data(), length);
    its.payloads.push_back({codec, its.bytes.back().data(), length, weight});
}

// Whether the payloads are valid, which both builds and the plain reading of the formats must agree on.
template <typename Real>
bool all_valid(const Case& its) {
    bool valid = true;
    for (const Payload& payload : its.payloads) {
        const std::string fault = chosen_codecs().fault(payload, its.numel, sizeof(Real));
        CHECK(fault == portable_codecs().fault(payload, its.numel, sizeof(Real)));
        CHECK(fault.empty() == is_valid(payload, its.numel, sizeof(Real)));
        chosen_codecs().fault(payload, its.wide_numel, sizeof(Real));  // more elements than there is memory for
        valid = valid && fault.empty();
    }
    return valid;
}

template <typename Real>
Block<Real> start_value(const Case& its) {
    Block<Real> acc(its.numel, its.unused);
    for (int64_t i = 0; i < its.numel; ++i) acc[i] = static_cast<Real>(i * 7919 % 1009 - 504) / 8;
    return acc;
}

// Consecutive int8 payloads are summed as integers, so one call a payload may give other bits.
bool sums_one_by_one(const std::vector<Payload>& payloads) {
    for (size_t i = 1; i < payloads.size(); ++i)
        if (payloads[i].codec == INT8 && payloads[i - 1].codec == INT8) return false;
    return true;
}

template <typename Real>
void check_sums(const Case& its) {
    Block<Real> chosen = start_value<Real>(its), portable = start_value<Real>(its), single = start_value<Real>(its);
    chosen_codecs().add(chosen.data(), its.numel, its.payloads, its.assign);
    portable_codecs().add(portable.data(), its.numel, its.payloads, its.assign);
    CHECK(same_numbers(chosen, portable));
    if (sums_one_by_one(its.payloads)) {
        for (size_t i = 0; i < its.payloads.size(); ++i)
            chosen_codecs().add(single.data(), its.numel, {its.payloads[i]}, its.assign && i == 0);
        CHECK(same_numbers(chosen, single));
    }
    for (Payload payload : its.payloads) {
        payload.weight = 1;
        chosen_codecs().decode(payload, single.data(), its.numel);
        chosen_codecs().add(chosen.data(), its.numel, {payload}, true);
        CHECK(same_numbers(chosen, single));
    }
}

template <typename Real>
void tear(Case& its, Input& input) {
    for (Block<uint8_t>& bytes : its.bytes)
        for (int64_t i = 0; i < bytes.numel(); ++i) bytes[i] ^= input.take<uint8_t>();
    for (const Codecs* codecs : {&chosen_codecs(), &portable_codecs()}) {
        Block<Real> acc = start_value<Real>(its);
        codecs->add(acc.data(), its.numel, its.payloads, its.assign);
        for (const Payload& payload : its.payloads) codecs->decode(payload, acc.data(), its.numel);
    }
}

template <typename Real>
void run(Case& its, Input& input) {
    while (its.payloads.empty() || (input.left() > 0 && its.payloads.size() < MOST_PAYLOADS && !its.torn))
        read_payload<Real>(input, its);
    Block<Real> acc = start_value<Real>(its);
    if (!all_valid<Real>(its)) {
        CHECK(same_bits(acc, start_value<Real>(its)));
        return;
    }
    if (its.torn)
        tear<Real>(its, input);
    else
        check_sums<Real>(its);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    const int flags = input.take<uint8_t>();
    Case its{};
    its.assign = flags & 1, its.torn = flags & 4, its.unused = flags >> 3 & 7;
    its.wide_numel = input.take<uint32_t>();
    its.numel = its.wide_numel % MOST_ELEMS;
    if (flags & 2)
        run<double>(its, input);
    else
        run<float>(its, input);
    return 0;
}
