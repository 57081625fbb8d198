"""State-space models as real Hugging Face models. Importing this package registers them with the Auto classes."""

from typing import Any

from hf_ssm import registry

__version__ = "0.1.0"

registry.register()

_LAZY = {"RecurrentCache": "hf_ssm.cache", "ops": "hf_ssm.ops"}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "ops":
        return importlib.import_module("hf_ssm.ops")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    return registry.load(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *registry.class_names()])
