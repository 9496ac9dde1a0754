"""Help with the first start: `doctor` checks a machine, `service` runs the daemon from login on."""

PLACE = 4
COMMANDS = {
    "doctor": "doctor_command:doctor",
    "service": "service_command:service",
}
