"""The settings with which clients use the daemon, and commands for the daemons of this user."""

from __future__ import annotations

_FOLDER = "diskprefix.extras.clients"
COMMANDS = {
    "launch": f"{_FOLDER}.launch_command:launch",
    "clients": f"{_FOLDER}.clients_command:clients",
    "ps": f"{_FOLDER}.daemons_command:ps",
    "stop": f"{_FOLDER}.daemons_command:stop",
}
