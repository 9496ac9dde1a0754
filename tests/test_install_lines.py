"""What pages and messages tell a reader to install exists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

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
    assert {"README.md", "diskprefix/chat/README.md"} <= {name for name, _ in found}
    for name, line in found:
        assert set(line[2].split(",")) <= set(project["optional-dependencies"]), f"{name}: {line[0]}"
        assert line[1] == "." or is_on_index, f"{name}: {line[0]}"
