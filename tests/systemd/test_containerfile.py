"""The container file: what can be said without building it. The workflow `release` builds and starts the image."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KNOWN = {
    *("ARG", "FROM", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


@pytest.fixture
def steps() -> list[tuple[str, str]]:
    """Pairs of instruction and arguments; lines that go on are joined."""
    text = (ROOT / "systemd/Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, joined.split("\n"))):
        instruction, _, arguments = line.partition(" ")
        assert instruction in KNOWN, line
        found.append((instruction, arguments.strip()))
    return found


def said(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    return [arguments for name, arguments in steps if name == instruction]


def test_what_runs_is_not_root_and_has_one_volume(steps: list[tuple[str, str]]) -> None:
    names = [name for name, _ in steps]
    (user,) = said(steps, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that a cluster can see that it is not root"
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :], "nothing is installed as that user"
    assert said(steps, "VOLUME") == ["/var/cache/diskprefix"]


def test_all_that_is_written_goes_to_the_volume(steps: list[tuple[str, str]]) -> None:
    (environment,) = said(steps, "ENV")
    values = dict(pair.split("=", 1) for pair in environment.split())
    # diskprefix adds its own name to XDG_CACHE_HOME.
    assert f"{values['XDG_CACHE_HOME']}/diskprefix" == "/var/cache/diskprefix"
    assert all(values[name].startswith("/var/cache/diskprefix/") for name in ("HF_HOME", "PIP_CACHE_DIR"))
    assert values["PYTHONDONTWRITEBYTECODE"] == "1"


def test_a_wheel_is_installed_and_nothing_compiled(steps: list[tuple[str, str]]) -> None:
    base, wheel = said(steps, "ARG")[0], said(steps, "RUN")[0]
    assert base.startswith("BASE=")
    assert said(steps, "FROM") == ["${BASE}"], "the workflow gives a digest"
    (constraints,) = re.findall(r"source=(\S+\.txt),target=(\S+)", wheel)
    assert (ROOT / constraints[0]).exists()
    assert f" --constraint {constraints[1]} /mnt/dist/*_" in wheel
    assert not any("apt-get" in line for line in said(steps, "RUN"))


def test_signals_reach_the_daemon(steps: list[tuple[str, str]]) -> None:
    """In the form of a shell command, the shell would get them."""
    assert json.loads(said(steps, "ENTRYPOINT")[0]) + json.loads(said(steps, "CMD")[0]) == ["diskprefix", "serve"]
    assert said(steps, "STOPSIGNAL") == ["SIGTERM"]
    (health,) = said(steps, "HEALTHCHECK")
    assert json.loads(health[health.index("[") :])[0] == "python"
