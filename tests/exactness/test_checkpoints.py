"""Checkpoints of recurrent layers lie where the policy wants them, and what goes on from one is the cold run, bit for
bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.prefixstore.store.eviction import RECENT_CHECKPOINTS
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.scope import parse_scope
from diskprefix.tokens import LEAST_TOKENS, TokenIds, as_token_ids, common_prefix_length
from diskprefix.values import CacheOptions, Prompt
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, Answer, Runner, random_prompt, same, tiny_settings

KINDS = ("lfm2", "qwen3_next", "mamba2", "falcon_h1", "kimi_linear")
"""Short convolutions and delta nets beside attention, Mamba 2 alone, and in one layer with attention; and a delta net
with a decay for each number beside latent attention and experts."""
SYSTEM, UNSAVED = 37, 1
END = 2
"""The token at the end of each message."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_runner(kind: str, folder: Path) -> Runner:
    runner = Runner(tiny_model(kind, torch.bfloat16), tiny_settings(folder), kind, exact_at=None)
    assert runner.layout.state_kind == "token_checkpoints"
    return runner


def is_cold(runner: Runner, prompt: TokenIds, answer: Answer) -> bool:
    """Whether an answer is that of a run without the cache."""
    return same(runner.run(prompt, "off", reply=len(answer.greedy)), answer)


class Chat:
    """A conversation with safe cuts at the ends of its messages; the template opens the reply with two tokens."""

    def __init__(self, seed: int) -> None:
        self.seed, self.messages = seed, [self._text(SYSTEM, 0)]

    def _text(self, num_tokens: int, seed: int) -> TokenIds:
        return np.append(random_prompt(seed, num_tokens - 1), END).astype(np.int32)

    def ask(self, num_tokens: int) -> Prompt:
        self.messages.append(self._text(num_tokens, 1000 * self.seed + len(self.messages)))
        ends = np.cumsum([len(message) for message in self.messages]).tolist()
        self.sent = np.concatenate([*self.messages, as_token_ids([5, 6])])
        return Prompt(self.sent, tuple(ends), SYSTEM)

    def answered(self, answer: Answer) -> TokenIds:
        """Adds the reply as it was sampled. Returns the tokens whose state there was at its end."""
        self.messages.append(as_token_ids([5, 6, *answer.greedy, END]))
        return np.concatenate([self.sent, as_token_ids(answer.greedy[:-1])])


AUTO = CacheOptions(scope=parse_scope("auto:30", param="scope"))


@pytest.mark.cases(3)
def test_the_next_turn_computes_what_is_new(kind: str, tmp_path: Path) -> None:
    runner, chat = open_runner(kind, tmp_path), Chat(1)
    known = random_prompt(0, 0)
    for num_tokens in (30, 5, 41, 18, 3):
        prompt = chat.ask(num_tokens)
        answer = runner.run_prompt(prompt, AUTO, reply=9)
        common = common_prefix_length(prompt.token_ids, known)
        assert answer.report.restored == common, "its reply was kept to its end"
        assert is_cold(runner, prompt.token_ids, answer)
        known = chat.answered(answer)
        runner.reopen()
    # A client that strips the reply goes on from the prompt's last message.
    kept = len(chat.sent) - 2
    other = np.concatenate([chat.sent[:kept], random_prompt(99, 20)])
    answer = runner.run(other, UNSAVED, reply=5)
    assert kept - LEAST_TOKENS < answer.report.restored <= kept
    assert is_cold(runner, other, answer)
    runner.close()


@pytest.mark.cases(3)
def test_it_is_exact_wherever_a_checkpoint_is(kind: str, tmp_path: Path) -> None:
    """Checkpoints at random places, prompts that leave in other places, and a restart before each."""
    runner, random = open_runner(kind, tmp_path), np.random.default_rng(3)
    prompt = random_prompt(1, 7 * BLOCK + 3)
    for _ in range(3):
        boundaries = tuple(sorted(random.choice(np.arange(LEAST_TOKENS, len(prompt)), 4, replace=False).tolist()))
        end = int(boundaries[-1]) + 1
        saved = runner.run(prompt[:end], "full", boundaries=boundaries, reply=int(random.integers(1, 2 * BLOCK)))
        whole = np.concatenate([prompt[:end], as_token_ids(saved.greedy[:-1])])
        points = {*saved.report.selection.checkpoints, end, len(whole)}
        for leaves_at in (*random.integers(LEAST_TOKENS, len(whole), 3).tolist(), len(whole)):
            runner.reopen()
            asked = np.concatenate([whole[:leaves_at], random_prompt(leaves_at, 7)])
            common = common_prefix_length(asked, whole)
            warm = runner.run(asked, UNSAVED, reply=4)
            assert warm.report.restored >= max((at for at in points if at <= common), default=0)
            assert is_cold(runner, asked, warm)
    runner.close()


def test_a_boundary_that_the_end_of_a_shorter_prompt_holds_is_stored(kind: str, tmp_path: Path) -> None:
    runner, prompt = open_runner(kind, tmp_path), random_prompt(4, 3 * BLOCK + 5)
    runner.run(prompt, "full")
    runner.reopen()
    longer = runner.run(np.concatenate([prompt, random_prompt(6, 9)]), len(prompt))
    assert (longer.report.restored, longer.report.saved) == (len(prompt), "stored")
    runner.close()


def test_a_cancelled_prompt_goes_on_where_it_was_left(kind: str, tmp_path: Path) -> None:
    runner, prompt = open_runner(kind, tmp_path), random_prompt(5, 6 * BLOCK)
    # The step before the one that it is cancelled in ends in the middle of a block.
    left = runner.cancelled(Prompt(prompt, (2 * BLOCK + 7,)), CacheOptions(scope=parse_scope("full", param="")), 3)
    assert left.saved == "queued"
    runner.reopen()
    warm = runner.run(prompt, UNSAVED, reply=4)
    assert warm.report.restored == 2 * BLOCK + 7
    assert is_cold(runner, prompt, warm)
    runner.close()


def test_a_long_conversation_keeps_its_last_checkpoints_and_what_others_share(tmp_path: Path) -> None:
    runner, chats = open_runner("lfm2", tmp_path), [Chat(seed) for seed in (1, 2)]
    for _ in range(6):
        for chat in chats:
            chat.answered(runner.run_prompt(chat.ask(40), AUTO, reply=5))
    runner.flush()
    with runner.cache.store.snapshot() as snapshot:
        nodes = [node for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None]
        entries = [entry for _, entry in snapshot.entries()]
    ends = [node.end for node in nodes if node.kind == NodeKind.CHECKPOINT]
    assert ends.count(SYSTEM) == 1, "the end of the system message, which both share"
    assert len(ends) == 1 + len(chats) * RECENT_CHECKPOINTS
    assert sorted(entry.num_tokens for entry in entries) == sorted(len(chat.sent) + 4 for chat in chats)
    stored = sum(node.raw_bytes for node in nodes if node.kind == NodeKind.CHECKPOINT)
    assert stored <= len(ends) * (runner.layout.state_bytes + BLOCK * runner.layout.bytes_per_token)
    # A new conversation begins behind the system message, and the last message may be edited.
    assert runner.run_prompt(Chat(3).ask(20), AUTO).report.restored == SYSTEM
    edited = chats[0].messages[:-2]
    before = np.concatenate([*edited, random_prompt(50, 30)])
    assert runner.run(before, UNSAVED).report.restored > sum(map(len, edited)) - len(edited[-1])
    runner.close()


def test_the_end_of_a_document_stays_while_each_question_about_it_becomes_a_conversation(tmp_path: Path) -> None:
    runner, document = open_runner("lfm2", tmp_path), np.append(random_prompt(1, 1199), END).astype(np.int32)
    restored: list[int] = []
    for seed in range(1, 5):
        chat = Chat(seed)
        chat.messages.append(document)
        for turn in range(4):
            answer = runner.run_prompt(chat.ask(20), AUTO, reply=5)
            chat.answered(answer)
            if not turn:
                restored.append(answer.report.restored)
        runner.flush()
    assert restored == [0, SYSTEM, SYSTEM + len(document), SYSTEM + len(document)]
    runner.close()
