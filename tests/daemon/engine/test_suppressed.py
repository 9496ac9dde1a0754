"""A daemon obeys what a model's folder says of tokens that never come."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from tests.daemon.server.daemon_process import ask, running_daemon, text_of


def test_a_reply_has_no_token_that_the_folder_suppresses(chat_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    others = sorted({*vocabulary.values(), *range(512)} - {vocabulary["a"]})
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "suppress_tokens": others}))
    with running_daemon(model, tmp_path / "kv") as daemon:
        assert text_of(ask(daemon, "Which letter? ")) == "aaaaaa"
