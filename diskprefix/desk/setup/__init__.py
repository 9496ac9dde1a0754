"""Help with the first start: `doctor` checks a machine, `service` runs the daemon from login on."""
