// Vectors of floats in the compilers' portable vector extension (GCC, Clang), `lanes` wide for the instruction set that
// a file is compiled for. Everything is in a namespace named after it, so that the linker never takes a function that
// was compiled for one machine for the same function compiled for another; for that reason nothing here, or in a
// kernel, uses inline functions of the standard library.
#pragma once
#include <cstdint>
#include <initializer_list>
#if defined(__AVX512F__) || defined(__F16C__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own intrinsics
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "tensor.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

#if defined(__AVX512F__)
#define HF_SSM_LANES 16
#elif defined(__AVX2__)
#define HF_SSM_LANES 8
#else
#define HF_SSM_LANES 4
#endif
constexpr int lanes = HF_SSM_LANES;

typedef float Floats __attribute__((vector_size(lanes * 4)));
typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
typedef uint32_t Words __attribute__((vector_size(lanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(lanes * 2)));

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
  Floats to;
  __builtin_memcpy(&to, from, sizeof(to));
  return to;
}
inline void store(float* to, Floats from) { __builtin_memcpy(to, &from, sizeof(from)); }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats abs(Floats a) { return bits<Floats>(bits<Ints>(a) & 0x7fffffff); }

// a b + c, rounded once where the machine can; elsewhere the product is rounded, too.
inline Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }

#define HF_SSM_SELECT(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)

inline float sum(Floats a) {
#if HF_SSM_LANES == 16
  a += HF_SSM_SELECT(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  a += HF_SSM_SELECT(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  a += HF_SSM_SELECT(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif HF_SSM_LANES == 8
  a += HF_SSM_SELECT(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
  a += HF_SSM_SELECT(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
#else
  a += HF_SSM_SELECT(a, a, 2, 3, 0, 1);
#endif
  return a[0] + a[1];
}

// a[0] .. a[lanes - 1] -> the vector of their sums, by halving: 3 operations per sum. Overwrites a.
inline Floats sums(Floats* a) {
#if HF_SSM_LANES == 16
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i)
    a[i] = HF_SSM_SELECT(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           HF_SSM_SELECT(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i)
    a[i] = HF_SSM_SELECT(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           HF_SSM_SELECT(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 16
  for (int i = 0; i < 2; ++i)
    a[i] = HF_SSM_SELECT(a[i], a[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           HF_SSM_SELECT(a[i], a[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return HF_SSM_SELECT(a[0], a[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         HF_SSM_SELECT(a[0], a[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif HF_SSM_LANES == 8
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i)
    a[i] = HF_SSM_SELECT(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
           HF_SSM_SELECT(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
#pragma GCC unroll 16
  for (int i = 0; i < 2; ++i)
    a[i] = HF_SSM_SELECT(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
           HF_SSM_SELECT(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  return HF_SSM_SELECT(a[0], a[1], 0, 8, 2, 10, 4, 12, 6, 14) + HF_SSM_SELECT(a[0], a[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
#pragma GCC unroll 16
  for (int i = 0; i < 2; ++i)
    a[i] = HF_SSM_SELECT(a[i], a[i + 2], 0, 1, 4, 5) + HF_SSM_SELECT(a[i], a[i + 2], 2, 3, 6, 7);
  return HF_SSM_SELECT(a[0], a[1], 0, 4, 2, 6) + HF_SSM_SELECT(a[0], a[1], 1, 5, 3, 7);
#endif
}

// 2^(a (b + c)), c being what b lacks of a number: the product enters unrounded, so the relative error is that of the
// polynomial (minimax of degree 6 on [-0.5, 0.5]: 2e-9) and one rounding, however large it is. 2^0 is exactly 1.
inline Floats exp2(Floats a, Floats b, Floats c) {
  Floats v = a * b;
#if defined(__AVX512F__)
  __m512 rounded = _mm512_roundscale_ps(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats whole = reinterpret_cast<Floats>(rounded);
#else
  const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  Floats shifted = max(min(v, splat(150.0f)), splat(-150.0f)) + shift;
  Floats whole = shifted - shift;
#endif
  Floats f = fused(a, b, -whole);
  f = fused(a, c, f);
#if !defined(__AVX512F__)
  f = v > -150.0f ? f : Floats{};  // the result is 0, whatever f
  f = v < 150.0f ? f : v;          // infinity, or NaN
#endif
  Floats p = splat(1.5345811e-4f);
  p = p * f + 1.339993e-3f;
  p = p * f + 9.618489e-3f;
  p = p * f + 5.5503286e-2f;
  p = p * f + 2.4022646e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), rounded));
#else
  // in two steps, each a normal power of two, so that results below 2^-126 are rounded and not cut off
  Ints n = bits<Ints>(shifted) - 0x4b400000;
  Ints half = n >> 1;
  return p * bits<Floats>((half + 127) << 23) * bits<Floats>((n - half + 127) << 23);
#endif
}

// 2^(a b) for products between least_mild and 0, in three quarters of the operations: the nearest integer is split off
// by adding 1.5 * 2^23, which leaves it in the low bits, and put back into the exponent. Polynomial of degree 5, minimax
// with p(0) = 1 and p'(0) = ln 2, so that decays close to 1 keep their distance from it: relative error 1.1e-7.
constexpr float least_mild = -125.0f;
inline Floats mild_exp2(Floats a, Floats b) {
  const Floats shift = splat(12582912.0f);
  Floats shifted = fused(a, b, shift);
  Floats f = fused(a, b, shift - shifted);
  Floats p = splat(1.33002643e-3f);
  p = p * f + 9.66970809e-3f;
  p = p * f + 5.55055998e-2f;
  p = p * f + 2.40222812e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  return bits<Floats>(bits<Words>(p) + (bits<Words>(shifted) << 23));
}

constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;
constexpr double double_log2_e = 1.4426950408889634;

// e^v. The argument is reduced in two steps, so the relative error stays near one rounding for large |v|, too.
inline Floats exp(Floats v) {
  v = v < -110.0f ? splat(-110.0f) : v;
  v = v > 100.0f ? splat(100.0f) : v;
  Floats scaled = v * log2_e;
#if defined(__AVX512F__)
  __m512 rounded =
      _mm512_roundscale_ps(reinterpret_cast<__m512>(scaled), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats whole = reinterpret_cast<Floats>(rounded);
#else
  const Floats shift = splat(12582912.0f);
  Floats shifted = scaled + shift;
  Floats whole = shifted - shift;
#endif
  Floats f = v - whole * 0.693145752f;  // ln 2 in two parts; the first times a small integer is exact
  f = f - whole * 1.42860677e-6f;
  Floats p = splat(1.3836845e-3f);
  p = p * f + 8.374816e-3f;
  p = p * f + 4.1668225e-2f;
  p = p * f + 1.666642e-1f;
  p = p * f + 4.999999e-1f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), rounded));
#else
  Ints n = bits<Ints>(shifted) - 0x4b400000;
  Ints half = n >> 1;
  Floats result = p * bits<Floats>((half + 127) << 23) * bits<Floats>((n - half + 127) << 23);
  return v == v ? result : v;
#endif
}

inline Floats sigmoid(Floats v) { return 1.0f / (1.0f + exp(-v)); }
inline Floats silu(Floats v) { return v * sigmoid(v); }

// log(1 + e^v) = max(v, 0) + log1p(e^-|v|), the logarithm by its atanh series: relative to the result, not to 1.
inline Floats softplus(Floats v) {
  Floats e = exp(-abs(v));
  Floats s = e / (e + 2.0f), w = s * s;
  Floats p = splat(1.2206533e-1f);
  p = p * w + 1.0696626e-1f;
  p = p * w + 1.4310361e-1f;
  p = p * w + 1.9999346e-1f;
  p = p * w + 3.333334e-1f;
  p = p * w + 1.0f;
  return max(v, Floats{}) + 2.0f * s * p;
}

inline Floats from_bfloat16(Halves h) { return bits<Floats>(__builtin_convertvector(h, Words) << 16); }

inline Halves to_bfloat16(Floats v) {  // to nearest even; NaN stays NaN
  Words w = bits<Words>(v);
  Words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  Words result = v == v ? rounded : (w >> 16) | 0x40;
  return __builtin_convertvector(result, Halves);
}

inline Floats from_float16(Halves h) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(bits<__m256i>(h)));
#elif defined(__AVX2__) && defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(bits<__m128i>(h)));
#else
  Words w = __builtin_convertvector(h, Words);
  Words magnitude = w & 0x7fff;
  // a multiplication moves the exponent and makes subnormal numbers normal
  Floats scaled = bits<Floats>(magnitude << 13) * 5.192296858534828e33f;  // 2^112
  Words finite = bits<Words>(scaled), special = (magnitude << 13) | 0x7f800000;
  Words result = magnitude >= 0x7c00 ? special : finite;
  return bits<Floats>(result | ((w & 0x8000) << 16));
#endif
}

inline Halves to_float16(Floats v) {
#if defined(__AVX512F__)
  return bits<Halves>(_mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
  return bits<Halves>(_mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  Words w = bits<Words>(v), sign = (w >> 16) & 0x8000, magnitude = w & 0x7fffffff;
  // normal results: rebias, round to nearest even
  Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // subnormal results: adding 0.5 leaves them, rounded, in the low bits
  Words subnormal = bits<Words>(bits<Floats>(magnitude) + 0.5f) - 0x3f000000;
  Words result = magnitude < 0x38800000 ? subnormal : normal;
  Words infinite = Words{} + 0x7c00, nan = Words{} + 0x7e00;
  result = magnitude >= 0x477ff000 ? infinite : result;
  result = magnitude > 0x7f800000 ? nan : result;
  return __builtin_convertvector(result | sign, Halves);
#endif
}

inline Halves load_halves(const char* from) {
  Halves to;
  __builtin_memcpy(&to, from, sizeof(to));
  return to;
}

inline float scalar_from(const char* from, Dtype dtype) {
  if (dtype == Dtype::float32) {
    float value;
    __builtin_memcpy(&value, from, 4);
    return value;
  }
  Halves h{};
  __builtin_memcpy(&h, from, 2);
  return dtype == Dtype::bfloat16 ? from_bfloat16(h)[0] : from_float16(h)[0];
}

inline void scalar_to(char* to, Dtype dtype, float value) {
  if (dtype == Dtype::float32) {
    __builtin_memcpy(to, &value, 4);
    return;
  }
  Halves h = dtype == Dtype::bfloat16 ? to_bfloat16(splat(value)) : to_float16(splat(value));
  __builtin_memcpy(to, &h, 2);
}

// `count` elements of any dtype, `stride` elements apart, to floats.
inline void read_row(float* to, const char* from, Dtype dtype, int64_t stride, int64_t count) {
  int64_t i = 0;
  if (stride == 1) {
    if (dtype == Dtype::float32) {
      __builtin_memcpy(to, from, size_t(count) * 4);
      return;
    }
    if (dtype == Dtype::bfloat16)
      for (; i + lanes <= count; i += lanes) store(to + i, from_bfloat16(load_halves(from + 2 * i)));
    else
      for (; i + lanes <= count; i += lanes) store(to + i, from_float16(load_halves(from + 2 * i)));
  }
  int64_t step = stride * (dtype == Dtype::float32 ? 4 : 2);
  for (; i < count; ++i) to[i] = scalar_from(from + i * step, dtype);
}

// `count` floats to elements of any dtype, one behind the other.
inline void write_row(char* to, Dtype dtype, const float* from, int64_t count) {
  int64_t i = 0;
  if (dtype == Dtype::float32) {
    __builtin_memcpy(to, from, size_t(count) * 4);
    return;
  }
  for (; i + lanes <= count; i += lanes) {
    Halves h = dtype == Dtype::bfloat16 ? to_bfloat16(load(from + i)) : to_float16(load(from + i));
    __builtin_memcpy(to + 2 * i, &h, sizeof(h));
  }
  for (; i < count; ++i) scalar_to(to + 2 * i, dtype, from[i]);
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
