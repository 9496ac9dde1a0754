"""Replies that the draft layer of the served model guesses: what is said and saved is that without guesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation import layer_proposer
from diskprefix.daemon.engine.speculation.choose_drafts import Speculation
from diskprefix.daemon.engine.speculation.drafting import Draft
from diskprefix.daemon.engine.speculation.step_times import StepTimes
from diskprefix.errors import ModelError
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.plan.drafts import DraftRow
from diskprefix.runtime.plan.planned import PlanRuntime
from diskprefix.tokens import as_token_ids
from tests.daemon.engine.driving import BLOCK, Client, load, request, run_together, said, tokens, write_model
from tests.daemon.engine.speculation.test_guesses import REPLY, REQUESTS, guessing, said_and_saved, some_are_wrong
from tests.runtime.load.test_draft_layer import write_folder
from tests.runtime.plan import tiny

NAMES = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm", "mtp_block": "mtp.layers.0",
}  # fmt: skip


def write_hybrid(folder: Path) -> Path:
    """A model with recurrent layers."""
    write_model(folder, "qwen3_5+draft")
    state = dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = name.removeprefix("model.draft_layer.")
        first, _, rest = own.partition(".")
        state[name if own == name else f"{NAMES[first]}.{rest}"] = tensor
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


WRITE: dict[str, Callable[[Path], Path]] = {
    "hybrid": write_hybrid,
    "mixture": lambda folder: write_folder(folder, "glm4moe"),
    "windows": lambda folder: write_folder(folder, "mimo2"),
}


@pytest.fixture(scope="module", params=list(WRITE))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITE[request.param](tmp_path_factory.mktemp("model") / request.param.replace("/", "-"))


def drafting(folder: Path, kv: Path) -> Engine:
    return guessing(folder, kv, speculative="mtp")


@contextmanager
def helped(clients: Iterable[Client], share: float = 0.8) -> Iterator[None]:
    """Within it, the layer computes what it computes, and guesses the replies of these clients: this share of their
    tokens, and wrong ones."""
    known = [
        [*client.ticket.request.prompt.token_ids.tolist(), *client.tokens_of(number)]
        for client in clients
        for number in range(client.ticket.request.sampling.n)
    ]
    chance, coming = random.Random(1), dict[tuple[int, int, int], set[int]]()
    for one in known:
        for at in range(1, len(one) - 1):
            coming.setdefault((at, one[at - 1], one[at]), set()).add(one[at + 1])

    replies, make_row = dict[KVSequence, Reply](), layer_proposer._row

    def noted(one: Draft) -> DraftRow:
        row = make_row(one)
        replies[row.state] = one.reply
        return row

    draft = PlanRuntime.draft

    def helping(runtime: PlanRuntime, rows: Sequence[DraftRow]) -> Any:
        found, hidden = draft(runtime, rows)
        for number, row in enumerate(rows):
            before = row.hidden is None and int(replies[row.state].ids(row.position - 1, row.position)[0])
            of_next = [
                token
                for (at, left, last), following in coming.items()
                if (at, last) == (row.position, row.token_id) and before in (False, left)
                for token in following
            ]
            if of_next:
                found[number] = (of_next[0] if chance.random() < share else (of_next[0] + 1) % 250, 0.9)
        return found, hidden

    with patch.object(PlanRuntime, "draft", helping), patch.object(layer_proposer, "_row", noted):
        yield


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = drafting(folder, tmp_path / "kv")
    yield engine
    assert engine.check_memory() == []


@pytest.mark.cases(2)
def test_replies_of_several_requests_at_once_are_those_without(folder: Path, engine: Engine, tmp_path: Path) -> None:
    """Also with what was saved, and with tokens of the layer alone, which are wrong."""
    plain = drafting(folder, tmp_path / "plain")
    plain.speculation = Speculation(None, [], StepTimes(), plain.clock)
    without, expected = said_and_saved(plain, REQUESTS)
    plain.close()
    with helped(without):
        clients, found = said_and_saved(engine, REQUESTS)
    assert found == expected
    assert all(map(some_are_wrong, clients))
    assert {client.done.timings.drafted_by for client in clients} == {"mtp"}
    engine.pages.forget_idle()
    again = run_together(engine, REQUESTS)
    assert list(map(said, again)) == list(map(said, without))


@pytest.mark.cases(2)
def test_after_a_restart_the_first_step_guesses_as_well_as_before(folder: Path, tmp_path: Path) -> None:
    """What the layer guesses depends on its memory alone, which is restored."""
    first = request(tokens(5 * BLOCK + 7, 8), max_tokens=REPLY)
    guesses: list[dict[int, tuple[int, float]]] = []

    draft = PlanRuntime.draft

    def noted(runtime: PlanRuntime, rows: Sequence[DraftRow]) -> Any:
        found, hidden = draft(runtime, rows)
        if rows[0].hidden is None:
            guesses[-1][rows[0].position] = found[0]
        return found, hidden

    engine = drafting(folder, tmp_path / "kv")
    (client,) = run_together(engine, [first])
    turn = request(
        np.concatenate([first.prompt.token_ids, as_token_ids(client.tokens), tokens(9, 9)]), max_tokens=REPLY
    )
    for _ in range(2):
        # The first step of an engine has no guesses.
        run_together(engine, [request(tokens(9, 30), scope="off")])
        guesses.append({})
        with patch.object(PlanRuntime, "draft", noted):
            run_together(engine, [turn])
        restored = engine.cache.restored_tokens
        engine.close()
        engine = drafting(folder, tmp_path / "kv")
    assert restored["disk"] > len(first.prompt.token_ids)
    both = guesses[0].keys() & guesses[1].keys()
    assert min(both) == len(turn.prompt.token_ids), "from the first token on"
    assert {at: guesses[0][at] for at in both} == {at: guesses[1][at] for at in both}


def test_a_layer_that_fails_fails_no_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    one = request(tokens(100, 3), max_tokens=REPLY)
    (expected,) = run_together(engine, [one])
    with patch.object(PlanRuntime, "draft", side_effect=RuntimeError("no more")):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert caplog.text.count("goes on without mtp guesses: no more") == 1


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--speculative mtp: model has no draft layer"):
        load(tiny.write_folder(tmp_path / "model"), tmp_path / "kv", speculative="mtp")
