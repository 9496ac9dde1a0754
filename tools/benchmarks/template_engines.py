"""Engines that render a chat template: transformers' use of Jinja2, and others, each a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from diskprefix.runtime.files.chat_template import render_template
from tools.measuring.environments import install_once, npm_install, python_of

JINJA_JS = "@huggingface/jinja@0.5.11"

Values: TypeAlias = dict[str, Any]


class Given(msgspec.Struct, frozen=True):
    """The input of a template: messages and tools in the form of OpenAI's chat API, and other variables."""

    messages: Sequence[Values]
    tools: Sequence[Values] | None = None
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def with_messages(self, messages: Sequence[Values]) -> Given:
        return Given(messages, self.tools, self.variables)


class Written(NamedTuple):
    """The text of a template; None with the error if it refuses."""

    text: str | None
    error: str = ""


class Engine(Protocol):
    def write(self, source: str, given: Given) -> Written:
        """Returns the text of the template `source`, with the beginning of a reply."""


class Transformers:
    """`apply_chat_template` of transformers: the form that the others are compared with."""

    def __init__(self) -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()))

    def write(self, source: str, given: Given) -> Written:
        try:
            text = self._tokenizer.apply_chat_template(
                [*given.messages],
                tools=None if given.tools is None else [*given.tools],
                chat_template=source,
                tokenize=False,
                add_generation_prompt=True,
                **given.variables,
            )
        except Exception as error:  # noqa: BLE001 (a template raises anything)
            return Written(None, f"{type(error).__name__}: {error}")
        return Written(str(text))


class Sandbox:
    """Our sandbox of Jinja2."""

    def write(self, source: str, given: Given) -> Written:
        try:
            return Written(
                render_template(
                    source,
                    given.messages,
                    tools=given.tools,
                    add_generation_prompt=True,
                    variables=given.variables,
                )
            )
        except Exception as error:  # noqa: BLE001 (a template raises anything)
            return Written(None, f"{type(error).__name__}: {error}")


class Worker:
    """A process that renders: a line of JSON for each request and each answer. Close it, or use it in `with`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(self, source: str, given: Given) -> Written:
        # transformers leaves out empty fields and gives thoughts under two names; both are part of the form.
        values = {
            **given.variables,
            "messages": [in_full(message) for message in given.messages],
            "tools": given.tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"source": source, "values": values}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Written(answer.get("text"), answer.get("error", ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Closes the pipes, and waits.
        with self._process:
            self._process.terminate()


def in_full(message: Values) -> Values:
    """Returns a message as transformers gives it to a template."""
    present = {name: value for name, value in message.items() if value is not None}
    thoughts = present.get("reasoning_content")
    return present if thoughts is None else {"thinking": thoughts, **present}


def minijinja(report: Report) -> Worker:
    """Starts minijinja, which is installed on first use. Raises `NotInstalled`."""
    python = python_of("minijinja", report)
    return Worker([str(python), str(Path(__file__).with_name("minijinja_worker.py"))])


def jinja_js(report: Report) -> Worker:
    """Starts the JavaScript engine, which is installed on first use. Raises `NotInstalled`."""
    folder = cache_home() / "environments" / "jinja-js"

    def install() -> None:
        report(f"installing {JINJA_JS}; this is done once")
        npm_install(folder, JINJA_JS)

    install_once(folder, JINJA_JS, install)
    return Worker(["node", str(Path(__file__).with_name("jinja_worker.mjs")), str(folder)])
