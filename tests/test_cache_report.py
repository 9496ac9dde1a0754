"""The debug log's line about one request holds everything that the response leaves out."""

from __future__ import annotations

from dataclasses import fields

from diskprefix.nouns import CacheReport, Scope, Selection

SELECTION = Selection(
    scope=Scope("auto", 30),
    prompt_tokens=1502,
    reason="best_checkpoints",
    selected=1432,
    aligned=1280,
    checkpoints=(512, 1280),
    votes=(3, 1),
    window=30,
    recent=12,
    common=1440,
    seen=1280,
    price=256,
    lost=7,
    trials=11,
    again=4,
)


def test_the_log_line_of_a_hit_holds_every_figure_once() -> None:
    report = CacheReport(
        selection=SELECTION,
        restored=1280,
        source="disk",
        matched=1502,
        refused="no_logits",
        restore_ms=9.126,
        saved="queued",
    )
    assert report.log_line() == (
        "[disk-cache] restored=1280 source=disk matched=1502 refused=no_logits"
        " restore_ms=9.13 saved=queued replayed=0 scope=auto:30 prompt_tokens=1502"
        " reason=best_checkpoints selected=1432 aligned=1280 keep_tail=false keeps_reply=false"
        " checkpoints=512,1280 votes=3,1 window=30 recent=12 common=1440 seen=1280 price=256 lost=7"
        " trials=11 again=4"
    )
    names = [field.name for field in (*fields(CacheReport), *fields(Selection))]
    assert len(names) == len(set(names)), "a name would hide another"


def test_the_log_line_of_a_miss_says_where_the_prompt_diverged() -> None:
    report = CacheReport(selection=SELECTION, miss_reason="diverged")
    assert "restored=0 source=none miss_reason=diverged" in report.log_line()
    assert "common=1440" in report.log_line()
    assert report.diverged_at == 1440
    assert CacheReport(selection=SELECTION, miss_reason="not_stored").diverged_at is None
