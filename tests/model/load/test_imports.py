"""What a start imports, seen in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from diskprefix.model.load.imports import without_tracer

NEVER_AT_START = (
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.onnx",
)
"""Each takes a tenth of a second or more, and transformers imports all of them with any model."""

PROGRAM = """
import json, pathlib, sys
from diskprefix.model.load.imports import without_tracer

with without_tracer():
    from torch._dynamo.utils import is_compile_supported
assert not is_compile_supported("cpu")
assert "torch._dynamo" not in sys.modules and "torch._dynamo.utils" not in sys.modules

from diskprefix import app
from diskprefix.settings import Settings

engine = app.load_engine(Settings(model=sys.argv[1], kv_cache_dir=pathlib.Path(sys.argv[2])), print)
loaded = sorted(sys.modules)
engine.close()

import torch
with without_tracer():
    import torch._dynamo
    torch._dynamo.config
    from torch._dynamo.utils import is_compile_supported
print(json.dumps({
    "compiles": is_compile_supported.__module__,
    "loaded": loaded,
    "from the tracer": callable(torch._dynamo.mark_static_address),
    "at the end": sorted(sys.modules),
}))
"""


@pytest.fixture(scope="module")
def seen(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("imports")
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(chat_model), str(folder / "kv")]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def test_a_start_does_not_import_what_no_request_uses(seen: dict[str, Any]) -> None:
    assert "transformers.models.llama.modeling_llama" in seen["loaded"]
    assert [name for name in NEVER_AT_START if name in seen["loaded"]] == []


def test_what_stands_in_for_a_package_gives_way_to_the_package(seen: dict[str, Any]) -> None:
    assert seen["from the tracer"]
    assert {"torch._dynamo", "sympy"} <= set(seen["at the end"])


def test_torchvision_finds_what_it_asks_of_the_tracer(seen: dict[str, Any]) -> None:
    """A stand-in before the start, which the program checks, and the real one behind it."""
    assert seen["compiles"] == "torch._dynamo.utils"


def test_a_second_load_waits_for_the_first_one() -> None:
    is_inside = threading.Event()

    def load() -> None:
        with without_tracer():
            is_inside.set()

    second = threading.Thread(target=load)
    with without_tracer():
        second.start()
        assert not is_inside.wait(0.2)
    second.join()
    assert is_inside.is_set()
