"""The events of recorded streams: for each its type, and the names of its fields. What differs in each run is left out.

`TEXT` is OpenAI's answer of gpt-4.1, from tests/models/cassettes/test_openai_responses/
test_openai_conversation_id_streaming_provider_details.yaml of the repository pydantic/pydantic-ai, commit 0e5cb249.
`CALL` is OpenAI's answer of gpt-5, from Tests/SwiftAgentTests/OpenAI/OpenAIStreamingToolCallsTests.swift of
SwiftedMind/SwiftAgent, commit 213f8ae1: an item of hidden reasoning, then a function call. `RAW_REASONING` is the
answer of OpenRouter's gpt-oss-20b, from test_openai_responses_raw_cot_stream_openrouter.yaml of pydantic/pydantic-ai,
commit 5039551a, up to the beginning of the message: that server closes the reasoning late.
"""

from __future__ import annotations

from typing import TypeAlias

Recorded: TypeAlias = list[tuple[str, set[str]]]

RESPONSE = {"type", "response", "sequence_number"}
ITEM = {"type", "item", "output_index", "sequence_number"}
PART = {"type", "content_index", "item_id", "output_index", "part", "sequence_number"}
TEXT_DELTA = {"type", "content_index", "delta", "item_id", "logprobs", "output_index", "sequence_number"}
TEXT_DONE = {"type", "content_index", "item_id", "logprobs", "output_index", "sequence_number", "text"}
ARGUMENTS_DELTA = {"type", "sequence_number", "item_id", "output_index", "delta"}
ARGUMENTS_DONE = {"type", "sequence_number", "item_id", "output_index", "arguments"}

TEXT: Recorded = [
    ("response.created", RESPONSE),
    ("response.in_progress", RESPONSE),
    ("response.output_item.added", ITEM),
    ("response.content_part.added", PART),
    ("response.output_text.delta", TEXT_DELTA),
    ("response.output_text.delta", TEXT_DELTA),
    ("response.output_text.done", TEXT_DONE),
    ("response.content_part.done", PART),
    ("response.output_item.done", ITEM),
    ("response.completed", RESPONSE),
]
CALL: Recorded = [
    ("response.created", RESPONSE),
    ("response.in_progress", RESPONSE),
    ("response.output_item.added", ITEM),
    ("response.output_item.done", ITEM),
    ("response.output_item.added", ITEM),
    *[("response.function_call_arguments.delta", ARGUMENTS_DELTA)] * 12,
    ("response.function_call_arguments.done", ARGUMENTS_DONE),
    ("response.output_item.done", ITEM),
    ("response.completed", RESPONSE),
]
RAW_REASONING: Recorded = [
    ("response.created", RESPONSE),
    ("response.in_progress", RESPONSE),
    ("response.output_item.added", ITEM),
    ("response.content_part.added", PART),
    *[("response.reasoning_text.delta", TEXT_DELTA - {"logprobs"})] * 26,
]
MESSAGE = {"id", "type", "status", "content", "role"}
FUNCTION_CALL = {"id", "type", "status", "arguments", "call_id", "name"}
OUTPUT_TEXT = {"type", "annotations", "logprobs", "text"}
COMPLETED = {
    *("id", "object", "created_at", "status", "background", "completed_at", "error", "incomplete_details"),
    *("instructions", "max_output_tokens", "model", "output", "parallel_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning", "service_tier", "store", "temperature", "text"),
    *("tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage", "metadata"),
}
"""Fields of the last response of `TEXT` that concern a local model. It has these besides: conversation, the penalties,
max_tool_calls, moderation, safety_identifier, user."""
USAGE = {"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"}
