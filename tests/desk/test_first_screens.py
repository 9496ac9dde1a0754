"""The first screen of each command has no word that only the authors know: what a new user would ask about is in the
debug log, or says what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.values import MISS_REASONS, words_of
from tests.daemon.server.daemon_process import DaemonProcess, reply_to, running_daemon
from tests.desk.conftest import Run

PACKAGE = Path(__file__).parents[2] / "diskprefix"
AUTHORS_WORDS = re.compile(
    r"\[(start|template|engine|model)\]|\bttft\b|turns that stay|\bexact (at|in)\b|boundar|weights of a token"
    r"|of a CPU|gate=|auto:\d|drafts|\bkernels: |those of serve|operators:|ahead"
)
"""Names of parts of the code, abbreviations, and figures without what follows from them."""
IN_MESSAGES = re.compile(r"\bpositions?\b|\bits cache\b|\bTTFT\b|\btok/s\b|too short\W*$|no logits")
"""Words of the code that no message has: say the model's context or a place in the prompt, whose prompts are saved
where, time to the first token, tokens/s, and too short for what."""
OF_MODELS = {
    *(f"runtime/grid/{name}.py" for name in ("grid_cache", "rehearsal", "state_layout")),
    *(f"runtime/plan/{name}.py" for name in ("plan", "plan_memory", "families/rotary_options")),
    *(f"runtime/files/gguf/{name}.py" for name in ("dense_families", "gguf_rope")),
    "native/calls.py",
}
"""Files whose messages name parts of a model's file or code."""
PATH, MOST_CHARS = re.compile(r"/[\w./+=-]{8,}"), 170
"""A path, and the length of a line without its paths that a reader takes in at once."""
BODY = {"messages": [{"role": "user", "content": "Which way to the sea?"}], "max_tokens": 4, "temperature": 0}


def unknown_words(text: str) -> list[str]:
    return [line for line in text.splitlines() if AUTHORS_WORDS.search(line)]


def test_the_log_of_a_start_and_a_request_has_words_for_its_user(
    agent_model: Path, tmp_path: Path, daemon: DaemonProcess
) -> None:
    with running_daemon(agent_model, tmp_path, disk_prefix_cache="auto", log_level="debug") as talkative:
        with talkative.client() as client:
            reply_to(client, BODY)
        talkative.wait_for_line(r"\[template\]")
        assert talkative.stop() == 0, talkative.log
    for_developers = [line for line in talkative.lines if " DEBUG " in line]
    log = "\n".join(line for line in talkative.lines if line not in for_developers)
    assert unknown_words(log) == []
    assert "cache auto (30 recent prompts) in " in log
    assert re.search(r"POST \S+ 200 · prompt \d+ tokens · restored 0 \(\w+\) · reply 4 tokens · first token", log)
    for part in ("[start] server ", "[start] all weights are in memory", "[template] "):
        assert part in "\n".join(for_developers)
    assert " DEBUG " not in daemon.log


@pytest.mark.parametrize(
    "command",
    [
        "ps",
        "show MODEL",
        "list",
        "list --available",
        "inspect",
        "inspect --lost",
        "doctor --model MODEL",
        "clients codex",
    ],
)
def test_the_first_screen_of_a_command_has_words_for_its_user(
    command: str, run: Run, daemon: DaemonProcess, chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with daemon.client() as client:
        reply_to(client, BODY)
    monkeypatch.setenv("DISKPREFIX_URL", daemon.url)
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", str(tmp_path / "kv"))
    ended = run(*command.replace("MODEL", str(chat_model)).split())
    assert unknown_words(ended.stdout + ended.stderr) == []
    lines = (ended.stdout + ended.stderr).splitlines()
    assert [line for line in lines if len(PATH.sub("PATH", line)) > MOST_CHARS] == [], "write two short lines"


def shown_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the texts of a module that people may read: all but names, and docstrings that no page or help shows."""
    hidden = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            marks = [*node.decorator_list, *getattr(node, "bases", ())]
            if re.search(r"command|group|routes|Model", " ".join(map(ast.unparse, marks))):
                hidden -= {id(getattr(node.body[0], "value", None))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield node.lineno, node.value if re.search(r"[ :]", node.value) or node.value.isupper() else ""


def test_no_message_has_words_of_the_code() -> None:
    assert [file for file in OF_MODELS if not (PACKAGE / file).is_file()] == []
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {match[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in OF_MODELS
        for line, text in shown_texts(ast.parse(path.read_text(encoding="utf-8")))
        for match in IN_MESSAGES.finditer(text)
    ]
    for file in (*(PACKAGE.parent / "policies").glob("*.toml"), *(PACKAGE.parent / "systemd").glob("*.env")):
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        found += [f"{file.name}:{number}: {match[0]}" for number, line in lines for match in IN_MESSAGES.finditer(line)]
    assert found == []


def test_the_rule_finds_words_in_messages_help_and_titles_alone() -> None:
    source = '''
"""Positions of a model."""
TITLES = "state", "TTFT:"
@click.command()
def f():
    "Counts positions of tokens."
    g("positions", f"of {n} positions")
'''
    lines = [line for line, text in shown_texts(ast.parse(source)) if IN_MESSAGES.search(text)]
    assert sorted(lines) == [3, 6, 7]


def test_a_reason_is_written_in_words_on_terminals_and_pages_alike() -> None:
    assert [reason for reason in MISS_REASONS if IN_MESSAGES.search(words_of(reason))] == []
    page = (PACKAGE / "desk/shared/page/format.js").read_text(encoding="utf-8")
    in_full = re.search(r"IN_FULL = \{(.*)\}", page)
    assert in_full is not None
    for reason, text in re.findall(r'(\w+): "([^"]*)"', in_full[1]):
        assert words_of(reason) == text
    assert len(re.findall(": ", in_full[1])) == sum(words_of(each) != each.replace("_", " ") for each in MISS_REASONS)
