"""Reads recorded workloads. All lines of a file are JSON objects of one kind, which the first line decides.

    {"timestamp": …, "input_length": …, "output_length": …, "hash_ids": […]}     Mooncake's traces (times in ms)
    {"version": …, "cuts": […], "hashes": […], …}                                a recording of `serve --record`

Lines that are no JSON, which a crash may leave, are left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from diskprefix.errors import InvalidScope, SettingsError
from diskprefix.prefixstore.recording.recorded_request import MAX_TOKENS, VERSION, Count, RecordedRequest, joined
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.trace import RecordedDaemon, Trace, TraceRequest
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds
from diskprefix.values import Mark, Prompt

log = logging.getLogger("diskprefix")

JsonObject: TypeAlias = dict[str, Any]

MOONCAKE_BLOCK_TOKENS = 512
_MIN_MEASURED_S = 1e-3
_KNOWN = "a file of `diskprefix serve --record` or a Mooncake trace (hash_ids)"


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    hash_ids: list[Count]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = MOONCAKE_BLOCK_TOKENS


Warn: TypeAlias = Callable[[str], None]
_Row = TypeVar("_Row", bound=msgspec.Struct)


def read_trace(path: Path, *, name: str = "", warn: Warn = log.warning) -> Trace:
    """Returns the workload in `path`. Its default name is the name of the file. Raises `SettingsError`."""
    where, line = next(_lines(path), ("", b""))
    if not line:
        raise SettingsError(f"{path}: it is empty; give {_KNOWN}")
    try:
        first: JsonObject = msgspec.json.decode(line, type=JsonObject)
    except (RecursionError, ValueError) as error:
        raise SettingsError(f"{where}: {_reason(error)}; TRACE is {_KNOWN}") from error
    if "hash_ids" in first:
        return _trace(name or path.stem, _mooncake(_rows(path, _MooncakeRow, warn)), has_daemon=False)
    if "hashes" in first:
        return _trace(name or path.stem, _rows(path, RecordedRequest, warn), has_daemon=True)
    raise SettingsError(f"{where}: its keys are not those of {_KNOWN}")


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the lines that are not blank, with their places."""
    try:
        with path.open("rb") as file:
            yield from ((f"{path}:{number}", line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise SettingsError(f"{path}: it cannot be read: {error.strerror}") from error


def _rows(path: Path, kind: type[_Row], warn: Warn) -> Iterator[tuple[str, _Row]]:
    """Yields the lines that are JSON, with their places. Raises `SettingsError` for values of another kind."""
    for where, line in _lines(path):
        try:
            yield where, msgspec.json.decode(line, type=kind)
        except (RecursionError, msgspec.ValidationError) as error:
            raise SettingsError(f"{where}: {_reason(error)}") from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            warn(f"{where}: the line is no JSON, and is left out")


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _mooncake(rows: Iterable[tuple[str, _MooncakeRow]]) -> Iterator[tuple[str, RecordedRequest]]:
    """Yields prompts that are given by the ids of their blocks. An id identifies a block with all blocks before it. The
    prompts have no boundaries."""
    block_tokens = 0
    for where, row in rows:
        block_tokens = block_tokens or row.block_size
        if row.block_size != block_tokens:
            raise SettingsError(f"{where}: block_size: {row.block_size} is not the {block_tokens} of the lines before")
        cuts = [*range(block_tokens, row.input_length, block_tokens), row.input_length]
        if len(row.hash_ids) != len(cuts):
            blocks = f"{len(row.hash_ids)} blocks of {block_tokens} tokens"
            raise SettingsError(f"{where}: hash_ids: {blocks} are not the {row.input_length} of input_length")
        yield (
            where,
            RecordedRequest(
                version=VERSION,
                when=row.timestamp / 1000,
                root="",
                scope="full",
                block_size=block_tokens,
                min_tokens=0,
                prompt_tokens=row.input_length,
                cuts=cuts,
                hashes=[f"{block_id}:{cut}" for block_id, cut in zip(row.hash_ids, cuts, strict=True)],
            ),
        )


def _trace(name: str, placed: Iterable[tuple[str, RecordedRequest]], *, has_daemon: bool) -> Trace:
    """Returns the trace of recorded requests. Prompts share their tokens up to the last cut at which they have the same
    hash.

    All tokens between two neighbouring cuts get one number, unique to the cuts. So prompts that part after a cut differ
    from the next token on, and different stretches never agree by chance. The token before a boundary is a marker, as
    in real prompts; most prompts have the same marker. The policy uses markers to tell messages from template text.
    """
    records: list[RecordedRequest] = []
    position_of = {"": 0}
    boundaries: set[str] = set()
    for where, record in placed:
        try:
            record.check()
        except (InvalidScope, ValueError) as error:
            raise SettingsError(f"{where}: {error}") from error
        for digest, cut in zip(record.hashes, record.cuts, strict=True):
            if (elsewhere := position_of.setdefault(digest, cut)) != cut:
                raise SettingsError(f"{where}: hashes: {digest!r} stands at {cut} here and at {elsewhere} elsewhere")
        records.append(record)
        hash_at = dict(zip(record.cuts, record.hashes, strict=True))
        boundaries.update(hash_at[position] for position in record.boundaries if position in hash_at)
    by_model: dict[str, list[RecordedRequest]] = {}
    for record in records:
        by_model.setdefault(record.model, []).append(record)
    daemon = _recorded_daemon(records) if has_daemon else None
    models = {model: _recorded_daemon(own) for model, own in by_model.items()} if len(by_model) > 1 else {}
    records.sort(key=lambda record: record.when)
    before = joined(records)
    number_of = {digest: index for index, digest in enumerate(before)}
    marker_of = _markers(before, position_of, boundaries)

    def replay() -> Iterator[TraceRequest]:
        for record in records:
            hashes, digest = [], record.hashes[-1]
            while digest:
                hashes.append(digest)
                digest = before[digest]
            hashes.reverse()
            lengths = np.diff([0, *(position_of[digest] for digest in hashes)])
            token_ids = np.repeat(np.array([number_of[digest] for digest in hashes], np.int32), lengths)
            for digest in hashes:
                if digest in marker_of:
                    token_ids[position_of[digest] - 1] = marker_of[digest]
            yield _replayed(record, token_ids, record.when - records[0].when)

    return Trace(name, len(records), replay, daemon, models)


def _markers(before: dict[str, str], position_of: dict[str, int], boundaries: Collection[str]) -> dict[str, int]:
    """Returns, for each hash at a boundary, the marker before it: -1, or a lower number where prompts part at their
    markers."""
    marker_of: dict[str, int] = {}
    parting: Counter[str] = Counter()
    for digest in sorted(boundaries):
        earlier = before[digest]
        marker_of[digest] = -1
        if position_of[digest] == position_of[earlier] + 1:
            parting[earlier] += 1
            marker_of[digest] = -parting[earlier]
    return marker_of


def _recorded_daemon(records: Sequence[RecordedRequest]) -> RecordedDaemon:
    """Returns the daemon's settings in the last record, and its mean speed of prefill."""
    last = records[-1]
    geometry = None
    if last.bytes_per_token or last.state_bytes:
        geometry = Geometry(last.bytes_per_token, last.state_bytes, last.logits_bytes, last.exact_at)
    computed = [record for record in records if record.prefill_ms and record.prompt_tokens > record.restored]
    seconds = sum(record.prefill_ms for record in computed) / 1e3
    num_tokens = sum(record.prompt_tokens - record.restored for record in computed)
    return RecordedDaemon(
        block_size=last.block_size,
        min_tokens=last.min_tokens,
        geometry=geometry,
        tokens_per_s=num_tokens / seconds if seconds > _MIN_MEASURED_S else 0.0,
    )


def _replayed(record: RecordedRequest, token_ids: TokenIds, when: float) -> TraceRequest:
    marks = tuple(Mark(*mark) for mark in record.marks)
    token_ids, reply = token_ids[: record.prompt_tokens], token_ids[record.prompt_tokens :]
    prompt = Prompt(token_ids, tuple(record.boundaries), record.system_end, record.question_end, marks=marks)
    scope = parse_scope(record.scope, param="scope") if record.own_scope else None
    return TraceRequest(
        when=when,
        prompt=prompt,
        reply=reply,
        scope=scope,
        group=bytes.fromhex(record.group),
        tenant=record.root,
        is_trusted=record.is_trusted,
        save=record.save,
        ttl_s=record.ttl_s,
        remembered=record.remembered,
        is_ahead=record.is_ahead,
        model=record.model,
    )
