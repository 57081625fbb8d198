"""What pyproject.toml and the constraint files say of the package."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned(file: str) -> dict[str, Version]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    """What the package and its tests need."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    found = map(Requirement, [*project["dependencies"], *extras["train"], *extras["peft"], *extras["test"]])
    return [requirement for requirement in found if requirement.name != "hf-ssm"]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_lower_bounds_are_the_versions_that_test_floor_runs(requirement):
    (bound,) = requirement.specifier
    assert bound.operator == ">="
    name = canonicalize_name(requirement.name)
    floor = pinned("constraints-floor.txt")[name]
    if name == "torch":
        assert floor in requirement.specifier
    else:
        lowest, length = Version(bound.version).release, len(Version(bound.version).release)
        assert floor.release[:length] == lowest and not any(floor.release[length:])
    assert pinned("constraints.txt")[name] in requirement.specifier


def test_every_folder_with_code_is_installed():
    folders = {
        path.parent.relative_to(ROOT) for room in ("hf_ssm", "modeling") for path in ROOT.glob(f"{room}/**/*.py")
    }
    names = {".".join(folder.parts) for folder in folders}
    names = {f"hf_ssm.{name}" if name.startswith("modeling") else name for name in names}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) >= names
