"""Lives of vLLM that begin in seconds: this process has imported vLLM, and forks each of them. Runs in vLLM's
environment.

It reads a `Life` from each line of its input, as JSON, and writes what became of it: `{"answers": [...], "killed": ...,
"ready_s": ...}`. An answer is the number of the prompt, the tokens, their log-probabilities, and how many tokens came
from the store.
"""

from __future__ import annotations

import json
import multiprocessing.context
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tools.connector.small_models import CONTEXT, DTYPES, VOCABULARY, Kind, make

NUM_PROMPTS = 32
_CONVERSATIONS, _FIRST_TOKENS, _TURN_TOKENS = 8, 500, 300
_NEW_TOKENS = 12
_AT_ONCE = 4
_BUDGET = "16MiB"
"""It is small, so that blocks are evicted too."""
_PAGES = 40
"""Of 128 tokens: fewer than the prompts have, so vLLM's own cache evicts, and requests preempt each other."""
_PRIMARY_BYTES = 8 * 2**20
"""Of the tier above ours. It evicts too."""
_START_DEADLINE_S, _LIFE_DEADLINE_S = 240.0, 1200.0


@dataclass(frozen=True)
class Life:
    """One start of vLLM. `store` is the folder of our store, None without one; vLLM uses it through our connector or
    our tier. The life answers each prompt once and ends; or it answers random ones until `kill_after_s` have passed
    since it was ready (since it began, with `kill_in_start`): then its process number `victim` is killed (0: the one
    with the client's side, 1: the scheduler's, 2: the worker), and the others soon after it."""

    seed: int
    store: str | None = None
    through: Literal["connector", "tier"] = "connector"
    kill_after_s: float | None = None
    kill_in_start: bool = False
    victim: int = 0


def prompt(number: int) -> list[int]:
    """The prompts of eight conversations, with one to four turns."""
    turn = number // _CONVERSATIONS
    choose = random.Random(_conversation(number))
    return [choose.randrange(VOCABULARY) for _ in range(_FIRST_TOKENS + turn * _TURN_TOKENS)]


def _conversation(number: int) -> int:
    return number % _CONVERSATIONS


def main() -> None:
    """Serves until its input ends. The arguments are the kind of the model, and its folder, which is made."""
    kind: Kind = "hybrid" if sys.argv[1] == "hybrid" else "llama"
    model = Path(sys.argv[2])
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Not here: torch would start threads.
    os.waitpid(_forked(lambda: make(kind, model)), 0)
    _import_vllm()
    # On a processor vLLM has its own processes spawned, which would import all that again.
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    for line in sys.stdin:
        print(json.dumps(_lived(Life(**json.loads(line)), model, DTYPES[kind])), file=told, flush=True)


def _import_vllm() -> None:
    """All that the processes of vLLM import."""

    import diskprefix.extras.vllm.connector
    import diskprefix.extras.vllm.offload_tier  # noqa: F401
    import tools.connector.processor_spec  # noqa: F401


def _forked(work: Callable[[], None]) -> int:
    """Returns the process, a leader of a session, that does some work and ends."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            work()
            code = 0
        except Exception:  # noqa: BLE001 (nobody above may see it: this is another process)
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _lived(life: Life, model: Path, dtype: str) -> dict[str, Any]:
    """Returns what the life answered until it ended or was killed."""
    began = time.monotonic()
    readable, writable = os.pipe()
    child = _forked(lambda: _live(life, model, dtype, writable))
    os.close(writable)
    lines = _Lines(readable)
    killed = ""
    if life.kill_in_start and life.kill_after_s is not None:
        lines.read_until(began + life.kill_after_s)
    else:
        lines.read_until(began + _START_DEADLINE_S, num_lines=1)
        ready = time.monotonic()
        lines.read_until(ready + (_LIFE_DEADLINE_S if life.kill_after_s is None else life.kill_after_s))
    ready_s = lines.first_at - began if lines.first_at else None
    processes, segments = _processes(child), _segments(child)
    if life.kill_after_s is not None and processes:
        victim = min(life.victim, len(processes) - 1)
        killed = ("client", "scheduler", "worker")[min(victim, 2)]
        _kill([processes[victim]])
        lines.read_until(time.monotonic() + random.Random(life.seed).uniform(0, 0.5))
    _kill(processes)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    lines.read_until(time.monotonic() + 1.0)
    os.close(readable)
    for segment in segments:
        # Whoever would remove it was killed too.
        segment.unlink(missing_ok=True)
    return {
        "answers": [json.loads(line) for line in lines.whole[1:]],
        "killed": killed,
        "ready_s": ready_s,
        "code": os.waitstatus_to_exitcode(status),
    }


class _Lines:
    """Lines that come from a pipe; the last one may be cut by a kill."""

    def __init__(self, readable: int) -> None:
        self._readable, self._rest, self._is_open = readable, b"", True
        self.whole: list[bytes] = []
        self.first_at: float | None = None

    def read_until(self, deadline: float, num_lines: int | None = None) -> None:
        """Reads until the time is over, nobody writes any more, or the lines are complete."""
        while self._is_open and (num_lines is None or len(self.whole) < num_lines):
            if not select.select([self._readable], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return
            data = os.read(self._readable, 1 << 16)
            self._is_open = bool(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.whole += lines
            if self.whole and self.first_at is None:
                self.first_at = time.monotonic()


def _live(life: Life, model: Path, dtype: str, told: int) -> None:
    """Starts vLLM and answers. Writes a line once it is ready, and one for each answer."""
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {} if life.store is None else {"kv_transfer_config": _transfer_config(life)}
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=CONTEXT,
        max_num_seqs=_AT_ONCE,
        enforce_eager=True,
        num_gpu_blocks_override=_PAGES,
        **more,
    )
    os.write(told, b"ready\n")
    choose, numbers = random.Random(life.seed), list(range(NUM_PROMPTS))
    sampling = SamplingParams(
        max_tokens=_NEW_TOKENS,
        temperature=0,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {}},
    )
    seen: set[int] = set()
    while True:
        is_last = life.kill_after_s is None
        batch = numbers[:_AT_ONCE] if is_last else choose.sample(numbers, choose.randint(1, _AT_ONCE))
        outputs = llm.generate([{"prompt_token_ids": prompt(n)} for n in batch], sampling, use_tqdm=False)
        for number, output in zip(batch, outputs, strict=True):
            (reply,) = output.outputs
            tokens = list(reply.token_ids)
            logprobs = [step[token].logprob for step, token in zip(reply.logprobs, tokens, strict=True)]
            cache = (output.kv_transfer_params or {}).get("prefix_cache", {})
            restored = cache.get("restored", 0)
            if life.through == "tier" and _conversation(number) not in seen:
                # Nothing of the conversation was in vLLM's own cache.
                restored = output.num_cached_tokens
            os.write(told, json.dumps([number, tokens, logprobs, restored]).encode() + b"\n")
        seen.update(map(_conversation, batch))
        if is_last and not (numbers := numbers[_AT_ONCE:]):
            return


def _transfer_config(life: Life) -> dict[str, Any]:
    store: dict[str, Any] = {"path": life.store, "budget": _BUDGET}
    if life.through == "connector":
        return {
            "kv_connector": "DiskPrefixConnector",
            "kv_connector_module_path": "diskprefix.extras.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": store | {"scope": "full", "min_tokens": 128},
        }
    tier = {"type": "DiskPrefixTier", "module_path": "diskprefix.extras.vllm.offload_tier"} | store
    spec = {"spec_name": "ProcessorTieringSpec", "spec_module_path": "tools.connector.processor_spec"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": spec | {"cpu_bytes_to_use": _PRIMARY_BYTES, "secondary_tiers": [tier]},
    }


def _processes(child: int) -> list[int]:
    """The process of a life, and those below it that are vLLM's, each behind the one that began it."""
    found = [child]
    with suppress(OSError):
        for number in Path(f"/proc/{child}/task/{child}/children").read_text(encoding="ascii").split():
            if b"resource_tracker" not in Path(f"/proc/{number}/cmdline").read_bytes():
                found += _processes(int(number))
    return found


def _segments(child: int) -> set[Path]:
    """The shared memory that a life has mapped."""
    found: set[Path] = set()
    for process in _processes(child):
        with suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
            found |= {Path(line[line.index("/dev/shm/") :]) for line in maps if "/dev/shm/" in line}
    return {segment for segment in found if segment.exists()}


def _kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
