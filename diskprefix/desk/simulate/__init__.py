"""The effect of other settings: `--record` writes the workload of a daemon, `diskprefix simulate` replays it."""
