"""The devices on which tests run that are for each of them. Imports nothing of the package: vLLM's environment may have
another version of transformers."""

from __future__ import annotations

import torch

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
"""A machine with a GPU runs the exactness tests on it too."""
