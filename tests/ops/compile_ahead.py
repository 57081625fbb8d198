"""Kernels compiled for GPUs that this machine does not have, from the calls that would launch them there.

A call is run on tensors of PyTorch's `meta` device, which have shapes but no memory, in a process where Triton does
not interpret; every launch in it is compiled for the target, with the block sizes, dtypes and alignments of that call,
and not run. As a program: `python tests/ops/compile_ahead.py test_triton_compiles:scan --target sm_90`.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Target:
    backend: str
    arch: int | str
    lanes: int  # of a warp
    shared: int  # bytes that a program may have
    registers: int = 255  # that a thread may have


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 512),
}


@dataclass
class Kernel:
    """A compiled kernel and what it uses."""

    name: str
    call: str
    target: str
    warps: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread's registers that are kept in memory, and arrays that did not fit into registers
    shared: int  # bytes
    instructions: dict[str, int] = field(default_factory=dict)  # of PTX or of AMD's assembler, by mnemonic

    def count(self, pattern: str) -> int:
        """How many instructions begin with the regular expression `pattern`."""
        return sum(number for name, number in self.instructions.items() if re.match(pattern, name))

    def __str__(self) -> str:
        kinds = (
            r"ld\.global|(global|buffer)_load",
            r"st\.global|(global|buffer)_store",
            r"ex2|v_exp",
            r"wgmma|mma|v_mfma",
        )
        loads, stores, exponentials, products = (self.count(kind) for kind in kinds)
        return (
            f"{self.target:7} {self.name:36} {self.warps} warps {self.registers:3} registers {self.spilled:4} spilled "
            f"{self.shared:6} shared; {loads} loads {stores} stores {exponentials} exp2 {products} mma   {self.call}"
        )


def compile_ahead(calls: Iterable[str], targets: Iterable[str] = TARGETS) -> list[Kernel]:
    """The kernels that `calls` launch, each "module:function" of a function without arguments, for every target."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    request = json.dumps([list(calls), list(targets)])
    done = subprocess.run(
        [sys.executable, __file__, "--json"], input=request, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [Kernel(**found) for found in json.loads(done.stdout)]


def _compile(calls: list[str], targets: list[str]) -> list[Kernel]:
    """In the process that compiles."""
    from triton.runtime import JITFunction, driver

    found: dict[tuple[str, str, str], Kernel] = {}
    here = {"call": "", "target": ""}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool = True, **options: Any) -> Any:
        compiled = run(self, *args, warmup=True, **options)
        kernel = _describe(compiled, **here)
        found.setdefault((kernel.target, kernel.call, compiled.hash), kernel)
        return compiled

    JITFunction.run = compile_only
    for target in targets:
        driver.set_active(_driver(target))
        for call in calls:
            here.update(call=call, target=target)
            _function(call)()
    return list(found.values())


def _function(call: str) -> Callable[[], Any]:
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(module), name)


def _driver(name: str) -> Any:
    """What Triton asks of a GPU's driver before it compiles."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    target = TARGETS[name]

    class Driver(DriverBase):
        is_active = classmethod(lambda cls: True)

        def get_current_device(self) -> str:
            return name  # Triton keeps what it has compiled by device

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(target.backend, target.arch, target.lanes)

        def get_active_torch_device(self) -> Any: ...
        def get_benchmarker(self) -> Any: ...
        def map_python_to_cpp_type(self, ty: str) -> str: ...

    return Driver()


def _describe(compiled: Any, call: str, target: str) -> Kernel:
    metadata = compiled.metadata
    assembler = compiled.asm["ptx" if TARGETS[target].backend == "cuda" else "amdgcn"]
    if TARGETS[target].backend == "cuda":
        usage = _cubin_usage(compiled.asm["cubin"])
        registers, spilled = usage["REG"], usage["STACK"] + usage["LOCAL"]
    else:
        registers = _amd_number(assembler, "vgpr_count")
        spilled = 4 * _amd_number(assembler, "vgpr_spill_count")
    instructions = Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)*)\b", assembler, re.MULTILINE))
    sizes = (metadata.num_warps, registers, spilled, metadata.shared)
    return Kernel(metadata.name, call, target, *sizes, dict(instructions))


def _cubin_usage(cubin: bytes) -> dict[str, int]:
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", text)}


def _amd_number(assembler: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", assembler)
    assert found, name
    return int(found[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the kernels of calls, and print what they use.")
    parser.add_argument("calls", nargs="*", metavar="module:function")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument(
        "--json", action="store_true", help="a request on standard input, the answer on standard output"
    )
    arguments = parser.parse_args()
    if arguments.json:
        output, sys.stdout = sys.stdout, sys.stderr
        json.dump([asdict(kernel) for kernel in _compile(*json.load(sys.stdin))], output)
    else:
        for kernel in compile_ahead(arguments.calls, arguments.target or TARGETS):
            print(kernel)
