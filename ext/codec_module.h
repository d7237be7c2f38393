// The codecs' part of the Python module.
#pragma once
#include <nanobind/nanobind.h>

namespace hpcps {

void add_codecs(nanobind::module_& module);

}  // namespace hpcps
