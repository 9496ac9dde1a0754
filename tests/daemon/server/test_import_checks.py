"""A pack that nobody vouches for: this machine computes its prompts before anything of it is used, and finds forgeries.
One that is trusted all the same is used at once, and each answer that rests on it says so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob
from diskprefix.daemon.server import import_checks
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.packs.exchange import encoded_notes, export_pack, put_notes
from diskprefix.prefixstore.packs.pack_file import PackReader
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.store import Store
from diskprefix.tokens import TokenIds
from diskprefix.values import SHARED, CacheOptions, Prompt, Scope
from tests.agent_bodies import words
from tests.daemon.engine.driving import write_model
from tests.daemon.server.daemon_process import reply_to
from tests.daemon.server.scripted import AppServer, real_app
from tests.prefixstore.packs.exported import import_file, sealed, split, with_payload
from tests.waiting import wait_for

SYSTEM = words(1, 150)
QUESTIONS = ("Name three rivers.", "And three lakes?")


@pytest.fixture(params=["llama", "qwen3_5"], ids=["dense", "hybrid"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", request.param)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_checks, "_CHECK_S", 0.02)
    monkeypatch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)


def start(model: Path, folder: Path, **changes: Any) -> AbstractContextManager[AppServer]:
    usual: dict[str, Any] = {"ahead": "off", "kv_cache_gate": "off", "speculative": "off"}
    return real_app(model, folder, **usual | changes)


def ask(server: AppServer, prompt: str, **options: Any) -> dict[str, Any]:
    with server.client() as client:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 2, **options}
        answer = reply_to(client, body, path="/v1/completions")
    assert server.engine.cache.writer.flush(10)
    return answer


def said(question: str) -> str:
    return f"{SYSTEM}\n{question}"


def cold(server: AppServer, prompt: str) -> Any:
    return ask(server, prompt, prefix_cache={"scope": "off"})["choices"]


@pytest.fixture(scope="module")
def pack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts with a common beginning."""
    folder = tmp_path_factory.mktemp("pack")
    with start(model, folder / "kv") as server:
        for question in QUESTIONS:
            ask(server, said(question), prefix_cache={"scope": "full", "save": True})
    with closing(Store(folder / "kv", read_only=True)) as store:
        with store.snapshot() as snapshot:
            names = [name for name, _ in snapshot.entries()]
        assert len(names) >= 2
        export_pack(store, names, folder / "two.safetensors", force=False, advance=lambda _: None)
    return folder / "two.safetensors"


def note(folder: Path, packs: Sequence[Path]) -> None:
    with closing(Store(folder, budget_bytes=64 << 20)) as store:
        for path in packs:
            with PackReader.open(path) as reader:
                reader.read_nodes()
                put_notes(store, reader, encoded_notes(store, reader))
        assert store.counts()["blocks"] == 0


@contextmanager
def settled(model: Path, folder: Path, num_prompts: int) -> Iterator[tuple[AppServer, dict[str, int]]]:
    """A server that has settled so many imported prompts, and its counts."""
    with start(model, folder, ahead="auto") as server:
        checks = server.daemon.imports
        assert checks is not None
        wait_for(lambda: checks.equal + checks.different + checks.unkept >= num_prompts)
        assert server.engine.cache.writer.flush(10)
        yield server, checks.figures


def test_a_pack_is_used_once_this_machine_has_computed_the_same(model: Path, pack: Path, tmp_path: Path) -> None:
    note(tmp_path / "kv", [pack])
    # Where nothing is computed ahead, nothing of it is used.
    with start(model, tmp_path / "kv") as server:
        assert server.daemon.imports is None
        assert ask(server, said(QUESTIONS[0]), prefix_cache={"save": False})["prefix_cache"]["restored"] == 0
    with PackReader.open(pack) as reader:
        reader.read_nodes()
        num_prompts = len(reader.manifest.prompts)
    with settled(model, tmp_path / "kv", num_prompts) as (server, figures):
        assert figures == {"waiting": 0, "equal": num_prompts, "different": 0, "unkept": 0}
        for question in QUESTIONS:
            longer = f"{said(question)} {words(4, 3)}"
            answer = ask(server, longer, prefix_cache={"save": False})
            assert answer["prefix_cache"]["restored"] > 700
            assert "unverified" not in answer["prefix_cache"]
            assert answer["choices"] == cold(server, longer)
    with closing(Store(tmp_path / "kv", read_only=True)) as store, store.snapshot() as snapshot:
        assert not any(note.kind == NoteKind.IMPORTED for note in snapshot.notes())


def test_an_import_waits_until_it_can_be_computed(
    model: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path / "kv", [pack])
    on_battery = True
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: on_battery)
    with start(model, tmp_path / "kv", ahead="auto") as server:
        checks, jobs = server.daemon.imports, server.engine.ahead
        assert checks is not None
        wait_for(lambda: checks.waiting and jobs.figures["waiting"])
        waiting, owner = checks.waiting, server.engine.cache.owner(SHARED)
        for number in range(40):
            # A chat, and a prompt that is asked for under the share of imports.
            for label in ("", "asked"):
                options = CacheOptions(scope=Scope("full"), tenant=SHARED)
                content = f"{label} {number:02}".encode()
                jobs.add_job(AheadJob(server.engine, lambda: None, options, owner, content, label=label))
            checks.look()
        assert checks.figures == {"waiting": waiting, "equal": 0, "different": 0, "unkept": 0}
        on_battery = False
        jobs._not_before = 0.0
        wait_for(lambda: checks.equal == waiting)


def forged(pack: Path, seed: int, path: Path) -> Path:
    """The pack with other state in one node, and right digests."""
    rng, (header, data) = random.Random(seed), split(pack.read_bytes())
    with PackReader.open(pack) as reader:
        reader.read_nodes()
        sizes, nodes = reader.manifest.payload_bytes(), reader.manifest.nodes
        # The end of a prompt is computed by whoever sends it.
        number = rng.choice([number for number, node in enumerate(nodes) if node.kind in (0, 2)])
        payload = bytearray(reader.read_payload(number))
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    path.write_bytes(with_payload(header, data, number, sum(sizes[:number]), bytes(payload)))
    return path


def test_twenty_forged_packs_are_found_and_nothing_of_them_is_used(model: Path, pack: Path, tmp_path: Path) -> None:
    packs = [forged(pack, seed, tmp_path / f"{seed}.safetensors") for seed in range(20)]
    with PackReader.open(pack) as reader:
        reader.read_nodes()
        num_prompts = len(reader.manifest.prompts)
    note(tmp_path / "kv", packs)
    with settled(model, tmp_path / "kv", 20 * num_prompts) as (server, figures):
        # The forged node belongs to one prompt, or to several.
        assert figures["different"] >= 20
        assert figures["unkept"] == 0
        for question in QUESTIONS:
            assert ask(server, said(question))["choices"] == cold(server, said(question))


def test_tokens_that_the_model_does_not_have_are_not_computed(model: Path, pack: Path, tmp_path: Path) -> None:
    header, data = split(pack.read_bytes())
    at = header["token_ids"]["data_offsets"][0]
    for number, token_id in enumerate((b"\xff\xff\xff\x7f", b"\0\0\1\0")):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(sealed(header, data[:at] + token_id + data[at + 4 :]))
        note(tmp_path / str(number), [path])
        with PackReader.open(path) as reader:
            reader.read_nodes()
            num_prompts = len(reader.manifest.prompts)
        with settled(model, tmp_path / str(number), num_prompts) as (_, figures):
            assert figures["unkept"] == num_prompts


def trust(model: Path, folder: Path, pack: Path) -> None:
    with start(model, folder):
        """The store knows the model now."""
    with closing(Store(folder, budget_bytes=64 << 20)) as store:
        import_file(store, pack, is_unverified=True)


def test_a_trusted_pack_is_used_at_once_and_each_answer_names_it(model: Path, pack: Path, tmp_path: Path) -> None:
    question, folder = said(QUESTIONS[0]), tmp_path / "kv"
    trust(model, folder, pack)
    with start(model, folder) as server:
        for _ in range(2):
            # From the disk, then from memory.
            answer = ask(server, question)
            restored = answer["prefix_cache"]["restored"]
            assert answer["prefix_cache"]["unverified"] == restored > 100
        assert answer["choices"] == cold(server, question)
        # What is computed from such state is such state.
        longer = ask(server, f"{question}\n{words(2, 60)}", prefix_cache={"scope": "full"})
        assert longer["prefix_cache"]["unverified"] == longer["prefix_cache"]["restored"]
        assert "unverified" not in ask(server, words(3, 90), prefix_cache={"scope": "full"})["prefix_cache"]
    with start(model, folder) as server:
        again = ask(server, f"{question}\n{words(2, 60)}\nNow?")
        assert again["prefix_cache"]["unverified"] == again["prefix_cache"]["restored"] > restored
    with closing(Store(folder)) as store:
        with store.snapshot() as snapshot:
            (*_, last) = [name for name, entry in snapshot.entries() if entry.num_tokens > restored]
        with pytest.raises(SettingsError, match="imported with --trust, which this machine has not computed"):
            export_pack(store, [last], tmp_path / "e.safetensors", force=False, advance=lambda _: None)
        with store.snapshot() as snapshot:
            nodes = {name: snapshot.parent(name) for name, _ in snapshot.records("nodes")}
            tops = {name: parent for name, parent in nodes.items() if parent not in nodes}
        store.remove_subtrees(tops)
    with start(model, folder) as server:
        # After an eviction it is computed here, and is nothing special any more.
        answers = [ask(server, question)["prefix_cache"] for _ in range(2)]
        assert not any("unverified" in answer for answer in answers)
        assert [answer["restored"] > 100 for answer in answers] == [False, True]


def test_a_preview_is_of_the_prompt_s_tokens_not_of_an_unsigned_pack(
    model: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, data = split(pack.read_bytes())
    manifest = json.loads(header["__metadata__"]["manifest"])
    for prompt in manifest["prompts"]:
        prompt["entry"]["preview"] = "Nothing of that kind"
    header["__metadata__"]["manifest"] = json.dumps(manifest)
    path, folder = tmp_path / "forged.safetensors", tmp_path / "kv"
    path.write_bytes(sealed(header, data))
    trust(model, folder, path)
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        assert {entry.preview for _, entry in snapshot.entries()} == {""}
    note(tmp_path / "noted", [path])
    with closing(Store(tmp_path / "noted", read_only=True)) as store, store.snapshot() as snapshot:
        assert not any(b"Nothing of" in bytes(value) for _, value in snapshot.records("notes"))
    previews = list[str]()

    def computed(token_ids: TokenIds, *, text: str) -> Prompt:
        previews.append(text)
        return Prompt(token_ids, text=text)

    monkeypatch.setattr(import_checks, "Prompt", computed)
    with settled(model, tmp_path / "noted", len(manifest["prompts"])):
        assert previews
        assert all(preview.startswith(SYSTEM[:30]) for preview in previews)


def test_trusted_state_that_memory_keeps_longer_than_the_disk_stays_named(
    model: Path, pack: Path, tmp_path: Path
) -> None:
    question = said(QUESTIONS[0])
    trust(model, tmp_path / "kv", pack)
    with start(model, tmp_path / "kv") as server:
        ask(server, question)
        store = server.engine.cache.store
        with store.snapshot() as snapshot:
            nodes = {name: snapshot.parent(name) for name, _ in snapshot.records("nodes")}
        store.remove_subtrees({name: parent for name, parent in nodes.items() if parent not in nodes})
        longer = f"{question}\n{words(2, 60)}"
        known = ask(server, longer, prefix_cache={"scope": "full"})["prefix_cache"]
        # States cannot be cut, so memory has them at the end of the reply alone.
        is_dense = not server.engine.cache.layout.states
        assert (known["restored"] > 100, known.get("unverified", 0)) == (is_dense, known["restored"])
    with start(model, tmp_path / "kv") as server:
        # It was saved from memory, as what it is.
        again = ask(server, f"{longer}\nNow?")["prefix_cache"]
        assert again["restored"] > 800
        assert again.get("unverified", 0) == (again["restored"] if is_dense else 0)
