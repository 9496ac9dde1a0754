from __future__ import annotations

from tests.desk.conftest import folder, run

__all__ = ["folder", "run"]
