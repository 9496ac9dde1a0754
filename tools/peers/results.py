"""The results of the peers: samples of models, peers and rounds, in one file that several runs fill."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diskprefix.errors import DiskPrefixError
from tools.measuring.report import machine, short

OURS = "diskprefix"
MACHINE = "machine"
"""In place of a peer: what the machine itself did before each of them."""
MORE_IS_BETTER = ("rate", "together", "prefill")


class UnreadableResults(DiskPrefixError):
    """The file of results is not one that this tool wrote."""


@dataclass(frozen=True)
class Figure:
    """One number. `case` is a key of the tool's `TITLES`; `size` is the length of the prompt in words, about as many
    tokens, or 0."""

    case: str
    size: int
    value: float

    @property
    def cell(self) -> str:
        return f"{self.case} {self.size}" if self.size else self.case


@dataclass(frozen=True)
class Sample:
    model: str
    peer: str
    round: int
    figure: Figure


class Results:
    """With a path, what earlier runs wrote there belongs to it, and `save` writes all. Raises `UnreadableResults`."""

    def __init__(self, path: Path | None, benchmark: str = "peers") -> None:
        self.samples: list[Sample] = []
        self.left_out: dict[str, dict[str, str]] = {}
        self._benchmark = benchmark
        self._path = path
        if path is not None and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                self.samples = [_sample(one) for one in found["samples"]]
                self.left_out = found["left_out"]
            except (ValueError, KeyError, TypeError) as error:
                raise UnreadableResults(f"{path} is not a file of results: {error!r}") from error

    def has(self, model: str, peer: str, round_: int) -> bool:
        return any((one.model, one.peer, one.round) == (model, peer, round_) for one in self.samples)

    def begin(self, model: str, peer: str, round_: int) -> None:
        """Forgets the samples of the round. Until `end`, the peer counts as left out."""
        self.samples = [one for one in self.samples if (one.model, one.peer, one.round) != (model, peer, round_)]
        self.leave_out(model, peer, "cut off")

    def add(self, model: str, peer: str, round_: int, figures: Iterable[Figure]) -> None:
        self.samples += [Sample(model, peer, round_, figure) for figure in figures]
        self.save()

    def end(self, model: str, peer: str) -> None:
        self.left_out.get(model, {}).pop(peer, None)
        self.save()

    def leave_out(self, model: str, peer: str, reason: str) -> None:
        self.left_out.setdefault(model, {})[peer] = reason
        self.save()

    def save(self) -> None:
        if self._path is not None:
            work = self._path.with_name(f"{self._path.name}.partial")
            work.write_text(json.dumps(self.report(), indent=2), encoding="utf-8")
            work.replace(self._path)

    def report(self) -> dict[str, Any]:
        return {
            "benchmark": self._benchmark,
            "machine": machine(),
            "models": {
                model: spreads(self.samples, model) for model in dict.fromkeys(one.model for one in self.samples)
            },
            "left_out": self.left_out,
            "samples": [_flat(one) for one in self.samples],
        }


def _flat(one: Sample) -> dict[str, Any]:
    return {"model": one.model, "peer": one.peer, "round": one.round, **asdict(one.figure)}


def _sample(one: Mapping[str, Any]) -> Sample:
    figure = Figure(one["case"], one["size"], one["value"])
    return Sample(one["model"], one["peer"], one["round"], figure)


def spreads(samples: Iterable[Sample], model: str) -> dict[str, dict[str, dict[str, float]]]:
    """Returns, for each cell, what each peer showed: `min`, `median`, `max`, and for others than ours `ratio`."""
    values: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        if one.model == model:
            values.setdefault(one.figure.cell, {}).setdefault(one.peer, []).append(one.figure.value)
    return {cell: _with_ratios(cell, of_peers) for cell, of_peers in values.items()}


def _with_ratios(cell: str, of_peers: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    found = {peer: _spread(values) for peer, values in of_peers.items()}
    ours = found.get(OURS)
    for peer, spread in found.items():
        if ours and peer != OURS:
            spread["ratio"] = better(cell, ours["median"], spread["median"])
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def better(cell: str, ours: float, theirs: float) -> float:
    """Returns how many times better `ours` is: more of a rate, less of everything else."""
    return ours / theirs if cell.split()[0] in MORE_IS_BETTER else theirs / ours


def order(titles: Mapping[str, str], cell: str) -> tuple[int, int]:
    """Returns what cells are sorted by: the place of the case in `titles`, then the size."""
    case, *size = cell.split()
    return list(titles).index(case), int(size[0]) if size else 0


def shown(value: float) -> str:
    return short(value) if value >= 10 else f"{value:.3g}"
