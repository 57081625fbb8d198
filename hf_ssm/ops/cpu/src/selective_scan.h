// Mamba-1's scan. One vector holds as many channels as the machine has lanes; their states stay in registers while the
// tokens pass. A work item is one such block of channels of one row of the batch.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int scan_block = lanes == 16 ? 16 : 8;  // states that are advanced together
constexpr int grad_block = lanes / 2;             // states whose gradients are: their sums for B and C fill one vector

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Channels [first, first + width) of row `batch`, which lie in one group.
struct ScanItem {
  int64_t batch, group, first, width;
};

// The shapes of a call, and its work items.
struct ScanShape {
  int64_t batch, seqlen, channels, states, groups, padded_states, blocks;

  explicit ScanShape(const SelectiveScan& call)
      : batch(call.x.shape[0]),
        seqlen(call.x.shape[1]),
        channels(call.x.shape[2]),
        states(call.A.shape[1]),
        groups(call.B.shape[2]),
        padded_states(ceil_div(states, scan_block) * scan_block),
        blocks(ceil_div(channels / groups, lanes)) {}

  int64_t items() const { return batch * groups * blocks; }
  ScanItem item(int64_t index) const {
    int64_t per_group = channels / groups, block = index % blocks, group = index / blocks % groups;
    int64_t left = per_group - block * lanes;
    return {index / blocks / groups, group, group * per_group + block * lanes, left < lanes ? left : lanes};
  }
};

// One work item's inputs for a tile of tokens, in float, lanes beyond the item's width zero; and the parameters.
struct ScanTile {
  const SelectiveScan& call;
  const ScanShape& shape;
  float *A, *A_rest;          // [padded_states][lanes]: A log2(e), and what its rounding left
  float *D, *bias;            // [lanes]
  float *x, *raw, *step, *z;  // [tokens][lanes]; raw: dt + bias
  float *B, *C;               // [tokens][padded_states]
  ScanItem item{};
  const char* starts = nullptr;
  Floats steepest;  // the least of A, or 1 where one is above 0
  bool mild;        // whether `mild_exp2` can compute this tile's decays

  static int64_t floats(const ScanShape& shape) {
    return 2 * shape.padded_states * lanes + 2 * lanes + checkpoint_tokens * (4 * lanes + 2 * shape.padded_states);
  }

  ScanTile(const SelectiveScan& call, const ScanShape& shape, float* memory) : call(call), shape(shape) {
    auto take = [&memory](int64_t count) {
      float* part = memory;
      memory += count;
      for (int64_t i = 0; i < count; ++i) part[i] = 0;
      return part;
    };
    A = take(shape.padded_states * lanes);
    A_rest = take(shape.padded_states * lanes);
    D = take(lanes);
    bias = take(lanes);
    x = take(checkpoint_tokens * lanes);
    raw = take(checkpoint_tokens * lanes);
    step = take(checkpoint_tokens * lanes);
    z = take(checkpoint_tokens * lanes);
    B = take(checkpoint_tokens * shape.padded_states);
    C = take(checkpoint_tokens * shape.padded_states);
  }

  void begin(const ScanItem& next) {
    item = next;
    for (int64_t i = 0; i < lanes; ++i)
      for (int64_t n = 0; n < shape.states; ++n) {
        double rate = i < item.width ? double(*call.A.floats(item.first + i, n)) * double_log2_e : 0.0;
        A[n * lanes + i] = float(rate);
        A_rest[n * lanes + i] = float(rate - float(rate));
      }
    steepest = Floats{};
    for (int64_t n = 0; n < shape.states; ++n) {
      Floats rates = ::hf_ssm::HF_SSM_ISA::load(A + n * lanes);
      steepest = (rates > 0.0f) | (steepest > 0.0f) ? splat(1.0f) : min(steepest, rates);
    }
    if (call.D) read_row(D, call.D.at(item.first), call.D.dtype, call.D.stride(0), item.width);
    if (call.dt_bias)
      read_row(bias, call.dt_bias.at(item.first), call.dt_bias.dtype, call.dt_bias.stride(0), item.width);
    if (item.width < lanes)
      for (float* rows : {x, raw, z})
        for (int64_t i = 0; i < checkpoint_tokens * lanes; ++i) rows[i] = 0;
  }

  void load(int64_t first, int64_t tokens) {
    rows(x, call.x, first, tokens);
    rows(raw, call.dt, first, tokens);
    if (call.z) rows(z, call.z, first, tokens);
    Floats shift = ::hf_ssm::HF_SSM_ISA::load(bias), largest{}, smallest{};
    for (int64_t t = 0; t < tokens; ++t) {
      Floats v = ::hf_ssm::HF_SSM_ISA::load(raw + t * lanes) + shift;
      store(raw + t * lanes, v);
      if (call.dt_softplus) v = softplus(v);
      store(step + t * lanes, v);
      largest = max(largest, v);
      smallest = min(smallest, v);
    }
    const Floats exponent = steepest * largest;
    mild = true;
    for (int64_t i = 0; i < lanes; ++i)
      mild = mild && smallest[i] >= 0 && steepest[i] <= 0 && exponent[i] >= least_mild;
    for (int64_t t = 0; t < tokens; ++t) {
      states(B + t * shape.padded_states, call.B, first + t);
      states(C + t * shape.padded_states, call.C, first + t);
    }
    starts = call.starts ? call.starts.at(item.batch, first) : nullptr;
  }

  // Asks for token t of the tile that comes next, so that its inputs arrive while this one is computed.
  HF_SSM_INLINE void prefetch(int64_t first, int64_t t) const {
    if (first < 0 || first + t >= shape.seqlen) return;
    __builtin_prefetch(call.x.at(item.batch, first + t, item.first));
    __builtin_prefetch(call.dt.at(item.batch, first + t, item.first));
    if (call.z) __builtin_prefetch(call.z.at(item.batch, first + t, item.first));
  }

  bool restarts(int64_t t) const { return starts && starts[t * call.starts.stride(1)]; }

 private:
  void rows(float* to, const Tensor& from, int64_t first, int64_t tokens) const {
    for (int64_t t = 0; t < tokens; ++t)
      read_row(to + t * lanes, from.at(item.batch, first + t, item.first), from.dtype, from.stride(2), item.width);
  }
  void states(float* to, const Tensor& from, int64_t t) const {
    read_row(to, from.at(item.batch, t, item.group), from.dtype, from.stride(3), shape.states);
  }
};

// Loads (d_inner, d_state) rows of a state as [padded_states][lanes]; zeros without one.
inline void load_state(float* to, const Tensor& from, const ScanItem& item, const ScanShape& shape) {
  for (int64_t i = 0; i < shape.padded_states * lanes; ++i) to[i] = 0;
  if (!from) return;
  for (int64_t i = 0; i < item.width; ++i) {
    const float* row = from.floats(item.batch, item.first + i);
    for (int64_t n = 0; n < shape.states; ++n) to[n * lanes + i] = row[n * from.stride(2)];
  }
}

inline void store_state(const Tensor& to, const float* from, const ScanItem& item, const ScanShape& shape) {
  for (int64_t i = 0; i < item.width; ++i) {
    float* row = to.floats(item.batch, item.first + i);
    for (int64_t n = 0; n < shape.states; ++n) row[n * to.stride(2)] = from[n * lanes + i];
  }
}

// Advances states [n, n + scan_block) through the tile and adds what they read out to y [tokens][lanes]. If it `keeps`,
// decays and states, [tokens][padded_states][lanes] each, receive those of every token. `following` is the first token
// of the tile that will be loaded next.
template <bool keeps, bool mild>
inline void advance(const ScanTile& tile, int64_t tokens, int64_t following, int64_t n, float* state, float* y, float* decays,
                    float* states) {
  const int64_t row = tile.shape.padded_states;
  const float *A = tile.A + n * lanes, *A_rest = tile.A_rest + n * lanes;
  Floats s[scan_block];
#pragma GCC unroll 16
  for (int i = 0; i < scan_block; ++i) s[i] = load(state + (n + i) * lanes);
  for (int64_t t = 0; t < tokens; ++t) {
    const float *B = tile.B + t * row + n, *C = tile.C + t * row + n;
    Floats step = load(tile.step + t * lanes), input = step * load(tile.x + t * lanes);
    if (n == 0) tile.prefetch(following, t);
    if (tile.restarts(t)) {
#pragma GCC unroll 16
      for (int i = 0; i < scan_block; ++i) s[i] = Floats{};
    }
    Floats even{}, odd{};
#pragma GCC unroll 16
    for (int i = 0; i < scan_block; i += 2) {
      Floats decay, next;
      if constexpr (mild) {
        decay = mild_exp2(step, load(A + i * lanes));
        next = mild_exp2(step, load(A + (i + 1) * lanes));
      } else {
        decay = exp2(step, load(A + i * lanes), load(A_rest + i * lanes));
        next = exp2(step, load(A + (i + 1) * lanes), load(A_rest + (i + 1) * lanes));
      }
      s[i] = s[i] * decay + input * B[i];
      s[i + 1] = s[i + 1] * next + input * B[i + 1];
      even += s[i] * C[i];
      odd += s[i + 1] * C[i + 1];
      if constexpr (keeps) {
        const int64_t at = (t * row + n + i) * lanes;
        store(decays + at, decay);
        store(decays + at + lanes, next);
        store(states + at, s[i]);
        store(states + at + lanes, s[i + 1]);
      }
    }
    store(y + t * lanes, load(y + t * lanes) + (even + odd));
  }
#pragma GCC unroll 16
  for (int i = 0; i < scan_block; ++i) store(state + (n + i) * lanes, s[i]);
}

// One token of every row. The states of a channel lie one behind the other, so here a vector holds states.
inline void single_token(const SelectiveScan& call, const ScanShape& shape, int threads) {
  const int64_t padded = ceil_div(shape.states, lanes) * lanes;
  Scratch memory(size_t(threads) * (4 * padded + 4 * lanes));
  parallel_for(threads, shape.batch * shape.groups * shape.blocks, [&](int64_t begin, int64_t end, int thread) {
    float* B = memory.data() + thread * (4 * padded + 4 * lanes);
    float *C = B + padded, *A = C + padded, *state = A + padded;
    float *x = state + padded, *step = x + lanes, *z = step + lanes, *D = z + lanes;
    for (float* rows : {B, C, A, state})
      for (int64_t n = 0; n < padded; ++n) rows[n] = 0;
    int64_t loaded = -1;
    for (int64_t index = begin; index < end; ++index) {
      ScanItem item = shape.item(index);
      if (index / shape.blocks != loaded) {
        loaded = index / shape.blocks;
        read_row(B, call.B.at(item.batch, 0, item.group), call.B.dtype, call.B.stride(3), shape.states);
        read_row(C, call.C.at(item.batch, 0, item.group), call.C.dtype, call.C.stride(3), shape.states);
      }
      read_row(x, call.x.at(item.batch, 0, item.first), call.x.dtype, call.x.stride(2), item.width);
      read_row(step, call.dt.at(item.batch, 0, item.first), call.dt.dtype, call.dt.stride(2), item.width);
      if (call.z) read_row(z, call.z.at(item.batch, 0, item.first), call.z.dtype, call.z.stride(2), item.width);
      if (call.D) read_row(D, call.D.at(item.first), call.D.dtype, call.D.stride(0), item.width);
      for (int64_t i = item.width; i < lanes; ++i) step[i] = z[i] = 0;
      Floats steps = load(step);
      if (call.dt_bias) {
        Floats bias{};
        for (int64_t i = 0; i < item.width; ++i)
          bias[i] = scalar_from(call.dt_bias.at(item.first + i), call.dt_bias.dtype);
        steps += bias;
      }
      if (call.dt_softplus) steps = softplus(steps);
      if (call.z) store(z, silu(load(z)));
      for (int64_t i = 0; i < item.width; ++i) {
        const int64_t channel = item.first + i;
        const float input = steps[i] * x[i];
        const Floats step = splat(steps[i]);
        const float* rates = call.A.floats(channel, 0);
        if (call.A.stride(1) != 1 || padded != shape.states) {
          for (int64_t n = 0; n < shape.states; ++n) A[n] = *call.A.floats(channel, n);
          rates = A;
        }
        const float* before = state;
        if (call.initial_state) {
          before = call.initial_state.floats(item.batch, channel);
          if (call.initial_state.stride(2) != 1 || padded != shape.states) {
            for (int64_t n = 0; n < shape.states; ++n) state[n] = *call.initial_state.floats(item.batch, channel, n);
            before = state;
          }
        }
        float* after = padded == shape.states ? call.final_state.floats(item.batch, channel) : state;
        Floats read{};
        for (int64_t n = 0; n < padded; n += lanes) {
          Floats s = load(before + n) * exp(step * load(rates + n)) + input * load(B + n);
          store(after + n, s);
          read += s * load(C + n);
        }
        if (after == state)
          for (int64_t n = 0; n < shape.states; ++n) {
            *call.final_state.floats(item.batch, channel, n) = state[n];
            state[n] = 0;
          }
        float y = sum(read);
        if (call.D) y += D[i] * x[i];
        x[i] = call.z ? y * z[i] : y;
      }
      write_row(call.out.at(item.batch, 0, item.first), call.out.dtype, x, item.width);
    }
  });
}

inline void selective_scan(const SelectiveScan& call, int threads) {
  const ScanShape shape(call);
  if (shape.seqlen == 1 && !call.checkpoints) return single_token(call, shape, threads);
  const int64_t floats = ScanTile::floats(shape) + shape.padded_states * lanes + checkpoint_tokens * lanes;
  Scratch memory(size_t(threads) * floats);
  parallel_for(threads, shape.items(), [&](int64_t begin, int64_t end, int thread) {
    float* state = memory.data() + thread * floats;
    float* y = state + shape.padded_states * lanes;
    ScanTile tile(call, shape, y + checkpoint_tokens * lanes);
    for (int64_t index = begin; index < end; ++index) {
      ScanItem item = shape.item(index);
      tile.begin(item);
      load_state(state, call.initial_state, item, shape);
      for (int64_t first = 0; first < shape.seqlen; first += checkpoint_tokens) {
        int64_t tokens = shape.seqlen - first < checkpoint_tokens ? shape.seqlen - first : checkpoint_tokens;
        if (call.checkpoints)
          for (int64_t n = 0; n < shape.states; ++n)
            __builtin_memcpy(call.checkpoints.floats(item.batch, first / checkpoint_tokens, n, item.first),
                             state + n * lanes, size_t(item.width) * 4);
        tile.load(first, tokens);
        Floats skip = load(tile.D);
        for (int64_t t = 0; t < tokens; ++t) store(y + t * lanes, skip * load(tile.x + t * lanes));
        for (int64_t n = 0; n < shape.padded_states; n += scan_block)
          (tile.mild ? advance<false, true> : advance<false, false>)(tile, tokens, first + tokens, n, state, y, nullptr,
                                                                     nullptr);
        for (int64_t t = 0; t < tokens; ++t) {
          if (call.z) store(y + t * lanes, load(y + t * lanes) * silu(load(tile.z + t * lanes)));
          write_row(call.out.at(item.batch, first + t, item.first), call.out.dtype, y + t * lanes, item.width);
        }
      }
      store_state(call.final_state, state, item, shape);
    }
  });
}

// Backward of a tile, from its last token to its first. Everything is recomputed from the state before the tile.
struct ScanGradients {
  float *decays, *states;     // [tokens][padded_states][lanes]
  float *before;              // [padded_states][lanes]: the state before the tile
  float *d_state, *d_A;       // [padded_states][lanes]
  float *y, *d_input, *d_step;  // [tokens][lanes]; first y, then its gradient
  Floats d_D, d_bias;

  static int64_t floats(const ScanShape& shape) {
    return 2 * checkpoint_tokens * shape.padded_states * lanes + 3 * shape.padded_states * lanes +
           3 * checkpoint_tokens * lanes;
  }

  ScanGradients(const ScanShape& shape, float* memory) {
    const int64_t tile = checkpoint_tokens * shape.padded_states * lanes, state = shape.padded_states * lanes;
    decays = memory;
    states = decays + tile;
    before = states + tile;
    d_state = before + state;
    d_A = d_state + state;
    y = d_A + state;
    d_input = y + checkpoint_tokens * lanes;
    d_step = d_input + checkpoint_tokens * lanes;
  }

  // Takes states [n, n + grad_block) back through the tile. `d_y` is y's gradient; adds to d_input (of dt x), d_step (of
  // dt through the decay) and, for every token, to d_BC: grad_block gradients of B, then as many of C.
  void retreat(const ScanTile& tile, int64_t tokens, int64_t n, float* d_BC, int64_t row) {
    const int64_t padded = tile.shape.padded_states;
    const float* A = tile.A + n * lanes;
    Floats d_s[grad_block], d_rate[grad_block], terms[2 * grad_block];
#pragma GCC unroll 16
    for (int i = 0; i < grad_block; ++i) {
      d_s[i] = load(d_state + (n + i) * lanes);
      d_rate[i] = load(d_A + (n + i) * lanes);
    }
    for (int64_t t = tokens - 1; t >= 0; --t) {
      const float *B = tile.B + t * padded + n, *C = tile.C + t * padded + n;
      const float* after = states + (t * padded + n) * lanes;
      const float* earlier = t ? after - padded * lanes : before + n * lanes;
      const float* decay = decays + (t * padded + n) * lanes;
      const bool restarts = tile.restarts(t);
      Floats grad = load(y + t * lanes), step = load(tile.step + t * lanes), input = step * load(tile.x + t * lanes);
      Floats to_input{}, to_step{};
#pragma GCC unroll 16
      for (int i = 0; i < grad_block; ++i) {
        d_s[i] += grad * C[i];
        terms[i] = d_s[i] * input;
        terms[grad_block + i] = load(after + i * lanes) * grad;
        to_input += d_s[i] * B[i];
        d_s[i] = restarts ? Floats{} : d_s[i] * load(decay + i * lanes);
        Floats d_exponent = restarts ? Floats{} : d_s[i] * load(earlier + i * lanes);
        d_rate[i] += d_exponent * step;
        to_step += d_exponent * load(A + i * lanes);
      }
      float* sum = d_BC + t * row;
      store(sum, load(sum) + sums(terms));
      store(d_input + t * lanes, load(d_input + t * lanes) + to_input);
      store(d_step + t * lanes, load(d_step + t * lanes) + to_step);
    }
#pragma GCC unroll 16
    for (int i = 0; i < grad_block; ++i) {
      store(d_state + (n + i) * lanes, d_s[i]);
      store(d_A + (n + i) * lanes, d_rate[i]);
    }
  }
};

inline void selective_scan_backward(const SelectiveScanBackward& call, int threads) {
  const SelectiveScan& forward = call.forward;
  const ScanShape shape(forward);
  if (!shape.items()) return;
  if (threads > shape.items()) threads = int(shape.items());
  const int64_t row = 2 * shape.padded_states, row_of_batch = shape.seqlen * shape.groups * row;
  const int64_t per_batch = shape.groups * shape.blocks;
  // a thread sums the gradients of B and C over its items in memory of its own: that of the rows its items belong to
  const int64_t rows = shape.batch / threads + 2;
  const int64_t floats = ScanTile::floats(shape) + ScanGradients::floats(shape) + rows * row_of_batch;
  Scratch memory(size_t(threads) * floats);
  auto d_BC = [&](int thread, int64_t batch) {
    int64_t first = shape.items() * thread / threads / per_batch;
    return memory.data() + thread * floats + (batch - first) * row_of_batch;
  };
  parallel_for(threads, shape.items(), [&](int64_t begin, int64_t end, int thread) {
    float* sums_begin = memory.data() + thread * floats;
    for (int64_t i = 0; i < rows * row_of_batch; ++i) sums_begin[i] = 0;
    ScanTile tile(forward, shape, sums_begin + rows * row_of_batch);
    ScanGradients grads(shape, sums_begin + rows * row_of_batch + ScanTile::floats(shape));
    for (int64_t index = begin; index < end; ++index) {
      ScanItem item = shape.item(index);
      tile.begin(item);
      load_state(grads.d_state, forward.final_state, item, shape);
      for (int64_t i = 0; i < shape.padded_states * lanes; ++i) grads.before[i] = grads.d_A[i] = 0;
      grads.d_D = grads.d_bias = Floats{};
      for (int64_t last = ceil_div(shape.seqlen, checkpoint_tokens) - 1; last >= 0; --last) {
        const int64_t first = last * checkpoint_tokens;
        int64_t tokens = shape.seqlen - first < checkpoint_tokens ? shape.seqlen - first : checkpoint_tokens;
        tile.load(first, tokens);
        for (int64_t n = 0; n < shape.states; ++n)
          __builtin_memcpy(grads.before + n * lanes, forward.checkpoints.floats(item.batch, last, n, item.first),
                           size_t(item.width) * 4);
        Floats skip = load(tile.D);
        for (int64_t t = 0; t < tokens; ++t) store(grads.y + t * lanes, skip * load(tile.x + t * lanes));
        for (int64_t n = 0; n < shape.padded_states; n += scan_block) {
          float state[scan_block * lanes];
          __builtin_memcpy(state, grads.before + n * lanes, sizeof(state));
          (tile.mild ? advance<true, true> : advance<true, false>)(tile, tokens, first - checkpoint_tokens, n,
                                                                   state - n * lanes, grads.y, grads.decays, grads.states);
        }
        for (int64_t t = 0; t < tokens; ++t) {
          float wide[lanes] = {};
          read_row(wide, forward.out.at(item.batch, first + t, item.first), forward.out.dtype, forward.out.stride(2),
                   item.width);
          Floats grad = load(wide);
          if (forward.z) {
            Floats z = load(tile.z + t * lanes), gate = sigmoid(z);
            store(wide, grad * load(grads.y + t * lanes) * (gate * (1.0f + z * (1.0f - gate))));
            write_row(call.z.at(item.batch, first + t, item.first), call.z.dtype, wide, item.width);
            grad *= z * gate;
          }
          store(grads.y + t * lanes, grad);
          store(grads.d_input + t * lanes, Floats{});
          store(grads.d_step + t * lanes, Floats{});
        }
        float* d_tile = d_BC(thread, item.batch) + (first * shape.groups + item.group) * row;
        for (int64_t n = 0; n < shape.padded_states; n += grad_block)
          grads.retreat(tile, tokens, n, d_tile + 2 * n, shape.groups * row);
        for (int64_t t = 0; t < tokens; ++t) {
          float wide[lanes];
          Floats x = load(tile.x + t * lanes), grad = load(grads.y + t * lanes);
          Floats d_input = load(grads.d_input + t * lanes);
          store(wide, d_input * load(tile.step + t * lanes) + grad * skip);
          write_row(call.x.at(item.batch, first + t, item.first), call.x.dtype, wide, item.width);
          Floats d_step = load(grads.d_step + t * lanes) * ln_2 + d_input * x;  // A has log2(e)
          if (forward.dt_softplus) d_step *= sigmoid(load(tile.raw + t * lanes));
          store(wide, d_step);
          write_row(call.dt.at(item.batch, first + t, item.first), call.dt.dtype, wide, item.width);
          grads.d_D += grad * x;
          grads.d_bias += d_step;
        }
      }
      for (int64_t n = 0; n < shape.states; ++n)
        __builtin_memcpy(call.A.floats(item.batch, n, item.first), grads.d_A + n * lanes, size_t(item.width) * 4);
      float wide[lanes];
      store(wide, grads.d_D);
      if (call.D) __builtin_memcpy(call.D.floats(item.batch, item.first), wide, size_t(item.width) * 4);
      store(wide, grads.d_bias);
      if (call.dt_bias) __builtin_memcpy(call.dt_bias.floats(item.batch, item.first), wide, size_t(item.width) * 4);
      if (call.initial_state) store_state(call.initial_state, grads.d_state, item, shape);
    }
  });
  // the threads' sums together, in the order of the threads
  parallel_for(threads, shape.batch * shape.seqlen, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token / shape.seqlen, t = token % shape.seqlen;
      for (int64_t group = 0; group < shape.groups; ++group)
        for (int64_t n = 0; n < shape.states; n += grad_block) {
          Floats total{};
          for (int thread = 0; thread < threads; ++thread) {
            const int64_t first = shape.items() * thread / threads, last = shape.items() * (thread + 1) / threads - 1;
            if (batch < first / per_batch || batch > last / per_batch) continue;
            total += load(d_BC(thread, batch) + (t * shape.groups + group) * row + 2 * n);
          }
          float wide[lanes];
          store(wide, total);
          const int64_t left = shape.states - n, count = left < grad_block ? left : grad_block;
          write_row(call.B.at(batch, t, group, n), call.B.dtype, wide, count);
          write_row(call.C.at(batch, t, group, n), call.C.dtype, wide + grad_block, count);
        }
    }
  });
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
