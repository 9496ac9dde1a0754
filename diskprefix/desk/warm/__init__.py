"""Prefill ahead of time: `diskprefix warm`."""

PLACE = 5
COMMANDS = {"warm": "warm_command:warm"}
