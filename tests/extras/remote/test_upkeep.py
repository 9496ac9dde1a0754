"""What a purge does with a bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diskprefix.extras.remote.upkeep import NamespaceObjects
from diskprefix.store.purge import GoneText
from tests.extras.remote.made import KEY, OTHER_KEY, MakeMachine, share_of_each
from tests.store.building import BLOCK, ROOT, prompt

PROMPT = prompt(1, 7 * BLOCK + 5)


def num_objects(bucket: Path) -> int:
    return len(list(bucket.rglob("*.*")))


def test_a_purge_of_a_tenant_leaves_the_others(make: MakeMachine, bucket: Path) -> None:
    share_of_each(make(), PROMPT, "", "a" * 32)
    objects = make().remote.objects
    assert NamespaceObjects(objects, OTHER_KEY).purge(lambda _model, _tenant: True) == 0
    assert NamespaceObjects(objects, KEY).purge(lambda model, tenant: (model, tenant) == ("tiny", "a" * 32)) == 3
    assert num_objects(bucket) == len(list(bucket.rglob("*/about"))) * 3 == 3
    assert NamespaceObjects(objects, KEY).purge(lambda _model, tenant: tenant == "a" * 32) == 0
    assert NamespaceObjects(objects, KEY).purge(lambda _model, tenant: tenant == "") == 3
    assert [path for path in bucket.rglob("*") if path.is_file()] == []


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
    NamespaceObjects(machine.remote.objects, KEY).purge(lambda model, _tenant: model == "tiny")
    assert not list(bucket.rglob("about"))
    longer = np.concatenate([PROMPT[: 6 * BLOCK], prompt(2, BLOCK)])
    machine.save(longer)
    machine.share(longer)
    assert NamespaceObjects(machine.remote.objects, KEY).purge(lambda model, _tenant: model == "tiny") > 0
    assert num_objects(bucket) == 0


def test_objects_without_a_sound_description_stay(make: MakeMachine, bucket: Path) -> None:
    share_of_each(make(), PROMPT, "", "a" * 32)
    objects = make().remote.objects
    about = sorted(bucket.rglob("about"))[1]
    for planted in (b"planted", bytes(1 << 20), None):
        about.unlink() if planted is None else about.write_bytes(planted)
        assert NamespaceObjects(objects, KEY).purge(lambda _model, tenant: tenant == "a" * 32) == 0
    assert NamespaceObjects(objects, KEY).purge(lambda _model, _tenant: True) == 3
    assert num_objects(bucket) == 3
