"""The settings with which clients use the daemon, one file for each client: `diskprefix clients`."""

from __future__ import annotations

COMMANDS = {"clients": "diskprefix.extras.clients.clients_command:clients"}
