"""Forged files, whose checksums are right: each is refused with one line, or brings a sound part of a store."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from diskprefix.tokens import root_hash
from tests.desk.conftest import Run, run  # noqa: F401 (a fixture)
from tests.examples import examples
from tests.prefixstore.packs.exported import HYBRID, LAYOUT, TENANT, entry_of, export, joined, sealed, split
from tests.prefixstore.store.building import BLOCK, open_store, prompt

Manifest: TypeAlias = dict[str, Any]


class Parts(NamedTuple):
    """What a file consists of, beside its data."""

    header: Manifest
    manifest: Manifest


NUMBERS = (0, -1, 1, 2, BLOCK - 1, 2**31, 2**40, 2**63 - 1, 1e300, 1e-320, True)
TEXTS = ("", "x\x1b[31m", "\u202e\n", "a" * 300_000, "../../etc/passwd", "/", TENANT, "q8", "uint8", "float64")
OTHERS: tuple[Any, ...] = (None, [], {}, [1], ["page", "head", "token", "dim"], ["a"] * 50)
ODD: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS)


def identify(manifest: Manifest, **changes: object) -> None:
    """Changes the identity, and gives the manifest the root that belongs to it."""
    identity = json.dumps(json.loads(manifest["root"]["identity"]) | changes, sort_keys=True, separators=(",", ":"))
    manifest["root"]["identity"] = identity
    manifest["prompts"][0]["entry"]["root"] = base64.b64encode(root_hash(identity)).decode()


def change_record(rng: random.Random, file: Parts) -> None:
    record = rng.choice((file.manifest["root"], *(prompt["entry"] for prompt in file.manifest["prompts"])))
    record[rng.choice(sorted(record))] = rng.choice(ODD)


def change_node(rng: random.Random, file: Parts) -> None:
    rng.choice(file.manifest["nodes"])[rng.randrange(4)] = rng.choice((*NUMBERS, 3, 4, 5, BLOCK))


def change_size(rng: random.Random, file: Parts) -> None:
    file.manifest["root"]["block_size"] = size = rng.choice(ODD)
    identify(file.manifest, block_size=size)


def change_tenant(rng: random.Random, file: Parts) -> None:
    file.manifest["root"]["tenant"] = tenant = rng.choice(ODD)
    identify(file.manifest, salt=tenant)


def change_fingerprint(rng: random.Random, file: Parts) -> None:
    identify(file.manifest, **{rng.choice(("fingerprint", "layout_version", "extra")): rng.choice(ODD)})


def change_layout(rng: random.Random, file: Parts) -> None:
    layout = json.loads(file.manifest["root"]["layout"])
    part = rng.choice((layout, *layout["groups"], *layout.get("states", ())))
    part[rng.choice((*sorted(part), "window", "axes", "page", "shard"))] = rng.choice(ODD)
    file.manifest["root"]["layout"] = text = json.dumps(layout, separators=(",", ":"))
    identify(file.manifest, layout=text)


def change_tensor(rng: random.Random, file: Parts) -> None:
    tensor = file.header[rng.choice(("token_ids", "payloads", "digests", "signature"))]
    start, end = tensor["data_offsets"]
    dtype, item = rng.choice((("F32", 4), ("U32", 4), ("I8", 1), ("F8_E4M3", 1), ("F16", 2), ("I64", 8), ("BOOL", 1)))
    count = (end - start) // item
    tensor.update(dtype=dtype, shape=rng.choice(([count], [count, 1], [1, count])))


FORGERIES: tuple[Callable[[random.Random, Parts], None], ...] = (
    change_record,
    change_node,
    change_size,
    change_tenant,
    change_fingerprint,
    change_layout,
    change_tensor,
)


def forged(data: bytes, rng: random.Random, change: Callable[[random.Random, Parts], None]) -> bytes:
    header, body = split(data)
    manifest = json.loads(header["__metadata__"]["manifest"])
    change(rng, Parts(header, manifest))
    # A token that no model has is restored for nobody.
    at = header["token_ids"]["data_offsets"][0]
    body = body[:at] + rng.choice((body[at : at + 4], b"\xff\xff\xff\x7f", b"\0\0\0\x80")) + body[at + 4 :]
    header["__metadata__"]["manifest"] = json.dumps(manifest)
    return sealed(header, body) if rng.random() < 0.95 else joined(header, body)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Two sound files; beside them the folder `kv`, a store that knows their models."""
    place, files = tmp_path_factory.mktemp("sound"), []
    with closing(open_store(place / "kv")) as store:
        for layout, checkpoints in ((LAYOUT, ()), (HYBRID, (BLOCK, 2 * BLOCK))):
            pub = entry_of(store, prompt(1, 2 * BLOCK + 5), layout=layout, checkpoints=checkpoints)
            store.publish(pub)
            files.append(export(store, pub, place / "one.safetensors", force=True).read_bytes())
    shutil.rmtree(place / "kv")
    return files


@pytest.mark.parametrize("change", FORGERIES)
def test_a_forged_file_is_refused_or_brings_what_verify_finds_sound(
    run: Run,  # noqa: F811
    files: list[bytes],
    tmp_path: Path,
    change: Callable[[random.Random, Parts], None],
) -> None:
    folder, path, codes = tmp_path / "kv", tmp_path / "forged.safetensors", Counter[int]()
    with closing(open_store(folder)) as store:
        store.publish(entry_of(store, prompt(9, BLOCK + 3)))
    for seed in range(examples(12)):
        rng = random.Random(seed)
        path.write_bytes(forged(rng.choice(files), rng, change))
        # Without --force, only models that the store knows.
        force = ["--trust", "--force"] if rng.random() < 0.7 else rng.choice(([], ["--trust"]))
        ended = run("import", path, *force, "--kv-cache-dir", folder)
        codes[ended.exit_code] += 1
        if ended.exit_code:
            assert ended.exit_code in (2, 4), (seed, ended)
            ended.assert_refused(ended.exit_code, str(path))
            assert len(ended.stderr) < 1000
            assert ended.stderr.rstrip("\n").isprintable()
    assert codes[2] + codes[4] > 0, "some change must be noticed"
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    for command in (["inspect"], ["inspect", "--json"], ["inspect", "--stats"], ["purge", "--all", "--yes"]):
        ended = run(*command, "--kv-cache-dir", folder)
        assert ended.exit_code == 0, ended
        assert "\x1b" not in ended.stdout
