"""The tokens of replies in the `generation_config.json` of a folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.printable import shown
from diskprefix.runtime.files.checkpoint import read_config
from diskprefix.runtime.plan.reply_tokens import ReplyTokens

log = logging.getLogger("diskprefix")

_NAME = "generation_config.json"
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "sequence_bias", "stop_strings"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("typical_p", "top_h", "guidance_scale"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("constraints", "force_words_ids"), ([],)),
    "token_healing": (False,),
    "watermarking_config": (),
    "dola_layers": (),
    "num_beams": (1,),
}
"""Keys that change which tokens come in transformers alone, and their neutral values. vLLM, llama.cpp and this server
ignore them."""


def reply_tokens(folder: Path) -> ReplyTokens:
    """Returns what a folder says. Older ones have the tokens that end a reply in the configuration. Warns of keys that
    are not obeyed. Raises `ModelError` for something else than tokens."""
    file = folder / _NAME
    values = read_config(folder, _NAME) if file.is_file() else {}
    for key, neutral in WITHOUT_EFFECT.items():
        if (value := values.get(key)) is not None and value not in neutral:
            log.warning("%s of %s: %s is not obeyed: it is %s", _NAME, folder.name, key, shown(repr(value)))
    ends = values if file.is_file() else read_config(folder, "config.json")
    return ReplyTokens(_tokens(folder, ends, "eos_token_id"), _tokens(folder, values, "suppress_tokens"))


def _tokens(folder: Path, values: dict[str, Any], key: str) -> list[int]:
    value = values.get(key)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ModelError(f"{folder}: {key} is {shown(repr(value))}, which is no token")
    return tokens
