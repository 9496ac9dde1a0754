"""What a chat template costs, found with the real templates and with one that never ends."""

from __future__ import annotations

import logging
import re
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.chat import template_cost as template_cost_module
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.template_cost import CommonPrefix, TemplateCost, template_cost
from diskprefix.daemon.chat.template_date import TemplateClock
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from tests.daemon.chat.families.families import folder
from tests.daemon.chat.rendering import renderer_of
from tests.daemon.server.chat_model import CHAT_TEMPLATE, write_chat_model, write_tokenizer
from tests.daemon.server.daemon_process import wait_until
from tests.daemon.server.scripted import scripted_app


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


def renderer_with(tokenizer_folder: Path, template: str, **variables: Any) -> PromptRenderer:
    renderer = renderer_of(read_tokenizer(tokenizer_folder, template), template_variables=variables)
    renderer.warm_up()
    return renderer


def real(name: str) -> str:
    return (folder() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def whole(kept: CommonPrefix | None) -> bool:
    assert kept is not None
    return kept.num_tokens == kept.total


@pytest.mark.parametrize(
    ("name", "losses", "says"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", set(), ""),
        ("Qwen-Qwen3-0.6B", {"thoughts"}, ""),
        ("mistralai-Mistral-Nemo-Instruct-2407", {"turn"}, "each question changes earlier text; another template"),
        ("meta-llama-Llama-3.2-3B-Instruct", {"day"}, ""),
        ("openai-gpt-oss-120b", {"day", "thoughts"}, ""),
    ],
)
def test_losses_of_real_templates_are_found_with_advice(
    tokenizer_folder: Path, name: str, losses: set[str], says: str
) -> None:
    cost = template_cost(renderer_with(tokenizer_folder, real(name)))
    for change in ("turn", "day", "thoughts"):
        assert whole(getattr(cost, change)) == (change not in losses), (change, cost.line)
    assert cost.tool is not None
    assert 0 < cost.tool.num_tokens < cost.tool.total
    assert says in cost.advice
    assert bool(says) == bool(cost.advice)
    assert cost.record["turn"] == {"kept": cost.turn.num_tokens, "of": cost.turn.total} if cost.turn else False
    assert f"; {100 * cost.tool.num_tokens // cost.tool.total} % with a further tool" in cost.line


CLOCK_TEMPLATE = "{{ strftime_now('%H:%M') }}" + CHAT_TEMPLATE


def test_a_template_that_writes_the_time_of_day_is_named(tokenizer_folder: Path) -> None:
    """A day does not help it, but one that is fixed does."""
    cost = template_cost(renderer_with(tokenizer_folder, CLOCK_TEMPLATE))
    assert not whole(cost.hour)
    assert re.search(r"; \d+ % an hour later", cost.line)
    assert "--template-date YYYY-MM-DD" in cost.advice
    tokenizer = read_tokenizer(tokenizer_folder, CLOCK_TEMPLATE)
    fixed = template_cost(renderer_of(tokenizer, clock=TemplateClock(date(2026, 1, 31))))
    assert (fixed.advice, whole(fixed.hour), whole(fixed.day)) == ("", True, True)


def test_a_template_that_refuses_everything_has_no_figures(tokenizer_folder: Path) -> None:
    cost = template_cost(renderer_with(tokenizer_folder, "{{ raise_exception('no') }}"))
    assert cost == TemplateCost()
    assert cost.line == "no conversation could be rendered"


NEVER_ENDS = CHAT_TEMPLATE + (
    "{% if messages|length > 7 %}{% for i in range(30000) %}{% for j in range(30000) %}{% endfor %}{% endfor %}"
    "{% endif %}"
)


def test_a_template_that_does_not_end_is_given_up_and_learned_nothing_from(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_cost_module, "_LIMIT_S", 0.2)
    renderer = renderer_with(tokenizer_folder, NEVER_ENDS)
    known = {name: dict(value) for name, value in vars(renderer._template).items() if isinstance(value, dict)}
    began = time.monotonic()
    assert template_cost(renderer).turn is None
    assert time.monotonic() - began < 20, "a render may take 30 s"
    assert {name: value for name, value in vars(renderer._template).items() if isinstance(value, dict)} == known


def test_a_trial_leaves_the_warning_about_ignored_tools(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renderer = renderer_with(tokenizer_folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    with caplog.at_level(logging.WARNING):
        template_cost(renderer)
    assert caplog.text == ""
    assert not renderer._template._warned_of_tools


def test_the_cost_is_in_the_log_once_the_model_is_loaded(chat_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), scripted_app(chat_model):
        wait_until(lambda: "[template] restored of a saved prompt: all " in caplog.text, "it is logged")
    assert [record.levelname for record in caplog.records if "[template]" in record.message] == ["DEBUG"]


def test_a_template_that_costs_computing_is_a_warning_that_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_app(write_chat_model(tmp_path / "model", chat_template=CLOCK_TEMPLATE)):
        wait_until(lambda: "an hour later" in caplog.text, "it is logged")
    [warning] = [record for record in caplog.records if "an hour later" in record.message]
    assert warning.levelname == "WARNING"
    assert "--template-date YYYY-MM-DD" in warning.message
