"""The four agents: how each is installed and started, and the calls of its own tools that do the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TASK = "sums.py must print 5 and does not. Read it, mend it, run it, and say what it prints."
FILE = "sums.py"
BROKEN, MENDED = "return a - b", "return a + b"
SOURCE = f"def add(a, b):\n    {BROKEN}\n\n\nprint('the sum is', add(2, 3))\n"
PRINTED = "the sum is 5"
LAST_REPLY = "I have mended sums.py. It prints: the sum is 5"

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """`calls` are those that a prepared reply makes, one a turn; `{file}` stands for the path of the file.

    `version` and `postinstall` are of its npm package, `environment` is beside that of its recipe.
    """

    name: str
    package: str
    version: str
    command: tuple[str, ...]
    calls: tuple[Call, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    postinstall: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.package}@{self.version}"


_RUN = f"python3 {FILE}"
AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            name="qwen-code",
            package="@qwen-code/qwen-code",
            version="0.15.10",
            command=("qwen", "--yolo", TASK),
            calls=(
                ("read_file", {"file_path": "{file}"}),
                ("edit", {"file_path": "{file}", "old_string": BROKEN, "new_string": MENDED}),
                ("run_shell_command", {"command": _RUN, "is_background": False}),
            ),
            environment={"SANDBOX": "none"},
        ),
        Agent(
            name="claude-code",
            package="@anthropic-ai/claude-code",
            version="2.1.197",
            command=(
                *("claude", "--exclude-dynamic-system-prompt-sections", "-p"),
                *("--permission-mode", "acceptEdits", "--allowedTools", "Bash", "--", TASK),
            ),
            calls=(
                ("Read", {"file_path": "{file}"}),
                ("Edit", {"file_path": "{file}", "old_string": BROKEN, "new_string": MENDED}),
                ("Bash", {"command": _RUN, "description": "Run the program"}),
            ),
            environment={"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1"},
            postinstall="install.cjs",
        ),
        Agent(
            name="codex",
            package="@openai/codex",
            version="0.169.0",
            # It runs commands without a sandbox of its own, which needs rights that containers do not give.
            command=(
                *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
                *("-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false", TASK),
            ),
            calls=(
                ("exec_command", {"cmd": f"cat {FILE}"}),
                ("exec_command", {"cmd": f"sed -i 's/{BROKEN}/{MENDED}/' {FILE}"}),
                ("exec_command", {"cmd": _RUN}),
            ),
        ),
        Agent(
            name="opencode",
            package="opencode-ai",
            version="1.18.33",
            command=("opencode", "run", "--auto", TASK),
            calls=(
                ("read", {"filePath": "{file}"}),
                ("edit", {"filePath": "{file}", "oldString": BROKEN, "newString": MENDED}),
                ("bash", {"command": _RUN, "description": "Run the program"}),
            ),
            environment={
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_SHARE": "1",
                "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            },
            postinstall="postinstall.mjs",
        ),
    )
}
