"""What conventions except of this room: see `tests.exceptions`."""

NAME_SCOPES = {"diskprefix/desk/warm/warm_command.py": "the help of `warm`"}
