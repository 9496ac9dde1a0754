"""`tools/bench templates`: what counts as a template, as the same text, and as a reason for another one."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from click.testing import CliRunner

from diskprefix.progress import Report
from tests.cache_folder import USERS
from tests.daemon.chat.families.families import folder
from tools.__main__ import main
from tools.benchmarks import templates
from tools.benchmarks.template_conversations import CASES, GREETING, QUESTION, SYSTEM, call, result
from tools.benchmarks.template_engines import (
    Given,
    Sandbox,
    Transformers,
    Worker,
    Written,
    jinja_js,
    minijinja,
)
from tools.benchmarks.template_forms import explained
from tools.benchmarks.template_sources import Found, merged, templates_in

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = [SYSTEM, QUESTION, call("Oslo"), result("Oslo", "rain")]


def found_in(member: str, text: str) -> list[str]:
    return [found for _, found in templates_in(member, text.encode)]


def test_templates_are_whole_files_or_strings_that_read_messages() -> None:
    half = CHAT.partition("{% endfor")[0]
    assert list(templates_in("a/chat.jinja", CHAT.encode)) == [("chat", CHAT)]
    assert found_in("a/no_chat.jinja", "Hello {{ name }}") == []
    assert found_in("config.json", json.dumps({"a": [{"chat_template": CHAT}, half, "messages {% if %}"]})) == [CHAT]
    joined = "Z = f'{X}{{% for x in messages %}}{{% endfor %}}'"
    module = f"X = {CHAT[:40]!r} + {CHAT[40:]!r}\nY = {half!r}\n{joined}\n"
    assert found_in("a.py", module) == [CHAT]
    assert found_in("a.js", f"const a = {{'b': {json.dumps(CHAT)}}}; const c = \"{{%\";") == [CHAT]
    assert found_in("README.md", CHAT) == []


def test_a_text_in_several_packages_is_one_template() -> None:
    found = merged(
        iter([("a==1", "a/chat", CHAT), ("b==2", "b/x", CHAT), ("a==1", "a/chat", "other"), ("a==1", "a/chat", CHAT)])
    )
    assert found == [Found("a/chat", CHAT, ("a==1", "b==2")), Found("a/chat#2", "other", ("a==1",))]


@pytest.mark.parametrize(
    ("theirs", "other", "word"),
    [
        ("a", "a", "same text"),
        (None, None, "both refuse"),
        ("a", None, "refuses"),
        (None, "a", "writes"),
        ("a", "b", "other text"),
        ("", None, "refuses"),
    ],
)
def test_texts_are_compared(theirs: str | None, other: str | None, word: str) -> None:
    assert templates.compared(Written(theirs), Written(other)) == word


def forms(source: str, given: Given, served: Written) -> tuple[str, ...] | None:
    found = explained(source, given, served, Transformers())
    return None if found is None else found[0]


def test_the_fewest_forms_explain_a_text() -> None:
    items = "{% for call in messages[2].tool_calls %}{{ call.function.arguments.items() | list }}{% endfor %}"
    given = Given(LOOP)
    assert forms(CHAT, Given([*GREETING, QUESTION]), Transformers().write(CHAT, Given([*GREETING, QUESTION]))) == ()
    assert forms(items, given, Written("[('city', 'Oslo'), ('day', 'today')]")) == ("arguments as objects",)
    assert forms(items, given, Written("[('city', 'Oslo'), ('day', 'tomorrow')]")) is None
    kept = CHAT.replace("{{ message.content }}", "{{ message.content }}{{ keep_thoughts }}")
    text = Transformers().write(kept, Given([QUESTION], None, {"keep_thoughts": True}))
    assert forms(kept, Given([QUESTION]), text) == ("thoughts of earlier turns kept",)


def test_a_refusal_is_explained_by_the_same_words() -> None:
    refusing = "{{ raise_exception('no ' ~ messages[0].content[0].type) }}"
    given = Given([{"role": "user", "content": "x"}])
    assert forms(refusing, given, Written(None, "messages: the chat template refuses the messages: no text")) == (
        "text as parts",
    )
    assert forms(refusing, given, Written(None, "messages: the chat template refuses the messages: no")) is not None
    assert forms(refusing, given, Written(None, "messages: the chat template refuses the messages: yes")) is None
    assert forms(refusing, given, Written(None, "the daemon is busy")) is None
    lacking = "messages: the chat template refuses the messages: 'our._Dict object' has no attribute 'from_keys'"
    for each, reason in (("from_keys", ()), ("to_keys", None)):
        source = f"{{{{ raise_exception(\"'their.Dict object' has no attribute '{each}'\") }}}}"
        assert forms(source, given, Written(None, lacking)) == reason
    nothing = "messages: the prompt has no tokens"
    assert forms("{% set asked = messages %}", given, Written(None, nothing)) == ()
    assert forms("{% set asked = messages %}", given, Written(None, "the daemon is busy")) is None
    assert forms("{{ messages[0].content }}", given, Written(None, nothing)) is None


class Other:
    """Writes everything as transformers does, except with `but` in the source."""

    def __init__(self, but: str = "never") -> None:
        self._but, self._sandbox = but, Sandbox()

    def write(self, source: str, given: Given) -> Written:
        written = self._sandbox.write(source, given)
        return Written(f"{written.text} ") if self._but in source else written


def run(monkeypatch: pytest.MonkeyPatch, *texts: str, sandbox: Any = Sandbox) -> Any:
    folder()
    monkeypatch.setattr(templates, "templates", lambda _: [Found(f"p/{k}", t, ("p==1",)) for k, t in enumerate(texts)])
    for name in ("minijinja", "jinja_js"):
        monkeypatch.setattr(templates, name, lambda _: nullcontext(Other("# differs")))
    monkeypatch.setattr(templates, "Sandbox", sandbox)
    return CliRunner().invoke(main, ["templates", "--json"])


@pytest.mark.slow
def test_it_fails_if_our_text_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run(monkeypatch, CHAT, f"{{# differs #}}{CHAT}")
    first, second = json.loads(good.stdout)
    assert good.exit_code == 0
    assert set(first["engines"]["minijinja"].values()) == {"same text"}
    assert set(second["engines"]["minijinja"].values()) == {"other text"}
    assert first["forms"]["text in parts"] == ["parts as one text"]
    assert set(first["forms"]) == set(CASES)
    theirs, ours, replayed = first["kept"]["chat"]
    assert theirs == ours == replayed
    prompt, state, kept = ours
    assert prompt < state == kept
    assert run(monkeypatch, CHAT, sandbox=lambda: Other("im_start")).exit_code == 1
    with monkeypatch.context() as patched:
        patched.setattr(templates, "served", lambda *_: Written("What nobody sent."))
        assert run(monkeypatch, CHAT).exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", [minijinja, jinja_js])
def test_the_other_engines_run_and_go_on_after_an_error(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(USERS))
    report: Report = print
    worker: Worker = start(report)
    given = Given(LOOP[:2], None, {"eos_token": "</s>"})
    with worker:
        assert worker.write(CHAT + "{{ eos_token }}", given) == Written(f"{Transformers().write(CHAT, given).text}</s>")
        assert worker.write("{% if %}", given).text is None
        refused = worker.write("{{ raise_exception('no system') }}", given)
        assert "no system" in refused.error
        assert worker.write(CHAT, given) == Transformers().write(CHAT, given)
