"""The checks of `diskprefix doctor` that look at the machine: Python, torch, kernels, folder, disk, port, clock."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from diskprefix.cli.about import installed
from diskprefix.cli.tooling import existing_folder
from diskprefix.errors import CacheError, NotReady, SettingsError, StoreCorrupt, StoreFormatError
from diskprefix.extras.daemon_call import running_daemon
from diskprefix.printable import shown
from diskprefix.settings import Settings
from diskprefix.store.folder import DATA, check_folder, disk_full
from diskprefix.store.savings import total_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.units import format_size

Level: TypeAlias = Literal["ok", "note", "problem", "skipped"]

_VOLATILE, _REMOTE = {"tmpfs", "ramfs"}, {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"}
_FIRST_TIME = 1_735_689_600.0
"""The first second of 2025. An earlier clock is wrong: there was no release yet."""
_ROWS, _INNER, _OUTER = 32, 256, 192
_FILE_BYTES = 64 << 20
_MOST_WRITING_S = 0.15
_MOST_READING_S = 0.1
_CONTENT_BYTES = 4 << 20
"""The bytes of one read or write."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` says what to do about it, and is empty if there is nothing to do. `table` has
    bytes by what takes them.

    `level`: `ok`, `note` (it works, and could be better), `problem` (it does not work) or `skipped` (not checked).
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    table: tuple[tuple[str, int], ...] = ()


def python_findings() -> Iterator[Finding]:
    yield Finding("python", "ok", f"Python {platform.python_version()}")
    missing = [name for name in ("torch", "transformers", "tokenizers", "lmdb", "numpy") if installed(name) is None]
    if missing:
        yield Finding(
            "packages", "problem", f"not installed: {', '.join(missing)}", "install diskprefix again with pip"
        )


def torch_findings(settings: Settings) -> Iterator[Finding]:
    """Yields torch's build and instruction sets, and whether a product depends on the rows beside it."""
    import torch

    from diskprefix.model.exact.rows import linear
    from diskprefix.model.load.loader import pick_device
    from diskprefix.native.library import Unavailable, choose, described

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    kind = next((name for name, version in builds.items() if version), "CPU")
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"torch {torch.__version__} ({kind} build), {capability}, {torch.get_num_threads()} threads"
    is_old = capability in ("DEFAULT", "NO AVX") and platform.machine() in ("x86_64", "AMD64")
    advice = "this CPU has no AVX2: computing is slow" if is_old else ""
    yield Finding("torch", "note" if is_old else "ok", text, advice)
    if (kind := pick_device(settings.device).type) != "cpu":
        text = f"on {kind} models are computed plainly: exact in steps of one grid, one sequence a step"
        yield Finding(
            "accelerator", "note", text, "--device cpu is exact at every token; vLLM serves many users on GPUs"
        )
    try:
        choose(settings.kernels)
        names = described()
    except Unavailable as error:
        yield Finding("kernels", "problem", str(error), "give another --kernels")
        return
    is_native = names.startswith("native")
    cure = "leave --kernels out" if settings.kernels == "torch" else "install a C++ compiler, then diskprefix again"
    advice = "" if is_native else f"{cure}, to be exact at every token, and faster"
    yield Finding("kernels", "ok" if is_native else "note", f"computed by {names}", advice)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, _INNER, generator=generator).to(torch.bfloat16)
    weight = torch.randn(_OUTER, _INNER, generator=generator).to(torch.bfloat16)
    whole = linear(rows, weight)
    differ = [n for n in (1, 2, 3, 7, 16) if not torch.equal(linear(rows[:n], weight), whole[:n])]
    if differ:
        text = f"the bits of a row depend on the number of rows in a product ({', '.join(map(str, differ))})"
        yield Finding(
            "batch invariance",
            "note",
            text,
            "prefixes are restored at the ends of blocks only; another torch or CPU may do better",
        )
    else:
        yield Finding("batch invariance", "ok", "a row of a product has the same bits in any batch")


def folder_findings(settings: Settings) -> Iterator[Finding]:
    """Yields the findings about the folder's rights, its file system and the free space."""
    folder = settings.kv_cache_dir
    place = existing_folder(folder)
    try:
        check_folder(folder)
    except CacheError as error:
        yield Finding("folder", "problem", error.message, "see the message")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding(
            "folder",
            "problem",
            f"{place} cannot be written",
            "give another --kv-cache-dir, or change its owner",
        )
        return
    yield Finding("folder", "ok", f"{folder}{'' if place == folder else ' will be created'}")
    kind = _file_system(place)
    if kind in _VOLATILE | _REMOTE:
        is_volatile = kind in _VOLATILE
        why = "the store is lost at the next boot" if is_volatile else "the store's file is not safe on a network"
        where = "disk" if is_volatile else "local disk"
        yield Finding("file system", "problem", f"{kind}: {why}", f"give a --kv-cache-dir on a {where}")
    else:
        yield Finding("file system", "ok", kind or "not known")
    yield _space_finding(settings, place)


def _space_finding(settings: Settings, place: Path) -> Finding:
    disk = os.statvfs(place)
    free, file = disk.f_bavail * disk.f_frsize, settings.kv_cache_dir / DATA
    own = file.stat().st_size if file.is_file() else 0
    usable = free + own - settings.kv_cache_min_free
    text = f"{format_size(free)} free, budget {format_size(settings.kv_cache_budget)}"
    if usable <= 0:
        why = disk_full(settings.kv_cache_dir, settings.kv_cache_min_free)
        return Finding("space", "problem", text, f"nothing can be saved: {why}")
    if usable < settings.kv_cache_budget:
        return Finding(
            "space", "note", text, f"the store stays below {format_size(usable)}, because of --kv-cache-min-free"
        )
    return Finding("space", "ok", text)


def store_findings(settings: Settings) -> Iterator[Finding]:
    """Yields the findings about the store's content, the clock and the speed of the disk."""
    folder = settings.kv_cache_dir
    prefill_s_per_byte, newest = None, 0.0
    if not (folder / DATA).is_file():
        yield Finding("store", "ok", "no store yet; the first request creates it")
    else:
        try:
            store = Store(folder, read_only=True)
        except (CacheError, SettingsError) as error:
            # Others say what to do: a store whose key is missing must stay where it is.
            is_damaged = isinstance(error, StoreCorrupt | StoreFormatError)
            advice = "move the file away, or let `diskprefix serve` move it aside and begin an empty store"
            yield Finding("store", "problem", error.message, advice if is_damaged else "")
            return
        try:
            with store.snapshot() as snapshot:
                counts = snapshot.counts()
                saved = total_savings(snapshot).total.saved_s
                text = f"{counts['entries']:,} saved prompts in {format_size(snapshot.used_bytes())}"
                yield Finding("store", "ok", f"{text}; {saved:,.0f} s of computing saved until now")
                newest = _newest_use(snapshot)
                prefill_s_per_byte = _prefill_s_per_byte(snapshot)
        except CacheError as error:
            yield Finding("store", "problem", error.message, "diskprefix verify --fix")
        finally:
            store.close()
    yield _clock_finding(time.time(), newest)
    yield _speed_finding(existing_folder(folder), prefill_s_per_byte)


def _newest_use(snapshot: Snapshot) -> float:
    records = snapshot.usages().records
    return float(records["last_used"].max()) if len(records) else 0.0


def _clock_finding(now: float, newest: float) -> Finding:
    """Compares the clock with the last use of the store, `newest`."""
    if now < _FIRST_TIME:
        return Finding("clock", "problem", "the clock is years behind", "set the time (NTP)")
    if newest > now + 60:
        return Finding(
            "clock",
            "note",
            "the last use of the store is in the future",
            "set the time (NTP): ages decide what is evicted",
        )
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)))


def _prefill_s_per_byte(snapshot: Snapshot) -> float | None:
    """Returns the median time to compute a byte of state, in seconds; None if it was not measured."""
    records = snapshot.usages().records
    known = records[(records["prefill_s"] > 0) & (records["stored_bytes"] > 0)]
    if not len(known):
        return None
    speeds = sorted((known["prefill_s"] / known["stored_bytes"]).tolist())
    return float(speeds[len(speeds) // 2])


def _speed_finding(place: Path, prefill_s_per_byte: float | None) -> Finding:
    speed = disk_speed(place)
    if speed is None:
        return Finding("disk", "skipped", "no file can be created in the folder to measure the disk", "")
    text = f"reads {format_size(speed)} a second"
    if prefill_s_per_byte is None:
        return Finding("disk", "ok", f"{text}; computing was not measured yet")
    ratio = prefill_s_per_byte * speed
    text += f": restoring is about {ratio:,.1f} times as fast as computing"
    if ratio < 1:
        return Finding("disk", "note", text, "caching does not pay on this disk; --kv-cache-gate auto turns it off")
    return Finding("disk", "ok", text)


def port_finding(settings: Settings) -> Finding:
    """Returns `ok` if the port is free or a healthy daemon answers on it."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return Finding("port", "ok", f"{where} is free")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding("port", "problem", f"{where}: {error.strerror or error}", "give another --host or --port")
    status = _daemon_status(settings)
    if status is None:
        return Finding("port", "problem", f"{where} is used by another program", "stop it, or give another --port")
    text = f"a daemon answers at {where}: {status}"
    if status == "ok":
        return Finding("port", "ok", text)
    return Finding("port", "note", text, "its log and GET /health say why")


def _daemon_status(settings: Settings) -> str | None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        found = running_daemon(f"http://{host}:{settings.port}", None)("GET", "/health", None).body
    except NotReady:
        return None
    status = found.get("status") if isinstance(found, dict) else None
    return shown(status) if isinstance(status, str) else None


def _file_system(place: Path) -> str:
    """Returns the type of the file system that holds a folder, as Linux names it; empty where that is not known."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    real = place.resolve()
    found = [(line.split()[1].replace("\\040", " "), line.split()[2]) for line in lines if len(line.split()) > 2]
    inside = [(mount, kind) for mount, kind in found if real == Path(mount) or Path(mount) in real.parents]
    # Of two file systems at one place, the later one is seen.
    return max(enumerate(inside), key=lambda one: (len(one[1][0]), one[0]))[1][1] if inside else ""


def disk_speed(folder: Path) -> float | None:
    """Returns the bytes a second of a sequential read from the disk under `folder`; None if the folder takes no file or
    is nearly full. Takes about half a second, and longer where the disk is busy. The file is always removed."""
    try:
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < 4 * _FILE_BYTES:
            return None
        writing, name = tempfile.mkstemp(prefix="speed-", dir=folder)
        with open(writing, "wb", buffering=0):
            try:
                reading = _open_past_the_cache(name)
            finally:
                os.unlink(name)  # nothing is left whatever happens
            with open(reading, "rb", buffering=0):
                return _read(reading, _write(writing, os.urandom(_CONTENT_BYTES))) or None
    except OSError:
        return None


def _open_past_the_cache(name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # not every file system can
        return os.open(name, os.O_RDONLY)


def _write(descriptor: int, content: bytes) -> int:
    """Returns the bytes that were written: fewer on a slow disk."""
    written = 0
    started = time.perf_counter()
    while written < _FILE_BYTES and time.perf_counter() - started < _MOST_WRITING_S:
        written += os.write(descriptor, content)
        os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return written


def _read(descriptor: int, num_bytes: int) -> float:
    """Returns the bytes a second of reading `num_bytes`, or as many as the time allows."""
    part = mmap.mmap(-1, _CONTENT_BYTES)  # whole pages, as reading past the cache demands
    found = 0
    started = time.perf_counter()
    while found < num_bytes and time.perf_counter() - started < _MOST_READING_S:
        found += os.preadv(descriptor, [part], found)
    return found / (time.perf_counter() - started)
