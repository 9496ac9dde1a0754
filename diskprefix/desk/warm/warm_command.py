"""`diskprefix warm`: prefill prompts ahead of time, so that the first request for them is a hit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from urllib.parse import quote

import click
from msgspec import Struct
from msgspec.structs import asdict

from diskprefix.daemon.cli.options import api_key_option, option
from diskprefix.desk.shared.daemon_call import Answer, Call, Say, running_daemon
from diskprefix.desk.shared.daemon_choice import shared_daemon
from diskprefix.desk.shared.model_choice import ask_served
from diskprefix.desk.shared.own_daemon import daemon_url, url_option
from diskprefix.desk.shared.recipes.recipe import Served, agent_called
from diskprefix.desk.shared.tooling import print_json, say, status
from diskprefix.desk.warm.first_prompt import first_prompt
from diskprefix.desk.warm.warm_prompts import AgentItem, Json, WarmItem, read_items
from diskprefix.errors import InvalidRequest, NotReady, SettingsError
from diskprefix.printable import printable_only, shown
from diskprefix.scope import parse_scope
from diskprefix.units import counted

_NOT_LOADED = {"pending_bytes": 0, "saved_bytes": 0, "dropped": 0, "evicted_blocks": 0, "error": None}
"""The counts of a model that the first prompt loads."""
_PATIENCE_S = 600.0
"""The time limit for retries while the queue is full, and for a write."""
_PAUSE_S = 1.0
_POLL_S = 0.05
_SAVED = {"queued": "saved", "stored": "saved before"}
"""The values of `prefix_cache.saved` of a saved prompt."""

_EPILOG = """\b
Examples:
  diskprefix warm --system prompt.txt                  a system prompt, for all chats that begin with it
  diskprefix warm document.txt                         a raw prompt, as /v1/completions takes it
  diskprefix warm conversation.json                    a list of messages, or a request body
  diskprefix warm yesterday.jsonl                      one request body or list of messages per line
  diskprefix warm --agent claude                       the prompt with which Claude Code begins each session

Exit codes: 0 done; 1 a prompt failed, or no daemon answers; 2 wrong usage.
"""


class WarmResult(Struct, frozen=True, kw_only=True):
    """The result of one prompt. `reason` says why it was not saved, and `error` why it was not computed."""

    where: str
    prompt_tokens: int = 0
    restored: int = 0
    saved: str = "none"
    reason: str | None = None
    seconds: float = 0.0
    error: str | None = None


class Target(Struct, frozen=True):
    """A model of the daemon."""

    call: Call
    model: str

    def state(self, otherwise: Json | None = None) -> Json | None:
        """Returns the counts of the cache, None if the key may not read them, and `otherwise` if the model is not
        loaded. Raises `NotReady`."""
        answer = self.call("GET", f"/props?model={quote(self.model, safe='')}", None)
        if answer.status in (401, 403):
            return None
        if answer.status != 200:
            if otherwise is not None:
                return otherwise
            raise NotReady(f"the daemon does not report what it has written: {answer.message}")
        state: Json = answer.body["full_cache"]["state"]
        return state


@click.command(short_help="Prefill and save prompts ahead of time.", epilog=_EPILOG)
@click.argument("files", nargs=-1, metavar="[FILE...]", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@option(
    "--agent",
    metavar="NAME",
    multiple=True,
    default=(),
    show_default=False,
    help="The first prompt of this installed agent, as launch starts it: claude, codex, opencode or qwen. It runs once "
    "in the current folder, read-only and without a network, and gets no reply. May be repeated.",
)
@option(
    "--scope",
    metavar="SCOPE",
    default="full",
    help="How much of each prompt is kept: full, auto:N or N. It overrides the scope in a body.",
)
@option("--system", is_flag=True, help="Each text FILE is the system message of a chat, not a raw prompt.")
@option("--json", is_flag=True, help="Print JSON for scripts, and nothing else.")
@option("--model", metavar="NAME", show_default="one in memory", help="The model, if the daemon has several.")
@url_option()
@api_key_option(
    "The key to send. The prompts are saved for this key. Other users can see the option in the process list, but not "
    "the variable.",
    otherwise="the key that this user's agents send",
)
def warm(
    files: tuple[str, ...],
    agent: tuple[str, ...],
    scope: str,
    system: bool,
    json: bool,
    model: str | None,
    url: str | None,
    api_key: str | None,
) -> int:
    """Compute prompts and save their state on disk before the first request needs them.

    Each FILE is a text, a JSON list of messages, a JSON request body, or a .jsonl file with one list or body per line.
    The name - stands for standard input. A text is a raw prompt, which chats cannot use. With --system it is the
    system message of a chat: every chat that begins with this system message uses its state.

    With --agent, the prompt is the one with which each session of an agent begins: its system message, its tools and
    its settings. Only the question is then left to compute.

    The prompts are sent to a running daemon. Prompts that are already saved are not computed again.

    Fields of a body that do not change the prompt are ignored: model, response_format, everything about the reply
    (max_tokens, stream, n, stop, logprobs, sampling and so on), and scope, window and save of prefix_cache.

    The command returns when everything is on disk. If a prompt fails, the command reports its file and line and
    continues.
    """
    if not files and not agent:
        raise click.UsageError("nothing to compute: give a FILE or --agent NAME")
    parsed = parse_scope(scope, param="--scope")
    if parsed.kind == "off":
        raise SettingsError("--scope: off keeps nothing, so there is nothing to warm")
    started = time.monotonic()
    results: list[WarmResult] = []
    url = daemon_url(url)
    call = running_daemon(url, api_key)
    served = ask_served(call, url, model, api_key).served
    target = Target(call, served.model)
    before = after = target.state(_NOT_LOADED)
    prompts = _warm_files(target, files, str(parsed), is_system=system)
    for result in chain(_warm_agents(target, served, agent, str(parsed)), prompts):
        results.append(result)
        if result.error is not None:
            click.echo(f"error: {printable_only(result.where)}: {result.error}", err=True)
            continue
        if not json:
            click.echo(f"{printable_only(result.where)}: {_result_text(result)}")
        after = _wait_written(target)
    total = _total(results, before, after) | {"seconds": round(time.monotonic() - started, 3)}
    if json:
        print_json({"total": total, "prompts": [asdict(result) for result in results]})
    else:
        click.echo(_summary(total))
        for line in _warnings(total, after):
            click.echo(f"warning: {line}", err=True)
    return 1 if total["failed"] or total["dropped"] else 0


def _warm_files(target: Target, files: Sequence[str], scope: str, *, is_system: bool) -> Iterator[WarmResult]:
    """Computes the prompts one by one. A prompt or a file that fails does not stop the others."""
    for name in files:
        try:
            for item in read_items(name, is_system=is_system):
                with status(item.where) as say:
                    result = _warm_item(target, item, scope, say)
                yield result
        except (InvalidRequest, OSError) as error:
            message = error.message if isinstance(error, InvalidRequest) else error.strerror or str(error)
            yield WarmResult(where=name, error=message)


def _warm_agents(target: Target, served: Served, names: Sequence[str], scope: str) -> Iterator[WarmResult]:
    """Computes the first prompts of agents. An agent that fails does not stop the others."""
    for name in names:
        agent = agent_called(name)
        try:
            with status(f"asking {agent.title} for its first prompt"):
                asked = first_prompt(agent, served, shared_daemon().folder / agent.name)
            if asked.had_network:
                say(f"warning: {agent.title} ran with a network, as this system has no way to run it without")
            with status(agent.title) as progress:
                result = _warm_item(target, AgentItem(agent.title, asked.route, asked.body), scope, progress)
            yield result
        except SettingsError as error:
            yield WarmResult(where=name, error=error.message)


def _warm_item(target: Target, item: WarmItem | AgentItem, scope: str, say: Say) -> WarmResult:
    started = time.monotonic()
    try:
        path, body = item.request(scope)
    except InvalidRequest as error:
        return WarmResult(where=item.where, error=error.message)
    answer = _send(target.call, path, body | {"model": target.model}, say)
    if answer.status == 401:
        raise SettingsError(f"--api-key: {answer.message}")
    if answer.status != 200:
        return WarmResult(where=item.where, error=answer.message)
    cache = answer.body["prefix_cache"]
    return WarmResult(
        where=item.where,
        prompt_tokens=_prompt_tokens(answer.body["usage"]),
        restored=cache["restored"],
        saved=cache["saved"],
        reason=None if cache["saved"] in _SAVED else cache.get("dropped_because", cache["boundary_reason"]),
        seconds=round(time.monotonic() - started, 3),
    )


def _prompt_tokens(usage: Json) -> int:
    """Returns the tokens of a prompt from the usage of any of the APIs. Anthropic's counts its parts."""
    parts = ("cache_creation_input_tokens", "cache_read_input_tokens")
    return int(usage.get("prompt_tokens") or usage["input_tokens"] + sum(usage.get(part) or 0 for part in parts))


def _send(call: Call, path: str, body: Json, say: Say) -> Answer:
    """Sends a request, and repeats it while the queue is full."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        answer = call("POST", path, body)
        if answer.status not in (429, 503) or time.monotonic() > deadline:
            return answer
        say(answer.message)
        time.sleep(_PAUSE_S)


def _wait_written(target: Target) -> Json | None:
    """Waits until everything that is pending now is written, and returns `target.state()`. Without the wait, the daemon
    may need the memory of unwritten state for the next prompt, and drop it. State of other clients may still wait."""
    first = state = target.state()
    deadline = time.monotonic() + _PATIENCE_S
    with status("writing"):
        while first and state and state["pending_bytes"]:
            if state["saved_bytes"] - first["saved_bytes"] >= first["pending_bytes"]:
                break
            if time.monotonic() > deadline:
                raise NotReady(
                    f"the daemon did not write its pending state within {_PATIENCE_S:.0f} s; its log may say why"
                )
            time.sleep(_POLL_S)
            state = target.state()
    return state


def _total(results: Sequence[WarmResult], before: Json | None, after: Json | None) -> Json:
    done = [result for result in results if result.error is None]
    return {
        "prompts": len(results),
        "failed": len(results) - len(done),
        "not_saved": sum(result.saved not in _SAVED for result in done),
        "prompt_tokens": sum(result.prompt_tokens for result in done),
        "restored_tokens": sum(result.restored for result in done),
        "on_disk": after is not None and not after["error"],
    } | {name: after[name] - before[name] if before and after else 0 for name in ("dropped", "evicted_blocks")}


def _warnings(total: Json, after: Json | None) -> Iterator[str]:
    if after is None:
        yield "only the key named admin may ask whether everything is on disk; the daemon writes within seconds"
    elif after["error"]:
        yield f"nothing is kept on disk: {shown(str(after['error']))}"
    if total["dropped"]:
        yield f"{counted(total['dropped'], 'prompt')} did not fit into the cache meanwhile; see the daemon's log"
    if total["evicted_blocks"]:
        blocks = counted(total["evicted_blocks"], "block")
        cause = (after or {}).get("full_disk") or "--kv-cache-budget is too small for everything"
        yield f"{blocks} had to be evicted meanwhile; {cause}"


def _summary(total: Json) -> str:
    tokens, restored = total["prompt_tokens"], total["restored_tokens"]
    prompts = f"{counted(total['prompts'] - total['failed'], 'prompt')} of {counted(tokens, 'token')}"
    shares = f"{restored:,} restored and {tokens - restored:,} computed in {total['seconds']:.1f} s"
    problems = [f"{total[name]} {name.replace('_', ' ')}" for name in ("not_saved", "failed") if total[name]]
    return ", ".join([prompts, shares, *problems])


def _result_text(result: WarmResult) -> str:
    not_saved = f"not saved: {shown(result.reason or 'nothing to keep', 300)}".replace("_", " ")
    tokens, saved = counted(result.prompt_tokens, "token"), _SAVED.get(result.saved, not_saved)
    return f"{tokens}, {result.restored:,} restored, {saved}, {result.seconds:.1f} s"
