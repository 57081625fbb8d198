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

__version__ = "0.1.0"

_CACHES = (
    "HybridMambaAttentionDynamicCache",
    "HybridMambaAttentionStaticCache",
    "RecurrentCache",
    "RecurrentStaticCache",
)

registry.register()


def __getattr__(name: str) -> Any:
    """Everything public is imported when it is first asked for: it needs much more of transformers than we do."""
    if name == "ops":
        return importlib.import_module("hf_ssm.ops")
    if name in _CACHES:
        return getattr(importlib.import_module("hf_ssm.cache"), name)
    return registry.load(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_CACHES, "ops", *registry.class_names()])
