// Adds the cuda_* functions to the Python module.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcps {

void bind_cuda(nanobind::module_& module);

}  // namespace hpcps
