"""Each option of each command does something: the settings agree with themselves, a daemon starts and answers with all
of them, however they are given, and each option of another command is used by a test."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import click
import pytest

from diskprefix.daemon.cli import cli
from diskprefix.daemon.cli.options import variable_of
from diskprefix.daemon.cli.policy_file import toml_value
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.setting import flag_of
from tests.daemon.server.daemon_process import DaemonProcess, clean_environment, reply_to, wait_until
from tests.native.variants import of_this_cpu

TESTS = Path(__file__).parents[2]
KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("switch",),
    int: ("integer", "size"),
    float: ("duration",),
    str: ("text",),
    Path: ("file", "folder"),
}
NUMBERS = ("integer", "size", "duration")
SECRET = "0123456789abcdef0123456789abcdef"
KEY = "sk-0123456789abcdef0123456789abcdef"


def test_annotation_kind_bounds_and_default_of_each_setting_agree() -> None:
    types, defaults = get_type_hints(Settings), {one.name: one for one in fields(Settings)}
    for name, setting in SETTINGS.items():
        is_optional = isinstance(types[name], UnionType)
        (kind,) = {*(get_args(types[name]) if is_optional else (types[name],))} - {type(None)}
        assert setting.kind in KINDS[kind], name
        default = getattr(Settings(), name)
        assert is_optional == (default is None), name
        assert default is not None or setting.unset, f"{name}: the help does not say what holds without it"
        assert all(map(math.isfinite, setting.bounds)) == (setting.kind in NUMBERS), name
        if setting.kind in NUMBERS and default is not None:
            assert setting.bounds[0] <= default <= setting.bounds[1], name
        assert not setting.choices or (kind is str and default in setting.choices), name
        assert defaults[name].kw_only, name


def values_of(folder: Path, model: Path) -> dict[str, str]:
    """Returns a value of each setting that is not its default, as people write it, for a daemon of one model."""
    written = {
        "keys": KEY,
        "namespace-key": SECRET,
        "template.jinja": "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}",
    }
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o600)
    return {
        "model": str(model),
        "device": "cpu",
        "runtime": "plan",
        "dtype": "float32",
        "weights": "native",
        "packed_weights": str(folder / "weights"),
        "kv_type": "q8",
        "kernels": of_this_cpu()[0],
        "rows": "15",
        "served_model_name": "of-this-test",
        "chat_template": str(folder / "template.jinja"),
        "chat_template_kwargs": '{"enable_thinking": false}',
        "template_date": "2026-01-31",
        "speculative": "ngram",
        "draft_model": str(model),
        "sampling": "temperature=0.7,top_k=20",
        "host": "127.0.0.2",
        "port": "0",
        "api_keys": str(folder / "keys"),
        "allowed_origins": "http://localhost:3000,moz-extension://*",
        "strict_model_names": "on",
        "log_level": "debug",
        "max_queue": "5",
        "max_sequences": "4",
        "prefill_compression": "500",
        "kv_memory": "64MiB",
        "context": "1024",
        "router": "on",
        "memory_limit": "2GiB",
        "idle_unload": "30m",
        "disk_prefix_cache": "full",
        "kv_cache_dir": str(folder / "kv"),
        "kv_cache_budget": "64MiB",
        "kv_cache_new_budget": "128MiB",
        "kv_cache_write_budget": "20GiB/day",
        "kv_cache_ttl": "7d",
        "kv_cache_min_tokens": "16",
        "canonicalise": "clock=on",
        "ahead": "5",
        "record": str(folder / "record.jsonl"),
        "kv_cache_gate": "off",
        "block_size": "16",
        "fingerprint": "portable",
        "namespace_key_file": str(folder / "namespace-key"),
        "remote_tier": f"file://{folder / 'bucket'}",
        "remote_write": "all",
    }


def several_values_of(folder: Path, model: Path) -> dict[str, str]:
    """Returns the settings that exclude one model by name."""
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(model)
    (folder / "models.toml").write_text(f'[other]\nmodel = "{model}"\n', encoding="utf-8")
    more = {"models_dir": str(folder / "models"), "models_file": str(folder / "models.toml")}
    return more | {"kv_cache_dir": str(folder / "kv"), "block_size": "16"}


OF_A_GPU = {"gpu_layers"}
"""Only an engine with a GPU takes them: any other refuses them by name."""


def by_flags(values: Mapping[str, str], _folder: Path) -> tuple[list[str], dict[str, str]]:
    switches = {name for name in values if SETTINGS[name].kind == "switch"}
    flags = [[flag_of(name)] if name in switches else [flag_of(name), value] for name, value in values.items()]
    return [part for parts in flags for part in parts], {}


def by_variables(values: Mapping[str, str], _folder: Path) -> tuple[list[str], dict[str, str]]:
    return [], {variable_of(flag_of(name)): value for name, value in values.items()}


def by_a_policy(values: Mapping[str, str], folder: Path) -> tuple[list[str], dict[str, str]]:
    policy = folder / "all.toml"
    typed: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in values.items()}
    typed = {name: True if SETTINGS[name].kind == "switch" else value for name, value in typed.items()}
    policy.write_text("".join(f"{name} = {toml_value(value)}\n" for name, value in typed.items()), encoding="utf-8")
    return ["--policy", str(policy)], {}


Way = Callable[[Mapping[str, str], Path], tuple[list[str], dict[str, str]]]
WAYS: tuple[Way, ...] = (by_flags, by_variables, by_a_policy)


def answer_of(flags: list[str], variables: Mapping[str, str], model: str, key: str | None) -> dict[str, Any]:
    environment = clean_environment() | dict(variables)
    for name in ("DISKPREFIX_AHEAD", "DISKPREFIX_RUNTIME"):
        environment.pop(name) if name not in variables else None
    with DaemonProcess(*flags, environment=environment) as daemon:
        with daemon.client(key) as client:
            wait_until(lambda: client.get("/health").status_code == 200, "it is ready", 120)
            body = {"model": model, "messages": [{"role": "user", "content": "Why? " * 20}], "max_tokens": 3}
            answer = reply_to(client, body)
        assert daemon.stop() == 0, daemon.log
        assert "Traceback" not in daemon.log, daemon.log
    return answer


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_with_all_settings_answers(way: Way, chat_model: Path, tmp_path: Path) -> None:
    values = values_of(tmp_path, chat_model)
    flags, variables = way(values, tmp_path)
    answer = answer_of(flags, variables, "of-this-test", KEY)
    assert answer["usage"]["completion_tokens"] == 3
    assert (tmp_path / "record.jsonl").stat().st_size


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_with_all_settings_of_several_models_answers(way: Way, chat_model: Path, tmp_path: Path) -> None:
    values = several_values_of(tmp_path, chat_model)
    flags, variables = way(values, tmp_path)
    assert answer_of(flags, variables, "other", None)["usage"]["completion_tokens"] == 3


def test_each_setting_is_one_that_a_daemon_was_started_with(chat_model: Path, tmp_path: Path) -> None:
    values = values_of(tmp_path, chat_model) | several_values_of(tmp_path, chat_model)
    assert values.keys() | OF_A_GPU == SETTINGS.keys()
    same = [name for name, value in values.items() if value == str(getattr(Settings(), name))]
    assert same == []


def options_of(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Option]]:
    """Yields each option of each command with the command's name, but those for help."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from options_of(found, f"{name} {inner}".strip())
    elif name:
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield name, parameter


WITH_ALL_SETTINGS = ("serve", "doctor", "service install")
"""Commands that a test runs with all settings."""


def test_each_option_of_a_command_is_given_to_it_by_a_test() -> None:
    """A module that runs a command has the command's name in quotes, and the option."""
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    unused = []
    for command, one in options_of(cli):
        if command in WITH_ALL_SETTINGS and one.name in SETTINGS:
            continue
        naming = [text for text in texts if re.search(rf'"{command.split()[-1]}"', text)]
        spelled = "|".join(map(re.escape, (*one.opts, *one.secondary_opts)))
        if not any(re.search(rf"(?:{spelled})(?![\w-])", text) for text in naming):
            unused.append((command, one.name))
    assert unused == []
    assert len(list(options_of(cli))) > 150
