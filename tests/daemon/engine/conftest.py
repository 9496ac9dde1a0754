"""The model of most tests, and what compiles constraints for its tokenizer. Engines that a test loads are closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.loop import Engine
from tests.runtime.plan import tiny


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


@pytest.fixture(autouse=True)
def closes_engines() -> Iterator[None]:
    """A test need not close its engines. It does to load a model again from their folder."""
    loaded, init = list[Engine](), Engine.__init__

    def noted(self: Engine, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        loaded.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", noted)
        yield
    for engine in loaded:
        engine.close()
