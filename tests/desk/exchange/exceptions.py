"""What conventions except of this room: see `tests.exceptions`."""

READ_WITHOUT_A_DAEMON = {"desk/exchange/commands.py": "commands"}
