"""`tools/fresh-machine`: a machine with nothing but Python, from the install to the first reply."""

from __future__ import annotations

import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import click

from diskprefix.folders import cache_home
from diskprefix.version import __version__
from tools.measuring.options import run_tool
from tools.measuring.processes import free_port
from tools.releasing.debian_root import DebianRoot, make_archive, require_programs
from tools.releasing.environment import ROOT, ReleaseError, run

_LIMIT_S = 900.0
_PROMPT = "Name three colours."


def first_reply(port: int, daemon: Popen[bytes], log: Path) -> str:
    """Returns the reply to a question that is asked until somebody listens. Raises `ReleaseError` if nobody does."""
    body = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    ends_at = time.monotonic() + _LIMIT_S
    while daemon.poll() is None and time.monotonic() < ends_at:
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            raise ReleaseError(f"the daemon refused the request: {error}") from None
        except (ConnectionError, urllib.error.URLError):
            time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
    raise ReleaseError(f"the daemon does not answer; it said: {said[-1]}")


class Times:
    """The commands that were typed, and the seconds that each took."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float]] = []

    @contextmanager
    def taken(self, typed: str, until: str) -> Iterator[None]:
        click.echo(f"fresh-machine: {typed or until}", err=True)
        begun = time.monotonic()
        yield
        self.rows.append((typed, until, time.monotonic() - begun))

    def table(self) -> str:
        lines = ["| typed | until | seconds, or MB on disk |", "| --- | --- | --- |"]
        lines += [
            f"| {f'`{typed}`' if typed else ''} | {until} | {seconds:.1f} |" for typed, until, seconds in self.rows
        ]
        return "\n".join(lines)


def installed_mb(folder: Path) -> float:
    """Returns the room that the files below a folder take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 1e6


def try_wheel(root: DebianRoot, times: Times, log: Path, *, is_full: bool) -> None:
    """Installs the wheel, serves, kills the daemon and serves again, as a user types it. `is_full`: with torch and
    transformers."""
    port = free_port()
    variables = {
        "PIP_FIND_LINKS": " ".join(filter(None, [os.environ.get("PIP_FIND_LINKS"), "/wheels"])),
        "DISKPREFIX_PORT": str(port),
    }
    extras, serve = "[transformers]" if is_full else "", "diskprefix serve"
    install = f"pipx install 'diskprefix{extras}=={__version__}'"
    with times.taken(install, "it is installed"):
        root.call(install, variables, log)
    times.rows.append(("", "what is installed takes, MB", installed_mb(root.folder / "root/.local")))
    replies = []
    for until in ("first reply; the model is fetched once", "first reply after `kill -9`"):
        with times.taken(serve, until):
            daemon = root.start(serve, variables, log)
            try:
                replies.append(first_reply(port, daemon, log))
            except BaseException:
                daemon.kill()
                raise
        daemon.kill()
        daemon.wait()
    if replies[0] != replies[1] or not replies[0]:
        raise ReleaseError(f"the restarted daemon replied {replies[1]!r}, not {replies[0]!r}")
    root.call("! command -v c++ g++ clang++ && diskprefix --version", variables, log)
    version = log.read_text(encoding="utf-8", errors="replace")
    if "kernels: compiled;" not in version:
        raise ReleaseError("the wheel's compiled operators are not used: " + version.strip().splitlines()[-1])


def try_clone(root: DebianRoot, times: Times, log: Path, commands: tuple[str, ...]) -> None:
    """Runs the commands that the first page names, in a clone of this project, which needs a compiler."""
    run("git", "clone", "--quiet", ROOT, root.folder / "root/clone")
    install = "apt-get update && apt-get install --yes --no-install-recommends g++"
    root.call(install, {"DEBIAN_FRONTEND": "noninteractive"}, log)
    for command in commands:
        with times.taken(command, "its end, in a clone"):
            root.call(f"cd clone && {command}", {}, log)


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=ROOT / "dist",
    help="The folder that tools/release wrote.  [dist]",
)
@click.option("--suite", default="bookworm", show_default=True, help="The release of Debian.")
@click.option("--archive", type=click.Path(path_type=Path), help="The root as a tar file; made if it is not there.")
@click.option("--full", is_flag=True, help="Install torch and transformers too.")
@click.option("--clone", is_flag=True, help="Then install g++, and run tools/demo in a clone.")
@click.option("--tests", is_flag=True, help="Then install g++, and run tools/test in a clone.")
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    default=Path("fresh-machine.log"),
    help="A file for the output of the commands.",
)
def main(wheels: Path, suite: str, archive: Path | None, full: bool, clone: bool, tests: bool, log: Path) -> None:
    """Install the built wheel on a machine with nothing but Python, and time it to the first reply.

    The machine is a new Debian root made by mmdebstrap: Python, pipx, certificates, no compiler. It has this machine's
    network and pip's settings. The daemon is killed and started again; it must reply the same, with the compiled
    operators. Needs root and a folder for temporary files with 3 GB. The table goes to standard output.

    \b
    Exit codes: 0 done; 1 something failed; 2 wrong usage.
    """
    require_programs()
    archive = archive or cache_home() / "release" / f"{suite}.tar"
    times = Times()
    if not archive.exists():
        click.echo(f"fresh-machine: making a root of Debian {suite}; this is done once", err=True)
        make_archive(archive, suite)
    log.write_bytes(b"")
    linked = [Path(name) for name in os.environ.get("PIP_FIND_LINKS", "").split() if name.startswith("/")]
    mounts = {wheels: "/wheels", **{path: str(path) for path in linked}}
    with tempfile.TemporaryDirectory(prefix="diskprefix-fresh-") as work:
        root = DebianRoot(archive, Path(work, "root"), mounts)
        try:
            try_wheel(root, times, log, is_full=full)
            commands = ("tools/demo",) * clone + ("tools/test",) * tests
            if commands:
                try_clone(root, times, log, commands)
        finally:
            click.echo(times.table())


if __name__ == "__main__":
    run_tool(main, "tools/fresh-machine")
