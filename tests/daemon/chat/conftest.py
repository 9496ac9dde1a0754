"""The tests' tokenizer, trained once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.daemon.chat.rendering import tokenizer_with


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"))
