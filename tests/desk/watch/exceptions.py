"""What conventions except of this room: see `tests.exceptions`."""

READ_WITHOUT_A_DAEMON = {"desk/watch/inspect/inspect_command.py": "a command"}
MAY_HANG = {"desk/watch/dashboard/entries.py": "by `ask`"}
