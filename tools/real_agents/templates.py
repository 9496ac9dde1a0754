"""A model whose chat template demands that user and assistant alternate: Mistral's, over another vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.chat.families.sources import TEKKEN_CONTROLS, SourcesMissing, sources
from tools.measuring.environments import NotInstalled

TEMPLATES = {
    "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-small": "Mistral-Small-3.2-24B-Instruct-2506",
    "ministral": "mistralai-Ministral-3-14B-Reasoning-2512",
}
"""Names of files of `sources`. Nemo's (v3) writes the system prompt into the newest message, if the user wrote it.
Small's (v11) moves the tools to the newest question. Ministral's, which Devstral 2 has too, lets earlier turns stay."""
_BEGIN, _END = "<s>", "</s>"
_CONTROLS = (*TEKKEN_CONTROLS, "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")


def with_template(folder: Path, model: Path, name: str) -> Path:
    """Writes the weights of `model` with the template `name` into a new `folder`.

    The template's control tokens take ids that pad the vocabulary, and one of them ends replies. Raises `NotInstalled`
    without the template.
    """
    try:
        template = sources() / "templates" / f"{TEMPLATES[name]}.jinja"
    except SourcesMissing as error:
        raise NotInstalled(f"the template {name} is not here: {error}") from error
    folder.mkdir()
    for file in (*model.glob("*.safetensors*"), model / "tokenizer.json"):
        shutil.copy(file, folder)
    shutil.copy(template, folder / "chat_template.jinja")
    ids = _name_padding(folder / "tokenizer.json")
    ends = {"bos_token_id": ids[_BEGIN], "eos_token_id": ids[_END]}
    for file_name, changes in (
        ("config.json", ends),
        ("generation_config.json", ends),
        ("tokenizer_config.json", {"bos_token": _BEGIN, "eos_token": _END}),
    ):
        known = json.loads((model / file_name).read_text(encoding="utf-8"))
        (folder / file_name).write_text(json.dumps(known | changes), encoding="utf-8")
    return folder


def _name_padding(path: Path) -> dict[str, int]:
    """Gives the names of the control tokens to entries of a tokenizer's file that pad its vocabulary; returns their
    ids."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    padding = sorted(id for text, id in vocab.items() if text == f"[PAD{id}]")
    ids = dict(zip(_CONTROLS, padding, strict=False))
    assert len(ids) == len(_CONTROLS), "the vocabulary has no padding for the control tokens"
    for text, id in ids.items():
        vocab[text] = vocab.pop(f"[PAD{id}]")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": id, "content": text, **flags} for text, id in ids.items()]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return ids
