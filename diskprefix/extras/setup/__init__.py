"""Help with the first start: `diskprefix doctor` checks a machine."""

from __future__ import annotations

COMMANDS = {
    "doctor": "diskprefix.extras.setup.doctor_command:doctor",
}
