"""The folders of a user: cache, configuration, state; and files beside the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from diskprefix.errors import SettingsError


def expanded(path: str | Path) -> Path:
    """Returns the path with a leading `~` or `~USER` expanded. Raises `SettingsError` for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {Path(path).parts[0]} names no user of this machine") from error


def policies_folder() -> Path:
    """Returns `diskprefix/presets` in an installed package, `policies` in a checkout."""
    return _carried("presets", "policies")


def units_folder() -> Path:
    """Returns `diskprefix/service_units` in an installed package, `systemd/user` in a checkout."""
    return _carried("service_units", "systemd/user")


def _carried(installed: str, in_checkout: str) -> Path:
    package = Path(__file__).parent
    return next(folder for folder in (package / installed, package.parent / in_checkout) if folder.is_dir())


def cache_home() -> Path:
    """Returns `$XDG_CACHE_HOME/diskprefix`, or `~/.cache/diskprefix`."""
    return _home("XDG_CACHE_HOME", ".cache")


def config_home() -> Path:
    """Returns `$XDG_CONFIG_HOME/diskprefix`, or `~/.config/diskprefix`."""
    return _home("XDG_CONFIG_HOME", ".config")


def state_home() -> Path:
    """Returns `$XDG_STATE_HOME/diskprefix`, or `~/.local/state/diskprefix`."""
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, folder: str) -> Path:
    """Returns `diskprefix` in the folder of a variable, or in `folder` of the home folder. Raises `SettingsError` for a
    relative path, which would depend on the working directory, and for a user without a home."""
    base = os.environ.get(variable, "").strip()
    try:
        path = (Path(base) if base else Path.home() / folder) / "diskprefix"
    except RuntimeError as error:
        raise SettingsError(f"no home folder: set {variable}, or HOME, to a folder that is yours") from error
    if not path.is_absolute():
        raise SettingsError(f"{variable if base else 'HOME'}: {base or path.parents[1]} is not an absolute path")
    require_text(str(path), variable if base else "HOME")
    return path


def require_text(text: str, what: str) -> None:
    """Raises `SettingsError` for a text with bytes that are not in the encoding of file names: no library opens it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        known = sys.getfilesystemencoding().upper()
        raise SettingsError(f"{what}: {text!r} has bytes that are not {known}; give it another name") from error


def default_kv_cache_dir() -> Path:
    """Returns the folder `kv` in systemd's CacheDirectory if the service runs under it, else in `cache_home()`."""
    directory = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return (Path(directory) if directory else cache_home()) / "kv"


DEFAULT_DIR = "$XDG_CACHE_HOME/diskprefix/kv"
"""The default of `--kv-cache-dir`, as the help shows it."""
