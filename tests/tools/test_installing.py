"""Packages of other projects: when they are installed, and what is said when they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.measuring.installing import NotInstalled, install_once, run_installer


def test_packages_are_installed_once_and_again_when_others_are_wanted(tmp_path: Path) -> None:
    folder, calls = tmp_path / "packages", []

    def install() -> None:
        assert not list(folder.iterdir())
        (folder / "made").touch()
        calls.append(1)

    for wanted in ("one 1.0", "one 1.0", "one 1.1"):
        install_once(folder, wanted, install)
    assert len(calls) == 2


def test_packages_whose_installation_failed_are_installed_again(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"^sh -c echo no .* failed: no such package$"):
        install_once(tmp_path, "one", lambda: run_installer("sh", "-c", "echo no such package; exit 1"))
    install_once(tmp_path, "one", lambda: run_installer("touch", "made", folder=tmp_path))
    assert (tmp_path / "made").exists()
