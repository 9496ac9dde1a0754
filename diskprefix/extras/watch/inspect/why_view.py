"""The output of `diskprefix inspect --why FILE`: the tokens that would be restored, and why there are not more."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diskprefix.cli.tooling import print_json, short_id, shortened, status, terminal_width
from diskprefix.errors import InvalidRequest, SettingsError
from diskprefix.extras.warm.warm_prompts import body_in
from diskprefix.extras.watch.browse.why import Parting, Why, explain, not_asked, used_last
from diskprefix.nouns import SHARED, Tenant
from diskprefix.printable import escaped, printable_only, shown
from diskprefix.store.notes import ReadOnlyNotes
from diskprefix.store.savings import read_savings
from diskprefix.store.schema import RootRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo
from diskprefix.tenant_ids import short_tenant
from diskprefix.tokens import TokenIds
from diskprefix.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class WhyOptions:
    """The daemon's settings for reading requests, and the API key of the request."""

    model: str | None
    chat_template: Path | None
    normalise: str
    api_key: str | None


def show_why(
    snapshot: Snapshot, secret: int, entries: list[EntryInfo], file: Path, options: WhyOptions, *, as_json: bool
) -> None:
    """Prints the answer for the request body in `file`. `secret` is the store's, `entries` are those of `snapshot`.

    Raises `SettingsError` for a file that is no body, `InvalidRequest` for an invalid body, and `ModelError` if no
    tokenizer can be read.
    """
    body = _read(file)
    if next(snapshot.roots(), None) is None:
        raise SettingsError("--why: the store is empty; send a request, or compute one with `diskprefix warm`")
    found = _explained(snapshot, secret, entries, body, options)
    if as_json:
        print_json(asdict(found))
    else:
        _show(found, terminal_width(otherwise=120))


def _read(file: Path) -> dict[str, object]:
    name = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return dict(body_in(json.loads(text)))
    except (ValueError, RecursionError, InvalidRequest) as error:
        raise SettingsError(f"--why: {name} is no request body: {shown(str(error))}") from error


def _explained(
    snapshot: Snapshot, secret: int, entries: list[EntryInfo], body: dict[str, object], options: WhyOptions
) -> Why:
    with status("reading the tokenizer …"):
        from diskprefix.chat.normalisers import Normalisers
        from diskprefix.chat.renderer import PromptRenderer
        from diskprefix.extras.request_bodies import parse_body

        caller = Tenant.of_key(options.api_key) if options.api_key else SHARED
        roots, savings = dict(snapshot.roots()), read_savings(snapshot)
        model = _named(roots, body.get("model"), options)

        def notes_of(tenant: Tenant) -> ReadOnlyNotes | None:
            root = used_last(roots, str(tenant), model, savings)
            return None if root is None else ReadOnlyNotes(snapshot, root)

        parsed = parse_body(body, caller, notes_of)
        own = used_last(roots, str(parsed.options.tenant), model, savings)
        tokenizer = _tokenizer(roots, own, model, options)
        normalisers = Normalisers.parse(options.normalise, param="--normalise")
        renderer = PromptRenderer(
            tokenizer, vocab_size=len(tokenizer), max_positions=_NO_LIMIT, normalisers=normalisers
        )
        if parsed.notes is not None:
            # Remembered replies are found by the model's output format, which is detected here.
            renderer.warm_up()
        prompt = parsed.prompt(renderer)

        def decode(token_ids: TokenIds) -> str:
            return str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

        found = explain(
            snapshot,
            secret,
            prompt,
            tenant=str(parsed.options.tenant),
            entries=entries,
            savings=savings,
            decode=decode,
            model=model,
        )
        return not_asked(found) if parsed.options.scope.kind == "off" else found


def _named(roots: Mapping[bytes, RootRecord], asked: object, options: WhyOptions) -> str | None:
    """Returns the model that --model or the request names. Raises `SettingsError` if the request has another name for
    one of several, such as an alias of models.toml: a folder does not say which one it is."""
    names = {record.model for record in roots.values()}
    if options.model in names:
        return options.model
    if isinstance(asked, str) and asked not in names and len(names) > 1:
        raise SettingsError(
            f"--why: nothing is saved of {shown(asked)}; say with --model which one it is: {', '.join(sorted(names))}"
        )
    return asked if isinstance(asked, str) else None


def _tokenizer(
    roots: dict[bytes, RootRecord], own: bytes | None, model: str | None, options: WhyOptions
) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the file or folder of --model, or of the root in which the prompt is looked up, `own`.
    For a tenant that has none, it is the newest one, of the model if there is one."""
    from diskprefix.model.load.loader import load_tokenizer

    name = options.model
    if name is None or name == model:
        newest = max(roots.values(), key=lambda one: (one.model == model, one.created_at))
        name = (roots[own] if own is not None else newest).tokenizer
        if not name or not Path(name).is_dir():
            raise SettingsError("--why: the model's folder is not where it was; give it with --model")
    return load_tokenizer(name, options.chat_template, lambda line: click.echo(line, err=True))


def _show(found: Why, width: int) -> None:
    share = found.restored / found.prompt_tokens
    left = found.prompt_tokens - found.restored
    click.echo(
        f"{found.restored:,} of {counted(found.prompt_tokens, 'token')} ({share:.0%}) would be restored "
        f"from the disk, {left:,} computed; a running daemon may have more in memory"
    )
    if found.model:
        whose = f", tenant {short_tenant(found.tenant)}" if found.tenant else ""
        click.echo(f"model     {printable_only(found.model)}{whose}")
    if found.nearest is not None:
        nearest = found.nearest
        what = short_id(nearest.id) if nearest.id else "a recent prompt that is not stored"
        behind = f", and about {nearest.behind:,} more behind the difference" if nearest.behind else ""
        click.echo(
            f"nearest   {what}: {nearest.common:,} of its {counted(nearest.num_tokens, 'token')} are the same{behind}"
        )
        if nearest.preview:
            click.echo(f"          {shortened(printable_only(nearest.preview), width - 10)}")
    click.echo(f"because   {printable_only(found.cause.text)}")
    if found.cause.advice:
        click.echo(f"to do     {found.cause.advice}")
    if found.parting is not None:
        _show_parting(found.parting, width)
    for one in found.elsewhere:
        differs = ", ".join(f"{name}: {shown(there, 24) or 'none'}" for name, (there, _) in one.differs.items())
        click.echo(f"elsewhere {one.stored:,} tokens are stored for {printable_only(one.model)} ({differs})")


def _show_parting(parting: Parting, width: int) -> None:
    """Prints the text around the difference of two prompts, on lines that fit."""
    room = width - 11
    before = escaped(parting.before)[-(room // 2) :]
    after = room - len(before)
    click.echo(f"at token  {parting.at:,}")
    click.echo(f"    saved  {before}{_cut(parting.there, after)}")
    click.echo(f"     here  {before}{_cut(parting.here, after)}")
    click.echo(f"           {' ' * len(before)}^")


def _cut(text: str, width: int) -> str:
    line = escaped(text)
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}…"
