// The codecs of ext/, twice in one program: as they are chosen for this processor, and portable. The second build has
// another namespace (build.mk), so plain types stand here only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

enum CodecNumber : int { NONE, FP32, FP16, BF16, INT8, ONEBIT, TOPK, PACKED, NUM_CODECS };

struct Payload {
    int codec;
    const uint8_t* bytes;
    int64_t num_bytes;
    double weight;
};

struct Sent {
    int64_t num_bytes, num_not_finite;
};

class Codecs {
public:
    virtual Sent encode(int codec, const float* x, float* residual, uint8_t* out, int64_t numel,
                        int64_t keep) const = 0;
    virtual Sent encode(int codec, const double* x, double* residual, uint8_t* out, int64_t numel,
                        int64_t keep) const = 0;
    virtual std::string fault(const Payload& payload, int64_t numel, int64_t itemsize) const = 0;
    virtual void add(float* acc, int64_t numel, const std::vector<Payload>& payloads, bool assign) const = 0;
    virtual void add(double* acc, int64_t numel, const std::vector<Payload>& payloads, bool assign) const = 0;
    virtual void decode(const Payload& payload, float* out, int64_t numel) const = 0;
    virtual void decode(const Payload& payload, double* out, int64_t numel) const = 0;

protected:
    ~Codecs() = default;
};

const Codecs& chosen_codecs();
const Codecs& portable_codecs();
