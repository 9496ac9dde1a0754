"""What conventions except of this room: see `tests.exceptions`."""

NAME_SCOPES = {"diskprefix/desk/simulate/simulate_command.py": "the help of `simulate`"}
