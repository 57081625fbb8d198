// Mamba-2's scan (state space duality, arXiv:2405.21060), forward: the recurrence itself. Two vectors hold channels of
// a head; a block of their states stays in registers while the tokens of a tile pass.
#pragma once
#include "gemm.h"
#include "kernels.h"
#include "parallel.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int64_t ssd_tile = 64;  // tokens that are computed together
constexpr int64_t ssd_run = 8;    // work items that share a tile of B and C

// Channels [first, first + width) of a head.
struct SsdItem {
  int64_t batch, head, group, first, width;
};

// The shapes of a call, and forward's work items.
struct SsdShape {
  int64_t batch, seqlen, heads, channels, groups, states, per_group, padded_states, blocks;

  explicit SsdShape(const SsdScan& scan)
      : batch(scan.x.shape[0]),
        seqlen(scan.x.shape[1]),
        heads(scan.x.shape[2]),
        channels(scan.x.shape[3]),
        groups(scan.B.shape[2]),
        states(scan.B.shape[3]),
        per_group(heads / groups),
        padded_states(round_up(states, block_rows)),
        blocks(round_up(channels, block_columns) / block_columns) {}

  int64_t items() const { return batch * heads * blocks; }
  SsdItem item(int64_t index) const {
    const int64_t head = index / blocks % heads, first = index % blocks * block_columns, left = channels - first;
    return {index / blocks / heads, head, head / per_group, first, left < block_columns ? left : block_columns};
  }
  // The end of the work items from `begin` on that share B and C.
  int64_t run_end(int64_t begin, int64_t end) const {
    const int64_t of_group = per_group * blocks, group_end = (begin / of_group + 1) * of_group;
    if (end > group_end) end = group_end;
    return end - begin > ssd_run ? begin + ssd_run : end;
  }
};

inline bool restarts(const SsdScan& scan, int64_t batch, int64_t t) {
  return scan.starts && t && *scan.starts.at(batch, t);
}

// A head's step sizes in a tile of tokens, with zeros behind them; `raw` is what softplus is applied to.
inline void read_steps(const SsdScan& scan, int64_t batch, int64_t head, int64_t first, int64_t tokens, float* raw,
                       float* steps) {
  const float bias = scan.dt_bias ? scalar_from(scan.dt_bias.at(head), scan.dt_bias.dtype) : 0.0f;
  read_row(raw, scan.dt.at(batch, first, head), scan.dt.dtype, scan.dt.stride(1), tokens);
  for (int64_t t = tokens; t < ssd_tile; ++t) raw[t] = 0;
  for (int64_t t = 0; t < tokens; t += lanes) {
    Floats v = load(raw + t) + bias;
    store(raw + t, v);
    if (scan.dt_softplus) v = softplus(v);
    store(steps + t, min(splat(scan.dt_max), max(splat(scan.dt_min), v)));  // in this order NaN stays NaN
  }
  for (int64_t t = tokens; t < ssd_tile; ++t) steps[t] = 0;
}

// A tile of tokens of one work item. Its states are kept without the decays since the last rescaling, whose product is
// `scale`: state = scale s, where s[t] = s[t-1] + (dt x / scale)[t] B[t]. That saves a multiplication per token and
// state. It is rescaled before `scale` leaves [e^-20, e^20], and where the state restarts.
struct SsdTile {
  struct Span {
    int64_t begin;
    float factor;  // that the states are multiplied with before `begin`
    bool restarts;
  };
  Span spans[ssd_tile + 2];  // and where the last one ends
  int64_t span_count;
  alignas(64) float raw[ssd_tile], step[ssd_tile], scale[ssd_tile], weight[ssd_tile];
  alignas(64) float x[ssd_tile * block_columns], input[ssd_tile * block_columns], y[ssd_tile * block_columns];

  void read_decays(const SsdScan& scan, const SsdItem& item, int64_t first, int64_t tokens) {
    read_steps(scan, item.batch, item.head, first, tokens, raw, step);
    const double rate = double(*scan.A.floats(item.head)) * double_log2_e;
    const Floats high = splat(float(rate)), low = splat(float(rate - float(rate)));
    for (int64_t t = 0; t < tokens; t += lanes) store(weight + t, exp2(load(step + t), high, low));
    span_count = 1;
    spans[0] = {0, 1.0f, false};
    float product = 1.0f;
    for (int64_t t = 0; t < tokens; ++t) {
      product *= weight[t];
      const bool restart = restarts(scan, item.batch, first + t);
      if (restart || !(product > 2e-9f && product < 5e8f)) {
        spans[span_count++] = {t, product, restart};
        product = 1.0f;
      }
      scale[t] = product;
    }
    spans[span_count] = {tokens, product, false};
    for (int64_t t = tokens; t < ssd_tile; ++t) scale[t] = 1.0f;
    for (int64_t t = 0; t < tokens; t += lanes) store(weight + t, load(step + t) / load(scale + t));
  }

  void read_inputs(const SsdScan& scan, const SsdItem& item, int64_t first, int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) {
      float* row = x + t * block_columns;
      const char* from = scan.x.at(item.batch, first + t, item.head, item.first);
      read_row(row, from, scan.x.dtype, scan.x.stride(3), item.width);
      for (int64_t p = item.width; p < block_columns; ++p) row[p] = 0;
#pragma GCC unroll 2
      for (int64_t p = 0; p < block_columns; p += lanes) {
        store(input + t * block_columns + p, load(row + p) * weight[t]);
        store(y + t * block_columns + p, Floats{});
      }
    }
  }

  // Takes block_rows states, [..][block_columns], through the tile and adds what they read out to y, without `scale`.
  // BC holds block_rows values of B, then as many of C, of every token.
  void advance(const float* BC, float* state) {
    Floats s[block_rows][2];
#pragma GCC unroll 16
    for (int i = 0; i < block_rows; ++i) {
      s[i][0] = load(state + i * block_columns);
      s[i][1] = load(state + i * block_columns + lanes);
    }
    for (const Span* span = spans; span < spans + span_count; ++span) {
      if (span != spans) {
#pragma GCC unroll 16
        for (int i = 0; i < block_rows; ++i) {
          s[i][0] = span->restarts ? Floats{} : s[i][0] * span->factor;
          s[i][1] = span->restarts ? Floats{} : s[i][1] * span->factor;
        }
      }
      for (int64_t t = span[0].begin; t < span[1].begin; ++t) {
        const float *B = BC + t * 2 * block_rows, *C = B + block_rows;
        const Floats left = load(input + t * block_columns), right = load(input + t * block_columns + lanes);
        Floats y_left = load(y + t * block_columns), y_right = load(y + t * block_columns + lanes);
#pragma GCC unroll 16
        for (int i = 0; i < block_rows; ++i) {
          s[i][0] += left * B[i];
          s[i][1] += right * B[i];
          y_left += s[i][0] * C[i];
          y_right += s[i][1] * C[i];
        }
        store(y + t * block_columns, y_left);
        store(y + t * block_columns + lanes, y_right);
      }
    }
    const float factor = spans[span_count].factor;
#pragma GCC unroll 16
    for (int i = 0; i < block_rows; ++i) {
      store(state + i * block_columns, s[i][0] * factor);
      store(state + i * block_columns + lanes, s[i][1] * factor);
    }
  }
};

// Loads channels [first, first + width) of a head's state, (headdim, d_state), as [states][row]; zeros without one.
inline void load_state(float* to, int64_t row, const Tensor& from, int64_t batch, int64_t head, int64_t first,
                       int64_t width, const SsdShape& shape) {
  for (int64_t i = 0; i < shape.padded_states * row; ++i) to[i] = 0;
  if (!from) return;
  if (from.stride(3) == 1)
    return transpose(to, row, from.floats(batch, head, first), from.stride(2), width, shape.states);
  for (int64_t p = 0; p < width; ++p)
    for (int64_t n = 0; n < shape.states; ++n) to[n * row + p] = *from.floats(batch, head, first + p, n);
}

inline void prefetch_row(const char* row, const Tensor& tensor) {
  for (int64_t byte = 0; byte < block_columns * tensor.item_size(); byte += 64) __builtin_prefetch(row + byte);
}

// Takes work items [begin, end), which share B and C, through all tokens. When a tile's y is complete (but for its
// scale), done(i, item, first, tokens, tile) is called, which may write to `out`. `states` has
// [padded_states][block_columns] for every item.
template <class Done>
inline void scan_items(const SsdScan& scan, const SsdShape& shape, int64_t begin, int64_t end, float* states,
                       float* BC, const Tensor& checkpoints, const Tensor& out, Done&& done) {
  const int64_t state_size = shape.padded_states * block_columns;
  const SsdItem shared = shape.item(begin);
  float* row = BC + shape.padded_states * ssd_tile * 2;
  SsdTile tile;
  for (int64_t first = 0; first < shape.seqlen; first += ssd_tile) {
    const int64_t tokens = shape.seqlen - first < ssd_tile ? shape.seqlen - first : ssd_tile;
    for (const Tensor* from : {&scan.B, &scan.C}) {
      float* to = BC + (from == &scan.C) * block_rows;
      for (int64_t n = shape.states; n < shape.padded_states; ++n) row[n] = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        read_row(row, from->at(shared.batch, first + t, shared.group), from->dtype, from->stride(3), shape.states);
        for (int64_t n = 0; n < shape.padded_states; n += block_rows)
          __builtin_memcpy(to + 2 * (n * ssd_tile + t * block_rows), row + n, block_rows * 4);
      }
    }
    int64_t head = -1;
    for (int64_t index = begin; index < end; ++index) {
      const SsdItem item = shape.item(index);
      float* state = states + (index - begin) * state_size;
      if (checkpoints && first && first % ssd_checkpoint_tokens == 0)
        for (int64_t n = 0; n < shape.states; ++n)
          __builtin_memcpy(
              checkpoints.floats(item.batch, first / ssd_checkpoint_tokens - 1, item.head, n, item.first),
              state + n * block_columns, size_t(item.width) * 4);
      if (item.head != head) tile.read_decays(scan, item, first, tokens);
      head = item.head;
      tile.read_inputs(scan, item, first, tokens);
      // the rows that are read and written next lie far apart: asked for early, they arrive while this is computed
      const SsdItem following = shape.item(index + 1 < end ? index + 1 : begin);
      const int64_t following_first = index + 1 < end ? first : first + ssd_tile;
      for (int64_t n = 0, t = 0; n < shape.padded_states; n += block_rows) {
        for (; t * shape.padded_states < (n + block_rows) * tokens; ++t) {
          if (following_first + t < shape.seqlen)
            prefetch_row(scan.x.at(following.batch, following_first + t, following.head, following.first), scan.x);
          if (out) prefetch_row(out.at(item.batch, first + t, item.head, item.first), out);
        }
        tile.advance(BC + 2 * n * ssd_tile, state + n * block_columns);
      }
      done(index - begin, item, first, tokens, tile);
    }
  }
}

// Floats that `scan_items` needs for BC.
inline int64_t scan_items_floats(const SsdShape& shape) { return shape.padded_states * (2 * ssd_tile + 1); }

// D of channels [first, first + width) of a head; nothing without one.
inline void read_skip(float* to, const Tensor& D, int64_t head, int64_t first, int64_t width) {
  if (!D) return;
  if (D.ndim == 2) return read_row(to, D.at(head, first), D.dtype, D.stride(1), width);
  const float value = scalar_from(D.at(head), D.dtype);
  for (int64_t p = 0; p < width; ++p) to[p] = value;
}

// One token of every row. The states of a channel lie one behind the other, so here a vector holds states.
inline void ssd_token(const Ssd& call, const SsdShape& shape, int threads) {
  const SsdScan& scan = call.scan;
  const int64_t states = round_up(shape.states, lanes), channels = round_up(shape.channels, lanes);
  const int64_t floats = 3 * states + 3 * channels;
  Scratch memory(size_t(threads) * size_t(floats));
  parallel_for(threads, shape.batch * shape.heads, [&](int64_t begin, int64_t end, int thread) {
    float *B = memory.data() + thread * floats, *C = B + states, *row = C + states;
    float *x = row + states, *y = x + channels, *other = y + channels;
    for (int64_t i = 0; i < floats; ++i) B[i] = 0;
    int64_t loaded = -1;
    for (int64_t index = begin; index < end; ++index) {
      const int64_t batch = index / shape.heads, head = index % shape.heads, group = head / shape.per_group;
      if (index / shape.per_group != loaded) {
        loaded = index / shape.per_group;
        read_row(B, scan.B.at(batch, 0, group), scan.B.dtype, scan.B.stride(3), shape.states);
        read_row(C, scan.C.at(batch, 0, group), scan.C.dtype, scan.C.stride(3), shape.states);
      }
      alignas(64) float raw[ssd_tile], step[ssd_tile];
      read_steps(scan, batch, head, 0, 1, raw, step);
      const double rate = double(*scan.A.floats(head)) * double_log2_e;
      const Floats decay = exp2(splat(step[0]), splat(float(rate)), splat(float(rate - float(rate))));
      read_row(x, scan.x.at(batch, 0, head), scan.x.dtype, scan.x.stride(3), shape.channels);
      for (int64_t p = 0; p < shape.channels; p += lanes) {
        Floats read[lanes] = {};
        for (int64_t i = 0; i < lanes && p + i < shape.channels; ++i) {
          const Floats input = splat(step[0] * x[p + i]);
          const float* before = row;
          if (call.initial_state) {
            before = call.initial_state.floats(batch, head, p + i);
            if (call.initial_state.stride(3) != 1 || states != shape.states) {
              for (int64_t n = 0; n < shape.states; ++n) row[n] = *call.initial_state.floats(batch, head, p + i, n);
              before = row;
            }
          }
          float* final = call.final_state.floats(batch, head, p + i);
          float* after = states == shape.states ? final : row;
          Floats sum{};
          for (int64_t n = 0; n < states; n += lanes) {
            const Floats s = load(before + n) * decay + input * load(B + n);
            store(after + n, s);
            sum += s * load(C + n);
          }
          read[i] = sum;
          if (after == row)
            for (int64_t n = 0; n < shape.states; ++n) {
              final[n] = row[n];
              row[n] = 0;
            }
        }
        store(y + p, sums(read));
      }
      if (call.D) {
        read_skip(other, call.D, head, 0, shape.channels);
        for (int64_t p = 0; p < channels; p += lanes) store(y + p, load(y + p) + load(other + p) * load(x + p));
      }
      if (call.z) {
        read_row(other, call.z.at(batch, 0, head), call.z.dtype, call.z.stride(3), shape.channels);
        for (int64_t p = 0; p < channels; p += lanes) store(y + p, load(y + p) * silu(load(other + p)));
      }
      write_row(call.out.at(batch, 0, head), call.out.dtype, y, shape.channels);
    }
  });
}

inline void ssd(const Ssd& call, int threads) {
  const SsdScan& scan = call.scan;
  const SsdShape shape(scan);
  if (shape.seqlen == 1) return ssd_token(call, shape, threads);
  const int64_t state_size = shape.padded_states * block_columns;
  const int64_t floats = round_up(ssd_run * state_size + scan_items_floats(shape), 16);
  Scratch memory(size_t(threads) * size_t(floats));
  parallel_for(threads, shape.items(), [&](int64_t begin, int64_t end, int thread) {
    float *states = memory.data() + thread * floats, *BC = states + ssd_run * state_size;
    alignas(64) float D[ssd_run][block_columns] = {}, z[block_columns] = {};
    for (int64_t next; begin < end; begin = next) {
      next = shape.run_end(begin, end);
      for (int64_t index = begin; index < next; ++index) {
        const SsdItem item = shape.item(index);
        load_state(states + (index - begin) * state_size, block_columns, call.initial_state, item.batch, item.head,
                   item.first, item.width, shape);
        read_skip(D[index - begin], call.D, item.head, item.first, item.width);
      }
      scan_items(scan, shape, begin, next, states, BC, call.checkpoints, call.out,
                 [&](int64_t i, const SsdItem& item, int64_t first, int64_t tokens, SsdTile& tile) {
                   for (int64_t t = 0; t < tokens; ++t) {
                     float* y = tile.y + t * block_columns;
                     if (call.z)
                       read_row(z, call.z.at(item.batch, first + t, item.head, item.first), call.z.dtype,
                                call.z.stride(3), item.width);
#pragma GCC unroll 2
                     for (int p = 0; p < block_columns; p += lanes) {
                       Floats v = load(y + p) * tile.scale[t];
                       v += load(D[i] + p) * load(tile.x + t * block_columns + p);
                       if (call.z) v *= silu(load(z + p));
                       store(y + p, v);
                     }
                     char* to = call.out.at(item.batch, first + t, item.head, item.first);
                     write_row(to, call.out.dtype, y, item.width);
                   }
                 });
      for (int64_t index = begin; index < next; ++index) {
        const SsdItem item = shape.item(index);
        transpose(call.final_state.floats(item.batch, item.head, item.first), call.final_state.stride(2),
                  states + (index - begin) * state_size, block_columns, shape.states, item.width);
      }
    }
  });
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
