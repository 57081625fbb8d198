// Short depthwise convolutions. Token t sees the inputs t - back ... t + ahead of its sequence; a vector holds channels.
// Several tokens are computed together, so that an input is read once for all of their taps.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

constexpr int conv_tokens = 4;           // that are computed together
constexpr int64_t conv_segment = 64;     // tokens and
constexpr int64_t conv_block = 128;      // channels of a work item of the backward pass
constexpr int64_t conv_least = 1 << 14;  // elements that are worth a thread

// The parameters in float, a vector for every tap.
struct Taps {
  const float* weight;  // [width][padded]
  const float* bias;    // [padded]
  int64_t width, padded;

  static int64_t floats(const Conv1d& call) {
    return (call.weight.shape[1] + 1) * padded_channels(call) + call.weight.shape[1] * lanes;
  }
  static int64_t padded_channels(const Conv1d& call) { return (call.x.shape[2] + lanes - 1) / lanes * lanes; }

  Taps(const Conv1d& call, float* memory) : weight(memory), width(call.weight.shape[1]), padded(padded_channels(call)) {
    const int64_t channels = call.x.shape[2];
    float *bias = memory + width * padded, *flat = bias + padded;  // flat: [lanes][width]
    this->bias = bias;
    for (int64_t c = 0; c < padded; ++c) bias[c] = 0;
    if (call.bias) read_row(bias, call.bias.data, call.bias.dtype, call.bias.stride(0), channels);
    const bool dense = call.weight.stride(1) == 1 && call.weight.stride(0) == width;
    for (int64_t c = 0; c < padded; c += lanes) {
      const int64_t count = channels - c < lanes ? channels - c : lanes;
      if (count < lanes)
        for (int64_t i = 0; i < lanes * width; ++i) flat[i] = 0;
      if (dense)
        read_row(flat, call.weight.at(c), call.weight.dtype, 1, count * width);
      else
        for (int64_t i = 0; i < count; ++i)
          read_row(flat + i * width, call.weight.at(c + i), call.weight.dtype, call.weight.stride(1), width);
      if (width == 4) {
        const Floats a = load(flat), b = load(flat + lanes), d = load(flat + 2 * lanes), e = load(flat + 3 * lanes);
        const Floats even = evens(a, b), more_even = evens(d, e), odd = odds(a, b), more_odd = odds(d, e);
        store(memory + c, evens(even, more_even));
        store(memory + padded + c, evens(odd, more_odd));
        store(memory + 2 * padded + c, odds(even, more_even));
        store(memory + 3 * padded + c, odds(odd, more_odd));
      } else {
        for (int64_t k = 0; k < width; ++k)
          for (int64_t i = 0; i < lanes; ++i) memory[k * padded + c + i] = flat[i * width + k];
      }
    }
  }

 private:
#if HF_SSM_LANES == 16
  static Floats evens(Floats a, Floats b) {
    return HF_SSM_SELECT(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  }
  static Floats odds(Floats a, Floats b) {
    return HF_SSM_SELECT(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  }
#elif HF_SSM_LANES == 8
  static Floats evens(Floats a, Floats b) { return HF_SSM_SELECT(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
  static Floats odds(Floats a, Floats b) { return HF_SSM_SELECT(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
#else
  static Floats evens(Floats a, Floats b) { return HF_SSM_SELECT(a, b, 0, 2, 4, 6); }
  static Floats odds(Floats a, Floats b) { return HF_SSM_SELECT(a, b, 1, 3, 5, 7); }
#endif
};

// Which inputs a token sees: at most `back` before and `ahead` behind it, of its own sequence, in [lowest, seqlen).
struct Sight {
  int64_t back, ahead, lowest, seqlen;
  const Tensor& starts;

  bool start(int64_t batch, int64_t t) const { return starts && t > 0 && *starts.at(batch, t); }

  // [first, last] of token t, which may lie before the row.
  void of(int64_t batch, int64_t t, int64_t& first, int64_t& last) const {
    first = last = t;
    while (first > t - back && first > lowest && !start(batch, first)) --first;
    while (last < t + ahead && last + 1 < seqlen && !start(batch, last + 1)) ++last;
    if (first < lowest) first = lowest;
  }

  // Whether the tokens [t, t + conv_tokens) see everything that lies back and ahead.
  bool all(int64_t batch, int64_t t) const {
    if (t - back < lowest || t + conv_tokens + ahead > seqlen) return false;
    if (starts)
      for (int64_t i = t - back + 1; i < t + conv_tokens + ahead; ++i)
        if (start(batch, i)) return false;
    return true;
  }
};

// out[t] = silu(bias + sum_k weight[k] rows[t + k]) for conv_tokens tokens, `channels` being whole vectors.
template <Dtype in, Dtype out, int width>
inline void convolve_several(const char* const* rows, char* const* outs, int64_t channels, const float* weight, int64_t padded,
                             const float* bias, bool with_silu) {
  const char* from[width + conv_tokens - 1];
  char* to[conv_tokens];
  for (int i = 0; i < width + conv_tokens - 1; ++i) from[i] = rows[i];
  for (int t = 0; t < conv_tokens; ++t) to[t] = outs[t];
  for (int64_t c = 0; c < channels; c += lanes) {
    Floats taps[width], inputs[width + conv_tokens - 1], totals[conv_tokens];
#pragma GCC unroll 16
    for (int k = 0; k < width; ++k) taps[k] = load(weight + k * padded + c);
#pragma GCC unroll 16
    for (int i = 0; i < width + conv_tokens - 1; ++i) inputs[i] = take<in>(from[i] + c * size_of(in));
#pragma GCC unroll 16
    for (int t = 0; t < conv_tokens; ++t) {
      totals[t] = bias ? load(bias + c) : Floats{};
#pragma GCC unroll 16
      for (int k = 0; k < width; ++k) totals[t] += taps[k] * inputs[t + k];
    }
    if (with_silu)
#pragma GCC unroll 16
      for (int t = 0; t < conv_tokens; ++t) put<out>(to[t] + c * size_of(out), silu(totals[t]));
    else
#pragma GCC unroll 16
      for (int t = 0; t < conv_tokens; ++t) put<out>(to[t] + c * size_of(out), totals[t]);
  }
}

// The same for one token, of any width and number of channels, and only its taps [first, last]; rows[k] is for tap k.
inline void convolve_one(const char* const* rows, Dtype in, char* to, Dtype out, int64_t channels, int64_t first,
                         int64_t last, const float* weight, int64_t padded, const float* bias, bool with_silu) {
  for (int64_t c = 0; c < channels; c += lanes) {
    Floats total = bias ? load(bias + c) : Floats{};
    for (int64_t k = first; k <= last; ++k)
      total += load(weight + k * padded + c) * take(rows[k] + c * size_of(in), in, channels - c);
    put(to + c * size_of(out), out, with_silu ? silu(total) : total, channels - c);
  }
}

// Tokens [begin, end) of row `batch`: input(t) and output(t) are the addresses of a token's channels. `rows`: room for
// width + conv_tokens pointers.
template <Dtype in, Dtype out, class Input, class Output>
inline void convolve(int64_t batch, int64_t begin, int64_t end, int64_t channels, const Sight& sight,
                     const Input& input, const Output& output, const float* weight, int64_t padded, const float* bias,
                     bool with_silu, const char** rows) {
  const int64_t width = sight.back + 1 + sight.ahead, whole = channels / lanes * lanes;
  for (int64_t t = begin; t < end;) {
    if ((width == 4 || width == 7) && t + conv_tokens <= end && sight.all(batch, t)) {
      char* outs[conv_tokens];
      for (int64_t i = 0; i < width + conv_tokens - 1; ++i) rows[i] = input(t - sight.back + i);
      for (int64_t i = 0; i < conv_tokens; ++i) outs[i] = output(t + i);
      (width == 4 ? convolve_several<in, out, 4> : convolve_several<in, out, 7>)(rows, outs, whole, weight, padded,
                                                                                 bias, with_silu);
      if (whole < channels) {
        for (int64_t i = 0; i < width + conv_tokens - 1; ++i) rows[i] += whole * size_of(in);
        for (int64_t i = 0; i < conv_tokens; ++i)
          convolve_one(rows + i, in, outs[i] + whole * size_of(out), out, channels - whole, 0, width - 1,
                       weight + whole, padded, bias ? bias + whole : nullptr, with_silu);
      }
      t += conv_tokens;
    } else {
      int64_t first, last;
      sight.of(batch, t, first, last);
      const int64_t lowest = t - sight.back;
      for (int64_t i = first; i <= last; ++i) rows[i - lowest] = input(i);
      convolve_one(rows, in, output(t), out, channels, first - lowest, last - lowest, weight, padded, bias, with_silu);
      ++t;
    }
  }
}

// Floats of memory for a thread's pointers to rows.
inline int64_t conv_pointers(int64_t width) { return (2 * (width + conv_tokens) + lanes - 1) / lanes * lanes; }

inline int conv_threads(const Conv1d& call, int threads) {
  const int64_t worth = call.x.shape[0] * call.x.shape[1] * call.x.shape[2] / conv_least + 1;
  return worth < threads ? int(worth) : threads;
}

inline void conv1d(const Conv1d& call, int threads) {
  const int64_t batch = call.x.shape[0], seqlen = call.x.shape[1], channels = call.x.shape[2];
  if (batch * seqlen * channels == 0) return;
  threads = conv_threads(call, threads);
  const int64_t width = call.weight.shape[1], back = width - 1 - call.ahead, pointers = conv_pointers(width);
  Scratch memory(size_t(Taps::floats(call) + threads * pointers));
  const Taps taps(call, memory.data());
  const Sight sight{back, call.ahead, call.initial_state ? -back : 0, seqlen, call.starts};
  with_dtype(call.x.dtype, [&](auto dtype) {
    parallel_for(threads, batch * seqlen, [&](int64_t begin, int64_t end, int thread) {
      auto** rows = reinterpret_cast<const char**>(memory.data() + Taps::floats(call) + thread * pointers);
      for (int64_t row = begin / seqlen; row * seqlen < end; ++row) {
        const int64_t first = begin > row * seqlen ? begin - row * seqlen : 0;
        const int64_t last = end < (row + 1) * seqlen ? end - row * seqlen : seqlen;
        convolve<dtype.value, dtype.value>(
            row, first, last, channels, sight,
            [&](int64_t t) { return t < 0 ? call.initial_state.at(row, t + back) : call.x.at(row, t); },
            [&](int64_t t) { return call.out.at(row, t); }, taps.weight, taps.padded, taps.bias, call.silu, rows);
      }
    });
  });
}

// Of conv_tokens tokens: their gradients before the activation, grads [tokens][conv_block], and the sums of those times
// each tap's inputs and of themselves, which are added to sums [width + 1][conv_block].
template <Dtype dtype, int width>
inline void differentiate_several(const char* const* rows, const char* const* d_outs, int64_t channels,
                                  const Taps& taps, int64_t offset, bool with_silu, float* grads,
                                  float* sums) {
  const char *from[width + conv_tokens - 1], *d_out[conv_tokens];
  for (int i = 0; i < width + conv_tokens - 1; ++i) from[i] = rows[i];
  for (int t = 0; t < conv_tokens; ++t) d_out[t] = d_outs[t];
  for (int64_t c = 0; c < channels; c += lanes) {
    Floats inputs[width + conv_tokens - 1], d_taps[width] = {}, d_bias{};
#pragma GCC unroll 16
    for (int i = 0; i < width + conv_tokens - 1; ++i) inputs[i] = take<dtype>(from[i] + c * size_of(dtype));
#pragma GCC unroll 16
    for (int t = 0; t < conv_tokens; ++t) {
      Floats grad = take<dtype>(d_out[t] + c * size_of(dtype));
      if (with_silu) {
        Floats total = load(taps.bias + offset + c);
#pragma GCC unroll 16
        for (int k = 0; k < width; ++k) total += load(taps.weight + k * taps.padded + offset + c) * inputs[t + k];
        grad *= silu_slope(total);
      }
      store(grads + t * conv_block + c, grad);
#pragma GCC unroll 16
      for (int k = 0; k < width; ++k) d_taps[k] += grad * inputs[t + k];
      d_bias += grad;
    }
#pragma GCC unroll 16
    for (int k = 0; k < width; ++k) {
      float* sum = sums + k * conv_block + c;
      store(sum, load(sum) + d_taps[k]);
    }
    float* sum = sums + width * conv_block + c;
    store(sum, load(sum) + d_bias);
  }
}

// The same for one token, of any width and number of channels, and only its taps [first, last]; without sums if null.
inline void differentiate_one(const char* const* rows, const char* d_out, Dtype dtype, int64_t channels, int64_t first,
                              int64_t last, const Taps& taps, int64_t offset, bool with_silu, float* grads,
                              float* sums) {
  const int64_t size = size_of(dtype);
  for (int64_t c = 0; c < channels; c += lanes) {
    Floats grad = take(d_out + c * size, dtype, channels - c);
    if (with_silu) {
      Floats total = load(taps.bias + offset + c);
      for (int64_t k = first; k <= last; ++k)
        total += load(taps.weight + k * taps.padded + offset + c) * take(rows[k] + c * size, dtype, channels - c);
      grad *= silu_slope(total);
    }
    store(grads + c, grad);
    if (!sums) continue;
    for (int64_t k = first; k <= last; ++k) {
      float* sum = sums + k * conv_block + c;
      store(sum, load(sum) + grad * take(rows[k] + c * size, dtype, channels - c));
    }
    float* sum = sums + taps.width * conv_block + c;
    store(sum, load(sum) + grad);
  }
}

// A work item is a segment of tokens of a block of channels of a row. It needs the gradients before the activation of
// all tokens that see one of its own; those of its neighbours' tokens are recomputed, so items do not wait for another.
inline void conv1d_backward(const Conv1dBackward& call, int threads) {
  const Conv1d& forward = call.forward;
  const int64_t batch = forward.x.shape[0], seqlen = forward.x.shape[1], channels = forward.x.shape[2];
  const int64_t width = forward.weight.shape[1], ahead = forward.ahead, back = width - 1 - ahead;
  const int64_t segments = (seqlen + conv_segment - 1) / conv_segment;
  const int64_t blocks = (channels + conv_block - 1) / conv_block;
  const int64_t grad_rows = conv_segment + width - 1, pointers = conv_pointers(width);
  threads = conv_threads(forward, threads);
  const int64_t summed = (width + 1) * Taps::padded_channels(forward);
  const int64_t floats = summed + (width + 1 + grad_rows) * conv_block + pointers;
  Scratch memory(size_t(Taps::floats(forward) + width * Taps::padded_channels(forward) + threads * floats));
  const Taps taps(forward, memory.data());
  float* turned = memory.data() + Taps::floats(forward);  // taps in the other order: an input's gradient is made of them
  float* shares = turned + width * taps.padded;
  for (int thread = 0; thread < threads; ++thread)
    for (int64_t i = 0; i < summed; ++i) shares[thread * floats + i] = 0;
  for (int64_t k = 0; k < width; ++k)
    __builtin_memcpy(turned + k * taps.padded, taps.weight + (width - 1 - k) * taps.padded, size_t(taps.padded) * 4);

  const Sight inputs{back, ahead, forward.initial_state ? -back : 0, seqlen, forward.starts};
  const Sight outputs{ahead, back, 0, seqlen, forward.starts};
  with_dtype(forward.x.dtype, [&](auto of) {
    constexpr Dtype dtype = decltype(of)::value;
    parallel_for(threads, batch * blocks * segments, [&](int64_t begin, int64_t end, int thread) {
      float *totals = shares + thread * floats, *sums = totals + summed, *grads = sums + (width + 1) * conv_block;
      auto** rows = reinterpret_cast<const char**>(grads + grad_rows * conv_block);
      for (int64_t index = begin; index < end; ++index) {
        const int64_t row = index / (blocks * segments), block = index / segments % blocks, segment = index % segments;
        const int64_t offset = block * conv_block, left = channels - offset;
        const int64_t count = left < conv_block ? left : conv_block, whole = count / lanes * lanes;
        const int64_t first = segment * conv_segment;
        const int64_t last = first + conv_segment < seqlen ? first + conv_segment : seqlen;
        const int64_t seen_from = first - ahead, low = seen_from > 0 ? seen_from : 0;
        const int64_t high = last + back < seqlen ? last + back : seqlen;
        auto input = [&](int64_t t) {
          return t < 0 ? forward.initial_state.at(row, t + back, offset) : forward.x.at(row, t, offset);
        };
        for (int64_t i = 0; i < (width + 1) * conv_block; ++i) sums[i] = 0;
        auto grads_of = [&](int64_t t) { return grads + (t - seen_from) * conv_block; };
        for (int64_t t = low; t < high;) {
          if ((width == 4 || width == 7) && t >= first && t + conv_tokens <= last && inputs.all(row, t)) {
            const char* d_outs[conv_tokens];
            for (int64_t i = 0; i < width + conv_tokens - 1; ++i) rows[i] = input(t - back + i);
            for (int64_t i = 0; i < conv_tokens; ++i) d_outs[i] = forward.out.at(row, t + i, offset);
            (width == 4 ? differentiate_several<dtype, 4> : differentiate_several<dtype, 7>)(
                rows, d_outs, whole, taps, offset, forward.silu, grads_of(t), sums);
            if (whole < count)
              for (int64_t i = 0; i < conv_tokens; ++i) {
                for (int64_t k = 0; k < width; ++k) rows[k] = input(t - back + i + k) + whole * size_of(dtype);
                differentiate_one(rows, d_outs[i] + whole * size_of(dtype), dtype, count - whole, 0, width - 1, taps,
                                  offset + whole, forward.silu, grads_of(t + i) + whole, sums + whole);
              }
            t += conv_tokens;
          } else {
            int64_t from, to;
            inputs.of(row, t, from, to);
            for (int64_t i = from; i <= to; ++i) rows[i - t + back] = input(i);
            differentiate_one(rows, forward.out.at(row, t, offset), dtype, count, from - t + back, to - t + back, taps,
                              offset, forward.silu, grads_of(t), t >= first && t < last ? sums : nullptr);
            ++t;
          }
        }
        // the item's sums to the thread's: in two steps, so that rounding does not grow with the number of tokens
        for (int64_t k = 0; k <= width; ++k)
          for (int64_t c = 0; c < count; c += lanes) {
            float* total = totals + k * taps.padded + offset + c;
            store(total, load(total) + load(sums + k * conv_block + c));
          }
        const int64_t from = first == 0 && call.initial_state ? -back : first;
        convolve<Dtype::float32, dtype>(
            row, from, last, count, outputs,
            [&](int64_t t) { return reinterpret_cast<const char*>(grads_of(t)); },
            [&](int64_t t) {
              return t < 0 ? call.initial_state.at(row, t + back, offset) : call.x.at(row, t, offset);
            },
            turned + offset, taps.padded, nullptr, false, rows);
      }
    });
  });
  // the threads' sums together, in the order of the threads
  for (int64_t k = 0; k <= width; ++k)
    for (int64_t c = 0; c < channels; c += lanes) {
      Floats total{};
      for (int thread = 0; thread < threads; ++thread) total += load(shares + thread * floats + k * taps.padded + c);
      float wide[lanes];
      store(wide, total);
      const int64_t count = channels - c < lanes ? channels - c : lanes;
      if (k == width) {
        if (call.bias) write_row(call.bias.at(c), call.bias.dtype, wide, count);
      } else {
        for (int64_t i = 0; i < count; ++i) scalar_to(call.weight.at(c + i, k), call.weight.dtype, wide[i]);
      }
    }
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
