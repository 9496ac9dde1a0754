"""The names that a request may give the only model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.errors import ModelNotFound
from diskprefix.server.serving import Serving


def serving(**changes: Any) -> Serving:
    engine = SimpleNamespace(origin=Path("/models/Small-Instruct.Q4_1.gguf"))
    values: dict[str, Any] = dict.fromkeys(Serving.__struct_fields__) | {"engine": engine, "takes_any_name": False}
    return Serving(**values | {"model_name": "Small-Instruct"} | changes)


@pytest.mark.parametrize("name", [None, "Small-Instruct", "Small-Instruct:latest", "Small-Instruct.Q4_1"])
def test_a_model_is_found_by_its_name_and_by_that_of_its_file(name: str | None) -> None:
    serving().require_model(name)


@pytest.mark.parametrize("name", ["Small", "Small-Instruct.Q4_1.gguf", "/models/Small-Instruct.Q4_1"])
def test_another_name_is_no_model(name: str) -> None:
    with pytest.raises(ModelNotFound, match="is not served here; 'Small-Instruct' is"):
        serving().require_model(name)
    serving(takes_any_name=True).require_model(name)
