"""The output of `diskprefix inspect ENTRY`: all about one saved prompt."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from diskprefix.cli.tooling import SHOWN, print_json, short_id, shortened, terminal_width
from diskprefix.extras.watch.browse.entry import EntryDetails, entry_details
from diskprefix.printable import printable_only
from diskprefix.store.savings import read_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo
from diskprefix.tokens import TokenIds
from diskprefix.units import ago, format_size

_LABEL = 12
_SHOWN_CHARS = 600


def show_entry(snapshot: Snapshot, entries: list[EntryInfo], info: EntryInfo, *, as_json: bool) -> None:
    """Prints one of `entries`, the entries of `snapshot`."""
    details = entry_details(snapshot, entries, info, read_savings(snapshot))
    text = decoded(details.tokenizer, details.token_ids)
    if as_json:
        print_json(_as_dict(details, text))
        return
    width = terminal_width(otherwise=160)
    for label, value in _lines(details):
        click.echo(f"{label:<{_LABEL}}{printable_only(value)}")
    room = max(20, width - 36)
    shared = [
        f"  {short_id(one.id)}  {one.num_tokens:,} tokens  {shortened(printable_only(one.preview), room)}"
        for one in details.shared_with
    ]
    click.echo(f"{'shared with':<{_LABEL}}{len(shared) or 'nobody'}")
    for line in shared[:SHOWN]:
        click.echo(line)
    if text is None:
        click.echo(f"{'preview':<{_LABEL}}{printable_only(info.preview)}")
    else:
        click.echo("text")
        click.echo(_indented(text))


def decoded(folder: str, token_ids: TokenIds) -> str | None:
    """Returns the text of token ids, None if `folder` has no tokenizer any more."""
    file = Path(folder) / "tokenizer.json"
    if not folder or not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the library raises this class itself
        return None
    text: str = tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
    return text


def _as_dict(details: EntryDetails, text: str | None) -> dict[str, Any]:
    return asdict(details.info) | {
        "reason": details.reason,
        "hit_times": details.hit_times,
        "shared_with": [asdict(one) for one in details.shared_with],
        "blocks": [asdict(node) for node in details.nodes],
        "text": text,
    }


def _lines(details: EntryDetails) -> list[tuple[str, str]]:
    info = details.info
    ratio = f", {info.raw_bytes / info.stored_bytes:.2f}× smaller" if info.stored_bytes < info.raw_bytes else ""
    return [
        ("id", info.id),
        ("model", info.model),
        ("tokens", f"{info.num_tokens:,}"),
        ("stored", f"{format_size(info.stored_bytes)} (raw {format_size(info.raw_bytes)}{ratio})"),
        ("shared", format_size(info.shared_bytes)),
        ("checkpoints", _checkpoints_text(info)),
        ("blocks", _blocks_text(details)),
        ("hits", f"{info.hits:,}"),
        ("created", ago(info.created_at)),
        ("last used", ago(info.last_used_at)),
        ("kept for", _ttl_text(info)),
        ("scope", info.scope),
        ("reason", details.reason.replace("_", " ") or "not known"),
        ("tenant", info.tenant or "none"),
    ]


def _indented(text: str) -> str:
    """Returns the beginning and the end of a text, indented and safe for a terminal."""
    if len(text) > 2 * _SHOWN_CHARS:
        left_out = len(text) - 2 * _SHOWN_CHARS
        text = f"{text[:_SHOWN_CHARS]}\n[… {left_out:,} characters; --json has all …]\n{text[-_SHOWN_CHARS:]}"
    return "\n".join(f"  {printable_only(line)}" for line in text.split("\n"))


def _ttl_text(info: EntryInfo) -> str:
    if info.ttl_s is None:
        return "what --kv-cache-ttl says"
    return f"{info.ttl_s:,} s after its last use" + (", or what --kv-cache-ttl says" if info.default_ttl else "")


def _checkpoints_text(info: EntryInfo) -> str:
    if not info.checkpoints:
        return "none"
    return f"{format_size(info.checkpoint_bytes)} at {', '.join(f'{position:,}' for position in info.checkpoints)}"


def _blocks_text(details: EntryDetails) -> str:
    blocks = [node for node in details.nodes if node.kind != "checkpoint"]
    shared = sum(node.entries > 1 for node in blocks)
    return f"{len(blocks)}, {shared} of them in other prompts too"
