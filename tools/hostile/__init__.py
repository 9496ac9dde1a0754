"""What `tools/bench hostile` sends to a daemon, and what it looks at meanwhile."""
