"""One description of each family of models: how it writes calls and reasoning. `call_grammar.py` forces calls by it,
`call_reader.py` and `parsers.py` read them, and `choose_format.py` chooses one for a chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from diskprefix.chat.output.format import ThoughtTags

Body: TypeAlias = Literal["objects", "json", "parameters", "elements", "python", "braces"]
"""The form of a call.

objects     a JSON object with the name and the arguments
json        the name, then the arguments in JSON
parameters  the name, then arguments with tags of their own
elements    as parameters, and members of objects and arrays have tags of their own too
python      a Python call
braces      the name, then JSON with bare keys and other quotes
"""


@dataclass(frozen=True)
class Channels:
    """Replies that are messages with headers. Regular expressions; NAMES stands for the names of the tools.

    A message is a call if `header` matched its group `name`, reasoning if it matched `thought`, content otherwise.
    `end` ends it. Outside of messages, a tag of `tags` is dropped, unless it is in `kept`.
    """

    header: str
    end: str
    tags: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """The format of a family of models. Its texts are what the chat template writes, with placeholders in capitals.

    `call` has NAME and ARGUMENTS, and may have INDEX (any number). It is read with other blanks and without attributes
    that have a placeholder. `begin` and `end` stand around all calls, or (`each`) around each one. A list's brackets
    belong to them: its begin ends with "[".
    """

    name: str
    body: Body = "objects"
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'
    argument: str = ""
    """For a body that is not JSON: KEY, VALUE, and IS_TEXT (true or false) or TYPE (the JSON type)."""
    begin: str = ""
    end: str = ""
    each: bool = False
    lead: str = ""
    """What stands before `begin`, and is not needed to find it."""
    between: str = ""
    bare: str = ""
    """The beginning of a call that may stand without `begin`."""
    quotes: str = ""
    """In braces, the quotes around a text; in elements, the prefix of each tag."""
    only_one: bool = False
    """A call ends the reply."""
    dropped: tuple[str, ...] = ()
    """Tags around the answer that are left out."""
    signs: tuple[str, ...] = ()
    """Where the tags do not tell families apart: one of them stands in each call that the template writes. Of a family
    with channels, all of them stand in the template or in what it writes."""
    thought: ThoughtTags | None = None
    """The texts around reasoning, if they are not among `THOUGHTS`."""
    channels: Channels | None = None

    # What models write besides, as texts or regular expressions. "" for what follows from the texts above.
    also_begins: tuple[str, ...] = ()
    also_ends: tuple[str, ...] = ()
    head: str = ""
    """What stands before the arguments, with the group `name`."""
    tail: str = ""
    """What stands behind the arguments."""
    argument_head: str = ""
    """What stands before a value, with the group `key`; `kind` is its type, where "true" and "string" mean text."""
    argument_end: str = ""
    head_tags: tuple[str, ...] = ()
    """Tags that stand in `head` alone."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts that open one or several calls. The chat template writes the first."""
        return tuple(filter(None, (self.begin.removesuffix("[").rstrip(), *self.also_begins, self.bare)))

    @property
    def ends(self) -> tuple[str, ...]:
        end = self.end.removeprefix("]") if self.begin.endswith("[") else self.end
        return tuple(filter(None, (end.strip(), *self.also_ends)))

    @property
    def before(self) -> str:
        """The text before all calls."""
        return "" if self.each else self.lead + self.begin

    @property
    def after(self) -> str:
        """The text behind all calls."""
        return "" if self.each else self.end

    @property
    def whole_call(self) -> str:
        """One call with all that is repeated for each."""
        return f"{self.lead}{self.begin}{self.call}{self.end}" if self.each else self.call

    @property
    def is_bare(self) -> bool:
        """Returns whether calls are objects without tags."""
        return bool(self.signs) and self.body == "objects"

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that together contain all tags of this family."""
        texts = (self.lead, self.begin, self.call, self.argument, self.between, self.end, self.quotes, self.bare)
        channels = self.channels.tags if self.channels else ()
        return (*texts, *self.also_begins, *self.also_ends, *self.head_tags, *self.dropped, *channels)


THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|think|>", "<|end|>"),
)
"""Tags around reasoning."""

_LINE = '\n{"name": NAME, "arguments": ARGUMENTS}\n'


def _list(name: str, begin: str, end: str, call: str = Family.call, dropped: tuple[str, ...] = ()) -> Family:
    """Returns a family that writes all calls as one JSON array between tags."""
    return Family(name, "objects", call, begin=f"{begin}[", end=f"]{end}", between=", ", dropped=dropped)


def _invoked(
    name: str, tag: str, prefix: str, attribute: str = "", **more: str | Channels | ThoughtTags | tuple[str, ...]
) -> Family:
    """Returns a family like Anthropic's older models."""
    return Family(
        name,
        "parameters",
        f'\n<{prefix}invoke name="NAME">\nARGUMENTS</{prefix}invoke>\n',
        f'<{prefix}parameter name="KEY"{attribute}>VALUE</{prefix}parameter>\n',
        f"<{tag}>",
        f"</{tag}>",
        each=True,
        **({"between": "\n"} | more),  # type: ignore[arg-type]
    )


def _hunyuan(name: str, suffix: str, signs: tuple[str, ...] = ()) -> Family:
    """Returns a family like GLM, with a tag behind the name, tags around all calls, and a suffix in each tag."""
    return Family(
        name,
        "parameters",
        f"<tool_call{suffix}>NAME<tool_sep{suffix}>\nARGUMENTS</tool_call{suffix}>\n",
        f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>VALUE</arg_value{suffix}>\n",
        f"<tool_calls{suffix}>\n",
        f"</tool_calls{suffix}>",
        signs=signs,
    )


QWEN_CODER = Family(
    "qwen3-coder",
    "parameters",
    "\n<function=NAME>\nARGUMENTS</function>\n",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    "<tool_call>",
    "</tool_call>",
    each=True,
    between="\n",
    bare="<function=",
    signs=("<parameter=",),
)
GLM = Family(
    "glm",
    "parameters",
    "NAME\nARGUMENTS",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "<tool_call>",
    "</tool_call>",
    each=True,
    between="\n",
    signs=("</arg_key>\n",),
)
GEMMA_4 = Family(
    "gemma-4", "braces", "call:NAMEARGUMENTS", begin="<|tool_call>", end="<tool_call|>", each=True, quotes='<|"|>'
)
LFM_2 = Family(
    "lfm2",
    "python",
    "NAME(ARGUMENTS)",
    "KEY=VALUE",
    begin="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
    between=", ",
)
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V31 = Family(
    "deepseek-v3.1",
    "json",
    f"{_BEGIN}NAME{_SEP}ARGUMENTS{_END}",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    bare=_BEGIN,
    also_begins=("<｜tool▁calls｜>",),
)

_NS = "]<]minimax[>["

NONE = Family(
    "none", begin="[", end="]", between=", ", head=r'<function(?:=| name=")(?P<name>[^>"\n]+)"?>', tail="</function>"
)
"""The calls of small models, whatever their template writes: JSON without tags, or a tag with the name and JSON."""

FAMILIES = (
    Family(
        "harmony",
        "json",
        "NAME <|constrain|>json<|message|>ARGUMENTS",
        lead="<|channel|>",
        begin="commentary to=functions.",
        each=True,
        only_one=True,
        signs=("<|channel|>", "<|message|>"),
        # Reasoning ends with the header of the next message, which no schema of the client has.
        thought=ThoughtTags(None, "<|channel|>final<|message|>", "<|end|><|start|>assistant"),
        channels=Channels(
            # The recipient may stand before the channel or behind it. Possessive quantifiers (`++`) keep time linear.
            r"(?:<\|start\|>\s*+assistant)?\s*+(?:to=(?:functions\.(?P<name>[^\s<]++)|[^\s<]++)\s*+)?"
            r"<\|channel\|>\s*+(?:(?P<thought>analysis)\b|\w++)\s*+"
            r"(?:to=(?:functions\.(?P<name>[^\s<]++)|[^\s<]++)\s*+)?"
            r"(?:<\|constrain\|>)?\s*+(?:\w++\s*+)?<\|message\|>",
            r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)",
            tags=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
            kept=("<|start|>", "<|channel|>", "<|constrain|>"),
        ),
    ),
    _invoked(
        "muse",
        "atem:function_calls",
        "atem:",
        lead=" to=NAME<|message|>",
        between="<|eom|><|start|>assistant",
        signs=("<|message|>", "<atem:function_calls>"),
        thought=ThoughtTags(None, " to=user<|message|>", "<|eom|><|start|>assistant"),
        channels=Channels(
            r"(?:<\|start\|>\s*+assistant)?\s*+"
            r"(?:to=(?:(?P<thought>self)(?=[\s<])|(?:user|commentary)(?=[\s<])|(?P<name>[^\s<]++))\s*+)?<\|message\|>",
            r"<\|eo[mt]\|>|(?=<\|start\|>)",
            tags=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
            kept=("<|start|>",),
        ),
    ),
    Family(
        "functionary-3.2",
        "json",
        "NAME\nARGUMENTS",
        between=">>>",
        signs=(">>>all",),
        # The template may have written `>>>`.
        channels=Channels(r"(?:>>>)?(?:all|(?P<name>NAMES))\n", r"(?=>>>(?:all|NAMES)\n)"),
    ),
    QWEN_CODER,
    replace(QWEN_CODER, name="seed-oss", begin="<seed:tool_call>", end="</seed:tool_call>", signs=()),
    GLM,
    replace(
        GLM,
        name="glm-4.7",
        call="NAMEARGUMENTS",
        argument="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        signs=("</arg_key><arg_value>",),
    ),
    _hunyuan("hunyuan-3", ":opensource"),
    _hunyuan("hunyuan-3-preview", "", signs=("<tool_sep>",)),
    Family("hermes", call=_LINE, begin="<tool_call>", end="</tool_call>", each=True, between="\n"),
    Family(
        "minimax-3",
        "elements",
        f'{_NS}<invoke name="NAME">ARGUMENTS{_NS}</invoke>',
        f"{_NS}<KEY>VALUE{_NS}</KEY>",
        f"{_NS}<tool_call>\n",
        f"\n{_NS}</tool_call>",
        between="\n",
        quotes=_NS,
        dropped=("</mm:think>",),
    ),
    _invoked("minimax", "minimax:tool_call", ""),
    _invoked("deepseek-v3.2", "｜DSML｜function_calls", "｜DSML｜", ' string="IS_TEXT"'),
    _invoked("deepseek-v4", "｜DSML｜tool_calls", "｜DSML｜", ' string="IS_TEXT"'),
    replace(
        DEEPSEEK_V31,
        name="deepseek",
        call=f"{_BEGIN}function{_SEP}NAME\n```json\nARGUMENTS\n```{_END}",
        head=rf"(?:{_BEGIN})?(?:function)?{_SEP}(?P<name>[^\s<`]+)\s*```(?:json)?\n",
        tail=rf"```|{_END}",
        signs=("```json",),
    ),
    DEEPSEEK_V31,
    Family(
        "mistral",
        "json",
        "NAME[ARGS]ARGUMENTS",
        begin="[TOOL_CALLS]",
        each=True,
        head=r"(?P<name>[\w.\-]+)(?:\[CALL_ID\][\w\-]*)?(?:\[ARGS\]\s*|\s*(?=\{))",
        head_tags=("[CALL_ID]",),
        signs=("[ARGS]",),
    ),
    _list("mistral-array", "[TOOL_CALLS]", ""),
    Family(
        "kimi",
        "json",
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        bare="<|tool_call_begin|>",
        head=r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    ),
    Family(
        "kimi-3",
        "parameters",
        '<|open|>call tool="NAME" index="INDEX"<|sep|>ARGUMENTS<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        lead="<|open|>response<|sep|><|close|>response<|sep|>",
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Family(
        "solar",
        "json",
        "<|tool_call:begin|>callINDEX<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>",
        begin="<|tool_calls|>",
        bare="<|tool_call:begin|>",
        head=r"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>(?P<name>[^<\n]+)<\|tool_call:args\|>",
    ),
    Family("functionary", "json", "<function=NAME>ARGUMENTS</function>", bare="<function="),
    Family(
        "minicpm",
        "parameters",
        '<function name="NAME">ARGUMENTS</function>',
        '<param name="KEY">VALUE</param>',
        bare="<function name=",
        argument_head=r'<param name="(?P<key>[^"\n]+)">(?:<!\[CDATA\[)?',
        argument_end=r"(?:\]\]>)?</param>",
    ),
    GEMMA_4,
    replace(GEMMA_4, name="functiongemma", begin="<start_function_call>", end="<end_function_call>", quotes="<escape>"),
    _list("granite", "<|tool_call|>", "", dropped=("<response>", "</response>")),
    _list("phi-4-mini", "<|tool_call|>", "<|/tool_call|>"),
    _list("functools", "functools", ""),
    _list("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _list("tool-calls", "<tool_calls>", "</tool_calls>", dropped=("<answer>", "</answer>")),
    Family("internlm", call=_LINE, begin="<|action_start|><|plugin|>", end="<|action_end|>", each=True, between="\n"),
    _list(
        "command-r7b",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '{"tool_call_id": "INDEX", "tool_name": NAME, "parameters": ARGUMENTS}',
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Family(
        "command-r",
        call='{"tool_name": NAME, "parameters": ARGUMENTS}',
        begin="Action:\n```json\n[",
        end="]```",
        between=", ",
        also_begins=("Action: ```json",),
    ),
    Family("gigachat-3", begin="<|message_sep|>\n\nfunction call<|role_sep|>\n", also_ends=("<|message_sep|>",)),
    Family("gigachat", call=_LINE, begin="<|function_call|>", each=True, between="\n"),
    _list("apertus", "<|tools_prefix|>", "<|tools_suffix|>", "{NAME: ARGUMENTS}"),
    LFM_2,
    replace(LFM_2, name="gemma-3", begin="```tool_code[", end="]```"),
    replace(LFM_2, name="pythonic", begin="[", end="]", signs=("(",)),
    Family(
        "llama-3",
        call='{"name": NAME, "parameters": ARGUMENTS}',
        between="; ",
        also_begins=("<|python_tag|>",),
        head=r"(?P<name>\w+)\.call(?=\()",
        signs=('"parameters"',),
    ),
    replace(NONE, name="json", signs=('"arguments"',)),
)
"""All families, in the order in which they are tried."""
