"""Small models with random weights, and a run of one through the prefix cache without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.encoded_pictures import EncodedPictures
from diskprefix.prefixstore.cache.tiered_store import open_store
from diskprefix.prefixstore.kv.layout import ExactAt, Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.runtime.pictures.vision_encoder import VisionEncoder
from diskprefix.runtime.prefill import prefill
from diskprefix.scope import parse_scope
from diskprefix.tokens import Logits, TokenIds, as_token_ids
from diskprefix.values import CacheOptions, CacheReport, Picture, Prompt
from tests.modules import layout_of, runtime_of
from tests.waiting import wait_for

Pictures: TypeAlias = dict[int, Picture]
"""Those that prompts may have, by the id of the first token of each."""
VOCAB = 400
BLOCK = 16
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
"""Two layers, grouped-query attention, head size 16."""


def tiny_llama(
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", *, seed: int = 0, **changes: int
) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = SIZES | {"max_position_embeddings": 4096} | changes
    return LlamaForCausalLM(LlamaConfig(**sizes)).to(device, dtype).eval()


def random_prompt(seed: int, num_tokens: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, VOCAB, num_tokens).astype(np.int32)


def tiny_settings(folder: Path, **changes: object) -> Settings:
    values: dict[str, Any] = {
        "block_size": BLOCK,
        "kv_cache_min_tokens": BLOCK,
        "kv_cache_budget": 64 << 20,
        "kv_cache_dir": folder,
        "kv_cache_min_free": 0,
        # Which of the two is faster differs from run to run for a tiny model.
        "kv_cache_gate": "off",
    }
    return Settings(**(values | changes))


@dataclass
class Answer:
    """`logits` are the next-token logits at the prompt's end; `greedy` the tokens that follow. `is_published`: the
    prompt counts as a recent one now."""

    logits: torch.Tensor
    greedy: list[int]
    report: CacheReport
    num_forwards: int
    is_published: bool


def same(a: Answer, b: Answer) -> bool:
    return torch.equal(a.logits, b.logits) and a.greedy == b.greedy


_layouts: dict[tuple[str, str, torch.dtype, str], Layout] = {}


def _layout(model: PreTrainedModel) -> Layout:
    """Rehearsed once for each configuration, dtype and device: weights do not change it."""
    key = type(model).__name__, model.config.to_json_string(), model.dtype, model.device.type
    if key not in _layouts:
        _layouts[key] = rehearse(model)
    return _layouts[key]


class Runner:
    """A model with a prefix cache on a folder, as the engine holds them; `reopen` is a clean restart."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Settings,
        name: str = "tiny",
        on_prompts: Callable[[bytes, Iterable[TokenIds]], None] | None = None,
        *,
        exact_at: ExactAt | None = "grid",
    ) -> None:
        """`exact_at`: `grid` is the model as transformers made it; None is what the self-check finds."""
        self.model = model
        self.settings = settings
        self.name = name
        self.grid_reason = ""
        """Why the model is exact on the grid only, if that was measured."""
        if exact_at == "grid":
            self.layout = _layout(model)
        else:
            described = f"{name} {model.config} {model.dtype} {settings.kv_type}"
            self.layout, self.grid_reason = layout_of(model, described, settings.kv_type)
            assert exact_at in (None, self.layout.exact_at), self.grid_reason
        self.runtime = runtime_of(model, self.layout, settings.block_size)
        self.on_prompts = on_prompts
        self.pictures: Pictures = {}
        self.in_prompt: PromptPictures | None = None
        """Those of the last prompt."""
        self.open()

    def identity(self, salt: str) -> str:
        """In place of the fingerprint: models of the same name share the cache."""
        return f"{self.name}/{salt}"

    def open(self) -> None:
        """New memory too: nothing may be left over from before."""
        store = open_store(self.settings)
        self.cache = PrefixCache(
            self.settings,
            store,
            self.layout,
            self.identity,
            "tiny",
            on_prompts=self.on_prompts,
        )
        self.pool = PagePool(self.layout, block_size=self.settings.block_size)
        self.sequence = KVSequence(self.pool)

    def new_sequence(self, num_tokens: int) -> KVSequence:
        """In the place of the last one, with room for so many tokens."""
        self.sequence.close()
        self.sequence = KVSequence(self.pool)
        self.sequence.reserve(num_tokens)
        return self.sequence

    def close(self) -> None:
        assert self.cache.close(30)

    def reopen(self) -> None:
        self.close()
        self.open()

    def flush(self) -> None:
        self.cache.finish_aside()
        assert self.cache.writer.flush(30)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the writing thread, which looks at the folder every second, has done something."""
        wait_for(condition)

    def wait_for_recovery(self) -> None:
        self.wait_for(lambda: self.cache.stats()["state"] == "ok")

    def run(
        self,
        token_ids: TokenIds,
        scope: str | int,
        *,
        boundaries: tuple[int, ...] = (),
        reply: int = 0,
    ) -> Answer:
        """`run_prompt` with the options that most tests need."""
        options = CacheOptions(scope=parse_scope(scope, param="scope"))
        pictures = tuple(self.pictures[token] for token in token_ids.tolist() if token in self.pictures)
        return self.run_prompt(Prompt(token_ids, boundaries, pictures=pictures), options, reply=reply)

    def run_prompt(self, prompt: Prompt, options: CacheOptions, *, reply: int = 0, in_memory_tokens: int = 0) -> Answer:
        """The calls that the engine makes, in its order. `reply`: greedy tokens to generate; the last of them is not
        run through the model. `in_memory_tokens`: tokens of the prompt that the last sequence holds."""
        token_ids = prompt.token_ids
        self.in_prompt = self._pictures_of(prompt, options)
        cached = CachedRequest(self.cache, prompt, options)
        sequence = self.sequence if in_memory_tokens else self.new_sequence(len(token_ids))
        sequence.truncate(in_memory_tokens)
        sequence.reserve(len(token_ids))
        restored = cached.restore(sequence, in_memory_tokens)
        logits, num_forwards = restored.logits, 0
        if logits is None:
            num_forwards = -(-(len(token_ids) - restored.num_tokens) // self.settings.block_size)
            logits = prefill(
                self.runtime,
                sequence,
                token_ids,
                start=restored.num_tokens,
                block_size=self.settings.block_size,
                after_step=cached.after_step,
                stops=self._stops(cached),
                pictures=self.in_prompt,
            )
        cached.publish(sequence, logits, 0.0)
        greedy = self._decode(logits, reply)
        cached.publish_reply(sequence, np.concatenate([token_ids, as_token_ids(greedy[:-1])]))
        return Answer(torch.from_numpy(logits.copy()), greedy, cached.close(), num_forwards, cached.is_published)

    def cancelled(self, prompt: Prompt, options: CacheOptions, steps: int) -> CacheReport:
        """A request whose client goes away after so many steps of the prefill."""

        class Gone(Exception):
            pass

        def after_step(state: KVSequence) -> None:
            nonlocal steps
            cached.after_step(state)
            steps -= 1
            if steps <= 0:
                raise Gone

        cached = CachedRequest(self.cache, prompt, options)
        sequence = self.new_sequence(len(prompt.token_ids))
        restored, block_size = cached.restore(sequence), self.settings.block_size
        stops = self._stops(cached)
        # Of a prompt that is restored whole, no step is left.
        if restored.logits is None:
            try:
                prefill(
                    *(self.runtime, sequence, prompt.token_ids),
                    start=restored.num_tokens, block_size=block_size, after_step=after_step, stops=stops,
                )  # fmt: skip
            except Gone:
                cached.save_partial(sequence, prompt.token_ids[: sequence.num_tokens])
        return cached.close()

    def _stops(self, cached: CachedRequest) -> tuple[int, ...]:
        return tuple(at for at in cached.selection.checkpoints if at < len(cached.prompt.token_ids))

    def _decode(self, logits: Logits, count: int) -> list[int]:
        tokens = [int(logits.argmax())] if count else []
        while len(tokens) < count:
            tokens.append(int(self.logits_behind(tokens[-1]).argmax()))
        return tokens

    def logits_behind(self, token: int) -> Logits:
        """Runs a token of the reply to the last prompt. Returns the logits behind it, shape [vocab]."""
        start = self.sequence.num_tokens
        pictures = None if self.in_prompt is None else self.in_prompt.rows(start, start + 1)
        logits: Logits = self.runtime.run([Rows(self.sequence, np.array([token]), pictures=pictures)]).logits[0][-1]
        return logits

    def _pictures_of(self, prompt: Prompt, options: CacheOptions) -> PromptPictures | None:
        """As the engine does it: the encoder's rows are computed once, and kept."""
        if not prompt.pictures:
            return None
        encoder = VisionEncoder(self.model, self.model.config.image_token_id, is_exact=self.layout.exact_at == "token")
        stored = EncodedPictures(self.cache, encoder.levels, encoder.hidden, encoder.dtype)
        pictures = PromptPictures.of(prompt, encoder)
        for number, picture in enumerate(prompt.pictures):
            rows = stored.load(picture, options)
            if rows is None:
                rows = encoder.encode(picture, picture.prepare())
                stored.save(picture, rows, options, stored.epoch(options.tenant))
            pictures.encoded[number] = rows
        return pictures
