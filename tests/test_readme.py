"""README.md: its Python code runs, from top to bottom, and its commands exist."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, without those marked as not tested."""
    found = re.findall(rf"(<!-- not tested: .*? -->\n)?```{language}\n(.*?)```", README, flags=re.DOTALL)
    return [code for mark, code in found if not mark]


def test_python_blocks_run_one_after_another(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    python = blocks("python")
    assert len(python) >= 5
    names: dict[str, object] = {}
    for number, code in enumerate(python):
        exec(compile(code, f"README.md, Python block {number + 1}", "exec"), names)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", README))
    assert targets >= {"demo", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_recipes_that_commands_name_exist():
    commands = [shlex.split(line, comments=True) for line in "".join(blocks("sh")).splitlines()]
    recipes = [command[2] for command in commands if command[:2] == ["hf-ssm", "train"]]
    assert recipes
    for recipe in recipes:
        assert (ROOT / recipe).is_file(), recipe
