"""Tables of how families of models write calls and reasoning. `choose_format.py` chooses one for a chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import regex

Body: TypeAlias = Literal["objects", "json", "parameters", "elements", "python", "braces"]
"""The text inside the tags of a call.

objects     JSON objects with a name and arguments, alone or in an array
json        the head has the name; the body is the JSON of the arguments
parameters  the head has the name; each argument has tags of its own
elements    as parameters, and members of objects and arrays have tags of their own too
python      Python calls, alone or in a list
braces      the head has the name; the body is JSON with bare keys and other quotes
"""


@dataclass(frozen=True)
class Written:
    """The syntax of forced calls, for `call_grammar.py`. `call` has the placeholders NAME, ARGUMENTS and INDEX (any
    number); `argument` has KEY, VALUE, IS_TEXT (true or false) and TYPE (the JSON type)."""

    call: str
    argument: str = ""
    """For a body that is not JSON."""
    before: str = ""
    between: str = ""
    after: str = ""


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of a family's tool calls.

    `begins` open one or several calls; the chat template writes one of them. `head`, `tail`, `argument` and
    `argument_end` are regular expressions. `head` has the group `name`, `argument` the group `key`. `argument` has the
    group `kind` if the tag gives a type; "true" and "string" mean text. A head that is a tag of its own stands in
    `begins` and in `bare_heads`. A `tail` or `argument_end` of "" is what is `written` there.
    """

    body: Body
    written: Written
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare_heads: tuple[str, ...] = ()
    head: str = ""
    tail: str = ""
    argument: str = ""
    argument_end: str = ""
    quotes: str = ""
    """In braces, the quotes around a text; in elements, the prefix of each tag."""
    name_is_key: bool = False
    """Objects are written as {"get_weather": {…}}."""
    more_tags: tuple[str, ...] = ()
    """Tags that stand in the regular expressions alone."""


@dataclass(frozen=True)
class Family:
    """The format of a family of models."""

    name: str
    calls: CallSyntax
    dropped: tuple[str, ...] = ()
    """Tags around the answer that are left out."""
    signs: tuple[str, ...] = ()
    """One of them stands in each call that the template writes, where the tags do not tell families apart."""

    @property
    def is_bare(self) -> bool:
        """Returns whether calls are objects without tags."""
        return bool(self.signs) and self.calls.body == "objects"

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that together contain all tags of this family."""
        calls, written = self.calls, self.calls.written
        texts = (written.call, written.argument, written.before, written.between, written.after, calls.quotes)
        return (*calls.begins, *calls.ends, *texts, *calls.more_tags, *self.dropped)


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

_NAME = r"(?P<name>[\w.\-]+)"
_OBJECT = '{"name": NAME, "arguments": ARGUMENTS}'


def _objects(begin: str, end: str, call: str = _OBJECT, *, array: bool = True, **more: bool) -> CallSyntax:
    """Returns the syntax of objects between tags: a JSON array, or one object and its tags for each call."""
    if array:
        written = Written(call, before=f"{begin}[", between=", ", after=f"]{end}")
    else:
        written = Written(f"{begin}\n{call}\n{end}", between="\n")
    return CallSyntax("objects", written, (begin,), (end,) if end else (), **more)  # type: ignore[arg-type]


HERMES = _objects("<tool_call>", "</tool_call>", array=False)

_FUNCTION = r"<function=(?P<name>[^>\n]+)>"
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>(?:\n|(?=[^\n]))"
_PARAMETER_END = r"\n?</parameter>|\n?(?=<parameter=[^>\n]+>)|\n?(?=</function>)"
_TAGGED = Written(
    "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    between="\n",
)


def _tagged(begin: str, end: str) -> CallSyntax:
    """Returns a syntax like Qwen3-Coder's: <function=…> with <parameter=…> in it."""
    call = _TAGGED.call.replace("<tool_call>", begin).replace("</tool_call>", end)
    return CallSyntax(
        "parameters",
        Written(call, _TAGGED.argument, between="\n"),
        begins=(begin, "<function="),
        ends=(end,),
        bare_heads=("<function=",),
        head=_FUNCTION,
        argument=_PARAMETER,
        argument_end=_PARAMETER_END,
    )


def _invoked(begin: str, end: str, prefix: str, attributes: str = "") -> CallSyntax:
    """Returns a syntax like that of Anthropic's older models: <invoke name="…"> with <parameter name="…"> in it."""
    argument = rf'<{prefix}parameter name="(?P<key>[^"\n]+)"(?: string="(?P<kind>true|false)")?>'
    return CallSyntax(
        "parameters",
        Written(
            f'{begin}\n<{prefix}invoke name="NAME">\nARGUMENTS</{prefix}invoke>\n{end}',
            f'<{prefix}parameter name="KEY"{attributes}>VALUE</{prefix}parameter>\n',
            between="\n",
        ),
        begins=(begin,),
        ends=(end,),
        head=rf'<{prefix}invoke name="(?P<name>[^"\n]+)">',
        argument=argument,
    )


def _keyed(newline: str) -> CallSyntax:
    """Returns a syntax like GLM's: the name behind the tag, then <arg_key> and <arg_value>."""
    return CallSyntax(
        "parameters",
        Written(
            f"<tool_call>NAME{newline}ARGUMENTS</tool_call>",
            f"<arg_key>KEY</arg_key>{newline}<arg_value>VALUE</arg_value>{newline}",
            between="\n",
        ),
        begins=("<tool_call>",),
        head=r"(?P<name>[\w.\-]+)\s*(?=<arg_key>|</tool_call>)",
        argument=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
    )


def _braces(begin: str, end: str, quotes: str) -> CallSyntax:
    """Returns a syntax like Gemma 4's: call:NAME{key:value}, with quotes of its own."""
    return CallSyntax(
        "braces",
        Written(f"{begin}call:NAMEARGUMENTS{end}"),
        begins=(begin,),
        ends=(end,),
        head=rf"call:{_NAME}(?=\s*\{{)",
        quotes=quotes,
    )


def _python(begin: str, end: str) -> CallSyntax:
    return CallSyntax(
        "python",
        Written("NAME(ARGUMENTS)", "KEY=VALUE", before=f"{begin}[", between=", ", after=f"]{end}"),
        begins=(begin,) if begin else (),
        ends=(end,) if end else (),
    )


def _deepseek(head: str, call: str, tail: str = "") -> CallSyntax:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return CallSyntax(
        "json",
        Written(call, before=begin, after=end),
        begins=(begin, "<｜tool▁calls｜>", "<｜tool▁call▁begin｜>"),
        ends=(end,),
        bare_heads=("<｜tool▁call▁begin｜>",),
        head=head,
        tail=tail,
    )


_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_R1 = _deepseek(
    rf"(?:{_BEGIN})?(?:function)?{_SEP}(?P<name>[^\s<`]+)\s*```(?:json)?\n",
    f"{_BEGIN}function{_SEP}NAME\n```json\nARGUMENTS\n```{_END}",
    rf"```|{_END}",
)
DEEPSEEK_V31 = _deepseek(rf"{_BEGIN}(?P<name>[^\s<]+?)\s*{_SEP}", f"{_BEGIN}NAME{_SEP}ARGUMENTS{_END}")


def _kimi_3(name: str, attributes: str = "") -> tuple[str, str]:
    """Returns the tags of an element of Kimi-K3."""
    return f"<|open|>{name}{attributes}<|sep|>", f"<|close|>{name}<|sep|>"


_TOOLS_3, _CALL_3, _RESPONSE_3 = _kimi_3("tools"), _kimi_3("call", ' tool="NAME" index="INDEX"'), _kimi_3("response")
_ARGUMENT_3 = _kimi_3("argument", ' key="KEY" type="TYPE"')
KIMI_3 = CallSyntax(
    "parameters",
    Written(
        "ARGUMENTS".join(_CALL_3),
        "VALUE".join(_ARGUMENT_3),
        before="".join(_RESPONSE_3) + _TOOLS_3[0],
        after=_TOOLS_3[1],
    ),
    begins=_TOOLS_3[:1],
    ends=_TOOLS_3[1:],
    head=r'<\|open\|>call tool="(?P<name>[^"\n]+)"[^<\n]*<\|sep\|>',
    argument=r'<\|open\|>argument key="(?P<key>[^"\n]+)" type="(?P<kind>\w+)"<\|sep\|>',
)

_NS = "]<]minimax[>["
MINIMAX_3 = CallSyntax(
    "elements",
    Written(
        f'{_NS}<invoke name="NAME">ARGUMENTS{_NS}</invoke>',
        f"{_NS}<KEY>VALUE{_NS}</KEY>",
        before=f"{_NS}<tool_call>\n",
        between="\n",
        after=f"\n{_NS}</tool_call>",
    ),
    begins=(f"{_NS}<tool_call>",),
    ends=(f"{_NS}</tool_call>",),
    head=regex.escape(f"{_NS}<invoke name=") + r'"(?P<name>[^"\n]+)">',
    quotes=_NS,
)


def _hunyuan_3(suffix: str) -> CallSyntax:
    """Returns a syntax like GLM's, with a tag behind the name, tags around all calls, and a suffix in each tag."""
    return CallSyntax(
        "parameters",
        Written(
            f"<tool_call{suffix}>NAME<tool_sep{suffix}>\nARGUMENTS</tool_call{suffix}>\n",
            f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>VALUE</arg_value{suffix}>\n",
            before=f"<tool_calls{suffix}>\n",
            after=f"</tool_calls{suffix}>",
        ),
        begins=(f"<tool_calls{suffix}>",),
        ends=(f"</tool_calls{suffix}>",),
        head=rf"<tool_call{suffix}>{_NAME}<tool_sep{suffix}>",
        argument=rf"<arg_key{suffix}>(?P<key>[^<]*)</arg_key{suffix}>\s*<arg_value{suffix}>",
    )


GIGACHAT_3 = CallSyntax(
    "objects",
    Written(_OBJECT, before="<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    begins=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
    ends=("<|message_sep|>",),
)

MISTRAL_NAMED = CallSyntax(
    "json",
    Written("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    begins=("[TOOL_CALLS]",),
    head=rf"{_NAME}(?:\[CALL_ID\][\w\-]*)?(?:\[ARGS\]\s*|\s*(?=\{{))",
    more_tags=("[CALL_ID]",),
)
MISTRAL = _objects("[TOOL_CALLS]", "")

KIMI = CallSyntax(
    "json",
    Written(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ends=("<|tool_calls_section_end|>",),
    bare_heads=("<|tool_call_begin|>",),
    head=r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
)

SOLAR = CallSyntax(
    "json",
    Written(
        "<|tool_call:begin|>callINDEX<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>",
        before="<|tool_calls|>",
    ),
    begins=("<|tool_calls|>", "<|tool_call:begin|>"),
    bare_heads=("<|tool_call:begin|>",),
    head=rf"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>",
)

FUNCTIONARY = CallSyntax(
    "json",
    Written("<function=NAME>ARGUMENTS</function>"),
    begins=("<function=",),
    bare_heads=("<function=",),
    head=_FUNCTION,
)

MINICPM = CallSyntax(
    "parameters",
    Written('<function name="NAME">ARGUMENTS</function>', '<param name="KEY">VALUE</param>'),
    begins=("<function name=",),
    bare_heads=("<function name=",),
    head=r'<function name="(?P<name>[^"\n]+)">',
    argument=r'<param name="(?P<key>[^"\n]+)">(?:<!\[CDATA\[)?',
    argument_end=r"(?:\]\]>)?</param>",
)

LLAMA = CallSyntax(
    "objects",
    Written('{"name": NAME, "parameters": ARGUMENTS}', between="; "),
    begins=("<|python_tag|>",),
    head=r"(?P<name>\w+)\.call(?=\()",
)
PLAIN = CallSyntax(
    "objects",
    Written(_OBJECT, before="[", between=", ", after="]"),
    head=r'<function(?:=| name=")(?P<name>[^>"\n]+)"?>',
    tail="</function>",
)
"""The calls of small models, whatever their template writes: JSON without tags, or a tag with the name and JSON."""

COMMAND_R = CallSyntax(
    "objects",
    Written('{"tool_name": NAME, "parameters": ARGUMENTS}', before="Action:\n```json\n[", between=", ", after="]```"),
    begins=("Action: ```json", "Action:\n```json"),
    ends=("```",),
)

ATEM = _invoked("<atem:function_calls>", "</atem:function_calls>", "atem:")
"""For Muse Glimmer, whose messages have headers around it."""

NONE = Family("none", PLAIN)

FAMILIES = (
    Family("qwen3-coder", _tagged("<tool_call>", "</tool_call>"), signs=("<parameter=",)),
    Family("seed-oss", _tagged("<seed:tool_call>", "</seed:tool_call>")),
    Family("glm", _keyed("\n"), signs=("</arg_key>\n",)),
    Family("glm-4.7", _keyed(""), signs=("</arg_key><arg_value>",)),
    Family("hunyuan-3", _hunyuan_3(":opensource")),
    Family("hunyuan-3-preview", _hunyuan_3(""), signs=("<tool_sep>",)),
    Family("hermes", HERMES),
    Family("minimax-3", MINIMAX_3, dropped=("</mm:think>",)),
    Family("minimax", _invoked("<minimax:tool_call>", "</minimax:tool_call>", "")),
    Family(
        "deepseek-v3.2",
        _invoked("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", ' string="IS_TEXT"'),
    ),
    Family("deepseek-v4", _invoked("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", ' string="IS_TEXT"')),
    Family("deepseek", DEEPSEEK_R1, signs=("```json",)),
    Family("deepseek-v3.1", DEEPSEEK_V31),
    Family("mistral", MISTRAL_NAMED, signs=("[ARGS]",)),
    Family("mistral-array", MISTRAL),
    Family("kimi", KIMI),
    Family("kimi-3", KIMI_3, dropped=(*_RESPONSE_3, "<|close|>message<|sep|>")),
    Family("solar", SOLAR),
    Family("functionary", FUNCTIONARY),
    Family("minicpm", MINICPM),
    Family("gemma-4", _braces("<|tool_call>", "<tool_call|>", '<|"|>')),
    Family("functiongemma", _braces("<start_function_call>", "<end_function_call>", "<escape>")),
    Family("granite", _objects("<|tool_call|>", ""), dropped=("<response>", "</response>")),
    Family("phi-4-mini", _objects("<|tool_call|>", "<|/tool_call|>")),
    Family("functools", _objects("functools", "")),
    Family("nemotron", _objects("<TOOLCALL>", "</TOOLCALL>")),
    Family("tool-calls", _objects("<tool_calls>", "</tool_calls>"), dropped=("<answer>", "</answer>")),
    Family("internlm", _objects("<|action_start|><|plugin|>", "<|action_end|>", array=False)),
    Family(
        "command-r7b",
        _objects(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            '{"tool_call_id": "INDEX", "tool_name": NAME, "parameters": ARGUMENTS}',
        ),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Family("command-r", COMMAND_R),
    Family("gigachat-3", GIGACHAT_3),
    Family("gigachat", _objects("<|function_call|>", "", array=False)),
    Family("apertus", _objects("<|tools_prefix|>", "<|tools_suffix|>", "{NAME: ARGUMENTS}", name_is_key=True)),
    Family("lfm2", _python("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("gemma-3", _python("```tool_code", "```")),
    Family("pythonic", _python("", ""), signs=("(",)),
    Family("llama-3", LLAMA, signs=('"parameters"',)),
    Family("json", PLAIN, signs=('"arguments"',)),
)
"""All families, in the order in which they are tried."""
