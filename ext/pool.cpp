#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace hpcps {
namespace {

constexpr int64_t LEAST_PART_ELEMS = int64_t{1} << 18;
constexpr int64_t BOUNDARY_ELEMS = 4096;  // a multiple of every codec's block, and of whole bytes of bits

std::atomic<int> threads_set{0};  // 0: none set

int cores_of_affinity_mask() {
#if defined(__linux__)
    for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 2) {  // the call fails where the machine has more cores
        cpu_set_t* mask = CPU_ALLOC(static_cast<size_t>(most));
        if (mask == nullptr) break;
        const size_t num_bytes = CPU_ALLOC_SIZE(static_cast<size_t>(most));
        const int number = sched_getaffinity(0, num_bytes, mask) == 0 ? CPU_COUNT_S(num_bytes, mask) : 0;
        CPU_FREE(mask);
        if (number > 0) return number;
    }
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class Pool {
public:
    // False where another call has the pool.
    bool run(int64_t num_parts, void (*part)(void*, int64_t), void* context) {
        const std::unique_lock<std::mutex> mine(in_use_, std::try_to_lock);
        if (!mine.owns_lock()) return false;
        std::unique_lock<std::mutex> lock(mutex_);
        start_workers(num_parts - 1);
        part_ = part, context_ = context, num_parts_ = num_parts, next_ = 0;
        wake_.notify_all();
        while (next_ < num_parts_) take_part(lock);
        done_.wait(lock, [this] { return num_running_ == 0; });
        return true;
    }

private:
    void start_workers(int64_t number) {
        try {
            for (; num_workers_ < number; ++num_workers_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {  // no more threads to be had: those that are there do it
        }
    }

    [[noreturn]] void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return next_ < num_parts_; });
            take_part(lock);
        }
    }

    void take_part(std::unique_lock<std::mutex>& lock) {
        const int64_t mine = next_++;
        ++num_running_;
        lock.unlock();
        part_(context_, mine);
        lock.lock();
        if (--num_running_ == 0 && next_ >= num_parts_) done_.notify_one();
    }

    std::mutex in_use_;
    std::mutex mutex_;  // guards all below
    std::condition_variable wake_, done_;
    void (*part_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int64_t num_parts_ = 0, next_ = 0, num_running_ = 0, num_workers_ = 0;
};

// Never freed: its threads sleep until the process ends, and a forked child must not wait for threads that it lacks.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    static const bool started = [] {
        the_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
        return true;
    }();
    static_cast<void>(started);
    return *the_pool;
}

}  // namespace

int num_threads() {
    const int number = threads_set;
    return number > 0 ? number : cores_of_affinity_mask();
}

void set_num_threads(int number) { threads_set = number; }

int64_t num_parts_of(int64_t numel) {
    if (numel < 2 * LEAST_PART_ELEMS) return 1;
    return std::min<int64_t>(numel / LEAST_PART_ELEMS, num_threads());
}

int64_t part_begin(int64_t part, int64_t num_parts, int64_t numel) {
    if (part >= num_parts) return numel;
    const int64_t num_units = (numel + BOUNDARY_ELEMS - 1) / BOUNDARY_ELEMS;
    return std::min(numel, (num_units / num_parts * part + std::min(part, num_units % num_parts)) * BOUNDARY_ELEMS);
}

void run_parts(int64_t num_parts, void (*run)(void*, int64_t), void* context) {
    if (num_parts > 1 && pool().run(num_parts, run, context)) return;
    for (int64_t part = 0; part < num_parts; ++part) run(context, part);
}

}  // namespace hpcps
