"""A plugin for vLLM's own tests of connectors: it replaces vLLM's connector by ours. Runs in vLLM's environment.

The tests make a scheduler with `create_scheduler`, and put a mock in the place of its connector to say what is stored.
Here the mock hands everything else to the connector that the scheduler was made with.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from diskprefix.bridges.vllm.connector import DiskPrefixConnector, RankMetadata
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION, LayoutText

MODEL = "DISKPREFIX_TESTS_MODEL"
"""The variable with the folder of a model, because theirs come from a hub."""
_made: list[DiskPrefixConnector] = []


class Ours(DiskPrefixConnector):
    """Our connector with a store of its own, whatever settings a test has for theirs."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="kv-"))
        settings = {"kv_cache_dir": str(folder / "kv"), "kv_cache_budget": "64MiB"}
        vllm_config.kv_transfer_config.kv_connector_extra_config = settings
        super().__init__(vllm_config, role, kv_cache_config)
        _made.append(self)


def pytest_configure() -> None:
    """Prepares the plugin before their modules are imported."""
    utils: Any = importlib.import_module("tests.v1.kv_connector.unit.utils")
    config_of, scheduler_of = utils.create_vllm_config, utils.create_scheduler

    def create_vllm_config(*args: Any, **kwargs: Any) -> Any:
        kwargs["model"] = os.environ[MODEL]
        if kwargs.get("kv_connector") != "TestExampleConnector":
            kwargs |= {"kv_connector": "Ours", "kv_connector_module_path": __name__}
        return config_of(*args, **kwargs)

    def create_scheduler(*args: Any, **kwargs: Any) -> Any:
        scheduler = scheduler_of(*args, **kwargs)
        connector = scheduler.connector
        assert isinstance(connector, Ours)
        layout = LayoutText(LAYOUT_VERSION, (), (0, "float32")).text()
        identity = StateIdentity("test", connector.block_size, layout, LAYOUT_VERSION, {"engine": "test"})
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankMetadata(identity)})
        return scheduler

    def create_mock_connector() -> Mock:
        # The blocks that a test pretends to be stored are not: there is nothing to load.
        return Mock(wraps=_made[-1], **{"update_state_after_alloc.return_value": None})

    utils.create_vllm_config = create_vllm_config
    utils.create_scheduler = create_scheduler
    utils.create_mock_connector = create_mock_connector
    utils.ExampleConnector = Ours


def pytest_runtest_teardown() -> None:
    while _made:
        _made.pop().shutdown()
