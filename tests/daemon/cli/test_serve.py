"""Flags, variables and policy files of `diskprefix serve`, and what its errors look like."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from click.testing import CliRunner

import diskprefix.daemon.app
import diskprefix.daemon.cli.serve_command
from diskprefix import __version__
from diskprefix.daemon.cli import cli, commands, main
from diskprefix.daemon.cli.options import variable_of
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.errors import ModelError
from diskprefix.setting import flag_of
from tests.desk.conftest import Run

SettingsOf = Callable[..., Settings]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(variable_of(flag_of(name)), raising=False)
    monkeypatch.delenv("DISKPREFIX_POLICY", raising=False)


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> SettingsOf:
    """The settings that `diskprefix serve` with these arguments would run with."""
    seen: list[Settings] = []
    monkeypatch.setattr(diskprefix.daemon.app, "serve", seen.append)
    monkeypatch.setattr(diskprefix.daemon.cli.serve_command, "configure_logging", lambda *_: None)

    def run(*args: str) -> Settings:
        with pytest.raises(SystemExit) as end:
            main(["serve", *args])
        assert end.value.code == 0
        return seen[-1]

    return run


def test_without_arguments_the_settings_are_the_defaults(settings_of: SettingsOf) -> None:
    assert settings_of() == Settings()


def test_the_value_of_each_flag_has_the_type_of_its_setting(settings_of: SettingsOf) -> None:
    """Also of the numbers without a default, which say nothing of their type."""
    types = get_type_hints(Settings)
    for name, setting in SETTINGS.items():
        kinds = {kind for kind in get_args(types[name]) or (types[name],) if kind is not type(None)}
        is_number = setting.kind in ("integer", "size", "duration")
        assert is_number == (kinds <= {int, float}), name
        if is_number:
            value = int(min(max(setting.bounds[0], 1), setting.bounds[1]))
            assert type(getattr(settings_of(flag_of(name), str(value)), name)) in kinds, name


def test_every_setting_has_a_flag_and_a_variable(monkeypatch: pytest.MonkeyPatch, settings_of: SettingsOf) -> None:
    other: dict[str, str] = {
        "model": "some/model",
        "models_dir": "~/models",
        "models_file": "/models.toml",
        "runtime": "LLAMA",
        "device": "cuda:1",
        "gpu_layers": "12",
        "dtype": "float32",
        "packed_weights": "off",
        "host": "::1",
        "port": "9000",
        "max_queue": "5",
        "max_sequences": "4",
        "sampling": "temperature=0.7, top_k=20",
        "speculative": "NGRAM",
        "draft_model": "some/smaller-model",
        "kv_memory": "3GiB",
        "context": "4096",
        "api_keys": "/keys",
        "allowed_origins": "http://localhost:3000",
        "block_size": "64",
        "disk_prefix_cache": "FULL",
        "kv_cache_dir": "/elsewhere",
        "kv_cache_budget": "8GiB",
        "kv_cache_new_budget": "6GiB",
        "kv_cache_write_budget": "20GiB/day",
        "kv_cache_ttl": "7d",
        "kv_cache_min_tokens": "7",
        "kv_cache_gate": "OFF",
        "prefill_compression": "5000",
        "canonicalise": "clock=on",
        "ahead": "off",
        "record": "~/requests.jsonl",
        "namespace_key_file": "/namespace-key",
        "remote_tier": "s3://bucket/prefix",
        "remote_write": "ALL",
        "fingerprint": "portable",
        "served_model_name": "me",
        "strict_model_names": "on",
        "log_level": "DEBUG",
        "chat_template": "/template.jinja",
        "chat_template_kwargs": '{"enable_thinking": false}',
        "template_date": "2026-01-31",
        "weights": "native",
        "kv_type": "q8",
        "kernels": "torch",
        "rows": "15",
        "router": "on",
        "memory_limit": "6GiB",
        "idle_unload": "30m",
    }
    assert other.keys() == SETTINGS.keys()
    switches = {name for name, setting in SETTINGS.items() if setting.kind == "switch"}
    flags = [[flag_of(name)] if name in switches else [flag_of(name), value] for name, value in other.items()]
    by_flags = settings_of(*(part for parts in flags for part in parts))
    for name, value in other.items():
        monkeypatch.setenv(variable_of(flag_of(name)), value)
    assert settings_of() == by_flags
    defaults = Settings()
    unchanged = [name for name in other if getattr(by_flags, name) == getattr(defaults, name)]
    assert unchanged == []
    assert (by_flags.kv_cache_budget, by_flags.disk_prefix_cache) == (8 * 1024**3, "full")
    assert (by_flags.kv_cache_gate, by_flags.record) == ("off", Path("~/requests.jsonl").expanduser())


def test_a_flag_wins_over_a_variable_over_a_policy_over_the_default(
    monkeypatch: pytest.MonkeyPatch, settings_of: SettingsOf, tmp_path: Path
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('kv_cache_budget = "1GiB"\nkv-cache-min-tokens = 100\nmax_queue = 3\ndisk_prefix_cache = 1000\n')
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_BUDGET", "2GiB")
    monkeypatch.setenv("DISKPREFIX_MAX_QUEUE", "4")
    settings = settings_of("--max-queue", "5", "--policy", str(policy))
    assert settings.max_queue == 5
    assert settings.kv_cache_budget == 2 * 1024**3
    assert settings.kv_cache_min_tokens == 100
    assert settings.disk_prefix_cache == "1000"
    assert settings.kv_cache_gate == Settings().kv_cache_gate


def test_a_switch_can_be_turned_off_again_by_what_wins(
    monkeypatch: pytest.MonkeyPatch, settings_of: SettingsOf, tmp_path: Path
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text("router = true\n")
    assert settings_of("--policy", str(policy)).router
    assert not settings_of("--policy", str(policy), "--no-router").router
    monkeypatch.setenv("DISKPREFIX_ROUTER", "false")
    assert not settings_of("--policy", str(policy)).router
    assert settings_of("--router").router


@pytest.mark.parametrize(
    ("variables", "args", "name", "value"),
    [
        ({"DISKPREFIX_POLICY": "shared-server"}, [], "kv_cache_new_budget", 64 * 2**30),
        ({"DISKPREFIX_POLICY": "shared-server"}, [], "kv_cache_budget", None),
        ({"DISKPREFIX_PORT": ""}, [], "port", Settings().port),
        ({"DISKPREFIX_API_KEYS": ""}, ["--api-keys", "~/keys"], "api_keys", Path("/home/me/keys")),
        ({}, ["--kv-cache-dir", "~/kv"], "kv_cache_dir", Path("/home/me/kv")),
        ({"DISKPREFIX_MODEL": ""}, [], "model_names", ()),
        ({"DISKPREFIX_MODEL": "org/a, org/b:Q4_K_M"}, [], "model_names", ("org/a", "org/b:Q4_K_M")),
        ({"DISKPREFIX_MODEL": "org/a, org/b"}, ["--model", "org/c"], "model_names", ("org/c",)),
        ({}, ["--model", "org/c", "--model", "org/d,org/e"], "model_names", ("org/c", "org/d", "org/e")),
        ({}, ["--model", "a,b"], "model_names", ("a,b",)),
    ],
)
def test_a_setting_comes_from_variables_that_are_not_empty_and_from_flags(
    monkeypatch: pytest.MonkeyPatch,
    settings_of: SettingsOf,
    tmp_path: Path,
    variables: dict[str, str],
    args: list[str],
    name: str,
    value: object,
) -> None:
    """Models may be given with commas, or one after the other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").mkdir()
    for variable, text in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(variable, text)
    assert getattr(settings_of(*args), name) == value


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("port", '"http"', "port: 'http' is not a valid integer"),
        ("port", "8642.5", "port: '8642.5' is not a valid integer"),
        ("port", "inf", "port: 'inf' is not a valid integer"),
        ("port", "99999", "port: 99999 is out of range (0 to 65535)"),
        ("port", "true", "port: must be a number or a text"),
        ("kv_cache_budget", '"lots"', "kv_cache_budget: 'lots' is not a size; write for example 4GiB"),
        ("kv-cache-budget", "1024", "kv-cache-budget: 1024 is out of range"),
        ("kv_cache_ttl", '"5M"', "kv_cache_ttl: '5M' is not a duration; write for example 90s, 15m, 12h, 7d or 2w"),
        ("kv_cache_ttl", "-1", "kv_cache_ttl: '-1' is not a duration"),
        ("disk_prefix_cache", '"auto:0"', "disk_prefix_cache: 'auto:0' is not a cache scope"),
        ("remote_write", '"some"', "remote_write: 'some' is not one of"),
        ("api_keys", '""', "api_keys: it is empty"),
        ("kv_cache_dir", f'"{__file__}"', f"kv_cache_dir: Directory '{__file__}' is a file"),
        ("router", '"yes"', "router: must be true or false"),
        ("host", "[]", "host: must be a number or a text"),
        ("max_queues", "3", "unknown key 'max_queues'"),
        ("max-queue", "4", "max-queue: is given twice, with - and with _"),
    ],
)
def test_a_wrong_value_in_a_policy_file_is_named_with_its_line(
    run: Run, tmp_path: Path, key: str, value: str, expected: str
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text(f"# mine\nmax_queue = 3\n{key} = {value}\n")
    run("serve", "--policy", policy).assert_refused(2, f"error: --policy: {policy}:3: {expected}")


@pytest.mark.parametrize(
    "text", ["port = ", f"port = {'9' * 5000}", "host = " + "[" * 100_000, "port = 1\nport = 2", "host = '\udc80'"]
)
def test_a_policy_file_that_is_no_toml_is_one_line(run: Run, tmp_path: Path, text: str) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text(text, errors="surrogateescape")
    run("serve", "--policy", policy).assert_refused(2, f"{policy} is not valid TOML: ")


def test_print_config_names_the_source_of_each_value(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text('port = 1234\nmax_queue = 7\nkv_cache_budget = "3GiB"\n')
    monkeypatch.setenv("DISKPREFIX_MAX_QUEUE", "8")
    ended = run("serve", "--policy", policy, "--port", "4321", "--router", "--idle-unload", "0s", "--print-config")
    lines = {line.lstrip("# ").split(" ")[0]: line for line in ended.stdout.splitlines()}
    assert list(lines) == list(SETTINGS)
    assert lines["port"].split() == ["port", "=", "4321", "#", "the", "flag", "--port"]
    assert lines["max_queue"].endswith("# the variable DISKPREFIX_MAX_QUEUE")
    assert lines["kv_cache_budget"].endswith(f"# the policy {policy}")
    assert lines["idle_unload"].split()[2] == "0.0"
    assert lines["host"].endswith("# default")
    assert lines["model"].startswith("# model =")
    assert f"# default: {SETTINGS['model'].unset}" in lines["model"]
    assert tomllib.loads(ended.stdout)["router"] is True
    (tmp_path / "again.toml").write_text(ended.stdout)
    again = run("serve", "--policy", tmp_path / "again.toml", "--print-config").stdout
    assert tomllib.loads(again) == tomllib.loads(ended.stdout), "what is printed can be read again"


@pytest.mark.parametrize(("error", "code"), [(ModelError("no\nmodel"), 3), (KeyboardInterrupt(), 130)])
def test_an_error_of_the_daemon_is_one_line_and_its_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(_settings: Settings) -> None:
        raise error

    monkeypatch.setattr(diskprefix.daemon.app, "serve", fail)
    monkeypatch.setattr(diskprefix.daemon.cli.serve_command, "configure_logging", lambda *_: None)
    run("serve").assert_refused(code)


def test_help_shows_the_common_flags_on_two_screens_and_help_all_shows_every_flag() -> None:
    common, everything = (
        CliRunner().invoke(cli, ["serve", flag], terminal_width=100).stdout for flag in ("--help", "--help-all")
    )
    assert len(common.splitlines()) <= 90
    for name, setting in SETTINGS.items():
        line = re.compile(rf"^  {flag_of(name)} ", re.MULTILINE)
        assert bool(line.search(common)) is setting.is_common
        assert line.search(everything)
    for heading in ("Model:", "Server:", "Disk cache:", "Examples:"):
        assert heading in common


def test_the_group_lists_its_commands_and_its_version(run: Run) -> None:
    text = run("--help").stdout
    listed = re.findall(r"^  (\w+)  ", text[text.index("Commands:") :], re.MULTILINE)
    assert listed == list(commands())
    assert __version__ in run("--version").stdout
    ended = run()
    assert (ended.exit_code, ended.stderr.rstrip()) == (2, text.rstrip()), "without a command the help is shown"


def test_the_first_page_has_the_commands_in_the_order_of_the_help() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `diskprefix (\w+)", page, re.MULTILINE)
    assert rows == [name for name in commands() if name in rows]
