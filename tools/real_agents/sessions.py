"""`tools/agents --session`: ten questions in one conversation that began at another server's API, with tools that the
agent finds by searching or has at once, and with a server of tools that connects in the middle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.measuring.live_server import num_tracebacks, step
from tools.real_agents import many_tools
from tools.real_agents.agents import AGENTS, CLAUDE, CODEX, FILE, Agent, Call
from tools.real_agents.hour import ANSWER_LIMIT_S, Script
from tools.real_agents.hour_tasks import Task
from tools.real_agents.install import installed
from tools.real_agents.many_tools import answer_of, tool_of
from tools.real_agents.scratch import Scratch, scratch
from tools.real_agents.session_report import Findings
from tools.real_agents.tap import Tap

TOWNS, VILLAGES = "towns", "villages"
"""The servers of tools. The second one connects before the question `CONNECTS`."""
BEGUN, CONNECTS = 1, 6
"""After the question `BEGUN`, the conversation gets what another server would have written into it."""

_SEARCHED = {"type": "web_search_result", "url": "https://example.com", "title": "X", "encrypted_content": "EqMC"}
OF_ANTHROPIC: tuple[Mapping[str, Any], ...] = (
    {"type": "thinking", "thinking": "", "signature": "EqQB"},
    {"type": "redacted_thinking", "data": "EmwK"},
    {"type": "server_tool_use", "id": "srvtoolu_01", "name": "web_search", "input": {"query": "sums"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_01", "content": [_SEARCHED]},
    {"type": "server_tool_use", "id": "srvtoolu_02", "name": "advisor", "input": {}},
    {
        "type": "advisor_tool_result",
        "tool_use_id": "srvtoolu_02",
        "content": {"type": "advisor_redacted_result", "encrypted_content": "EpAB"},
    },
    {"type": "mcp_tool_use", "id": "mcptoolu_01", "name": "echo", "server_name": "elsewhere", "input": {}},
    {
        "type": "mcp_tool_result",
        "tool_use_id": "mcptoolu_01",
        "is_error": False,
        "content": [{"type": "text", "text": "echoed elsewhere"}],
    },
    {"type": "server_tool_use", "id": "srvtoolu_03", "name": "code_execution", "input": {"code": "2 + 3"}},
    {
        "type": "code_execution_tool_result",
        "tool_use_id": "srvtoolu_03",
        "content": {"type": "code_execution_result", "stdout": "5", "stderr": "", "return_code": 0, "content": []},
    },
    {"type": "fallback", "from": {"model": "claude-fable-5-1"}, "to": {"model": "claude-opus-5-5"}},
)
"""Blocks of an assistant's message as Anthropic's servers write them."""
OF_OPENAI: tuple[Mapping[str, Any], ...] = (
    {"type": "reasoning", "id": "rs_01", "summary": [], "encrypted_content": "gAAAAABo"},
    {
        "type": "web_search_call",
        "id": "ws_01",
        "status": "completed",
        "action": {"type": "search", "query": "sums", "queries": ["sums"]},
    },
    {
        "type": "image_generation_call",
        "id": "ig_01",
        "status": "completed",
        "revised_prompt": "A sum",
        "result": "iVBORw0KGgo=",
    },
    {
        "type": "tool_search_call",
        "id": "ts_01",
        "call_id": None,
        "status": "completed",
        "execution": "server",
        "arguments": {"paths": ["crm"]},
    },
    {
        "type": "tool_search_output",
        "id": "tso_01",
        "call_id": None,
        "status": "completed",
        "execution": "server",
        "tools": [],
    },
    {"type": "compaction", "encrypted_content": "gAAAAABp"},
)
"""Items of a response as OpenAI's servers write them."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """The needs of a conversation of one agent: the `search` for a tool by its name, None if all are there at once, the
    `read` of the file, arguments for the first question, for the later ones and for servers of tools, and a function
    that adds what another server has written to the files of the conversation in the home folder. `added` are these
    values."""

    agent: Agent
    search: Callable[[str], Call] | None
    read: Call
    begin: tuple[str, ...]
    goes_on: tuple[str, ...]
    servers: Callable[[Scratch, Sequence[str]], tuple[str, ...]]
    add: Callable[[Path], None]
    added: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.agent.name}-{'at-once' if self.search is None else 'search'}"


def _server(name: str) -> tuple[str, list[str]]:
    return sys.executable, ["-P", many_tools.__file__, name]


def _servers_of_claude(place: Scratch, names: Sequence[str]) -> tuple[str, ...]:
    commands = {name: _server(name) for name in names}
    servers = {name: {"command": command, "args": arguments} for name, (command, arguments) in commands.items()}
    path = place.home / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    allowed = [f"mcp__{name}" for name in names]
    return "--mcp-config", str(path), "--strict-mcp-config", "--allowedTools", *allowed, "--"


def _servers_of_codex(place: Scratch, names: Sequence[str], *, searches: bool) -> tuple[str, ...]:
    path = place.home / "models.json"
    if not path.exists():
        model = _model_of_codex(place) | {"supports_search_tool": searches}
        path.write_text(json.dumps({"models": [model]}), encoding="utf-8")
    settings = [f"model_catalog_json={json.dumps(str(path))}"]
    for name in names:
        command, arguments = _server(name)
        settings.append(f"mcp_servers.{name}={{command={json.dumps(command)}, args={json.dumps(arguments)}}}")
    return tuple(part for setting in settings for part in ("-c", setting))


def _model_of_codex(place: Scratch) -> dict[str, Any]:
    """Returns what Codex knows of a model: as of its own, so that it sends its tools as an item `additional_tools`."""
    said = subprocess.run(
        ["codex", "debug", "models", "--bundled"], env=place.environment, capture_output=True, text=True, check=True
    )
    models: list[dict[str, Any]] = json.loads(said.stdout)["models"]
    # Others call all tools from programs.
    known = next(model for model in models if not model.get("tool_mode"))
    return known | {"slug": "coder", "use_responses_lite": True}


def _add_to_claude(home: Path) -> None:
    [path] = home.rglob("projects/*/*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    message = next(line["message"] for line in reversed(lines) if line["type"] == "assistant")
    message["content"] = [*OF_ANTHROPIC, *message["content"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _add_to_codex(home: Path) -> None:
    [path] = home.rglob("rollout-*.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    at = max(at for at, line in enumerate(lines) if line["payload"].get("role") == "assistant")
    lines[at:at] = [lines[at] | {"payload": item} for item in OF_OPENAI]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


_CLAUDE = Session(
    agent=AGENTS["claude-code"],
    search=lambda name: ("ToolSearch", {"query": f"select:{name}"}),
    read=("Read", {"file_path": "{file}"}),
    begin=("-p", *CLAUDE),
    goes_on=("-p", "--continue", *CLAUDE),
    servers=_servers_of_claude,
    add=_add_to_claude,
    added=OF_ANTHROPIC,
    environment={"ENABLE_TOOL_SEARCH": "true"},
)
_CODEX = Session(
    agent=AGENTS["codex"],
    search=lambda name: ("tool_search", {"query": name.replace("_", " "), "limit": 1}),
    read=("exec_command", {"cmd": f"cat {FILE}"}),
    begin=("exec", *CODEX),
    goes_on=("exec", "resume", "--last", *CODEX),
    servers=partial(_servers_of_codex, searches=True),
    add=_add_to_codex,
    added=OF_OPENAI,
)
SESSIONS = (
    _CLAUDE,
    replace(_CLAUDE, search=None, environment={"ENABLE_TOOL_SEARCH": "false"}),
    _CODEX,
    replace(_CODEX, search=None, servers=partial(_servers_of_codex, searches=False)),
)


def _looks(server: str, item: str, town: str) -> Call:
    return f"mcp__{server}__{tool_of(item)}", {"town": town}


def tasks(session: Session, file: Path) -> list[Task]:
    """Returns the questions with the calls and replies to them. `file` is the path of the file that is read."""
    name, arguments = session.read
    read: Call = (name, {key: value.replace("{file}", str(file)) for key, value in arguments.items()})

    def searched(call: Call) -> tuple[Call, ...]:
        return (call,) if session.search is None else (session.search(call[0]), call)

    porto, graz = _looks(TOWNS, "bridges", "Porto"), _looks(TOWNS, "rivers", "Graz")
    turku, camogli = _looks(TOWNS, "bridges", "Turku"), _looks(VILLAGES, "harbours", "Camogli")
    asked: list[tuple[str, tuple[Call, ...]]] = [
        (f"what does {FILE} print?", (read,)),
        ("how many bridges does Porto have?", searched(porto)),
        ("what did I ask first?", ()),
        ("which rivers flow through Graz?", searched(graz)),
        ("and how many bridges does Turku have?", (turku,)),
        (f"read {FILE} once more: is it right?", (read,)),
        ("which harbours does Camogli have?", searched(camogli)),
        ("which towns did I ask for?", ()),
        ("how many bridges does Lucca have?", (_looks(TOWNS, "bridges", "Lucca"),)),
        ("and which harbours does Nafplio have?", (_looks(VILLAGES, "harbours", "Nafplio"),)),
    ]
    return [
        Task(number=at, question=f"Question {at:02}: {question}", calls=calls, last=f"This answers number {at}.")
        for at, (question, calls) in enumerate(asked, start=1)
    ]


def _is_turn(body: Mapping[str, Any]) -> bool:
    """Returns whether a body is of the conversation, and not a small request beside it."""
    given = body.get("input")
    items = given if isinstance(given, list) else []
    offers = body.get("tools") or any(item.get("type") == "additional_tools" for item in items)
    return bool(offers and body.get("stream"))


def run_session(
    workspace: Path, model: Path, session: Session, is_real: bool, bodies: Path | None, console: Console
) -> dict[str, Any]:
    """Returns the report. Raises `NotInstalled`, `LiveServerError`."""
    agent, commands = session.agent, installed(session.agent, console.print)
    folder = workspace / session.name
    folder.mkdir()
    asked = tasks(session, folder / "repository" / FILE)
    # The random model computes faster than the disk reads, and the rule that weighs the two would not restore.
    gate = () if is_real else ("--kv-cache-gate", "off")
    flags = ("--policy", "agent", "--served-model-name", "coder", *gate)
    unanswered: list[str] = []
    with Script(folder, [model], asked).daemon("server", folder / "kv", flags, {}) as server:
        server.start()
        with Tap(server.port, _is_turn, server.restart) as tap:
            place = scratch(folder, agent, commands, tap.url)
            place = replace(place, environment={**place.environment, **session.environment})
            for task in asked:
                with step(console, f"{session.name}: {task.question}"):
                    said = _ask(session, place, tap, task)
                if said is not None:
                    console.print(f"{agent.name} did not answer, and said:\n{said[-1500:]}", markup=False)
                    unanswered.append(task.question)
                if task.number == BEGUN:
                    session.add(place.home)
        if bodies is not None:
            tap.keep(bodies, session.name)
            shutil.copy(folder / "server.log", bodies / f"{session.name}.log")
    results = [answer_of_call(call) for task in asked for call in task.calls if call[0].startswith("mcp__")]
    return Findings(
        agent=f"{session.name} ({agent.version})",
        questions=[task.question for task in asked],
        exchanges=tap.exchanges,
        unanswered=unanswered,
        results=results,
        added=[each["type"] for each in session.added],
        num_tracebacks=num_tracebacks(folder / "server.log"),
        hosts_refused=sorted(set(tap.refused_hosts)),
    ).report()


def _ask(session: Session, place: Scratch, tap: Tap, task: Task) -> str | None:
    """Asks the agent a question. Returns None if it said the prepared reply, else what it said."""
    names = (TOWNS,) if task.number < CONNECTS else (TOWNS, VILLAGES)
    begin = session.begin if task.number == 1 else session.goes_on
    arguments = [*begin, *session.servers(place, names), task.question]
    code, said = place.launch(session.agent, ["--url", tap.url, "--", *arguments], ANSWER_LIMIT_S)
    return None if code == 0 and task.last in said else said


def answer_of_call(call: Call) -> str:
    """Returns what the server of tools answers to a call."""
    [item] = [item for item in many_tools.FIELDS if call[0].endswith(f"__{tool_of(item)}")]
    return answer_of(item, call[1]["town"])
