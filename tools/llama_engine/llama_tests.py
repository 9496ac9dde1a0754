"""The tests of the engine `llama`, in the environment of a backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from tools.llama_engine.llama_environment import BACKEND, environment_of, installed, variables_of
from tools.models.real import print_report

ENGINE_TESTS = ("tests/runtime/llama",)
SUITES = (
    "tests/exactness/test_restart.py",
    "tests/exactness/test_exactness.py::test_models_that_are_swapped_unloaded_and_killed_answer_and_save_what_they_do_alone",
    "tests/daemon/router/test_router_processes.py",
    "tests/daemon/ollama/test_ollama.py",
    "tests/daemon/server/process",
    "tests/daemon/server/test_anthropic_client.py",
    "tests/daemon/server/test_deleted_prompts.py",
    "tests/daemon/server/test_openai_client.py",
    "tests/daemon/server/test_replay.py",
    "tests/daemon/server/test_responses.py",
    "tests/test_tour.py",
)
"""Suites of every engine, whose daemons get `--runtime llama` here (`tests/runtimes.py`)."""
_ROOT = Path(__file__).parents[2]


@click.command()
@BACKEND
def install(backend: str | None) -> None:
    """Compile llama.cpp's library for a backend, into an environment in the cache folder. Prints its Python.

    Takes ten minutes or more, once for each backend. Says what is missing.
    """
    print(installed(backend or "cpu", print_report))


@click.command(context_settings={"ignore_unknown_options": True})
@BACKEND
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tests(backend: str | None, arguments: tuple[str, ...]) -> None:
    """Run the tests of the engine, and suites of every engine with it. ARGUMENTS go to pytest; a path replaces the
    suites. Ends as pytest does."""
    python = environment_of(backend, print_report)
    named = any(argument.startswith("tests/") for argument in arguments)
    command = [str(python), "-P", "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *arguments]
    ended = subprocess.run(
        [*command, *(() if named else (*ENGINE_TESTS, *SUITES))],
        cwd=_ROOT,
        env=os.environ | variables_of(backend) | {"DISKPREFIX_TEST_RUNTIME": "llama"},
        check=False,
    )
    sys.exit(ended.returncode)
