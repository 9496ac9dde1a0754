"""`diskprefix serve` that always writes the same reply, and pauses in it long enough for a sign of life.

The model computes as always, and then the tokens of the reply are taken. A chat's reply has a thought, a text and two
calls; that to a prompt without a template is the text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diskprefix.daemon.cli import main
from diskprefix.daemon.engine import active_requests
from diskprefix.daemon.server import streaming
from tools.real_agents.scripted_daemon import prepared_sampler
from tools.streams.recording import CHAT_REPLY, TEXT

_SIGN_S, _PAUSE_S = 0.2, 0.5
_PAUSED_AT = (4, 70)
"""The numbers of tokens left at which the model pauses: in a text alone or the last call, and in the text of a chat."""


def reply_to(prompt: str) -> str:
    return CHAT_REPLY if "<|im_start|>assistant" in prompt else TEXT


def pause(num_left: int) -> None:
    if num_left in _PAUSED_AT:
        time.sleep(_PAUSE_S)


def run() -> None:
    from transformers import AutoTokenizer

    model = Path(sys.argv[sys.argv.index("--model") + 1])
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens_of(prompt: Sequence[int]) -> list[int]:
        reply = reply_to(tokenizer.decode(prompt))
        return [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]

    active_requests.Sampler = prepared_sampler(tokens_of, before=pause)  # type: ignore[attr-defined]
    streaming.KEEPALIVE_S = _SIGN_S
    main()


if __name__ == "__main__":
    run()
