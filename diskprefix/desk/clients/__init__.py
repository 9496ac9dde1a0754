"""Agents and other clients: their settings, and commands for the daemons of this user."""

PLACE = 2
COMMANDS = {
    "launch": "launch_command:launch",
    "clients": "clients_command:clients",
    "ps": "daemons_command:ps",
    "stop": "daemons_command:stop",
}
