// The Python module hpcps._native. Checks everything that the kernels take for granted, then releases the GIL.
// Arrays must be one-dimensional, contiguous, aligned, in native byte order, on the CPU, and must not overlap
// where one of them is written. Nothing is ever converted or copied. The codecs stand in codec_module.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "arrays.h"
#include "codec_module.h"
#if HPCPS_WITH_CUDA
#include "cuda_module.h"
#endif
#include "kernels.h"

namespace hpcps {
namespace {

void accumulate(const Output& acc, const Input& x, double weight) {
    const Kernels& kernels = select_kernels();
    const View to = look_real(acc, "accumulate acc"), from = look_input(x, "accumulate x", to);
    nb::gil_scoped_release released;
    if (to.bits == 32)
        kernels.f32.accumulate(writable<float>(to), readable<float>(from), weight, to.numel);
    else
        kernels.f64.accumulate(writable<double>(to), readable<double>(from), weight, to.numel);
}

void assign(const Output& out, const Input& x, double weight) {
    const Kernels& kernels = select_kernels();
    const View to = look_real(out, "assign out"), from = look_input(x, "assign x", to);
    nb::gil_scoped_release released;
    if (to.bits == 32)
        kernels.f32.assign(writable<float>(to), readable<float>(from), weight, to.numel);
    else
        kernels.f64.assign(writable<double>(to), readable<double>(from), weight, to.numel);
}

void scale(const Output& x, double weight) {
    const Kernels& kernels = select_kernels();
    const View to = look_real(x, "scale x");
    nb::gil_scoped_release released;
    if (to.bits == 32)
        kernels.f32.scale(writable<float>(to), weight, to.numel);
    else
        kernels.f64.scale(writable<double>(to), weight, to.numel);
}

template <typename Real>
void run_combine(const RealKernels<Real>& kernels, const View& to, const std::vector<View>& from,
                 const std::vector<double>& weights) {
    std::vector<const Real*> xs;
    xs.reserve(from.size());
    for (const View& view : from) xs.push_back(readable<Real>(view));
    nb::gil_scoped_release released;
    kernels.combine(writable<Real>(to), xs.data(), weights.data(), static_cast<int64_t>(xs.size()), to.numel);
}

void combine(const Output& out, const nb::list& xs, const std::vector<double>& weights) {
    const Kernels& kernels = select_kernels();
    const View to = look_real(out, "combine out");
    if (xs.size() == 0 || xs.size() != weights.size())
        throw nb::value_error(("cannot combine xs: " + std::to_string(xs.size()) + " arrays and " +
                               std::to_string(weights.size()) +
                               " weights, need as many of both and at least 1; correct the lists").c_str());
    std::vector<Input> arrays(xs.size());  // holds the arrays while the kernel runs without the GIL
    std::vector<View> from;
    from.reserve(xs.size());
    for (size_t i = 0; i < xs.size(); ++i) {
        const std::string what = "combine xs[" + std::to_string(i) + "]";
        if (!nb::try_cast<Input>(xs[i], arrays[i], false))
            throw nb::type_error(("cannot " + what + ": it is no array; pass a list of arrays").c_str());
        from.push_back(look_input(arrays[i], what, to));
    }
    if (to.bits == 32)
        run_combine(kernels.f32, to, from, weights);
    else
        run_combine(kernels.f64, to, from, weights);
}

int64_t checksum_of(const Input& data) {
    const View from = look_bytes(data, "checksum data");
    nb::gil_scoped_release released;
    return checksum(readable<uint8_t>(from), from.numel);
}

}  // namespace
}  // namespace hpcps

NB_MODULE(_native, module) {
    using namespace hpcps;
    using nb::literals::operator""_a;
    module.attr("isa") = select_kernels().isa;
    module.def("accumulate", &accumulate, "acc"_a.noconvert(), "x"_a.noconvert(), "weight"_a, "acc += weight * x");
    module.def("assign", &assign, "out"_a.noconvert(), "x"_a.noconvert(), "weight"_a, "out = weight * x");
    module.def("combine", &combine, "out"_a.noconvert(), "xs"_a, "weights"_a, "out = sum of weights[i] * xs[i]");
    module.def("scale", &scale, "x"_a.noconvert(), "weight"_a, "x *= weight");
    module.def("checksum", &checksum_of, "data"_a.noconvert(), "63-bit checksum of bytes");
    add_codecs(module);
#if HPCPS_WITH_CUDA
    bind_cuda(module);
#endif
}
