// Binds the codecs: checks arrays, sizes and payloads, before any effect, then releases the GIL.
#include "codec_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "codec.h"
#include "pool.h"

namespace hpcps {
namespace {

using nb::literals::operator""_a;

Codec check_codec(int64_t number, const std::string& what) {
    if (number < 0 || number >= NUM_CODECS)
        throw nb::value_error(("cannot " + what + ": unknown codec " + std::to_string(number) + ", need 0 to " +
                               std::to_string(NUM_CODECS - 1) + "; see hpcps.plan.Codec").c_str());
    return static_cast<Codec>(number);
}

// Only values sent as they are can be float64.
void check_dtype(const View& view, Codec codec) {
    if (view.bits == 64 && codec != NONE && codec != FP32)
        refuse_type(view, std::string("dtype float64, codec ") + codec_name(codec) +
                              " needs float32; convert it first");
}

void check_keep(const View& x, Codec codec, int64_t keep) {
    const std::string got = "keep is " + std::to_string(keep) + ", ";
    if (codec != TOPK) {
        if (keep != 0) refuse_value(x, got + "codec " + codec_name(codec) + " takes none; leave it out");
        return;
    }
    if (x.numel > TOPK_MOST_ELEMS)
        refuse_value(x, std::to_string(x.numel) + " elements, topk takes at most " +
                            std::to_string(TOPK_MOST_ELEMS) + "; cut it into shards");
    const int64_t least = x.numel > 0 ? 1 : 0;
    if (keep < least || keep > x.numel)
        refuse_value(x, got + "topk of " + std::to_string(x.numel) + " elements needs " + std::to_string(least) +
                            " to " + std::to_string(x.numel) + "; see CodecSpec.keep");
}

template <typename Real>
Encoded run_encode(Codec codec, const View& x, const View& residual, const View& out, int64_t keep) {
    nb::gil_scoped_release released;
    return encode(codec, readable<Real>(x), writable<Real>(residual), writable<uint8_t>(out), x.numel, keep);
}

std::pair<int64_t, int64_t> encode_array(int64_t number, const Input& x, const Output& out, const Output& residual,
                                         int64_t keep) {
    const Codec codec = check_codec(number, "encode x");
    const View from = look_real(x, "encode x");
    check_dtype(from, codec);
    check_keep(from, codec, keep);
    const View to = look_bytes(out, "encode out");
    const int64_t need = wire_bytes(codec, from.numel, from.bits / 8, keep);
    if (to.numel < need)
        refuse_value(to, std::to_string(to.numel) + " bytes, need " + std::to_string(need) + " for " +
                             std::to_string(from.numel) + " elements with " + codec_name(codec) +
                             "; see CodecSpec.wire_bytes");
    refuse_overlap(to, from, "x");
    View left{"encode residual", nullptr, 0, from.bits};
    if (residual.is_valid()) {
        left = look_input(Input(residual), "encode residual", from, "x");
        refuse_overlap(left, to, "out");
    }
    const Encoded encoded = from.bits == 32 ? run_encode<float>(codec, from, left, to, keep)
                                            : run_encode<double>(codec, from, left, to, keep);
    return {encoded.num_bytes, encoded.num_not_finite};
}

[[noreturn]] void refuse_payload(const View& payload, const std::string& fault) {
    refuse_value(payload, fault + "; the payload is damaged or of another array");
}

template <typename Real>
std::string run_decode(Codec codec, const View& payload, const View& out) {
    const uint8_t* const bytes = readable<uint8_t>(payload);
    nb::gil_scoped_release released;
    std::string fault = payload_fault(codec, bytes, payload.numel, out.numel, sizeof(Real));
    if (fault.empty()) decode(codec, bytes, payload.numel, writable<Real>(out), out.numel);
    return fault;
}

void decode_array(int64_t number, const Input& payload, const Output& out) {
    const Codec codec = check_codec(number, "decode payload");
    const View to = look_real(out, "decode out");
    check_dtype(to, codec);
    const View from = look_bytes(payload, "decode payload");
    refuse_overlap(from, to, "out");
    const std::string fault = to.bits == 32 ? run_decode<float>(codec, from, to) : run_decode<double>(codec, from, to);
    if (!fault.empty()) refuse_payload(from, fault);
}

// Sets `wrong` to the first payload that is no valid encoding and returns what is wrong; else does the work.
template <typename Real>
std::string run_accumulate(const View& acc, const std::vector<Term>& terms, bool assign, size_t& wrong) {
    nb::gil_scoped_release released;
    for (wrong = 0; wrong < terms.size(); ++wrong) {
        const Term& term = terms[wrong];
        std::string fault = payload_fault(term.codec, term.payload, term.num_bytes, acc.numel, sizeof(Real));
        if (!fault.empty()) return fault;
    }
    decode_accumulate(writable<Real>(acc), acc.numel, terms, assign);
    return "";
}

void accumulate_payloads(const Output& acc, const nb::list& payloads, const std::vector<int64_t>& codecs,
                         const std::vector<double>& weights, bool assign) {
    const View to = look_real(acc, "decode_accumulate acc");
    if (payloads.size() == 0 || payloads.size() != codecs.size() || payloads.size() != weights.size())
        throw nb::value_error(("cannot decode_accumulate payloads: " + std::to_string(payloads.size()) +
                               " payloads, " + std::to_string(codecs.size()) + " codecs and " +
                               std::to_string(weights.size()) +
                               " weights, need as many of each and at least 1; correct the lists").c_str());
    std::vector<Input> arrays(payloads.size());  // holds the arrays while the kernel runs without the GIL
    std::vector<View> views;
    std::vector<Term> terms;
    for (size_t i = 0; i < payloads.size(); ++i) {
        const std::string what = "decode_accumulate payloads[" + std::to_string(i) + "]";
        const Codec codec = check_codec(codecs[i], what);
        check_dtype(to, codec);
        if (!nb::try_cast<Input>(payloads[i], arrays[i], false))
            throw nb::type_error(("cannot " + what + ": it is no array; pass a list of arrays").c_str());
        views.push_back(look_bytes(arrays[i], what));
        refuse_overlap(views[i], to, "acc");
        terms.push_back({codec, readable<uint8_t>(views[i]), views[i].numel, weights[i]});
    }
    size_t wrong = 0;
    const std::string fault = to.bits == 32 ? run_accumulate<float>(to, terms, assign, wrong)
                                            : run_accumulate<double>(to, terms, assign, wrong);
    if (!fault.empty()) refuse_payload(views[wrong], fault);
}

void set_num_threads_checked(int64_t number) {
    constexpr int64_t MOST = 4096;  // far more than any processor that shares memory has
    if (number < 1 || number > MOST)
        throw nb::value_error(("cannot set the number of threads: " + std::to_string(number) + ", need 1 to " +
                               std::to_string(MOST) + "; set it to the cores of this process").c_str());
    set_num_threads(static_cast<int>(number));
}

}  // namespace

void add_codecs(nb::module_& module) {
    module.def("encode", &encode_array, "codec"_a, "x"_a.noconvert(), "out"_a.noconvert(), nb::kw_only(),
               "residual"_a.noconvert().none() = nb::none(), "keep"_a = 0,
               "Encode x + residual; returns bytes written and elements that are not finite");
    module.def("decode", &decode_array, "codec"_a, "payload"_a.noconvert(), "out"_a.noconvert(),
               "out = the elements of a payload");
    module.def("decode_accumulate", &accumulate_payloads, "acc"_a.noconvert(), "payloads"_a, "codecs"_a, "weights"_a,
               nb::kw_only(), "assign"_a = false, "acc += sum of weights[i] * elements of payloads[i]");
    module.def("set_num_threads", &set_num_threads_checked, "number"_a, "Threads that one call may use");
    module.def("num_threads", &num_threads, "Threads that one call may use");
}

}  // namespace hpcps
