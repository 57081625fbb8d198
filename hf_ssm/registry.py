"""The one table of architectures, and their entry into transformers' Auto classes.

Importing hf_ssm must stay cheap, and transformers loads its own modules only when they are asked for. So the classes
are registered when transformers' Auto modules are loaded: at once if they are already, else right after their import.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """`config` and `models` name classes in configuration_X.py and modeling_X.py of `hf_ssm.modeling.X`."""

    config: str
    models: dict[str, str]  # Auto class -> model class
    image_processor: str | None = None  # a class of transformers, whose variant on PIL has the suffix Pil

    @property
    def classes(self) -> tuple[str, ...]:
        return (self.config, *self.models.values())


def _decoder(name: str) -> Architecture:
    return Architecture(
        config=f"{name}Config",
        models={
            "AutoModel": f"{name}Model",
            "AutoModelForCausalLM": f"{name}ForCausalLM",
            "AutoModelForSequenceClassification": f"{name}ForSequenceClassification",
            "AutoModelForTokenClassification": f"{name}ForTokenClassification",
        },
    )


_HYDRA_HEADS = (
    "MaskedLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MultipleChoice",
    "ImageClassification",
)
ARCHITECTURES = {  # model_type -> its classes
    "mamba": _decoder("Mamba"),
    "mamba2": _decoder("Mamba2"),
    "hydra": Architecture(
        config="HydraConfig",
        models={"AutoModel": "HydraModel"} | {f"AutoModelFor{head}": f"HydraFor{head}" for head in _HYDRA_HEADS},
        image_processor="ViTImageProcessor",
    ),
    "hymba": _decoder("Hymba"),
}


def load(name: str) -> Any:
    """The configuration or model class of that name; AttributeError if no architecture has one."""
    for model_type, architecture in ARCHITECTURES.items():
        if name in architecture.classes:
            kind = "configuration" if name == architecture.config else "modeling"
            return getattr(importlib.import_module(f"hf_ssm.modeling.{model_type}.{kind}_{model_type}"), name)
    raise AttributeError(f"module 'hf_ssm' has no attribute {name!r}")


def class_names() -> list[str]:
    return [name for architecture in ARCHITECTURES.values() for name in architecture.classes]


def _register_configurations() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    for model_type, architecture in ARCHITECTURES.items():
        AutoConfig.register(model_type, load(architecture.config), exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto import modeling_auto

    for architecture in ARCHITECTURES.values():
        for auto_class, model in architecture.models.items():
            mapping = getattr(modeling_auto, auto_class)._model_mapping
            if not isinstance(mapping._extra_content, _LoadedOnAccess):
                mapping._extra_content = _LoadedOnAccess(mapping._extra_content)
            mapping.register(load(architecture.config), _ClassName(model), exist_ok=True)


def _register_image_processors() -> None:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    for architecture in ARCHITECTURES.values():
        name = architecture.image_processor
        if name is not None:  # by name, so that what a backend needs is imported when it is chosen
            backends = {"torchvision": name, "pil": f"{name}Pil"}
            IMAGE_PROCESSOR_MAPPING.register(load(architecture.config), backends, exist_ok=True)


class _ClassName(str):
    """A class of ours, not imported yet: model code needs much of transformers, which may be half loaded by now."""

    def resolve(self) -> Any:
        return load(self)


class _LoadedOnAccess(dict):
    """What is registered with an Auto class: like a dict, but a `_ClassName` comes out as the class."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        return value.resolve() if isinstance(value, _ClassName) else value

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def values(self) -> list[Any]:  # type: ignore[override]
        return [self[key] for key in self]

    def items(self) -> list[tuple[Any, Any]]:  # type: ignore[override]
        return [(key, self[key]) for key in self]


def _let_peft_adapt_every_projection() -> None:
    """peft refuses LoRA on `out_proj` by model type, because other implementations hand its weight to a fused kernel.
    Ours calls every projection as a module, so its rule does not apply; it still does to all other models."""
    tuners_utils = sys.modules["peft.tuners.tuners_utils"]
    refuse = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if refuse is None:
        return

    def check(peft_config: Any, model: Any, target_name: str) -> None:
        ours = type(model).__module__.startswith("hf_ssm.") or any(
            base.__module__ == "hf_ssm.pretrained" for base in type(model).__mro__
        )
        if ours and target_name == "conv1d":
            raise ValueError("conv1d: its weight goes to an operator, which would not see an adapter: leave it out")
        if not (ours and target_name == "out_proj"):
            refuse(peft_config, model, target_name)

    tuners_utils._check_lora_target_modules_mamba = check  # type: ignore[attr-defined]


_AFTER_IMPORT: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_configurations,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.image_processing_auto": _register_image_processors,
    "peft.tuners.tuners_utils": _let_peft_adapt_every_projection,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Runs an action of `_AFTER_IMPORT` right after its module has been imported, and is otherwise not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _AFTER_IMPORT[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], None]):
        self.loader, self.action = loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.action()


def register() -> None:
    """Make the Auto classes build our models for our model types, now or when transformers loads them."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, action in _AFTER_IMPORT.items():
        if name in sys.modules:
            action()
