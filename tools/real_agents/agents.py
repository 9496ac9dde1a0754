"""The agents: their packages, their arguments, and the calls of their own tools that do the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TASK = "sums.py must print 5 and does not. Read it, mend it, run it, and say what it prints."
LATER = "Which line of sums.py was wrong?"
"""The next question of the same conversation."""
FILE = "sums.py"
BROKEN, MENDED = "return a - b", "return a + b"
SOURCE = f"def add(a, b):\n    {BROKEN}\n\n\nprint('the sum is', add(2, 3))\n"
PRINTED = "the sum is 5"
LAST_REPLY = "I have mended sums.py. It prints: the sum is 5"
EDIT = f"{FILE}\n```python\n<<<<<<< SEARCH\n    {BROKEN}\n=======\n    {MENDED}\n>>>>>>> REPLACE\n```\n"
"""An edit as Aider reads it."""

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """`calls` are the calls in the prepared replies, one per turn; `{file}` stands for the path of the file.

    `later` are the arguments with which the conversation goes on with the question `LATER`. An agent without tools has
    the first reply `said` instead of calls. `version` and `postinstall` belong to its npm package, or to its PyPI
    package if `is_python`. `program` is the program in that package if npm does not link it under the agent's name.
    `environment` is added to the environment of its launch.
    """

    name: str
    package: str
    version: str
    arguments: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    later: tuple[str, ...] = ()
    said: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    postinstall: str | None = None
    program: str | None = None
    is_python: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.package}{'==' if self.is_python else '@'}{self.version}"


_RUN = f"python3 {FILE}"
CLAUDE = ("--permission-mode", "acceptEdits", "--allowedTools", "Bash")
# It runs commands without a sandbox of its own, which needs rights that containers do not give.
CODEX = (
    *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    *("-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false"),
)
AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            name="qwen-code",
            package="@qwen-code/qwen-code",
            version="0.24.4",
            arguments=("--yolo", TASK),
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
            version="2.1.332",
            arguments=("-p", *CLAUDE, "--", TASK),
            later=("-p", "--continue", *CLAUDE, "--", LATER),
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
            version="0.171.0",
            arguments=("exec", *CODEX, TASK),
            later=("exec", "resume", "--last", *CODEX, LATER),
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
            arguments=("run", "--auto", TASK),
            later=("run", "--auto", "--continue", LATER),
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
        Agent(
            name="cline",
            package="cline",
            version="3.0.65",
            arguments=("--auto-approve", "true", TASK),
            calls=(
                ("read_files", {"files": [{"path": "{file}"}]}),
                ("editor", {"path": "{file}", "old_text": BROKEN, "new_text": MENDED}),
                ("run_commands", {"commands": [_RUN]}),
            ),
        ),
        Agent(
            name="continue",
            package="@continuedev/cli",
            version="1.5.47",
            arguments=("--auto", "-p", TASK),
            calls=(
                ("Read", {"filepath": "{file}"}),
                ("Edit", {"file_path": "{file}", "old_string": BROKEN, "new_string": MENDED}),
                ("Bash", {"command": _RUN}),
            ),
        ),
        Agent(
            name="pi",
            package="@mariozechner/pi-coding-agent",
            version="0.73.1",
            arguments=("-p", TASK),
            calls=(
                ("read", {"path": "{file}"}),
                ("edit", {"path": "{file}", "edits": [{"oldText": BROKEN, "newText": MENDED}]}),
                ("bash", {"command": _RUN}),
            ),
        ),
        Agent(
            name="goose",
            package="@aaif/goose-binary-linux-x64",
            version="1.52.0",
            arguments=("run", "--text", TASK),
            calls=(
                ("shell", {"command": f"cat {FILE}"}),
                ("edit", {"path": "{file}", "before": BROKEN, "after": MENDED}),
                ("shell", {"command": _RUN}),
            ),
            environment={"GOOSE_MODE": "auto"},
            program="bin/goose",
        ),
        Agent(
            name="aider",
            package="aider-chat",
            version="0.86.2",
            arguments=(
                *("--yes-always", "--no-auto-commits", "--no-gitignore", "--no-analytics", "--no-check-update"),
                *(
                    "--edit-format",
                    "diff",
                    "--auto-test",
                    "--test-cmd",
                    f"{_RUN} | tee printed.txt",
                    "--message",
                    TASK,
                    FILE,
                ),
            ),
            said=EDIT,
            is_python=True,
        ),
    )
}
