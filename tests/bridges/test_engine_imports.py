"""What bridges import: names of an engine in one module each, and no package that the engine's environment lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_packages import PACKAGE, SOURCES, imported_names, package_of

VLLM_MODULES = sorted(
    {
        found.rsplit(".", depth)[0]
        for module in ("_vllm_compat", "_vllm_tiering", "engine_numbers")
        for found in imported_names(SOURCES[f"bridges.vllm.{module}"])
        if package_of(found) in ("vllm", "huggingface_hub")
        for depth in range(found.count(".") + 1)
        if found.rsplit(".", depth)[0].rpartition(".")[2].islower()
    }
)
"""Those that connector and tier import, and those that they are in."""


@pytest.mark.parametrize(
    ("engine", "modules"),
    [
        ("vllm", {"bridges.vllm._vllm_compat", "bridges.vllm._vllm_tiering"}),
        ("lmcache", {"bridges.lmcache._lmcache_compat"}),
        ("sglang", {"bridges.sglang._sglang_compat"}),
    ],
)
def test_one_module_each_imports_from_an_engine(engine: str, modules: set[str]) -> None:
    importers = {
        module for module, source in SOURCES.items() if engine in {package_of(n) for n in imported_names(source)}
    }
    assert importers == modules


def test_the_connector_and_the_stores_commands_need_only_the_packages_that_its_page_installs() -> None:
    """vLLM brings torch, numpy and safetensors, and pins versions of much that the daemon needs. Of vLLM, only names
    stand here."""
    page = (PACKAGE / "bridges/vllm/README.md").read_text(encoding="utf-8")
    [listed] = re.findall(r"pip install (lmdb .*?) +#", page)
    installed = {canonicalize_name(name) for name in listed.split()}
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    assert installed < needed
    absent = {name.replace("-", "_") for name in needed - installed - {"torch", "numpy", "safetensors"}} - {
        "huggingface_hub"
    }
    code = f"""
import sys, types
class Module(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {{"DISK": 0, "STORAGE": 0}})
sys.modules |= {{name: Module(name) for name in {VLLM_MODULES!r}}}
sys.modules |= dict.fromkeys({sorted(absent)!r})  # an import of them fails
import diskprefix.bridges.vllm.connector, diskprefix.bridges.vllm.offload_tier, diskprefix.daemon.cli
of_the_store = {{"inspect", "verify", "purge", "compact", "backup", "restore", "export"}}
for name in of_the_store & diskprefix.daemon.cli.commands().keys():
    diskprefix.daemon.cli.cli.main([name, "--help"], standalone_mode=False)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
