"""Compiles the C++ operators while the package is installed. Without a compiler it is installed without them."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileOperators(BuildHookInterface):  # type: ignore[misc]
    """Called by hatchling before it makes a wheel. An editable install leaves the operators to `tools/setup`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        # By its path: the package itself cannot be imported here, as its dependencies are not installed.
        spec = importlib.util.spec_from_file_location("build", Path(self.root, "diskprefix/native/build.py"))
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        build.main()
        if build.is_current():
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["artifacts"].append(str(build.LIBRARY.relative_to(self.root)))
