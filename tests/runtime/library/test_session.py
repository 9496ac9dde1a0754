"""The library door: what a session restores is what it would compute, with plain transformers models. And what
identifies weights in memory."""

from __future__ import annotations

import copy
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from diskprefix import PrefixCacheSession
from diskprefix.errors import CacheError, InvalidRequest, InvalidScope, ModelError, SettingsError, StoreUnavailable
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.grid.cache_argument import CACHE_ARGUMENTS
from diskprefix.runtime.library import library_model as weights
from diskprefix.runtime.library.library_model import memory_digest, stamp
from tests import forked
from tests.daemon.server import picture_models
from tests.devices import DEVICES
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, random_prompt, tiny_llama, tiny_settings
from tests.runtime.library import session_worker
from tests.runtime.library.session_worker import LENGTH, SEED

KINDS = ["llama", "gemma3", "qwen3_next", "falcon_h1", "mamba2"]
"""Dense, sliding, hybrid, both in one layer, and state-space."""
PROMPT = [int(token_id) for token_id in random_prompt(1, 5 * BLOCK + 7)]
GRID_END = 5 * BLOCK
REPLY: dict[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def open_session(model: PreTrainedModel, folder: Path, scope: str | int = "full", **changes: Any) -> PrefixCacheSession:
    return PrefixCacheSession(model, scope=scope, settings=tiny_settings(folder, **changes))


def one(token_ids: list[int]) -> torch.Tensor:
    return torch.tensor([token_ids])


def bits(output: Any) -> torch.Tensor:
    return torch.cat(output.logits)


@torch.no_grad()
def rest(session: PrefixCacheSession, cache: Any, position: int, token_ids: list[int]) -> torch.Tensor:
    """The logits of the tokens from `position` on, by a plain forward on top of the cache."""
    ids = torch.tensor([token_ids[position:]], device=session.model.device)
    logits: torch.Tensor = session.model(input_ids=ids, **{session.cache_argument: cache}).logits
    return logits.clone()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def same_caches(one: DynamicCache, other: DynamicCache) -> bool:
    return all(
        type(layer) is type(its) and same(vars(layer), vars(its))
        for layer, its in zip(one.layers, other.layers, strict=True)
    )


def restored(session: PrefixCacheSession) -> int:
    assert session.report is not None
    return session.report.restored


def on_the_grid(model: PreTrainedModel, token_ids: list[int]) -> Any:
    return model.generate(
        one(token_ids), attention_mask=torch.ones(1, len(token_ids)), prefill_chunk_size=BLOCK, **REPLY
    )


class Streamer(BaseStreamer):  # type: ignore[misc]
    """Calls `on_put` before the prompt's forward and after each token, and `on_end`."""

    def __init__(self, on_put: Callable[[torch.Tensor], object], on_end: Callable[[], object] = lambda: None) -> None:
        self._on_put, self._on_end = on_put, on_end

    def put(self, value: torch.Tensor) -> None:
        self._on_put(value)

    def end(self) -> None:
        self._on_end()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KINDS)
def test_generate_is_the_same_cold_restored_and_repeated(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.bfloat16)
    longer = PROMPT + PROMPT[:BLOCK]
    outputs, counts = [], []
    with open_session(model, tmp_path / "cold") as session:
        expected = session.generate(longer, **REPLY)
    for _ in range(2):
        with open_session(model, tmp_path / "kv") as session:
            session.generate(PROMPT, **REPLY)
            for _ in range(2):
                outputs.append(session.generate(one(longer), **REPLY))
                counts.append(restored(session))
    assert all(torch.equal(bits(output), bits(expected)) for output in outputs)
    assert all(torch.equal(output.sequences, expected.sequences) for output in outputs)
    assert counts == [GRID_END, *[len(longer)] * 3]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
def test_generate_gives_what_transformers_gives_on_the_same_grid_or_from_the_cache_of_prefill(
    name: str, tmp_path: Path
) -> None:
    model = tiny_model(name, torch.bfloat16)
    expected = on_the_grid(model, PROMPT)
    with open_session(model, tmp_path / "kv") as session:
        for _ in range(2):
            output = session.generate(PROMPT, **REPLY)
            assert torch.equal(output.sequences, expected.sequences)
            assert torch.equal(bits(output), bits(expected))
            assert same_caches(output[session.cache_argument], expected[session.cache_argument])
        cache, num_cached = session.prefill(PROMPT)
        assert (cache.get_seq_length(), num_cached) == (GRID_END, GRID_END)
        seen: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda _module, _args, inputs: seen.append(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        output = model.generate(one(PROMPT), **{session.cache_argument: cache}, **REPLY)
        hook.remove()
        assert torch.equal(bits(output), bits(expected))
        assert seen == [7] + [1] * 7


def test_the_cache_grows_with_a_long_reply(model: PreTrainedModel, tmp_path: Path) -> None:
    """Past the memory that the prompt took: that of 1 024 tokens."""
    prompt = [int(token_id) for token_id in random_prompt(1, 1000)]
    reply = REPLY | {"max_new_tokens": 60}
    expected = model.generate(one(prompt), attention_mask=torch.ones(1, len(prompt)), prefill_chunk_size=BLOCK, **reply)
    with open_session(model, tmp_path / "kv") as session:
        assert torch.equal(session.generate(prompt, **reply).sequences, expected.sequences)
        cache, _ = session.prefill(prompt)
        output = model.generate(one(prompt), **{session.cache_argument: cache}, **reply)
        assert torch.equal(output.sequences, expected.sequences)


def test_streamers_and_stop_strings_work(chat_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    values: list[int] = []
    streamer = Streamer(lambda value: values.extend(value.flatten().tolist()), lambda: values.append(-1))
    with PrefixCacheSession(model, tokenizer, scope="full", settings=tiny_settings(tmp_path / "kv")) as session:
        for _ in range(2):
            reply = session.generate("Name three rivers. " * 20, max_new_tokens=6, do_sample=False, streamer=streamer)
        sequence = reply[0].tolist()
        assert values == [*sequence, -1] * 2
        stop = tokenizer.decode(sequence[-4:-3])
        stopped = session.generate(
            "Name three rivers. " * 20, max_new_tokens=6, do_sample=False, stop_strings=[stop], tokenizer=tokenizer
        )
        assert len(stopped[0]) < len(sequence)


def test_a_padding_token_in_the_prompt_is_a_token_like_any_other(model: PreTrainedModel, tmp_path: Path) -> None:
    model.generation_config.pad_token_id = PROMPT[3]
    expected = on_the_grid(model, PROMPT)
    with open_session(model, tmp_path / "kv") as session:
        assert torch.equal(bits(session.generate(PROMPT, **REPLY)), bits(expected))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "given",
    [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT),
        torch.tensor(PROMPT),
        one(PROMPT),
        {"input_ids": one(PROMPT), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)},
        {"input_ids": PROMPT, "attention_mask": [1] * len(PROMPT)},
    ],
    ids=["list", "tuple", "array", "flat", "batch of one", "tokenizer's tensors", "tokenizer's lists"],
)
def test_a_prompt_may_come_in_many_forms(given: Any, model: PreTrainedModel, tmp_path: Path) -> None:
    with open_session(model, tmp_path / "kv") as session:
        assert session.prefill(PROMPT)[1] == 0
        assert session.prefill(given)[1] == GRID_END
        session.generate(PROMPT, max_new_tokens=2)
        assert session.generate(given, max_new_tokens=2)[0, : len(PROMPT)].tolist() == PROMPT
        assert restored(session) == len(PROMPT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one token id"),
        ([[1, 2], [3, 4]], "at least one token id"),
        ([[1, 2], [3]], "several lengths"),
        ([1.5], "at least one token id"),
        ([-1], "too large for any vocabulary"),
        ([2**31], "too large for any vocabulary"),
        ("text", "needs a session with a tokenizer"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "without padding"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, message: str, model: PreTrainedModel, tmp_path: Path) -> None:
    with open_session(model, tmp_path / "kv") as session:
        for call in (session.prefill, session.generate):
            with pytest.raises(InvalidRequest, match=message):
                call(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("num_return_sequences", 2),
        *((name, object()) for name in CACHE_ARGUMENTS),
        ("prompt_lookup_num_tokens", 2),
        ("attention_mask", torch.zeros(1, len(PROMPT))),
    ],
)
def test_generate_refuses_several_sequences_and_foreign_caches(
    name: str, value: Any, model: PreTrainedModel, tmp_path: Path
) -> None:
    with open_session(model, tmp_path / "kv") as session:
        with pytest.raises(InvalidRequest, match=name):
            session.generate(PROMPT, **{name: value})
        assert session.generate(PROMPT, max_new_tokens=2).shape == (1, len(PROMPT) + 2)


def test_what_the_generation_config_asks_for_is_refused_too(model: PreTrainedModel, tmp_path: Path) -> None:
    with open_session(model, tmp_path / "kv") as session:
        for name, value in (("num_beams", 2), ("prefill_chunk_size", 5)):
            config = copy.deepcopy(model.generation_config)
            setattr(config, name, value)
            with pytest.raises(InvalidRequest, match="generate"):
                session.generate(PROMPT, generation_config=config, max_new_tokens=2)
        assert session.stats()["prompt_tokens"] == session.stats()["blocks"] == 0


@pytest.mark.parametrize(
    "foreign",
    [
        {"position_ids": torch.arange(len(PROMPT))[None]},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_what_is_not_ours_to_answer_is_left_to_transformers(
    foreign: dict[str, Any], model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mask = torch.ones(1, len(PROMPT))
    expected = model.generate(one(PROMPT), attention_mask=mask, **(REPLY | foreign))
    with open_session(model, tmp_path / "kv") as session, caplog.at_level(logging.WARNING, "diskprefix"):
        output = session.generate(PROMPT, **(REPLY | foreign))
        assert session.report is None
        assert session.stats()["blocks"] == 0
    assert torch.equal(bits(output), bits(expected))
    assert "bypassed: generate was given" in caplog.text


def test_the_model_is_left_as_it_was(model: PreTrainedModel, tmp_path: Path) -> None:
    before = vars(model).keys() | set()
    with open_session(model, tmp_path / "kv") as session:
        session.generate(PROMPT, max_new_tokens=2)
        with pytest.raises(InvalidRequest):
            session.generate(PROMPT, generation_config=model.generation_config, num_beams=2)
    assert vars(model).keys() == before


def test_another_thread_may_use_the_model_meanwhile(model: PreTrainedModel, tmp_path: Path) -> None:
    other = PROMPT[::-1]
    expected = model.generate(one(other), max_new_tokens=4, do_sample=False)
    found: list[torch.Tensor] = []

    def generate() -> None:
        found.append(model.generate(one(other), max_new_tokens=4, do_sample=False))

    def meanwhile(_: torch.Tensor) -> None:
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()

    with open_session(model, tmp_path / "kv") as session:
        reply = session.generate(PROMPT, max_new_tokens=2, do_sample=False, streamer=Streamer(meanwhile))
    assert len(found) == 3
    assert all(torch.equal(sequence, expected) for sequence in found)
    assert reply[0, : len(PROMPT)].tolist() == PROMPT


def test_an_unsupported_model_is_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = type(model)(model.config).eval()
    expected = model.generate(one(PROMPT), max_new_tokens=4, do_sample=False)
    with open_session(model, tmp_path / "kv") as session, caplog.at_level(logging.WARNING, "diskprefix"):
        assert torch.equal(session.generate(PROMPT, max_new_tokens=4, do_sample=False), expected)
        assert session.prefill(PROMPT) == (None, 0)
        assert session.report is not None
        assert session.report.miss_reason == "unsupported"
    assert "dynamic RoPE" in caplog.text


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_cache_stays_usable_after_the_session_was_used_again_and_closed(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.bfloat16)
    with open_session(model, tmp_path / "kv") as session:
        cache, _ = session.prefill(PROMPT)
        expected = rest(session, copy.deepcopy(cache), GRID_END, PROMPT)
        session.prefill(PROMPT[::-1])
        session.generate(PROMPT[1:], max_new_tokens=2)
    assert torch.equal(rest(session, cache, GRID_END, PROMPT), expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [*KINDS, "deepseek_v3", "gemma3n", "lfm2", "inkling_text", "nemotron_h"])
def test_the_cache_of_prefill_is_the_one_that_transformers_fills(name: str, tmp_path: Path) -> None:
    """Also where the prompt is longer than the windows, with latent attention, and with layers that have no state."""
    model = tiny_model(name, torch.bfloat16)
    with open_session(model, tmp_path / "kv") as session:
        cache, _ = session.prefill(PROMPT)
        expected = DynamicCache(config=model.config)
        for start in range(0, GRID_END, BLOCK):
            ids = one(PROMPT[start : start + BLOCK])
            with torch.no_grad():
                model(input_ids=ids, use_cache=True, **{session.cache_argument: expected})
    assert same_caches(cache, expected)


def test_a_cache_takes_the_memory_of_transformers_own(tmp_path: Path) -> None:
    """Of layers with a window that of the window, however long the prompt is."""
    with open_session(tiny_model("gemma3", torch.bfloat16), tmp_path / "kv") as session:
        cache, _ = session.prefill(PROMPT * 3)
    sizes = {layer.is_sliding: layer.keys.untyped_storage().nbytes() for layer in cache.layers}
    assert sizes[True] < sizes[False] / 2


def test_what_the_owner_of_a_cache_does_with_it_is_not_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    with open_session(model, tmp_path / "cold") as session:
        expected = session.generate(PROMPT, **REPLY)
    with open_session(model, tmp_path / "kv") as session:
        cache, _ = session.prefill(PROMPT)
        cache.crop(-3 * BLOCK)
        rest(session, cache, 0, PROMPT[:BLOCK])
        assert torch.equal(bits(session.generate(PROMPT, **REPLY)), bits(expected))


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2"])
def test_a_model_may_be_called_outside_no_grad(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.float32)
    with open_session(model, tmp_path / "kv") as session:
        expected = session.generate(PROMPT, **REPLY)
        cache, _ = session.prefill(PROMPT)
        ids = one(PROMPT[GRID_END:])
        assert model(input_ids=ids, **{session.cache_argument: cache}).logits.requires_grad
        other = session.generate(PROMPT[::-1], **REPLY)
        assert torch.equal(bits(session.generate(PROMPT, **REPLY)), bits(expected))
        session.save()
    with open_session(model, tmp_path / "kv") as session:
        assert torch.equal(bits(session.generate(PROMPT[::-1], **REPLY)), bits(other))
        assert restored(session) == len(PROMPT)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [5 * BLOCK + 1, 5 * BLOCK + 7])
def test_prefill_finds_all_that_generate_saved_and_keeps_no_tail(name: str, length: int, tmp_path: Path) -> None:
    model, prompt = tiny_model(name, torch.bfloat16), [*PROMPT, *PROMPT][:length]
    with open_session(model, tmp_path / "cold") as session:
        cache, _ = session.prefill(prompt)
        expected = rest(session, cache, GRID_END, prompt)
        session.save()
        is_sliceable = session._cache.layout.is_sliceable
        assert session.stats()["blocks"] == (5 if is_sliceable else 6), "blocks, and the checkpoint at their end"
    with open_session(model, tmp_path / "kv") as session:
        session.generate([*prompt, 1, 2], max_new_tokens=2)
        cache, num_cached = session.prefill(prompt)
        assert (cache.get_seq_length(), num_cached) == (GRID_END, GRID_END)
        assert torch.equal(rest(session, cache, GRID_END, prompt), expected)


def test_the_generate_of_a_state_space_model_refuses_the_cache_it_cannot_continue(tmp_path: Path) -> None:
    """It would add the whole prompt to the state once more."""
    model = tiny_model("mamba2", torch.bfloat16)
    with open_session(model, tmp_path / "kv") as session:
        cache, _ = session.prefill(PROMPT)
        with pytest.raises(InvalidRequest, match=rf"^{session.cache_argument}: .*call session\.generate"):
            model.generate(one(PROMPT), **{session.cache_argument: cache}, max_new_tokens=2)


def _edit(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1


def _swap(model: PreTrainedModel) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * 1.5


def _eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def _float(model: PreTrainedModel) -> None:
    model.float()


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", [_edit, _swap, _eager, _float])
def test_a_changed_model_never_sees_what_was_saved_before(
    change: Callable[[PreTrainedModel], None], model: PreTrainedModel, tmp_path: Path
) -> None:
    with open_session(model, tmp_path / "kv") as session:
        session.generate(PROMPT, max_new_tokens=2)
        change(model)
        expected = on_the_grid(model, PROMPT)
        for num_cached in (0, len(PROMPT)):
            assert torch.equal(bits(session.generate(PROMPT, **REPLY)), bits(expected))
            assert restored(session) == num_cached
    with open_session(model, tmp_path / "kv") as session:
        session.generate(PROMPT, max_new_tokens=2)
        assert restored(session) == len(PROMPT)


def test_a_model_in_training_mode_is_not_cached(model: PreTrainedModel, tmp_path: Path) -> None:
    with open_session(model, tmp_path / "kv") as session:
        session.prefill(PROMPT)
        model.train()
        assert session.prefill(PROMPT) == (None, 0)
        model.eval()
        assert session.prefill(PROMPT)[1] == GRID_END


def test_the_same_weights_share_wherever_they_came_from(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    for num_cached in (0, GRID_END):
        loaded = type(model).from_pretrained(tmp_path / "model")
        with open_session(loaded, tmp_path / "kv") as session:
            assert session.prefill(PROMPT)[1] == num_cached
    tiny_llama(seed=1).save_pretrained(tmp_path / "other")
    with open_session(type(model).from_pretrained(tmp_path / "other"), tmp_path / "kv") as session:
        assert session.prefill(PROMPT)[1] == 0


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_at_least_one_token_is_left_to_compute(length: int, model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = PROMPT[:length]
    end = (length - 1) // BLOCK * BLOCK
    with open_session(model, tmp_path / "kv") as session:
        for cached in (0, end):
            cache, num_cached = session.prefill(prompt)
            assert (cache.get_seq_length(), num_cached) == (end, cached)
            logits = rest(session, cache, end, prompt)[0, -1]
        assert torch.equal(logits.float(), bits(session.generate(prompt, **REPLY))[0])


def test_special_tokens_part_a_prompt(chat_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    shared = "<|im_start|>system\n" + "You are a careful assistant. " * 8 + "<|im_end|>\n"
    with PrefixCacheSession(model, tokenizer, settings=tiny_settings(tmp_path / "kv")) as session:
        for city in ("Oslo", "Rome"):
            # In a store without room, only the part is kept that came again.
            session._cache.store.evictor.stays_s = 1e6
            session.generate(f"{shared}<|im_start|>user\nWhere do rivers end in {city}?<|im_end|>\n", max_new_tokens=2)
        assert session.report is not None
        assert session.report.selection.reason == "shared_prefix"
        assert session.report.selection.selected == len(tokenizer(f"{shared}<|im_start|>")["input_ids"])


@pytest.mark.parametrize("call", ["generate", "prefill"])
def test_a_prompt_whose_logits_are_not_finite_is_not_saved_to_its_end(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    with PrefixCacheSession(model, settings=tiny_settings(tmp_path), scope="full") as session:
        forward = model.lm_head.forward
        monkeypatch.setattr(model.lm_head, "forward", lambda hidden: forward(hidden) * float("nan"))
        ids = torch.from_numpy(random_prompt(1, 3 * BLOCK + 1)).unsqueeze(0).long()
        session.prefill(ids) if call == "prefill" else session.generate(ids, max_new_tokens=1, do_sample=False)
        with pytest.raises(CacheError, match="1 prompts were not saved"):
            session.save()
        # The blocks before them are finite.
        assert (session.stats()["blocks"], session.stats()["entries"]) == (3, 1)
    assert "its next-token logits are not finite" in caplog.text


def test_save_says_what_the_store_refused(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVSequence, "capture", lambda *_: None)
    with open_session(model, tmp_path / "kv") as session:
        assert session.generate(PROMPT, max_new_tokens=2).shape == (1, len(PROMPT) + 2)
        with pytest.raises(CacheError, match="1 prompts were not saved"):
            session.save()
        session.save()


def test_a_failing_store_fails_no_request_but_save(model: PreTrainedModel, tmp_path: Path) -> None:
    expected = on_the_grid(model, PROMPT)
    with open_session(model, tmp_path / "kv") as session:
        # What the writer does at the start is done then; it would open the store again.
        session.prefill(PROMPT[::-1])
        session.save()
        session._cache.store.close()
        assert torch.equal(bits(session.generate(PROMPT, **REPLY)), bits(expected))
        assert session.prefill(PROMPT)[1] == 0
        with pytest.raises(StoreUnavailable):
            session.save()


def test_an_error_in_generate_leaves_the_session_usable(model: PreTrainedModel, tmp_path: Path) -> None:
    def interrupt(value: torch.Tensor) -> None:
        if value.numel() == 1:
            raise KeyboardInterrupt

    with open_session(model, tmp_path / "kv") as session:
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, streamer=Streamer(interrupt), max_new_tokens=2)
        session.generate(PROMPT, max_new_tokens=2)
        assert restored(session) == len(PROMPT)


def test_a_folder_has_one_session_in_a_process(model: PreTrainedModel, tmp_path: Path) -> None:
    session = open_session(model, tmp_path / "kv")
    with pytest.raises(StoreUnavailable, match="another session of this process"):
        open_session(model, tmp_path / "kv")
    session.prefill(PROMPT)
    session.close()
    session.close()
    with open_session(model, tmp_path / "kv") as again:
        assert again.prefill(PROMPT)[1] == GRID_END


def test_a_session_that_is_dropped_saves_and_frees_its_folder(model: PreTrainedModel, tmp_path: Path) -> None:
    open_session(model, tmp_path / "kv").prefill(PROMPT)
    with open_session(model, tmp_path / "kv") as session:
        assert session.prefill(PROMPT)[1] == GRID_END


def test_a_closed_session_says_so(model: PreTrainedModel, tmp_path: Path) -> None:
    session = open_session(model, tmp_path / "kv")
    session.close()
    for call in (lambda: session.prefill(PROMPT), lambda: session.generate(PROMPT), session.save):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ending"),
    [("llama", "close"), ("llama", "exit"), ("gemma3", "save")],
)
def test_another_process_restores_the_same_bits(name: str, ending: str, tmp_path: Path) -> None:
    """Also one that ended without closing its session, and one that was killed after `save`."""
    prompt = [int(token_id) for token_id in random_prompt(SEED, LENGTH)]
    if ending == "exit":
        # What Python does when an interpreter ends is part of it.
        code = (
            "from tests.runtime.library import session_worker as w; "
            f"w.main({name!r}, w.Path({str(tmp_path)!r}), 'exit')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    else:
        assert forked.run(session_worker.main, name, tmp_path, ending) == (-signal.SIGKILL if ending == "save" else 0)
    model = tiny_model(name, torch.bfloat16)
    with open_session(model, tmp_path / "kv") as session:
        output = session.generate(prompt, **REPLY)
        assert session.report is not None
        assert (session.report.restored, session.report.source) == (LENGTH, "disk")
        cache, num_cached = session.prefill(prompt)
        logits = rest(session, cache, num_cached, prompt)
    saved = torch.load(tmp_path / "expected.pt")
    assert torch.equal(bits(output), saved["generated"])
    assert torch.equal(logits[0, -1], saved["next"])
    assert num_cached > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"scope": "auto:0"}, InvalidScope),
        ({"budget": "much"}, SettingsError),
        ({"budget": 1}, SettingsError),
        ({"cache_dir": "~nobody-here/kv"}, SettingsError),
    ],
)
def test_a_setting_out_of_its_range_is_refused(
    arguments: dict[str, Any], error: type[Exception], model: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(error):
        PrefixCacheSession(model, **({"cache_dir": tmp_path / "kv"} | arguments))
    assert not (tmp_path / "kv").exists()


def test_the_arguments_go_before_the_settings(model: PreTrainedModel, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path / "unused", disk_prefix_cache="off")
    arguments: dict[str, Any] = {"cache_dir": str(tmp_path / "kv"), "scope": "full", "budget": "32MiB"}
    with PrefixCacheSession(model, settings=settings, **arguments) as session:
        session.prefill(PROMPT)
        session.save()
        stats = session.stats()
    assert (stats["budget_bytes"], stats["scope"], stats["blocks"] > 0) == (32 << 20, "full", True)
    assert not (tmp_path / "unused").exists()


def test_what_is_no_model_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"get_base_model"):
        PrefixCacheSession(torch.nn.Linear(2, 2), cache_dir=tmp_path / "kv")


ROOT = Path(__file__).parents[3]


def examples() -> list[str]:
    page = (ROOT / "diskprefix" / "README.md").read_text(encoding="utf-8")
    return [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "PrefixCacheSession" in block]


@pytest.mark.slow
@pytest.mark.parametrize("example", examples())
def test_the_example_runs_and_finds_its_prefix_again(example: str, chat_model: Path, tmp_path: Path) -> None:
    assert len([line for line in example.splitlines() if line]) <= 10
    code, count = re.subn(r'"[\w-]+/[\w.-]+"', json.dumps(str(chat_model)), example)
    assert count == 1, "the example names one model of the hub"
    (tmp_path / "document.txt").write_text("Name three rivers and tell me where each of them begins. " * 60)
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    printed = []
    for run in range(2):
        out = tmp_path / f"printed-{run}"
        assert forked.run(session_worker.run_program, code, tmp_path, environment, out) == 0
        printed.append(out.read_text(encoding="utf-8"))
    cached = [int(line.split()[0]) for line in printed]
    assert cached[0] == 0
    assert cached[1] >= 256
    assert printed[0].partition(": ")[2] == printed[1].partition(": ")[2]


def test_two_sessions_may_generate_with_one_model_at_once(model: PreTrainedModel, tmp_path: Path) -> None:
    alone = model.generate(one(PROMPT), prefill_chunk_size=BLOCK, **REPLY)
    replies: list[Any] = []

    with open_session(model, tmp_path / "a") as session, open_session(model, tmp_path / "b") as other:
        meanwhile = Streamer(lambda _: replies.append(other.generate(PROMPT, **REPLY)))
        replies.append(session.generate(PROMPT, streamer=meanwhile, **REPLY))
        assert restored(other) == len(PROMPT)
    assert len(replies) > 2
    assert all(torch.equal(bits(reply), bits(alone)) for reply in replies)


def test_the_folder_is_the_daemons(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", str(tmp_path / "kv"))
    with PrefixCacheSession(model) as session:
        assert session.settings.kv_cache_dir == tmp_path / "kv"


@pytest.mark.parametrize("write", [picture_models.write_qwen2_5_vl, picture_models.write_gemma3])
def test_text_of_a_multimodal_model_is_restored(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """transformers' `generate` gives such models an input more, which is empty without images."""
    model = AutoModelForMultimodalLM.from_pretrained(write(tmp_path / "model")).eval()
    prompt = [20 + token_id % 50 for token_id in PROMPT]
    with open_session(model, tmp_path / "kv") as session:
        cold = session.generate(prompt, **REPLY)
        session.save()
        warm = session.generate(prompt, **REPLY)
        assert restored(session) == len(prompt)
        assert torch.equal(bits(cold), bits(warm))


@pytest.mark.parametrize("device", DEVICES)
def test_a_digest_does_not_depend_on_where_the_weights_are(device: str) -> None:
    model = tiny_llama()
    before = memory_digest(model)
    model.to(device)
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    assert memory_digest(model) == before


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_every_part_of_every_tensor_counts(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    model = tiny_llama()
    before = memory_digest(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        for index in (0, -1):
            value = tensor.data.flatten()[index].clone()
            tensor.data.view(-1)[index] = value + 1
            assert memory_digest(model) != before
            tensor.data.view(-1)[index] = value
    assert memory_digest(model) == before


def test_tied_weights_are_read_once() -> None:
    model = tiny_llama()
    untied = sum(tensor.nbytes for _, tensor in weights._distinct(model))
    model.lm_head.weight = model.model.embed_tokens.weight
    assert sum(tensor.nbytes for _, tensor in weights._distinct(model)) == untied - model.lm_head.weight.nbytes


def test_weights_that_are_not_in_memory_have_no_memory_digest() -> None:
    model = tiny_llama().to("meta")
    with pytest.raises(ModelError, match="cannot be read as they are"):
        memory_digest(model)


def test_a_stamp_tells_writes_and_replacements_but_no_reads() -> None:
    model = tiny_llama()
    before = stamp(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
        assert stamp(model) == before
        model.lm_head.weight[0, 0] += 1
    written = stamp(model)
    assert written != before
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert stamp(model) != written
