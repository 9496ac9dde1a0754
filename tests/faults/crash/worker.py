"""What processes do to a store, as a daemon and its commands do it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

from diskprefix.cli import cli
from diskprefix.store.changes import batches
from diskprefix.store.store import Publication, Store

NODES_IN_A_PART = 2


def publish_in_parts(store: Store, publication: Publication) -> int:
    """Publishes a prompt as a daemon does, which writes its blocks while it computes it: the entry comes with the last
    part. Returns the number of evicted nodes."""
    evicted = 0
    *earlier, last = batches(publication.nodes, NODES_IN_A_PART)
    for nodes in earlier:
        evicted += store.publish(replace(publication, nodes=tuple(nodes), last_node=None, entry=None, prompt=None))
        store.evictor.pin(nodes[-1].name)
    evicted += store.publish(replace(publication, nodes=tuple(last)))
    for nodes in earlier:
        store.evictor.unpin(nodes[-1].name)
    return evicted


def command(*arguments: str) -> None:
    """Runs a command of diskprefix in this process, which must succeed. Raises `DiskPrefixError`."""
    code, _ = output(*arguments)
    assert not code, f"diskprefix {' '.join(arguments)}: exit code {code}"


def output(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and the output of a command of diskprefix in this process. Raises `DiskPrefixError`."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = cli.main(list(arguments), prog_name="diskprefix", standalone_mode=False)
    return code or 0, text.getvalue()
