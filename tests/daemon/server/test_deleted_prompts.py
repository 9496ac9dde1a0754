"""Deleted prompts are gone: from the file of the store, byte by byte, and from what the daemon remembers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.schema import DATABASES
from diskprefix.prefixstore.store.store import Store
from tests.daemon.server.daemon_process import DaemonProcess, command, props, running_daemon, wait_until
from tests.runtimes import RUNTIME

FIELDS: dict[str, Any] = {"model": "tiny-chat", "max_output_tokens": 24, "temperature": 0}
WORDS = "The vixen {0} sleeps under elder {1}, where the miller's {2} lantern hangs. "


_LEAST_BYTES = 12
"""A shorter piece of a record may stand in the file by chance."""
_AT_ONCE_BYTES = 64 << 20

Record = tuple[str, bytes, bytes]


def records(folder: Path) -> set[Record]:
    """All that is stored, but for counts, which change with each use and say nothing of a prompt."""
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        return {
            (database, key, bytes(value))
            for database in DATABASES
            if database not in ("meta", "usage")
            for key, value in snapshot.records(database)
            if database != "notes" or key[16] != NoteKind.SAVINGS
        }


def traces(records: set[Record]) -> set[bytes]:
    """Pieces of records: what names them, and of what they hold the middle and the end. Checksums and names of others
    stand at the beginning."""
    pieces = {key[16:] if database in ("seen", "notes") else key for database, key, _ in records}
    for _, _, value in records:
        pieces |= {value[len(value) // 2 :][:64], value[-64:]}
    return {trace for trace in pieces if len(trace) >= _LEAST_BYTES and trace.strip(b"\0")}


def left_in(folder: Path, wanted: set[bytes]) -> list[bytes]:
    content = (folder / "data.mdb").read_bytes()
    return [trace for trace in wanted if trace in content]


def is_in_memory(pid: int, wanted: bytes) -> bool:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            addresses, access, *_ = line.split()
            if "r" in access and not line.rstrip().endswith(("[vvar]", "[vvar_vclock]", "[vsyscall]")):
                start, end = (int(address, 16) for address in addresses.split("-"))
                if any(wanted in part for part in _parts(memory, start, end)):
                    return True
    return False


def _parts(memory: FileIO, start: int, end: int) -> Iterator[bytes]:
    try:
        while start < end:
            memory.seek(start)
            part = memory.read(min(_AT_ONCE_BYTES, end - start))
            if not part:
                return
            yield part
            start += len(part)
    except OSError:
        """It was given back meanwhile, or cannot be read."""


def text_of(seed: int, num_lines: int = 24) -> str:
    return "".join(WORDS.format(7 * line + seed, 11 * line + seed, 13 * line + seed) for line in range(num_lines))


def ask(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", json=FIELDS | {"input": text} | fields)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def test_after_a_delete_no_record_of_a_conversation_is_found(chat_model: Path, tmp_path: Path) -> None:
    folder, bucket, key = tmp_path / "kv", tmp_path / "bucket", tmp_path / "key"
    key.write_text("a key that machines share")
    key.chmod(0o600)
    shared = {"remote_tier": f"file://{bucket}", "namespace_key_file": key, "remote_write": "all"}
    with running_daemon(chat_model, folder, **shared) as daemon, daemon.client() as client:
        kept = ask(client, text_of(1))
        wait_shared(daemon, client)
        objects_of_kept = objects_in(bucket)
        before = records(folder)
        secret = text_of(2)
        first = ask(client, secret)
        second = ask(client, "And then?", previous_response_id=first["id"])
        wait_shared(daemon, client)
        assert objects_in(bucket) > objects_of_kept
        # A turn replaces the entry of the turn before, unless the state is exact at blocks alone.
        entries = entries_with(client, "vixen 2 ")
        assert len(entries) == (2 if RUNTIME == "llama" else 1)
        deleted = [client.delete(f"/dashboard/entries/{entry['id']}").json() for entry in entries]
        assert {report["remote_error"] for report in deleted} == {None}
        assert sum(report["remote_objects"] for report in deleted) > 0
        assert not {(database, key) for database, key, _ in records(folder) - before}
        assert objects_in(bucket) == objects_of_kept
        wait_until(lambda: kv_memory(client)["kept_tokens"] == 0, "no sequence stays in memory")
        for gone in (first, second):
            assert client.get(f"/v1/responses/{gone['id']}").status_code == 404
        assert client.get(f"/v1/responses/{kept['id']}").status_code == 200


def objects_in(bucket: Path) -> set[str]:
    return {path.name for path in bucket.rglob("*") if path.is_file()}


def wait_shared(daemon: DaemonProcess, client: httpx.Client) -> None:
    daemon.wait_saved()
    wait_until(lambda: not props(client)["full_cache"]["state"]["remote"]["offered"], "it is shared")


def kv_memory(client: httpx.Client) -> dict[str, Any]:
    memory: dict[str, Any] = props(client)["kv_memory"]
    return memory


def entries_with(client: httpx.Client, text: str) -> list[dict[str, Any]]:
    listed = client.get("/dashboard/entries").json()
    return [entry for entry in listed["entries"] if text in entry["preview"]]


@pytest.mark.slow
def test_a_purge_that_erases_beside_a_daemon_leaves_no_byte_in_the_file(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder) as daemon, daemon.client() as client:
        ask(client, text_of(1))
        daemon.wait_saved()
        before, content = records(folder), (folder / "data.mdb").read_bytes()
        gone = ask(client, text_of(2))
        daemon.wait_saved()
        # Equal tokens at equal places have the same state in the first layer, so some of it is that of the other text.
        wanted = {trace for trace in traces(records(folder) - before) if trace not in content}
        assert len(wanted) > 100
        [entry] = entries_with(client, "vixen 2 ")
        assert command("purge", folder, entry["id"], "--yes", "--erase")["is_erased"]
        assert left_in(folder, wanted) == []
        # The daemon saves in the new file, and has no buffers of the old one. The new prompt has some tokens at the
        # places that they had in the other one.
        ask(client, "Other words about a lighthouse, its keeper, four gulls and the tide. " * 9)
        daemon.wait_saved()
        assert set(left_in(folder, wanted)) <= traces(records(folder))
        assert client.get(f"/v1/responses/{gone['id']}").status_code == 404
