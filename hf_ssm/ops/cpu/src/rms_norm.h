// RMS norm with its gate: a row's group of channels is in the nearest cache from its first reading to its writing.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int64_t norm_rows = 32;        // of a work item; their sums for the weight's gradient are added together
constexpr int64_t norm_least = 1 << 14;  // elements that are worth a thread

struct NormShape {
  int64_t rows, channels, group, groups, padded;  // padded: a group in whole vectors

  explicit NormShape(const RmsNorm& call)
      : rows(1),
        channels(call.weight.shape[0]),
        group(call.group_size),
        groups(channels / group),
        padded((group + lanes - 1) / lanes * lanes) {
    for (int axis = 0; axis < call.x.ndim - 1; ++axis) rows *= call.x.shape[axis];
  }

  int64_t items() const { return (rows + norm_rows - 1) / norm_rows; }
  int threads(int most) const {
    const int64_t worth = rows * channels / norm_least + 1;
    return worth < most ? int(worth) : most;
  }

  // A vector of all channels, each group padded with zeros.
  void read(float* to, const Tensor& from) const {
    for (int64_t i = 0; i < groups; ++i) {
      for (int64_t c = group; c < padded; ++c) to[i * padded + c] = 0;
      read_row(to + i * padded, from.at(i * group), from.dtype, from.stride(0), group);
    }
  }
};

// The address of a row of a tensor (..., channels), counting through all axes but the last.
inline char* row_of(const Tensor& t, int64_t row) {
  int64_t offset = 0;
  for (int axis = t.ndim - 2; axis > 0; --axis) {
    offset += row % t.shape[axis] * t.strides[axis];
    row /= t.shape[axis];
  }
  if (t.ndim > 1) offset += row * t.strides[0];
  return t.data + offset * t.item_size();
}

// A group of a row, a vector at a time, behind its end zeros.
struct NormGroup {
  char* data;
  Dtype dtype;
  int64_t channels;

  NormGroup(const Tensor& t, const NormShape& shape, int64_t row, int64_t index)
      : data(t ? row_of(t, row) + index * shape.group * t.item_size() : nullptr), dtype(t.dtype), channels(shape.group) {}
  HF_SSM_INLINE Floats get(int64_t c) const { return take(data + c * size_of(dtype), dtype, channels - c); }
  HF_SSM_INLINE void set(int64_t c, Floats v) const { put(data + c * size_of(dtype), dtype, v, channels - c); }
};

// 1 / RMS of `sum` squares of a group.
inline float norm_scale(float sum, const NormShape& shape, float eps) {
  return 1.0f / __builtin_sqrtf(sum / float(shape.group) + eps);
}

inline void rms_norm(const RmsNorm& call, int threads) {
  const NormShape shape(call);
  if (shape.rows * shape.channels == 0) return;
  threads = shape.threads(threads);
  Scratch memory(size_t(shape.groups * shape.padded + threads * shape.padded));
  float* weights = memory.data();
  shape.read(weights, call.weight);
  const bool gate_first = call.gate && !call.norm_before_gate, gate_last = call.gate && call.norm_before_gate;
  parallel_for(threads, shape.rows, [&](int64_t begin, int64_t end, int thread) {
    float* v = weights + (shape.groups + thread) * shape.padded;
    for (int64_t row = begin; row < end; ++row)
      for (int64_t index = 0; index < shape.groups; ++index) {
        const NormGroup x(call.x, shape, row, index), gate(call.gate, shape, row, index), out(call.out, shape, row, index);
        const float* weight = weights + index * shape.padded;
        Floats squares{};
        for (int64_t c = 0; c < shape.padded; c += lanes) {
          Floats value = x.get(c);
          if (gate_first) value *= silu(gate.get(c));
          store(v + c, value);
          squares += value * value;
        }
        const float scale = norm_scale(sum(squares), shape, call.eps);
        for (int64_t c = 0; c < shape.padded; c += lanes) {
          Floats value = load(v + c) * scale * load(weight + c);
          if (gate_last) value *= silu(gate.get(c));
          out.set(c, value);
        }
      }
  });
}

// With v what is normalized, r = 1 / RMS(v), and e the gradient of v r weight: d_weight sums e v r over rows, and
// d_v = r (e weight - v r^2 mean(e weight v)).
inline void rms_norm_backward(const RmsNormBackward& call, int threads) {
  const RmsNorm& forward = call.forward;
  const NormShape shape(forward);
  threads = shape.threads(threads);
  const int64_t all = shape.groups * shape.padded, floats = 2 * all + 4 * shape.padded;
  Scratch memory(size_t(all + threads * floats));
  float *weights = memory.data(), *shares = weights + all;
  shape.read(weights, forward.weight);
  for (int64_t i = 0; i < threads * floats; ++i) shares[i] = 0;
  const bool gate_first = forward.gate && !forward.norm_before_gate;
  const bool gate_last = forward.gate && forward.norm_before_gate;
  parallel_for(threads, shape.items(), [&](int64_t begin, int64_t end, int thread) {
    float *totals = shares + thread * floats, *sums = totals + all;
    float *inputs = sums + all, *grads = inputs + shape.padded;
    float *gates = grads + shape.padded, *sigma = gates + shape.padded;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t last = (item + 1) * norm_rows < shape.rows ? (item + 1) * norm_rows : shape.rows;
      for (int64_t row = item * norm_rows; row < last; ++row)
        for (int64_t index = 0; index < shape.groups; ++index) {
          const float* weight = weights + index * shape.padded;
          float* d_weight = sums + index * shape.padded;
          const NormGroup x(forward.x, shape, row, index), gate(forward.gate, shape, row, index);
          const NormGroup d_out(forward.out, shape, row, index);
          const NormGroup d_x(call.x, shape, row, index), d_gate(call.gate, shape, row, index);
          Floats squares{}, products{};
          for (int64_t c = 0; c < shape.padded; c += lanes) {
            Floats v = x.get(c), e = d_out.get(c);
            store(inputs + c, v);
            store(grads + c, e);
            if (forward.gate) {
              const Floats z = gate.get(c), opening = sigmoid(z);
              store(gates + c, z);
              store(sigma + c, opening);
              if (gate_first) v *= z * opening;
              if (gate_last) e *= z * opening;
            }
            squares += v * v;
            products += e * load(weight + c) * v;
          }
          const float scale = norm_scale(sum(squares), shape, forward.eps);
          const float slope = sum(products) * scale * scale / float(shape.group);
          for (int64_t c = 0; c < shape.padded; c += lanes) {
            const Floats input = load(inputs + c), grad = load(grads + c), w = load(weight + c);
            Floats v = input, e = grad, silu{}, rise{};  // rise: the slope of silu
            if (forward.gate) {
              const Floats z = load(gates + c), opening = load(sigma + c);
              silu = z * opening;
              rise = opening * (1.0f + z * (1.0f - opening));
              if (gate_first) v *= silu;
              if (gate_last) e *= silu;
            }
            const Floats normal = v * scale, d_v = scale * (e * w - v * slope);
            store(d_weight + c, load(d_weight + c) + e * normal);
            d_x.set(c, gate_first ? d_v * silu : d_v);
            if (gate_first) d_gate.set(c, d_v * input * rise);
            if (gate_last) d_gate.set(c, grad * normal * w * rise);
          }
        }
      for (int64_t c = 0; c < all; c += lanes) {
        store(totals + c, load(totals + c) + load(sums + c));
        store(sums + c, Floats{});
      }
    }
  });
  // the threads' sums together, in the order of the threads
  for (int64_t index = 0; index < shape.groups; ++index) {
    float* total = shares + index * shape.padded;
    for (int thread = 1; thread < threads; ++thread)
      for (int64_t c = 0; c < shape.padded; c += lanes)
        store(total + c, load(total + c) + load(total + thread * floats + c));
    write_row(call.weight.at(index * shape.group), call.weight.dtype, total, shape.group);
  }
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
