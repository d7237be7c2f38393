// The run-time part of nanobind, as one source file of this extension.
#include <nb_combined.cpp>
