// Top-k: which elements are sent, and their coding. The wire format stands in cuda_src/elements.h.
//
// Which elements are sent is defined without regard to how they are found, so neither threads nor the instruction
// set, nor the sample below, change it:
//   v          = x + residual, rounded to float (x where there is no residual)
//   size(v)    = bits of |v|; infinity and NaN all count as the bits of infinity, above everything finite
//   sent       = the first `keep` elements in the order: size descending, then index ascending; zeros are never sent,
//                so fewer are sent only where fewer are not zero. This is exact: always within 2 % of what was asked.
//   exponent   = hpcps_topk_exponent of the largest finite size that is sent
//   half       = hpcps_topk_half(v, exponent)
//   decoded    = hpcps_topk_value(half, exponent): exact and finite for every finite v
//   residual   = v - decoded where sent, v where not; where v is not finite (sent or not) the old residual, or 0 where
//                that is not finite either
//
// How they are found: a sample of v gives a threshold that somewhat more than `keep` elements should reach. One pass
// over memory adds the residual and collects those (index, value). The exact cut among them comes from histograms of
// the size, digit by digit: its upper bits, then the next ones in the bin that the cut falls into, and so on. The pass
// leaves the residual of those that are likely sent as if they were; only where that turns out wrong memory is touched
// again. Where the sample misled (too few or far too many reach the threshold), all candidates get v back and the
// histograms run over the whole array.
#include "topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../hpcps/cuda_src/elements.h"
#include "codec_kernels.h"
#include "pool.h"

namespace hpcps {
namespace {

constexpr int64_t CHUNK_ELEMS = 1024;    // looked at between two checks of the room left
constexpr int64_t SAMPLE_LINES = 4096;   // places in the array, each a cache line
constexpr int64_t LINE_ELEMS = 16;
constexpr int64_t SAMPLE_ELEMS = SAMPLE_LINES * LINE_ELEMS;

uint32_t size_of(float v) { return std::min<uint32_t>(hpcps_magnitude(v), HPCPS_INFINITY_BITS); }

bool is_finite(const Candidate& candidate) { return hpcps_is_finite(candidate.value) != 0; }

// --- the cut --------------------------------------------------------------------------------------------------------

// Sent are all sizes above the threshold and the first so many that equal it.
struct Cut {
    uint32_t threshold;
    int64_t num_ties;
};

struct Digit {
    int shift, width;
};

// The cut that sends `keep` of about so many sizes that for_each_size(visit) passes on; threshold 0 where they are no
// more than that.
template <typename ForEachSize>
Cut find_cut(int64_t count, const ForEachSize& for_each_size, int64_t keep) {
    // Narrow bins where there is much to count: magnitudes of gradients fall into few of 2048 bins, and adding to one
    // bin again and again is slow. Wide ones where clearing the bins would take longer.
    const std::vector<Digit> digits = count > 65536 ? std::vector<Digit>{{15, 16}, {0, 15}}
                                                    : std::vector<Digit>{{20, 11}, {10, 10}, {0, 10}};
    std::vector<uint32_t> bins;
    uint32_t upper = 0;  // digits known so far
    int64_t wanted = keep;
    for (const Digit digit : digits) {
        const uint32_t mask = (uint32_t{1} << digit.width) - 1;
        bins.assign(size_t{mask} + 1, 0);
        for_each_size([&](uint32_t size) {
            if (size >> digit.shift >> digit.width == upper) ++bins[size >> digit.shift & mask];
        });
        uint32_t bin = mask;
        for (; bin > 0 && bins[bin] < wanted; --bin) wanted -= bins[bin];
        upper = upper << digit.width | bin;
    }
    return {upper, wanted};
}

// --- the sample -----------------------------------------------------------------------------------------------------

struct Guess {
    uint32_t threshold;  // at least 1: a zero is never a candidate
    uint32_t likely;     // about where the cut will be; at least the threshold
    int64_t limit;       // candidates in one part beyond which the guess counts as wrong; at least keep
};

// Lower edge of the bin that the element of this rank falls into, the largest being of rank 1.
uint32_t size_at_rank(const std::vector<uint32_t>& bins, int shift, int64_t rank) {
    size_t bin = bins.size() - 1;
    for (int64_t above = bins[bin]; bin > 0 && above < rank; above += bins[bin]) --bin;
    return static_cast<uint32_t>(bin) << shift;
}

Guess guess_threshold(const float* x, const float* residual, int64_t numel, int64_t keep) {
    constexpr int SHIFT = 15;  // bins 0.4 % wide
    const Guess none{1, HPCPS_INFINITY_BITS, numel};
    if (numel <= SAMPLE_ELEMS) return none;
    const double expected = static_cast<double>(keep) / static_cast<double>(numel) * static_cast<double>(SAMPLE_ELEMS);
    const double rank = expected + 6.0 * std::sqrt(expected) + 3.0;  // neighbours are alike: a wide margin
    if (rank >= static_cast<double>(SAMPLE_ELEMS)) return none;
    std::vector<uint32_t> sizes(SAMPLE_ELEMS);
    const int64_t stride = numel / SAMPLE_LINES;
    for (int64_t line = 0; line < SAMPLE_LINES; ++line) {
        const uint32_t scatter = static_cast<uint32_t>(line) * 2654435761u >> 4;  // not in step with rows of a matrix
        const int64_t first = line * stride + scatter % (stride - LINE_ELEMS + 1);
        uint32_t* const to = sizes.data() + line * LINE_ELEMS;
        for (int64_t i = 0; i < LINE_ELEMS; ++i)
            to[i] = size_of(residual != nullptr ? x[first + i] + residual[first + i] : x[first + i]);
    }
    std::vector<uint32_t> bins((HPCPS_INFINITY_BITS >> SHIFT) + 1);
    for (const uint32_t size : sizes) ++bins[size >> SHIFT];
    const double limit = 2.0 * rank / static_cast<double>(SAMPLE_ELEMS) * static_cast<double>(numel);
    const uint32_t threshold = std::max<uint32_t>(size_at_rank(bins, SHIFT, static_cast<int64_t>(rank)), 1);
    return {threshold, std::max(threshold, size_at_rank(bins, SHIFT, static_cast<int64_t>(expected))),
            std::min(numel, static_cast<int64_t>(limit) + CHUNK_ELEMS)};
}

// --- the pass -------------------------------------------------------------------------------------------------------

// The candidates of one part of the array, in ascending order.
struct Part {
    Candidate* list;  // room for the limit and one chunk
    int64_t count = 0;
    int64_t num_not_finite = 0;
    bool overflowed = false;  // then the list holds what is not finite only, and no more than keep of that
};

// Forgets all others, and gives them v back.
void keep_not_finite(Part& part, float* residual) {
    const int64_t count = part.count;
    part.count = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Candidate each = part.list[i];
        if (!is_finite(each))
            part.list[part.count++] = each;
        else if (residual != nullptr)
            residual[each.index] = each.value;
    }
}

void collect_part(Part& part, const float* x, float* residual, int64_t begin, int64_t end, const Guess& guess,
                  int64_t keep) {
    const CodecKernels& kernels = select_codec_kernels();
    uint32_t threshold = guess.threshold, likely = guess.likely;
    for (int64_t at = begin; at < end; at += CHUNK_ELEMS) {
        const int64_t length = std::min(CHUNK_ELEMS, end - at);
        float* const left = residual != nullptr ? residual + at : nullptr;
        const int64_t number = kernels.collect(x + at, left, length, static_cast<uint32_t>(at), threshold,
                                               likely, part.list + part.count);
        part.count += number;
        if (part.overflowed) {
            part.num_not_finite += number;
            part.count = std::min(part.count, keep);
        } else if (part.count > guess.limit) {
            keep_not_finite(part, residual);
            part.num_not_finite = part.count;
            part.count = std::min(part.count, keep);
            part.overflowed = true;
            threshold = likely = HPCPS_INFINITY_BITS;
        }
    }
    if (!part.overflowed)
        part.num_not_finite =
            part.count - std::count_if(part.list, part.list + part.count, is_finite);
}

// --- the choice -----------------------------------------------------------------------------------------------------

// Leaves what is sent at the front of the list and returns how many that is; the others get v back.
int64_t choose_among(Candidate* list, int64_t count, int64_t keep, uint32_t likely, float* residual) {
    if (count <= keep) return count;
    const auto for_each_size = [&](const auto& visit) {
        for (int64_t i = 0; i < count; ++i) visit(size_of(list[i].value));
    };
    Cut cut = find_cut(count, for_each_size, keep);
    // Neither kind of branch below is taken often; that on `sent` would be, and could not be foreseen.
    const uint32_t num_wrong_sizes = residual != nullptr && cut.threshold > likely ? cut.threshold - likely : 0;
    int64_t num_sent = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Candidate each = list[i];
        const uint32_t size = size_of(each.value);
        bool sent = size > cut.threshold;
        if (size == cut.threshold) {
            sent = cut.num_ties-- > 0;
            if (!sent && residual != nullptr && is_finite(each)) residual[each.index] = each.value;
        }
        if (size - likely < num_wrong_sizes) residual[each.index] = each.value;
        list[num_sent] = each;
        num_sent += sent;
    }
    return num_sent;
}

// The same where the candidates do not do. The list begins with what is not finite and has room for keep; v holds the
// sums wherever they are finite.
int64_t choose_from_all(Candidate* list, int64_t num_not_finite, const float* v, int64_t numel, int64_t keep) {
    if (num_not_finite >= keep) return keep;
    const auto for_each = [&](const auto& visit) {
        int64_t begin = 0;
        for (int64_t gap = 0; gap <= num_not_finite; ++gap) {
            const int64_t end = gap < num_not_finite ? list[gap].index : numel;
            for (int64_t i = begin; i < end; ++i)
                if (v[i] != 0.0f) visit(i);
            begin = end + 1;
        }
    };
    const auto for_each_size = [&](const auto& visit) { for_each([&](int64_t i) { visit(hpcps_magnitude(v[i])); }); };
    Cut cut = find_cut(numel, for_each_size, keep - num_not_finite);
    int64_t num_sent = num_not_finite;
    for_each([&](int64_t i) {
        const uint32_t size = hpcps_magnitude(v[i]);
        if (size > cut.threshold || (size == cut.threshold && cut.num_ties-- > 0))
            list[num_sent++] = {static_cast<uint32_t>(i), v[i]};
    });
    std::inplace_merge(list, list + num_not_finite, list + num_sent,
                       [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
    return num_sent;
}

// --- the payload ----------------------------------------------------------------------------------------------------

struct Header {
    uint32_t count, gap_bytes;
    int32_t exponent;
    uint32_t zero;
};
static_assert(sizeof(Header) == HPCPS_TOPK_HEADER, "four words, no gaps");

int32_t exponent_of(const Candidate* sent, int64_t num_sent) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < num_sent; ++i) {
        const uint32_t size = hpcps_magnitude(sent[i].value);
        largest = std::max(largest, size < HPCPS_INFINITY_BITS ? size : 0);
    }
    return hpcps_topk_exponent(largest);
}

uint8_t* write_gaps(const Candidate* sent, int64_t num_sent, uint8_t* out) {
    uint32_t next = 0;
    for (int64_t i = 0; i < num_sent; ++i) {
        uint32_t gap = sent[i].index - next;
        for (; gap >= 1u << 14; gap >>= 7) *out++ = static_cast<uint8_t>(gap | 128);
        const uint32_t two = gap >= 128;  // no branch: it could not be foreseen
        out[0] = static_cast<uint8_t>(gap | two << 7);
        out[1] = static_cast<uint8_t>(gap >> 7);  // if it is not of this gap, then a later byte overwrites it
        out += 1 + two;
        next = sent[i].index + 1;
    }
    return out;
}

// hpcps_topk_half and hpcps_topk_value, by the vector loops of fp16.
// The residual is v - rounded_to_half(v) from the likely size on, as the pass leaves it, else v.
void write_halves(const Candidate* sent, int64_t num_sent, int32_t exponent, float* residual, uint32_t likely,
                  uint8_t* out) {
    constexpr int64_t BATCH = 256;
    const CodecKernels& kernels = select_codec_kernels();
    const float inverse = hpcps_power_of_two(-exponent), unit = hpcps_power_of_two(exponent);
    float scaled[BATCH], decoded[BATCH];
    for (int64_t begin = 0; begin < num_sent; begin += BATCH, out += 2 * BATCH) {
        const int64_t length = std::min(BATCH, num_sent - begin);
        for (int64_t i = 0; i < length; ++i) scaled[i] = sent[begin + i].value * inverse;
        kernels.encode_fp16(scaled, nullptr, out, length);
        if (residual == nullptr) continue;
        kernels.add_fp16(decoded, out, unit, length, true);
        for (int64_t i = 0; i < length; ++i) {
            const Candidate& each = sent[begin + i];
            const bool done = hpcps_magnitude(each.value) >= likely &&
                              hpcps_bits(decoded[i]) == rounded_to_half(each.value);
            if (!done && is_finite(each)) residual[each.index] = each.value - decoded[i];
        }
    }
}

int64_t write_payload(const Candidate* sent, int64_t num_sent, float* residual, uint32_t likely, uint8_t* out) {
    const int32_t exponent = exponent_of(sent, num_sent);
    uint8_t* const gaps = out + HPCPS_TOPK_HEADER;
    uint8_t* const halves = write_gaps(sent, num_sent, gaps);
    const Header header{static_cast<uint32_t>(num_sent), static_cast<uint32_t>(halves - gaps), exponent, 0};
    std::memcpy(out, &header, sizeof header);
    write_halves(sent, num_sent, exponent, residual, likely, halves);
    return halves + 2 * num_sent - out;
}

// Moves on past one gap; false where the bytes end before it does or it is too long.
bool read_gap(const uint8_t*& at, const uint8_t* end, int64_t& gap) {
    gap = 0;
    for (int digit = 0; digit < HPCPS_TOPK_GAP_BYTES && at != end; ++digit) {
        const uint8_t byte = *at++;
        gap |= static_cast<int64_t>(byte & 127) << (7 * digit);
        if (byte < 128) return true;
    }
    return false;
}

int64_t size_by_header(const Header& header) {
    return HPCPS_TOPK_HEADER + int64_t{header.gap_bytes} + 2 * int64_t{header.count};
}

std::string header_fault(const Header& header, int64_t numel) {
    if (header.zero != 0) return "its last header word is " + std::to_string(header.zero) + ", need 0";
    if (header.exponent < HPCPS_TOPK_LEAST_EXPONENT || header.exponent > HPCPS_TOPK_MOST_EXPONENT)
        return "exponent " + std::to_string(header.exponent) + ", need -126 to 112";
    if (header.count > numel)
        return std::to_string(header.count) + " values, need at most " + std::to_string(numel);
    return "";
}

std::string gaps_fault(const Header& header, const uint8_t* gaps, int64_t numel) {
    const uint8_t* const end = gaps + header.gap_bytes;
    int64_t index = -1, gap = 0;
    bool whole = true;
    for (uint32_t i = 0; i < header.count && whole; ++i) {
        whole = read_gap(gaps, end, gap);
        index += gap + 1;
        if (whole && index >= numel)
            return "element " + std::to_string(index) + ", need at most " + std::to_string(numel - 1);
    }
    if (whole && gaps == end) return "";
    return "its " + std::to_string(header.gap_bytes) + " gap bytes are not " + std::to_string(header.count) + " gaps";
}

}  // namespace

Encoded encode_topk(const float* x, float* residual, uint8_t* out, int64_t numel, int64_t keep) {
    const int64_t num_parts = num_parts_of(numel);
    const Guess guess = guess_threshold(x, residual, numel, keep);
    const int64_t room = guess.limit + std::min(numel, CHUNK_ELEMS);
    const std::unique_ptr<Candidate[]> lists(new Candidate[static_cast<size_t>(num_parts * room)]);
    std::vector<Part> parts(static_cast<size_t>(num_parts));
    for_parts(num_parts, numel, [&](int64_t number, int64_t begin, int64_t end) {
        Part& part = parts[static_cast<size_t>(number)];
        part.list = lists.get() + number * room;
        collect_part(part, x, residual, begin, end, guess, keep);
    });
    Encoded encoded{0, 0};
    int64_t count = 0;
    bool overflowed = false;
    for (const Part& part : parts) {
        encoded.num_not_finite += part.num_not_finite;
        count += part.count;
        overflowed = overflowed || part.overflowed;
    }
    const bool misled = overflowed || (count < keep && guess.threshold > 1);
    Candidate* list = lists.get();
    for (Part& part : parts) {  // close up the lists
        if (misled) keep_not_finite(part, residual);
        list = std::copy(part.list, part.list + part.count, list);
    }
    count = list - lists.get();
    const int64_t num_sent =
        misled ? choose_from_all(lists.get(), std::min(count, keep), residual != nullptr ? residual : x, numel, keep)
               : choose_among(lists.get(), count, keep, guess.likely, residual);
    encoded.num_bytes = write_payload(lists.get(), num_sent, residual,
                                      misled ? HPCPS_INFINITY_BITS : guess.likely, out);
    return encoded;
}

std::string topk_fault(const uint8_t* payload, int64_t num_bytes, int64_t numel) {
    const std::string name = "topk payload of " + std::to_string(num_bytes) + " bytes";
    if (num_bytes < HPCPS_TOPK_HEADER)
        return name + ", need at least " + std::to_string(HPCPS_TOPK_HEADER) + " for its header";
    Header header;
    std::memcpy(&header, payload, sizeof header);
    std::string why = header_fault(header, numel);
    if (why.empty() && size_by_header(header) != num_bytes)
        return name + ", need " + std::to_string(size_by_header(header)) + " for " + std::to_string(header.count) +
               " values in " + std::to_string(header.gap_bytes) + " gap bytes";
    if (why.empty()) why = gaps_fault(header, payload + HPCPS_TOPK_HEADER, numel);
    if (why.empty()) return "";
    return name + " for " + std::to_string(numel) + " elements is damaged: " + why;
}

TopkReader::TopkReader(const uint8_t* payload, int64_t num_bytes) {
    Header header{0, 0, 0, 0};
    if (num_bytes >= HPCPS_TOPK_HEADER) std::memcpy(&header, payload, sizeof header);
    if (size_by_header(header) != num_bytes || !header_fault(header, TOPK_MOST_ELEMS).empty()) header = Header{};
    gap_ = payload + HPCPS_TOPK_HEADER;
    gaps_end_ = gap_ + header.gap_bytes;
    half_ = gaps_end_ - 2;  // advance steps onto the first
    num_left_ = int64_t{header.count} + 1;
    unit_ = hpcps_power_of_two(header.exponent);
    advance();
}

float TopkReader::value() const {
    uint16_t half;
    std::memcpy(&half, half_, 2);
    return hpcps_of_half(half) * unit_;
}

void TopkReader::advance() {
    int64_t gap = 0;
    if (--num_left_ <= 0 || !read_gap(gap_, gaps_end_, gap)) {
        index_ = END;
        return;
    }
    index_ += gap + 1;
    half_ += 2;
}

}  // namespace hpcps
