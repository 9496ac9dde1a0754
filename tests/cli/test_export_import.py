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

from diskprefix.cli import main
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.store.pieces import LAYOUT_VERSION
from diskprefix.store.store import Store
from tests.cli.conftest import Run, overwrite, run_fresh, saved
from tests.devices import DEVICES
from tests.exactness.architectures import tiny_model
from tests.extras.exchange.exported import TENANT, entry_of, identity_of, large_layout
from tests.runner import Answer, Runner, random_prompt, tiny_llama, tiny_settings
from tests.server.daemon_process import DaemonProcess, reply_to, running_daemon, wait_until
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
    (plan,), (entry,) = planned["entries"], done["entries"]
    assert (planned["dry_run"], done["dry_run"], entry | plan) == (True, False, entry)
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


def test_what_cannot_be_done_is_one_line(run: Run, source: Path, target: Path, file: Path, tmp_path: Path) -> None:
    name, none, foreign = entry_id(source), tmp_path / "none", tmp_path / "foreign.py"
    foreign.write_text("import os\n" * 100)
    for args, folder, exit_code, words in (
        (("export", name, "-o", file), source, 2, ("exists", "--force")),
        (("export", "ffff" * 8), source, 2, ("no entry starts", "diskprefix inspect")),
        (("export", "ffff"), none, 4, ("holds no diskprefix store",)),
        (("export", name, "-o", none / "e.safetensors"), source, 2, (f"--output: there is no folder {none};",)),
        (("import", file), none, 4, ("holds no diskprefix store",)),
        (("import", file, none), target, 2, ("none: no such file",)),
        (("import", foreign), target, 4, (f"{foreign} is damaged: it is cut short, or no .safetensors file",)),
    ):
        run(*args, "--kv-cache-dir", folder).assert_refused(exit_code, *words)
    assert run("export", name, "-o", file, "--force", "--kv-cache-dir", source).exit_code == 0


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
    assert f" tokens of tiny of tenant {short}, " in run(*args, path).stdout
    assert run(*args, again, "--json").json["tenant"] == TENANT
    planned = run("import", path, "--kv-cache-dir", target, "--dry-run", "--json").json
    assert planned["entries"][0]["tenant"] == TENANT
    assert f" tokens of tiny of tenant {short} in 4 blocks" in run("import", path, "--kv-cache-dir", target).stdout
    for command, sentence in (("export", "keeps its tenant"), ("import", "keeps its tenant")):
        assert sentence in " ".join(run(command, "--help").stdout.split())


def test_another_model_is_refused_and_forced(run: Run, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    saved(folder, prompt(5, BLOCK), identity=identity_of(weights="w2"), model="Other-7B")
    run("import", file, "--kv-cache-dir", folder).assert_refused(2, "'tiny'", "'Other-7B'", "--force")
    run("import", file, "--kv-cache-dir", folder, "--dry-run").assert_refused(2, "'tiny'")
    assert run("import", file, "--kv-cache-dir", folder, "--force").exit_code == 0
    assert holds_the_prompt(folder)


def test_one_bad_file_of_several_and_nothing_is_imported(run: Run, target: Path, file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    before = (target / "data.mdb").read_bytes()
    run("import", file, bad, "--kv-cache-dir", target).assert_refused(4, "bad.safetensors is damaged", "checksum")
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
    settings = tiny_settings(tmp_path / "a", kv_cache_interval=4 * BLOCK)
    runner = FingerprintedRunner(model, settings)
    cold = runner.run(token_ids, "full" if has_tail else 10 * BLOCK, reply=8)
    shorter, longer = token_ids[: 7 * BLOCK], np.concatenate([token_ids, random_prompt(3, 2 * BLOCK)])
    expected = [cold, *(runner.run(ids, "off", reply=8) for ids in (shorter, longer))]
    runner.close()
    path = tmp_path / "e.safetensors"
    assert run("export", entry_id(tmp_path / "a"), "-o", path, "--kv-cache-dir", tmp_path / "a").exit_code == 0
    computed(model, tmp_path / "b", random_prompt(2, 2 * BLOCK))
    imported = run("import", path, "--kv-cache-dir", tmp_path / "b")
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
    # The prompt, or its beginning if the reply took the place of its end.
    assert warm["prefix_cache"].get("source") == "disk"
    assert warm["prefix_cache"]["restored"] >= cold["usage"]["prompt_tokens"] - 1
    return bool(warm["choices"] == cold["choices"])


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


@pytest.mark.slow
def test_a_file_of_another_model_is_refused_with_what_differs(
    run: Run, other_weights: Path, served: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file, _ = served
    with running_daemon(other_weights, tmp_path / "kv"):
        wait_until(lambda: knows_a_model(tmp_path / "kv"), "the model is known")
        ended = run("import", file, "--kv-cache-dir", tmp_path / "kv")
    ended.assert_refused(2, "differs from 'other-weights' here in weights_digest", "--force")


def test_variables_of_the_daemon_do_not_disturb_an_import(
    run: Run, file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISKPREFIX_MODEL", "./none")
    monkeypatch.setenv("DISKPREFIX_WEIGHTS", "int8")
    assert run("import", file, "--kv-cache-dir", target).exit_code == 0
