"""The questions of an hour, and the prepared replies: thoughts, calls of the agent's own tools, texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.real_agents.agents import Call

ROOT = Path(__file__).parents[2]
_SOURCES = ROOT / "diskprefix/daemon/engine"
_NAMES = (
    *(
        "active_requests",
        "detokenize",
        "exponential",
        "fetches",
        "forward",
        "gauges",
        "inbox",
        "loop",
        "pools",
    ),
    *("request", "running_request", "sampler", "scheduler", "served_model", "thought_limit"),
)
COUNTER = "counter.py"
NUM_QUESTIONS = 50


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question of the user, the calls before the reply, and the reply."""

    number: int
    question: str
    calls: tuple[Call, ...]
    last: str

    def script(self) -> dict[str, Any]:
        thought = (
            f"The user asks for number {self.number}. I look only at what the question names, because the rest of the "
            "repository does not matter for it. Then I answer in a few sentences, and say which lines I mean."
        )
        return {"task": self.question, "calls": self.calls, "last": self.last, "thought": thought}


def sources() -> dict[str, str]:
    """Returns the files of the repository in which the agent works: modules of this project, and a counter."""
    files = {f"{name}.py": (_SOURCES / f"{name}.py").read_text(encoding="utf-8") for name in _NAMES}
    return files | {COUNTER: counter(0)}


def counter(value: int) -> str:
    return f"VALUE = {value}\n\nprint('the value is', VALUE)\n"


def tasks(files: Mapping[str, str], repository: Path) -> list[Task]:
    """Returns the tasks with OpenCode's tools. Of five, one reads a little, one searches and reads, one edits and runs,
    one is answered without a tool at more length, and one reads more."""
    names = [name for name in files if name != COUNTER]
    made, value = list[Task](), 0
    for number in range(1, NUM_QUESTIONS + 1):
        name = names[number % len(names)]
        path, lines = str(repository / name), files[name].splitlines()
        counter_path = str(repository / COUNTER)
        begin = number % 7 * 10 + 1
        read: Call = ("read", {"filePath": path, "offset": begin, "limit": 12})
        calls: tuple[Call, ...]
        match number % 5:
            case 1:
                asked, calls = f"what do lines {begin} to {begin + 11} of {name} do?", (read,)
            case 2:
                command = f"grep -n 'def ' {name} | head -n 8"
                search: Call = ("bash", {"command": command, "description": "List the first functions"})
                asked, calls = f"which functions does {name} begin with?", (search, read)
            case 3:
                asked = f"add one to the value in {COUNTER}, which is {value}, and run it."
                edit = {"filePath": counter_path, "oldString": f"VALUE = {value}", "newString": f"VALUE = {value + 1}"}
                value += 1
                calls = (
                    ("read", {"filePath": counter_path}),
                    ("edit", edit),
                    ("bash", {"command": f"python3 {COUNTER}", "description": "Run the counter"}),
                )
            case 4:
                asked, calls = f"from what you know, sketch how you would write {name}.", ()
            case _:
                asked, calls = f"read the beginning of {name} and say what is missing.", (_longer(read),)
        said = lines[begin : begin + (24 if not calls else 3)]
        last = f"For number {number}, these lines of {name} matter:\n" + "\n".join(said)
        made.append(Task(number=number, question=f"Question {number:02}: {asked}", calls=calls, last=last))
    return made


def _longer(read: Call) -> Call:
    return read[0], read[1] | {"limit": 40}
