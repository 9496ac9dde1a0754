"""Prefill ahead of time: `diskprefix warm`."""

from __future__ import annotations

COMMANDS = {"warm": "diskprefix.extras.warm.warm_command:warm"}
