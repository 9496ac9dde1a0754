"""The presets that ship with diskprefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import SettingsError
from diskprefix.policy.scope import parse_scope
from diskprefix.settings import Settings, find_policy, parse_size, read_policy

POLICIES = Path(__file__).parent.parent.parent / "policies"
PRESETS = sorted(path.stem for path in POLICIES.glob("*.toml"))
SIZES = ("kv_cache_budget", "kv_cache_write_buffer", "max_body_bytes")


def settings_of(preset: str) -> dict[str, Any]:
    values = read_policy(find_policy(preset))
    return {key: parse_size(value, param=key) if key in SIZES else value for key, value in values.items()}


def test_the_two_presets_are_there() -> None:
    assert PRESETS == ["agent", "chat"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_found_by_its_name_and_makes_valid_settings(preset: str) -> None:
    settings = Settings(**settings_of(preset))
    scope = parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache")
    assert str(scope) == settings.disk_prefix_cache
    assert settings.kv_cache_write_buffer < settings.kv_cache_budget


@pytest.mark.parametrize("preset", PRESETS)
def test_every_value_is_explained_where_it_stands(preset: str) -> None:
    lines = (POLICIES / f"{preset}.toml").read_text(encoding="utf-8").splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        assert "=" not in line or line.startswith("#") or before.startswith("# ")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_names_of_the_file_are_its_head_line(preset: str) -> None:
    head = (POLICIES / f"{preset}.toml").read_text(encoding="utf-8").splitlines()[0]
    assert f"`diskprefix serve --policy {preset}`" in head


def test_an_unknown_preset_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(SettingsError, match="there are: agent, chat"):
        find_policy("agents")
