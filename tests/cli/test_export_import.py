"""`diskprefix export` and `diskprefix import`, as somebody types them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from diskprefix.cli import main
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.store.pieces import LAYOUT_VERSION
from diskprefix.store.store import Store
from tests.exactness.architectures import tiny_model
from tests.forked import ForkedCommand
from tests.runner import DEVICES, Answer, Runner, random_prompt, tiny_llama, tiny_settings
from tests.server.daemon_process import DaemonProcess, clean_environment, running_daemon, wait_until
from tests.store.building import BLOCK, is_whole, open_store, prompt
from tests.store.exported import TENANT, entry_of, identity_of, large_layout

PROMPT = prompt(1, 3 * BLOCK + 5)


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        assert self.exit_code == 0, self.stderr
        return json.loads(self.stdout)


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    def run(*args: str | Path) -> Result:
        code: object = 0
        try:
            main(list(map(str, args)))
        except SystemExit as end:
            code = end.code
        out = capsys.readouterr()
        assert isinstance(code, int | None)
        return Result(code or 0, out.out, out.err)

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "source")
    store.publish(entry_of(store, PROMPT))
    store.close()
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A store to which a daemon with the same model has written."""
    store = open_store(tmp_path / "target")
    store.publish(entry_of(store, prompt(9, BLOCK)))
    store.close()
    return tmp_path / "target"


@pytest.fixture
def file(invoke: Invoke, source: Path, tmp_path: Path) -> Path:
    invoke("export", entry_id(source), "-o", tmp_path / "e.safetensors", "--kv-cache-dir", source)
    return tmp_path / "e.safetensors"


def entry_id(folder: Path) -> str:
    store = Store(folder, read_only=True)
    with store.snapshot() as snapshot:
        name = next(name for name, _ in snapshot.entries())
    store.close()
    return name.hex()


def holds_the_prompt(folder: Path) -> bool:
    store = Store(folder, read_only=True)
    try:
        return is_whole(store, entry_of(store, PROMPT))
    finally:
        store.close()


def one_line(result: Result, exit_code: int, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_an_entry_goes_from_store_to_store(invoke: Invoke, source: Path, target: Path, tmp_path: Path) -> None:
    name = entry_id(source)
    path = tmp_path / "manual.safetensors"
    exported = invoke("export", name[:6], "-o", path, "--kv-cache-dir", source)
    assert (exported.exit_code, exported.stderr) == (0, "")
    assert f"{path}: {len(PROMPT)} tokens of tiny" in exported.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    imported = invoke("import", path, "--kv-cache-dir", target)
    assert (imported.exit_code, imported.stderr) == (0, "")
    assert f"{path}: imported {len(PROMPT)} tokens of tiny in 4 blocks, 4 new" in imported.stdout
    assert holds_the_prompt(target)
    again = invoke("import", path, "--kv-cache-dir", target)
    assert "4 blocks, none new" in again.stdout


def test_json_says_what_was_done(invoke: Invoke, source: Path, target: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    exported = invoke("export", entry_id(source), "-o", path, "--kv-cache-dir", source, "--json").json
    assert exported == {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "id": entry_id(source),
        "model": "tiny",
        "tenant": "",
        "num_tokens": len(PROMPT),
    }
    planned = invoke("import", path, "--kv-cache-dir", target, "--dry-run", "--json").json
    assert not holds_the_prompt(target)
    done = invoke("import", path, "--kv-cache-dir", target, "--json").json
    assert planned == done | {"dry_run": True}
    (entry,) = done["entries"]
    raw_bytes = entry.pop("new_bytes")
    assert raw_bytes == 60 * len(PROMPT) + 100
    assert entry == {
        "file": str(path),
        "id": entry["id"],
        "model": "tiny",
        "tenant": "",
        "num_tokens": len(PROMPT),
        "num_nodes": 4,
        "new_nodes": 4,
        "is_new": True,
        "evicted": 0,
    }


def test_without_a_name_the_file_is_called_by_the_id(
    invoke: Invoke, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entry_id(source)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert invoke("export", name, "--kv-cache-dir", source, "--json").json["file"] == f"{name[:12]}.safetensors"
    invoke("export", name, "-o", tmp_path, "--kv-cache-dir", source)
    assert (tmp_path / f"{name[:12]}.safetensors").read_bytes() == Path(f"{name[:12]}.safetensors").read_bytes()


def test_a_file_that_exists_is_kept_without_force(invoke: Invoke, source: Path, file: Path) -> None:
    args = ("export", entry_id(source), "-o", file, "--kv-cache-dir", source)
    one_line(invoke(*args), 2, "exists", "--force")
    assert invoke(*args, "--force").exit_code == 0


def test_an_unknown_entry_is_one_line(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    one_line(invoke("export", "ffff" * 8, "--kv-cache-dir", source), 2, "no entry starts", "diskprefix inspect")
    one_line(invoke("export", "ffff", "--kv-cache-dir", tmp_path), 4, "holds no diskprefix store")


def test_a_folder_that_is_not_there_is_named(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "none" / "e.safetensors"
    ended = invoke("export", entry_id(source), "-o", path, "--kv-cache-dir", source)
    one_line(ended, 2, f"--output: there is no folder {path.parent};")


@pytest.mark.parametrize("content", [b"import os\n" * 100, b"", bytes(100), b'{"a": 1}' * 20])
def test_a_file_that_export_did_not_write_is_told_so(
    invoke: Invoke, target: Path, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "req.py"
    path.write_bytes(content)
    ended = invoke("import", path, "--kv-cache-dir", target)
    one_line(ended, 2, f"{path}: `diskprefix export` did not write it")


@pytest.mark.parametrize("flags", [(), ("--force",), ("--dry-run",)])
def test_a_store_whose_file_is_damaged_says_what_helps(
    invoke: Invoke, file: Path, target: Path, flags: tuple[str, ...]
) -> None:
    data = target / "data.mdb"
    data.write_bytes(data.read_bytes()[: 2 * 4096] + b"\xff" * (data.stat().st_size - 2 * 4096))
    one_line(invoke("import", file, "--kv-cache-dir", target, *flags), 4, "is damaged", "`verify --fix` cannot repair")


def test_a_prompt_stays_with_its_tenant_and_both_say_so(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    pub = entry_of(store, PROMPT, tenant=TENANT)
    store.publish(pub)
    store.close()
    assert pub.last_node is not None
    path, again = tmp_path / "e.safetensors", tmp_path / "again.safetensors"
    args = ("export", pub.last_node.hex(), "--kv-cache-dir", tmp_path / "kv", "-o")
    short = "/".join(id_[:8] for id_ in TENANT.split("/"))
    assert invoke(*args, path).stdout.endswith(f", tenant {short}\n")
    assert invoke(*args, again, "--json").json["tenant"] == TENANT
    planned = invoke("import", path, "--kv-cache-dir", target, "--dry-run", "--json").json
    assert planned["entries"][0]["tenant"] == TENANT
    assert f" tokens of tiny, tenant {short}, in 4 blocks" in invoke("import", path, "--kv-cache-dir", target).stdout
    for command, sentence in (("export", "stays with its tenant"), ("import", "stays with the tenant")):
        assert sentence in " ".join(invoke(command, "--help").stdout.split())


def test_another_model_is_refused_and_forced(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    store = open_store(folder)
    store.publish(entry_of(store, prompt(5, BLOCK), identity=identity_of(weights="w2"), model="Other-7B"))
    store.close()
    one_line(invoke("import", file, "--kv-cache-dir", folder), 2, "'tiny'", "'Other-7B'", "--force")
    one_line(invoke("import", file, "--kv-cache-dir", folder, "--dry-run"), 2, "'tiny'")
    assert invoke("import", file, "--kv-cache-dir", folder, "--force").exit_code == 0
    assert holds_the_prompt(folder)


def test_force_creates_a_store_and_nothing_else_does(invoke: Invoke, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    one_line(invoke("import", file, "--kv-cache-dir", folder), 4, "holds no diskprefix store", "--model")
    planned = invoke("import", file, "--kv-cache-dir", folder, "--force", "--dry-run", "--json").json
    assert (planned["entries"][0]["id"], planned["entries"][0]["new_nodes"]) == (None, 4)
    assert not folder.exists()
    assert invoke("import", file, "--kv-cache-dir", folder, "--force", "--kv-cache-budget", "20MiB").exit_code == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert holds_the_prompt(folder)


def test_one_bad_file_of_several_and_nothing_is_imported(
    invoke: Invoke, target: Path, file: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    before = (target / "data.mdb").read_bytes()
    one_line(invoke("import", file, bad, "--kv-cache-dir", target), 4, "bad.safetensors is damaged", "checksum")
    one_line(invoke("import", file, tmp_path / "none", "--kv-cache-dir", target), 2, "none: no such file")
    assert (target / "data.mdb").read_bytes() == before


def test_a_file_that_cannot_fit_is_refused_before_any_is_imported(
    invoke: Invoke, file: Path, target: Path, tmp_path: Path
) -> None:
    layout = large_layout(1 << 20)
    store = open_store(tmp_path / "large", budget_bytes=64 << 20)
    pub = entry_of(store, prompt(1, 40 * BLOCK), layout=layout)
    store.publish(pub)
    store.close()
    large = tmp_path / "large.safetensors"
    assert pub.last_node is not None
    assert invoke("export", pub.last_node.hex(), "-o", large, "--kv-cache-dir", tmp_path / "large").exit_code == 0
    refused = invoke("import", file, large, "--kv-cache-dir", target, "--force")
    one_line(refused, 4, "do not fit --kv-cache-budget 32.0 MiB")
    assert not holds_the_prompt(target)


def test_a_flag_that_is_smaller_than_the_daemon_s_budget_evicts_nothing(
    invoke: Invoke, file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    store = open_store(folder, budget_bytes=64 << 20)
    kept = entry_of(store, prompt(1, 40 * BLOCK), layout=large_layout(1 << 20))
    store.publish(kept)
    store.close()
    assert invoke("import", file, "--kv-cache-dir", folder, "--kv-cache-budget", "16MiB", "--force").exit_code == 0
    store = Store(folder, read_only=True)
    assert is_whole(store, kept)
    store.close()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--kv-cache-budget", "1KiB"), "--kv-cache-budget"),
        (("--kv-cache-min-free", "much"), "--kv-cache-min-free"),
        (("--kv-cache-codec", "gzip"), "--kv-cache-codec"),
    ],
)
def test_a_wrong_setting_is_named(
    invoke: Invoke, file: Path, target: Path, args: tuple[str, ...], problem: str
) -> None:
    one_line(invoke("import", file, "--kv-cache-dir", target, *args), 2, problem)


@pytest.mark.parametrize("command", ["export", "import"])
def test_the_help_shows_examples(invoke: Invoke, command: str) -> None:
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert f"diskprefix {command} " in shown.stdout
    assert "--kv-cache-dir" in shown.stdout


def test_neither_waits_for_torch(file: Path, source: Path, target: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from diskprefix.cli import _run; assert not _run(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    for args in (
        ("export", entry_id(source), "-o", str(tmp_path / "again.safetensors"), "--kv-cache-dir", str(source)),
        ("import", str(file), "--kv-cache-dir", str(target)),
    ):
        subprocess.run([sys.executable, "-c", code, *args], check=True, env=dict(os.environ), timeout=60)


class FingerprintedRunner(Runner):
    """A model whose root is that of its fingerprint, as a daemon's is."""

    def identity(self, salt: str) -> str:
        fingerprint = Fingerprint.of(self.model, f"digest of {self.name}")
        return fingerprint.identity(self.settings.block_size, LAYOUT_VERSION, self.layout.describe(), salt)


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_llama(torch.bfloat16, request.param)


@pytest.fixture(scope="module", params=["qwen3_next", "mamba2", "gemma3"])
def other_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A hybrid of linear and full attention, one of states alone, one with windows of less than two blocks."""
    return tiny_model(request.param, torch.bfloat16)


def saved(model: PreTrainedModel, folder: Path, token_ids: Any, **settings: object) -> Answer:
    """The answer of a cold run that saves the whole prompt."""
    runner = FingerprintedRunner(model, tiny_settings(folder, **settings))
    answer = runner.run(token_ids, "full", reply=8)
    runner.close()
    return answer


@pytest.mark.parametrize("extra", [0, 7])
def test_a_model_restores_what_another_store_computed_bit_for_bit(
    invoke: Invoke, model: PreTrainedModel, tmp_path: Path, extra: int
) -> None:
    token_ids = random_prompt(1, 10 * BLOCK + extra)
    cold = saved(model, tmp_path / "a", token_ids, kv_cache_codec="planes")
    path = tmp_path / "e.safetensors"
    assert invoke("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
    saved(model, tmp_path / "b", random_prompt(2, 2 * BLOCK))
    for folder, flags in ((tmp_path / "b", ()), (tmp_path / "new", ("--force", "--kv-cache-budget", "64MiB"))):
        imported = invoke("import", path, "--kv-cache-dir", folder, "--kv-cache-min-free", "0", *flags)
        assert imported.exit_code == 0, imported.stderr
        runner = FingerprintedRunner(model, tiny_settings(folder))
        warm = runner.run(token_ids, "full", reply=8)
        longer = np.concatenate([token_ids, random_prompt(3, 2 * BLOCK)])
        extended, computed = (runner.run(longer, scope, reply=8) for scope in ("full", "off"))
        runner.close()
        assert (warm.num_forwards, warm.report.restored, warm.report.source) == (0, len(token_ids), "disk")
        assert torch.equal(warm.logits, cold.logits)
        assert warm.greedy == cold.greedy
        assert extended.report.restored == 10 * BLOCK
        assert torch.equal(extended.logits, computed.logits)
        assert extended.greedy == computed.greedy


@pytest.mark.parametrize("ends", ["with its tail", "with a checkpoint"])
def test_checkpoints_and_windows_restore_in_another_store_bit_for_bit(
    invoke: Invoke, other_model: PreTrainedModel, tmp_path: Path, ends: str
) -> None:
    token_ids = random_prompt(1, 10 * BLOCK + 7)
    runner = FingerprintedRunner(other_model, tiny_settings(tmp_path / "a", kv_cache_interval=4 * BLOCK))
    cold = runner.run(token_ids, "full" if ends == "with its tail" else 10 * BLOCK, reply=8)
    shorter, longer = token_ids[: 7 * BLOCK], np.concatenate([token_ids, random_prompt(3, 2 * BLOCK)])
    computed = [runner.run(ids, "off", reply=8) for ids in (shorter, longer)]
    runner.close()
    path = tmp_path / "e.safetensors"
    exported = invoke("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a")
    assert exported.exit_code == 0, exported.stderr
    flags = ("--kv-cache-min-free", "0", "--force", "--kv-cache-budget", "64MiB")
    imported = invoke("import", path, "--kv-cache-dir", tmp_path / "b", *flags)
    assert imported.exit_code == 0, imported.stderr
    runner = FingerprintedRunner(other_model, tiny_settings(tmp_path / "b"))
    sliceable = runner.layout.is_sliceable
    warm = runner.run(token_ids, "full", reply=8)
    extended = [runner.run(ids, "full", reply=8) for ids in (shorter, longer)]
    runner.close()
    whole = len(token_ids) if ends == "with its tail" else 10 * BLOCK
    assert (warm.report.restored, warm.report.source) == (whole, "disk")
    assert [answer.report.restored for answer in extended] == [(6 if sliceable else 4) * BLOCK, 10 * BLOCK]
    for answer, same in zip([warm, *extended], [cold, *computed], strict=True):
        assert torch.equal(answer.logits, same.logits)
        assert answer.greedy == same.greedy


def test_a_file_continues_in_transformers_own_cache(invoke: Invoke, tmp_path: Path) -> None:
    """Who has the file and the model needs nothing else: the README's example."""
    model = tiny_llama(torch.float32)
    token_ids = random_prompt(1, 3 * BLOCK + 7)
    cold = saved(model, tmp_path / "a", token_ids)
    path = tmp_path / "e.safetensors"
    assert invoke("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
    state = load_file(path)
    assert torch.equal(state["logits"], cold.logits)
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(state[f"layers.{layer}.keys"], state[f"layers.{layer}.values"], layer)
    reply, logits = [], state["logits"]
    with torch.inference_mode():
        for _ in range(8):
            reply.append(int(logits.argmax()))
            logits = model(torch.tensor([reply[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
    assert reply == cold.greedy


def chat(client: httpx.Client, model: Path, system: str) -> dict[str, Any]:
    body = {
        "model": model.name,
        "messages": [{"role": "system", "content": system * 30}, {"role": "user", "content": "Tell me about rivers."}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "prefix_cache": {"scope": "full"},
    }
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


SYSTEM = "You are patient. "


@pytest.fixture(scope="module")
def served(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file of a prompt that a daemon computed, and its answer."""
    folder = tmp_path_factory.mktemp("served")
    with running_daemon(chat_model, folder / "kv") as daemon:
        with daemon.client() as client:
            cold = chat(client, chat_model, SYSTEM)
        daemon.wait_saved()
    args = ["export", entry_id(folder / "kv"), "-o", str(folder / "e.safetensors"), "--kv-cache-dir", folder / "kv"]
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    assert not end.value.code
    assert cold["prefix_cache"]["restored"] == 0
    return folder / "e.safetensors", cold


@pytest.fixture(scope="module")
def other_weights(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that differs in its weights alone."""
    folder = tmp_path_factory.mktemp("other") / "other-weights"
    shutil.copytree(chat_model, folder)
    file = folder / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def knows_a_model(folder: Path) -> bool:
    store = Store(folder, read_only=True)
    try:
        with store.snapshot() as snapshot:
            return bool(list(snapshot.models()))
    finally:
        store.close()


def is_restored(daemon: DaemonProcess, model: Path, cold: dict[str, Any]) -> bool:
    with daemon.client() as client:
        warm = chat(client, model, SYSTEM)
    # The reply took the place of the prompt's end.
    found = (warm["prefix_cache"].get("source"), warm["prefix_cache"]["restored"], warm["choices"])
    return found == ("disk", cold["usage"]["prompt_tokens"] - 1, cold["choices"])


@pytest.mark.slow
def test_a_daemon_without_a_request_makes_its_model_known_for_an_import_beside_it_and_after_it(
    invoke: Invoke, chat_model: Path, served: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file, cold = served
    for name in ("beside", "after"):
        folder = tmp_path / name
        args = ("import", file, "--kv-cache-dir", folder)
        with running_daemon(chat_model, folder) as daemon:
            wait_until(lambda folder=folder: knows_a_model(folder), "the model is known")
            assert json.loads(invoke("inspect", "--stats", "--json", "--kv-cache-dir", folder).stdout)["roots"] == []
            if name == "beside":
                assert invoke(*args).exit_code == 0
                assert is_restored(daemon, chat_model, cold)
            daemon.stop()
        if name == "after":
            assert invoke(*args).exit_code == 0
            with running_daemon(chat_model, folder) as daemon:
                assert is_restored(daemon, chat_model, cold)
        assert invoke("verify", "--kv-cache-dir", folder).exit_code == 0


def import_for(model: Path, folder: Path, file: Path, *flags: str | Path) -> Result:
    """`import --model` in a process with the settings of the daemons: its threads are part of the numbers."""
    arguments = ["import", file, "--kv-cache-dir", folder, "--model", model, "--device", "cpu", "--block-size", 16]
    command = ForkedCommand(list(map(str, [*arguments, *flags])), clean_environment())
    assert command.stderr is not None
    with command.stderr:
        errors = command.stderr.read()
    return Result(command.wait(60), "", errors)


@pytest.mark.slow
def test_an_import_for_a_model_needs_no_daemon_ever(
    chat_model: Path, served: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file, cold = served
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("a secret of many bytes")
    planned = import_for(chat_model, tmp_path / "kv", file, "--dry-run")
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert not (tmp_path / "kv").exists()
    done = import_for(chat_model, tmp_path / "kv", file, "--namespace-key-file", key)
    assert (done.exit_code, done.stderr) == (0, "")
    with running_daemon(chat_model, tmp_path / "kv", namespace_key_file=key) as daemon:
        assert is_restored(daemon, chat_model, cold)


@pytest.mark.slow
def test_a_file_of_another_model_or_of_other_settings_is_refused_with_what_differs(
    invoke: Invoke,
    chat_model: Path,
    other_weights: Path,
    served: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    file, _ = served
    folder = tmp_path / "kv"
    alone = {
        "weights_digest is ": import_for(other_weights, folder, file),
        "block_size is '16' instead of '32'": import_for(chat_model, folder, file, "--block-size", "32"),
        "dtype is 'float32' instead of 'bfloat16'": import_for(chat_model, folder, file, "--dtype", "bfloat16"),
    }
    for differs, ended in alone.items():
        one_line(ended, 2, f"holds state of '{chat_model.name}'", differs)
    assert not folder.exists()
    with running_daemon(other_weights, folder):
        wait_until(lambda: knows_a_model(folder), "the model is known")
        beside = invoke("import", file, "--kv-cache-dir", folder)
    after = invoke("import", file, "--kv-cache-dir", folder)
    for ended in (beside, after):
        one_line(ended, 2, "compared with 'other-weights' here, weights_digest is ", "--model", "--force")


def test_flags_that_do_not_go_together_are_refused(invoke: Invoke, file: Path, target: Path) -> None:
    args = ("import", file, "--kv-cache-dir", target)
    one_line(invoke(*args, "--weights", "int8"), 2, "--weights goes with --model")
    one_line(invoke(*args, "--model", "m", "--force"), 2, "--force takes the state of any model")
    one_line(invoke(*args, "--model", ""), 2, "--model")
    one_line(invoke(*args, "--model", "./none"), 3, "--model: no such file or folder")


def test_variables_of_the_daemon_do_not_make_an_import_load_its_model(
    invoke: Invoke, file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISKPREFIX_MODEL", "./none")
    monkeypatch.setenv("DISKPREFIX_WEIGHTS", "int8")
    assert invoke("import", file, "--kv-cache-dir", target).exit_code == 0
