"""What pages and messages tell a reader to install exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from diskprefix.runtime.imports import INSTALL

ROOT = Path(__file__).parent.parent
_INSTALLED = re.compile(r"pip install[^\n`]*?(diskprefix|\.)\[([\w,]+)\]")


def lines() -> Iterator[tuple[str, re.Match[str]]]:
    """Yields what is installed with extras, with the file that says so."""
    for folder in ("diskprefix", "policies", "systemd", "tools", "."):
        pattern = "*" if folder == "." else "**/*"
        for path in sorted((ROOT / folder).glob(pattern)):
            if path.suffix in (".md", ".py", ".toml"):
                for found in _INSTALLED.finditer(path.read_text(encoding="utf-8")):
                    yield str(path.relative_to(ROOT)), found


def test_extras_that_pages_and_messages_name_exist_and_the_package_is_taken_from_where_it_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    is_on_index = "is not on PyPI" not in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = list(lines())
    assert {"README.md", "diskprefix/daemon/chat/README.md"} <= {name for name, _ in found}
    for name, line in found:
        assert set(line[2].split(",")) <= set(project["optional-dependencies"]), f"{name}: {line[0]}"
        assert line[1] == "." or is_on_index, f"{name}: {line[0]}"


def test_a_plain_installation_has_neither_torch_nor_transformers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {Requirement(line).name for line in project["dependencies"]}
    framework = {Requirement(line).name for line in project["optional-dependencies"]["transformers"]}
    assert framework == {"torch", "transformers", "accelerate"}
    assert names.isdisjoint(framework)
    bounds = {
        Requirement(line).name: Requirement(line).specifier for line in project["optional-dependencies"]["transformers"]
    }
    installed = [Requirement(word) for word in shlex.split(INSTALL.partition("install ")[2])]
    assert {one.name for one in installed} == framework
    for one in installed:
        assert {str(part) for part in one.specifier} == {str(part) for part in bounds[one.name] if part.operator == "<"}
    assert "pip" in names, "it fetches the embedded model, and environments of uv and pipx need not have it"
