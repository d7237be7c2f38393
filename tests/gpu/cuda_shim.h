// Runs CUDA kernels on a CPU, to test their logic where there is no GPU. Included before the kernels; g++ or clang.
//
// Each thread of a block is a fiber. One fiber runs at a time, until it comes to a barrier, a warp collective or, now
// and then, an atomic; then a fiber that can go on is drawn at random, by a seed: of all, or of one warp for as long as
// that can go on. Blocks run one after another, in random order. Shared memory holds random bytes when a block starts.
// So code that lacks a barrier, or that counts on an order of threads or blocks, sees the orders that a GPU might show
// it, and the same ones at each run of a seed.
//
// Errors, as shim::Error: threads at different barriers, or some at a barrier that others have passed by; lanes that
// a collective names and that never come; a collective by a lane that its mask leaves out.
// One launch at a time.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

// Fibers change over by jumps, which are quick; sanitizers follow swapcontext only.
#if defined(__SANITIZE_ADDRESS__)
#define SHIM_JUMPS 0
#else
#define SHIM_JUMPS 1
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shim_shared"), used))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

extern "C" {
extern char __start_shim_shared[], __stop_shim_shared[];  // the linker's bounds of all shared memory
}

namespace shim {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr unsigned warp_lanes = 32;
constexpr size_t stack_bytes = 64 << 10;

enum class Wait { none, barrier, warp, ended };

struct Fiber {
    dim3 thread;
    unsigned linear = 0;
    Wait wait = Wait::none;
    int line = 0;           // of the barrier or collective where it waits
    uint32_t mask = 0;      // lanes of the collective
    uint64_t value = 0;     // what it brings to the collective
    bool started = false;
    ucontext_t context;
    jmp_buf jump;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
};

struct Machine {
    std::vector<std::unique_ptr<Fiber>> fibers;
    unsigned num_threads = 0;
    Fiber* current = nullptr;
    dim3 block, block_size, grid_size;
    std::function<void()> kernel;
    std::minstd_rand random{1};
    std::string fault;
    int skipped_line = -1;  // a barrier that is left out, to see whether a test notices
    uint64_t slots[1024];   // values of the last collective, by thread
    ucontext_t scheduler;
    jmp_buf scheduler_jump;
};

inline Machine& machine() {
    static Machine the_one;
    return the_one;
}

// From a fiber to the scheduler.
inline void pause() {
    Machine& m = machine();
#if SHIM_JUMPS
    if (_setjmp(m.current->jump) == 0) _longjmp(m.scheduler_jump, 1);
#else
    swapcontext(&m.current->context, &m.scheduler);
#endif
}

inline void fiber_main() {
    Machine& m = machine();
    m.kernel();
    m.current->wait = Wait::ended;
    pause();
}

// From the scheduler to a fiber, until that pauses.
inline void resume(Fiber& fiber) {
    Machine& m = machine();
    m.current = &fiber;
    if (!fiber.started) {
        fiber.started = true;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
#if SHIM_JUMPS
        if (_setjmp(m.scheduler_jump) == 0) setcontext(&fiber.context);
        return;
#endif
    }
#if SHIM_JUMPS
    if (_setjmp(m.scheduler_jump) == 0) _longjmp(fiber.jump, 1);
#else
    swapcontext(&m.scheduler, &fiber.context);
#endif
}

// Lets the fibers that wait at the barrier go on when all threads are there.
inline bool release_barrier() {
    Machine& m = machine();
    int line = 0;
    unsigned ended = 0, waiting = 0;
    for (unsigned i = 0; i < m.num_threads; ++i) {
        const Fiber& fiber = *m.fibers[i];
        if (fiber.wait == Wait::ended) ++ended;
        if (fiber.wait != Wait::barrier) continue;
        if (line != 0 && fiber.line != line)
            m.fault = "threads wait at the barriers of lines " + std::to_string(std::min(line, fiber.line)) + " and " +
                      std::to_string(std::max(line, fiber.line));
        line = fiber.line;
        ++waiting;
    }
    if (waiting == 0 || waiting + ended < m.num_threads || !m.fault.empty()) return false;
    if (ended > 0) {
        m.fault = std::to_string(ended) + " threads ended without the barrier of line " + std::to_string(line);
        return false;
    }
    for (unsigned i = 0; i < m.num_threads; ++i) m.fibers[i]->wait = Wait::none;
    return true;
}

// Lets the lanes of each complete collective go on.
inline bool release_warps() {
    Machine& m = machine();
    bool any = false;
    for (unsigned i = 0; i < m.num_threads; ++i) {
        Fiber& first = *m.fibers[i];
        if (first.wait != Wait::warp) continue;
        const unsigned base = i / warp_lanes * warp_lanes;
        bool complete = true;
        for (unsigned lane = 0; lane < warp_lanes; ++lane) {
            if (!(first.mask >> lane & 1) || base + lane >= m.num_threads) continue;
            const Fiber& other = *m.fibers[base + lane];
            complete = complete && other.wait == Wait::warp && other.line == first.line && other.mask == first.mask;
        }
        if (!complete) continue;
        for (unsigned lane = 0; lane < warp_lanes; ++lane)
            if (first.mask >> lane & 1 && base + lane < m.num_threads) {
                m.slots[base + lane] = m.fibers[base + lane]->value;
                m.fibers[base + lane]->wait = Wait::none;
            }
        any = true;
    }
    return any;
}

inline std::string describe_deadlock() {
    const Machine& m = machine();
    unsigned counts[4] = {};
    for (unsigned i = 0; i < m.num_threads; ++i) ++counts[static_cast<int>(m.fibers[i]->wait)];
    return "deadlock: " + std::to_string(counts[1]) + " threads at a barrier, " + std::to_string(counts[2]) +
           " at a warp collective, " + std::to_string(counts[3]) + " ended";
}

inline void run_block() {
    Machine& m = machine();
    for (char* byte = __start_shim_shared; byte != __stop_shim_shared; ++byte) *byte = static_cast<char>(m.random());
    for (unsigned i = 0; i < m.num_threads; ++i) {
        Fiber& fiber = *m.fibers[i];
        fiber.linear = i;
        fiber.thread = {i % m.block_size.x, i / m.block_size.x % m.block_size.y,
                        i / m.block_size.x / m.block_size.y};
        fiber.wait = Wait::none;
        fiber.started = false;
    }
    // either all warps go on abreast, or one runs ahead of the others as far as it can
    const bool abreast = m.random() / 64 % 2 == 0;
    unsigned ahead = 0;
    std::vector<Fiber*> ready;
    for (;;) {
        unsigned num_ended = 0;
        ready.clear();
        for (unsigned i = 0; i < m.num_threads; ++i) {
            if (m.fibers[i]->wait == Wait::none) ready.push_back(m.fibers[i].get());
            num_ended += m.fibers[i]->wait == Wait::ended;
        }
        if (num_ended == m.num_threads) return;
        const auto is_behind = [&](const Fiber* fiber) { return fiber->linear / warp_lanes != ahead; };
        if (!abreast && !ready.empty()) {
            if (std::all_of(ready.begin(), ready.end(), is_behind)) {
                if (release_warps()) continue;
                ahead = ready[m.random() % ready.size()]->linear / warp_lanes;
            }
            ready.erase(std::remove_if(ready.begin(), ready.end(), is_behind), ready.end());
        }
        if (ready.empty() && !release_warps() && !release_barrier())
            throw Error(m.fault.empty() ? describe_deadlock() : m.fault);
        // a random part of them, so that some come to the next barrier before others have left this one
        const size_t part = ready.empty() ? 0 : 1 + m.random() % ready.size();
        for (size_t i = 0; i < part; ++i) {
            std::swap(ready[i], ready[i + m.random() % (ready.size() - i)]);
            resume(*ready[i]);
            if (!m.fault.empty()) throw Error(m.fault);
        }
    }
}

inline void launch(dim3 grid, dim3 block, std::function<void()> kernel) {
    Machine& m = machine();
    m.num_threads = block.x * block.y * block.z;
    if (m.num_threads == 0 || m.num_threads > 1024) throw Error("a block of no or more than 1024 threads");
    while (m.fibers.size() < m.num_threads) m.fibers.emplace_back(new Fiber);
    m.block_size = block;
    m.grid_size = grid;
    m.kernel = std::move(kernel);
    m.fault.clear();
    std::vector<unsigned> order(static_cast<size_t>(grid.x) * grid.y * grid.z);
    for (unsigned i = 0; i < order.size(); ++i) {
        order[i] = i;
        std::swap(order[i], order[m.random() % (i + 1)]);
    }
    for (unsigned i : order) {
        m.block = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        run_block();
    }
}

inline void barrier(int line) {
    Machine& m = machine();
    if (line == m.skipped_line) return;
    m.current->line = line;
    m.current->wait = Wait::barrier;
    pause();
}

// Brings a value to the lanes of a collective; returns the values of the warp.
inline const uint64_t* collect(uint32_t mask, uint64_t value, int line) {
    Machine& m = machine();
    Fiber& fiber = *m.current;
    const unsigned lane = fiber.linear % warp_lanes;
    if (!(mask >> lane & 1)) {
        m.fault = "lane " + std::to_string(lane) + " is not in the mask of its collective in line " +
                  std::to_string(line);
    }
    fiber.line = line;
    fiber.mask = mask;
    fiber.value = value;
    fiber.wait = Wait::warp;
    pause();
    static thread_local uint64_t copy[warp_lanes];
    memcpy(copy, m.slots + fiber.linear / warp_lanes * warp_lanes, sizeof copy);
    return copy;
}

template <typename T>
uint64_t word_of(T value) {
    static_assert(sizeof(T) <= 8, "a lane brings at most 8 bytes");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    return word;
}

template <typename T>
T value_of(uint64_t word) {
    T value;
    memcpy(&value, &word, sizeof value);
    return value;
}

template <typename T>
T shuffle(uint32_t mask, T value, int from, int line) {
    const unsigned lane = machine().current->linear % warp_lanes;
    const uint64_t* const words = collect(mask, word_of(value), line);
    return value_of<T>(words[from < 0 || from >= static_cast<int>(warp_lanes) ? lane : static_cast<unsigned>(from)]);
}

inline unsigned ballot(uint32_t mask, int predicate, int line) {
    const uint64_t* const words = collect(mask, predicate != 0, line);
    unsigned result = 0;
    for (unsigned lane = 0; lane < warp_lanes; ++lane)
        if (mask >> lane & 1) result |= static_cast<unsigned>(words[lane] != 0) << lane;
    return result;
}

inline int lane() { return static_cast<int>(machine().current->linear % warp_lanes); }

// Before an atomic, now and then, another thread goes first.
inline void maybe_pause() {
    if (machine().random() % 16 == 0) pause();
}

}  // namespace shim

#define threadIdx (shim::machine().current->thread)
#define blockIdx (shim::machine().block)
#define blockDim (shim::machine().block_size)
#define gridDim (shim::machine().grid_size)

#define __syncthreads() shim::barrier(__LINE__)
#define __ballot_sync(mask, predicate) shim::ballot(mask, predicate, __LINE__)
#define __any_sync(mask, predicate) (shim::ballot(mask, predicate, __LINE__) != 0)
#define __shfl_sync(mask, value, from) shim::shuffle(mask, value, (from) % 32, __LINE__)
#define __shfl_up_sync(mask, value, step) shim::shuffle(mask, value, shim::lane() - static_cast<int>(step), __LINE__)
#define __shfl_down_sync(mask, value, step) shim::shuffle(mask, value, shim::lane() + static_cast<int>(step), __LINE__)
#define __shfl_xor_sync(mask, value, bits) shim::shuffle(mask, value, shim::lane() ^ static_cast<int>(bits), __LINE__)

static inline int __popc(unsigned word) { return __builtin_popcount(word); }

template <typename T>
static inline T atomicAdd(T* at, T value) {
    shim::maybe_pause();
    const T old = *at;
    *at = old + value;
    return old;
}

template <typename T>
static inline T atomicMax(T* at, T value) {
    shim::maybe_pause();
    const T old = *at;
    if (old < value) *at = value;
    return old;
}
