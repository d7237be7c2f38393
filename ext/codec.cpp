// The codecs: cuts arrays into parts for the pool and into blocks for the cache, and calls the inner loops.
#include "codec.h"

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "../hpcps/cuda_src/elements.h"
#include "codec_kernels.h"
#include "packed.h"
#include "pool.h"
#include "topk.h"

namespace hpcps {
namespace {

// Elements of acc that stay in the first-level cache while all terms are added to them; a multiple of HPCPS_BLOCK.
constexpr int64_t CACHED_ELEMS = 1024;

template <typename Real>
bool is_finite(Real value) {
    return value - value == 0;
}

template <typename Real>
Real load(const uint8_t* from) {
    Real value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// --- encode ---------------------------------------------------------------------------------------------------------

// Finite values beyond the range become the largest float.
float sent_as_float(double v) {
    const float sent = static_cast<float>(v);
    return is_finite(sent) || !is_finite(v) ? sent : v < 0 ? -FLT_MAX : FLT_MAX;
}

// Sends v as Sent (its own type, or float).
template <typename Sent, typename Real, typename Convert>
int64_t encode_real(const Real* x, Real* residual, uint8_t* out, int64_t numel, const Convert& convert) {
    int64_t num_not_finite = 0;
    for (int64_t i = 0; i < numel; ++i) {
        const Real v = residual != nullptr ? x[i] + residual[i] : x[i];
        const Sent sent = convert(v);
        std::memcpy(out + i * static_cast<int64_t>(sizeof sent), &sent, sizeof sent);
        num_not_finite += !is_finite(v);
        if (residual != nullptr)
            residual[i] = is_finite(v) ? v - static_cast<Real>(sent) : is_finite(residual[i]) ? residual[i] : Real{0};
    }
    return num_not_finite;
}

// Encodes the elements from begin to end; out and numel are those of the whole payload.
int64_t encode_part(Codec codec, const float* x, float* residual, uint8_t* out, int64_t numel, int64_t begin,
                    int64_t end) {
    const CodecKernels& kernels = select_codec_kernels();
    float* const left = residual != nullptr ? residual + begin : nullptr;
    const int64_t num_blocks = hpcps_num_blocks(numel), block = begin / HPCPS_BLOCK, length = end - begin;
    switch (codec) {
        case FP16: return kernels.encode_fp16(x + begin, left, out + 2 * begin, length);
        case BF16: return kernels.encode_bf16(x + begin, left, out + 2 * begin, length);
        case INT8: return kernels.encode_int8(x + begin, left, out + block, out + num_blocks + begin, length);
        case ONEBIT:
            return kernels.encode_onebit(x + begin, left, out + 4 * block, out + 4 * num_blocks + begin / 8, length);
        default:
            return encode_real<float>(x + begin, left, out + 4 * begin, length, [](float v) { return v; });
    }
}

int64_t encode_part(Codec codec, const double* x, double* residual, uint8_t* out, int64_t, int64_t begin,
                    int64_t end) {
    double* const left = residual != nullptr ? residual + begin : nullptr;
    if (codec == FP32)
        return encode_real<float>(x + begin, left, out + 4 * begin, end - begin,
                                  [](double v) { return sent_as_float(v); });
    return encode_real<double>(x + begin, left, out + 8 * begin, end - begin, [](double v) { return v; });
}

template <typename Real>
Encoded encode_dense(Codec codec, const Real* x, Real* residual, uint8_t* out, int64_t numel) {
    const int64_t num_parts = num_parts_of(numel);
    std::vector<int64_t> num_not_finite(static_cast<size_t>(num_parts));
    for_parts(num_parts, numel, [&](int64_t part, int64_t begin, int64_t end) {
        num_not_finite[static_cast<size_t>(part)] = encode_part(codec, x, residual, out, numel, begin, end);
    });
    Encoded encoded{wire_bytes(codec, numel, sizeof(Real), 0), 0};
    for (const int64_t number : num_not_finite) encoded.num_not_finite += number;
    return encoded;
}

// --- decode and add -------------------------------------------------------------------------------------------------

template <typename Value, typename Real>
void add_real(Real* acc, const uint8_t* values, Real weight, int64_t numel, bool assign) {
    constexpr int64_t step = sizeof(Value);
    if (assign)
        for (int64_t i = 0; i < numel; ++i) acc[i] = weight * static_cast<Real>(load<Value>(values + step * i));
    else
        for (int64_t i = 0; i < numel; ++i) acc[i] += weight * static_cast<Real>(load<Value>(values + step * i));
}

void add_topk(float* acc, TopkReader& reader, float weight, int64_t begin, int64_t end, bool assign) {
    if (assign) std::fill(acc + begin, acc + end, 0.0f);
    for (; reader.index() < end; reader.advance()) {
        float& element = acc[reader.index()];
        const float term = weight * reader.value();
        element = assign ? term : element + term;
    }
}

// Adds all terms to the elements of one part, block by block. Allocates when made only: parts must not throw.
class FloatAdder {
public:
    FloatAdder(float* acc, int64_t numel, const std::vector<Term>& terms)
        : acc_(acc), numel_(numel), terms_(terms), kernels_(select_codec_kernels()) {
        for (const Term& term : terms) {
            if (term.codec == TOPK) readers_.emplace_back(term.payload, term.num_bytes);
            if (term.codec == PACKED) packed_readers_.emplace_back(term.payload, term.num_bytes, numel);
        }
        scales_.reserve(terms.size()), values_.reserve(terms.size());
    }

    void skip_to(int64_t first) {
        for (TopkReader& reader : readers_)
            while (reader.index() < first) reader.advance();
        for (PackedReader& reader : packed_readers_) reader.skip(first / HPCPS_BLOCK);
    }

    void add_block(int64_t begin, int64_t end, bool assign) {
        size_t reader = 0, packed_reader = 0;
        for (size_t i = 0; i < terms_.size(); assign = false) {
            const Term& term = terms_[i];
            const float weight = static_cast<float>(term.weight);
            if (term.codec == INT8) {
                i += add_int8(i, begin, end, assign);
                continue;
            }
            if (term.codec == TOPK)
                add_topk(acc_, readers_[reader++], weight, begin, end, assign);
            else if (term.codec == PACKED)
                packed_readers_[packed_reader++].add(acc_ + begin, end - begin, weight, assign);
            else
                add_dense(term, weight, begin, end, assign);
            ++i;
        }
    }

private:
    void add_dense(const Term& term, float weight, int64_t begin, int64_t end, bool assign) const {
        float* const acc = acc_ + begin;
        const uint8_t* const payload = term.payload;
        const int64_t length = end - begin;
        if (term.codec == FP16)
            kernels_.add_fp16(acc, payload + 2 * begin, weight, length, assign);
        else if (term.codec == BF16)
            kernels_.add_bf16(acc, payload + 2 * begin, weight, length, assign);
        else if (term.codec == ONEBIT)
            kernels_.add_onebit(acc, payload + 4 * (begin / HPCPS_BLOCK),
                                payload + 4 * hpcps_num_blocks(numel_) + begin / 8, weight, length, assign);
        else
            kernels_.add_fp32(acc, payload + 4 * begin, weight, length, assign);
    }

    // Adds the int8 payloads from one on that follow each other with one weight; returns how many.
    size_t add_int8(size_t first, int64_t begin, int64_t end, bool assign) {
        const float weight = static_cast<float>(terms_[first].weight);
        scales_.clear(), values_.clear();
        for (size_t i = first; i < terms_.size() && terms_[i].codec == INT8; ++i) {
            if (hpcps_bits(static_cast<float>(terms_[i].weight)) != hpcps_bits(weight)) break;
            scales_.push_back(terms_[i].payload + begin / HPCPS_BLOCK);
            values_.push_back(terms_[i].payload + hpcps_num_blocks(numel_) + begin);
        }
        kernels_.add_int8(acc_ + begin, scales_.data(), values_.data(), static_cast<int64_t>(scales_.size()), weight,
                          end - begin, assign);
        return scales_.size();
    }

    float* acc_;
    int64_t numel_;
    const std::vector<Term>& terms_;
    const CodecKernels& kernels_;
    std::vector<TopkReader> readers_;                 // of the topk terms, in their order
    std::vector<PackedReader> packed_readers_;        // of the packed terms
    std::vector<const uint8_t*> scales_, values_;     // of one run of int8 terms
};

class DoubleAdder {
public:
    DoubleAdder(double* acc, int64_t, const std::vector<Term>& terms) : acc_(acc), terms_(terms) {}

    void skip_to(int64_t) {}

    void add_block(int64_t begin, int64_t end, bool assign) {
        for (const Term& term : terms_) {
            if (term.codec == FP32)
                add_real<float>(acc_ + begin, term.payload + 4 * begin, term.weight, end - begin, assign);
            else
                add_real<double>(acc_ + begin, term.payload + 8 * begin, term.weight, end - begin, assign);
            assign = false;
        }
    }

private:
    double* acc_;
    const std::vector<Term>& terms_;
};

template <typename Adder, typename Real>
void add_all(Real* acc, int64_t numel, const std::vector<Term>& terms, bool assign) {
    const int64_t num_parts = num_parts_of(numel);
    std::vector<Adder> adders;
    adders.reserve(static_cast<size_t>(num_parts));
    for (int64_t part = 0; part < num_parts; ++part) adders.emplace_back(acc, numel, terms);
    for_parts(num_parts, numel, [&](int64_t part, int64_t first, int64_t last) {
        Adder& adder = adders[static_cast<size_t>(part)];
        adder.skip_to(first);
        for (int64_t begin = first; begin < last; begin += CACHED_ELEMS)
            adder.add_block(begin, std::min(begin + CACHED_ELEMS, last), assign);
    });
}

// Bits of values sent without loss must not change, not even those of a signalling NaN.
template <typename Real>
void decode_as_it_is(const uint8_t* payload, Real* out, int64_t numel) {
    for_parts(num_parts_of(numel), numel, [&](int64_t, int64_t begin, int64_t end) {
        constexpr int64_t step = sizeof(Real);
        if (end > begin) std::memcpy(out + begin, payload + step * begin, static_cast<size_t>(step * (end - begin)));
    });
}

void decode_packed(const uint8_t* payload, int64_t num_bytes, float* out, int64_t numel) {
    for_parts(num_parts_of(numel), numel, [&](int64_t, int64_t begin, int64_t end) {
        PackedReader reader(payload, num_bytes, numel);
        reader.skip(begin / HPCPS_BLOCK);
        reader.copy(out + begin, end - begin);
    });
}

}  // namespace

const char* codec_name(Codec codec) {
    static const char* const names[] = {"none", "fp32", "fp16", "bf16", "int8", "onebit", "topk", "packed"};
    return names[codec];
}

int64_t wire_bytes(Codec codec, int64_t numel, int64_t itemsize, int64_t keep) {
    switch (codec) {
        case NONE: return numel * itemsize;
        case FP32: return numel * 4;
        case FP16:
        case BF16: return numel * 2;
        case INT8: return hpcps_num_blocks(numel) + numel;
        case ONEBIT: return 4 * hpcps_num_blocks(numel) + (numel + 7) / 8;
        case PACKED: return 4 * numel + hpcps_num_blocks(numel);
        default: {
            const int64_t most = keep * 51 / 50;  // 2 % more than asked
            return HPCPS_TOPK_HEADER + std::min(HPCPS_TOPK_GAP_BYTES * most, most + numel / 127) + 2 * most;
        }
    }
}

Encoded encode(Codec codec, const float* x, float* residual, uint8_t* out, int64_t numel, int64_t keep) {
    if (codec == TOPK) return encode_topk(x, residual, out, numel, keep);
    if (codec == PACKED) return encode_packed(x, residual, out, numel);
    return encode_dense(codec, x, residual, out, numel);
}

Encoded encode(Codec codec, const double* x, double* residual, uint8_t* out, int64_t numel, int64_t) {
    return encode_dense(codec, x, residual, out, numel);
}

std::string payload_fault(Codec codec, const uint8_t* payload, int64_t num_bytes, int64_t numel, int64_t itemsize) {
    if (codec == TOPK) return topk_fault(payload, num_bytes, numel);
    if (codec == PACKED) return packed_fault(payload, num_bytes, numel);
    const int64_t need = wire_bytes(codec, numel, itemsize, 0);
    if (num_bytes == need) return "";
    return std::string(codec_name(codec)) + " payload of " + std::to_string(num_bytes) + " bytes, need " +
           std::to_string(need) + " for " + std::to_string(numel) + " elements";
}

void decode_accumulate(float* acc, int64_t numel, const std::vector<Term>& terms, bool assign) {
    add_all<FloatAdder>(acc, numel, terms, assign);
}

void decode_accumulate(double* acc, int64_t numel, const std::vector<Term>& terms, bool assign) {
    add_all<DoubleAdder>(acc, numel, terms, assign);
}

void decode(Codec codec, const uint8_t* payload, int64_t num_bytes, float* out, int64_t numel) {
    if (codec == NONE || codec == FP32) return decode_as_it_is(payload, out, numel);
    if (codec == PACKED) return decode_packed(payload, num_bytes, out, numel);
    decode_accumulate(out, numel, {Term{codec, payload, num_bytes, 1.0}}, true);
}

void decode(Codec codec, const uint8_t* payload, int64_t num_bytes, double* out, int64_t numel) {
    if (codec == NONE) return decode_as_it_is(payload, out, numel);
    decode_accumulate(out, numel, {Term{codec, payload, num_bytes, 1.0}}, true);
}

}  // namespace hpcps
