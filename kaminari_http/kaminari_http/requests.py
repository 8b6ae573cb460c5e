"""From the wire types to the engine's request: messages, pictures and options, checked in the sender's terms."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from kaminari_core.config import EngineConfig
from kaminari_core.data_url import decode_data_url
from kaminari_core.errors import RequestError
from kaminari_core.flow import ImagePart, Message, Part, Request, Sampling, TextPart
from kaminari_core.structured.structure import Structure
from kaminari_core.tasks import fill
from kaminari_http.files import file_url, pages_of_url
from kaminari_http.wire import ChatMessage, FileContent, ImageContent, Options

Value = TypeVar("Value")
Fetched = Mapping[str, bytes]
"""The pictures that were fetched, by URL."""


def request_of(
    messages: tuple[Message, ...],
    options: Options,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    structure: Structure | None = None,
) -> Request:
    """The engine's request for a conversation with these options."""
    return Request(
        messages,
        max_tokens=max_tokens,
        stop=stops_of(options),
        sampling=sampling_of(options, logprobs),
        ignore_end=bool(options.ignore_eos),
        structure=structure,
        priority=options.priority or "interactive",
        timeout=options.timeout,
        loop_guard=options.loop_guard,
        confidence=bool(options.confidence),
    )


def choices_of(request: Request, count: int) -> list[Request]:
    """Several choices: engine requests with an id and a seed of their own."""
    seeds = [choice_seed(request.sampling.seed, index) for index in range(count)]
    return [replace(request, sampling=replace(request.sampling, seed=seed), id=uuid.uuid4().hex) for seed in seeds]


@contextmanager
def in_terms_of(field: str) -> Iterator[None]:
    """Inside, errors about `messages`, which is the engine's word, name `field`, which is the sender's."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param.startswith("messages"):
            error.param = field
        raise


def pictures_of(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, str]]:
    """The URL and the place of every picture of a conversation."""
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImageContent):
                yield part.url, f"messages[{index}].content[{number}]"


def messages_of(messages: Sequence[ChatMessage], fetched: Fetched, config: EngineConfig) -> tuple[Message, ...]:
    """The turns of a conversation, pictures decoded from their data URLs or taken from those that were fetched.

    The pages of documents become pictures, within the limits of `config`.

    Raises RequestError for a conversation without a user's turn and for a turn without content, ImageError for a picture's
    URL, each with the `param` at fault, such as `messages[0].content[1]`.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one user message.", param="messages")
    turns = tuple(_message(message, f"messages[{index}]", fetched, config) for index, message in enumerate(messages))
    if all(turn.role != "user" for turn in turns):
        raise RequestError("messages holds no user message, so there is nothing to reply to.", param="messages")
    return turns


def image_of(url: str, name: str, fetched: Fetched) -> ImagePart:
    """A picture that was fetched, or from its data URL. Raises ImageError with `param` set to `name`."""
    return ImagePart(fetched[url] if url in fetched else decode_data_url(url, name), name)


def stops_of(options: Options) -> tuple[str, ...]:
    """The stop strings, however they were given."""
    if options.stop is None:
        return ()
    return (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)


def sampling_of(options: Options, logprobs: int | None) -> Sampling:
    """The sampling settings. What was not sent is the default: greedy, and no change of the logits."""
    default = Sampling()
    return Sampling(
        temperature=_given(options.temperature, default.temperature),
        top_p=_given(options.top_p, default.top_p),
        # Other servers write -1 for "off".
        top_k=max(0, _given(options.top_k, default.top_k)),
        seed=options.seed,
        repetition_penalty=_given(options.repetition_penalty, default.repetition_penalty),
        presence_penalty=_given(options.presence_penalty, default.presence_penalty),
        frequency_penalty=_given(options.frequency_penalty, default.frequency_penalty),
        logit_bias=options.logit_bias or {},
        logprobs=logprobs,
    )


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of one of several choices: the first has the request's own, the others follow it."""
    if seed is None:
        return None
    return (seed + index + 2**63) % 2**64 - 2**63


def for_task(request: Request, task: str | None, tasks: Mapping[str, str]) -> Request:
    """A request for one of the model's tasks; a last message without words gets the task's prompt. Raises as `task_prompt`."""
    if task is None:
        return request
    check_task(tasks, task)
    *before, last = request.messages
    if last.role == "user" and not any(isinstance(part, TextPart) and part.text.strip() for part in last.parts):
        last = replace(last, parts=(*last.parts, TextPart(task_prompt(tasks, task, None))))
    return replace(request, messages=(*before, last), task=task)


def task_prompt(tasks: Mapping[str, str], task: str, template: Mapping[str, Any] | None) -> str:
    """The prompt of a model's task. Raises RequestError with the tasks there are, or for a template that it cannot take."""
    check_task(tasks, task)
    return fill(task, tasks[task], template)


def check_task(tasks: Mapping[str, str], task: str) -> None:
    """Raise RequestError with the tasks there are for one that the model does not have."""
    if task not in tasks:
        known = ", ".join(sorted(tasks)) or "none"
        raise RequestError(
            f"There is no task {task!r}. This model's tasks: {known}.", param="task", code="unknown_task"
        )


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _message(message: ChatMessage, place: str, fetched: Fetched, config: EngineConfig) -> Message:
    if not message.content:
        return Message(message.role, _no_content(message, place))
    if isinstance(message.content, str):
        return Message(message.role, (TextPart(message.content),))
    parts: list[Part] = []
    for index, part in enumerate(message.content):
        if isinstance(part, ImageContent):
            parts.append(image_of(part.url, f"{place}.content[{index}]", fetched))
        elif isinstance(part, FileContent):
            within = f"{place}.content[{index}]"
            url = file_url(part.file.file_data, None, part.file.file_id, within)
            parts += pages_of_url(url, within, fetched, config)
        else:
            parts.append(TextPart(part.text))
    return Message(message.role, tuple(parts))


def _no_content(message: ChatMessage, place: str) -> tuple[Part, ...]:
    """The parts of a turn whose content is an empty string, an empty list or nothing."""
    if message.content == "":
        return (TextPart(""),)
    if message.role == "assistant" and (message.content == [] or message.tool_calls):
        return ()
    raise RequestError(f"{place} has no content; send a string or a list of parts.", param=f"{place}.content")
