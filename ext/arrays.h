// What the binding takes for granted of no array: dtype, shape, alignment, place in memory. Everything is checked
// before any effect: a wrong kind of array is a TypeError, a wrong size or place in memory a ValueError.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <utility>

namespace hpcps {

namespace nb = nanobind;

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

[[noreturn]] inline void refuse_type(const View& view, const std::string& why) {
    throw nb::type_error(("cannot " + view.what + ": " + why).c_str());
}

[[noreturn]] inline void refuse_value(const View& view, const std::string& why) {
    throw nb::value_error(("cannot " + view.what + ": " + why).c_str());
}

inline std::string dtype_name(nb::dlpack::dtype dtype) {
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

template <typename Array>
View look_bytes(const Array& array, std::string what) {
    const nb::dlpack::dtype dtype = array.dtype();
    if (dtype.code != static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) || dtype.bits != 8 || dtype.lanes != 1)
        throw nb::type_error(
            ("cannot " + what + ": dtype " + dtype_name(dtype) + ", need uint8; view it as uint8").c_str());
    return look(array, std::move(what));
}

inline bool overlap(const View& a, const View& b) {
    return a.numel > 0 && b.numel > 0 && a.begin() < b.end() && b.begin() < a.end();
}

inline void refuse_overlap(const View& view, const View& other, const std::string& name) {
    if (overlap(view, other)) refuse_value(view, "it shares memory with " + name + "; pass separate arrays");
}

// An array must match another one in dtype and size and must not share memory with it.
inline View look_input(const Input& array, std::string what, const View& target,
                       const std::string& name = "the array written") {
    View view = look_real(array, std::move(what));
    if (view.bits != target.bits)
        refuse_type(view, "dtype float" + std::to_string(view.bits) + ", " + name + " is float" +
                              std::to_string(target.bits) + "; pass arrays of one dtype");
    if (view.numel != target.numel)
        refuse_value(view, std::to_string(view.numel) + " elements, " + name + " has " +
                               std::to_string(target.numel) + "; pass arrays of one size");
    refuse_overlap(view, target, name);
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

}  // namespace hpcps
