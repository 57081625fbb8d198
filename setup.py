"""Builds the native CPU kernels into the package; everything else is in pyproject.toml.

The kernels are one source, compiled once for every instruction set of the processor's family; which of them runs is
decided when they are loaded. Without a C++ compiler the package is built without them and runs on its `torch` backend.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("hf_ssm/ops/cpu/src")
FLAGS = [
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-missing-field-initializers"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"),  # of GCC's own intrinsics
]
INSTRUCTION_SETS = {"plain": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    INSTRUCTION_SETS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512")
    ]


class build_native(build_ext):
    def build_extension(self, ext: Extension) -> None:
        extra = os.environ.get("HF_SSM_CXXFLAGS", "").split()  # for the sanitizers
        ext.extra_compile_args = FLAGS + extra
        ext.extra_link_args = extra
        for name, flags in INSTRUCTION_SETS.items():
            ext.extra_objects += self.compiler.compile(
                [str(SOURCES / "kernels.cpp")],
                output_dir=os.path.join(self.build_temp, name),
                macros=[("HF_SSM_ISA", name)],
                extra_postargs=FLAGS + flags + extra,
                depends=ext.depends,
            )
        super().build_extension(ext)


native = Extension(
    "hf_ssm.ops.cpu._native",
    sources=[str(SOURCES / name) for name in ("module.cpp", "parallel.cpp")],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    language="c++",
    optional=True,
)

setup(
    ext_modules=[] if sys.platform == "win32" else [native],
    cmdclass={"build_ext": build_native},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
