"""`tools/release`: builds the wheels and the source archive of a commit twice, compares and checks them."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from diskprefix.progress import Report
from tools.measuring.options import run_tool
from tools.releasing.environment import ROOT, ReleaseError, programs, run
from tools.releasing.image import make_image, require_image_programs

GLIBC = (2, 28)
"""The oldest glibc that the wheels run with: the same as for torch's wheels."""
LIBRARY = "diskprefix/native/_operators.so"
LICENCES = (
    "LICENSE",
    *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "diskprefix").rglob("vendored/LICENSE.*")),
)
"""The licences of the project and of the foreign scripts in pages."""
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_SECTION = re.compile(r"^## \[([^\]]+)\](.*)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
"""A version in the changelog: its number, the rest of its line, and what it says."""
CHANGES, BITS = "### What can change for you", "- Bits: "
"""What each version must say first: a heading, and below it a line on the bits that changed."""
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
"""A link to a file of the project, or a picture."""


@dataclass(frozen=True)
class Target:
    """A kind of CPU that wheels are made for, its compiler, the package of Debian that has it, and the variants of the
    operators."""

    machine: str
    compiler: str
    package: str
    variants: tuple[str, ...]

    @property
    def platform(self) -> str:
        return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{self.machine}"


TARGETS = (
    Target(
        "x86_64",
        "x86_64-linux-gnu-g++",
        "g++",
        ("amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "baseline"),
    ),
    Target("aarch64", "aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu", ("neon_i8mm", "neon_dot", "baseline")),
)


def released_version(folder: Path, tag: str = "") -> str:
    """Returns the version of the sources in `folder`. Raises `ReleaseError` if the changelog lacks this version, or
    does not say of each version what can change for its users. With a tag, raises it also if the tag names another
    version, if the changelog has no date for it, or if the first page says that the package is not published."""
    match = _VERSION.search(_text(folder / "diskprefix/version.py"))
    if match is None:
        raise ReleaseError("diskprefix/version.py has no line with __version__")
    version = match[1]
    dates = dates_of_versions(_text(folder / "CHANGELOG.md"))
    if version not in dates:
        raise ReleaseError(f"CHANGELOG.md has no section [{version}]")
    if tag:
        page = " ".join(_text(folder / "README.md").split())
        if tag != f"v{version}":
            raise ReleaseError(f"the tag is {tag}, but diskprefix/version.py says {version}")
        if not re.fullmatch(r" - \d{4}-\d\d-\d\d", dates[version]):
            raise ReleaseError(f"CHANGELOG.md has no date in the line of the section [{version}]")
        if "is not on PyPI" in page or "pip install diskprefix" not in page:
            raise ReleaseError("README.md does not say how to install the package from an index")
    return version


def dates_of_versions(changelog: str) -> dict[str, str]:
    """Returns what follows the number of each version in its heading. Raises `ReleaseError` if a version does not begin
    with what can change for its users, or does not say which bits changed. What is not released yet may lack that."""
    sections = _SECTION.findall(changelog)
    for version, _, body in sections:
        said = body.partition(f"{CHANGES}\n")[2].partition("\n### ")[0]
        lines = [line for line in said.splitlines() if line.startswith("- ")]
        if version != "Unreleased" and not any(len(line) > len(BITS) and line.startswith(BITS) for line in lines):
            raise ReleaseError(
                f"CHANGELOG.md: the section [{version}] has no heading {CHANGES!r} with a line that begins {BITS!r}"
            )
    return {version: rest for version, rest, _ in sections}


def give_address(sources: Path, address: str, commit: str) -> None:
    """Writes the project's address into the sources of a commit, also into the links of the first page, which an index
    shows alone."""

    def whole(link: re.Match[str]) -> str:
        return f"{link[1]}[{link[2]}]({address}/{'raw' if link[1] else 'blob'}/{commit}/{link[3]})"

    page, project = sources / "README.md", sources / "pyproject.toml"
    page.write_text(_LINK.sub(whole, _text(page)), encoding="utf-8")
    project.write_text(f'{_text(project)}\n[project.urls]\nSource = "{address}"\n', encoding="utf-8")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def export(commit: str, folder: Path) -> None:
    """Writes the files of a commit to a folder. Uncommitted changes are not released."""
    folder.mkdir(parents=True)
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=packed, check=True)


def build_archives(commit: str, work: Path, targets: tuple[Target, ...], address: str, say: Report) -> list[Path]:
    """Returns the source archive and the wheels of a commit. Wheels are made from the source archive."""
    bin_folder, made = programs(), work / "made"
    variables = {"SOURCE_DATE_EPOCH": run("git", "-C", ROOT, "log", "-1", "--format=%ct", commit).strip()}
    hatchling = (bin_folder / "python", "-P", "-m", "hatchling", "build", "--directory", made)
    export(commit, work / "sources")
    if address:
        give_address(work / "sources", address, commit)
    run(*hatchling, "--target", "sdist", folder=work / "sources", variables=variables)
    (archive,) = made.glob("*.tar.gz")
    archives = [archive]
    for target in targets:
        say(f"compiling the operators for {target.machine}")
        folder = work / target.machine
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (sources,) = folder.iterdir()
        chosen = {"CXX": target.compiler, "_PYTHON_HOST_PLATFORM": target.platform, "DISKPREFIX_VARIANTS": "all"}
        run(*hatchling, "--target", "wheel", folder=sources, variables=variables | chosen)
        wheels = list(made.glob(f"*-{target.platform}.whl"))
        if not wheels:
            raise ReleaseError(f"the operators were not compiled for {target.machine} with {target.compiler}")
        archives.append(wheels[0])
    return archives


def oldest_system(report: str) -> tuple[int, int]:
    """Returns the oldest glibc that a wheel runs with, from the report of `auditwheel show`."""
    match = re.search(r'platform\s+tag:\s+"manylinux_(\d+)_(\d+)_', report)
    if match is None:
        raise ReleaseError("auditwheel knows no platform for the wheel: " + " ".join(report.split())[:300])
    return int(match[1]), int(match[2])


def check_wheel(wheel: Path, version: str, target: Target, work: Path) -> None:
    """Raises `ReleaseError` if a wheel needs a newer system than its name says, lacks a part, or its operators cannot
    be loaded here without a compiler."""
    if oldest_system(run(programs() / "auditwheel", "show", wheel)) > GLIBC:
        raise ReleaseError(f"{wheel.name} needs a newer system than its name says; `auditwheel show` lists the symbols")
    check_parts(wheel, version, target)
    if target.machine == platform.machine():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work)
        script = "from diskprefix.native import library; assert library.planes(); print(library.described())"
        # Without PATH there is no compiler.
        said = run(sys.executable, "-P", "-c", script, variables={"PYTHONPATH": str(work), "PATH": ""}).strip()
        if not said.startswith("native"):
            raise ReleaseError(f"the operators of {wheel.name} are not used: {said}")


def check_parts(wheel: Path, version: str, target: Target) -> None:
    """Raises `ReleaseError` if a wheel lacks a part or a variant of the operators, is of another version, or lists
    another library than it has."""
    info = f"diskprefix-{version}.dist-info"
    bill, parts = f"{info}/sboms/diskprefix.cdx.json", ("diskprefix/presets/", "diskprefix/service_units/", LIBRARY)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wanted = (*parts, bill, f"{info}/METADATA", *(f"{info}/licenses/{name}" for name in LICENCES))
        absent = [part for part in wanted if not any(name.startswith(part) for name in names)]
        if absent:
            raise ReleaseError(f"{wheel.name} lacks {', '.join(absent)}")
        [listed] = [part for part in json.loads(archive.read(bill))["components"] if part["name"] == LIBRARY]
        library = archive.read(LIBRARY)
    if listed["hashes"][0]["content"] != hashlib.sha256(library).hexdigest():
        raise ReleaseError(f"the list of parts in {wheel.name} has another digest of {LIBRARY}")
    # A compiler that is too old for a variant leaves it out.
    left_out = [name for name in target.variants if symbol(name) not in library]
    if left_out:
        raise ReleaseError(f"{wheel.name} lacks the operators for {', '.join(left_out)}; {target.compiler} is too old")


def symbol(variant: str) -> bytes:
    """Returns the symbol of a variant's table in the library: the mangled `diskprefix::VARIANT`."""
    return f"_ZN10diskprefix{len(variant)}{variant}E\0".encode()


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="diskprefix-release-") as name:
        yield Path(name)


def _chosen(machines: tuple[str, ...]) -> tuple[Target, ...]:
    chosen = tuple(target for target in TARGETS if not machines or target.machine in machines)
    for target in chosen:
        if shutil.which(target.compiler) is None:
            raise ReleaseError(f"{target.compiler} is not installed; Debian has it in the package {target.package}")
    return chosen


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--folder", type=click.Path(path_type=Path), default=ROOT / "dist", help="Where the files are written.  [dist]"
)
@click.option("--commit", default="HEAD", show_default=True, help="The commit to build.")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    type=click.Choice([target.machine for target in TARGETS]),
    help="Only these wheels.",
)
@click.option("--tag", default="", help="Build the commit of this tag, and check that it is ready to be published.")
@click.option("--address", default="", help="The project's address, for an index and for the links of the first page.")
@click.option("--once", is_flag=True, help="Build once, without comparing two builds.")
@click.option("--image", "with_image", is_flag=True, help="Also make an OCI image of the wheel for this machine's CPU.")
def main(
    folder: Path, commit: str, machines: tuple[str, ...], tag: str, address: str, once: bool, with_image: bool
) -> None:
    """Build the wheels and the source archive of a commit, and check them.

    Each wheel holds the operators, compiled for every kind of x86_64 or aarch64 CPU, and needs no compiler where it is
    installed. auditwheel checks that it needs no newer system than its name says. Everything is built twice, in two
    folders, and must be the same to the byte. Debian's cross compilers are needed. It takes about four minutes.

    With --tag, the version must be that of the tag, its section of the changelog must have a date, and the first page
    must say how to install the package from an index.

    With --image, a new Debian root with the wheel becomes an image for containers, which `podman load` takes. That
    needs root, and Debian's packages mmdebstrap and umoci, but no daemon and no registry.

    \b
    Exit codes: 0 done; 1 something cannot be released; 2 wrong usage.
    """

    def say(text: str) -> None:
        click.echo(f"release: {text}", err=True)

    targets = _chosen(machines)
    of_image = [index for index, target in enumerate(targets) if with_image and target.machine == platform.machine()]
    if with_image:
        require_image_programs()
        if not of_image:
            raise ReleaseError(f"--image needs the wheel for {platform.machine()}")
    named = f"refs/tags/{tag}" if tag else commit
    commit = run("git", "-C", ROOT, "rev-parse", "--verify", f"{named}^{{commit}}").strip()
    with _workplace() as work:
        export(commit, work / "sources")
        version = released_version(work / "sources", tag)
        say("building, the first of two times" if not once else "building")
        archives = build_archives(commit, work / "one", targets, address, say)
        if not once:
            say("building again, in another folder")
            others = build_archives(commit, work / "another", targets, address, say)
            again = {path.name: digest_of(path) for path in others}
            parted = [path.name for path in archives if again.get(path.name) != digest_of(path)]
            if parted:
                raise ReleaseError(f"two builds differ: {', '.join(parted)}")
        for target, wheel in zip(targets, archives[1:], strict=True):
            say(f"checking {wheel.name}")
            check_wheel(wheel, version, target, work / f"checked-{target.machine}")
        for index in of_image:
            say("making the image")
            made_at = run("git", "-C", ROOT, "log", "-1", "--format=%ct", commit).strip()
            (work / "image").mkdir()
            wheel = archives[1 + index]
            archives.append(make_image(wheel, version, targets[index].machine, work / "image", made_at))
        folder.mkdir(parents=True, exist_ok=True)
        written = [Path(shutil.copy2(path, folder)) for path in archives]
    sums = "".join(f"{digest_of(path)}  {path.name}\n" for path in written)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    for path in written:
        click.echo(f"{path.stat().st_size / 1e6:8.2f} MB  {digest_of(path)}  {path.name}")
    say(f"version {version}" + ("" if tag else "; without --tag, so this is a trial"))


if __name__ == "__main__":
    run_tool(main, "tools/release")
