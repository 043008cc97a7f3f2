// Threads claim tasks one by one, so a thread that the system suspends delays at most the task that
// it has claimed. A loop ends when its tasks are done, not when every thread has taken part.
#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"

namespace lpx {
namespace {

// Rounds of waiting before a thread sleeps: about 20 us, longer than the gap between two operators.
constexpr int kSpins = 1000;
constexpr int kTaskBits = 24;
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // as long as a pause of x86, which `yield` is not
#endif
}

class Pool {
public:
    void resize(int num_threads) {
        std::lock_guard<std::mutex> caller(callers_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        stopping_ = false;
        for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
    }

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    void run(Task task, const void* context, int64_t num_tasks) {
        if (num_tasks == 1) return task(context, 0);
        std::lock_guard<std::mutex> caller(callers_);
        if (threads_.empty()) {
            for (int64_t i = 0; i < num_tasks; ++i) task(context, i);
            return;
        }
        while (num_tasks > 0) {
            const int64_t part = num_tasks < int64_t(kTaskMask) ? num_tasks : int64_t(kTaskMask);
            run_part(task, context, part, first_);
            first_ += part;
            num_tasks -= part;
        }
        first_ = 0;
    }

private:
    void run_part(Task task, const void* context, int64_t num_tasks, int64_t first) {
        task_ = task;
        context_ = context;
        offset_ = first;
        done_.store(0, std::memory_order_relaxed);
        const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> (2 * kTaskBits)) + 1;
        state_.store(epoch << (2 * kTaskBits) | uint64_t(num_tasks) << kTaskBits);
        if (num_asleep_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work();
        for (int spin = 0; done_.load(std::memory_order_acquire) < num_tasks; ++spin) {
            pause();
            if (spin > kSpins) std::this_thread::yield();
        }
    }

    // The state holds (epoch, number of tasks, next task). A claimed task keeps its loop alive, so
    // what the loop's fields say stays true until the claim is counted as done.
    bool work() {
        bool any = false;
        uint64_t state = state_.load();
        while ((state & kTaskMask) < (state >> kTaskBits & kTaskMask)) {
            if (!state_.compare_exchange_weak(state, state + 1)) continue;
            task_(context_, offset_ + int64_t(state & kTaskMask));
            done_.fetch_add(1, std::memory_order_release);
            any = true;
            state = state_.load();
        }
        return any;
    }

    bool has_work() const {
        const uint64_t state = state_.load();
        return (state & kTaskMask) < (state >> kTaskBits & kTaskMask);
    }

    void serve() {
        int spin = 0;
        while (!stopping_.load(std::memory_order_relaxed)) {
            if (work()) {
                spin = 0;
            } else if (++spin < kSpins) {
                pause();
            } else {
                sleep();
                spin = 0;
            }
        }
    }

    void sleep() {
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, [this] { return stopping_.load() || has_work(); });
        num_asleep_.fetch_sub(1);
    }

    std::vector<std::thread> threads_;
    std::mutex callers_;  // one loop at a time: the fields below are its
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> stopping_{false};
    std::atomic<int> num_asleep_{0};
    std::atomic<uint64_t> state_{0};
    std::atomic<int64_t> done_{0};
    Task task_ = nullptr;
    const void* context_ = nullptr;
    int64_t offset_ = 0;
    int64_t first_ = 0;
};

// Never destroyed: threads may still wait in it when the process ends.
Pool& pool = *new Pool;

}  // namespace

void set_threads(int num_threads) { pool.resize(num_threads); }
int num_threads() { return pool.size(); }
void run_tasks(Task task, const void* context, int64_t num_tasks) {
    pool.run(task, context, num_tasks);
}

float* scratch(int which, int64_t num_floats) {
    struct Buffer {
        float* data = nullptr;
        int64_t size = 0;
        ~Buffer() { std::free(data); }
    };
    static thread_local Buffer buffers[4];
    Buffer& buffer = buffers[which];
    if (buffer.size < num_floats) {
        std::free(buffer.data);
        buffer.size = (num_floats + 1023) / 1024 * 1024;
        buffer.data = static_cast<float*>(std::aligned_alloc(64, buffer.size * sizeof(float)));
        if (buffer.data == nullptr) std::abort();
    }
    return buffer.data;
}

}  // namespace lpx

LPX_EXPORT void lpx_set_threads(int64_t num_threads) {
    if (num_threads != lpx::num_threads()) lpx::set_threads(static_cast<int>(num_threads));
}
