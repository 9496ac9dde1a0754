"""A restored run is the cold run, bit for bit, for every architecture, alone and among several behind one router; and
the suite that says so can fail."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from diskprefix.daemon.catalogue.verified import TABLE, installed_versions
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.encoded_pictures import EncodedPictures
from diskprefix.prefixstore.cache.matching import Matcher
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.cache.tiers.tier import View
from diskprefix.prefixstore.kv.numbers import Array
from diskprefix.prefixstore.kv.pages import Captured, Page, PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.schema import NodeKind as NodeKind
from diskprefix.prefixstore.store.schema import node_name
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.runtime.contract import Rows, Runtime
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.tokens import Logits, TokenIds
from tests import forked
from tests.daemon.engine.driving import patch_steps
from tests.exactness import rows, worker
from tests.exactness.architectures import ARCHITECTURES, SCALED, WITH_DRAFT_LAYER, tiny_model
from tests.exactness.forms import Alone, Answered, Comparison, SeveralRow, several_rows
from tests.exactness.jobs import Job, Kind, Lengths, cases_of, expected
from tests.exactness.rows import DTYPES, UNSUPPORTED, Row, answers_of, judged, run_jobs
from tests.examples import examples
from tests.naming import name_nodes
from tests.runner import random_prompt
from tools.faults import exactness

EACH_KIND = (
    "llama",
    "gemma3",
    "gpt_oss",
    "gemma3n",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
    "falcon_h1",
)
"""Full, sliding on either side of a step, shared and latent attention; states alone, beside attention, and in one layer
with it."""
CANNOT = "deepseek_v4"
FEW = (*EACH_KIND, CANNOT)
"""Run in both dtypes, and in bfloat16 with longer prompts; `tools/bench exactness` runs all so, and longer still."""
OTHERS = tuple(name for name in ARCHITECTURES if name not in FEW)[:: 8 if examples(1) == 1 else 1]
"""An eighth of the others, all of them with DISKPREFIX_TEST_EXAMPLES=2; `tools/bench exactness` runs all."""
WITH_PICTURES = tuple(f"{name} with pictures" for name in ("qwen3_vl", "gemma4", "lfm2_vl"))
"""Positions with three axes, pictures that see themselves, and states."""
DRAFTS = WITH_DRAFT_LAYER[::3]
SHORT, LONGER = Lengths.scaled(85, block=16), Lengths.scaled(165, block=16)
"""Longer than any window, and with checkpoints at several positions."""


def jobs_of(names: tuple[str, ...], dtypes: tuple[str, ...], folder: Path, reply: int) -> list[Job]:
    return exactness.tiny_jobs(list(names), dtypes, folder, reply)


def verified() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    """Architectures in bfloat16, and some of each kind in float32 too: one run, as its processes start slowly."""
    folder = tmp_path_factory.mktemp("exactness")
    others = jobs_of(OTHERS, ("bfloat16",), folder, 2)
    short = others + jobs_of(FEW, ("float32",), folder, 2) + jobs_of(DRAFTS, ("bfloat16",), folder, 2)
    longer = [replace(job, lengths=LONGER) for job in jobs_of(FEW, ("bfloat16",), folder, 8)]
    short += jobs_of(tuple(SCALED), ("bfloat16",), folder, 2)
    short += jobs_of((*EACH_KIND, *DRAFTS), ("q8",), folder, 2)
    pictured = jobs_of(WITH_PICTURES, ("bfloat16",), folder, 2)
    jobs = longer + pictured + [replace(job, lengths=SHORT) for job in short]
    return {(row.architecture, row.dtype): row for row in run_jobs(jobs, folder, 2, lambda _line: None)}


@pytest.mark.slow
def test_what_cannot_be_restored_says_why(found: dict[tuple[str, str], Row]) -> None:
    row = found[CANNOT, "bfloat16"]
    assert (row.bitwise, row.kind) == (False, "unsupported")
    assert row.reason is not None
    assert row.reason.startswith("unsupported: ")


@pytest.mark.slow
def test_the_verified_table_says_what_a_run_finds(found: dict[tuple[str, str], Row]) -> None:
    few = [row for (name, dtype), row in found.items() if name in FEW and dtype in DTYPES]
    table = exactness.verified_table(few)["architectures"]
    assert table == {name: verified()["architectures"][name] for name in table}


@pytest.mark.slow
def test_each_architecture_is_restored_bit_for_bit(found: dict[tuple[str, str], Row]) -> None:
    assert {name for name, _ in found} == {*FEW, *OTHERS, *WITH_PICTURES, *DRAFTS, *SCALED}
    assert all(len(row.cases) == 5 and sum(row.restored.values()) for row in found.values() if row.bitwise)
    wrong = {name: row.reason for (name, _), row in found.items() if not row.is_as_it_should_be}
    assert wrong == {}
    unsupported = {name for (name, _), row in found.items() if row.kind == "unsupported"}
    assert unsupported == UNSUPPORTED & {*FEW, *OTHERS}, (
        "what is restored now must be from now on: take it off the list"
    )


def test_the_verified_table_is_about_the_architectures_that_there_are() -> None:
    table = verified()
    assert TABLE.read_text(encoding="utf-8") == exactness.table_text(table), "one architecture on each line"
    assert table["architectures"].keys() == ARCHITECTURES.keys()
    not_exact = {name for name, entry in table["architectures"].items() if set(entry["dtypes"]) != set(DTYPES)}
    assert not_exact == UNSUPPORTED & ARCHITECTURES.keys()
    assert all(table["architectures"][name]["reason"].startswith("unsupported: ") for name in not_exact)
    assert table["real_models"].keys() <= exactness.REAL.keys()


@pytest.mark.parametrize("kind", ["cut", "checkpoint"])
def test_something_must_be_restored_of_every_prompt_that_shares_enough(kind: Kind) -> None:
    lengths = Lengths()
    cases = cases_of(lengths, random_prompt)
    restored = {case.name: expected(case, kind, lengths) for case in cases}
    assert restored.pop("repeat") == lengths.prompt
    assert all(restored.values())
    assert restored["shorter, on the grid"] < lengths.on_grid, "the last token must be computed"
    if kind == "checkpoint":
        assert restored["branch"] < expected(cases[2], "cut", lengths), "the next shorter checkpoint is another point"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the forks: several threads wait for each other longer than such models compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_this_process(name: str, folder: Path, *, at_grid: bool = True, dtype: str = "bfloat16") -> Row:
    """As the suite does it, without the restart: so that what it guards against can be broken on purpose."""
    (job,) = jobs_of((name,), (dtype,), folder, 4)
    job = replace(job, folder=str(folder), at_grid=at_grid)
    saved, saving = worker.answered("save", job)
    assert saving is not None, saved.error
    saving.close()
    restored, restoring = worker.answered("restore", job)
    if restoring is not None:
        restoring.close()
    return judged(job, saved, restored)


Break = Callable[[pytest.MonkeyPatch], None]


def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checkpoints of a prompt have the states of the first one."""
    first: dict[KVSequence, list[Array]] = {}

    def change(self: KVSequence, copies: Sequence[Array]) -> None:
        for copied, old in zip(copies, first.setdefault(self, [one.copy() for one in copies]), strict=True):
            copied[:] = old

    change_states(monkeypatch, change)


def change_states(monkeypatch: pytest.MonkeyPatch, change: Callable[[KVSequence, list[Array]], None]) -> None:
    """Has `change` overwrite the states that were captured."""
    capture = KVSequence.capture

    def captured(self: KVSequence, *args: Any) -> Captured | None:
        found = capture(self, *args)
        assert found is not None
        if copies := [page.tensor for page in found.pages if page.group >= len(self.tables)]:
            change(self, copies)
        return found

    monkeypatch.setattr(KVSequence, "capture", captured)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block too few of what is under a window is restored."""
    fill = KVSequence.fill

    def without_the_first(self: KVSequence, position: int, num_tokens: int, group: int, *others: Any) -> None:
        if not self.tables[group].group.window or position > self.tables[group].complete_from:
            fill(self, position, num_tokens, group, *others)

    monkeypatch.setattr(KVSequence, "fill", without_the_first)


def no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are those that the memory holds of another sequence."""
    fill = KVSequence.fill

    def without_states(self: KVSequence, position: int, num_tokens: int, group: int, *others: Any) -> None:
        if group < len(self.layout.groups):
            fill(self, position, num_tokens, group, *others)

    monkeypatch.setattr(KVSequence, "fill", without_states)


def no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored runs go on in other steps than the cold run, without the check that `prefill` makes."""

    def other_steps(
        runtime: Runtime,
        sequence: KVSequence,
        token_ids: TokenIds,
        *,
        start: int,
        block_size: int,
        after_step: Callable[[KVSequence], None],
        stops: Sequence[int] = (),
        **_pictures: object,
    ) -> Logits:
        ids = token_ids.astype(np.int64)
        step = 5 if start else block_size
        ends = {*range(start + step, len(token_ids), step), *(stop for stop in stops if stop > start), len(token_ids)}
        for end in sorted(ends):
            logits: Logits = runtime.run([Rows(sequence, ids[sequence.num_tokens : end])]).logits[0][-1]
            after_step(sequence)
        return logits

    monkeypatch.setattr("tests.runner.prefill", other_steps)


def no_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose blocks are all stored is restored whole, though its next-token logits are not stored."""
    restorable = Matcher.restorable

    def all_of_it(self: Matcher[View]) -> tuple[list[Node], int]:
        return (self.blocks, self.blocks[-1].end) if self.tail is None and self.blocks else restorable(self)

    monkeypatch.setattr(Matcher, "restorable", all_of_it)


def colliding_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block after the same one has the same name, whatever its tokens."""

    def name(secret: int, parent: bytes, _: TokenIds | bytes, kind: NodeKind) -> bytes:
        return node_name(secret, parent, b"", kind)

    name_nodes(monkeypatch, name)


def late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the disk is slow: nothing is written before a prompt's end."""
    waiting: list[Callable[[], None]] | None = []
    publish, submit = CachedRequest.publish, Writer.queue_publication

    def late(self: Writer, *args: Any, **options: Any) -> None:
        if waiting is None:
            submit(self, *args, **options)
        else:
            waiting.append(partial(submit, self, *args, **options))

    def ending(self: CachedRequest, *args: Any) -> None:
        nonlocal waiting
        publish(self, *args)
        submissions, waiting = waiting, None
        for submission in submissions or ():
            submission()

    monkeypatch.setattr(CachedRequest, "publish", ending)
    monkeypatch.setattr(Writer, "queue_publication", late)


def shared_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not copied shows what the model has made of its states, in place, when it is written."""

    capture = KVSequence.capture

    def shared(self: KVSequence, *args: Any) -> Captured | None:
        found = capture(self, *args)
        assert found is not None
        own = {page.group: page for page in self.states}
        found._by_group = {group: own.get(group, page) for group, page in found._by_group.items()}
        return found

    late_writes(monkeypatch)
    monkeypatch.setattr(KVSequence, "capture", shared)


def forgetful_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slid out of a window is used again before it is written."""

    class Unheld(Captured):
        def __init__(self, pool: PagePool, pages: Mapping[int, Page], *content: Any) -> None:
            super().__init__(pool, pages, *content)
            self.release()

    late_writes(monkeypatch)
    monkeypatch.setattr("diskprefix.prefixstore.kv.sequence.Captured", Unheld)


def earlier_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has the states of one step before its place."""
    before = list[Array]()

    def run(compute: Any, step: Sequence[Any]) -> Any:
        before[:] = [page.tensor.copy() for page in step[0].state.states]
        return compute(step)

    def change(_: KVSequence, copies: Sequence[Array]) -> None:
        for copied, old in zip(copies, before, strict=True):
            copied[:] = old

    patch_steps(monkeypatch, run)
    change_states(monkeypatch, change)


def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """… and its tokens are not compared."""
    colliding_names(monkeypatch)
    monkeypatch.setattr("diskprefix.prefixstore.store.snapshot.is_node", lambda *_: True)


@pytest.mark.cases(3)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("mamba2", no_copies),
        ("gemma3", no_window),
        ("mamba2", no_states),
        ("lfm2", shared_states),
        ("gemma3", forgetful_windows),
        ("qwen3_next", earlier_states),
        *((name, no_grid) for name in ("llama", "gemma3", "qwen3_next", "mamba2")),
        ("llama", no_last_token),
        ("llama", no_comparison),
    ],
)
def test_the_suite_goes_red_when_a_protection_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, broken: Break
) -> None:
    # The last bits show more than in a tiny model's bfloat16. Without AVX-512, that has the same bits in all steps.
    dtype = "float32"
    # The check at load would find out some of them, and not cache such a model at all.
    layout = rehearse(tiny_model(name, getattr(torch, dtype)))
    monkeypatch.setattr("tests.runner.rehearse", lambda _: layout)
    broken(monkeypatch)
    row = in_this_process(name, tmp_path, dtype=dtype)
    assert not row.bitwise
    assert row.reason


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", ["", "4.keys", "4.hidden"])
def test_it_goes_red_when_a_part_of_a_draft_layer_is_not_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    fill = KVSequence.fill

    def without(self: KVSequence, position: int, num_tokens: int, group: int, *others: Any) -> None:
        fill(self, position, num_tokens, group, *others)
        if group < len(self.layout.groups) and part in (names := self.layout.groups[group].described().tensors):
            page = self.tables[group].pages[position // self.pool.block_size]
            assert page is not None
            page.tensor[names.index(part)] = 0

    monkeypatch.setattr(KVSequence, "fill", without)
    row = in_this_process("qwen3_5+draft", tmp_path, at_grid=False)
    assert row.bitwise == (not part)
    assert all("the logits of the reply differ" in case.reason for case in row.cases if case.reason)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("without", [False, True])
def test_it_goes_red_when_a_scale_of_q8_is_not_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: bool
) -> None:
    fill = KVSequence.fill

    def other_scale(self: KVSequence, position: int, num_tokens: int, group: int, *others: Any) -> None:
        fill(self, position, num_tokens, group, *others)
        page = self.tables[group].pages[position // self.pool.block_size]
        assert page is not None
        assert page.tensor.dtype == np.dtype("V34")
        if without:
            page.rows[0, 1] ^= 0x40

    monkeypatch.setattr(KVSequence, "fill", other_scale)
    row = in_this_process("llama", tmp_path, at_grid=False, dtype="q8")
    assert row.bitwise != without, row.reason


@pytest.mark.cases(3)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
@pytest.mark.parametrize("at_grid", [True, False], ids=["grid", "token"])
def test_the_suite_is_green_when_nothing_is_broken(tmp_path: Path, name: str, at_grid: bool) -> None:
    row = in_this_process(name, tmp_path, at_grid=at_grid)
    assert row.bitwise, row.reason
    assert row.exact_at == ("grid" if at_grid else "token")


@pytest.mark.cases(3)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "lfm2", "mamba2"])
def test_what_is_exact_at_every_token_needs_no_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """With other steps after a restore, which turn the suite red for the same models on the grid."""
    no_grid(monkeypatch)
    row = in_this_process(name, tmp_path, at_grid=False)
    assert (row.bitwise, row.exact_at) == (True, "token"), row.reason


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "harmless"), [("llama", colliding_names), ("lfm2", late_writes), ("gemma3", late_writes)]
)
def test_what_protections_are_for_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, harmless: Break
) -> None:
    harmless(monkeypatch)
    row = in_this_process(name, tmp_path, dtype="float32")
    assert row.bitwise, row.reason


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_rows_of_another_picture_turn_the_suite_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = EncodedPictures.load

    def loaded(*given: Any) -> Array | None:
        rows = load(*given)
        return None if rows is None else rows[:, ::-1]

    monkeypatch.setattr(EncodedPictures, "load", loaded)
    row = in_this_process("qwen3_vl with pictures", tmp_path, at_grid=False)
    assert [case.case for case in row.cases if case.reason] == ["shorter"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "dtype", "at_grid"),
    [
        *(("llama", "bfloat16", at_grid) for at_grid in (True, False)),
        *((name, "Q4_1", False) for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
    ],
)
def test_after_a_kill_a_restored_run_equals_a_cold_run(name: str, dtype: str, at_grid: bool, tmp_path: Path) -> None:
    (job,) = (replace(job, at_grid=at_grid) for job in jobs_of((name,), (dtype,), tmp_path, 4))
    for phase in ("save", "restore"):
        assert forked.run(worker.do, phase, job) == -signal.SIGKILL
    row = judged(job, answers_of(job, "save"), answers_of(job, "restore"))
    assert row.bitwise, row.reason
    assert row.exact_at == ("grid" if at_grid else "token")


def test_a_failure_in_either_process_is_the_reason(tmp_path: Path) -> None:
    job = Job(name="llama", dtype="bfloat16", folder=str(tmp_path), model=str(tmp_path / "no-model"))
    answers, runner = worker.answered("save", job)
    assert runner is None
    row = judged(job, answers, answers)
    assert not row.bitwise
    assert not row.is_as_it_should_be
    assert "no-model" in (row.reason or "")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(exactness.main, list(arguments))


def test_an_unknown_architecture_and_a_table_of_one_dtype_are_refused(tmp_path: Path) -> None:
    answer = invoke("--only", "llama,lama")
    assert answer.exit_code == 2
    assert "lama" in answer.stderr
    assert "smollm2" in answer.stderr
    assert invoke("--dtype", "bf16", "--write-table", str(tmp_path / "table.json")).exit_code == 2
    assert not (tmp_path / "table.json").exists()


@pytest.mark.slow
def test_rows_of_a_table_are_written_anew(
    found: dict[tuple[str, str], Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(exactness, "run_jobs", lambda jobs, *_: [found[job.name, job.dtype] for job in jobs])
    assert exactness.table_text(verified()) == TABLE.read_text()
    table, old = tmp_path / "table.json", verified() | installed_versions()
    written = exactness.table_text(old)
    old["architectures"]["llama"]["dtypes"] = []
    table.write_text(json.dumps(old))
    assert invoke("--only", "llama", "--write-table", str(table)).exit_code == 0
    assert table.read_text() == written
    table.write_text(json.dumps(old | {"torch": "1.0"}))
    assert invoke("--only", "llama", "--write-table", str(table)).exit_code == 2


def test_what_is_not_exact_at_every_token_says_why() -> None:
    for name, row in verified()["architectures"].items():
        assert bool(row["reason"]) == (set(row["exact_at_tokens"]) != set(DTYPES)), name
    exact = [row for row in verified()["architectures"].values() if "bfloat16" in row["exact_at_tokens"]]
    assert len(exact) >= 99


@pytest.mark.slow
def test_the_tool_prints_rows_and_exits_with_1_if_one_is_not_exact(
    found: dict[tuple[str, str], Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--only", f"llama,{CANNOT}", "--dtype", "bf16", "--reply", "2", "--json")

    def rows_that_were_run(jobs: list[Job], *_: Any) -> list[Row]:
        return [found[job.name, job.dtype] for job in jobs]

    monkeypatch.setattr(exactness, "run_jobs", rows_that_were_run)
    answer = invoke(*arguments)
    assert answer.exit_code == 0, answer.stderr
    llama, cannot = json.loads(answer.stdout)
    assert (llama["architecture"], llama["layers"], llama["dtype"]) == ("llama", "2× full", "bfloat16")
    assert (llama["bitwise"], llama["reason"], llama["kind"]) == (True, None, "cut")
    assert (cannot["bitwise"], cannot["kind"]) == (False, "unsupported")
    # The same rows once more, of which now one is not as it should be.
    monkeypatch.setattr(rows, "UNSUPPORTED", frozenset())
    assert invoke(*arguments).exit_code == 1


# Several architectures behind one router.

SEVERAL = ["gemma3", "qwen3_next"]
"""With windows, and with states that cannot be cut. `tools/bench exactness --form several` runs all."""


@pytest.mark.slow
def test_models_that_are_swapped_unloaded_and_killed_answer_and_save_what_they_do_alone(tmp_path: Path) -> None:
    rows = several_rows(SEVERAL, "bfloat16", tmp_path, LONGER, 4)
    assert [(row.architecture, row.different) for row in rows] == [(name, []) for name in SEVERAL]
    assert all(row.comparisons > 100 for row in rows)
    assert all(min(row.restored.values()) > 0 for row in rows)


def test_other_bits_other_tokens_and_lost_state_are_found() -> None:
    cold, restored = {"repeat": Answered("a", 0, "none")}, {"repeat": Answered("a", 9, "disk")}
    alone = Alone(cold, restored, {b"k": b"1"})
    same, other = Comparison("llama", alone), Comparison("llama", alone)
    same.compare_restored("again", restored)
    same.compare_saved({b"k": b"1", b"of another model": b"2"})
    same.require_restored(9)
    assert (same.different, same.comparisons) == ([], 6)
    other.compare_restored("again", {"repeat": Answered("b", 8, "disk")})
    other.compare_saved({b"k": b"2"})
    other.require_restored(9)
    assert len(other.different) == 5


def test_the_tool_goes_on_without_what_fails_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_of(names: Sequence[str], dtype: str, *_: Any) -> list[SeveralRow]:
        if "gemma3" in names:
            raise ValueError("it breaks")
        return [SeveralRow(name, dtype, 7, [], {"repeat": 9}) for name in names]

    monkeypatch.setattr(exactness, "several_rows", rows_of)
    arguments = ["--form", "several", "--dtype", "bf16", "--json", "--only"]
    assert invoke(*arguments, "llama,mamba2").exit_code == 0
    failed = invoke(*arguments, "llama,gemma3")
    assert failed.exit_code == 1
    llama, gemma3 = json.loads(failed.stdout)
    assert (llama["comparisons"], llama["different"]) == (7, [])
    assert gemma3["different"] == ["ValueError: it breaks"]
    assert "    gemma3, bfloat16: ValueError: it breaks\n" in failed.stderr
    assert invoke(*arguments, "smollm2").exit_code == 2
