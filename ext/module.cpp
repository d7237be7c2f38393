// The Python module hpcps._native. Checks everything that the kernels take for granted, then releases the GIL.
// Arrays must be one-dimensional, contiguous, aligned, in native byte order, on the CPU, and must not overlap
// where one of them is written. Nothing is ever converted or copied.
// A wrong kind of array is a TypeError, a wrong size or place in memory a ValueError; both before any effect.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace {

using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

struct View {
    std::string what;  // "accumulate x": operation and argument, for messages
    const void* data;
    int64_t numel;
    int bits;

    uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
    uintptr_t end() const { return begin() + static_cast<uintptr_t>(numel) * static_cast<uintptr_t>(bits / 8); }
};

[[noreturn]] void refuse_type(const View& view, const std::string& why) {
    throw nb::type_error(("cannot " + view.what + ": " + why).c_str());
}

[[noreturn]] void refuse_value(const View& view, const std::string& why) {
    throw nb::value_error(("cannot " + view.what + ": " + why).c_str());
}

std::string dtype_name(nb::dlpack::dtype dtype) {
    static const char* const names[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    const std::string kind = dtype.code < 7 ? names[dtype.code] : "code" + std::to_string(dtype.code) + "_";
    return kind + std::to_string(dtype.bits);
}

// Dimensions, strides and alignment; the dtype is the caller's to check.
template <typename Array>
View look(const Array& array, std::string what) {
    View view{std::move(what), array.data(), static_cast<int64_t>(array.size()), array.dtype().bits};
    if (array.ndim() != 1)
        refuse_type(view, std::to_string(array.ndim()) + " dimensions, need 1; flatten it first");
    if (view.numel > 1 && array.stride(0) != 1)
        refuse_type(view, "its elements are not contiguous; pass a contiguous array");
    if (view.numel > 0 && view.begin() % static_cast<uintptr_t>(view.bits / 8) != 0)
        refuse_value(view, "its memory is not aligned to its elements; copy it into an aligned array");
    return view;
}

template <typename Array>
View look_real(const Array& array, std::string what) {
    const nb::dlpack::dtype dtype = array.dtype();
    const bool real = dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && dtype.lanes == 1 &&
                      (dtype.bits == 32 || dtype.bits == 64);
    if (!real)
        throw nb::type_error(("cannot " + what + ": dtype " + dtype_name(dtype) +
                              ", need float32 or float64; convert it first").c_str());
    return look(array, std::move(what));
}

// An input must match the array that is written in dtype and size and must not share memory with it.
View look_input(const Input& array, std::string what, const View& target) {
    View view = look_real(array, std::move(what));
    if (view.bits != target.bits)
        refuse_type(view, "dtype float" + std::to_string(view.bits) + ", the array written is float" +
                              std::to_string(target.bits) + "; pass arrays of one dtype");
    if (view.numel != target.numel)
        refuse_value(view, std::to_string(view.numel) + " elements, the array written has " +
                               std::to_string(target.numel) + "; pass arrays of one size");
    if (view.numel > 0 && view.begin() < target.end() && target.begin() < view.end())
        refuse_value(view, "it shares memory with the array written; pass separate arrays");
    return view;
}

template <typename Real>
Real* writable(const View& view) {
    return static_cast<Real*>(const_cast<void*>(view.data));
}

template <typename Real>
const Real* readable(const View& view) {
    return static_cast<const Real*>(view.data);
}

void accumulate(const Output& acc, const Input& x, double weight) {
    const hpcps::Kernels& kernels = hpcps::select_kernels();
    const View to = look_real(acc, "accumulate acc"), from = look_input(x, "accumulate x", to);
    nb::gil_scoped_release released;
    if (to.bits == 32)
        kernels.f32.accumulate(writable<float>(to), readable<float>(from), weight, to.numel);
    else
        kernels.f64.accumulate(writable<double>(to), readable<double>(from), weight, to.numel);
}

void assign(const Output& out, const Input& x, double weight) {
    const hpcps::Kernels& kernels = hpcps::select_kernels();
    const View to = look_real(out, "assign out"), from = look_input(x, "assign x", to);
    nb::gil_scoped_release released;
    if (to.bits == 32)
        kernels.f32.assign(writable<float>(to), readable<float>(from), weight, to.numel);
    else
        kernels.f64.assign(writable<double>(to), readable<double>(from), weight, to.numel);
}

void scale(const Output& x, double weight) {
    const hpcps::Kernels& kernels = hpcps::select_kernels();
    const View to = look_real(x, "scale x");
    nb::gil_scoped_release released;
    if (to.bits == 32)
        kernels.f32.scale(writable<float>(to), weight, to.numel);
    else
        kernels.f64.scale(writable<double>(to), weight, to.numel);
}

template <typename Real>
void run_combine(const hpcps::RealKernels<Real>& kernels, const View& to, const std::vector<View>& from,
                 const std::vector<double>& weights) {
    std::vector<const Real*> xs;
    xs.reserve(from.size());
    for (const View& view : from) xs.push_back(readable<Real>(view));
    nb::gil_scoped_release released;
    kernels.combine(writable<Real>(to), xs.data(), weights.data(), static_cast<int64_t>(xs.size()), to.numel);
}

void combine(const Output& out, const nb::list& xs, const std::vector<double>& weights) {
    const hpcps::Kernels& kernels = hpcps::select_kernels();
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

int64_t checksum(const Input& data) {
    const nb::dlpack::dtype dtype = data.dtype();
    if (dtype.code != static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) || dtype.bits != 8 || dtype.lanes != 1)
        throw nb::type_error(
            ("cannot checksum data: dtype " + dtype_name(dtype) + ", need uint8; view it as uint8").c_str());
    const View from = look(data, "checksum data");
    nb::gil_scoped_release released;
    return hpcps::checksum(readable<uint8_t>(from), from.numel);
}

}  // namespace

NB_MODULE(_native, module) {
    using nb::literals::operator""_a;
    module.attr("isa") = hpcps::select_kernels().isa;
    module.def("accumulate", &accumulate, "acc"_a.noconvert(), "x"_a.noconvert(), "weight"_a, "acc += weight * x");
    module.def("assign", &assign, "out"_a.noconvert(), "x"_a.noconvert(), "weight"_a, "out = weight * x");
    module.def("combine", &combine, "out"_a.noconvert(), "xs"_a, "weights"_a, "out = sum of weights[i] * xs[i]");
    module.def("scale", &scale, "x"_a.noconvert(), "weight"_a, "x *= weight");
    module.def("checksum", &checksum, "data"_a.noconvert(), "63-bit checksum of bytes");
}
