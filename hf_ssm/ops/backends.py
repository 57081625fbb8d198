"""Which backend runs an operator, and why.

Every operator file ends in a table of `Backend` rows, fastest first. `choose` takes the first row that is installed,
runs on the tensors' device and does not refuse the call; a backend asked for by name is taken or refused, never
replaced. Where measurements on such a device found another row the fastest, `preferences.json` beside this file names
it and their source, and it is tried first.

Three ways to ask, the innermost wins: `HF_SSM_BACKEND=torch` in the environment (read at import),
`with use_backend("torch"):`, and an operator's `backend="torch"` argument. Packages bring kernels for some operators
only, so several names can be given, `HF_SSM_BACKEND=mamba_ssm,causal_conv1d`: an operator takes the first it knows.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from typing import Any

import torch


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot run on this machine."""


class UnsupportedByBackend(ValueError):
    """A backend was asked for by name and cannot run this call; the message says what it lacks."""


@dataclass(frozen=True)
class Call:
    """What a backend must be able to do for one call; only plain values, so that torch.compile can treat a choice as
    a constant. `traits` holds what is particular to an operator, for example `("width", 4)`."""

    operator: str
    device: str
    dtype: torch.dtype
    traits: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, trait: str) -> Any:
        return dict(self.traits)[trait]


@dataclass(frozen=True)
class Backend:
    """One row of an operator's table."""

    name: str
    impl: str  # "module:function", imported when it is first chosen
    needs: str | tuple[str, ...] = ()  # packages that must be installed
    missing: Callable[[], str | None] = lambda: None  # what else this machine must have and has not, in words
    devices: tuple[str, ...] | None = None  # device types, or None for all
    lacks: Callable[[Call], str | None] = lambda call: None  # what this kernel cannot do of a call, in words
    automatic: bool = True  # False: only when asked for by name

    def obstacle(self) -> str | None:
        """Why this backend cannot run on this machine at all, or None."""
        for package in (self.needs,) if isinstance(self.needs, str) else self.needs:
            if not _installed(package):
                return f"{package} is not installed"
        if (missing := self.missing()) is not None:
            return missing
        if self.devices is not None and not any(_device_present(device) for device in self.devices):
            return f"runs on {' or '.join(self.devices)}, which this machine does not have"
        return None

    def refusal(self, call: Call) -> str | None:
        """Why this backend cannot run this call, or None."""
        if self.devices is not None and call.device not in self.devices:
            return f"runs on {' or '.join(self.devices)}, the tensors are on {call.device}"
        return self.lacks(call)


OPERATORS: dict[str, tuple[Backend, ...]] = {}  # filled by `register`, in the order in which operators are imported

# Implementations that have been chosen once. A dict for each operator: torch.compile reads one once per trace, and
# would not see what another operator's first choice adds to it.
_LOADED: dict[str, dict[str, Callable[..., Any]]] = {}

_MINOR: set[str] = set()

PREFERENCES_FILE = Path(__file__).with_name("preferences.json")


@dataclass(frozen=True)
class Preference:
    """An entry of preferences.json, which scripts/bench_gpu.py writes: on devices of this architecture the backend is
    asked before all others of its operator, for calls of one token (decoding steps) or for those of several."""

    operator: str
    architecture: str
    backend: str
    one_token: bool
    because: str  # by how much, and where the measurements are


_forced: tuple[str, ...] = tuple(
    name.strip() for name in os.environ.get("HF_SSM_BACKEND", "").split(",") if name.strip()
)


def register(operator: str, *rows: Backend, minor: bool = False) -> None:
    """Enter an operator's backends, in order of preference.

    `minor`: an operator that no package is asked for: where none of the forced names is its own, it chooses freely.
    """
    OPERATORS[operator] = rows
    _LOADED[operator] = {}
    if minor:
        _MINOR.add(operator)


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Run every operator inside the block on the first of the backends `names` that it has.

    ValueError for a name that no operator has. An operator that has none of them, or whose one cannot run the call,
    raises when it is called.
    """
    global _forced
    if not names:
        raise ValueError("use_backend: name at least one backend")
    _check_names(names)
    before, _forced = _forced, names
    try:
        yield
    finally:
        _forced = before


def allows(name: str) -> bool:
    """Whether backend `name` may run without `choose` being asked: none is forced, or it before all others."""
    return not _forced or _forced[0] == name


def choose(call: Call, backend: str | None = None) -> Callable[..., Any]:
    """The implementation that runs `call`: of `backend` if given, else of the forced one, else the first that can.

    Raises ValueError for a name that no operator has, BackendUnavailable or UnsupportedByBackend if the backend asked
    for cannot run on this machine or cannot run this call.
    """
    traits = tuple(
        (name, index(value)) for name, value in call.traits
    )  # index: fixed, where torch.compile lets it vary
    names = (backend,) if backend else _forced
    impl = _choose_impl(call.operator, call.device, call.dtype, traits, names, backend is None)
    return _LOADED[call.operator][impl]


@torch.compiler.assume_constant_result
def _choose_impl(
    operator: str, device: str, dtype: torch.dtype, traits: tuple, names: tuple[str, ...], forced: bool = False
) -> str:
    """The `impl` of the row chosen, which is in `_LOADED[operator]` afterwards."""
    impl = _choose_row(operator, device, dtype, traits, names, forced).impl
    if impl not in _LOADED[operator]:
        module, _, function = impl.partition(":")
        _LOADED[operator][impl] = getattr(importlib.import_module(module), function)
    return impl


@cache
def _choose_row(
    operator: str, device: str, dtype: torch.dtype, traits: tuple, names: tuple[str, ...], forced: bool
) -> Backend:
    """`forced`: the names are meant for every operator, not for this call."""
    call = Call(operator, device, dtype, traits)
    rows = OPERATORS[operator]
    _check_names(names)
    row = _asked_for(rows, names)
    if names and not (row is None and forced and operator in _MINOR):
        if row is None:
            known = ", ".join(row.name for row in rows)
            raise BackendUnavailable(f"{operator} has no backend {' or '.join(map(repr, names))}; it has {known}")
        if (obstacle := row.obstacle()) is not None:
            raise BackendUnavailable(f"{operator}: backend {row.name!r} {_as_clause(obstacle)}")
        if (refusal := row.refusal(call)) is not None:
            raise UnsupportedByBackend(f"{operator}[{row.name}]: {refusal}")
        return row
    for row in _in_order(operator, device, bool(dict(traits).get("one_token"))):
        if row.automatic and row.obstacle() is None and row.refusal(call) is None:
            return row
    reasons = "; ".join(f"{row.name}: {row.obstacle() or row.refusal(call)}" for row in rows if row.automatic)
    raise BackendUnavailable(f"no backend can run {operator} here: {reasons}")


def backend_report() -> list[dict[str, Any]]:
    """One entry per operator and backend: `operator`, `backend`, `available`, `reason`, and `chosen`, which says
    whether an ordinary call (float32, no packing, no initial state) on this machine's best device takes it."""
    device = next(device for device in ("cuda", "xpu", "mps", "cpu") if _device_present(device))
    report = []
    for operator, rows in OPERATORS.items():
        chosen, first = False, f"first that runs on {device}"
        forced = _asked_for(rows, _forced)
        free = not _forced or (forced is None and operator in _MINOR)
        preferred = {
            preference.backend: f"{'one token' if one_token else 'measured'}: {preference.because}"
            for one_token in (True, False)
            for preference in _preferences(operator, device, one_token)
        }
        for row in _in_order(operator, device, one_token=False):
            obstacle = row.obstacle()
            runs_here = row.devices is None or device in row.devices
            takes = obstacle is None and runs_here and (row.automatic if free else row is forced)
            reason = obstacle or (f"forced: {row.name}" if row is forced else None)
            if reason is None and not row.automatic:
                reason = "only when asked for by name"
            report.append(
                {
                    "operator": operator,
                    "backend": row.name,
                    "available": obstacle is None,
                    "reason": reason or preferred.get(row.name) or (first if takes and not chosen else "available"),
                    "chosen": takes and not chosen,
                }
            )
            chosen = chosen or takes
    return report


def explain() -> None:
    """Print which backend each operator uses on this machine, and why the others are not used."""
    report = backend_report()
    width = {key: max(len(str(row[key])) for row in report) for key in ("operator", "backend")}
    for row in report:
        mark = "->" if row["chosen"] else "  "
        print(f"{mark} {row['operator']:{width['operator']}}  {row['backend']:{width['backend']}}  {row['reason']}")


def architecture(device: str) -> str:
    """What measurements on one device of a type hold for: "sm_90", "gfx942"; for others than GPUs the type itself."""
    if device != "cuda" or not _device_present(device):
        return device
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = getattr(properties, "gcnArchName", "")
    return name.partition(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


@cache
def _all_preferences() -> tuple[Preference, ...]:
    return tuple(Preference(**entry) for entry in json.loads(PREFERENCES_FILE.read_text(encoding="utf-8")))


def _preferences(operator: str, device: str, one_token: bool) -> list[Preference]:
    wanted = operator, architecture(device), one_token
    return [each for each in _all_preferences() if (each.operator, each.architecture, each.one_token) == wanted]


def _in_order(operator: str, device: str, one_token: bool) -> list[Backend]:
    """An operator's rows, those that measurements prefer before the others."""
    preferred = [preference.backend for preference in _preferences(operator, device, one_token)]
    return sorted(OPERATORS[operator], key=lambda row: row.name not in preferred)


def _asked_for(rows: tuple[Backend, ...], names: tuple[str, ...]) -> Backend | None:
    """The row of the first of `names` that has one."""
    return next((row for name in names for row in rows if row.name == name), None)


def _check_names(names: tuple[str, ...]) -> None:
    known = list(dict.fromkeys(row.name for rows in OPERATORS.values() for row in rows))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(known)}")


def _as_clause(obstacle: str) -> str:
    return obstacle if obstacle.startswith("runs on") else f"cannot be used: {obstacle}"


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@cache
def _device_present(device: str) -> bool:
    if device == "cpu":
        return True
    module = getattr(torch, device, None) if device != "mps" else torch.backends.mps
    return bool(module is not None and module.is_available())
