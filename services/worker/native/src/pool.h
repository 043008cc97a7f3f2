// A small pool of threads for parallel loops over numbered tasks.
#pragma once
#include <atomic>
#include <cstdint>

namespace lpx {

using Task = void (*)(const void* context, int64_t index);

// Threads of every later loop, the caller included.
void set_threads(int num_threads);
int num_threads();

// Calls task(context, i) once for each i in [0, num_tasks), on any thread in any order, and returns
// when all are done. Tasks must not depend on which thread runs them, nor begin loops. The loops of
// several callers run one after another.
void run_tasks(Task task, const void* context, int64_t num_tasks);

// run_tasks for a lambda.
template <class Body>
void parallel_for(int64_t num_tasks, const Body& body) {
    run_tasks([](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); }, &body,
              num_tasks);
}

// The same on the calling thread if it is alone, as within a task.
template <class Body>
void loop(int64_t num_tasks, bool is_alone, const Body& body) {
    if (!is_alone) return parallel_for(num_tasks, body);
    for (int64_t i = 0; i < num_tasks; ++i) body(i);
}

// Tasks [first, end) that are left of a thread's share. On a cache line of its own.
class alignas(64) Share {
public:
    void set(int64_t first, int64_t end) {
        left_.store(uint64_t(first) << kBits | uint64_t(end), std::memory_order_relaxed);
    }
    // The first task that is left, or the last if another thread than the share's own takes it: what the own thread
    // prefetches is then still its next task. -1 if none is left.
    int64_t take(bool is_own) {
        uint64_t left = left_.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t first = left >> kBits, end = left & kEnd;
            if (first >= end) return -1;
            const uint64_t rest = is_own ? left + (uint64_t(1) << kBits) : left - 1;
            if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
                return int64_t(is_own ? first : end - 1);
            }
        }
    }

private:
    static constexpr int kBits = 32;
    static constexpr uint64_t kEnd = (uint64_t(1) << kBits) - 1;
    std::atomic<uint64_t> left_;
};

constexpr int64_t kMaxShares = 256;

// Threads that share a loop of num_tasks tasks.
inline int64_t shares_of(int64_t num_tasks) {
    const int64_t most = num_threads() < kMaxShares ? num_threads() : kMaxShares;
    return num_tasks < most ? num_tasks : most;
}

// parallel_for for tasks that prefetch what the next one reads: each thread takes a share of neighbouring
// tasks in order, and then helps with the shares of others. Share i ends before task end_of(i). A thread calls
// body(state, task) with a state of its own, which it makes first.
template <class EndOf, class Make, class Body>
void parallel_shares(int64_t num_shares, const EndOf& end_of, const Make& make, const Body& body) {
    Share shares[kMaxShares];
    for (int64_t i = 0; i < num_shares; ++i) shares[i].set(i == 0 ? 0 : end_of(i - 1), end_of(i));
    parallel_for(num_shares, [&](int64_t own) {
        auto state = make();
        for (int64_t i = 0; i < num_shares; ++i) {
            Share& share = shares[(own + i) % num_shares];
            int64_t task;
            while ((task = share.take(i == 0)) >= 0) body(state, task);
        }
    });
}

// The same with shares of equally many tasks.
template <class Make, class Body>
void parallel_shares(int64_t num_tasks, const Make& make, const Body& body) {
    const int64_t num_shares = shares_of(num_tasks);
    const auto end_of = [=](int64_t i) { return num_tasks * (i + 1) / num_shares; };
    parallel_shares(num_shares, end_of, make, body);
}

// The same without a state.
template <class Body>
void parallel_shares(int64_t num_tasks, const Body& body) {
    parallel_shares(num_tasks, [] { return 0; }, [&](int, int64_t task) { body(task); });
}

// A float buffer of this thread, 64-byte aligned, kept and grown from call to call; `which` tells
// buffers in use at one time apart (0 to 3). Contents are undefined.
float* scratch(int which, int64_t num_floats);

}  // namespace lpx
