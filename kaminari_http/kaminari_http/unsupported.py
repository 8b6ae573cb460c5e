"""Keys of OpenAI's API that would change the reply and are not supported here: refused by name instead of ignored in silence.

Each table maps a key to its values (besides null) that change nothing, which are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kaminari_core.errors import RequestError

Harmless = Mapping[str, tuple[Any, ...]]

CHAT: Harmless = {
    "add_generation_prompt": (True,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_grammar": (),
    "json_schema": (),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Of chat completions."""

_OF_BOTH = (
    "bad_words min_p min_tokens length_penalty json_schema grammar stop_token_ids guided_grammar truncate_prompt_tokens "
    "use_beam_search"
).split()

COMPLETIONS: Harmless = {
    "best_of": (1,),
    "echo": (False,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    **{name: CHAT[name] for name in _OF_BOTH},
}
"""Of the older completions."""

RESPONSES: Harmless = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}
"""Of responses, which are not kept: whatever refers to an earlier one cannot be found."""


def refuse_unsupported(body: Mapping[str, msgspec.Raw], harmless: Harmless) -> None:
    """Raise RequestError for the first key of a request that is in the table and has an effect."""
    for name, raw in body.items():
        if name in harmless:
            _refuse_effect(name, msgspec.json.decode(raw), harmless[name])


def _refuse_effect(name: str, value: Any, harmless: tuple[Any, ...]) -> None:
    # Not `value in harmless`: to Python, true is 1 and false is 0.
    if value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless):
        return
    allowed = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in harmless)])
    raise RequestError(
        f"{name} is not supported; leave it out or send {allowed}.", param=name, code="unsupported_parameter"
    )
