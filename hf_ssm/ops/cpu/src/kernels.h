// The kernels that are compiled once for every instruction set, and what each is given.
#pragma once
#include "tensor.h"

namespace hf_ssm {

// Tokens between the states that a forward pass keeps for its backward pass.
constexpr int64_t checkpoint_tokens = 64;

// Mamba-1's scan; shapes as in hf_ssm.ops.selective_scan, B and C with their group axis.
struct SelectiveScan {
  Tensor x, dt, A, B, C, D, z, dt_bias;
  bool dt_softplus;
  Tensor starts;         // (batch, seqlen) bool: the state restarts at this token
  Tensor initial_state;  // (batch, d_inner, d_state) float32
  Tensor out;
  Tensor final_state;  // (batch, d_inner, d_state) float32
  Tensor checkpoints;  // (batch, tiles, d_state, d_inner) float32: the state before each tile of tokens
};

struct SelectiveScanBackward {
  SelectiveScan forward;  // out, final_state: their gradients; checkpoints as the forward pass left them
  Tensor x, dt, B, C, z;  // gradients, each in the dtype of what it belongs to
  Tensor A;               // (batch, d_state, d_inner) float32: to be summed over the batch, as the next two
  Tensor D, dt_bias;      // (batch, d_inner) float32
  Tensor initial_state;   // (batch, d_inner, d_state) float32
};

// out = x weight^T + bias; x (rows, in), weight (out, in) with its rows' elements one behind the other, out (rows, out).
struct Linear {
  Tensor x, weight, bias, out;
};

// out = -exp(A_log), both contiguous, out in float32.
struct DecayRates {
  int64_t count;
  Tensor A_log, out;
};

// A short depthwise convolution; token t sees the inputs t - (width - 1 - ahead) ... t + ahead. Channels of x,
// initial_state and out lie one behind the other.
struct Conv1d {
  Tensor x, weight, bias;
  Tensor initial_state;  // (batch, width - 1 - ahead, channels) in x's dtype: the inputs before x
  Tensor starts;         // (batch, seqlen) bool: a sequence of its own begins at this token
  bool silu;
  int64_t ahead;
  Tensor out;
};

struct Conv1dBackward {
  Conv1d forward;                         // out: its gradient
  Tensor x, weight, bias, initial_state;  // gradients, each in the dtype of what it belongs to
};

// Tokens between the states that `Ssd` keeps for its backward pass, which recomputes those in between.
constexpr int64_t ssd_checkpoint_tokens = 256;

// What a scan of Mamba-2's kind reads; shapes as in hf_ssm.ops.ssd.
struct SsdScan {
  Tensor x, dt, A, B, C, dt_bias;
  bool dt_softplus;
  float dt_min, dt_max;
  Tensor starts;  // (batch, seqlen) bool: the state restarts at this token
};

// Mamba-2's scan.
struct Ssd {
  SsdScan scan;
  Tensor D;              // (nheads,) or (nheads, headdim)
  Tensor z;              // (batch, seqlen, nheads, headdim)
  Tensor initial_state;  // (batch, nheads, headdim, d_state) float32
  Tensor out;            // (batch, seqlen, nheads, headdim)
  Tensor final_state;    // (batch, nheads, headdim, d_state) float32
  Tensor checkpoints;    // (batch, count, nheads, d_state, headdim) float32: the states before every
};                       // ssd_checkpoint_tokens tokens, without the first

// Gradients of what an SsdScan reads, but for x.
struct SsdScanGradients {
  Tensor dt, B, C;    // each in the dtype of what it belongs to
  Tensor A, dt_bias;  // (batch, nheads) float32, added to
};

struct SsdBackward {
  Ssd forward;  // out, final_state: their gradients; checkpoints as the forward pass left them
  SsdScanGradients scan;
  Tensor x, z;           // gradients in the dtype of what they belong to
  Tensor D;              // (batch, nheads, headdim) float32, added to
  Tensor initial_state;  // (batch, nheads, headdim, d_state) float32
};

// Hydra's mixer: two scans with the same x, A and starts, whose dt are step sizes.
struct Quasiseparable {
  SsdScan forward, backward;
  Tensor diagonal;        // (batch, seqlen, nheads)
  Tensor out;             // (batch, seqlen, nheads, headdim)
  Tensor before, behind;  // checkpoints as in Ssd, of the backward direction in the order it passes them
};

struct QuasiseparableBackward {
  Quasiseparable forward;  // out: its gradient; before, behind as the forward pass left them
  Tensor x, diagonal;      // gradients in the dtype of what they belong to
  SsdScanGradients scan_forward, scan_backward;  // one A for both
};

// RMS norm of rows in groups of channels, with or without a gate; every tensor in its own dtype, channels one behind the
// other.
struct RmsNorm {
  Tensor x, weight, gate;  // (..., channels), (channels,), (..., channels)
  int64_t group_size;
  bool norm_before_gate;
  float eps;
  Tensor out;
};

struct RmsNormBackward {
  RmsNorm forward;         // out: its gradient
  Tensor x, weight, gate;  // gradients, each in the dtype of what it belongs to
};

struct Kernels {
  const char* name;
  int lanes;
  void (*selective_scan)(const SelectiveScan&, int threads);
  void (*selective_scan_backward)(const SelectiveScanBackward&, int threads);
  void (*linear)(const Linear&, int threads);
  void (*decay_rates)(const DecayRates&, int threads);
  void (*conv1d)(const Conv1d&, int threads);
  void (*conv1d_backward)(const Conv1dBackward&, int threads);
  void (*ssd)(const Ssd&, int threads);
  void (*ssd_backward)(const SsdBackward&, int threads);
  void (*quasiseparable)(const Quasiseparable&, int threads);
  void (*quasiseparable_backward)(const QuasiseparableBackward&, int threads);
  void (*rms_norm)(const RmsNorm&, int threads);
  void (*rms_norm_backward)(const RmsNormBackward&, int threads);
};

extern const Kernels kernels_plain;  // what every machine of this architecture has
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace hf_ssm
