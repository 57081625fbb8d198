// A linear layer applied to a few rows. The weights are read once, at the memory's pace: as one stream, in the order in
// which they lie, and asked for ahead. (Four features side by side, four streams, get a fifth less of the memory.)
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int linear_block = 16;         // output features that are written together
constexpr int64_t linear_ahead = 2048;  // bytes
// Weights of so many bytes belong to a model that no cache holds until its next token: they pass without displacing
// what stays, the states and the interpreter.
constexpr int64_t linear_passing = 1 << 21;

// How weights of a dtype are read: `step` at once.
template <Dtype dtype>
struct Weights {
  static constexpr int step = lanes, item = dtype == Dtype::float32 ? 4 : 2;
  Floats values;
  HF_SSM_INLINE explicit Weights(const char* at)
      : values(dtype == Dtype::float32 ? load(reinterpret_cast<const float*>(at)) : from_float16(load_halves(at))) {}
  HF_SSM_INLINE Floats times(const float* x) const { return values * load(x); }
};

// Every second bfloat16 is the upper half of a float already: x comes with each pair of vectors sorted accordingly.
template <>
struct Weights<Dtype::bfloat16> {
  static constexpr int step = 2 * lanes, item = 2;
  Floats even, odd;
  HF_SSM_INLINE explicit Weights(const char* at) {
    Words pairs;
    __builtin_memcpy(&pairs, at, sizeof(pairs));
    even = bits<Floats>(pairs << 16);
    odd = bits<Floats>(pairs & 0xffff0000u);
  }
  HF_SSM_INLINE Floats times(const float* x) const { return even * load(x) + odd * load(x + lanes); }
};

// Row `r` of the call's x as floats, in the order in which the weights are read, padded with zeros.
template <Dtype dtype>
inline void load_inputs(const Linear& call, int64_t r, float* x, int64_t padded) {
  const int64_t size = call.x.shape[1];
  read_row(x, call.x.at(r), call.x.dtype, call.x.stride(1), size);
  for (int64_t i = size; i < padded; ++i) x[i] = 0;
  if constexpr (dtype == Dtype::bfloat16)
    for (int64_t i = 0; i < padded; i += 2 * lanes) {
      float pairs[2 * lanes];
      __builtin_memcpy(pairs, x + i, sizeof(pairs));
      for (int k = 0; k < lanes; ++k) {
        x[i + k] = pairs[2 * k];
        x[i + lanes + k] = pairs[2 * k + 1];
      }
    }
}

// y[r * linear_block] for `rows` rows of x [rows][padded] and the feature whose weights begin at `w`.
template <Dtype dtype, int rows, bool passing>
HF_SSM_INLINE void feature(const float* x, int64_t padded, const char* w, int64_t size, float* y) {
  constexpr int64_t item = Weights<dtype>::item, step = Weights<dtype>::step;
  constexpr int chains = 2;  // sums that need not wait for one another
  Floats total[rows][chains] = {};
  int64_t i = 0;
  for (; i + chains * step <= size; i += chains * step)
#pragma GCC unroll 16
    for (int k = 0; k < chains; ++k) {
      const char* at = w + (i + k * step) * item;
      if (step * item == 64 || i * item % 64 == 0) __builtin_prefetch(at + linear_ahead, 0, passing ? 0 : 3);
      const Weights<dtype> weights(at);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) total[r][k] += weights.times(x + r * padded + i + k * step);
    }
  for (; i < size; i += step) {
    char rest[step * item] = {};
    __builtin_memcpy(rest, w + i * item, size_t((size - i < step ? size - i : step) * item));
    const Weights<dtype> weights(rest);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) total[r][0] += weights.times(x + r * padded + i);
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) y[r * linear_block] = sum(total[r][0] + total[r][1]);
}

template <Dtype dtype, int rows, bool passing>
inline void linear_rows(const Linear& call, const float* x, int64_t padded, int64_t first_row, int64_t begin,
                        int64_t end) {
  const int64_t size = call.weight.shape[1];
  float y[rows * linear_block];
  for (int64_t o = begin; o < end; o += linear_block) {
    const int count = int(end - o < linear_block ? end - o : linear_block);
    for (int i = 0; i < count; ++i) feature<dtype, rows, passing>(x, padded, call.weight.at(o + i), size, y + i);
    for (int r = 0; r < rows; ++r) {
      if (call.bias)
        for (int i = 0; i < count; ++i) y[r * linear_block + i] += scalar_from(call.bias.at(o + i), call.bias.dtype);
      write_row(call.out.at(first_row + r, o), call.out.dtype, y + r * linear_block, count);
    }
  }
}

template <Dtype dtype, bool passing>
inline void linear_of(const Linear& call, int threads) {
  const int64_t rows = call.x.shape[0], count = call.weight.shape[0];
  const int64_t step = Weights<dtype>::step, padded = (call.x.shape[1] + step - 1) / step * step;
  Scratch memory(size_t(rows * padded));
  float* x = memory.data();
  for (int64_t r = 0; r < rows; ++r) load_inputs<dtype>(call, r, x + r * padded, padded);
  const int64_t blocks = (count + linear_block - 1) / linear_block;
  parallel_for(threads, blocks, [&](int64_t begin, int64_t end, int) {
    begin *= linear_block;
    end = end * linear_block < count ? end * linear_block : count;
    for (int64_t r = 0; r < rows;) {
      const float* from = x + r * padded;
      if (rows - r >= 4) {
        linear_rows<dtype, 4, passing>(call, from, padded, r, begin, end);
        r += 4;
      } else if (rows - r >= 2) {
        linear_rows<dtype, 2, passing>(call, from, padded, r, begin, end);
        r += 2;
      } else {
        linear_rows<dtype, 1, passing>(call, from, padded, r, begin, end);
        r += 1;
      }
    }
  });
}

template <Dtype dtype>
inline void linear_of(const Linear& call, int threads) {
  if (call.weight.shape[0] * call.weight.shape[1] * call.weight.item_size() >= linear_passing)
    linear_of<dtype, true>(call, threads);
  else
    linear_of<dtype, false>(call, threads);
}

inline void linear(const Linear& call, int threads) {
  if (call.weight.dtype == Dtype::float32) return linear_of<Dtype::float32>(call, threads);
  if (call.weight.dtype == Dtype::bfloat16) return linear_of<Dtype::bfloat16>(call, threads);
  linear_of<Dtype::float16>(call, threads);
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
