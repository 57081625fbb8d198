// How fast states decay: the scans' A, from the parameter that is learned.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int64_t rates_least = 1 << 12;  // vectors that are worth a thread

inline void decay_rates(const DecayRates& call, int threads) {
  const int64_t vectors = (call.count + lanes - 1) / lanes, most = vectors / rates_least + 1;
  parallel_for(threads < most ? threads : int(most), vectors, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * lanes; i < end * lanes; i += lanes) {
      const Floats v = take(call.A_log.data + i * call.A_log.item_size(), call.A_log.dtype, call.count - i);
      put(call.out.data + i * 4, Dtype::float32, -exp(v), call.count - i);
    }
  });
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
