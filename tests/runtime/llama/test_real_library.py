"""The library itself keeps the promises that the scripted one checks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.llama.devices import device_named
from diskprefix.runtime.llama.llama_context import LlamaModel, LlamaOptions
from diskprefix.runtime.llama.llama_layout import LlamaLayout
from diskprefix.runtime.llama.llama_library import open_library
from diskprefix.runtime.llama.llama_rehearsal import rehearse
from diskprefix.runtime.llama.llama_runtime import LlamaRuntime
from diskprefix.runtime.load.self_check import sequence_with_room
from tests.daemon.server.daemon_process import DaemonProcess, reply_to, serve_flags, text_of
from tests.runtime.plan import tiny

BLOCK, ROOM = 16, 100
STEPS = (BLOCK, BLOCK, BLOCK, 7, 1, 1, 1)
ALL_LAYERS = 99
FORMS = [("auto", ""), ("q8", ""), ("auto", "Q8_0")]
"""The type of keys and values, and of the weights."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        # A head of a row of q8 has items of 32 numbers.
        patch.setattr(tiny, "HIDDEN", 32 * tiny.HEADS)
        return {kind: tiny.write_gguf(folder / f"tiny{kind}.gguf", quantised=kind) for kind in ("", "Q8_0")}


def options_of(kv_type: str) -> LlamaOptions:
    """Returns the options with the GPU that the library has, or else with the CPU."""
    device = device_named(open_library(), "auto")
    placed: dict[str, Any] = {} if device is None else {"device": device.name, "num_layers": ALL_LAYERS}
    return LlamaOptions(step=BLOCK, kv_type=kv_type, **placed)


class Opened:
    """A runtime of the file, as after its rehearsal."""

    def __init__(self, file: Path, kv_type: str, *, num_contexts: int = 1) -> None:
        library, options = open_library(), options_of(kv_type)
        rehearsal = rehearse(library, file, options)
        assert rehearsal.form is not None, rehearsal.reason
        self.model = LlamaModel(library, file, options, device_named(library, "auto"))
        placed = rehearsal.placed(self.model)
        assert isinstance(placed, LlamaLayout)
        self.golden, self.pool = rehearsal.golden, PagePool(placed.layout, block_size=BLOCK)
        self.runtime = LlamaRuntime(self.model, rehearsal.form, placed, max_contexts=num_contexts)

    def steps(self, sequence: KVSequence, counts: Sequence[int], seed: int = 1) -> list[bytes]:
        found = []
        for count in counts:
            ids = np.random.default_rng(seed).integers(0, self.model.vocab_size, ROOM)
            of_step = ids[sequence.num_tokens : sequence.num_tokens + count]
            rows = Rows(sequence, of_step, may_lag=count == 1)
            found.append(self.runtime.run([rows]).logits[0].tobytes())
        return found

    def close(self) -> None:
        self.runtime.close()
        self.model.close()


@pytest.mark.parametrize(("kv_type", "weights"), FORMS)
def test_a_restored_sequence_has_the_bits_of_an_uninterrupted_run(files: Any, kv_type: str, weights: str) -> None:
    opened = Opened(files[weights], kv_type)
    sequence = sequence_with_room(opened.pool, ROOM)
    expected = opened.steps(sequence, STEPS)
    sequence.complete_pages()
    whole = sequence.content()
    for end in (1, 3, 4, 6):
        cut = sequence_with_room(opened.pool, ROOM)
        opened.steps(cut, STEPS[:end])
        cut.complete_pages()
        again = sequence_with_room(opened.pool, ROOM, cut.prefix())
        assert opened.steps(again, STEPS[end:]) == expected[end:], end
        again.complete_pages()
        assert again.content() == whole, end
    opened.close()


@pytest.mark.parametrize("num_contexts", [1, 2])
def test_conversations_in_turn_have_the_bits_of_each_alone(files: Any, num_contexts: int) -> None:
    opened = Opened(files[""], "auto", num_contexts=num_contexts)
    expected = {seed: opened.steps(sequence_with_room(opened.pool, ROOM), STEPS, seed) for seed in (1, 2)}
    both = {seed: sequence_with_room(opened.pool, ROOM) for seed in (1, 2)}
    for number, count in enumerate(STEPS):
        for seed, sequence in both.items():
            assert opened.steps(sequence, [count], seed) == [expected[seed][number]], (number, seed)
    opened.close()


def test_the_golden_digest_follows_the_weights_and_the_type_of_the_rows(files: Any, tmp_path: Path) -> None:
    library = open_library()
    asked = [(file, kv_type) for kv_type, kind in FORMS for file in [files[kind]]]
    asked.append((tiny.write_gguf(tmp_path / "other.gguf", seed=1), "auto"))
    goldens = [rehearse(library, file, options_of(kv_type)).golden for file, kv_type in asked]
    assert len(set(goldens)) == len(goldens)
    assert rehearse(library, files[""], options_of("auto")).golden == goldens[0]


@pytest.mark.slow
def test_a_daemon_that_was_killed_restores_from_disk_and_gives_the_same_reply(tmp_path: Path) -> None:
    model = tiny.write_gguf(tmp_path / "tiny.gguf")
    flags = serve_flags(model, tmp_path / "kv", runtime="llama")
    body = {"messages": [{"role": "user", "content": "hello there " * 3}], "max_tokens": 6, "temperature": 0}
    replies = []
    for _ in range(2):
        with DaemonProcess(*flags) as daemon:
            daemon.wait_ready()
            with daemon.client() as client:
                replies.append(reply_to(client, body))
                cold = reply_to(client, body, scope="off")
            daemon.wait_saved()
            daemon.stop(signal.SIGKILL)
        assert text_of(replies[-1]) == text_of(cold)
    assert text_of(replies[0]) == text_of(replies[1])
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0
    assert cached[1] >= 2 * BLOCK


@pytest.mark.slow
def test_daemons_of_the_library_and_of_the_plan_share_a_store_and_lose_nothing(tmp_path: Path) -> None:
    model = tiny.write_gguf(tmp_path / "tiny.gguf")
    body = {"messages": [{"role": "user", "content": "hello there " * 3}], "max_tokens": 6, "temperature": 0}
    texts, restored = [list[str]() for _ in range(2)], [list[int]() for _ in range(2)]
    for _ in range(2):
        with ExitStack() as running:
            daemons = [
                running.enter_context(DaemonProcess(*serve_flags(model, tmp_path / "kv", runtime=engine)))
                for engine in ("llama", "plan")
            ]
            for number, daemon in enumerate(daemons):
                daemon.wait_ready()
                with daemon.client() as client:
                    reply = reply_to(client, body)
                texts[number].append(text_of(reply))
                restored[number].append(reply["prefix_cache"]["restored"])
                daemon.wait_saved()
            for daemon in daemons:
                daemon.stop(signal.SIGKILL)
    assert [first == again for first, again in texts] == [True, True]
    assert [first for first, _ in restored] == [0, 0]
    assert min(again for _, again in restored) >= 2 * BLOCK
