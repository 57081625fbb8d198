"""Mamba: a selective state-space model in every layer. arXiv:2312.00752, section 3.4 and figure 3.

b batch   l seqlen   d d_inner   r time_step_rank   n d_state
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
from hf_ssm.layers import CausalConv1d, Linear, log_uniform_time_step_bias
from hf_ssm.ops import selective_scan
from hf_ssm.ops.discretize import decay_rates

from .configuration_mamba import MambaConfig


class MambaMixer(nn.Module):
    """in_proj -> causal convolution -> selective scan with dt, B, C computed from its input -> gate -> out_proj."""

    def __init__(self, config: MambaConfig):
        super().__init__()
        d_inner, d_state, rank = config.intermediate_size, config.state_size, config.time_step_rank
        self.in_proj = Linear(config.hidden_size, 2 * d_inner, bias=config.use_bias)
        self.conv1d = CausalConv1d(d_inner, config.conv_kernel, bias=config.use_conv_bias)
        self.x_proj = Linear(d_inner, rank + 2 * d_state, bias=False)
        self.dt_proj = Linear(rank, d_inner, bias=True)
        self.dt_proj.projects_time_step = True  # type: ignore[assignment]
        self.A_log = nn.Parameter(torch.empty(d_inner, d_state))
        self.D = nn.Parameter(torch.empty(d_inner))
        self.out_proj = Linear(d_inner, config.hidden_size, bias=config.use_bias)
        self.out_proj.writes_to_residual = True  # type: ignore[assignment]
        self.x_proj_sizes = [rank, d_state, d_state]
        self.conv_state_shape = (config.conv_kernel, d_inner)
        self.ssm_state_shape = (d_inner, d_state)

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
        x, z = self.in_proj(u).chunk(2, dim=-1)
        y, *states = self.mix(x, z, conv_state, ssm_state, seq_idx, mask)
        if record is not None:
            record(partial(self.states_after, x, conv_state, ssm_state, seq_idx, mask))
        return self.out_proj(y), *states

    def mix(self, x, z, conv_state, ssm_state, seq_idx, mask) -> tuple[Tensor, Tensor, Tensor]:
        """x (b, l, d), z (b, l, d) or None -> the gated output of the scan (b, l, d) and both states."""
        x, conv_state = self.conv1d(x, conv_state, seq_idx, mask)
        dt, B, C = self.x_proj(x).split_with_sizes(self.x_proj_sizes, dim=-1)
        y, ssm_state = selective_scan(
            x,
            self.dt_proj(dt),
            decay_rates(self.A_log),
            B,
            C,
            self.D,
            z,
            dt_softplus=True,
            initial_state=ssm_state,
            seq_idx=seq_idx,
            mask=mask,
        )
        return y, conv_state, ssm_state

    def states_after(self, x, conv_state, ssm_state, seq_idx, mask, tokens: int) -> tuple[Tensor, Tensor]:
        """The states after the first `tokens` tokens of a call."""
        x, seq_idx, mask = (None if t is None else t[:, :tokens] for t in (x, seq_idx, mask))
        _, conv_state, ssm_state = self.mix(x, None, conv_state, ssm_state, seq_idx, mask)
        return conv_state, ssm_state


class MambaPreTrainedModel(SSMDecoderPreTrainedModel):
    config_class = MambaConfig
    _keep_in_fp32_modules_strict = ["A_log"]  # they set decay rates: an error grows with the length

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if getattr(module, "projects_time_step", False):
            bound = config.time_step_scale * config.time_step_rank**-0.5
            if config.time_step_init_scheme == "constant":
                init.constant_(module.weight, bound)
            else:
                init.uniform_(module.weight, -bound, bound)
            time_steps = config.time_step_min, config.time_step_max, config.time_step_floor
            init.copy_(module.bias, log_uniform_time_step_bias(module.out_features, *time_steps))
            return
        super()._init_weights(module)
        if isinstance(module, MambaMixer):
            d_inner, d_state = module.A_log.shape
            init.copy_(module.A_log, torch.arange(1, d_state + 1, dtype=torch.float32).log().expand(d_inner, d_state))
            init.ones_(module.D)


class MambaModel(SSMModel, MambaPreTrainedModel):
    """The backbone, without a head."""

    @staticmethod
    def make_mixer(config: MambaConfig) -> nn.Module:
        return MambaMixer(config)


class MambaForCausalLM(SSMForCausalLM, MambaPreTrainedModel, GenerationMixin):
    """The language model."""

    model_class = MambaModel


class MambaForSequenceClassification(SSMForSequenceClassification, MambaPreTrainedModel):
    """One label per row, read off its last real token."""

    model_class = MambaModel


class MambaForTokenClassification(SSMForTokenClassification, MambaPreTrainedModel):
    """One label per token."""

    model_class = MambaModel


__all__ = [
    "MambaForCausalLM",
    "MambaForSequenceClassification",
    "MambaForTokenClassification",
    "MambaModel",
    "MambaPreTrainedModel",
]
