// Fuzz target: any numbers, encoded with and without a residual and decoded again.
//
// Input: flags | codec | number to keep: 4 B | size: 2 B | numbers, element and residual in turn, again from their
//        start where there are too few
// flags: 1 residual, 2 float64, 4 as many elements as size says (0 to 2047), 8 so many that top-k takes a sample (one
//        input of 32, chosen by its bytes: they take long), 16 * misalignment (0-7)
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "codecs.h"
#include "formats.h"
#include "input.h"

namespace {

constexpr int64_t SAMPLED_ELEMS = 65537;

template <typename Real>
struct Case {
    int codec;
    bool feedback;
    int64_t numel, keep, unused;
    Block<Real> x, residual;
};

// What one build made of it.
template <typename Real>
struct Result {
    Sent sent;
    Block<uint8_t> out;
    Block<Real> left;
};

template <typename Real>
Result<Real> encode(const Codecs& codecs, const Case<Real>& its) {
    const int64_t bound = bound_of(its.codec, its.numel, sizeof(Real), its.keep);
    Result<Real> result{{}, Block<uint8_t>(bound, its.unused), Block<Real>(its.feedback ? its.numel : 0, its.unused)};
    for (int64_t i = 0; i < result.left.numel(); ++i) result.left[i] = its.residual[i];
    result.sent = codecs.encode(its.codec, its.x.data(), its.feedback ? result.left.data() : nullptr,
                                result.out.data(), its.numel, its.keep);
    CHECK(result.sent.num_bytes <= bound);
    CHECK(!is_fixed(its.codec) || result.sent.num_bytes == bound);
    return result;
}

// The distance of numbers of this size.
template <typename Real>
Real ulp(Real size) {
    const int smallest = std::numeric_limits<Real>::min_exponent - std::numeric_limits<Real>::digits;
    if (size == 0) return std::ldexp(Real{1}, smallest);
    return std::ldexp(Real{1}, std::max(smallest, std::ilogb(size) - std::numeric_limits<Real>::digits + 1));
}

// Whether decoded + residual must be the sum exactly, not to an ulp: all but onebit, and what is cut to a range.
template <typename Real>
bool is_exact(int codec, Real v) {
    if (codec == FP16) return std::fabs(v) <= 65504;
    if (codec == FP32) return std::fabs(v) <= FLT_MAX;
    return codec != ONEBIT;
}

// Which elements count as not finite: those of v, and for int8 and onebit the whole block.
template <typename Real>
std::vector<bool> find_lost(const Case<Real>& its, const Block<Real>& v, const uint8_t* payload) {
    std::vector<bool> lost(static_cast<size_t>(its.numel));
    const bool blocks = its.codec == INT8 || its.codec == ONEBIT;
    for (int64_t begin = 0; begin < its.numel; begin += 256) {
        const int64_t end = std::min(begin + 256, its.numel), block = begin / 256;
        bool any = false;
        double sum = 0;
        for (int64_t i = begin; i < end; ++i) {
            lost[static_cast<size_t>(i)] = !std::isfinite(v[i]);
            any = any || !std::isfinite(v[i]);
            sum += std::fabs(static_cast<double>(v[i]));
        }
        if (!blocks) continue;
        const bool marked = its.codec == INT8 ? payload[block] == 255 : std::isnan(word_at<float>(payload + 4 * block));
        if (any) CHECK(marked);
        if (marked) CHECK(any || (its.codec == ONEBIT && sum > 0.999 * FLT_MAX));  // its sum may be beyond the range
        if (marked) std::fill(lost.begin() + begin, lost.begin() + end, true);
    }
    return lost;
}

// Sent are the first `keep` in the order: magnitude descending, all that is not finite first, then index; no zeros.
void check_choice(const Case<float>& its, const Block<float>& v, const std::vector<int64_t>& indices) {
    const auto size_of = [&](int64_t i) { return std::isfinite(v[i]) ? std::fabs(v[i]) : INFINITY; };
    float least = INFINITY;
    for (const int64_t i : indices) least = std::min(least, size_of(i));
    int64_t last_of_least = -1, num_not_zero = 0;
    std::vector<bool> chosen(static_cast<size_t>(its.numel));
    for (const int64_t i : indices) {
        chosen[static_cast<size_t>(i)] = true;
        if (size_of(i) == least) last_of_least = i;
    }
    CHECK(least > 0);
    for (int64_t i = 0; i < its.numel; ++i) {
        num_not_zero += size_of(i) > 0;
        if (chosen[static_cast<size_t>(i)]) continue;
        CHECK(size_of(i) < least || size_of(i) == 0 || (size_of(i) == least && i > last_of_least));
    }
    CHECK(static_cast<int64_t>(indices.size()) == std::min(its.keep, num_not_zero));
}

void check_choice(const Case<double>&, const Block<double>&, const std::vector<int64_t>&) {}

template <typename Real>
void check_element(const Case<Real>& its, Real v, Real decoded, bool lost, bool sent, int64_t i, const Real* left) {
    const Real old = its.residual[i];
    if (!lost)
        CHECK(std::isfinite(decoded));
    else if (sent)
        CHECK(!std::isfinite(decoded));
    if (left == nullptr) return;
    CHECK(std::isfinite(left[i]));
    if (lost) {
        CHECK(left[i] == (std::isfinite(old) ? old : 0));
        return;
    }
    using Wide = long double;
    const Wide error = std::fabs(static_cast<Wide>(decoded) + left[i] - v);
    CHECK(error <= (is_exact(its.codec, v) ? Real{0} : ulp(std::max(std::fabs(v), std::fabs(decoded)))));
}

template <typename Real>
void check_round_trip(const Case<Real>& its, const Result<Real>& result) {
    Block<uint8_t> bytes(result.sent.num_bytes, its.unused);
    std::copy_n(result.out.data(), bytes.numel(), bytes.data());
    const Payload payload{its.codec, bytes.data(), bytes.numel(), 1};
    CHECK(chosen_codecs().fault(payload, its.numel, sizeof(Real)).empty());
    CHECK(is_valid(payload, its.numel, sizeof(Real)));
    Block<Real> decoded(its.numel, its.unused), v(its.numel);
    chosen_codecs().decode(payload, decoded.data(), its.numel);
    int64_t num_not_finite = 0;
    for (int64_t i = 0; i < its.numel; ++i) {
        v[i] = its.feedback ? its.x[i] + its.residual[i] : its.x[i];
        num_not_finite += !std::isfinite(v[i]);
    }
    if (its.codec == NONE || its.codec == PACKED) CHECK(same_numbers(decoded, v));
    CHECK(result.sent.num_not_finite == num_not_finite);
    std::vector<bool> sent(static_cast<size_t>(its.numel), its.codec != TOPK);
    if (its.codec == TOPK) {
        std::vector<int64_t> indices;
        CHECK(read_topk(bytes.data(), bytes.numel(), its.numel, indices));
        check_choice(its, v, indices);
        for (const int64_t i : indices) sent[static_cast<size_t>(i)] = true;
    }
    const std::vector<bool> lost = find_lost(its, v, bytes.data());
    for (int64_t i = 0; i < its.numel; ++i)
        check_element(its, v[i], decoded[i], lost[static_cast<size_t>(i)], sent[static_cast<size_t>(i)], i,
                      its.feedback ? result.left.data() : nullptr);
}

bool is_chosen(const uint8_t* data, size_t size) {
    uint32_t hash = 0;
    for (size_t i = 0; i < size; ++i) hash = hash * 31 + data[i];
    return hash % 32 == 0;
}

template <typename Real>
void run(Input& input, int flags, int codec) {
    const uint32_t keep = input.take<uint32_t>();
    const int64_t size = input.take<uint16_t>(), num_given = input.left() / static_cast<int64_t>(sizeof(Real));
    std::vector<Real> given(static_cast<size_t>(std::max<int64_t>(num_given, 2)));
    for (Real& each : given) each = input.take<Real>();
    const int64_t numel = flags & 8 ? SAMPLED_ELEMS + size : flags & 4 ? size % 2048 : num_given / 2;
    const int64_t unused = flags >> 4 & 7;
    Case<Real> its{codec, (flags & 1) != 0, numel, 0, unused, Block<Real>(numel, unused), Block<Real>(numel)};
    its.keep = codec == TOPK && numel > 0 ? 1 + keep % numel : 0;
    for (int64_t i = 0; i < numel; ++i) {
        its.x[i] = given[static_cast<size_t>(2 * i) % given.size()];
        its.residual[i] = given[static_cast<size_t>(2 * i + 1) % given.size()];
        if (std::isnan(its.x[i]) && std::isnan(its.residual[i])) its.residual[i] = 0;  // which one is sent is left open
    }
    const Result<Real> chosen = encode(chosen_codecs(), its), portable = encode(portable_codecs(), its);
    CHECK(chosen.sent.num_bytes == portable.sent.num_bytes);
    CHECK(chosen.sent.num_not_finite == portable.sent.num_not_finite);
    CHECK(std::equal(chosen.out.data(), chosen.out.data() + chosen.sent.num_bytes, portable.out.data()));
    CHECK(same_bits(chosen.left, portable.left));
    check_round_trip(its, chosen);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    int flags = input.take<uint8_t>();
    const int codec = input.take<uint8_t>() % (flags & 2 ? FP32 + 1 : NUM_CODECS);
    if (flags & 8 && (codec != TOPK || !is_chosen(data, size))) flags ^= 8 | 4;
    if (flags & 2)
        run<double>(input, flags, codec);
    else
        run<float>(input, flags, codec);
    return 0;
}
