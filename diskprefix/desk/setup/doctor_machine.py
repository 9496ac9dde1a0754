"""The checks of the machine in `diskprefix doctor`: torch, kernels, folder, space, store, port."""

from __future__ import annotations

import errno
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.daemon_call import process_of, running_daemon
from diskprefix.desk.shared.own_daemon import own_urls
from diskprefix.desk.shared.tooling import existing_folder
from diskprefix.errors import CacheError, NotReady, SettingsError, StoreCorrupt, StoreFormatError
from diskprefix.file_system import REMOTE, VOLATILE, file_system, lost_with_container
from diskprefix.prefixstore.store.folder import DATA, check_folder, disk_full, require_on_disk
from diskprefix.prefixstore.store.statistics.savings import total_savings
from diskprefix.prefixstore.store.store import Store
from diskprefix.printable import shown
from diskprefix.private_file import distrusted_by_root
from diskprefix.runtime.imports import INSTALL
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.units import format_size

Level: TypeAlias = Literal["ok", "note", "problem", "skipped"]


class Finding(Struct, frozen=True):
    """The result of one check. `advice` says what to do, and is empty if there is nothing to do. `table` has labels
    with bytes. `level`: `note` means that it works but could be better, `problem` that it does not work."""

    check: str
    level: Level
    text: str
    advice: str = ""
    table: tuple[tuple[str, int], ...] = ()


def torch_findings(settings: Settings) -> Iterator[Finding]:
    """Yields the findings about torch's build and instruction sets, the device and the kernels."""
    if find_spec("torch") is None:
        yield Finding("torch", "ok", f"not installed: only models without a plan and images need it ({INSTALL})")
    else:
        yield from _installed_torch_findings(settings)
    yield _kernels_finding(settings.kernels)


def _installed_torch_findings(settings: Settings) -> Iterator[Finding]:
    import torch

    from diskprefix.runtime.load.loader import pick_device

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    kind = next((name for name, version in builds.items() if version), "CPU")
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"torch {torch.__version__} ({kind} build), {capability}, {torch.get_num_threads()} threads"
    is_old = capability in ("DEFAULT", "NO AVX") and platform.machine() in ("x86_64", "AMD64")
    advice = "this CPU has no AVX2: computing is slow" if is_old else ""
    yield Finding("torch", "note" if is_old else "ok", text, advice)
    if (kind := pick_device(settings.device)) != "cpu":
        text = f"on {kind} one conversation is computed at a time, and prompts are restored in steps of 256 tokens"
        advice = "with --device cpu they are restored at any token; vLLM serves many users on GPUs"
        yield Finding("accelerator", "note", text, advice)


def _kernels_finding(kernels: str) -> Finding:
    """Returns the finding about the kernels: those chosen, those that this CPU supports, and faster ones."""
    from diskprefix.native.library import REMEDY, choose, described, of_another_cpu, variants

    choose(kernels)
    names, there, advice = described(), variants(), ""
    if there and kernels not in ("auto", there[0]):
        advice = f"leave --kernels out: auto takes {there[0]}, which is faster"
    elif not names.startswith("native"):
        advice = REMEDY
    else:
        advice = of_another_cpu()
    has = f"; this CPU has {', '.join(there)}" if there else ""
    return Finding("kernels", "note" if advice else "ok", f"{names}{has}", advice)


def machine_findings(settings: Settings) -> Iterator[Finding]:
    """Yields the findings that need no torch: folder, file system, free space, store, port and a running daemon."""
    yield from folder_findings(settings)
    yield packed_finding(settings)
    yield store_finding(settings)
    yield daemon_finding()
    yield port_finding(settings)


def folder_findings(settings: Settings) -> Iterator[Finding]:
    """Yields the findings about the folder's permissions, its file system and the free space."""
    folder = settings.kv_cache_dir
    place = existing_folder(folder)
    try:
        check_folder(folder)
    except CacheError as error:
        yield Finding("folder", "problem", error.message, "see the message")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "give another --kv-cache-dir, or change its owner"
        yield Finding("folder", "problem", f"{place} cannot be written", advice)
        return
    yield Finding("folder", "ok", f"{folder}{'' if place == folder else ' will be created'}")
    kind = file_system(place)
    if lost := lost_with_container(place):
        yield Finding("file system", "problem", f"{kind}: the store ends with this container", lost)
    elif kind in VOLATILE:
        text = f"{kind}: the store is lost at the next boot"
        yield Finding("file system", "problem", text, "give a --kv-cache-dir on a disk")
    elif kind in REMOTE:
        text = f"{kind}: the store's file is not safe on a network"
        yield Finding("file system", "problem", text, "give a --kv-cache-dir on a local disk")
    else:
        yield Finding("file system", "ok", kind or "not known")
    yield _space_finding(settings, place)


def _space_finding(settings: Settings, place: Path) -> Finding:
    disk = os.statvfs(place)
    free, file = disk.f_bavail * disk.f_frsize, settings.kv_cache_dir / DATA
    own = file.stat().st_size if file.is_file() else 0
    usable = free + own - settings.kv_cache_min_free
    budget_bytes = settings.kv_cache_budget or _stored_budget(settings) or settings.kv_cache_new_budget
    text = f"{format_size(free)} free, budget {format_size(budget_bytes)}"
    try:
        require_on_disk(settings.kv_cache_dir, settings.kv_cache_budget or 0)
    except SettingsError as error:
        return Finding("space", "problem", text, error.message)
    if usable <= 0:
        why = disk_full(settings.kv_cache_dir, settings.kv_cache_min_free)
        return Finding("space", "problem", text, f"nothing can be saved: {why}")
    if usable < budget_bytes:
        return Finding("space", "note", text, f"the store stays below {format_size(usable)}, as the disk has no more")
    return Finding("space", "ok", text)


def _stored_budget(settings: Settings) -> int:
    """Returns the budget of the folder, 0 if there is no store that can be read."""
    try:
        with closing(Store(settings.kv_cache_dir, read_only=True)) as store:
            return store.budget_bytes
    except (CacheError, SettingsError):
        return 0


def packed_finding(settings: Settings) -> Finding:
    """Returns the finding about the folder of packed weights."""
    packed = PackedFiles.here(settings.packed_weights)
    if packed is None:
        return Finding("packed weights", "ok", "off: each start packs the weights of its model")
    place = existing_folder(packed.folder)
    problem = distrusted_by_root(packed.folder)
    if problem is None and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        problem = f"{place} cannot be written"
    if problem is not None:
        advice = "each start packs the weights; give another --packed-weights, or off"
        return Finding("packed weights", "note", problem, advice)
    return Finding("packed weights", "ok", f"{packed.line}; room for a model of {format_size(packed.room_bytes())}")


def store_finding(settings: Settings) -> Finding:
    """Returns the size and the savings of the store, or why it cannot be opened."""
    folder = settings.kv_cache_dir
    if not (folder / DATA).is_file():
        return Finding("store", "ok", "no store yet; the first request creates it")
    try:
        store = Store(folder, read_only=True)
    except (CacheError, SettingsError) as error:
        # The messages of other errors have advice: a store whose key is missing must stay where it is.
        is_damaged = isinstance(error, StoreCorrupt | StoreFormatError)
        advice = "move the file away, or let `diskprefix serve` move it aside and begin an empty store"
        return Finding("store", "problem", error.message, advice if is_damaged else "")
    try:
        with store.snapshot() as snapshot:
            entries, saved_s = snapshot.counts()["entries"], total_savings(snapshot).total.saved_s
            text = f"{entries:,} saved prompts in {format_size(snapshot.used_bytes())}"
            return Finding("store", "ok", f"{text}; {saved_s:,.0f} s of computing saved until now")
    except CacheError as error:
        return Finding("store", "problem", error.message, "diskprefix verify --fix")
    finally:
        store.close()


def daemon_finding() -> Finding:
    """Returns the daemons of this user with what they serve, as other commands find them."""
    states = {url: _get(url, "/health") for url in own_urls()}
    served = {url: shown(str(state.get("model") or state.get("status", "no answer"))) for url, state in states.items()}
    return Finding("your daemons", "ok", ", ".join(f"{url}: {what}" for url, what in served.items()) or "none runs")


def port_finding(settings: Settings) -> Finding:
    """Returns `ok` if the port is free or a healthy daemon of this user answers on it."""
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
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}"
    status = _get(url, "/health").get("status")
    if not isinstance(status, str):
        return Finding("port", "problem", f"{where} is used by another program", "stop it, or give another --port")
    answers = f"daemon answers at {where}: {shown(status)}"
    if process_of(url) is None:
        advice = f"give `diskprefix serve` another --port; --url {url} uses that daemon"
        return Finding("port", "note", f"a {answers}, and is not known as yours", advice)
    if status == "ok":
        return Finding("port", "ok", f"your {answers}")
    return Finding("port", "note", f"your {answers}", "its log and GET /health say why")


def _get(url: str, path: str) -> dict[str, Any]:
    """Returns the answer of the daemon at an address, or an empty dict."""
    try:
        body = running_daemon(url, None)("GET", path, None).body
    except NotReady:
        return {}
    return body if isinstance(body, dict) else {}
