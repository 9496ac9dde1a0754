"""The checks of the model in `diskprefix doctor`: memory, tokenizer, template, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from diskprefix.daemon.catalogue.adviser import proposed
from diskprefix.daemon.catalogue.catalogue import files_of, needs
from diskprefix.daemon.settings import Settings
from diskprefix.desk.setup.doctor_llama import placement_finding
from diskprefix.desk.setup.doctor_machine import Finding
from diskprefix.errors import DiskPrefixError
from diskprefix.runtime.fetch.named_model import path_of
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from diskprefix.daemon.catalogue.catalogue import KnownModel
    from diskprefix.runtime.files.fit import ModelNeeds
    from diskprefix.runtime.llama.load_llama import Placement

_SYSTEM = "Be brief."
_SHORT_CONTEXT = 16_384
"""Agents fill less than this in a few turns."""


def together_finding(settings: Settings, models: Sequence[KnownModel]) -> Finding:
    """Returns whether the models of a daemon with several fit into memory together, as its router counts them."""
    from diskprefix.daemon.router.listing import fit_beside
    from diskprefix.runtime.memory import available_ram_bytes

    if not models:
        return Finding("models", "problem", "no model is known", f"fetch one with {proposed()}")
    limit = settings.memory_limit or available_ram_bytes()
    sizes: dict[str, int] = {}
    for known in models:
        # A model that cannot be read has a finding of its own.
        with suppress(DiskPrefixError):
            if (own := needs(known.settings)) is not None:
                sizes[known.name] = fit_beside(own, known.settings, limit).needed_bytes
    pinned = {known.name: sizes.get(known.name, 0) for known in models if known.pin}
    text = f"{format_size(sum(sizes.values()))} of memory for {len(sizes)} of {counted(len(models), 'model')} on this "
    text += f"machine; together they may take {format_size(limit)}"
    never = [name for name, size in sizes.items() if size * (name not in pinned) + sum(pinned.values()) > limit]
    if never:
        beside = f" beside what is pinned ({', '.join(pinned)})" if pinned else ""
        advice = "choose fewer bits, unpin one, or raise --memory-limit"
        return Finding("models", "problem", f"{text}; no room{beside} for {', '.join(never)}", advice)
    if len(sizes) < len(models):
        return Finding("models", "note", f"{text}; not all could be measured")
    turns = "all stay loaded" if sum(sizes.values()) <= limit else "they take turns"
    return Finding("models", "ok", f"{text}: {turns}")


def model_findings(settings: Settings, say: Callable[[str], None]) -> Iterator[Finding]:
    """Yields the findings about the model, as far as it is on this machine. `say` takes lines about the progress."""
    say("reading the model's headers")
    try:
        path = path_of(settings.model)
        own = needs(settings)
        placed = None if path is None else _placed_by_llama(settings)
    except DiskPrefixError as error:
        yield Finding("model", "problem", error.message, "see the message")
        return
    if path is None or own is None:
        yield _listing_finding(settings)
        return
    if placed is not None:
        own = placed.needs
        yield placement_finding(placed)
    yield _fit_finding(settings, own)
    if placed is None and (unkept := _unkept_finding(settings, path)) is not None:
        yield unkept
    say("reading the tokenizer")
    yield from _tokenizer_findings(settings, path)


def _unkept_finding(settings: Settings, path: Path) -> Finding | None:
    """Returns the finding about a `.gguf` file whose packed weights have no room on the disk, None otherwise."""
    packed = PackedFiles.here(settings.packed_weights)
    if packed is None or not path.is_file() or settings.weights != "auto" or settings.device not in ("auto", "cpu"):
        return None
    files = files_of(path)
    num_bytes = sum(file.stat().st_size for file in files)
    with suppress(OSError):
        room = packed.room_bytes()
        if num_bytes > room and not packed.made_from([file.resolve() for file in files]):
            text = f"no room for {format_size(num_bytes)} in {packed.folder}: at most {format_size(room)}"
            advice = "each start packs the weights; free some space, or give a --packed-weights on a larger disk"
            return Finding("packed weights", "note", text, advice)
    return None


def _placed_by_llama(settings: Settings) -> Placement | None:
    """Returns where llama.cpp's library would compute a model, None if another engine does. Raises `ModelError` and
    `SettingsError`."""
    from diskprefix.runtime.llama.devices import is_chosen

    if not is_chosen(settings, lambda _line: None):
        return None
    from diskprefix.runtime.llama.load_llama import placement_of

    return placement_of(settings)


def _listing_finding(settings: Settings) -> Finding:
    """Returns the finding about a model that is not on this machine, from the hub's listing if there is one."""
    from diskprefix.runtime.fetch.embedded import EMBEDDED
    from diskprefix.runtime.fetch.hub import listing_of

    model = settings.model
    listing = None if model is None or model == EMBEDDED.name else listing_of(model)
    if listing is not None:
        finding = _fit_finding(
            settings, listing.needs(settings.dtype, settings.weights).of(settings.kv_type, settings.context)
        )
        return replace(finding, text=f"{finding.text}; it is not on this machine yet")
    name = "the embedded model" if model is None else repr(model)
    return Finding("model", "skipped", f"{name} is not on this machine yet: the first start downloads it")


def _fit_finding(settings: Settings, needs: ModelNeeds) -> Finding:
    """Returns whether a model fits into the free memory, with a table by part and alternatives that fit."""
    from diskprefix.runtime.fetch.alternatives import other_forms
    from diskprefix.runtime.files.fit import fitted
    from diskprefix.runtime.memory import available_ram_bytes

    fit = fitted(needs, available_ram_bytes(), settings.kv_memory)
    text = f"{needs.name}: about {format_size(fit.needed_bytes)} of memory, {format_size(fit.free_bytes)} are free"
    table = tuple(fit.rows())
    if settings.device not in ("auto", "cpu"):
        return Finding("model", "ok", f"{text}; it will run on {settings.device}", table=table)
    if not fit.is_enough:
        return Finding("model", "problem", text, "; ".join(fit.advice(other_forms(settings))), table)
    text += f"; a context of {fit.context_line}"
    if fit.context < min(needs.state.positions, _SHORT_CONTEXT):
        return Finding("model", "note", text, "free memory or take fewer bits for a longer one; see --kv-memory", table)
    return Finding("model", "ok", text, table=table)


def _tokenizer_findings(settings: Settings, path: Path) -> Iterator[Finding]:
    from diskprefix.daemon.api.openai_chat import ChatRequest
    from diskprefix.daemon.chat.renderer import PromptRenderer
    from diskprefix.daemon.chat.template_cost import template_cost
    from diskprefix.daemon.chat.template_date import TemplateClock
    from diskprefix.runtime.load.loader import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(path), settings.chat_template, lambda _line: None)
    except DiskPrefixError as error:
        yield Finding("tokenizer", "problem", error.message, "fetch or copy the model again")
        return
    sample = "Ünïcödé — 日本語 🦀 and\n\n  code();"
    is_same = tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)).strip() == sample
    advice = "" if is_same else "it changes some texts; the cache is not affected"
    yield Finding("tokenizer", "ok" if is_same else "note", f"{len(tokenizer):,} tokens", advice)
    if not tokenizer.chat_template:
        advice = "give one with --chat-template, or use /v1/completions"
        yield Finding("template", "note", "the model has no chat template", advice)
        return
    try:
        variables, clock = settings.template_variables, TemplateClock(settings.template_day)
        renderer = PromptRenderer(
            tokenizer, vocab_size=len(tokenizer), max_positions=1 << 30, template_variables=variables, clock=clock
        )
        renderer.warm_up()
        body = {"messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "Hello."}]}
        prompt = renderer.replay(ChatRequest.model_validate(body).conversation, None).prompt
    except DiskPrefixError as error:
        yield Finding("template", "problem", error.message, "give another one with --chat-template")
        return
    if not prompt.boundaries:
        advice = "a full store keeps less; with --disk-prefix-cache full it keeps whole prompts"
        yield Finding("template", "note", "a saved prompt cannot end between two messages", advice)
    else:
        # Some templates put the system message into the first user turn, and `system_end` is the start of that turn.
        is_end = _SYSTEM in tokenizer.decode(prompt.token_ids[: prompt.system_end])
        where = "" if is_end else ", but not after the system message"
        yield Finding("template", "ok", f"a saved prompt can end after a message{where}")
    yield _calls_finding(renderer.output_format.name, "tools" in str(tokenizer.chat_template))
    cost = template_cost(renderer)
    yield Finding("reuse", "note" if cost.advice else "ok", cost.line, cost.advice)


def _calls_finding(name: str, takes_tools: bool) -> Finding:
    """Returns the finding about tool calls. `name` is the format in which the renderer reads calls back."""
    if name in ("none", "json") or not takes_tools:
        text = "the template writes tool calls in an unknown format: only JSON calls are found"
        if not takes_tools:
            text = "the model was not trained to call tools: its template leaves them out"
        # The last line of the command says more of it.
        another, _, _ = proposed().partition(" (")
        return Finding("tool calls", "note", text, f"agents may not work with this model; fetch another: {another}")
    return Finding("tool calls", "ok", f"written by the template and read back: {name}")
