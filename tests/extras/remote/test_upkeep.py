"""What a listing and a purge do with a bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diskprefix.cache.tiers.tier import Upload
from diskprefix.extras.remote.upkeep import purge, roots
from diskprefix.store.purge import GoneText
from diskprefix.store.schema import RootRecord
from tests.extras.remote.made import KEY, OTHER_KEY, MakeMachine
from tests.store.building import BLOCK, ROOT, prompt

PROMPT = prompt(1, 7 * BLOCK + 5)


def of_tenants(make: MakeMachine, *tenants: str) -> MakeMachine:
    """Shares a prompt of each tenant."""
    machine = make()
    for number, tenant in enumerate(tenants):
        root = ROOT[:-1] + bytes([number])
        machine.save(PROMPT, root=root)
        record = RootRecord(model="tiny", block_size=BLOCK, layout=machine.layout, created_at=0.0, tenant=tenant)
        machine.remote.upload(Upload(machine.nodes(PROMPT, root), len(PROMPT), record, machine.tiers))
    assert machine.remote.flush(20)
    return make


def test_a_listing_tells_models_and_tenants_of_one_namespace(make: MakeMachine, bucket: Path) -> None:
    of_tenants(make, "", "a" * 32)
    objects = make().remote.objects
    found = roots(objects, KEY)
    assert [(root.model, root.tenant, len(root.objects)) for root in found] == [("tiny", "", 3), ("tiny", "a" * 32, 3)]
    sizes = sum(path.stat().st_size for path in bucket.rglob("*.*"))
    assert sum(root.num_bytes for root in found) == sizes
    assert roots(objects, OTHER_KEY) == []
    next(bucket.rglob("about")).write_bytes(b"planted")
    assert sorted(root.model for root in roots(objects, KEY)) == ["", "tiny"]


def test_a_purge_of_a_tenant_leaves_the_others(make: MakeMachine) -> None:
    of_tenants(make, "", "a" * 32)
    objects = make().remote.objects
    planned, would = purge(objects, KEY, lambda root: root.tenant != "", dry_run=True)
    assert ([root.tenant for root in planned], would.objects, len(roots(objects, KEY))) == (["a" * 32], 3, 2)
    _, removed = purge(objects, KEY, lambda root: root.tenant != "")
    assert removed == would
    (left,) = roots(objects, KEY)
    assert (left.tenant, len(left.objects)) == ("", 3)


def test_a_deleted_prompt_leaves_the_objects_that_another_needs(make: MakeMachine, bucket: Path) -> None:
    machine, other = make(), PROMPT.copy()
    other[5 * BLOCK :] += 1
    for token_ids in (PROMPT, other):
        machine.save(token_ids)
        machine.share(token_ids)
    before = {path.name for path in bucket.rglob("*.*")}
    text = GoneText(ROOT, BLOCK, PROMPT, num_kept=5 * BLOCK)
    assert machine.remote.forget([text], 20) == 2, "the bundle and the end of the prompt that are its own"
    assert len(before) - len({path.name for path in bucket.rglob("*.*")}) == 2
    assert len(make().prefetch(other)[1]) == 8
    # What it knew of the objects that are gone does not keep it from writing them again.
    machine.share(PROMPT)
    assert {path.name for path in bucket.rglob("*.*")} == before


def test_of_a_whole_prompt_nothing_is_left(make: MakeMachine, bucket: Path) -> None:
    machine = make()
    machine.save(PROMPT)
    machine.share(PROMPT)
    machine.share(PROMPT, 4 * BLOCK)
    assert machine.remote.forget([GoneText(ROOT, BLOCK, PROMPT, num_kept=0)], 20) >= 3
    assert [path.name for path in bucket.rglob("*") if path.is_file()] == ["about"]


def test_a_daemon_describes_its_root_again_after_a_purge(make: MakeMachine, bucket: Path) -> None:
    machine = make()
    machine.save(PROMPT)
    machine.share(PROMPT[: 3 * BLOCK])
    purge(machine.remote.objects, KEY, lambda root: root.model == "tiny")
    assert not list(bucket.rglob("about"))
    longer = np.concatenate([PROMPT[: 6 * BLOCK], prompt(2, BLOCK)])
    machine.save(longer)
    machine.share(longer)
    _, removed = purge(machine.remote.objects, KEY, lambda root: root.model == "tiny")
    assert removed.objects > 0
    assert roots(machine.remote.objects, KEY) == []


def test_objects_without_a_sound_description_are_counted(make: MakeMachine, bucket: Path) -> None:
    of_tenants(make, "", "a" * 32)
    objects = make().remote.objects
    about = sorted(bucket.rglob("about"))[1]
    for planted in (b"planted", bytes(1 << 20)):
        about.write_bytes(planted)
        _, removed = purge(objects, KEY, lambda root: root.tenant == "a" * 32)
        assert (removed.objects, removed.unknown_objects) == (0, 3)
    _, removed = purge(objects, KEY, lambda root: root.model == "")
    assert (removed.objects, removed.unknown_objects) == (3, 0)


def test_only_what_can_be_a_root_is_looked_at(make: MakeMachine, bucket: Path) -> None:
    of_tenants(make, "")
    for name in ("red", "ab" * 17, "AB" * 16):
        folder = bucket / KEY.digest.hex() / name
        folder.mkdir()
        (folder / "x.1").write_bytes(b"planted")
    assert [root.tenant for root in roots(make().remote.objects, KEY)] == [""]
