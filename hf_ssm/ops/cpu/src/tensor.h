// What a kernel sees of a PyTorch tensor: a pointer, a dtype, sizes and strides in elements.
#pragma once
#include <cstdint>

// Functions that files of several instruction sets share must be part of their callers, wherever they are called.
#define HF_SSM_INLINE inline __attribute__((always_inline))

namespace hf_ssm {

enum class Dtype : uint8_t { float32, bfloat16, float16, boolean };

struct Tensor {
  char* data = nullptr;  // null: no tensor was given
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;
  int32_t ndim = 0;
  Dtype dtype = Dtype::float32;

  HF_SSM_INLINE explicit operator bool() const { return data != nullptr; }
  HF_SSM_INLINE int64_t item_size() const { return dtype == Dtype::float32 ? 4 : dtype == Dtype::boolean ? 1 : 2; }
  HF_SSM_INLINE int64_t stride(int axis) const { return strides[axis < 0 ? ndim + axis : axis]; }

  // The address of the element at the given indices of the first axes, as the dtype has it.
  template <class... Index>
  HF_SSM_INLINE char* at(Index... index) const {
    int axis = 0;
    int64_t offset = 0;
    ((offset += int64_t(index) * strides[axis++]), ...);
    return data + offset * item_size();
  }
  template <class... Index>
  HF_SSM_INLINE float* floats(Index... index) const {
    return reinterpret_cast<float*>(at(index...));
  }
};

}  // namespace hf_ssm
