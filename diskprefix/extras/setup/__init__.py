"""Help with the first start: `doctor` checks a machine, `service` runs the daemon from login on."""

from __future__ import annotations

COMMANDS = {
    "doctor": "diskprefix.extras.setup.doctor_command:doctor",
    "service": "diskprefix.extras.setup.service_command:service",
}
