"""The model of most tests, and what compiles constraints for its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diskprefix.engine.constrained_reply import ConstraintCompiler
from tests.model import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with 4 096 positions."""
    return tiny.write_folder(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def compiler() -> Iterator[ConstraintCompiler]:
    """Compiles constraints for the tiny tokenizer, whose token 2 ends a reply, and for 300 logits."""
    compiler = ConstraintCompiler(tiny.tokenizer(), {2}, 300)
    yield compiler
    compiler.close()
