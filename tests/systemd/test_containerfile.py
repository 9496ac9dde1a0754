"""The container file: what can be said of it without building it. There is no builder in CI."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KNOWN = {
    *("FROM", "RUN", "COPY", "WORKDIR", "ARG", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}


@pytest.fixture
def stages() -> list[list[tuple[str, str]]]:
    """Each stage as pairs of instruction and arguments; lines that go on are joined."""
    text = (ROOT / "systemd/Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, joined.split("\n"))):
        instruction, _, arguments = line.partition(" ")
        assert instruction in KNOWN, line
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, arguments.strip()))
    return found


def said(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [arguments for name, arguments in stage if name == instruction]


def test_what_runs_is_not_root_and_has_one_volume(stages: list[list[tuple[str, str]]]) -> None:
    last = stages[-1]
    names = [name for name, _ in last]
    (user,) = said(last, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that a cluster can see that it is not root"
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :], "nothing is installed as that user"
    assert said(last, "VOLUME") == ["/var/cache/diskprefix"]


def test_all_that_is_written_goes_to_the_volume(stages: list[list[tuple[str, str]]]) -> None:
    (environment,) = said(stages[-1], "ENV")
    values = dict(pair.split("=", 1) for pair in environment.split())
    # diskprefix adds its own name to XDG_CACHE_HOME.
    assert f"{values['XDG_CACHE_HOME']}/diskprefix" == "/var/cache/diskprefix"
    assert all(values[name].startswith("/var/cache/diskprefix/") for name in ("HF_HOME", "PIP_CACHE_DIR"))
    assert values["PYTHONDONTWRITEBYTECODE"] == "1"


def test_what_is_copied_exists_and_the_compiler_stays_behind(stages: list[list[tuple[str, str]]]) -> None:
    build, last = stages
    sources = [source for line in said(build, "COPY") for source in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for needed in (*packaged["packages"], *packaged["force-include"]):
        assert any(Path(needed).is_relative_to(source) for source in sources), f"{needed} goes into the package"
    assert any("g++" in line for line in said(build, "RUN"))
    assert not any("apt-get" in line for line in said(last, "RUN"))
    assert said(last, "COPY") == ["--from=build /opt/diskprefix /opt/diskprefix"]


def test_signals_reach_the_daemon(stages: list[list[tuple[str, str]]]) -> None:
    """In the form of a shell command, the shell would get them."""
    last = stages[-1]
    assert json.loads(said(last, "ENTRYPOINT")[0]) + json.loads(said(last, "CMD")[0]) == ["diskprefix", "serve"]
    assert said(last, "STOPSIGNAL") == ["SIGTERM"]
    (health,) = said(last, "HEALTHCHECK")
    assert json.loads(health[health.index("[") :])[0] == "python"
