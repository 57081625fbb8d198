// Mamba-2's scan, backward: chunk by chunk in small matrix products, as in section 6 of arXiv:2405.21060. What forward
// did not keep is recomputed.
#pragma once
#include "ssd.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

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
  const int64_t channels;  // a multiple of `lanes`
  SsdDecays decays;
  float* B[ssd_chunks];                    // [padded_states][tokens], of every chunk of the segment
  float* C;                                // [padded_states][tokens]
  float *scores, *d_scores;                // [q][k]: C[q] . B[k], the same for all heads of a group
  float *d_B, *d_C;                        // [padded_states][tokens], summed over the heads
  float *decay, *attention, *d_attention;  // [q][k]
  float *x, *d_x, *y, *d_y, *scaled;       // [tokens][channels]
  float *x_transposed, *d_y_transposed;    // [channels][tokens]
  float* states;                           // [heads][ssd_chunks][padded_states][channels]: those that enter the chunks
  float* row;                              // [channels]

  static int64_t floats(const SsdShape& shape, int64_t heads) {
    const int64_t channels = round_up(shape.channels, lanes);
    return (ssd_chunks + 1) * shape.padded_states * ssd_row + 5 * ssd_tile * ssd_row + 5 * ssd_tile * channels +
           2 * channels * ssd_row + heads * ssd_chunks * shape.padded_states * channels + round_up(channels, 16);
  }

  SsdChunk(const SsdShape& shape, int64_t heads, float* memory) : channels(round_up(shape.channels, lanes)) {
    auto take = [&memory](int64_t count) {
      float* part = memory;
      memory += count;
      return part;
    };
    for (float*& B_of_chunk : B) B_of_chunk = take(shape.padded_states * ssd_row);
    C = take(shape.padded_states * ssd_row);
    for (float** matrix : {&scores, &d_scores, &decay, &attention, &d_attention}) *matrix = take(ssd_tile * ssd_row);
    for (float** rows : {&x, &d_x, &y, &d_y, &scaled}) *rows = take(ssd_tile * channels);
    for (float** rows : {&x_transposed, &d_y_transposed}) *rows = take(channels * ssd_row);
    states = take(heads * ssd_chunks * shape.padded_states * channels);
    row = take(round_up(channels, 16));
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
// the first. The work items are heads.
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
        chunk_size_(SsdChunk::floats(shape_, run_)),
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
        SsdChunk chunk(shape_, run_, memory_.data() + thread * thread_size_);
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
