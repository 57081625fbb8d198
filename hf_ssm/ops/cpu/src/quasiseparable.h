// Hydra's mixer (arXiv:2407.09941): two of Mamba-2's scans from either end of a row, each read one token later, and a
// diagonal. The backward direction is a scan over tensors whose tokens lie the other way round.
#pragma once
#include "ssd_backward.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

// A tensor (batch, seqlen, ...) from its last token to its first.
struct Reversed {
  int64_t strides[4];
  Tensor tensor;

  explicit Reversed(const Tensor& from) : tensor(from) {
    if (!from) return;
    for (int axis = 0; axis < from.ndim; ++axis) strides[axis] = axis == 1 ? -from.strides[1] : from.strides[axis];
    tensor.strides = strides;
    tensor.data = from.at(0, from.shape[1] - 1);
  }
  Reversed(const Reversed&) = delete;
  Reversed& operator=(const Reversed&) = delete;
};

struct ReversedScan {
  Reversed x, dt, B, C, starts;
  SsdScan scan;

  explicit ReversedScan(const SsdScan& from)
      : x(from.x), dt(from.dt), B(from.B), C(from.C), starts(from.starts), scan(from) {
    scan.x = x.tensor;
    scan.dt = dt.tensor;
    scan.B = B.tensor;
    scan.C = C.tensor;
    if (!from.starts) return;
    scan.starts = starts.tensor;  // a sequence begins, from behind, at the token before another's start
    scan.starts.data = from.starts.at(0, from.starts.shape[1]);
  }
};

inline void quasiseparable(const Quasiseparable& call, int threads) {
  const SsdShape shape(call.forward);
  const ReversedScan reversed(call.backward);
  const Reversed reversed_out(call.out);
  const int64_t state_size = shape.padded_states * block_columns;
  const int64_t floats = round_up(ssd_run * state_size + scan_items_floats(shape), 16);
  const int64_t sums_floats = shape.seqlen * ssd_run * block_columns;
  Scratch memory(size_t(threads) * size_t(floats + sums_floats));
  parallel_for(threads, shape.items(), [&](int64_t begin, int64_t end, int thread) {
    float *states = memory.data() + thread * (floats + sums_floats), *BC = states + ssd_run * state_size;
    float* sums = states + floats;  // [seqlen][ssd_run][block_columns]: the forward direction and the diagonal
    alignas(64) float read[ssd_run][block_columns];  // by the next token
    for (int64_t next; begin < end; begin = next) {
      next = shape.run_end(begin, end);
      auto scan_direction = [&](const SsdScan& scan, const Tensor& checkpoints, const Tensor& out, auto&& put) {
        for (int64_t i = 0; i < ssd_run * state_size; ++i) states[i] = 0;
        for (auto& row : read)
          for (float& value : row) value = 0;
        scan_items(scan, shape, begin, next, states, BC, checkpoints, out,
                   [&](int64_t i, const SsdItem& item, int64_t first, int64_t tokens, const SsdTile& tile) {
                     for (int64_t t = 0; t < tokens; ++t) {
                       if (restarts(scan, item.batch, first + t))
                         for (float& value : read[i]) value = 0;
                       put(i, item, first + t, read[i], tile.x + t * block_columns);
                       for (int p = 0; p < block_columns; p += lanes)
                         store(read[i] + p, load(tile.y + t * block_columns + p) * tile.scale[t]);
                     }
                   });
      };
      scan_direction(call.forward, call.before, Tensor{},
                     [&](int64_t i, const SsdItem& item, int64_t t, const float* earlier, const float* x) {
                       const Tensor& diagonal = call.diagonal;
                       const float weight =
                           diagonal ? scalar_from(diagonal.at(item.batch, t, item.head), diagonal.dtype) : 0.0f;
                       float* sum = sums + (t * ssd_run + i) * block_columns;
                       for (int p = 0; p < block_columns; p += lanes) {
                         const Floats v = load(earlier + p);
                         store(sum + p, diagonal ? v + load(x + p) * weight : v);
                       }
                     });
      scan_direction(reversed.scan, call.behind, reversed_out.tensor,
                     [&](int64_t i, const SsdItem& item, int64_t t, const float* later, const float*) {
                       float* sum = sums + ((shape.seqlen - 1 - t) * ssd_run + i) * block_columns;
                       for (int p = 0; p < block_columns; p += lanes) store(sum + p, load(sum + p) + load(later + p));
                       write_row(reversed_out.tensor.at(item.batch, t, item.head, item.first), call.out.dtype, sum,
                                 item.width);
                     });
    }
  });
}

inline void quasiseparable_backward(const QuasiseparableBackward& call, int threads) {
  const Quasiseparable& forward = call.forward;
  const SsdShape shape(forward.forward);
  if (!shape.batch) return;
  // the sum of both directions: in x's gradient itself, if that is exact
  const bool in_place = call.x.dtype == Dtype::float32;
  Scratch memory(in_place ? 0 : size_t(shape.batch * shape.seqlen * shape.heads * shape.channels));
  Tensor sums = call.x;
  sums.dtype = Dtype::float32;
  if (!in_place) sums.data = reinterpret_cast<char*>(memory.data());

  auto scan_direction = [&](const SsdScan& scan, const SsdScanGradients& grads, const Tensor& checkpoints,
                            const Tensor& d_out, auto&& write) {
    SsdGradientPass pass(scan, grads, Tensor{}, checkpoints, false, threads);
    auto read_gradient = [&](SsdChunk& chunk) {  // of the next token
      for (int64_t t = 0; t < chunk.padded_tokens; ++t) {
        const int64_t reader = chunk.first + t + 1;
        float* row = chunk.d_y + t * chunk.channels;
        const bool is_read = t < chunk.tokens && reader < shape.seqlen && !restarts(scan, chunk.batch, reader);
        if (is_read)
          read_row(row, d_out.at(chunk.batch, reader, chunk.head), d_out.dtype, d_out.stride(3), shape.channels);
        for (int64_t p = is_read ? shape.channels : 0; p < chunk.channels; ++p) row[p] = 0;
      }
    };
    pass.run(false, false, read_gradient, write);
  };

  scan_direction(forward.forward, call.scan_forward, forward.before, forward.out, [&](SsdChunk& chunk) {
    for (int64_t t = 0; t < chunk.tokens; ++t)
      write_row(sums.at(chunk.batch, chunk.first + t, chunk.head), sums.dtype, chunk.d_x + t * chunk.channels,
                shape.channels);
  });

  const ReversedScan reversed(forward.backward);
  const Reversed d_out(forward.out), d_x(call.x), d_diagonal(call.diagonal), before(sums), diagonal(forward.diagonal);
  const Reversed dt(call.scan_backward.dt), B(call.scan_backward.B), C(call.scan_backward.C);
  SsdScanGradients grads = call.scan_backward;
  grads.dt = dt.tensor;
  grads.B = B.tensor;
  grads.C = C.tensor;
  scan_direction(reversed.scan, grads, forward.behind, d_out.tensor, [&](SsdChunk& chunk) {
    float *sum = chunk.scaled, *d_y = sum + chunk.channels;
    for (int64_t p = 0; p < 2 * chunk.channels; ++p) sum[p] = 0;
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const int64_t token = chunk.first + t;
      read_row(sum, before.tensor.at(chunk.batch, token, chunk.head), Dtype::float32, 1, shape.channels);
      float weight = 0;
      if (forward.diagonal) {
        weight = scalar_from(diagonal.tensor.at(chunk.batch, token, chunk.head), diagonal.tensor.dtype);
        read_row(d_y, d_out.tensor.at(chunk.batch, token, chunk.head), d_out.tensor.dtype, d_out.tensor.stride(3),
                 shape.channels);
      }
      Floats product{};
      for (int64_t p = 0; p < chunk.channels; p += lanes) {
        const int64_t at = t * chunk.channels + p;
        product += load(d_y + p) * load(chunk.x + at);
        store(sum + p, load(sum + p) + load(chunk.d_x + at) + load(d_y + p) * weight);
      }
      write_row(d_x.tensor.at(chunk.batch, token, chunk.head), call.x.dtype, sum, shape.channels);
      if (call.diagonal)
        scalar_to(d_diagonal.tensor.at(chunk.batch, token, chunk.head), call.diagonal.dtype,
                  ::hf_ssm::HF_SSM_ISA::sum(product));
    }
  });
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
