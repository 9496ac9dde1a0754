"""The table on the page about policies is what the rules do."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from diskprefix.extras.simulate.geometry import SLICEABLE
from diskprefix.extras.simulate.simulator import Policy, Simulator
from diskprefix.extras.simulate.trace import TraceRequest
from diskprefix.nouns import Prompt, Scope
from diskprefix.tokens import TokenIds

PAGE = Path(__file__).parents[2] / "policies" / "README.md"
OPENING = np.array([1, 2, 3], dtype=np.int32)
_ROW = re.compile(r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| `(\w+)` \| (\d+) \|$", re.MULTILINE)


def chat(*messages: TokenIds) -> Prompt:
    """The first message is the system's."""
    ends = np.cumsum([len(message) for message in messages]).tolist()
    return Prompt(np.concatenate([*messages, OPENING]), tuple(ends), ends[0])


def test_the_example_on_the_page_is_what_auto_does() -> None:
    random = np.random.default_rng(1)

    def text(num_tokens: int) -> TokenIds:
        return random.integers(10, 50_000, num_tokens, dtype=np.int32)

    system, conversation = text(1500), [text(300), text(400), text(200), text(300), text(200)]
    prompts = [
        chat(system, *conversation[:1]),
        chat(system, *conversation[:3]),
        chat(system, text(350)),
        chat(text(900), text(800)),
        chat(system, *conversation),
    ]
    simulator = Simulator(Policy(scope=Scope("auto", 30)), SLICEABLE)
    rows = []
    for number, prompt in enumerate(prompts):
        restored, chosen, written = simulator.step(TraceRequest(when=float(number), prompt=prompt))
        figures = (len(prompt.token_ids), restored, chosen.common, chosen.selected, chosen.kept, chosen.reason, written)
        rows.append(tuple(map(str, figures)))
    assert rows == _ROW.findall(PAGE.read_text(encoding="utf-8"))
