"""What each command refuses: its arguments, its exit code, and the words of the one line that it prints.

The folder of a row has a store (`kv`), one that is damaged (`broken`), none (`none`, and `empty` with an empty file),
one that all may write to (`shared`), a text (`text`), a trace and a policy. NAME=VALUE in front sets a variable.
Nothing is changed. Refusals that need another daemon, hub or disk are with the commands.
"""

from __future__ import annotations

import os
import shlex
import struct
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.desk.conftest import Run, overwrite
from tests.prefixstore.store.building import BLOCK, open_store, prompt, publication

REFUSED = """
2 | zzz                                            | No such command 'zzz' (see diskprefix --help)
2 | serv                                           | No such command 'serv'; did you mean serve? (see diskprefix --help)
2 | completoin                                     | did you mean completion?
2 | serve --sampling heat=1                        | --sampling: 'heat' is not one of temperature, top_p
2 | serve --chat-template-kwargs [1]               | --chat-template-kwargs: is not a JSON object
2 | serve --chat-template-kwargs {"a":             | --chat-template-kwargs: is not a JSON object
2 | serve --sampling model,neutral                 | --sampling: model and neutral exclude each other
2 | serve --sampling temperature                   | --sampling: temperature= is not a number
2 | serve --sampling temperature=warm              | temperature=warm is not a number
2 | serve --sampling top_k=1.5                     | top_k=1.5 is not a number
2 | serve --sampling top_p=1.5                     | top_p=1.5 is out of range
2 | serve --sampling top_p=0.5,temperature=nan     | temperature=nan is out of range
2 | serve --disk-prefix-cache auto:0               | --disk-prefix-cache, auto:0
2 | serve --disk-prefix-cache ''                   | --disk-prefix-cache
2 | serve --kv-cache-budget lots                   | --kv-cache-budget, lots
2 | serve --kv-cache-budget 1MiB                   | --kv-cache-budget, out of range
2 | serve --port 99999                             | --port, 99999
2 | serve --port http                              | --port, http
2 | serve --block-size 0                           | --block-size
2 | serve --max-queue 0                            | --max-queue
2 | serve --fingerprint loose                      | --fingerprint
2 | serve --dtype int4                             | --dtype, int4
2 | serve --kernels avx9                           | --kernels: 'avx9' is not one of auto, torch, , baseline
2 | serve --policy no-such-preset                  | --policy, agent, batch, chat, rag
2 | serve --api-keys ''                            | '--api-keys', it is empty
2 | serve --no-such-flag                           | --no-such-flag
2 | serve extra                                    | extra
2 | serve --record ''                              | it is empty
2 | serve --kv-cache-dir ''                        | it is empty
2 | serve --record ~nobody-here/requests           | ~nobody-here names no user of this machine
2 | serve --model caf\udce9                         | --model: 'caf\\udce9' has bytes that are not UTF-8
2 | serve --kv-cache-dir caf\udce9/kv               | --kv-cache-dir: , has bytes that are not UTF-8
2 | XDG_CACHE_HOME=/caf\udce9 serve                 | XDG_CACHE_HOME: , has bytes that are not UTF-8
2 | XDG_CACHE_HOME=cache inspect                   | XDG_CACHE_HOME: cache is not an absolute path
3 | serve --model /not/there                       | error: --model: , /not/there
3 | serve --model text.gguf                        | error: --model: text.gguf is no model: a .gguf file begins with
3 | serve --model text.gguf --router                | error: --model: text.gguf is no model: a .gguf file begins with
3 | serve --model counts.gguf                      | error: --model: cannot read counts.gguf: its header counts 429496
3 | serve --model short.gguf                       | error: --model: cannot read short.gguf: it is cut short
3 | serve --model old.gguf                         | error: --model: cannot read old.gguf: version 1
4 | serve --kv-cache-dir /proc/x                   | error: --kv-cache-dir /proc/x: No such file
4 | serve --router --kv-cache-dir /proc/x           | error: --kv-cache-dir /proc/x: No such file
3 | serve --model /not/there,/nor/here             | error: --model: , /not/there
3 | serve --draft-model x                          | error: --draft-model: , no file or folder
2 | serve --draft-model x --speculative off        | --draft-model: has no effect with --speculative off
2 | DISKPREFIX_PORT=http serve                     | DISKPREFIX_PORT, http
2 | DISKPREFIX_ROUTER=sometimes serve               | DISKPREFIX_ROUTER, sometimes
2 | DISKPREFIX_API_KEYS= serve                     | 'DISKPREFIX_API_KEYS', it is empty
4 | serve --model org/absent --kv-cache-dir shared | mode 1777, give a folder of your own in it
2 | doctor --port 99999                            | --port
2 | inspect --kv-cache-dir ''                      | it is empty
2 | inspect --kv-cache-dir ~nobody-here/kv         | ~nobody-here names no user of this machine
2 | inspect 3fa --kv-cache-dir kv                  | at least 4 hexadecimal characters
2 | inspect zzzz --kv-cache-dir kv                 | no entry starts with 'zzzz', diskprefix inspect
2 | inspect --tree --stats --kv-cache-dir kv       | give one of ENTRY, --tree, --stats and --lost
2 | inspect --model nobody --kv-cache-dir kv       | there are prompts of tiny
4 | inspect --kv-cache-dir broken                  | data.mdb is damaged: , `verify --fix` cannot repair this
4 | inspect --kv-cache-dir none                    | holds no diskprefix store
4 | verify --kv-cache-dir broken                   | data.mdb is damaged: , let `diskprefix serve` move it aside
4 | verify --kv-cache-dir none                     | holds no diskprefix store
4 | verify --fix --kv-cache-dir empty              | holds no diskprefix store
2 | purge --kv-cache-dir kv                        | give ENTRY, --model, --salt, --older-than or --all
2 | purge --all --model tiny --kv-cache-dir kv     | --all takes no conditions
2 | purge --all 3fa9 --kv-cache-dir kv             | --all takes no conditions
2 | purge zzzz --kv-cache-dir kv                   | no entry starts with 'zzzz'
2 | purge 3fa --yes --kv-cache-dir kv              | at least 4 hexadecimal characters
2 | purge --salt '' --kv-cache-dir kv              | '--salt': it is empty
2 | purge --model '' --kv-cache-dir kv             | '--model': it is empty
2 | purge --older-than soon --kv-cache-dir kv      | is not a duration
2 | purge --model tiyn --yes --kv-cache-dir kv     | --model: nothing is stored for 'tiyn', `diskprefix inspect` shows
2 | purge --salt s --json --kv-cache-dir kv        | --salt: nothing is stored for this tenant
4 | purge --all --yes --kv-cache-dir broken        | data.mdb is damaged:
4 | purge --all --yes --kv-cache-dir none          | holds no diskprefix store
4 | purge --all --dry-run --kv-cache-dir empty     | holds no diskprefix store
4 | compact --kv-cache-dir broken                  | data.mdb is damaged:
4 | compact --kv-cache-dir none                    | holds no diskprefix store
2 | backup ''                                      | it is empty
4 | backup new --kv-cache-dir broken               | data.mdb is damaged:
4 | backup new --kv-cache-dir empty                | holds no diskprefix store
4 | backup kv --kv-cache-dir kv                    | holds a store already
4 | restore broken --yes --kv-cache-dir kv         | data.mdb is damaged:
4 | restore none --kv-cache-dir kv                 | holds no diskprefix store
4 | restore kv --yes --kv-cache-dir kv             | kv
2 | restore kv --kv-cache-dir other                | --yes
2 | export 3fa --kv-cache-dir kv                   | at least 4 hexadecimal characters
2 | export ffff -o '' --kv-cache-dir kv            | it is empty
2 | export ffff --kv-cache-dir kv                  | no entry starts, diskprefix inspect
4 | export ffff --kv-cache-dir none                | holds no diskprefix store
4 | export ffff --kv-cache-dir broken              | data.mdb is damaged:
2 | import ''                                      | it is empty
2 | import text --kv-cache-dir kv                  | text: it is a text; import takes files that
2 | simulate ''                                    | it is empty
2 | simulate ~nobody-here/trace.jsonl              | ~nobody-here names no user of this machine
2 | simulate                                       | Missing argument 'TRACE...'
2 | simulate nowhere.jsonl                         | nowhere.jsonl: it cannot be read: No such file
2 | simulate .                                     | it cannot be read: Is a directory
2 | simulate day.jsonl text                        | text:1:, TRACE is a file of `diskprefix serve --record`
2 | simulate day.jsonl --scope autos               | --scope: 'autos' is not a cache scope
2 | simulate day.jsonl --regime both               | 'both' is not one of 'token', 'sliceable', 'checkpoints'
2 | simulate day.jsonl --budget much               | --budget: 'much' is not a size
2 | simulate day.jsonl --budget 1MiB               | --budget: 1MiB is out of range
2 | simulate day.jsonl --budget 9999TiB            | --budget: 9999TiB is out of range
2 | simulate day.jsonl --block-size 8              | --block-size: 8 is out of range
2 | simulate day.jsonl --kv-cache-min-tokens -1    | --kv-cache-min-tokens: -1 is out of range
2 | simulate day.jsonl --kv-cache-ttl soon         | --kv-cache-ttl: 'soon' is not a duration
2 | simulate day.jsonl --policy nobody             | --policy: no preset 'nobody'
2 | simulate day.jsonl --policy bad.toml           | bad.toml:1: kv_cache_budget: 1048576 is out of range
2 | warm text --url ftp://x                        | --url
2 | warm text --url http://x:port                  | --url
2 | warm text --url localhost:1 --api-key schlüssel | --api-key
2 | DISKPREFIX_PORT=http warm text                 | DISKPREFIX_PORT, http
2 | warm text --url localhost:1 --api-key ''       | it is empty
2 | warm text --scope off                          | --scope
2 | warm text --kv-cache-dir x                     | --kv-cache-dir
1 | warm text --url 'http://no host'               | diskprefix serve
1 | warm text --url http://127.0.0.1:1             | no daemon answers at http://127.0.0.1:1, diskprefix serve
1 | chat --url http://127.0.0.1:1                  | no daemon answers, start one with `diskprefix serve`
2 | top                                            | top needs a terminal
2 | clients emacs                                  | no client is called 'emacs'; there are aider, claude, cline,
1 | clients llm --url http://127.0.0.1:1           | no daemon answers at http://127.0.0.1:1 (
2 | launch emacs                                   | no agent is called 'emacs'; there are aider, claude, cline,
2 | launch langchain                               | no agent is called 'langchain'
2 | show ''                                        | it is empty
2 | show ~nouser/x                                 | '~nouser/x', there is SmolLM2-135M-Instruct
3 | show none                                      | holds no weights
2 | rm ~nouser/x --yes                             | is called '~nouser/x'
2 | rm text --yes                                  | is a file or folder of yours
2 | completion tcsh                                | tcsh
"""

ROWS = [[part.strip() for part in line.split(" | ")] for line in REFUSED.strip().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("refused")
    for name in ("kv", "broken", "other"):
        store = open_store(place / name)
        store.publish(publication(store, prompt(1, 2 * BLOCK)))
        store.close()
    overwrite(place / "broken")
    for name in ("none", "empty"):
        (place / name).mkdir()
    (place / "empty/data.mdb").touch()
    (place / "shared").mkdir()
    (place / "shared").chmod(0o1777)
    for name in ("text", "text.gguf"):
        (place / name).write_text("You look after a small library.")
    for name, fields in (("counts", (3, 1 << 32, 1)), ("old", (1, 1, 1))):
        (place / f"{name}.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", *fields))
    (place / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    (place / "day.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [0]}\n')
    (place / "bad.toml").write_text("kv_cache_budget = '1MiB'")
    return place


def files_in(place: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in place.rglob("*") if path.name != "lock.mdb"}


@pytest.mark.parametrize(("exit_code", "command", "words"), ROWS, ids=[row[1][:50] for row in ROWS])
def test_a_refused_command_prints_one_line_and_changes_nothing(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, exit_code: str, command: str, words: str
) -> None:
    for name in [name for name in os.environ if name.startswith("DISKPREFIX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.chdir(place)
    before = files_in(place)
    arguments = shlex.split(command)
    while "=" in arguments[0]:
        name, _, value = arguments.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    run(*arguments).assert_refused(int(exit_code), *words.split(", "))
    assert files_in(place) == before


def test_a_user_without_a_home_is_told_what_to_set_where_a_folder_is_needed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have users that are not in /etc/passwd."""

    def nobody(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for command in ("inspect", "serve", "list"):
        run(command).assert_refused(2, "no home folder: set XDG_C", "or HOME")
    assert run("inspect", "--help").exit_code == 0
    run("inspect", "--kv-cache-dir", "/not/there").assert_refused(4, "/not/there holds no diskprefix store")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("DISKPREFIX_KV_CACHE_DIRR", "DISKPREFIX_KV_CACHE_DIR"),
        ("DISKPREFIX_DISK_PREFIX_CASH", "DISKPREFIX_DISK_PREFIX_CACHE"),
        ("DISKPREFIX_APIKEY", "DISKPREFIX_API_KEY"),
        ("DISKPREFIX_PORT", None),
        ("DISKPREFIX_POLICY", None),
        ("DISKPREFIX_QQQ", None),
    ],
)
def test_a_misspelt_variable_is_named_once_with_the_one_that_was_meant(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, like: str | None
) -> None:
    monkeypatch.setenv(name, "1")
    ended = run("completion", "bash")
    said = "" if like is None else f"warning: {name} is no option (meant: {like}?)\n"
    assert (ended.exit_code, ended.stderr) == (0, said)
