"""Pictures in a prompt: the tokens of the processor's text, with the names of the pictures in them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import AddedToken

from diskprefix.daemon.chat.encoder import Encoder
from diskprefix.daemon.chat.known_parts import OwnedParts
from diskprefix.daemon.chat.messages import (
    CacheMark,
    ContentPart,
    Conversation,
    ImagePart,
    Message,
    OtherPart,
    TextPart,
    ToolCall,
)
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.compression.compression import fit
from diskprefix.errors import InvalidRequest
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from diskprefix.tokens import picture_ids
from diskprefix.values import NO_ASKER, Asker, Picture, Prompt
from tests.daemon.chat.rendering import rendered
from tests.daemon.chat.turns import Model
from tests.daemon.server.chat_model import CHAT_TEMPLATE, write_tokenizer

PARTS = """{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}"""
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<start>", "<soft>", "<end>")
NEWLINES = [AddedToken("\n" * n, special=False, normalized=False) for n in (2, 3, 4)]
"""As Gemma has them."""


@dataclass
class Processor:
    """Reads files whose first byte says how many tokens they have."""

    written: str
    """What the template writes for a picture."""
    before: str
    placeholder: str
    after: str
    tokenizer: Any
    scale: int = 1
    num_missing: int = 0
    problem: str | None = None
    seen: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset({self.mark, self.placeholder})

    @property
    def mark(self) -> str:
        return self.written.removeprefix("<|vision_start|>").removesuffix("<|vision_end|>")

    @property
    def token_id(self) -> int:
        return int(self.tokenizer.backend_tokenizer.token_to_id(self.placeholder))

    def read_image(
        self,
        content: bytes,
        *,
        detail: str,
        param: str,
        beside: Sequence[Picture] = (),
        asker: Asker = NO_ASKER,  # noqa: ARG002
    ) -> Picture:
        self.seen.append((param, detail, len(beside)))
        text = self.before + self.placeholder * (content[0] * self.scale - self.num_missing) + self.after
        name = hashlib.sha256(content).digest()[:16]
        return Picture(name, text, content[0] * self.scale, {}, f"{content[0]}x1", len(content), param, dict)

    def can_decode(self, picture: Picture, asker: Asker) -> bool:  # noqa: ARG002
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, more_special_tokens=SPECIAL)
    return folder


@pytest.fixture(params=["qwen", "gemma"])
def processor(request: pytest.FixtureRequest, folder: Path) -> Processor:
    tokenizer = read_tokenizer(folder, None)
    tokenizer.backend_tokenizer.add_tokens(NEWLINES)
    if request.param == "qwen":
        made = Processor("<|vision_start|><|image_pad|><|vision_end|>", "", "<|image_pad|>", "", tokenizer)
    else:
        made = Processor("<start>", "\n\n<start>", "<soft>", "<end>\n\n", tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message.content }}", PARTS.replace("IMAGE", made.written))
    return made


def renderer_of(processor: Processor, /, **options: Any) -> PromptRenderer:
    tokenizer = processor.tokenizer
    given: dict[str, Any] = {"processor": processor, "vocab_size": len(tokenizer), "max_positions": 1 << 17} | options
    return PromptRenderer(tokenizer, **given)


@pytest.fixture
def renderer(processor: Processor) -> PromptRenderer:
    return renderer_of(processor)


def picture(num_tokens: int, color: bytes = b"red") -> ImagePart:
    content = base64.b64encode(bytes([num_tokens]) + color).decode()
    return ImagePart(f"data:image/png;base64,{content}", "image", "image.url")


def said(role: Any, *parts: ContentPart | str, **fields: Any) -> Message:
    content = [TextPart(part, f"{role}.text") if isinstance(part, str) else part for part in parts]
    return Message(role=role, content=content, path=role, **fields)


def talk(*messages: Message, **fields: Any) -> Conversation:
    return Conversation(messages, **fields)


MIXED = talk(
    said("system", "Be careful."),
    said("user", "\nWhat is this?\n", picture(5), "\n", picture(3, b"blue"), "\n\nAnd this? ", picture(1)),
    said("assistant", "A river."),
    said("tool", "Seen:", picture(4, b"green"), tool_call_id="1"),
)


def whole(processor: Processor, prompt: Prompt) -> str:
    assert prompt.source is not None
    text, begin = [], 0
    for picture in prompt.pictures:
        at = prompt.source.text.index(processor.mark, begin)
        text += [prompt.source.text[begin:at], picture.text]
        begin = at + len(processor.mark)
    return "".join(text) + prompt.source.text[begin:]


def rows_of(prompt: Prompt) -> list[int]:
    return [int(id_) for picture in prompt.pictures for id_ in picture_ids(picture.name, picture.num_tokens)]


def test_prompt_tokens_match_the_processors_with_pictures_named(processor: Processor, renderer: PromptRenderer) -> None:
    prompt = rendered(renderer, MIXED)
    assert [picture.size for picture in prompt.pictures] == ["5x1", "3x1", "1x1", "4x1"]
    assert prompt.token_ids[prompt.token_ids < 0].tolist() == rows_of(prompt)
    token_ids = np.where(prompt.token_ids < 0, processor.token_id, prompt.token_ids)
    assert token_ids.tolist() == processor.tokenizer.encode(whole(processor, prompt))
    assert processor.seen[-1] == ("image.url", "auto", 3)


def test_a_token_knows_its_place_in_the_text_of_the_template(processor: Processor, renderer: PromptRenderer) -> None:
    prompt = rendered(renderer, MIXED)
    assert prompt.source is not None
    text, starts = prompt.source.text, prompt.source.starts
    assert (np.diff(starts) >= 0).all()
    for token_id, start in zip(prompt.token_ids.tolist(), starts.tolist(), strict=True):
        shown = processor.tokenizer.decode([max(token_id, 0)])
        is_inside = text.startswith(processor.mark, start)
        # Line breaks may be one token with those of the picture's text.
        assert is_inside if token_id < 0 else is_inside or shown.isspace() or text.startswith(shown, start)


def test_no_boundary_is_inside_a_picture(processor: Processor, renderer: PromptRenderer) -> None:
    prompt = rendered(renderer, MIXED)
    ids = prompt.token_ids.tolist()
    inside = [max(pair) < 0 for pair in pairwise(ids)]
    ends = [index + 1 for index, (last, following) in enumerate(pairwise(ids)) if last < 0 <= following]
    assert set(ends) <= set(prompt.boundaries)
    assert not any(inside[position - 1] for position in prompt.boundaries if position < len(ids))
    assert "Be careful." in processor.tokenizer.decode(ids[: prompt.system_end])


def test_another_picture_changes_names_and_encodes_no_text(
    renderer: PromptRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.daemon.chat.encoder.PART_CHARS", 8)
    known = OwnedParts(renderer.known_parts, "me", 60)
    red, blue = (talk(said("user", "Look. " * 9, picture(200, color), "Now?" * 9)) for color in (b"red", b"blue"))
    first = renderer.replay(red, None, known).prompt
    monkeypatch.setattr(Encoder, "_encoded", lambda _self, texts: pytest.fail("again") if texts else [])
    second = renderer.replay(blue, None, known).prompt
    assert ((first.token_ids != second.token_ids) == (first.token_ids < 0)).all()
    assert second.token_ids[second.token_ids < 0].tolist() == rows_of(second)


def test_a_reply_about_a_picture_is_replayed(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(processor.tokenizer, renderer_of(processor))
    question = said("user", picture(5), "What is it?")
    model.asked(talk(question))
    sampled = model.reply("A  river, or a lake. ")
    placeholder = processor.token_id
    answer, following = said("assistant", sampled.content.strip()), said("user", "And this?", picture(5, b"blue"))
    prompt = model.asked(talk(question, answer, following))
    assert prompt.replayed == 1
    assert len(prompt.pictures) == 2
    changed = said("user", picture(5, b"blue"), "What is it?")
    assert model.asked(talk(changed, answer, following)).replayed == 0
    # A placeholder that the model sampled is a token as any other.
    model = Model(processor.tokenizer, renderer_of(processor))
    model.asked(talk(question))
    monkeypatch.setattr(model, "tokens", lambda _text: [placeholder, placeholder])
    model.reply("See.")
    state = model.state
    prompt = model.asked(talk(question, said("assistant", "See."), following))
    assert (prompt.replayed, prompt.token_ids[: len(state)].tolist()) == (1, state)
    assert prompt.token_ids.tolist().count(placeholder) == 2


def test_thirty_pictures_of_two_thousand_tokens_are_a_prompt(processor: Processor, renderer: PromptRenderer) -> None:
    processor.scale = 1000
    prompt = rendered(renderer, talk(*(said("user", picture(2), "Now?") for _ in range(30))))
    assert (prompt.token_ids < 0).sum() == 60_000


def test_unwritten_pictures_of_results_go_to_the_user(processor: Processor) -> None:
    call = said("assistant", tool_calls=[ToolCall("1", "look", {}), ToolCall("2", "look", {})])
    results = [said("tool", "Seen", picture(n), tool_call_id=str(n), mark=CacheMark()) for n in (1, 2)]
    messages = [said("user", "Look."), call, *results, said("assistant", "Yes."), *results, said("user", "And?")]
    usual = str(processor.tokenizer.chat_template)
    without = usual.replace("part.type == 'image'", "part.type == 'image' and message.role != 'tool'")
    first, second = (f"<|im_start|>tool\nSeen{picture}<|im_end|>\n" * 2 for picture in (processor.written, ""))
    for template, written, behind in (
        (usual, first, "<|im_start|>user\nAnd?"),
        (without, second, f"<|im_start|>user\n{processor.written * 2}"),
    ):
        processor.tokenizer.chat_template = template
        prompt = rendered(renderer_of(processor), talk(*messages))
        assert prompt.source is not None
        assert prompt.source.text.count(written) == 2
        assert prompt.source.text.rpartition(written)[2].startswith(behind)
        assert [picture.size for picture in prompt.pictures] == ["1x1", "2x1"] * 2
        assert len(prompt.marks) == (4 if template == usual else 6)


@pytest.mark.parametrize("special_tokens_in_text", [False, True])
def test_the_text_of_a_placeholder_is_no_picture(processor: Processor, special_tokens_in_text: bool) -> None:
    spelled = f"an {processor.mark} {processor.placeholder}"
    more = [said("assistant", spelled, tool_calls=[ToolCall("1", "f", {"x": spelled})]), said("user", spelled)]
    conversation = replace(
        talk(said("system", spelled), said("user", picture(5)), *more), special_tokens_in_text=special_tokens_in_text
    )
    prompt = rendered(renderer_of(processor), conversation)
    assert [placed.num_tokens for placed in prompt.pictures] == [5 * processor.scale]
    assert processor.token_id not in prompt.token_ids.tolist()
    shown = processor.tokenizer.decode(prompt.token_ids[prompt.token_ids >= 0].tolist())
    assert shown.count(spelled) >= 3


def test_contradictions_are_refused_with_a_reason(processor: Processor) -> None:
    def problem(*messages: Message, **options: Any) -> str:
        with pytest.raises(InvalidRequest) as caught:
            rendered(renderer_of(processor, **options), talk(said("user", picture(5)), *messages))
        return caught.value.message

    assert "image: this model takes text only" in problem(processor=None)
    assert "no videos" in problem(said("user", OtherPart("video_url", "video")))
    assert problem(said("user", OtherPart("audio", "x"))) == "x: this model takes text and images, no audio (got audio)"
    processor.num_missing = 1
    assert "the prompt has 4 tokens for its images, which take 5" in problem()
    processor.tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message.content }}", "")
    assert "leaves images out" in problem()


def test_a_part_that_is_marked_ends_before_the_next(processor: Processor, renderer: PromptRenderer) -> None:
    mark = CacheMark(60)
    marked, unmarked = TextPart("One.", "", mark), TextPart("xTwo.", "")
    for parts in ((marked, picture(3), unmarked), (picture(3), marked, unmarked)):
        prompt = rendered(renderer, talk(said("user", *parts), said("assistant", "Yes."), said("user", "Why?")))
        (prompt_mark,) = prompt.marks
        before = processor.tokenizer.decode([max(id_, 0) for id_ in prompt.token_ids[: prompt_mark.position].tolist()])
        assert before.endswith("One.")
    last = rendered(renderer, talk(said("user", "One.", picture(3), mark=mark), said("assistant", "Yes.")))
    assert last.token_ids[last.marks[0].position - 2] == min(renderer.end_ids)


def test_people_read_how_large_a_picture_is(processor: Processor, renderer: PromptRenderer) -> None:
    prompt = rendered(renderer, MIXED)
    assert prompt.text == "Be careful. … What is this? [image 5x1] [image 3x1] And this? [image 1x1]"
    assert renderer.end_of(replace(prompt, token_ids=prompt.token_ids[prompt.token_ids < 0])) == ""
    assert processor.mark not in renderer.text_of(MIXED)


def test_a_conversation_with_pictures_is_not_compressed(processor: Processor, renderer: PromptRenderer) -> None:
    compressing = renderer_of(processor, compress=partial(fit, 10))
    messages = [said("user", "One."), said("assistant", "Two.")] * 3
    plain, compressed = (rendered(each, talk(*messages, said("user", picture(3)))) for each in (renderer, compressing))
    assert plain.token_ids.tolist() == compressed.token_ids.tolist()
    assert rendered(compressing, talk(*messages, said("user", "See."))).rewriting.is_shortened


ALTERNATES = (
    "{% set turns = namespace(number=0) %}"
    "{% for message in messages if not (message.tool_calls or message.role == 'tool') %}"
    "{% if (message.role == 'user') != (turns.number % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set turns.number = turns.number + 1 %}{% endfor %}"
)
TURNS_OF_PICTURES = [
    talk(
        said("user", "one"), said("user", picture(5)), said("user", "two", picture(3, b"blue")), said("user", "three")
    ),
    talk(said("user", "one"), said("user", "two"), said("user", picture(2))),
    talk(
        said("user", "one"),
        said("assistant", tool_calls=[ToolCall("call", "look", {})]),
        said("tool", "seen", picture(4), tool_call_id="call"),
        said("user", "two", picture(1)),
    ),
]


@pytest.mark.parametrize("talked", TURNS_OF_PICTURES)
@pytest.mark.parametrize("marked", [False, True])
def test_pictures_in_turns_that_must_alternate_stay_in_their_places(
    processor: Processor, talked: Conversation, marked: bool
) -> None:
    processor.tokenizer.chat_template = ALTERNATES + processor.tokenizer.chat_template
    if marked:
        first = replace(talked.messages[0], mark=CacheMark())
        talked = replace(talked, messages=[first, *talked.messages[1:]])
    prompt = rendered(renderer_of(processor), talked)
    parts = [part for message in talked.messages for part in message.content]
    assert [picture.size for picture in prompt.pictures] == [
        f"{base64.b64decode(part.uri.partition(',')[2])[0]}x1" for part in parts if isinstance(part, ImagePart)
    ]
    text = whole(processor, prompt)
    if len(talked.messages) == 3:
        assert "one\n\ntwo" in text
    begun = 0
    pictures = iter(prompt.pictures)
    for part in parts:
        shown = part.text if isinstance(part, TextPart) else next(pictures).text
        begun = text.index(shown, begun) + len(shown)
    if marked:
        [mark] = prompt.marks
        before = processor.tokenizer.decode([max(0, int(index)) for index in prompt.token_ids[: mark.position]])
        assert "one" in before
        assert "two" not in before
