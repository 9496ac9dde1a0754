"""The lines that broke prefixes, in clear, for the owner of a store.

Counts of lost tokens have only the shape of a line, its letters masked. Its text is in the prompt, as long as this is
stored as a seen one: it is found again by comparing the seen prompts of a root, as the daemon did. So the text has the
tenant, the time to live and the purges of its prompt, and nothing more is stored.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from diskprefix.daemon.chat.canonicalisers import shape_of
from diskprefix.desk.watch.inspect.stored_text import decoder_of, line_at
from diskprefix.prefixstore.cache.policy.breaks import costly_differences
from diskprefix.prefixstore.cache.policy.seen import MAX_PROMPT_BYTES
from diskprefix.prefixstore.store.ghosts import newest_first
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.lost_tokens import HOURS

_WINDOW = 64
"""The earlier prompts that each prompt is compared with. The scope `auto` compares it with those of its key alone, 30
if nobody says another number."""
_TEXT_CHARS = 200


def lines_in_clear(snapshot: Snapshot, root: bytes, shapes: Collection[str], now: float) -> dict[str, str]:
    """Returns the texts of the lines with these shapes, by their shapes, as far as their prompts are stored. `now` is
    in seconds since 1970."""
    texts, record = dict[str, str](), snapshot.root(root)
    decode = decoder_of(record.tokenizer) if record is not None and shapes else None
    if decode is None:
        return texts
    prompts = [(seen.record.came_at, seen.token_ids) for seen in newest_first(snapshot, root, MAX_PROMPT_BYTES)]
    for number, (came_at, token_ids) in enumerate(prompts):
        if len(texts) == len(shapes) or came_at < now - (HOURS + 1) * 3600:
            break
        earlier = (other for _, other in islice(prompts, number + 1, number + 1 + _WINDOW))
        for place in {common for common, _ in costly_differences(token_ids, earlier)}:
            line = line_at(decode, token_ids, place)
            if (shape := shape_of(line)) in shapes:
                texts.setdefault(shape, " ".join(line[:_TEXT_CHARS].split()))
    return texts
