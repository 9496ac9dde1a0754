"""A real tokenizer for a chat template, with the control tokens that the template writes, and our renderer with it."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from diskprefix.daemon.chat.alternation import alternate
from diskprefix.daemon.chat.draft import PromptDraft, run_steps
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.template import ChatTemplate, place
from diskprefix.errors import InvalidRequest
from diskprefix.runtime.files.tokenizer import Tokenizer
from tests.daemon.chat.families.families import FAMILIES, POSITIONS, Family
from tests.daemon.chat.families.sources import sources
from tools.benchmarks.template_engines import Written

_CONTROL = re.compile(
    r"<\|[^|<>\s{}'\"]{1,40}\|>|<｜[^｜<>\s{}'\"]{1,40}｜>|\[/?[A-Z][A-Z_]{2,30}\]|</?(?:start|end)_of_(?:turn|image)>"
    r"|<\|[a-z_]{2,20}>|<[a-z_]{2,20}\|>|<(?:unused|extra_id_|SPECIAL_|reserved_)\d+>|</?s>|\]<\](?:[a-z_]+)\[>\["
)
"""Texts that are control tokens in the vocabularies of published models."""
_NAMED = re.compile(r"\b(?:bos|eos|sep|cls|pad|unk|image)_token\b")
_ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def _published(name: str) -> Backend:
    return Backend.from_file(str(sources() / f"{name}.json"))


@cache
def _added_to(name: str) -> list[AddedToken]:
    """The added tokens of a vocabulary, by their ids."""
    return [token for _, token in sorted(_published(name).get_added_tokens_decoder().items())]


def _copy_of(name: str) -> Backend:
    """Returns a tokenizer that shares the vocabulary, which takes seconds to read."""
    published = _published(name)
    copy = Backend(published.model)
    if published.normalizer is not None:
        copy.normalizer = published.normalizer
    copy.pre_tokenizer, copy.decoder = published.pre_tokenizer, published.decoder
    copy.add_tokens(_added_to(name))
    return copy


def family_of(template: str) -> Family:
    """Returns the family whose tokenizer has most of the control tokens in a template."""
    wanted = set(_CONTROL.findall(template))

    def common(family: Family) -> int:
        return len(wanted & {*(token.content for token in _added_to(family.vocabulary)), *family.special})

    return max((family for family in FAMILIES if family.own_vocabulary), key=common)


def tokenizer_of(template: str) -> Any:
    """Returns the tokenizer for a template, as the daemon makes it of a model's files."""
    family = family_of(template)
    backend = _copy_of(family.vocabulary)
    named = {"bos_token": family.bos, "eos_token": family.eos}
    named |= {name: named.get(name) or _ENDS.get(name, f"<{name}>") for name in _NAMED.findall(template)}
    special = {name: text for name, text in named.items() if text}
    known = {token.content for token in _added_to(family.vocabulary)}
    texts = [*special.values(), *family.special, *sorted(set(_CONTROL.findall(template)) - known)]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    tokenizer = Tokenizer(backend, special, chat_template=template)
    tokenizer.get_vocab = cache(tokenizer.get_vocab)  # type: ignore[method-assign]
    return tokenizer


def renderer_of(template: str) -> PromptRenderer:
    tokenizer = tokenizer_of(template)
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=POSITIONS, finds_question=False)
    renderer.warm_up()
    return renderer


def served(renderer: PromptRenderer, conversation: Conversation) -> Written:
    """Returns the text of our prompt for a conversation. Pictures keep the mark that the template writes."""
    try:
        if not conversation.has_pictures:
            source = renderer.replay(conversation, None).prompt.source
            assert source is not None
            return Written(source.text)
        template = ChatTemplate(renderer._tokenizer, renderer.end_ids)
        template.form = renderer._template.form
        steps = [partial(place, template), partial(alternate, template)]
        draft = run_steps(steps, PromptDraft(conversation=conversation))
        return Written(template.render(template.input_of(draft.conversation, True), "reply"))
    except InvalidRequest as error:
        return Written(None, error.message)
