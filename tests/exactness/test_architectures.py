"""Every tiny architecture shows all its kinds of layers, and its next token hangs on each token that came before."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.exactness.architectures import ARCHITECTURES, PATTERNS, VOCAB, tiny_model

PROMPT = 12
"""No longer than any window, so that each token reaches the last one."""


def layer_kinds(config: PreTrainedConfig, pattern: str) -> set[str]:
    return set(getattr(config.get_text_config(decoder=True), pattern, None) or ())


@pytest.mark.cases(11)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_next_token_depends_on_every_token_before_it(name: str) -> None:
    model = tiny_model(name, torch.float32)
    prompt = torch.randint(3, VOCAB - 2, (PROMPT,), generator=torch.Generator().manual_seed(1))
    one_changed = prompt + torch.eye(PROMPT, dtype=prompt.dtype)
    with torch.inference_mode():
        logits = model(input_ids=torch.cat([prompt[None], one_changed]), use_cache=False).logits[:, -1]
    assert logits.shape == (1 + PROMPT, VOCAB)
    assert logits.isfinite().all()
    assert logits[0].std() > 0.1
    effect = (logits[1:] - logits[0]).abs().amax(-1)
    assert (effect > 1e-3 * logits[0].std()).all(), effect


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kind_of_layer_of_the_architecture_is_there(name: str) -> None:
    default, tiny = CONFIG_MAPPING[name](), ARCHITECTURES[name].build()
    for pattern in PATTERNS:
        assert layer_kinds(default, pattern) <= layer_kinds(tiny, pattern)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_next"])
def test_a_seed_gives_the_same_weights_in_every_dtype(name: str) -> None:
    exact, rounded = (tiny_model(name, dtype).state_dict() for dtype in (torch.float32, torch.bfloat16))
    other = tiny_model(name, torch.float32, seed=1).state_dict()
    assert exact.keys() == rounded.keys()
    for key, weight in exact.items():
        assert torch.equal(weight.to(rounded[key].dtype), rounded[key])
        assert not torch.equal(weight, other[key])
