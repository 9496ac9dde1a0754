"""Compiles the C++ operators while a wheel is made, and lists the parts of the wheel in it.

Without a compiler, the wheel has no operators. `CXX` and `_PYTHON_HOST_PLATFORM` choose the compiler and the platform.
`DISKPREFIX_VARIANTS` is one of the `EXTENTS` in `diskprefix/native/build.py`: a wheel for other machines needs `all`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
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
        if build.is_complete(build.chosen_extent()):
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["artifacts"].append(str(build.LIBRARY.relative_to(self.root)))
            self._parts = tempfile.TemporaryDirectory()
            listed = Path(self._parts.name, "diskprefix.cdx.json")
            listed.write_text(self._bill_of_materials(build), encoding="utf-8")
            build_data["sbom_files"].append(str(listed))

    def _bill_of_materials(self, build: ModuleType) -> str:
        """Returns the list of the wheel's parts, in the form of CycloneDX. What pip installs beside it is no part."""
        license = [{"license": {"id": "Apache-2.0"}}]
        pages = sorted(Path(self.root, "diskprefix").rglob("vendored/README.md"))
        scripts = [script for page in pages for script in scripts_of_others(page)]
        made = hashlib.sha256(build.LIBRARY.read_bytes()).hexdigest()
        name, version = self.metadata.core.raw_name, self.metadata.version
        whole = f"pkg:pypi/{name}@{version}"
        library = str(build.LIBRARY.relative_to(self.root))
        parts = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "component": {
                    "type": "application",
                    "bom-ref": whole,
                    "name": name,
                    "version": version,
                    "purl": whole,
                    "licenses": [{"expression": self.metadata.core.license_expression}],
                },
            },
            "components": [
                {
                    "type": "file",
                    "bom-ref": library,
                    "name": library,
                    "version": build.digest(),
                    "hashes": [{"alg": "SHA-256", "content": made}],
                    "licenses": license,
                },
                *scripts,
            ],
            "dependencies": [
                {"ref": whole, "dependsOn": [library, *(script["bom-ref"] for script in scripts)]},
                {"ref": library},
                *({"ref": script["bom-ref"]} for script in scripts),
            ],
        }
        return json.dumps(parts, indent=2) + "\n"


_ROW = re.compile(r"^\| \S+ \| \[([^]]+)\]\(\S+\) ([\d.]+), \S+ \| (\S+) \(\S+\) \| `(\w+)` \|$", re.MULTILINE)


def scripts_of_others(page: Path) -> list[dict[str, Any]]:
    """Returns the components that the table in `page` lists: packages of npm with their version, licence and digest."""
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "hashes": [{"alg": "SHA-256", "content": digest}],
            "licenses": [{"license": {"id": licence}}],
        }
        for name, version, licence, digest in _ROW.findall(page.read_text(encoding="utf-8"))
    ]
