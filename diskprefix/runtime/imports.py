"""Imports transformers, where a model has no plan or takes pictures."""

from __future__ import annotations

import os
import shlex
import sys
from types import ModuleType

_REQUIREMENTS = {"torch": "<2.14", "transformers": "<5.25", "accelerate": ""}
PACKAGES = frozenset(_REQUIREMENTS)
"""The packages of the extra `transformers`, which a model with a plan does not need."""
INSTALL = shlex.join([sys.executable, "-m", "pip", "install", *map("".join, _REQUIREMENTS.items())])
"""The command that installs the extra `transformers`, also in an environment that uv or pipx made for diskprefix."""


def transformers_quietly() -> ModuleType:
    """Returns transformers, without its notices and progress bars unless TRANSFORMERS_VERBOSITY is set."""
    import transformers
    from transformers.utils import logging

    if not os.environ.get("TRANSFORMERS_VERBOSITY"):
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    module: ModuleType = transformers
    return module
