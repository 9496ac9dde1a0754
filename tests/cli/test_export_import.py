"""`diskprefix export` and `diskprefix import`, as somebody types them."""

from __future__ import annotations

import shutil
import stat
from contextlib import closing
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
from tests.cli.conftest import Ended, Run, overwrite, run_fresh, saved
from tests.devices import DEVICES
from tests.exactness.architectures import tiny_model
from tests.extras.exchange.exported import TENANT, entry_of, identity_of, large_layout
from tests.forked import ForkedCommand
from tests.runner import Answer, Runner, random_prompt, tiny_llama, tiny_settings
from tests.server.daemon_process import DaemonProcess, clean_environment, reply_to, running_daemon, wait_until
from tests.store.building import BLOCK, is_whole, prompt

PROMPT = prompt(1, 3 * BLOCK + 5)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    saved(tmp_path / "source", PROMPT)
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A store to which a daemon with the same model has written."""
    saved(tmp_path / "target", prompt(9, BLOCK))
    return tmp_path / "target"


@pytest.fixture
def file(run: Run, source: Path, tmp_path: Path) -> Path:
    run("export", entry_id(source), "-o", tmp_path / "e.safetensors", "--kv-cache-dir", source)
    return tmp_path / "e.safetensors"


def entry_id(folder: Path) -> str:
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        return next(name for name, _ in snapshot.entries()).hex()


def holds_the_prompt(folder: Path) -> bool:
    with closing(Store(folder, read_only=True)) as store:
        return is_whole(store, entry_of(store, PROMPT))


def test_an_entry_goes_from_store_to_store(run: Run, source: Path, target: Path, tmp_path: Path) -> None:
    name = entry_id(source)
    path = tmp_path / "manual.safetensors"
    exported = run("export", name[:6], "-o", path, "--kv-cache-dir", source)
    assert (exported.exit_code, exported.stderr) == (0, "")
    assert f"{path}: {len(PROMPT)} tokens of tiny" in exported.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    imported = run("import", path, "--kv-cache-dir", target)
    assert (imported.exit_code, imported.stderr) == (0, "")
    assert f"{path}: imported {len(PROMPT)} tokens of tiny in 4 blocks, 4 new" in imported.stdout
    assert holds_the_prompt(target)
    again = run("import", path, "--kv-cache-dir", target)
    assert "4 blocks, none new" in again.stdout


def test_json_says_what_was_done(run: Run, source: Path, target: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    exported = run("export", entry_id(source), "-o", path, "--kv-cache-dir", source, "--json").json
    assert exported == {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "id": entry_id(source),
        "model": "tiny",
        "tenant": "",
        "num_tokens": len(PROMPT),
    }
    planned = run("import", path, "--kv-cache-dir", target, "--dry-run", "--json").json
    assert not holds_the_prompt(target)
    done = run("import", path, "--kv-cache-dir", target, "--json").json
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
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entry_id(source)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("export", name, "--kv-cache-dir", source, "--json").json["file"] == f"{name[:12]}.safetensors"
    run("export", name, "-o", tmp_path, "--kv-cache-dir", source)
    assert (tmp_path / f"{name[:12]}.safetensors").read_bytes() == Path(f"{name[:12]}.safetensors").read_bytes()


def test_a_file_that_exists_is_kept_without_force(run: Run, source: Path, file: Path) -> None:
    args = ("export", entry_id(source), "-o", file, "--kv-cache-dir", source)
    run(*args).assert_refused(2, "exists", "--force")
    assert run(*args, "--force").exit_code == 0


def test_an_unknown_entry_is_one_line(run: Run, source: Path, tmp_path: Path) -> None:
    run("export", "ffff" * 8, "--kv-cache-dir", source).assert_refused(2, "no entry starts", "diskprefix inspect")
    run("export", "ffff", "--kv-cache-dir", tmp_path).assert_refused(4, "holds no diskprefix store")


def test_a_folder_that_is_not_there_is_named(run: Run, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "none" / "e.safetensors"
    ended = run("export", entry_id(source), "-o", path, "--kv-cache-dir", source)
    ended.assert_refused(2, f"--output: there is no folder {path.parent};")


@pytest.mark.parametrize("content", [b"import os\n" * 100, b"", bytes(100), b'{"a": 1}' * 20])
def test_a_file_that_export_did_not_write_is_told_so(run: Run, target: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "req.py"
    path.write_bytes(content)
    ended = run("import", path, "--kv-cache-dir", target)
    ended.assert_refused(2, f"{path}: `diskprefix export` did not write it")


@pytest.mark.parametrize("flags", [(), ("--force",), ("--dry-run",)])
def test_a_store_whose_file_is_damaged_says_what_helps(
    run: Run, file: Path, target: Path, flags: tuple[str, ...]
) -> None:
    overwrite(target)
    run("import", file, "--kv-cache-dir", target, *flags).assert_refused(
        4, "is damaged", "`verify --fix` cannot repair"
    )


def test_a_prompt_stays_with_its_tenant_and_both_say_so(run: Run, target: Path, tmp_path: Path) -> None:
    pub = saved(tmp_path / "kv", PROMPT, tenant=TENANT)
    assert pub.last_node is not None
    path, again = tmp_path / "e.safetensors", tmp_path / "again.safetensors"
    args = ("export", pub.last_node.hex(), "--kv-cache-dir", tmp_path / "kv", "-o")
    short = "/".join(id_[:8] for id_ in TENANT.split("/"))
    assert run(*args, path).stdout.endswith(f", tenant {short}\n")
    assert run(*args, again, "--json").json["tenant"] == TENANT
    planned = run("import", path, "--kv-cache-dir", target, "--dry-run", "--json").json
    assert planned["entries"][0]["tenant"] == TENANT
    assert f" tokens of tiny, tenant {short}, in 4 blocks" in run("import", path, "--kv-cache-dir", target).stdout
    for command, sentence in (("export", "keeps its tenant"), ("import", "keeps its tenant")):
        assert sentence in " ".join(run(command, "--help").stdout.split())


def test_another_model_is_refused_and_forced(run: Run, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    saved(folder, prompt(5, BLOCK), identity=identity_of(weights="w2"), model="Other-7B")
    run("import", file, "--kv-cache-dir", folder).assert_refused(2, "'tiny'", "'Other-7B'", "--force")
    run("import", file, "--kv-cache-dir", folder, "--dry-run").assert_refused(2, "'tiny'")
    assert run("import", file, "--kv-cache-dir", folder, "--force").exit_code == 0
    assert holds_the_prompt(folder)


def test_force_creates_a_store_and_nothing_else_does(run: Run, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    run("import", file, "--kv-cache-dir", folder).assert_refused(4, "holds no diskprefix store", "--model")
    planned = run("import", file, "--kv-cache-dir", folder, "--force", "--dry-run", "--json").json
    assert (planned["entries"][0]["id"], planned["entries"][0]["new_nodes"]) == (None, 4)
    assert not folder.exists()
    assert run("import", file, "--kv-cache-dir", folder, "--force", "--kv-cache-budget", "20MiB").exit_code == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert holds_the_prompt(folder)


def test_one_bad_file_of_several_and_nothing_is_imported(run: Run, target: Path, file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    before = (target / "data.mdb").read_bytes()
    run("import", file, bad, "--kv-cache-dir", target).assert_refused(4, "bad.safetensors is damaged", "checksum")
    run("import", file, tmp_path / "none", "--kv-cache-dir", target).assert_refused(2, "none: no such file")
    assert (target / "data.mdb").read_bytes() == before


def test_a_file_that_cannot_fit_is_refused_before_any_is_imported(
    run: Run, file: Path, target: Path, tmp_path: Path
) -> None:
    pub = saved(tmp_path / "large", prompt(1, 40 * BLOCK), layout=large_layout(1 << 20), budget_bytes=64 << 20)
    large = tmp_path / "large.safetensors"
    assert pub.last_node is not None
    assert run("export", pub.last_node.hex(), "-o", large, "--kv-cache-dir", tmp_path / "large").exit_code == 0
    refused = run("import", file, large, "--kv-cache-dir", target, "--force")
    refused.assert_refused(4, "do not fit --kv-cache-budget 32.0 MiB")
    assert not holds_the_prompt(target)


def test_a_flag_that_is_smaller_than_the_daemon_s_budget_evicts_nothing(run: Run, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    kept = saved(folder, prompt(1, 40 * BLOCK), layout=large_layout(1 << 20), budget_bytes=64 << 20)
    assert run("import", file, "--kv-cache-dir", folder, "--kv-cache-budget", "16MiB", "--force").exit_code == 0
    with closing(Store(folder, read_only=True)) as store:
        assert is_whole(store, kept)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--kv-cache-budget", "1KiB"), "--kv-cache-budget"),
        (("--kv-cache-min-free", "much"), "--kv-cache-min-free"),
        (("--kv-cache-codec", "gzip"), "--kv-cache-codec"),
    ],
)
def test_a_wrong_setting_is_named(run: Run, file: Path, target: Path, args: tuple[str, ...], problem: str) -> None:
    run("import", file, "--kv-cache-dir", target, *args).assert_refused(2, problem)


def test_neither_waits_for_torch(file: Path, source: Path, target: Path, tmp_path: Path) -> None:
    again = str(tmp_path / "again.safetensors")
    _, imported = run_fresh(
        ["export", entry_id(source), "-o", again, "--kv-cache-dir", str(source)],
        ["import", str(file), "--kv-cache-dir", str(target)],
    )
    assert "torch" not in imported


class FingerprintedRunner(Runner):
    """A model whose root is that of its fingerprint, as a daemon's is."""

    def identity(self, salt: str) -> str:
        fingerprint = Fingerprint.of(self.model, f"digest of {self.name}")
        return fingerprint.identity(self.settings.block_size, LAYOUT_VERSION, self.layout.describe(), salt)


@pytest.fixture(scope="module", params=[*DEVICES, "qwen3_next", "mamba2", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A Llama, a hybrid of linear and full attention, one of states alone, one with windows of less than two blocks."""
    if request.param in DEVICES:
        return tiny_llama(torch.bfloat16, request.param)
    return tiny_model(request.param, torch.bfloat16)


def computed(model: PreTrainedModel, folder: Path, token_ids: Any, **settings: object) -> Answer:
    """The answer of a cold run that saves the whole prompt."""
    runner = FingerprintedRunner(model, tiny_settings(folder, **settings))
    answer = runner.run(token_ids, "full", reply=8)
    runner.close()
    return answer


@pytest.mark.parametrize("ends", ["with its tail", "with a checkpoint"])
def test_a_model_restores_what_another_store_computed_bit_for_bit(
    run: Run, model: PreTrainedModel, tmp_path: Path, ends: str
) -> None:
    has_tail, token_ids = ends == "with its tail", random_prompt(1, 10 * BLOCK + 7)
    settings = tiny_settings(tmp_path / "a", kv_cache_interval=4 * BLOCK, kv_cache_codec="planes")
    runner = FingerprintedRunner(model, settings)
    cold = runner.run(token_ids, "full" if has_tail else 10 * BLOCK, reply=8)
    shorter, longer = token_ids[: 7 * BLOCK], np.concatenate([token_ids, random_prompt(3, 2 * BLOCK)])
    expected = [cold, *(runner.run(ids, "off", reply=8) for ids in (shorter, longer))]
    runner.close()
    path = tmp_path / "e.safetensors"
    assert run("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
    flags = ["--kv-cache-min-free", "0"]
    if has_tail:
        computed(model, tmp_path / "b", random_prompt(2, 2 * BLOCK))
    else:
        flags += ["--force", "--kv-cache-budget", "64MiB"]
    imported = run("import", path, "--kv-cache-dir", tmp_path / "b", *flags)
    assert imported.exit_code == 0, imported.stderr
    runner = FingerprintedRunner(model, tiny_settings(tmp_path / "b"))
    sliceable = runner.layout.is_sliceable
    found = [runner.run(ids, "full", reply=8) for ids in (token_ids, shorter, longer)]
    runner.close()
    whole = len(token_ids) if has_tail else 10 * BLOCK
    assert found[0].report.source == "disk"
    assert (found[0].num_forwards == 0) == has_tail
    assert [answer.report.restored for answer in found] == [whole, (6 if sliceable else 4) * BLOCK, 10 * BLOCK]
    for answer, same in zip(found, expected, strict=True):
        assert torch.equal(answer.logits, same.logits)
        assert answer.greedy == same.greedy


def test_a_file_continues_in_transformers_own_cache(run: Run, tmp_path: Path) -> None:
    """The file and the model suffice: the README's example."""
    model = tiny_llama(torch.float32)
    cold = computed(model, tmp_path / "a", random_prompt(1, 3 * BLOCK + 7))
    path = tmp_path / "e.safetensors"
    assert run("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
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


def chat(client: httpx.Client, model: Path) -> dict[str, Any]:
    body = {
        "model": model.name,
        "messages": [{"role": "system", "content": "You are patient. " * 30}, {"role": "user", "content": "Hello?"}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
    }
    return reply_to(client, body, scope="full")


@pytest.fixture(scope="module")
def served(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file of a prompt that a daemon computed, and its answer."""
    folder = tmp_path_factory.mktemp("served")
    with running_daemon(chat_model, folder / "kv") as daemon:
        with daemon.client() as client:
            cold = chat(client, chat_model)
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
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        return bool(list(snapshot.models()))


def is_restored(daemon: DaemonProcess, model: Path, cold: dict[str, Any]) -> bool:
    with daemon.client() as client:
        warm = chat(client, model)
    # The reply took the place of the prompt's end.
    found = (warm["prefix_cache"].get("source"), warm["prefix_cache"]["restored"], warm["choices"])
    return found == ("disk", cold["usage"]["prompt_tokens"] - 1, cold["choices"])


@pytest.mark.slow
def test_a_daemon_without_a_request_makes_its_model_known_for_an_import_beside_it(
    run: Run, chat_model: Path, served: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    file, cold = served
    with running_daemon(chat_model, folder) as daemon:
        wait_until(lambda: knows_a_model(folder), "the model is known")
        assert run("inspect", "--stats", "--json", "--kv-cache-dir", folder).json["roots"] == []
        assert run("import", file, "--kv-cache-dir", folder).exit_code == 0
        assert is_restored(daemon, chat_model, cold)
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0


def import_for(model: Path, folder: Path, file: Path, *flags: str | Path) -> Ended:
    """`import --model` in a process with the settings of the daemons: its threads are part of the numbers. What it
    says of a slow load is left out."""
    arguments = ["import", file, "--kv-cache-dir", folder, "--model", model, "--device", "cpu", "--block-size", 16]
    command = ForkedCommand(list(map(str, [*arguments, *flags])), clean_environment())
    assert command.stderr is not None
    with command.stderr:
        errors = command.stderr.read()
    waits = ("loading the ", "measuring once ")
    said = [line for line in errors.splitlines(keepends=True) if not line.startswith(waits)]
    return Ended(command.wait(60), "", "".join(said))


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
    run: Run,
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
        ended.assert_refused(2, f"holds state of '{chat_model.name}'", differs)
    assert not folder.exists()
    with running_daemon(other_weights, folder):
        wait_until(lambda: knows_a_model(folder), "the model is known")
        beside = run("import", file, "--kv-cache-dir", folder)
    after = run("import", file, "--kv-cache-dir", folder)
    for ended in (beside, after):
        ended.assert_refused(2, "compared with 'other-weights' here, weights_digest is ", "--model", "--force")


def test_flags_that_do_not_go_together_are_refused(run: Run, file: Path, target: Path) -> None:
    args = ("import", file, "--kv-cache-dir", target)
    run(*args, "--weights", "int8").assert_refused(2, "--weights goes with --model")
    run(*args, "--model", "m", "--force").assert_refused(2, "--force takes the state of any model")
    run(*args, "--model", "").assert_refused(2, "--model")
    run(*args, "--model", "./none").assert_refused(3, "--model: no such file or folder")


def test_variables_of_the_daemon_do_not_make_an_import_load_its_model(
    run: Run, file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISKPREFIX_MODEL", "./none")
    monkeypatch.setenv("DISKPREFIX_WEIGHTS", "int8")
    assert run("import", file, "--kv-cache-dir", target).exit_code == 0
