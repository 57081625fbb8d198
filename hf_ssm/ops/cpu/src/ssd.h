// Mamba-2's scan (state space duality, arXiv:2405.21060). Forward is the recurrence itself, in registers; backward goes
// chunk by chunk through small matrix products, as section 6 of the paper has it.
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

inline bool restarts(const SsdScan& scan, int64_t batch, int64_t t) { return scan.starts && t && *scan.starts.at(batch, t); }

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
      read_row(row, scan.x.at(item.batch, first + t, item.head, item.first), scan.x.dtype, scan.x.stride(3), item.width);
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
  if (from.stride(3) == 1) return transpose(to, row, from.floats(batch, head, first), from.stride(2), width, shape.states);
  for (int64_t p = 0; p < width; ++p)
    for (int64_t n = 0; n < shape.states; ++n) to[n * row + p] = *from.floats(batch, head, first + p, n);
}

// Takes work items [begin, end), which share B and C, through all tokens, tile by tile: done(i, item, first, tokens, tile) is
// called when a tile's y is complete (but for its scale). `states` has [padded_states][block_columns] for every item.
template <class Done>
inline void scan_items(const SsdScan& scan, const SsdShape& shape, int64_t begin, int64_t end, float* states,
                       float* BC, const Tensor& checkpoints, Done&& done) {
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
      for (int64_t n = 0; n < shape.padded_states; n += block_rows)
        tile.advance(BC + 2 * n * ssd_tile, state + n * block_columns);
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
      scan_items(scan, shape, begin, next, states, BC, call.checkpoints,
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
                     write_row(call.out.at(item.batch, first + t, item.head, item.first), call.out.dtype, y, item.width);
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

// --- backward ---

constexpr int64_t ssd_row = ssd_tile + 16;  // from row to row of a matrix over tokens; rows a power of two apart would
                                            // displace one another from the cache
constexpr int64_t ssd_chunks = ssd_checkpoint_tokens / ssd_tile;

// A head's steps in a chunk (a tile), and what they decay.
struct SsdDecays {
  alignas(64) float raw[ssd_tile], step[ssd_tile];
  alignas(64) float high[ssd_tile], low[ssd_tile];  // log decay from the chunk's start, in two parts: its differences
                                                    // must be exact behind a large one, too
  alignas(64) float read[ssd_tile];                 // what reaches a token of the state that enters the chunk
  alignas(64) float keep[ssd_tile];                 // what the state that leaves the chunk keeps of what a token adds
  float across;                                     // what it keeps of the state that enters
  int32_t begin[ssd_tile];                          // where the token's sequence begins in the chunk

  void compute(const SsdScan& scan, int64_t batch, int64_t head, int64_t first, int64_t tokens) {
    read_steps(scan, batch, head, first, tokens, raw, step);
    const double rate = *scan.A.floats(head);
    double total = 0;
    int64_t last_start = 0, first_start = ssd_tile;
    for (int64_t t = 0; t < ssd_tile; ++t) {
      if (t < tokens && restarts(scan, batch, first + t)) {
        last_start = t;
        if (first_start == ssd_tile) first_start = t;
      }
      const double log_decay = double(step[t]) * rate;
      total += log_decay < -1000 ? -1000 : log_decay;  // nothing is left of either, and what follows is exact
      high[t] = float(total);
      low[t] = float(total - double(high[t]));
      begin[t] = int32_t(last_start);
    }
    for (int64_t t = 0; t < ssd_tile; t += lanes) {
      store(read + t, exp(load(high + t)));
      store(keep + t, exp((high[ssd_tile - 1] - load(high + t)) + (low[ssd_tile - 1] - load(low + t))));
    }
    across = first_start == ssd_tile ? read[ssd_tile - 1] : 0.0f;
    for (int64_t t = first_start; t < ssd_tile; ++t) read[t] = 0;
    for (int64_t t = 0; t < last_start; ++t) keep[t] = 0;
  }
};

// A thread's memory for one chunk. Matrices over tokens have rows of ssd_row floats, those over channels of `channels`.
struct SsdChunk {
  int64_t batch, head, first, tokens, padded_tokens;
  int64_t channels;  // a multiple of `lanes`
  SsdDecays decays;
  float* B[ssd_chunks];      // [padded_states][tokens], of every chunk of the segment
  float* C;                  // [padded_states][tokens]
  float *scores, *d_scores;  // [q][k]: C[q] . B[k], the same for all heads of a group
  float *d_B, *d_C;          // [padded_states][tokens], summed over the heads
  float *decay, *attention, *d_attention;           // [q][k]
  float *x, *d_x, *y, *d_y, *scaled;                // [tokens][channels]
  float *x_transposed, *d_y_transposed;             // [channels][tokens]
  float* states;                                    // [heads][ssd_chunks][padded_states][channels], on entering
  float* row;                                       // [channels]

  static int64_t floats(const SsdShape& shape, int64_t heads, SsdChunk* chunk, float* memory) {
    const int64_t channels = round_up(shape.channels, lanes), over_tokens = shape.padded_states * ssd_row;
    float* begin = memory;
    auto take = [&memory](int64_t count) {
      float* part = memory;
      memory += round_up(count, 16);
      return part;
    };
    SsdChunk unused;
    if (!chunk) chunk = &unused;
    chunk->channels = channels;
    for (float*& B : chunk->B) B = take(over_tokens);
    chunk->C = take(over_tokens);
    for (float** matrix :
         {&chunk->scores, &chunk->d_scores, &chunk->decay, &chunk->attention, &chunk->d_attention})
      *matrix = take(ssd_tile * ssd_row);
    for (float** rows : {&chunk->x, &chunk->d_x, &chunk->y, &chunk->d_y, &chunk->scaled}) *rows = take(ssd_tile * channels);
    for (float** rows : {&chunk->x_transposed, &chunk->d_y_transposed}) *rows = take(channels * ssd_row);
    chunk->states = take(heads * ssd_chunks * shape.padded_states * channels);
    chunk->row = take(channels);
    return memory - begin;
  }

  void place(int64_t begin, int64_t seqlen) {
    first = begin;
    tokens = seqlen - begin < ssd_tile ? seqlen - begin : ssd_tile;
    padded_tokens = round_up(tokens, 16);
  }

  // Reads a head's rows of a tensor (batch, seqlen, nheads, headdim), with zeros around them.
  void read_rows(float* to, const Tensor& from, int64_t width) const {
    for (int64_t t = 0; t < padded_tokens; ++t) {
      if (t < tokens) read_row(to + t * channels, from.at(batch, first + t, head), from.dtype, from.stride(3), width);
      for (int64_t p = t < tokens ? width : 0; p < channels; ++p) to[t * channels + p] = 0;
    }
  }

  // Reads B or C of a group, (batch, seqlen, ngroups, d_state), as [padded_states][tokens] with zeros around it.
  void read_states(float* to, const Tensor& from, int64_t group, const SsdShape& shape) {
    float* rows = x;  // is not in use then
    for (int64_t n = 0; n < shape.padded_states; n += channels) {
      const int64_t left = shape.states - n, width = left < 0 ? 0 : left < channels ? left : channels;
      for (int64_t t = 0; t < padded_tokens; ++t) {
        if (t < tokens && width)
          read_row(rows + t * channels, from.at(batch, first + t, group, n), from.dtype, from.stride(3), width);
        for (int64_t i = t < tokens ? width : 0; i < channels; ++i) rows[t * channels + i] = 0;
      }
      const int64_t height = shape.padded_states - n < channels ? shape.padded_states - n : channels;
      transpose(to + n * ssd_row, ssd_row, rows, channels, padded_tokens, height);
    }
  }
};

// One scan, backward: from its last segment of ssd_checkpoint_tokens to its first, and in each from the last chunk to
// the first; what the forward pass did not keep is recomputed. The work items are heads.
class SsdGradientPass {
 public:
  SsdGradientPass(const SsdScan& scan, const SsdScanGradients& grads, const Tensor& initial_state,
                  const Tensor& checkpoints, bool gated, int threads)
      : scan_(scan),
        grads_(grads),
        initial_state_(initial_state),
        checkpoints_(checkpoints),
        gated_(gated),
        shape_(scan),
        heads_(shape_.batch * shape_.heads),
        threads_(threads < heads_ ? threads : int(heads_)),
        channels_(round_up(shape_.channels, lanes)),
        slot_size_(ssd_chunks * 2 * shape_.padded_states * ssd_row),
        slots_(heads_ / threads_ / shape_.per_group + 2),
        run_(heads_ / threads_ + 1 < shape_.per_group ? heads_ / threads_ + 1 : shape_.per_group),
        chunk_size_(SsdChunk::floats(shape_, run_, nullptr, nullptr)),
        thread_size_(chunk_size_ + slots_ * slot_size_),
        d_states_(size_t(heads_ * shape_.padded_states * channels_)),
        memory_(size_t(threads_ * thread_size_)) {}

  // The gradient of a head's state, [padded_states][channels]: to be filled with that of the final state, and after the
  // pass that of the initial one.
  float* d_state(int64_t head) const { return d_states_.data() + head * shape_.padded_states * channels_; }
  int64_t channels() const { return channels_; }
  const SsdShape& shape() const { return shape_; }

  // read_gradient(chunk) fills chunk.d_y, knowing chunk.x and, if gated, chunk.y; write(chunk) takes chunk.d_x.
  template <class ReadGradient, class Write>
  void run(bool has_d_state, bool wants_d_state, ReadGradient&& read_gradient, Write&& write) {
    for (int64_t begin = (shape_.seqlen - 1) / ssd_checkpoint_tokens * ssd_checkpoint_tokens; begin >= 0;
         begin -= ssd_checkpoint_tokens) {
      int64_t end = begin + ssd_checkpoint_tokens;
      if (end > shape_.seqlen) end = shape_.seqlen;
      parallel_for(threads_, heads_, [&](int64_t from, int64_t to, int thread) {
        SsdChunk chunk;
        SsdChunk::floats(shape_, run_, &chunk, memory_.data() + thread * thread_size_);
        for (int64_t next; from < to; from = next) {
          next = (from / shape_.per_group + 1) * shape_.per_group;
          if (next > to) next = to;
          recompute_states(chunk, from, next, begin, end);
          for (int64_t first = begin + (end - begin - 1) / ssd_tile * ssd_tile; first >= begin; first -= ssd_tile) {
            chunk.place(first, shape_.seqlen);
            begin_group(chunk, from, thread, begin);
            for (int64_t head = from; head < next; ++head) {
              const bool has_state = first > 0 || initial_state_;
              float* state = chunk.states + ((head - from) * ssd_chunks + (first - begin) / ssd_tile) * state_size();
              place_head(chunk, head);
              chunk.decays.compute(scan_, chunk.batch, chunk.head, first, chunk.tokens);
              chunk.read_rows(chunk.x, scan_.x, shape_.channels);
              attention(chunk);
              if (gated_) output(chunk, has_state ? state : nullptr);
              read_gradient(chunk);
              gradients(chunk, (first - begin) / ssd_tile, has_state ? state : nullptr, d_state(head),
                        has_d_state || first + ssd_tile < shape_.seqlen, wants_d_state || first > 0);
              write(chunk);
            }
            end_group(chunk, (first - begin) / ssd_tile);
          }
        }
      });
      sum_over_threads(begin, end);
    }
  }

 private:
  int64_t state_size() const { return shape_.padded_states * channels_; }
  int64_t pair(int64_t head) const { return head / shape_.per_group; }  // of a row and a group

  // Where a thread sums the gradients of B and C of a chunk, which in this order are [padded_states][tokens] each.
  float* d_BC(int thread, int64_t pair, int64_t chunk) const {
    const int64_t first = this->pair(heads_ * thread / threads_);
    return memory_.data() + thread * thread_size_ + chunk_size_ + (pair - first) * slot_size_ +
           chunk * 2 * shape_.padded_states * ssd_row;
  }

  void place_head(SsdChunk& chunk, int64_t head) const {
    chunk.batch = head / shape_.heads;
    chunk.head = head % shape_.heads;
  }

  // The states that enter the chunks of a segment, and B.
  void recompute_states(SsdChunk& chunk, int64_t from, int64_t to, int64_t begin, int64_t end) const {
    place_head(chunk, from);
    const int64_t group = chunk.head / shape_.per_group;
    for (int64_t first = begin; first < end; first += ssd_tile) {
      chunk.place(first, shape_.seqlen);
      chunk.read_states(chunk.B[(first - begin) / ssd_tile], scan_.B, group, shape_);
    }
    for (int64_t head = from; head < to; ++head) {
      place_head(chunk, head);
      float* state = chunk.states + (head - from) * ssd_chunks * state_size();
      if (begin == 0) {
        if (initial_state_)
          load_state(state, channels_, initial_state_, chunk.batch, chunk.head, 0, shape_.channels, shape_);
      } else {
        for (int64_t i = 0; i < state_size(); ++i) state[i] = 0;
        for (int64_t n = 0; n < shape_.states; ++n)
          __builtin_memcpy(state + n * channels_,
                           checkpoints_.floats(chunk.batch, begin / ssd_checkpoint_tokens - 1, chunk.head, n),
                           size_t(shape_.channels) * 4);
      }
      bool has_state = begin > 0 || initial_state_;
      for (int64_t first = begin; first + ssd_tile < end; first += ssd_tile, state += state_size(), has_state = true) {
        chunk.place(first, shape_.seqlen);
        SsdDecays& decays = chunk.decays;
        decays.compute(scan_, chunk.batch, chunk.head, first, chunk.tokens);
        chunk.read_rows(chunk.x, scan_.x, shape_.channels);
        for (int64_t t = 0; t < chunk.tokens; ++t)
          for (int64_t p = 0; p < channels_; p += lanes)
            store(chunk.x + t * channels_ + p, load(chunk.x + t * channels_ + p) * (decays.keep[t] * decays.step[t]));
        const Left B{chunk.B[(first - begin) / ssd_tile], ssd_row, 1};
        product(shape_.padded_states, channels_, chunk.tokens, B, chunk.x, channels_,
                [&](int64_t n, int64_t p, Floats v) {
                  const float* before = state + n * channels_ + p;
                  store(state + state_size() + n * channels_ + p, has_state ? load(before) * decays.across + v : v);
                });
      }
    }
  }

  // What the heads of a group share in a chunk.
  void begin_group(SsdChunk& chunk, int64_t head, int thread, int64_t begin) const {
    place_head(chunk, head);
    const int64_t index = (chunk.first - begin) / ssd_tile;
    chunk.read_states(chunk.C, scan_.C, chunk.head / shape_.per_group, shape_);
    product<Part::lower_result>(round_up(chunk.tokens, block_rows), chunk.padded_tokens, shape_.states,
                                Left{chunk.C, 1, ssd_row}, chunk.B[index], ssd_row,
                                [&](int64_t q, int64_t k, Floats v) { store(chunk.scores + q * ssd_row + k, v); });
    chunk.d_B = d_BC(thread, pair(head), index);
    chunk.d_C = chunk.d_B + shape_.padded_states * ssd_row;
    for (int64_t i = 0; i < 2 * shape_.padded_states * ssd_row; ++i) chunk.d_B[i] = 0;
    for (int64_t i = 0; i < ssd_tile * ssd_row; ++i) chunk.d_scores[i] = 0;
  }

  // B's and C's gradients through the scores, which were summed over the heads.
  void end_group(SsdChunk& chunk, int64_t index) const {
    product(shape_.padded_states, chunk.padded_tokens, chunk.tokens, Left{chunk.C, ssd_row, 1}, chunk.d_scores, ssd_row,
            [&](int64_t n, int64_t k, Floats v) { add(chunk.d_B + n * ssd_row + k, v); });
    transpose(chunk.attention, ssd_row, chunk.d_scores, ssd_row, chunk.padded_tokens, chunk.padded_tokens);
    product(shape_.padded_states, chunk.padded_tokens, chunk.tokens, Left{chunk.B[index], ssd_row, 1}, chunk.attention,
            ssd_row, [&](int64_t n, int64_t q, Floats v) { add(chunk.d_C + n * ssd_row + q, v); });
  }

  static void add(float* to, Floats v) { store(to, load(to) + v); }

  // decay[q][k] from token k to token q, 0 above the diagonal and across sequences, and with the scores `attention`.
  void attention(SsdChunk& chunk) const {
    const SsdDecays& decays = chunk.decays;
    Ints index;
    for (int i = 0; i < lanes; ++i) index[i] = i;
    for (int64_t q = 0; q < chunk.tokens; ++q)
      for (int64_t k = 0; k < round_up(q + 1, 16); k += lanes) {
        const Floats log_decay = (decays.high[q] - load(decays.high + k)) + (decays.low[q] - load(decays.low + k));
        const Ints at = index + int32_t(k), seen = (at <= int32_t(q)) & (at >= decays.begin[q]);
        const float* scores = chunk.scores + q * ssd_row + k;
        store(chunk.decay + q * ssd_row + k, seen ? exp(log_decay) : Floats{});
        store(chunk.attention + q * ssd_row + k, seen ? exp(log_decay) * load(scores) : Floats{});
      }
  }

  // y, before the skip connection and the gate.
  void output(SsdChunk& chunk, const float* state) const {
    const SsdDecays& decays = chunk.decays;
    const int64_t rows = round_up(chunk.tokens, block_rows);
    for (int64_t t = 0; t < chunk.padded_tokens; ++t)
      for (int64_t p = 0; p < channels_; p += lanes)
        store(chunk.scaled + t * channels_ + p, load(chunk.x + t * channels_ + p) * decays.step[t]);
    product<Part::lower_left>(rows, channels_, chunk.tokens, Left{chunk.attention, ssd_row, 1}, chunk.scaled, channels_,
                              [&](int64_t q, int64_t p, Floats v) { store(chunk.y + q * channels_ + p, v); });
    if (state)
      product(rows, channels_, shape_.states, Left{chunk.C, 1, ssd_row}, state, channels_,
              [&](int64_t q, int64_t p, Floats v) { add(chunk.y + q * channels_ + p, v * decays.read[q]); });
  }

  // Everything that a chunk adds to the gradients of one head. `d_state` is that of the state that leaves the chunk
  // (if there is one), then of the one that enters it (if that is wanted).
  void gradients(SsdChunk& chunk, int64_t index, const float* state, float* d_state, bool has_d_state,
                 bool wants_d_state) const {
    const SsdDecays& decays = chunk.decays;
    const int64_t rows = round_up(chunk.tokens, block_rows), states = shape_.padded_states;
    const float *B = chunk.B[index], *C = chunk.C;
    transpose(chunk.x_transposed, ssd_row, chunk.x, channels_, chunk.padded_tokens, channels_);
    transpose(chunk.d_y_transposed, ssd_row, chunk.d_y, channels_, chunk.padded_tokens, channels_);

    // the chunk's own matrix. A token's log decay is part of the logarithm of every entry to its left below it (and of
    // no diagonal one): `passing` sums, per column, the gradients of the logarithms in the rows from q on
    product<Part::lower_result>(
        rows, chunk.padded_tokens, channels_, Left{chunk.d_y, channels_, 1}, chunk.x_transposed, ssd_row,
        [&](int64_t q, int64_t k, Floats v) { store(chunk.d_attention + q * ssd_row + k, v); });
    alignas(64) float passing[ssd_tile] = {}, to_step[ssd_tile] = {}, d_log_decay[ssd_tile] = {};
    Ints lane;
    for (int i = 0; i < lanes; ++i) lane[i] = i;
    for (int64_t q = chunk.tokens - 1; q >= 0; --q) {
      Floats total{};
      for (int64_t k = decays.begin[q] / lanes * lanes; k <= q; k += lanes) {
        const Ints at = lane + int32_t(k), seen = (at <= int32_t(q)) & (at >= decays.begin[q]);
        const Floats d = seen ? load(chunk.d_attention + q * ssd_row + k) : Floats{}, steps = load(decays.step + k);
        const Floats entry = d * load(chunk.attention + q * ssd_row + k);
        add(chunk.d_scores + q * ssd_row + k, d * load(chunk.decay + q * ssd_row + k) * steps);
        add(to_step + k, entry);
        const Floats sum = load(passing + k) + entry * steps, left = at < int32_t(q) ? sum : Floats{};
        store(passing + k, left);
        total += left;
      }
      d_log_decay[q] = sum(total);
    }
    product<Part::upper_left>(rows, channels_, chunk.tokens, Left{chunk.attention, 1, ssd_row}, chunk.d_y, channels_,
                              [&](int64_t k, int64_t p, Floats v) { store(chunk.d_x + k * channels_ + p, v); });

    // the state that enters
    alignas(64) float read[block_rows][ssd_tile] = {}, kept[block_rows][ssd_tile] = {};  // parts of sums over n
    if (state)
      product(states, chunk.padded_tokens, channels_, Left{state, channels_, 1}, chunk.d_y_transposed, ssd_row,
              [&](int64_t n, int64_t t, Floats v) {
                add(chunk.d_C + n * ssd_row + t, v * load(decays.read + t));
                add(read[n % block_rows] + t, v * load(C + n * ssd_row + t));
              });
    // the state that leaves
    Floats across{};
    if (has_d_state) {
      product(states, chunk.padded_tokens, channels_, Left{d_state, channels_, 1}, chunk.x_transposed, ssd_row,
              [&](int64_t n, int64_t t, Floats v) {
                add(chunk.d_B + n * ssd_row + t, v * (load(decays.keep + t) * load(decays.step + t)));
                add(kept[n % block_rows] + t, v * load(B + n * ssd_row + t));
              });
      product(rows, channels_, shape_.states, Left{B, 1, ssd_row}, d_state, channels_,
              [&](int64_t t, int64_t p, Floats v) { add(chunk.d_x + t * channels_ + p, v * decays.keep[t]); });
      if (state)
        for (int64_t i = 0; i < state_size(); i += lanes) across += load(state + i) * load(d_state + i);
    }
    if (wants_d_state) {
      for (int64_t t = 0; t < chunk.tokens; ++t)
        for (int64_t p = 0; p < channels_; p += lanes)
          store(chunk.scaled + t * channels_ + p, load(chunk.d_y + t * channels_ + p) * decays.read[t]);
      product(states, channels_, chunk.tokens, Left{C, ssd_row, 1}, chunk.scaled, channels_,
              [&](int64_t n, int64_t p, Floats v) {
                float* to = d_state + n * channels_ + p;
                store(to, has_d_state ? load(to) * decays.across + v : v);
              });
    }

    for (int64_t t = 0; t < chunk.tokens; ++t)
      for (int64_t p = 0; p < channels_; p += lanes)
        store(chunk.d_x + t * channels_ + p, load(chunk.d_x + t * channels_ + p) * decays.step[t]);
    for (int64_t t = 0; t < ssd_tile; t += lanes) {
      Floats total_read{}, total_kept{};
      for (int i = 0; i < block_rows; ++i) {
        total_read += load(read[i] + t);
        total_kept += load(kept[i] + t);
      }
      const Floats keep = load(decays.keep + t);
      add(to_step + t, total_kept * keep);
      store(kept[0] + t, total_kept * keep * load(decays.step + t));
      store(read[0] + t, total_read * load(decays.read + t));
    }
    step_gradients(chunk, d_log_decay, read[0], kept[0], sum(across) * decays.across, to_step);
  }

  // Of dt, dt_bias and A: `to_step` is the gradient of the steps as factors of x, `d_log_decay` that of their log
  // decays through the chunk's own matrix. They are also part of what later tokens `read` of the state that enters, and
  // of what the state that leaves has `kept` of earlier ones; the arguments are the gradients of these logarithms.
  void step_gradients(const SsdChunk& chunk, const float* d_log_decay, const float* read, const float* kept,
                      float across, float* to_step) const {
    const SsdDecays& decays = chunk.decays;
    double later[ssd_tile], earlier = across, sum = 0, d_rate = 0;
    for (int64_t t = chunk.tokens - 1; t >= 0; --t) later[t] = sum += read[t];
    const double rate = *scan_.A.floats(chunk.head);
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const double d = d_log_decay[t] + later[t] + earlier;
      earlier += kept[t];
      d_rate += d * decays.step[t];
      to_step[t] += float(d * rate);
    }
    float d_bias = 0;
    for (int64_t t = 0; t < chunk.tokens; t += lanes) {
      const Floats raw = load(decays.raw + t), unclamped = scan_.dt_softplus ? softplus(raw) : raw;
      Floats d = load(to_step + t);
      if (scan_.dt_softplus) d *= sigmoid(raw);
      store(to_step + t, (unclamped >= scan_.dt_min) & (unclamped <= scan_.dt_max) ? d : Floats{});
    }
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      scalar_to(grads_.dt.at(chunk.batch, chunk.first + t, chunk.head), grads_.dt.dtype, to_step[t]);
      d_bias += to_step[t];
    }
    *grads_.A.floats(chunk.batch, chunk.head) += float(d_rate);
    if (grads_.dt_bias) *grads_.dt_bias.floats(chunk.batch, chunk.head) += d_bias;
  }

  // The gradients of B and C in a segment: the threads' sums together, in the order of the threads.
  void sum_over_threads(int64_t begin, int64_t end) const {
    const int64_t chunks = round_up(end - begin, ssd_tile) / ssd_tile, pairs = shape_.batch * shape_.groups;
    const int64_t size = shape_.padded_states * ssd_row, width = round_up(shape_.padded_states, 16);
    Scratch memory(size_t(threads_) * size_t(size + ssd_tile * width));
    parallel_for(threads_, pairs * chunks * 2, [&](int64_t from, int64_t to, int part) {
      float *total = memory.data() + part * (size + ssd_tile * width), *rows = total + size;
      for (int64_t task = from; task < to; ++task) {
        const int64_t pair = task / 2 / chunks, chunk = task / 2 % chunks, first = begin + chunk * ssd_tile;
        const int64_t tokens = end - first < ssd_tile ? end - first : ssd_tile;
        for (int64_t i = 0; i < size; ++i) total[i] = 0;
        for (int thread = 0; thread < threads_; ++thread) {
          const int64_t from_pair = this->pair(heads_ * thread / threads_);
          const int64_t to_pair = this->pair(heads_ * (thread + 1) / threads_ - 1);
          if (pair < from_pair || pair > to_pair) continue;
          const float* part_sum = d_BC(thread, pair, chunk) + task % 2 * size;
          for (int64_t i = 0; i < size; i += lanes) add(total + i, load(part_sum + i));
        }
        transpose(rows, width, total, ssd_row, shape_.padded_states, round_up(tokens, 16));
        const Tensor& grad = task % 2 ? grads_.C : grads_.B;
        for (int64_t t = 0; t < tokens; ++t)
          write_row(grad.at(pair / shape_.groups, first + t, pair % shape_.groups), grad.dtype, rows + t * width,
                    shape_.states);
      }
    });
  }

  const SsdScan& scan_;
  const SsdScanGradients& grads_;
  const Tensor initial_state_, checkpoints_;
  const bool gated_;
  const SsdShape shape_;
  const int64_t heads_;  // of all rows of the batch
  const int threads_;
  const int64_t channels_, slot_size_, slots_, run_, chunk_size_, thread_size_;
  const Scratch d_states_, memory_;
};

inline void ssd_backward(const SsdBackward& call, int threads) {
  const Ssd& forward = call.forward;
  const SsdShape shape(forward.scan);
  if (!shape.batch) return;
  SsdGradientPass pass(forward.scan, call.scan, forward.initial_state, forward.checkpoints, bool(forward.z), threads);
  const int64_t channels = pass.channels();
  if (forward.final_state)
    for (int64_t head = 0; head < shape.batch * shape.heads; ++head)
      load_state(pass.d_state(head), channels, forward.final_state, head / shape.heads, head % shape.heads, 0,
                 shape.channels, shape);
  auto skip = [&](const SsdChunk& chunk) {
    for (int64_t p = 0; p < channels; ++p) chunk.row[p] = 0;
    read_skip(chunk.row, forward.D, chunk.head, 0, shape.channels);
    return chunk.row;
  };
  auto read_gradient = [&](SsdChunk& chunk) {
    chunk.read_rows(chunk.d_y, forward.out, shape.channels);
    if (!forward.z) return;
    float *D = skip(chunk), *z = chunk.scaled;
    chunk.read_rows(z, forward.z, shape.channels);
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      for (int64_t p = 0; p < channels; p += lanes) {
        const int64_t at = t * channels + p;
        const Floats y = load(chunk.y + at) + load(D + p) * load(chunk.x + at), d_out = load(chunk.d_y + at);
        const Floats v = load(z + at), gate = sigmoid(v);
        store(chunk.d_y + at, d_out * v * gate);
        store(z + at, d_out * y * (gate * (1.0f + v * (1.0f - gate))));
      }
      write_row(call.z.at(chunk.batch, chunk.first + t, chunk.head), call.z.dtype, z + t * channels, shape.channels);
    }
  };
  auto write = [&](SsdChunk& chunk) {
    float *D = skip(chunk), *d_D = chunk.scaled;
    for (int64_t p = 0; p < channels; ++p) d_D[p] = 0;
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      float* d_x = chunk.d_x + t * channels;
      for (int64_t p = 0; p < channels; p += lanes) {
        const Floats d_y = load(chunk.d_y + t * channels + p);
        store(d_x + p, load(d_x + p) + d_y * load(D + p));
        store(d_D + p, load(d_D + p) + d_y * load(chunk.x + t * channels + p));
      }
      write_row(call.x.at(chunk.batch, chunk.first + t, chunk.head), call.x.dtype, d_x, shape.channels);
    }
    if (call.D)
      for (int64_t p = 0; p < shape.channels; ++p) call.D.floats(chunk.batch, chunk.head)[p] += d_D[p];
  };
  pass.run(bool(forward.final_state), bool(call.initial_state), read_gradient, write);
  if (call.initial_state)
    for (int64_t head = 0; head < shape.batch * shape.heads; ++head)
      transpose(call.initial_state.floats(head / shape.heads, head % shape.heads), call.initial_state.stride(2),
                pass.d_state(head), channels, shape.states, shape.channels);
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
