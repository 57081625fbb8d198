// Work shares of the thread pool that PyTorch itself uses, and memory for them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hf_ssm {

// Calls run(context, share, shares) for every share in [0, shares), each from a thread of its own; shares <= threads.
void run_in_pool(int threads, void (*run)(void* context, int share, int shares), void* context);

// Finds the OpenMP runtime that the library at `path` (torch's) is linked with, and names its entry point. Null if
// there is none: work is not shared then.
const char* find_pool(const char* path);

// 64-byte aligned memory that is freed at the end of its scope. Throws std::bad_alloc.
class Scratch {
 public:
  explicit Scratch(size_t floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* data() const { return data_; }

 private:
  float* data_;
};

// Contiguous parts of [0, tasks), one per thread: run(begin, end, thread). Which thread gets which part depends on
// `tasks` and `threads` only, so sums that are kept per thread come out the same every time.
template <class Run>
void parallel_for(int threads, int64_t tasks, Run&& run) {
  if (tasks <= 0) return;
  if (threads > tasks) threads = int(tasks);
  if (threads <= 1) {
    run(int64_t(0), tasks, 0);
    return;
  }
  struct Context {
    Run& run;
    int64_t tasks;
    int parts;
  } context{run, tasks, threads};
  run_in_pool(
      threads,
      [](void* pointer, int share, int shares) {
        auto& [run, tasks, parts] = *static_cast<Context*>(pointer);
        for (int part = share; part < parts; part += shares)  // a nested pool has fewer shares than were asked for
          run(tasks * part / parts, tasks * (part + 1) / parts, part);
      },
      &context);
}

}  // namespace hf_ssm
