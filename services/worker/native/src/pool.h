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

// A share of a loop's tasks, [next, end). On a cache line of its own.
struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
};

// parallel_for for tasks that prefetch what the next one reads: each thread takes a share of neighbouring
// tasks in order, and then helps with the shares of others. It calls body(state, task) with a state of its
// own, which it makes first.
template <class Make, class Body>
void parallel_shares(int64_t num_tasks, const Make& make, const Body& body) {
    constexpr int64_t kMaxShares = 256;
    Share shares[kMaxShares];
    int64_t num_shares = num_threads() < kMaxShares ? num_threads() : kMaxShares;
    if (num_tasks < num_shares) num_shares = num_tasks;
    for (int64_t i = 0; i < num_shares; ++i) {
        shares[i].next.store(num_tasks * i / num_shares, std::memory_order_relaxed);
        shares[i].end = num_tasks * (i + 1) / num_shares;
    }
    parallel_for(num_shares, [&](int64_t own) {
        auto state = make();
        for (int64_t i = 0; i < num_shares; ++i) {
            Share& share = shares[(own + i) % num_shares];
            int64_t task;
            while ((task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end) {
                body(state, task);
            }
        }
    });
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
