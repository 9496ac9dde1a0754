"""The checks of `diskprefix doctor` that look at the machine: Python, torch, kernels, folder, disk, port, clock."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from diskprefix.cli.disk_speed import disk_speed
from diskprefix.cli.findings import Finding
from diskprefix.errors import CacheError
from diskprefix.printable import shown
from diskprefix.settings import Settings
from diskprefix.store.folder import DATA, check_folder
from diskprefix.store.savings import total_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.units import format_size

_LEAST_PYTHON = (3, 11)
_VOLATILE, _REMOTE = {"tmpfs", "ramfs"}, {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"}
_FIRST_TIME = 1_735_689_600.0
"""2025-01-01: before the first release, so a clock that says so is wrong."""
_ROWS, _INNER, _OUTER = 32, 256, 192
_ASK_S = 3.0


def python_findings() -> Iterator[Finding]:
    found = sys.version_info[:3]
    text = f"Python {'.'.join(map(str, found))}"
    if found < _LEAST_PYTHON:
        yield Finding(check="python", level="problem", text=text, advice="diskprefix needs Python 3.11 or newer")
    else:
        yield Finding(check="python", level="ok", text=text)
    missing = [name for name in ("torch", "transformers", "tokenizers", "lmdb", "numpy") if _version(name) is None]
    if missing:
        text = f"not installed: {', '.join(missing)}"
        yield Finding(check="packages", level="problem", text=text, advice="install diskprefix again with pip")


def torch_findings(settings: Settings) -> Iterator[Finding]:
    """torch's build, the instruction sets that it uses, and whether products are the same whatever is beside them."""
    import torch

    from diskprefix.model.exact.rows import linear
    from diskprefix.native.library import Unavailable, choose, described

    kind = "CUDA" if torch.version.cuda else "CPU"
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"torch {torch.__version__} ({kind} build), {capability}, {torch.get_num_threads()} threads"
    is_old = capability in ("DEFAULT", "NO AVX")
    advice = "this CPU has no AVX2: computing is slow" if is_old else ""
    yield Finding(check="torch", level="note" if is_old else "ok", text=text, advice=advice)
    try:
        choose(settings.kernels)
        names = described()
    except Unavailable as error:
        yield Finding(check="kernels", level="problem", text=str(error), advice="give another --kernels")
        return
    is_native = names.startswith("native") or settings.kernels == "torch"
    advice = "" if is_native else "install a C++ compiler, then diskprefix again, for faster attention"
    yield Finding(check="kernels", level="ok" if is_native else "note", text=f"computed by {names}", advice=advice)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, _INNER, generator=generator).to(torch.bfloat16)
    weight = torch.randn(_OUTER, _INNER, generator=generator).to(torch.bfloat16)
    whole = linear(rows, weight)
    differ = [n for n in (1, 2, 3, 7, 16) if not torch.equal(linear(rows[:n], weight), whole[:n])]
    if differ:
        text = f"a row of a product depends on how many rows are computed with it ({', '.join(map(str, differ))})"
        advice = "prefixes are restored at the ends of blocks only; another torch or CPU may do better"
        yield Finding(check="batch invariance", level="note", text=text, advice=advice)
    else:
        text = "a row of a product has the same bits alone and beside others"
        yield Finding(check="batch invariance", level="ok", text=text)


def folder_findings(settings: Settings) -> Iterator[Finding]:
    """Rights, file system, free space, and the store itself."""
    folder = settings.kv_cache_dir
    place = _existing(folder)
    try:
        check_folder(folder)
    except CacheError as error:
        yield Finding(check="folder", level="problem", text=error.message, advice="see the message")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding(
            check="folder",
            level="problem",
            text=f"{place} cannot be written",
            advice="give another --kv-cache-dir, or change its owner",
        )
        return
    yield Finding(check="folder", level="ok", text=f"{folder}{'' if place == folder else ' will be created'}")
    kind = _file_system(place)
    if kind in _VOLATILE:
        text, advice = f"{kind}: what is saved is lost at the next boot", "give a --kv-cache-dir on a disk"
        yield Finding(check="file system", level="problem", text=text, advice=advice)
    elif kind in _REMOTE:
        text, advice = f"{kind}: the store's file is not safe on a network", "give a --kv-cache-dir on a local disk"
        yield Finding(check="file system", level="problem", text=text, advice=advice)
    else:
        yield Finding(check="file system", level="ok", text=kind or "not known")
    yield _space_finding(settings, place)


def _space_finding(settings: Settings, place: Path) -> Finding:
    disk = os.statvfs(place)
    free, file = disk.f_bavail * disk.f_frsize, settings.kv_cache_dir / DATA
    own = file.stat().st_size if file.is_file() else 0
    usable = free + own - settings.kv_cache_min_free
    text = f"{format_size(free)} free, budget {format_size(settings.kv_cache_budget)}"
    if usable <= 0:
        advice = "free some, or lower --kv-cache-min-free: nothing can be saved"
        return Finding(check="space", level="problem", text=text, advice=advice)
    if usable < settings.kv_cache_budget:
        advice = f"the store stays below {format_size(usable)}, so that --kv-cache-min-free is left"
        return Finding(check="space", level="note", text=text, advice=advice)
    return Finding(check="space", level="ok", text=text)


def store_findings(settings: Settings) -> Iterator[Finding]:
    """What is in the store, whether its times are believable, and whether the disk is fast enough."""
    folder = settings.kv_cache_dir
    prefill_s_per_byte, newest = None, 0.0
    if not (folder / DATA).is_file():
        yield Finding(check="store", level="ok", text="no store yet; the first request creates it")
    else:
        try:
            store = Store(folder, read_only=True)
        except CacheError as error:
            advice = "move the file away, or let `diskprefix serve` move it aside and begin an empty store"
            yield Finding(check="store", level="problem", text=error.message, advice=advice)
            return
        try:
            with store.snapshot() as snapshot:
                counts = snapshot.counts()
                saved = total_savings(snapshot).total.saved_s
                text = f"{counts['entries']:,} saved prompts in {format_size(snapshot.used_bytes())}"
                yield Finding(check="store", level="ok", text=f"{text}; {saved:,.0f} s of computing saved until now")
                newest = _newest_use(snapshot)
                prefill_s_per_byte = _prefill_s_per_byte(snapshot)
        except CacheError as error:
            yield Finding(check="store", level="problem", text=error.message, advice="diskprefix verify --fix")
        finally:
            store.close()
    yield _clock_finding(time.time(), newest)
    yield _speed_finding(_existing(folder), prefill_s_per_byte)


def _newest_use(snapshot: Snapshot) -> float:
    records = snapshot.usages().records
    return float(records["last_used"].max()) if len(records) else 0.0


def _clock_finding(now: float, newest: float) -> Finding:
    """`newest` is when the store was used last, as it says."""
    if now < _FIRST_TIME:
        return Finding(check="clock", level="problem", text="the clock is years behind", advice="set the time (NTP)")
    if newest > now + 60:
        text = "the store was used at a time that has not come yet"
        return Finding(check="clock", level="note", text=text, advice="set the time (NTP): ages decide what is evicted")
    return Finding(check="clock", level="ok", text=time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)))


def _prefill_s_per_byte(snapshot: Snapshot) -> float | None:
    """Returns how long computing a byte of state took, in the middle of what is stored; None if nobody measured it."""
    records = snapshot.usages().records
    known = records[(records["prefill_s"] > 0) & (records["stored_bytes"] > 0)]
    if not len(known):
        return None
    speeds = sorted((known["prefill_s"] / known["stored_bytes"]).tolist())
    return float(speeds[len(speeds) // 2])


def _speed_finding(place: Path, prefill_s_per_byte: float | None) -> Finding:
    speed = disk_speed(place)
    if speed is None:
        text = "the folder takes no file to measure the disk with"
        return Finding(check="disk", level="skipped", text=text, advice="")
    text = f"reads {format_size(speed)} a second"
    if prefill_s_per_byte is None:
        return Finding(check="disk", level="ok", text=f"{text}; computing was not measured yet")
    ratio = prefill_s_per_byte * speed
    text += f": restoring is about {ratio:,.1f} times as fast as computing"
    if ratio < 1:
        advice = "caching is not worth it on this disk; --kv-cache-gate auto leaves it out"
        return Finding(check="disk", level="note", text=text, advice=advice)
    return Finding(check="disk", level="ok", text=text)


def port_finding(settings: Settings) -> Finding:
    """Whether the port is free, or a daemon answers on it."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return Finding(check="port", level="ok", text=f"{where} is free")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            text = f"{where}: {error.strerror or error}"
            return Finding(check="port", level="problem", text=text, advice="give another --host or --port")
    status = _daemon_status(settings)
    if status is None:
        text = f"{where} is used by another program"
        return Finding(check="port", level="problem", text=text, advice="stop it, or give another --port")
    text = f"a daemon answers at {where}: {status}"
    if status == "ok":
        return Finding(check="port", level="ok", text=text)
    return Finding(check="port", level="note", text=text, advice="its log and GET /health say why")


def _daemon_status(settings: Settings) -> str | None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        with urllib.request.urlopen(f"http://{host}:{settings.port}/health", timeout=_ASK_S) as reply:
            body = reply.read(1 << 16)
    except urllib.error.HTTPError as error:
        body = error.read(1 << 16)
    except OSError:
        return None
    try:
        found = json.loads(body)
    except ValueError:
        return None
    status = found.get("status") if isinstance(found, dict) else None
    return shown(status) if isinstance(status, str) else None


def _existing(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
