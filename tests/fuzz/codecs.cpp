// Compiled once for each of the two builds of ext/: CODECS names the function, ISA the instruction set.
#include "codecs.h"

#include <cstdlib>

#include "../../ext/codec.h"
#include "../../ext/isa.h"

namespace {

template <typename Real>
Sent encode_with(int codec, const Real* x, Real* residual, uint8_t* out, int64_t numel, int64_t keep) {
    const hpcps::Encoded encoded = hpcps::encode(static_cast<hpcps::Codec>(codec), x, residual, out, numel, keep);
    return {encoded.num_bytes, encoded.num_not_finite};
}

template <typename Real>
void add_with(Real* acc, int64_t numel, const std::vector<Payload>& payloads, bool assign) {
    std::vector<hpcps::Term> terms;
    for (const Payload& each : payloads)
        terms.push_back({static_cast<hpcps::Codec>(each.codec), each.bytes, each.num_bytes, each.weight});
    hpcps::decode_accumulate(acc, numel, terms, assign);
}

template <typename Real>
void decode_with(const Payload& payload, Real* out, int64_t numel) {
    hpcps::decode(static_cast<hpcps::Codec>(payload.codec), payload.bytes, payload.num_bytes, out, numel);
}

class Built final : public Codecs {
public:
    Built() {
        setenv("HPCPS_ISA", ISA, 1);
        hpcps::chosen_isa();  // each build reads the setting once
    }

    Sent encode(int codec, const float* x, float* residual, uint8_t* out, int64_t numel, int64_t keep) const override {
        return encode_with(codec, x, residual, out, numel, keep);
    }
    Sent encode(int codec, const double* x, double* residual, uint8_t* out, int64_t numel,
                int64_t keep) const override {
        return encode_with(codec, x, residual, out, numel, keep);
    }
    std::string fault(const Payload& payload, int64_t numel, int64_t itemsize) const override {
        return hpcps::payload_fault(static_cast<hpcps::Codec>(payload.codec), payload.bytes, payload.num_bytes, numel,
                                    itemsize);
    }
    void add(float* acc, int64_t numel, const std::vector<Payload>& payloads, bool assign) const override {
        add_with(acc, numel, payloads, assign);
    }
    void add(double* acc, int64_t numel, const std::vector<Payload>& payloads, bool assign) const override {
        add_with(acc, numel, payloads, assign);
    }
    void decode(const Payload& payload, float* out, int64_t numel) const override { decode_with(payload, out, numel); }
    void decode(const Payload& payload, double* out, int64_t numel) const override { decode_with(payload, out, numel); }
};

}  // namespace

const Codecs& CODECS() {
    static const Built built;
    return built;
}
