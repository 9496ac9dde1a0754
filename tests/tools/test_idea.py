"""`tools/idea.py` gives the same bits across `kill -9`, and it cuts, keeps and restores what the daemon does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from diskprefix.daemon.engine.loop import Engine
from diskprefix.runtime.plan.planned import PlanRuntime
from diskprefix.values import SHARED
from tests.daemon.engine.driving import load, request, run_together, tokens
from tests.runtime.plan import tiny
from tests.source_files import PACKAGE
from tools import idea

BLOCK = idea.BLOCK
ROWS_BYTES = 4 * BLOCK * idea.LAYERS * 2 * idea.WIDTH
SALTED = SHARED.with_salt("a user")
QUESTION, REPLY, OTHER, FAR = tokens(75, 1), tokens(60, 2), tokens(9, 3), tokens(70, 4)
PROMPTS = {
    "below a block": QUESTION[:10],
    "a question": QUESTION,
    "the same again": QUESTION,
    "at a boundary": QUESTION[: 4 * BLOCK],
    "at a boundary again": QUESTION[: 4 * BLOCK],
    "the next turn": np.concatenate([QUESTION, REPLY]),
    "the turn after it": np.concatenate([QUESTION, REPLY, OTHER, REPLY]),
    "another end": np.concatenate([QUESTION[:-5], OTHER]),
    "something else": FAR,
    "another middle": np.concatenate([QUESTION[:40], FAR]),
    "more of something else": np.concatenate([FAR[:50], OTHER, REPLY]),
    "the conversation again": np.concatenate([QUESTION, REPLY, FAR]),
    "another end of it": np.concatenate([QUESTION, REPLY, FAR[:-4], OTHER]),
    "something else again": FAR,
}
SCOPES = ["off", "full", "auto:30", "auto:2", "auto:1", "100", "64", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is exact at every token."""
    return tiny.write_folder(tmp_path_factory.mktemp("plan"), dtype=torch.bfloat16, max_position_embeddings=512)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(model, tmp_path / "kv", block_size=BLOCK, kv_cache_min_tokens=0)
    assert isinstance(engine.runtime, PlanRuntime)
    yield engine
    engine.close()


def ask(engine: Engine, token_ids: np.ndarray, scope: str) -> int:
    """Returns how many tokens the daemon restored from its disk."""
    [client] = run_together(engine, [request(token_ids, scope=scope, tenant=SALTED, max_tokens=1)])
    num_restored = client.done.usage.cached_tokens
    assert engine.cache.writer.flush(30)
    # As after a restart: the next prompt finds nothing in memory.
    engine.pages.forget_idle()
    return num_restored


def stored_names(engine: Engine) -> set[bytes]:
    with engine.cache.store.snapshot() as snapshot:
        return set(snapshot.keys("usage"))


def kept_names(cache: idea.Cache) -> set[bytes]:
    with cache.file.begin() as transaction:
        return {key[16:] for key, _ in transaction.cursor(cache.nodes)}


@pytest.mark.cases(2)
@pytest.mark.parametrize("scope", SCOPES)
def test_the_idea_keeps_the_blocks_and_restores_the_tokens_that_the_daemon_does(
    scope: str, engine: Engine, tmp_path: Path
) -> None:
    cache = idea.Cache(str(tmp_path / "idea"), scope, idea.Model())
    # Names are equal where the secret of the store and the root of the model are.
    cache.secret, cache.root = engine.cache.store.secret, engine.cache.owner(SALTED).root
    for name, token_ids in PROMPTS.items():
        answer = cache.answer(token_ids)
        assert (name, ask(engine, token_ids, scope)) == (name, answer.restored)
        assert (name, stored_names(engine)) == (name, kept_names(cache))
        assert answer.restored + answer.computed == len(token_ids)
    assert bool(kept_names(cache)) == (scope != "off")


def test_the_idea_shows_equal_bits_after_a_kill() -> None:
    ran = subprocess.run([sys.executable, idea.__file__], capture_output=True, text=True, check=True)
    heading, *lines = ran.stdout.splitlines()
    assert heading.split() == ["scope", "prompt", "tokens", "restored", "computed", "saved", "same", "bits"]
    for run in idea.RUNS:
        rows = [line for line in lines if line.startswith(f"{run} ")]
        kill = next(number for number, row in enumerate(rows) if "kill -9" in row)
        after = [row.split()[-5:] for row in rows[kill + 1 :]]
        assert len(after) == len(idea.prompts())
        assert {row[-1] for row in after} == {"yes"}
        assert any(int(row[1]) for row in after) == (run != "off")
    cut = [row.split() for row in lines if row.startswith("full  ") and "another end" in row]
    assert int(cut[-1][-4]) % BLOCK, "a prompt is restored up to any token"


@pytest.fixture
def saved(tmp_path: Path) -> idea.Cache:
    """A cache that has saved a whole question."""
    cache = idea.Cache(str(tmp_path / "saved"), "full", idea.Model())
    cache.answer(QUESTION)
    return cache


@pytest.fixture
def cold(tmp_path: Path) -> bytes:
    """The logits after the question, computed without a cache."""
    return idea.Cache(str(tmp_path / "cold"), "off", idea.Model()).answer(QUESTION).logits.tobytes()


def question_nodes(cache: idea.Cache) -> list[idea.Node]:
    return idea.nodes_of(cache.secret, cache.root, QUESTION, len(QUESTION), keeps_logits=True)


def change_block(cache: idea.Cache, *, with_digest: bool) -> None:
    """Changes a number of the state of the question's second block."""
    node = question_nodes(cache)[1]
    key = node.parent + node.name
    with cache.file.begin(write=True) as transaction:
        content = bytearray(transaction.get(key, db=cache.nodes) or b"")
        content[-1] ^= 1
        if with_digest:
            content[:8] = xxhash.xxh3_64_digest(key + bytes(content[8:]))
        transaction.put(key, bytes(content), db=cache.nodes)


def drop_end(cache: idea.Cache) -> None:
    """Removes the logits at the question's end, so that its last token is computed."""
    with cache.file.begin(write=True) as transaction:
        transaction.delete(question_nodes(cache)[-1].name, db=cache.ends)


def test_a_damaged_block_is_computed_again_and_saved_again(saved: idea.Cache, cold: bytes) -> None:
    change_block(saved, with_digest=False)
    again = saved.answer(QUESTION)
    assert (again.restored, again.logits.tobytes()) == (BLOCK, cold)
    assert saved.answer(QUESTION).restored == len(QUESTION)


@pytest.mark.parametrize("is_changed", [False, True])
def test_the_comparison_of_bits_sees_a_wrong_restore(is_changed: bool, saved: idea.Cache, cold: bytes) -> None:
    drop_end(saved)
    if is_changed:
        change_block(saved, with_digest=True)
    again = saved.answer(QUESTION)
    assert again.restored == len(QUESTION) - 1
    assert (again.logits.tobytes() != cold) == is_changed


def test_a_block_with_other_tokens_under_the_same_name_is_not_restored(saved: idea.Cache) -> None:
    first, other = question_nodes(saved)[0], QUESTION.copy()
    other[0] += 1
    content = BLOCK.to_bytes(4, "little") + other[:BLOCK].tobytes() + bytes(ROWS_BYTES)
    assert saved.write(saved.nodes, first.parent + first.name, content)
    assert saved.answer(QUESTION).restored == 0


def test_a_full_store_fails_no_request(tmp_path: Path, cold: bytes) -> None:
    cache = idea.Cache(str(tmp_path / "small"), "full", idea.Model())
    cache.file.set_mapsize(1 << 16)
    assert [cache.answer(QUESTION).logits.tobytes() for _ in range(2)] == [cold, cold]


def test_a_recurrent_model_is_restored_where_an_earlier_prompt_ended(tmp_path: Path) -> None:
    cache = idea.Cache(str(tmp_path / "recurrent"), "full", idea.Model(is_recurrent=True))
    uncached = idea.Cache(str(tmp_path / "uncached"), "off", cache.model)
    for token_ids, restored in ((QUESTION, 0), (PROMPTS["the next turn"], len(QUESTION)), (PROMPTS["another end"], 0)):
        answer = cache.answer(token_ids)
        assert (answer.restored, answer.logits.tobytes()) == (restored, uncached.answer(token_ids).logits.tobytes())


def test_another_model_finds_nothing(saved: idea.Cache) -> None:
    folder = saved.file.path()
    saved.file.close()
    assert idea.Cache(folder, "full", idea.Model(seed=1)).answer(QUESTION).restored == 0


def test_the_idea_and_the_page_of_architecture_tell_the_same_four_ideas() -> None:
    page = (PACKAGE / "README.md").read_text(encoding="utf-8").partition("## Four ideas")[2].partition("\n## ")[0]
    titles = re.findall(r"^\d\. \*\*(.+?)\.\*\*", page, re.MULTILINE)
    told = re.findall(r"^# ---- Idea \d: (.+)$", Path(idea.__file__).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(titles) == len(told) == 4
    assert [title.lower() for title in titles] == [text[: len(title)] for title, text in zip(titles, told, strict=True)]


def test_the_idea_needs_three_libraries_and_nothing_of_the_project() -> None:
    script = f"import runpy, sys; runpy.run_path({idea.__file__!r}); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in ran.stdout.split()}
    assert {"lmdb", "numpy", "xxhash"} <= imported
    assert not imported & {"diskprefix", "tests", "tools", "torch", "transformers", "msgspec", "tokenizers"}
