"""Imports transformers, where a model has no plan or takes pictures."""

from __future__ import annotations

import os
from types import ModuleType

INSTALL = "pip install torch transformers accelerate"


def transformers_quietly() -> ModuleType:
    """Returns transformers, without its notices and progress bars unless TRANSFORMERS_VERBOSITY is set."""
    import transformers
    from transformers.utils import logging

    if not os.environ.get("TRANSFORMERS_VERBOSITY"):
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    module: ModuleType = transformers
    return module
