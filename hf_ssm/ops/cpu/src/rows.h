// One vector at a time from and to memory of any dtype; `Dtype` as a template argument where a loop is hot.
#pragma once
#include "simd.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

template <Dtype dtype>
inline Floats take(const char* from) {
  if constexpr (dtype == Dtype::float32) {
    Floats to;
    __builtin_memcpy(&to, from, sizeof(to));
    return to;
  }
  return dtype == Dtype::bfloat16 ? from_bfloat16(load_halves(from)) : from_float16(load_halves(from));
}

template <Dtype dtype>
inline void put(char* to, Floats from) {
  if constexpr (dtype == Dtype::float32) {
    __builtin_memcpy(to, &from, sizeof(from));
  } else {
    Halves h = dtype == Dtype::bfloat16 ? to_bfloat16(from) : to_float16(from);
    __builtin_memcpy(to, &h, sizeof(h));
  }
}

// The first `count` elements, in the other lanes zeros.
inline Floats take(const char* from, Dtype dtype, int64_t count) {
  if (count >= lanes) {
    if (dtype == Dtype::float32) return take<Dtype::float32>(from);
    return dtype == Dtype::bfloat16 ? take<Dtype::bfloat16>(from) : take<Dtype::float16>(from);
  }
  float wide[lanes] = {};
  for (int64_t i = 0; i < count; ++i) wide[i] = scalar_from(from + i * size_of(dtype), dtype);
  return load(wide);
}

inline void put(char* to, Dtype dtype, Floats from, int64_t count) {
  if (count < lanes) {
    float wide[lanes];
    store(wide, from);
    write_row(to, dtype, wide, count);
  } else if (dtype == Dtype::float32) {
    put<Dtype::float32>(to, from);
  } else if (dtype == Dtype::bfloat16) {
    put<Dtype::bfloat16>(to, from);
  } else {
    put<Dtype::float16>(to, from);
  }
}

// The derivative of silu.
inline Floats silu_slope(Floats v) {
  Floats gate = sigmoid(v);
  return gate * (1.0f + v * (1.0f - gate));
}

// run(dtype as a template argument): `run` is a generic lambda that takes a DtypeOf.
template <Dtype dtype>
struct DtypeOf {
  static constexpr Dtype value = dtype;
};
template <class Run>
inline void with_dtype(Dtype dtype, Run&& run) {
  if (dtype == Dtype::float32)
    run(DtypeOf<Dtype::float32>());
  else if (dtype == Dtype::bfloat16)
    run(DtypeOf<Dtype::bfloat16>());
  else
    run(DtypeOf<Dtype::float16>());
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
