"""What conventions except of this room: see `tests.exceptions`."""

READ_WITHOUT_A_DAEMON = {"desk/setup/doctor_machine.py": "a command"}
MAY_NAME_TYPES = {"desk/setup/doctor_llama.py": "the name of an engine"}
