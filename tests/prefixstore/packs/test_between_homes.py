"""A prompt of a user's programs goes from one home to another: real daemons, and commands as somebody types them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from diskprefix.prefixstore.store.store import Store
from diskprefix.tenant_ids import short_tenant
from diskprefix.values import Tenant
from tests.daemon.server.daemon_process import DaemonProcess, clean_environment, serve_flags, wait_until
from tests.daemon.server.test_auth import ALICE, write_keys
from tests.native.variants import of_this_cpu
from tests.prefixstore.packs.test_signatures import make_key, public

SYSTEM = "You help in the workshop of a bicycle shop. Name the tool, the size and the torque. " * 12


class Home:
    """A user's home, with a key of its own."""

    def __init__(self, folder: Path, model: Path, **flags: Any) -> None:
        folder.mkdir()
        self.folder, self.flags = folder, serve_flags(model, folder / "kv", **flags)
        self.environment = clean_environment(
            HOME=str(folder), XDG_CACHE_HOME=str(folder / "cache"), XDG_CONFIG_HOME=str(folder / "config")
        )

    def serve(self) -> DaemonProcess:
        return DaemonProcess(*self.flags, environment=self.environment)

    def run(self, name: str, *args: object) -> subprocess.CompletedProcess[str]:
        store = () if name == "warm" else ("--kv-cache-dir", self.folder / "kv")
        command = [sys.executable, "-m", "diskprefix", name, *map(str, (*args, *store))]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)

    def warm(self, daemon: DaemonProcess, *more: str) -> dict[str, Any]:
        (self.folder / "system.txt").write_text(SYSTEM)
        said = self.run("warm", "--system", self.folder / "system.txt", "--url", daemon.url, "--json", *more).stdout
        row: dict[str, Any] = json.loads(said)["prompts"][0]
        return row

    def entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = json.loads(self.run("inspect", "--json").stdout)["entries"]
        return entries

    def export(self, path: Path, *more: object) -> None:
        (entry,) = self.entries()
        self.run("export", entry["id"], "-o", path, *more)

    def knows_a_model(self) -> bool:
        with closing(Store(self.folder / "kv", read_only=True)) as store, store.snapshot() as snapshot:
            return bool(list(snapshot.models()))


@pytest.fixture
def homes(chat_model: Path, tmp_path: Path) -> tuple[Home, Home]:
    """The second one is on an old CPU."""
    *_, oldest = of_this_cpu()
    return Home(tmp_path / "a", chat_model), Home(tmp_path / "b", chat_model, kernels=oldest)


def reply_to_a_question(daemon: DaemonProcess) -> tuple[int, Any]:
    """Returns how many tokens were restored, and the reply with its log probabilities."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "A flat tyre."}]
    numbers = {"max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body = {"model": "tiny-chat", "messages": messages, **numbers, "prefix_cache": {"save": False}}
    with daemon.client("unused") as client:
        reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    return reply["prefix_cache"]["restored"], reply["choices"]


@pytest.mark.slow
@pytest.mark.parametrize("is_signed", [False, True], ids=["trusted", "signed"])
def test_an_import_restores_a_warmed_prompt_in_another_home(
    homes: tuple[Home, Home], tmp_path: Path, is_signed: bool
) -> None:
    here, there = homes
    more: tuple[object, ...] = ()
    if is_signed:
        key = make_key(tmp_path / "keys" / "here")
        more = ("--sign", key)
        signers = there.folder / "config" / "diskprefix" / "allowed_signers"
        signers.parent.mkdir(parents=True)
        signers.write_text(f"here {public(key)}\n")
    with here.serve() as daemon:
        computed = here.warm(daemon.wait_ready())
        wait_until(here.entries, "the prompt is saved")
        known, choices = reply_to_a_question(daemon)
    assert (computed["restored"], computed["saved"]) == (0, "queued")
    here.export(path := tmp_path / "system.safetensors", *more)
    with there.serve() as daemon:
        daemon.wait_ready()
        wait_until(there.knows_a_model, "the model is known")
        said = there.run("import", path, *(() if is_signed else ("--trust",))).stdout
        assert ("signed by here" in said, "unverified" in said) == (is_signed, not is_signed)
        assert " (yours) in " in said
        assert "--mine" not in said
        for flags in ((), ("--api-key", "unused")):
            again = there.warm(daemon, *flags)
            assert again["restored"] == again["prompt_tokens"] == computed["prompt_tokens"]
        restored, same = reply_to_a_question(daemon)
        assert restored == known > 700
        assert same == choices


@pytest.mark.slow
def test_a_prompt_of_an_api_key_keeps_it_and_the_import_says_how_to_take_it_over(
    homes: tuple[Home, Home], chat_model: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", f"alice {ALICE}")
    shop, there = Home(tmp_path / "shop", chat_model, api_keys=keys), homes[1]
    body = {"prompt": SYSTEM, "max_tokens": 1, "prefix_cache": {"scope": "full"}}
    with shop.serve() as daemon:
        daemon.wait_ready()
        with daemon.client(ALICE) as client:
            tokens = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]["prompt_tokens"]
        wait_until(shop.entries, "the prompt is saved")
    shop.export(path := tmp_path / "shop.safetensors")
    with there.serve() as daemon:
        daemon.wait_ready()
        wait_until(there.knows_a_model, "the model is known")
        tenant = short_tenant(str(Tenant.of_key(ALICE)))
        for flags, is_taken in (((), False), (("--mine",), True)):
            said = there.run("import", path, "--trust", *flags).stdout
            assert (f" of tenant {tenant} in " in said, "--mine" in said, " (yours) in " in said) == (
                not is_taken,
                not is_taken,
                is_taken,
            )
            with daemon.client("unused") as client:
                report = client.post("/v1/completions", json=body | {"prefix_cache": {"save": False}}).json()
            assert report["prefix_cache"]["restored"] == (tokens if is_taken else 0)
