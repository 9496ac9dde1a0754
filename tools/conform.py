"""Asks a server of OpenAI's API whether an answer is byte for byte the same, however it was computed.

This file needs Python 3.11 and nothing else: copy it to where the server is.

    python conform.py http://127.0.0.1:8642/v1
    python conform.py http://127.0.0.1:8642/v1 --restart 'exec diskprefix serve' --json >one.json
    python conform.py one.json another.json          # one table of what was saved

Each column asks for the answer to a prompt in another way and compares it with a cold answer: the text at temperature
0, and the log probabilities of its tokens, with all their digits, if the server sends them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urljoin

COLUMNS = {
    "repeated": "the prompt again",
    "next turn": "the conversation goes on",
    "other cut": "behind another prompt that shares half of it",
    "company": "beside three other requests, cold and again",
    "draft": "cold, from a server with a draft (--draft)",
    "restart": "after kill -9 and a start (--restart)",
    "upgrade": "after kill -9 and a start of another version (--upgrade)",
    "another CPU": "after kill -9 and a start with another CPU's kernels (--other-cpu)",
}
COMMANDS = {"restart": "restart", "draft": "draft", "upgrade": "upgrade", "another CPU": "other_cpu"}
"""The options with a command that starts the server, by column."""
_TEXT = (
    "the of and in to with for from over under river mountain harbor ship captain market village garden forest bridge "
    "train engine letter story school teacher farmer window table stone paper winter summer morning evening silver "
    "copper green heavy quiet narrow early distant hidden broken simple careful follows carries opens closes builds "
    "finds keeps turns watches remembers leaves answers between without against along around seven twelve ninety north"
)
WORDS = _TEXT.split()
QUESTIONS = ("Repeat the last twenty words of the text above.", "Now repeat the twenty words before those.")
NONCE = "{nonce}"
COLD_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"prefix_cache": {"scope": "off"}},
    {"cache_prompt": False},
    {"cache_salt": NONCE},
)
"""The fields that ask for an answer for which nothing is restored: diskprefix's, llama.cpp's, vLLM's and SGLang's."""
NO_WAY, NO_CACHE, RESTART = "no way to ask", "nothing is restored", "restart"
START_DEADLINE_S, ANSWER_DEADLINE_S, POLL_S = 900.0, 1800.0, 0.1
FASTER = 0.6
"""A server that counts no restored tokens restored something if it took less than this part of the first time."""

Messages = list[dict[str, str]]


class ConformError(Exception):
    """The server cannot be asked; the message is one line."""


@dataclass(frozen=True)
class Reply:
    """`digits` has each token and alternative with its log probability, as text; it is empty if there are none."""

    text: str
    digits: Sequence[tuple[str, str]]
    prompt_tokens: int | None
    cached: int | None
    seconds: float
    body: Mapping[str, Any]


@dataclass
class Cell:
    """One column: the verdicts of its comparisons, the largest difference of a log probability, and how much of the
    prompt the server says it restored the last time."""

    verdicts: list[str] = field(default_factory=list)
    largest: float = 0.0
    cached: int | None = None
    prompt_tokens: int | None = None
    seconds: list[float] = field(default_factory=list)
    why_not: str = ""

    def compare(self, cold: Reply | None, other: Reply) -> None:
        if cold is None:
            self.why_not = f"not known: {NO_WAY}"
            return
        is_same = other.digits == cold.digits
        self.verdicts.append("text" if other.text != cold.text else "same" if is_same else "digits")
        both = zip(cold.digits, other.digits, strict=False)
        apart = [abs(float(first[1]) - float(second[1])) for first, second in both if first[0] == second[0]]
        self.largest = max(self.largest, *apart) if apart else self.largest
        self.cached, self.prompt_tokens = other.cached, other.prompt_tokens
        self.seconds.append(round(other.seconds, 3))

    def shown(self) -> str:
        """Returns a cell of the table, such as `same, 1024/1040` or `text in 1 of 3, 0/1040`."""
        bad = [verdict for verdict in self.verdicts if verdict != "same"]
        if not self.verdicts:
            return self.why_not
        verdict = f"{'text' if 'text' in bad else 'digits'} in {len(bad)} of {len(self.verdicts)}" if bad else "same"
        return f"{verdict}, {'?' if self.cached is None else self.cached}/{self.prompt_tokens or '?'}"


class Server:
    """A server that is asked, and is started and killed here if there is a command for it."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url, self.model, self.cold_by = f"{url.rstrip('/')}/", options.model, NO_WAY
        self.logprobs: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 5}
        self._options = options
        self._cold: Mapping[str, Any] | None = None
        self._command = options.restart
        self._process: subprocess.Popen[bytes] | None = None

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = ANSWER_DEADLINE_S) -> Any:
        """Raises `ConformError` with the server's message if it refuses, and `OSError` if it does not answer."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._options.key}"}
        request = urllib.request.Request(urljoin(self.url, path), json.dumps(body).encode() if body else None, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                # Numbers stay text: the digits that were sent are compared.
                return json.loads(answer.read(), parse_float=str)
        except urllib.error.HTTPError as error:
            raise ConformError(f"{error.code}: {error.read(300).decode(errors='replace')}") from error

    def ask(self, messages: Messages, fields: Mapping[str, Any] | None = None) -> Reply:
        salted = json.loads(json.dumps(fields or {}).replace(NONCE, os.urandom(8).hex()))
        body = {"model": self.model, "messages": messages, "max_tokens": self._options.max_tokens}
        body |= {"temperature": 0, "seed": 0, **self.logprobs, **self._options.fields, **salted}
        began = time.perf_counter()
        answer = self.request("chat/completions", body)
        seconds = time.perf_counter() - began
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None:
            cached = (answer.get("timings") or {}).get("cache_n")
        tokens = (choice.get("logprobs") or {}).get("content") or []
        each = [candidate for token in tokens for candidate in (token, *token.get("top_logprobs", ()))]
        digits = [(str(candidate["token"]), str(candidate["logprob"])) for candidate in each]
        text = "".join(choice["message"].get(part) or "" for part in ("reasoning_content", "content"))
        return Reply(text, digits, usage.get("prompt_tokens"), cached, seconds, answer)

    def cold(self, messages: Messages) -> Reply | None:
        """Returns an answer for which nothing was restored, or None if there is no way to ask for it."""
        if self.cold_by == RESTART:
            self.start(self._command)
        return self.ask(messages, self._cold) if self.cold_by != NO_WAY else None

    def start(self, command: str) -> None:
        """Kills what was started before, and starts the server. Raises `ConformError` if it does not answer."""
        self.kill()
        self._command = command
        with TemporaryFile() as log:
            self._process = subprocess.Popen(
                command, shell=True, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                self.wait()
            except ConformError as error:
                log.seek(0)
                lines = log.read().decode(errors="replace").split("\n")
                last = next(filter(str.strip, reversed(lines)), "nothing")
                raise ConformError(f"{error}; it said at last: {last}") from error

    def wait(self) -> None:
        """Waits until a server that was started answers a chat. Learns its model, and whether it has log probabilities.

        Raises `ConformError` if it does not answer.
        """
        deadline, said = time.monotonic() + START_DEADLINE_S, ""
        while time.monotonic() < deadline and (self._process is None or self._process.poll() is None):
            try:
                self.model = self.model or self.request("models", timeout=10)["data"][0]["id"]
                if not self.ask([{"role": "user", "content": "Hello."}]).digits:
                    self.logprobs = {}
                return
            except (OSError, KeyError, IndexError) as error:
                said = repr(error)
            except ConformError as error:
                said = str(error)
                if said.startswith(("400", "422")):
                    if not self.logprobs:
                        break
                    self.logprobs = {}
            if self._process is None and not said.startswith("4"):
                break
            time.sleep(POLL_S)
        raise ConformError(f"{self.url} does not answer: {said or 'the command ended'}")

    def kill(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        while self.listens():
            time.sleep(POLL_S)

    def listens(self) -> bool:
        try:
            self.request("models", timeout=10)
        except OSError:
            return False
        except ConformError:
            return True
        return True

    def find_cold(self, prompt: Messages, other: Messages) -> None:
        """Learns how to ask for a cold answer. Most servers ignore a field that they do not know, so each is tried."""
        # The first request of a process may take longer than a cold one.
        cold_s = min(self.ask(messages).seconds for messages in (other, prompt))
        again = self.ask(prompt)

        def is_restored(reply: Reply) -> bool:
            if reply.cached is None:
                return reply.seconds < FASTER * cold_s
            return reply.cached > (reply.prompt_tokens or 0) // 2

        if not self._options.cold and not is_restored(again):
            self.cold_by = NO_CACHE
            return
        for fields in [self._options.cold] if self._options.cold else COLD_FIELDS:
            with suppress(ConformError):
                if not is_restored(self.ask(prompt, fields)):
                    self._cold, self.cold_by = fields, json.dumps(fields)
                    return
        if self._command is not None:
            self.start(self._command)
            if not is_restored(self.ask(prompt)):
                self.cold_by = RESTART


def prompts_of(num_words: int) -> Iterator[Messages]:
    """Yields prompts that share nothing with each other, or with an earlier run, after the beginning that a chat
    template writes."""
    while True:
        system = f"{os.urandom(8).hex()} {' '.join(random.choices(WORDS, k=num_words))}."
        yield [{"role": "system", "content": system}, {"role": "user", "content": QUESTIONS[0]}]


def beginning(prompt: Messages, share: float) -> Messages:
    """Returns a prompt with another question and with a share of the text."""
    text = prompt[0]["content"]
    return [{"role": "system", "content": text[: int(len(text) * share)]}, {"role": "user", "content": QUESTIONS[1]}]


def beside(ask: Callable[[Messages], Reply | None], prompt: Messages, others: Sequence[Messages]) -> Reply | None:
    """Returns the answer to a prompt that is sent together with others."""
    with ThreadPoolExecutor(len(others) + 1) as pool:
        reply, *_ = list(pool.map(ask, [prompt, *others]))
    return reply


def reasons(body: Any, path: str = "") -> Iterator[str]:
    """Yields the fields of an answer that say why a prompt was not restored."""
    for name, value in body.items() if isinstance(body, dict) else ():
        if "miss" in name and isinstance(value, str):
            yield f"{path}{name}: {value}"
        yield from reasons(value, f"{path}{name}.")


def judged(server: Server, options: argparse.Namespace) -> tuple[dict[str, Cell], str]:
    """Asks everything. Returns the columns, and the field that says why a prompt was not restored."""
    prompts, cells = prompts_of(options.words), {name: Cell() for name in COLUMNS}
    server.find_cold(next(prompts), next(prompts))
    note(f"cold answers by: {server.cold_by}")
    cold_answers, why = [], [""]
    for number in range(options.rounds):
        note(f"prompt {number + 1} of {options.rounds}")
        prompt, other = next(prompts), next(prompts)
        known_cold = server.cold(prompt)
        first = server.ask(prompt)
        # An unknown prompt is cold, too, but the first one tells more.
        cold = known_cold or first
        cold_answers.append((prompt, cold))
        cells["repeated"].compare(cold, server.ask(prompt))
        turn = [*prompt, {"role": "assistant", "content": cold.text}, {"role": "user", "content": QUESTIONS[1]}]
        reply = server.ask(turn)
        cells["next turn"].compare(server.cold(turn), reply)
        server.ask(beginning(other, 0.5))
        reply = server.ask(other)
        why += reasons(reply.body)
        cells["other cut"].compare(server.cold(other), reply)
        ways = (server.ask,) if server.cold_by in (NO_WAY, RESTART) else (server.cold, server.ask)
        for way in ways:
            others = [beginning(next(prompts), share) for share in (0.2, 0.5, 0.9)]
            together = beside(way, prompt, others)
            assert together is not None
            cells["company"].compare(cold, together)
    for name, option in COMMANDS.items():
        if (command := getattr(options, option)) is None:
            cells[name].why_not = "not tried"
            continue
        note(name)
        time.sleep(options.settle)
        server.start(command)
        for prompt, cold in cold_answers:
            is_asked_cold = name == "draft" and server.cold_by not in (NO_WAY, RESTART)
            cells[name].compare(cold, (is_asked_cold and server.cold(prompt)) or server.ask(prompt))
    return cells, why[-1]


def version_of(server: Server) -> str:
    """Returns the version that a server reports."""
    for path, name in (("../version", "version"), ("../props", "build_info")):
        with suppress(ConformError, OSError, ValueError, KeyError, TypeError):
            return str(server.request(path, timeout=10)[name])
    return ""


def note(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def conform(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the line of one server. Raises `ConformError`, `OSError`."""
    server = Server(url, options)
    if options.restart is not None and server.listens():
        raise ConformError(f"stop what listens at {url}: with --restart the server is started and killed here")
    try:
        if options.restart is None:
            server.wait()
        else:
            server.start(options.restart)
        named = " ".join(filter(None, (options.name or url, version_of(server))))
        cells, why = judged(server, options)
        columns = {name: asdict(cell) for name, cell in cells.items()}
        return {
            "server": f"{named}, {Path(server.model).name}",
            "columns": columns,
            "log probabilities": bool(server.logprobs),
            "cold by": server.cold_by,
            "says why not": why,
            "date": str(date.today()),
        }
    finally:
        server.kill()


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns one line a server, as Markdown."""
    facts = ("log probabilities", "cold by", "says why not", "date")
    lines = [["server", *COLUMNS, *facts], ["---"] * (len(COLUMNS) + len(facts) + 1)]
    for result in results:
        answers = [{True: "yes", False: "no", "": "no"}.get(result[name], result[name]) for name in facts]
        lines.append([result["server"], *(Cell(**result["columns"][name]).shown() for name in COLUMNS), *answers])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arguments() -> argparse.Namespace:
    columns = "\n".join(f"  {name:12} {meaning}" for name, meaning in COLUMNS.items())
    parser = argparse.ArgumentParser(
        prog="conform",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=f"Columns:\n{columns}\n\nA cell says `same`, `digits` (the text is the same, a log probability is not)"
        " or `text`,\nand how many of the prompt's tokens were restored. Ends with 1 if anything is not the same.",
    )
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="the API's address with /v1, or files that --json wrote")
    add("--restart", metavar="COMMAND", help="starts the server, which stays in the foreground; it is killed here")
    add("--draft", metavar="COMMAND", help="starts the server with a draft")
    add("--upgrade", metavar="COMMAND", help="starts another version of the server")
    add("--other-cpu", metavar="COMMAND", help="starts the server with the kernels of another CPU, or on one")
    add("--cold", metavar="JSON", type=json.loads, help=f"fields for a cold answer; {NONCE} is a new number each time")
    add("--fields", metavar="JSON", type=json.loads, default={}, help="fields for every request")
    add("--model", help="the model's name; the first that the server lists, unless given")
    add("--name", help="the server's name in the table")
    add("--key", default=os.environ.get("OPENAI_API_KEY", "none"), help="an API key, unless OPENAI_API_KEY has it")
    add("--words", type=int, default=600, help="words of a prompt (600)")
    add("--max-tokens", type=int, default=32, help="the most tokens of an answer (32)")
    add("--rounds", type=int, default=3, help="the number of prompts (3)")
    add("--settle", type=float, default=2.0, help="seconds before a kill (2)")
    add("--must-restore", action="store_true", help="end with 1 if a column that could restore something did not")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        if os.path.isfile(options.urls[0]):
            results = [json.loads(Path(file).read_text(encoding="utf-8")) for file in options.urls]
        else:
            results = [conform(url, options) for url in options.urls]
    except (ConformError, OSError) as error:
        print(f"conform: {error}", file=sys.stderr)
        return 2
    print(json.dumps(results[0]) if options.json else table(results))
    cells = [(name, cell) for result in results for name, cell in result["columns"].items() if cell["verdicts"]]
    is_lost = options.must_restore and not all(cell["cached"] for name, cell in cells if name != "draft")
    return int(is_lost or any({*cell["verdicts"]} != {"same"} for _, cell in cells))


if __name__ == "__main__":
    sys.exit(main())
