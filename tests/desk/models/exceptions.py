"""What conventions except of this room: see `tests.exceptions`."""

CALL_THEMSELVES = {"desk/models/plan_table.py": {"_fields", "_flat"}}
"""For the configurations of models."""
