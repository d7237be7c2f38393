// Driver for the thread sanitizer: several threads encode and decode large arrays at once while the number of threads
// changes and processes fork. What they make must be what one thread makes.
//
//   threads SECONDS [busy]
//
// busy: forks while the callers run, too. Not for the thread sanitizer: in a child it takes the parent's threads for
// running ones, and new threads on their stacks for a fault of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../ext/codec.h"
#include "../../ext/pool.h"

namespace {

using hpcps::Codec;
using Clock = std::chrono::steady_clock;

constexpr int64_t NUMEL = (int64_t{1} << 20) + 777;  // four parts, the last one not of whole blocks
constexpr int NUM_CALLERS = 4, MOST_THREADS = 5;
constexpr unsigned CHILD_DEADLINE_S = 60;

// What is made of one codec: two steps of encoding with a residual, and the sum of both payloads and a third.
struct Made {
    std::vector<uint8_t> payloads[2];
    std::vector<float> residual, acc;
    int64_t num_not_finite = 0;
};

std::vector<float> numbers(unsigned seed) {
    std::mt19937 bits(seed);
    std::vector<float> made(NUMEL);
    for (float& each : made) each = static_cast<float>(static_cast<int32_t>(bits())) * 1e-9f;
    for (int64_t i = NUMEL / 2; i < NUMEL; ++i)
        if (bits() % 4 != 0) made[static_cast<size_t>(i)] = 0;  // packed leaves these out
    made[NUMEL / 3] = INFINITY;
    return made;
}

const std::vector<float>& step(int number) {
    static const std::vector<float> steps[2] = {numbers(1), numbers(2)};
    return steps[number];
}

Made make(Codec codec) {
    const int64_t keep = codec == hpcps::TOPK ? NUMEL / 50 : 0;
    Made made;
    made.residual.assign(NUMEL, 0.0f), made.acc.assign(NUMEL, 1.0f);
    std::vector<hpcps::Term> terms;
    for (int number = 0; number < 2; ++number) {
        std::vector<uint8_t>& out = made.payloads[number];
        out.resize(static_cast<size_t>(hpcps::wire_bytes(codec, NUMEL, 4, keep)));
        const hpcps::Encoded encoded =
            hpcps::encode(codec, step(number).data(), made.residual.data(), out.data(), NUMEL, keep);
        out.resize(static_cast<size_t>(encoded.num_bytes));
        made.num_not_finite += encoded.num_not_finite;
        if (!hpcps::payload_fault(codec, out.data(), encoded.num_bytes, NUMEL, 4).empty()) std::abort();
        terms.push_back({codec, out.data(), encoded.num_bytes, 0.25});
    }
    terms.push_back(terms[0]);
    hpcps::decode_accumulate(made.acc.data(), NUMEL, terms, false);
    return made;
}

// Bits, not values: there is a NaN among them.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool same(const Made& a, const Made& b) {
    return a.payloads[0] == b.payloads[0] && a.payloads[1] == b.payloads[1] && same(a.residual, b.residual) &&
           same(a.acc, b.acc) && a.num_not_finite == b.num_not_finite;
}

class Driver {
public:
    explicit Driver(bool fork_while_busy) : fork_while_busy_(fork_while_busy) {
        hpcps::set_num_threads(1);
        for (int codec = 0; codec < hpcps::NUM_CODECS; ++codec) expected_.push_back(make(static_cast<Codec>(codec)));
    }

    // Callers run in rounds; between them, when the pool's threads sleep, a child is forked, and if told so also while
    // the callers run.
    bool run(double seconds) {
        const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                         std::chrono::duration<double>(seconds));
        int round = 0;
        do {
            call_from_threads(round);
            check_in_child(round);
            ++round;
        } while (Clock::now() < end);
        std::printf("threads: %d rounds, %d calls, %d children, %d differ\n", round, num_calls_.load(), num_children_,
                    num_different_.load());
        return num_different_ == 0;
    }

private:
    void check(Codec codec) {
        ++num_calls_;
        if (same(make(codec), expected_[static_cast<size_t>(codec)])) return;
        ++num_different_;
        std::fprintf(stderr, "threads: %s differs from what one thread makes\n", hpcps::codec_name(codec));
    }

    void call_from_threads(int round) {
        std::atomic<bool> ended{false};
        std::thread changer([&] {
            for (int number = 1; !ended; number = number % MOST_THREADS + 1) {
                hpcps::set_num_threads(number);
                std::this_thread::yield();
            }
        });
        std::vector<std::thread> callers;
        for (int caller = 0; caller < NUM_CALLERS; ++caller)
            callers.emplace_back([this, caller, round] {
                check(static_cast<Codec>((caller + round) % hpcps::NUM_CODECS));
                check(static_cast<Codec>((caller + round + NUM_CALLERS) % hpcps::NUM_CODECS));
            });
        if (fork_while_busy_) check_in_child(round + 1);
        for (std::thread& caller : callers) caller.join();
        ended = true;
        changer.join();
        hpcps::set_num_threads(MOST_THREADS);
        check(hpcps::FP16);  // all of the pool's threads are there when the child is forked
    }

    // The child has none of the parent's threads, and must not wait for them.
    void check_in_child(int round) {
        const Codec codec = static_cast<Codec>(round % hpcps::NUM_CODECS);
        ++num_children_;
        const pid_t child = fork();
        if (child == 0) {
            alarm(CHILD_DEADLINE_S);
            num_different_ = 0;
            check(codec);
            _exit(num_different_);
        }
        int status = -1;
        if (child > 0 && waitpid(child, &status, 0) == child && status == 0) return;
        ++num_different_;
        std::fprintf(stderr, "threads: the child with %s ended with status %d\n", hpcps::codec_name(codec), status);
    }

    const bool fork_while_busy_;
    int num_children_ = 0;
    std::vector<Made> expected_;
    std::atomic<int> num_calls_{0}, num_different_{0};
};

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const bool fork_while_busy = argc > 2 && std::strcmp(argv[2], "busy") == 0;
    return Driver(fork_while_busy).run(seconds) ? 0 : 1;
}
