"""A draft model: a small model with the vocabulary of the served one, which guesses what that says next.

It has KV memory of its own, and a prefix cache of its own in the same store: what it computed of a prompt is restored
as that of the served model is. Where there is no memory for it, where it fails, or where the end of its positions is
reached, a sequence is not guessed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.request import CachedRequest
from diskprefix.engine.device import raise_if_lost, synchronize
from diskprefix.engine.job import Choice, DraftSequence
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import KVPool
from diskprefix.model.exact import runner
from diskprefix.model.load.loader import LoadedModel
from diskprefix.printable import first_line
from diskprefix.tokens import as_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")


class LoadedDraft(NamedTuple):
    """A draft model as it was loaded, and its cache, which shares the store of the served model's."""

    loaded: LoadedModel
    cache: PrefixCache


class DraftModel:
    """The model, its memory and its cache. For the engine's thread."""

    def __init__(self, model: PreTrainedModel, cache: PrefixCache, pool: KVPool, max_positions: int) -> None:
        self.cache, self.pool = cache, pool
        self.max_positions = max_positions
        self._model = model
        self._packs = runner.can_pack(model, cache.layout)
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="draft-fetch")
        self._left: list[DraftSequence] = []
        """Those of sequences that have ended, whose fetch has not."""

    def close(self) -> None:
        """Ends the thread and the cache, but not the store."""
        self._fetcher.shutdown()
        self._sweep()
        self.cache.close(0)

    def ready(self, choice: Choice) -> DraftSequence | None:
        """Returns what there is of a sequence, None if that is not known yet, or if there is no memory for it."""
        self._sweep()
        if choice.shadow is None:
            choice.shadow = self._begin(choice)
        shadow = choice.shadow
        if shadow is None or (shadow.fetch is not None and not shadow.fetch.done()):
            return None
        if shadow.fetch is not None:
            fetch, shadow.fetch = shadow.fetch, None
            fetch.result()
            assert shadow.cached is not None
            shadow.cached.choose(shadow.arena)
            shadow.slot.num_computed = shadow.cached.restored.num_tokens
            self._note_computed(choice, shadow)
        return shadow

    def take_back(self, choice: Choice) -> None:
        """Forgets what was computed for guesses that were wrong."""
        shadow = choice.shadow
        assert shadow is not None
        sampled = choice.reply[shadow.num_known - choice.prompt_tokens :]
        num_right = next(
            (n for n, pair in enumerate(zip(shadow.drafted, sampled, strict=False)) if pair[0] != pair[1]),
            min(len(shadow.drafted), len(sampled)),
        )
        num_valid = shadow.num_known + num_right
        if shadow.drafted and num_valid < shadow.arena.num_tokens:
            shadow.arena.take_back(num_valid)
        shadow.drafted = []

    def has_room(self, choice: Choice, num_tokens: int) -> bool:
        """Makes room for so many tokens of a sequence. Returns False if there is none."""
        shadow = choice.shadow
        assert shadow is not None
        if num_tokens > self.max_positions or not self.pool.grow(shadow.slot, num_tokens):
            return False
        # At once: a window that has moved on cannot be taken back.
        shadow.arena.make_room(num_tokens)
        return True

    def compute(self, step: Sequence[tuple[Choice, torch.Tensor]]) -> torch.Tensor:
        """Computes more tokens, int64 of shape [1, n], of some sequences. Returns the next-token logits, shape
        [sequences, vocab]."""
        shadows = [choice.shadow for choice, _ in step]
        rows = [runner.Rows(one.arena, ids) for one, (_, ids) in zip(shadows, step, strict=True) if one is not None]
        groups = [rows] if self._packs else [[one] for one in rows]
        logits = [one for group in groups for one in runner.run(self._model, group)]
        synchronize(self._model.device)
        return torch.cat(logits)

    def prefilled(self, choice: Choice, seconds: float) -> None:
        """Notes that more of the known tokens were computed, and has the blocks kept that are complete."""
        shadow = choice.shadow
        assert shadow is not None
        shadow.slot.num_computed = shadow.arena.num_tokens
        if shadow.cached is not None and not shadow.cached.is_published:
            shadow.prefill_s += seconds
            shadow.cached.after_step(shadow.arena)
            self._note_computed(choice, shadow)

    def release(self, choice: Choice, *, keep: bool) -> None:
        """The sequence has ended, or is not guessed any more. `keep`: the next turn may go on from what there is."""
        shadow, choice.shadow = choice.shadow, None
        if shadow is None:
            return
        if shadow.fetch is not None:
            self._left.append(shadow)
            return
        choice.shadow = shadow
        self.take_back(choice)
        choice.shadow = None
        known = np.concatenate([choice.job.request.prompt.token_ids, as_token_ids(choice.reply)])
        slot, token_ids = shadow.slot, known[: shadow.arena.num_tokens]
        if shadow.cached is not None:
            if keep and shadow.cached.is_published and choice.is_finished:
                shadow.cached.publish_reply(shadow.arena, token_ids)
            elif keep and not shadow.cached.is_published:
                shadow.cached.leave(shadow.arena)
            shadow.cached.close()
        options = choice.job.request.cache
        slot.token_ids, slot.num_computed, slot.num_exact = token_ids, len(token_ids), len(token_ids)
        slot.expires_at = time.monotonic() + self.cache.lasts_s(options)
        self.pool.release(slot, keep=keep and options.save and options.scope.kind != "off")

    def give_up(self, choice: Choice, error: Exception) -> None:
        """Has a sequence not guessed any more. A draft model that fails fails no request. Raises `DeviceLost`."""
        raise_if_lost(error)
        log.warning("[engine] %s goes on without the draft model: %s", choice.job.request.id, first_line(error))
        if choice.guesser is not None:
            choice.guesser.draft_rate = None
        if choice.shadow is not None:
            choice.shadow.drafted = []
            choice.shadow.arena.truncate(0)
            self.release(choice, keep=False)

    def _begin(self, choice: Choice) -> DraftSequence | None:
        prompt, options = choice.job.request.prompt, choice.job.request.cache
        if not self.cache.load(options.tenant).done() or choice.num_known >= self.max_positions:
            return None
        is_off = options.scope.kind == "off"
        owner = choice.job if is_off else self.cache.owner(options.tenant)
        found = self.pool.find(owner, prompt.token_ids)
        if found is not None and found.is_worth_waiting_for:
            return None
        slot = self.pool.go_on(found, choice.num_known) if found else self.pool.take(choice.num_known)
        if slot is None:
            return None
        slot.owner, slot.token_ids, slot.num_exact = owner, prompt.token_ids, len(prompt.token_ids)
        shadow = DraftSequence(slot, None, None)
        if choice.index == 0:
            shadow.cached = self.cache.begin(prompt, options, goes_on=True)
            have, slot.num_computed = slot.num_computed, 0
            shadow.fetch = self._fetcher.submit(self._fetch, shadow.cached, slot.arena, have)
        return shadow

    @staticmethod
    def _fetch(cached: CachedRequest, arena: KVArena, have: int) -> None:
        with torch.inference_mode():
            cached.fetch(arena, have=have)

    def _note_computed(self, choice: Choice, shadow: DraftSequence) -> None:
        """Has the prompt kept if it is complete."""
        if shadow.cached is not None and shadow.arena.num_tokens == choice.prompt_tokens:
            shadow.cached.publish(shadow.arena, None, shadow.prefill_s)

    def _sweep(self) -> None:
        """Gives back what was left while it was being fetched."""
        for shadow in [shadow for shadow in self._left if shadow.fetch is not None and shadow.fetch.done()]:
            self._left.remove(shadow)
            if shadow.cached is not None:
                shadow.cached.close()
            self.pool.release(shadow.slot, keep=False)
