"""State-space models as real Hugging Face models. Importing this package registers them with the Auto classes."""

import importlib
from typing import TYPE_CHECKING, Any

from hf_ssm import registry

if TYPE_CHECKING:  # what `__getattr__` finds, for editors and type checkers
    from hf_ssm import ops as ops
    from hf_ssm.cache import HybridMambaAttentionDynamicCache as HybridMambaAttentionDynamicCache
    from hf_ssm.cache import HybridMambaAttentionStaticCache as HybridMambaAttentionStaticCache
    from hf_ssm.cache import RecurrentCache as RecurrentCache
    from hf_ssm.cache import RecurrentStaticCache as RecurrentStaticCache
    from hf_ssm.modeling.hydra.configuration_hydra import *  # noqa: F403
    from hf_ssm.modeling.hydra.modeling_hydra import *  # noqa: F403
    from hf_ssm.modeling.hymba.configuration_hymba import *  # noqa: F403
    from hf_ssm.modeling.hymba.modeling_hymba import *  # noqa: F403
    from hf_ssm.modeling.mamba.configuration_mamba import *  # noqa: F403
    from hf_ssm.modeling.mamba.modeling_mamba import *  # noqa: F403
    from hf_ssm.modeling.mamba2.configuration_mamba2 import *  # noqa: F403
    from hf_ssm.modeling.mamba2.modeling_mamba2 import *  # noqa: F403
    from hf_ssm.state_files import load_cache as load_cache
    from hf_ssm.state_files import prefill as prefill
    from hf_ssm.state_files import save_cache as save_cache

__version__ = "0.1.0"

_HOMES = {  # of what is public beside models and their configurations
    "HybridMambaAttentionDynamicCache": "hf_ssm.cache",
    "HybridMambaAttentionStaticCache": "hf_ssm.cache",
    "RecurrentCache": "hf_ssm.cache",
    "RecurrentStaticCache": "hf_ssm.cache",
    "load_cache": "hf_ssm.state_files",
    "prefill": "hf_ssm.state_files",
    "save_cache": "hf_ssm.state_files",
}

registry.register()


def __getattr__(name: str) -> Any:
    """Everything public is imported when it is first asked for: it needs much more of transformers than we do."""
    if name == "ops":
        return importlib.import_module("hf_ssm.ops")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    return registry.load(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "ops", *registry.class_names()])
