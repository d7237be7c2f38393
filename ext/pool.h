// Threads for large arrays: one pool a process, of its own (OpenMP would be a second pool beside that of torch, and
// thread sanitizers do not know it). Results must not depend on the number of parts.
#pragma once
#include <cstdint>

namespace hpcps {

// Threads that one call may use: what was set, else the cores in the affinity mask of the calling thread.
int num_threads();
void set_num_threads(int number);  // at least 1

// How many parts to cut so many elements into: one a thread, each of at least 256k elements (waking a thread costs
// about 30 us, measured on a loaded machine), at least 1.
int64_t num_parts_of(int64_t numel);

// First element of a part; boundaries are multiples of 4096 elements.
int64_t part_begin(int64_t part, int64_t num_parts, int64_t numel);

// Calls run(context, part) once for every part and returns when all are done. run must not throw. The caller's thread
// takes part; where another call has the pool, it does all parts alone. Safe in a forked child, which starts its own.
void run_parts(int64_t num_parts, void (*run)(void* context, int64_t part), void* context);

// The same for a callable body(part, begin, end).
template <typename Body>
void for_parts(int64_t num_parts, int64_t numel, const Body& body) {
    struct Context {
        const Body& body;
        int64_t num_parts, numel;
    } context{body, num_parts, numel};
    run_parts(
        num_parts,
        [](void* given, int64_t part) {
            const Context& its = *static_cast<const Context*>(given);
            its.body(part, part_begin(part, its.num_parts, its.numel), part_begin(part + 1, its.num_parts, its.numel));
        },
        &context);
}

}  // namespace hpcps
