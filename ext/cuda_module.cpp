// The cuda_* functions of hpcps._native: launch a kernel by name, plain device memory. Checks counts and kinds of
// arguments; addresses are the caller's word. hpcps/device puts arrays and names to them.
#include "cuda_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_launch.h"

namespace nb = nanobind;

namespace hpcps {
namespace {

void check(int error, const std::string& what) {
    if (error != 0)
        throw std::runtime_error("cannot " + what + ": " + hpcps_cuda_error(error) + "; see nvidia-smi for the device");
}

// 0 and the reason, or the number of devices and nothing.
std::pair<int, std::string> cuda_device_count() {
    char why_none[256] = "";
    const int num_devices = hpcps_cuda_device_count(why_none, sizeof why_none);
    return {num_devices, num_devices == 0 && why_none[0] == '\0' ? "this process sees none" : why_none};
}

std::string cuda_arguments(const std::string& name) {
    const char* kinds = hpcps_cuda_arguments(name.c_str());
    if (kinds == nullptr) throw nb::key_error(name.c_str());
    return kinds;
}

// Room for one argument of any kind.
union Value {
    void* pointer;
    int64_t wide;
    int32_t narrow;
    float real;
};

// An array on a device, or an address.
void* pointer_of(const nb::handle& arg, const std::string& what) {
    nb::ndarray<nb::device::cuda> array;
    if (nb::try_cast(arg, array, false)) return array.data();
    uintptr_t address = 0;
    if (!nb::try_cast(arg, address, false))
        throw nb::type_error((what + ": need an array on a CUDA device or an address").c_str());
    return reinterpret_cast<void*>(address);
}

template <typename T>
T number_of(const nb::handle& arg, const std::string& what) {
    T number;
    if (!nb::try_cast(arg, number, false)) throw nb::type_error((what + ": need a number that fits the kernel").c_str());
    return number;
}

void cuda_launch(const std::string& name, unsigned num_blocks, unsigned num_threads, const nb::list& args,
                 uintptr_t stream) {
    const std::string kinds = cuda_arguments(name);
    if (args.size() != kinds.size())
        throw nb::type_error(("cannot launch " + name + ": " + std::to_string(args.size()) + " arguments, need " +
                              std::to_string(kinds.size()) + "; correct the call").c_str());
    std::vector<Value> values(kinds.size());
    std::vector<void*> pointers;
    for (size_t i = 0; i < kinds.size(); ++i) {
        const std::string what = "cannot launch " + name + " with argument " + std::to_string(i);
        if (kinds[i] == 'p') values[i].pointer = pointer_of(args[i], what);
        if (kinds[i] == 'l') values[i].wide = number_of<int64_t>(args[i], what);
        if (kinds[i] == 'i') values[i].narrow = number_of<int32_t>(args[i], what);
        if (kinds[i] == 'f') values[i].real = number_of<float>(args[i], what);
        pointers.push_back(&values[i]);
    }
    nb::gil_scoped_release released;
    check(hpcps_cuda_launch(name.c_str(), num_blocks, num_threads, pointers.data(), reinterpret_cast<void*>(stream)),
          "launch " + name);
}

uintptr_t cuda_allocate(size_t num_bytes) {
    void* memory = nullptr;
    check(hpcps_cuda_allocate(&memory, num_bytes), "allocate " + std::to_string(num_bytes) + " bytes on the device");
    return reinterpret_cast<uintptr_t>(memory);
}

void cuda_free(uintptr_t memory) { check(hpcps_cuda_free(reinterpret_cast<void*>(memory)), "free device memory"); }

void cuda_fill(uintptr_t memory, int byte, size_t num_bytes) {
    check(hpcps_cuda_fill(reinterpret_cast<void*>(memory), byte, num_bytes), "fill device memory");
}

void cuda_copy(uintptr_t to, uintptr_t from, size_t num_bytes) {
    nb::gil_scoped_release released;
    check(hpcps_cuda_copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), num_bytes),
          "copy to or from the device");
}

void cuda_synchronize() {
    nb::gil_scoped_release released;
    check(hpcps_cuda_synchronize(), "wait for the device");
}

}  // namespace

void bind_cuda(nb::module_& module) {
    using nb::literals::operator""_a;
    module.def("cuda_device_count", &cuda_device_count, "devices, and why there is none");
    module.def("cuda_arguments", &cuda_arguments, "name"_a, "kinds of a kernel's arguments: p, l, i, f");
    module.def("cuda_launch", &cuda_launch, "name"_a, "num_blocks"_a, "num_threads"_a, "args"_a, "stream"_a = 0,
               "queue a kernel");
    module.def("cuda_allocate", &cuda_allocate, "num_bytes"_a, "address of new device memory");
    module.def("cuda_free", &cuda_free, "memory"_a, "give device memory back");
    module.def("cuda_fill", &cuda_fill, "memory"_a, "byte"_a, "num_bytes"_a, "set bytes");
    module.def("cuda_copy", &cuda_copy, "to"_a, "source"_a, "num_bytes"_a, "copy between device and host addresses");
    module.def("cuda_synchronize", &cuda_synchronize, "wait until the device is idle");
}

}  // namespace hpcps
