"""Help with the first start: `diskprefix doctor` checks a machine, `diskprefix init` writes a settings file."""

from __future__ import annotations

COMMANDS = {
    "doctor": "diskprefix.extras.setup.doctor_command:doctor",
    "init": "diskprefix.extras.setup.init_command:init",
}
