"""A model with the chat template of another one, over its own vocabulary."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.daemon.chat.families.families import HARMONY
from tests.daemon.chat.families.sources import TEKKEN_CONTROLS, SourcesMissing, sources
from tools.measuring.environments import NotInstalled

_MISTRAL = (*TEKKEN_CONTROLS, "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")


@dataclass(frozen=True, kw_only=True)
class Borrowed:
    """`file` names a template of `sources`. `controls` are its control tokens: `begin` starts a prompt, and one of
    `ends` ends a reply, the first one a whole one."""

    file: str
    controls: tuple[str, ...] = _MISTRAL
    begin: str | None = "<s>"
    ends: tuple[str, ...] = ("</s>",)


TEMPLATES = {
    "mistral-nemo": Borrowed(file="mistralai-Mistral-Nemo-Instruct-2407"),
    "mistral-small": Borrowed(file="Mistral-Small-3.2-24B-Instruct-2506"),
    "ministral": Borrowed(file="mistralai-Ministral-3-14B-Reasoning-2512"),
    "gpt-oss": Borrowed(file="openai-gpt-oss-120b", controls=HARMONY, begin=None, ends=("<|return|>", "<|call|>")),
}
"""Those of Mistral demand that user and assistant alternate. Nemo's (v3) writes the system prompt into the newest
message, if the user wrote it. Small's (v11) moves the tools to the newest question. Ministral's, which Devstral 2 has
too, lets earlier turns stay. That of gpt-oss writes the day, and drops the thoughts of earlier turns."""


def with_template(folder: Path, model: Path, name: str) -> Path:
    """Writes the weights of `model` with the template `name` into a new `folder`.

    The template's control tokens take ids that pad the vocabulary. Raises `NotInstalled` without the template.
    """
    borrowed = TEMPLATES[name]
    try:
        template = sources() / "templates" / f"{borrowed.file}.jinja"
    except SourcesMissing as error:
        raise NotInstalled(f"the template {name} is not here: {error}") from error
    folder.mkdir()
    for file in (*model.glob("*.safetensors*"), model / "tokenizer.json"):
        shutil.copy(file, folder)
    shutil.copy(template, folder / "chat_template.jinja")
    ids = _name_padding(folder / "tokenizer.json", borrowed.controls)
    begin = None if borrowed.begin is None else ids[borrowed.begin]
    ends = {"bos_token_id": begin, "eos_token_id": [ids[end] for end in borrowed.ends]}
    for file_name, changes in (
        ("config.json", ends),
        ("generation_config.json", ends),
        ("tokenizer_config.json", {"bos_token": borrowed.begin, "eos_token": borrowed.ends[0]}),
    ):
        known = json.loads((model / file_name).read_text(encoding="utf-8"))
        (folder / file_name).write_text(json.dumps(known | changes), encoding="utf-8")
    return folder


def _name_padding(path: Path, controls: tuple[str, ...]) -> dict[str, int]:
    """Gives the names of the control tokens to entries of a tokenizer's file that pad its vocabulary; returns their
    ids."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    padding = sorted(id for text, id in vocab.items() if text == f"[PAD{id}]")
    ids = dict(zip(controls, padding, strict=False))
    assert len(ids) == len(controls), "the vocabulary has no padding for the control tokens"
    for text, id in ids.items():
        vocab[text] = vocab.pop(f"[PAD{id}]")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": id, "content": text, **flags} for text, id in ids.items()]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return ids
