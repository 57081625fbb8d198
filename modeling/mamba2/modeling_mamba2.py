"""Mamba-2: state space duality in every layer. arXiv:2405.21060, section 7 and figure 6.

b batch   l seqlen   h nheads   p headdim   g ngroups   n d_state
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin

from hf_ssm.decoder import (
    Replay,
    SSMDecoderPreTrainedModel,
    SSMForCausalLM,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMModel,
)
from hf_ssm.layers import CausalConv1d, GatedRMSNorm, Linear, log_uniform_time_step_bias
from hf_ssm.ops import ssd
from hf_ssm.ops.discretize import decay_rates

from .configuration_mamba2 import Mamba2Config


class Mamba2Mixer(nn.Module):
    """in_proj -> z, (x, B, C), dt; causal convolution of (x, B, C) -> SSD -> gated norm -> out_proj."""

    def __init__(self, config: Mamba2Config):
        super().__init__()
        d_inner, bc_size = config.intermediate_size, config.n_groups * config.state_size
        self.head_dim, self.ngroups, self.chunk_size = config.head_dim, config.n_groups, config.chunk_size
        self.dt_limit = (float(config.time_step_limit[0]), float(config.time_step_limit[1]))
        self.in_proj_sizes = [d_inner, d_inner + 2 * bc_size, config.num_heads]
        self.xBC_sizes = [d_inner, bc_size, bc_size]
        self.in_proj = Linear(config.hidden_size, sum(self.in_proj_sizes), bias=config.use_bias)
        self.conv1d = CausalConv1d(d_inner + 2 * bc_size, config.conv_kernel, bias=config.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.D = nn.Parameter(torch.empty(d_inner if config.D_per_channel else config.num_heads))
        self.norm = (
            GatedRMSNorm(
                d_inner,
                d_inner // config.n_groups,
                config.layer_norm_epsilon,
                norm_before_gate=config.norm_before_gate,
            )
            if config.use_gated_norm
            else None
        )
        self.out_proj = Linear(d_inner, config.hidden_size, bias=config.use_bias)
        self.out_proj.writes_to_residual = True  # type: ignore[assignment]
        self.conv_state_shape = (config.conv_kernel, d_inner + 2 * bc_size)
        self.ssm_state_shape = (config.num_heads, config.head_dim, config.state_size)

    def forward(
        self,
        u: Tensor,
        conv_state: Tensor | None = None,
        ssm_state: Tensor | None = None,
        *,
        seq_idx: Tensor | None = None,
        mask: Tensor | None = None,
        record: Callable[[Replay], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u (b, l, hidden_size) and the states before -> the same after; see `hf_ssm.decoder`."""
        z, xBC, dt = self.in_proj(u).split_with_sizes(self.in_proj_sizes, dim=-1)
        gate = z if self.norm is None else None
        y, *states = self.mix(xBC, dt, gate, conv_state, ssm_state, seq_idx, mask)
        if record is not None:
            record(partial(self.states_after, xBC, dt, conv_state, ssm_state, seq_idx, mask))
        if self.norm is not None:
            y = self.norm(y, z)
        return self.out_proj(y), *states

    def mix(self, xBC, dt, z, conv_state, ssm_state, seq_idx, mask) -> tuple[Tensor, Tensor, Tensor]:
        """xBC (b, l, h p + 2 g n), dt (b, l, h), z (b, l, h p) or None -> the scan's output (b, l, h p) and states."""
        xBC, conv_state = self.conv1d(xBC, conv_state, seq_idx, mask)
        x, B, C = xBC.split_with_sizes(self.xBC_sizes, dim=-1)
        y, ssm_state = ssd(
            x.unflatten(-1, (-1, self.head_dim)),
            dt,
            decay_rates(self.A_log),
            B.unflatten(-1, (self.ngroups, -1)),
            C.unflatten(-1, (self.ngroups, -1)),
            self.D if self.D.shape == self.A_log.shape else self.D.view(-1, self.head_dim),
            None if z is None else z.unflatten(-1, (-1, self.head_dim)),
            self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            chunk_size=self.chunk_size,
            initial_state=ssm_state,
            seq_idx=seq_idx,
            mask=mask,
        )
        return y.flatten(2), conv_state, ssm_state

    def states_after(self, xBC, dt, conv_state, ssm_state, seq_idx, mask, tokens: int) -> tuple[Tensor, Tensor]:
        """The states after the first `tokens` tokens of a call."""
        xBC, dt, seq_idx, mask = (None if t is None else t[:, :tokens] for t in (xBC, dt, seq_idx, mask))
        _, conv_state, ssm_state = self.mix(xBC, dt, None, conv_state, ssm_state, seq_idx, mask)
        return conv_state, ssm_state


class Mamba2PreTrainedModel(SSMDecoderPreTrainedModel):
    config_class = Mamba2Config
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # they set decay rates: an error grows with the length

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Mamba2Mixer):
            nheads = module.A_log.shape[0]
            decay = torch.empty(nheads).uniform_(self.config.A_init_min, self.config.A_init_max)
            init.copy_(module.A_log, decay.log())
            init.ones_(module.D)
            time_steps = self.config.time_step_min, self.config.time_step_max, self.config.time_step_floor
            init.copy_(module.dt_bias, log_uniform_time_step_bias(nheads, *time_steps))


class Mamba2Model(SSMModel, Mamba2PreTrainedModel):
    """The backbone, without a head."""

    @staticmethod
    def make_mixer(config: Mamba2Config) -> nn.Module:
        return Mamba2Mixer(config)


class Mamba2ForCausalLM(SSMForCausalLM, Mamba2PreTrainedModel, GenerationMixin):
    """The language model."""

    model_class = Mamba2Model


class Mamba2ForSequenceClassification(SSMForSequenceClassification, Mamba2PreTrainedModel):
    """One label per row, read off its last real token."""

    model_class = Mamba2Model


class Mamba2ForTokenClassification(SSMForTokenClassification, Mamba2PreTrainedModel):
    """One label per token."""

    model_class = Mamba2Model


__all__ = [
    "Mamba2ForCausalLM",
    "Mamba2ForSequenceClassification",
    "Mamba2ForTokenClassification",
    "Mamba2Model",
    "Mamba2PreTrainedModel",
]
