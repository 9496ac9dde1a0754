"""The settings with which clients use the daemon, a file for each: `diskprefix clients` and `diskprefix launch`."""

from __future__ import annotations

_FOLDER = "diskprefix.extras.clients"
COMMANDS = {"launch": f"{_FOLDER}.launch_command:launch", "clients": f"{_FOLDER}.clients_command:clients"}
