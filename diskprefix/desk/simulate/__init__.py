"""The effect of other settings: `--record` writes the workload of a daemon, `diskprefix simulate` replays it."""

PLACE = 7
COMMANDS = {"simulate": "simulate_command:simulate"}
