#include "parallel.h"

#include <dlfcn.h>

#include <cstdlib>
#include <new>

namespace hf_ssm {
namespace {

// The entry points of OpenMP runtimes. GNU's is also offered by LLVM's and Intel's on Linux; LLVM's own is the one on
// macOS. Resolved at run time, from the library that torch is linked with: a second runtime would fight the first.
using GnuParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using LlvmMicrotask = void (*)(int32_t*, int32_t*, void*);
using LlvmFork = void (*)(void*, int32_t, void (*)(int32_t*, int32_t*, ...), ...);
using LlvmPush = void (*)(void*, int32_t, int32_t);
using LlvmThread = int32_t (*)(void*);
using Query = int (*)();

struct Pool {
  GnuParallel gnu = nullptr;
  LlvmFork llvm = nullptr;
  LlvmPush llvm_push = nullptr;
  LlvmThread llvm_thread = nullptr;
  Query thread = nullptr;
  Query threads = nullptr;
} pool;

struct Job {
  void (*run)(void*, int, int);
  void* context;
};

void gnu_share(void* pointer) {
  auto* job = static_cast<Job*>(pointer);
  job->run(job->context, pool.thread(), pool.threads());
}

void llvm_share(int32_t*, int32_t*, void* pointer) { gnu_share(pointer); }

}  // namespace

void run_in_pool(int threads, void (*run)(void*, int, int), void* context) {
  Job job{run, context};
  if (pool.gnu) {
    pool.gnu(gnu_share, &job, unsigned(threads), 0);
  } else if (pool.llvm) {
    static struct {
      int32_t reserved[4];
      const char* source;
    } where = {{0, 2, 0, 0}, ";hf_ssm;parallel;0;0;;"};
    pool.llvm_push(&where, pool.llvm_thread(&where), threads);
    pool.llvm(&where, 1, reinterpret_cast<void (*)(int32_t*, int32_t*, ...)>(LlvmMicrotask(llvm_share)), &job);
  } else {
    run(context, 0, 1);
  }
}

const char* find_pool(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) library = RTLD_DEFAULT;
  auto find = [library](const char* name) { return dlsym(library, name); };
  pool = Pool{};
  pool.thread = Query(find("omp_get_thread_num"));
  pool.threads = Query(find("omp_get_num_threads"));
  if (!pool.thread || !pool.threads) return nullptr;
  pool.gnu = GnuParallel(find("GOMP_parallel"));
  if (pool.gnu) return "GOMP_parallel";
  pool.llvm_push = LlvmPush(find("__kmpc_push_num_threads"));
  pool.llvm_thread = LlvmThread(find("__kmpc_global_thread_num"));
  if (pool.llvm_push && pool.llvm_thread) pool.llvm = LlvmFork(find("__kmpc_fork_call"));
  return pool.llvm ? "__kmpc_fork_call" : nullptr;
}

Scratch::Scratch(size_t floats) {
  size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
  data_ = static_cast<float*>(std::aligned_alloc(64, bytes ? bytes : 64));
  if (!data_) throw std::bad_alloc();
}

Scratch::~Scratch() { std::free(data_); }

}  // namespace hf_ssm
