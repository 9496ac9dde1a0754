"""The prepared replies of `tools/agents`: the daemon reads its own model's calls, and the turns are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from diskprefix.daemon.chat.messages import Conversation, Message, TextPart, ToolCall
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from tests.daemon.chat.families.families import folder as sources_folder
from tests.daemon.chat.output.replies import read, tool
from tools.measuring.environments import NotInstalled
from tools.real_agents.agents import AGENTS
from tools.real_agents.install import newest
from tools.real_agents.scripted_daemon import SIDE_REPLY, prepared_reply, reply_writer
from tools.real_agents.templates import TEMPLATES, with_template

PADDING = 64
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look", {"path": "a b.py", "lines": [1, 2]}),
    ("mend", {"path": 'x"\n'}),
]
TASKS: list[dict[str, Any]] = [
    {"task": "Rest.", "calls": [], "last": "Not this one."},
    {"task": "Mend it.", "calls": CALLS, "last": "Done.", "thought": "One call at a time."},
]


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model without weights whose vocabulary is padded, with one of the templates."""
    sources_folder()
    real, size = tmp_path_factory.mktemp("real"), 256 + PADDING
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: id for id, text in enumerate(letters)} | {f"[PAD{id}]": id for id in range(256, size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(real / "tokenizer.json"))
    for name, content in (
        ("config.json", {"model_type": "qwen2", "vocab_size": size}),
        ("generation_config.json", {}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (real / name).write_text(json.dumps(content), encoding="utf-8")
    return with_template(tmp_path_factory.mktemp("made") / "model", real, request.param)


def test_a_task_is_done_call_by_call_and_the_daemon_reads_each_call(model: Path) -> None:
    tokenizer = read_tokenizer(model, None)
    renderer = PromptRenderer(tokenizer, vocab_size=256 + PADDING, max_positions=8192)
    renderer.warm_up()
    written = reply_writer(AutoTokenizer.from_pretrained(model))
    tools = [tool(name, **{key: {} for key in arguments}) for name, arguments in CALLS]
    question = Message(role="user", content=[TextPart("Mend it.", "messages.0")], path="messages.0")
    messages = [
        Message(role="user", content=[TextPart("Rest.", "messages.0")], path="messages.0"),
        Message(role="assistant", content=[TextPart("I rest.", "messages.1")], path="messages.1"),
        question,
    ]

    def replied(messages: list[Message], tools: list[Any] | None) -> Any:
        reply = prepared_reply(renderer.text_of(Conversation(messages, tools)), TASKS, written)
        return read(renderer.output_format, [reply], tools or [])

    for name, arguments in CALLS:
        reply = replied(messages, tools)
        assert reply.parsed_calls == [(name, arguments)]
        call = ToolCall(id=f"call_{name}", name=name, arguments=arguments)
        result = Message(role="tool", tool_call_id=call.id, content=[TextPart("ok", "")], path="messages.1")
        messages += [Message(role="assistant", tool_calls=[call], path="messages.1"), result]
    assert replied(messages, tools).content.strip() == "Done."
    assert replied([question], None).content.strip() == SIDE_REPLY
    ends = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    assert tokenizer.eos_token_id in ends["eos_token_id"]
    assert min(ends["eos_token_id"]) >= 256


def test_an_unknown_newest_version_has_the_reason_of_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error code E404' >&2\necho 'npm error 404 Not Found' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    agent = next(agent for agent in AGENTS.values() if not agent.is_python)
    with pytest.raises(NotInstalled) as refused:
        newest(agent)
    assert str(refused.value) == (
        f"the newest version of {agent.package} is not known: npm error code E404 npm error 404 Not Found"
    )
