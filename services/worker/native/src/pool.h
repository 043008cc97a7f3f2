// A small pool of threads for parallel loops over numbered tasks.
#pragma once
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

// A float buffer of this thread, 64-byte aligned, kept and grown from call to call; `which` tells
// buffers in use at one time apart (0 to 3). Contents are undefined.
float* scratch(int which, int64_t num_floats);

}  // namespace lpx
