"""Turns a conversation into what a vision-language model takes: checks, chat template, token ids, patches, rotary positions.

The checkpoint's own template and tokenizer decide what a conversation looks like. A model package reads the tokenizer with the
library it belongs to and hands it over as a `ChatTokenizer`, so nothing here imports that library. Two things are done here
instead of by the reference processors:

- Control tokens come from the template only. Text that spells one (`<|im_end|>`, `<|image|>`) stays text: it is split into
  ordinary tokens, so nobody can end a turn or claim a picture by typing. Tokens of the vocabulary that are neither marked special
  nor named by the model package (`<think>`, `<tool_call>`) are found in text, as the references find them.
- Each picture's placeholder is expanded to as many tokens as the vision tower gives features for it, and every placeholder must
  have its picture and every picture its placeholder.

Everything here runs in worker threads and changes no state after construction.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from kaminari_core.errors import CheckpointError, PromptTooLongError, RequestError
from kaminari_core.flow import ImagePart, Message, Prepared, Request, Saw, TextPart
from kaminari_core.patches import ImageProcessor
from kaminari_core.protocols import Detokenizer
from kaminari_core.rope import Segment, rotary_positions
from kaminari_core.text import ByteDetokenizer, byte_level_vocabulary
from kaminari_core.weights import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
_NONCHARACTER = "\ufdd0"


class ChatTokenizer(Protocol):
    """The part of transformers' tokenizers that a conversation needs."""

    chat_template: Any
    backend_tokenizer: Any
    """A `tokenizers.Tokenizer`."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Render the turns with the template."""
        ...


class ConversationProcessor:
    """Prepares the requests for one checkpoint.

    `image_token` is the id of a picture's placeholder; `control` are further ids that only the template may place, beside those
    that the tokenizer marks special. `longest` is the most tokens of a prompt. `default_prompt` is what a last user message that
    is only pictures asks for. `refusals` are the exceptions by which the tokenizer's templates refuse a conversation.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        images: ImageProcessor,
        *,
        image_token: int,
        longest: int,
        default_prompt: str,
        refusals: tuple[type[Exception], ...],
        control: Collection[int] = (),
    ) -> None:
        self._images, self._longest, self._refusals = images, longest, refusals
        self._image_token, self._default_prompt = image_token, default_prompt
        self._template = tokenizer
        # One setting for the life of the tokenizer: a call that passed it would change state that threads share.
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        if image_token not in added:
            raise CheckpointError(f"image_token_id {image_token} is no added token of the checkpoint's tokenizer")
        # What only the template may place must be special, or the tokenizer would find it in text.
        self._tokenizer.add_special_tokens([added[token] for token in sorted({image_token, *control} & added.keys())])
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {token.content: index for index, token in added.items() if token.special}
        self._vocabulary = byte_level_vocabulary(self._tokenizer)
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._try_template()

    def prepare(self, request: Request) -> Prepared:
        """Check a request and turn it into model inputs. Raises RequestError with the `param` at fault."""
        started = time.perf_counter()
        check_messages(request.messages)
        messages = with_default_prompt(request.messages, self._default_prompt)
        pictures = [part for message in messages for part in message.parts if isinstance(part, ImagePart)]
        patches, saw = self._images.see(pictures)
        tokens, segments = self._expand(self._tokenize(messages), saw)
        if len(tokens) > self._longest:
            raise self._too_long(len(tokens), saw)
        positions, following = rotary_positions(segments)
        seconds = time.perf_counter() - started
        return Prepared(request, tuple(tokens), positions, following, patches, saw, seconds)

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one reply."""
        return ByteDetokenizer(self._vocabulary)

    def _try_template(self) -> None:
        """Render the plainest conversation. Raises CheckpointError: a template that cannot even do that serves nobody."""
        try:
            self._render([{"role": "user", "content": self._default_prompt}])
        except RequestError as error:
            raise CheckpointError(f"the checkpoint cannot be used: {error}") from error

    def _tokenize(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation and the opening of the reply, with one image token per picture."""
        guard = _NONCHARACTER
        texts = [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]
        while any(guard in text for text in texts):
            guard += _NONCHARACTER
        rendered = self._render([self._turn(message, guard) for message in messages])
        tokens: list[int] = []
        for piece in self._control_pattern.split(rendered):
            if piece in self._control:
                tokens.append(self._control[piece])
            elif piece:
                tokens += self._tokenizer.encode(piece.replace(guard, ""), add_special_tokens=False).ids
        return tokens

    def _turn(self, message: Message, guard: str) -> dict[str, Any]:
        """One message as templates take it, its text guarded: a string when it is text only, else a list of parts."""
        role = "system" if message.role == "developer" else message.role
        parts: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                parts.append({"type": "image"})
            elif parts and "text" in parts[-1]:
                # Joined before they are guarded: two parts could spell a control token together.
                parts[-1]["text"] += part.text
            else:
                parts.append({"type": "text", "text": part.text})
        for turn in parts:
            if "text" in turn:
                turn["text"] = self._guarded(turn["text"], guard)
        if all("text" in turn for turn in parts):
            return {"role": role, "content": "".join(turn["text"] for turn in parts)}
        return {"role": role, "content": parts}

    def _guarded(self, text: str, guard: str) -> str:
        """Break every control token that the text spells by a string that occurs nowhere in the request."""
        return self._control_pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)

    def _render(self, turns: list[dict[str, Any]]) -> str:
        try:
            rendered = self._template.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except self._refusals as error:
            raise RequestError(
                f"the model's chat template refuses the conversation: {error}", param="messages"
            ) from error
        for index, turn in enumerate(turns):
            if turn["role"] != "assistant" and any(text.strip() not in rendered for text in _texts(turn["content"])):
                raise RequestError(
                    f"the model's chat template leaves messages[{index}] (role {turn['role']}) out; leave it out or move it",
                    param=f"messages[{index}]",
                )
        return str(rendered)

    def _expand(self, tokens: Sequence[int], saw: Sequence[Saw]) -> tuple[list[int], list[Segment]]:
        """Repeat each image token for its picture's visual tokens; also the layout that positions follow."""
        placed = tokens.count(self._image_token)
        if placed != len(saw):
            raise RequestError(
                f"the model's chat template places {placed} of the request's {len(saw)} pictures", param="messages"
            )
        expanded: list[int] = []
        segments: list[Segment] = []
        pictures = iter(saw)
        run = 0
        for token in tokens:
            if token != self._image_token:
                expanded.append(token)
                run += 1
                continue
            picture = next(pictures)
            expanded += [token] * picture.visual_tokens
            segments += [run, picture.grid]
            run = 0
        return expanded, [*segments, run]

    def _too_long(self, length: int, saw: Sequence[Saw]) -> PromptTooLongError:
        visual = sum(picture.visual_tokens for picture in saw)
        pictures = f", {visual} of them from {len(saw)} picture{'s' if len(saw) > 1 else ''}" if saw else ""
        return PromptTooLongError(
            f"the prompt has {length} tokens{pictures}, but the context holds {self._longest}; shorten it, allow fewer visual "
            "tokens (--visual-tokens), or start with a larger --max-length",
            length,
            saw,
        )


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError for a conversation that chat templates have no place for."""
    if not messages:
        raise RequestError("the request has no messages", param="messages", code="empty_messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise RequestError(
                f"{where} has the unknown role {message.role!r}; known are {', '.join(ROLES)}", param=f"{where}.role"
            )
        if message.role in ("system", "developer") and index > 0:
            raise RequestError(f"{where} is a {message.role} message, which must come first", param=f"{where}.role")
        # An assistant turn may be empty: it stands for a reply that was.
        if message.role != "assistant" and not any(_says_something(part) for part in message.parts):
            raise RequestError(f"{where} has no content", param=f"{where}.content", code="empty_content")
        for number, part in enumerate(message.parts):
            _check_part(part, message.role, where, f"{where}.content[{number}]")
    if all(message.role != "user" for message in messages):
        raise RequestError("the request has no user message to reply to", param="messages", code="no_user_message")


def with_default_prompt(messages: Sequence[Message], prompt: str) -> Sequence[Message]:
    """The conversation, with `prompt` added to its last user message when that is only pictures."""
    index = max(index for index, message in enumerate(messages) if message.role == "user")
    message = messages[index]
    if any(isinstance(part, TextPart) and part.text.strip() for part in message.parts):
        return messages
    asked = Message(message.role, (*message.parts, TextPart(prompt)))
    return (*messages[:index], asked, *messages[index + 1 :])


def read_tokenizer(checkpoint: Path, load: Callable[[Path], Any]) -> ChatTokenizer:
    """The checkpoint's tokenizer with its chat template, read by `load`. Raises CheckpointError when either cannot be read."""
    if not any((checkpoint / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise CheckpointError(f"the checkpoint {checkpoint} has no tokenizer.json")
    try:
        tokenizer: ChatTokenizer = load(checkpoint)
    except Exception as error:  # transformers and tokenizers raise many classes, bare Exception among them
        raise CheckpointError(f"the tokenizer of {checkpoint} cannot be read: {error}") from error
    if tokenizer.chat_template is None:
        # Older checkpoints keep the template of the processor in a file of its own.
        template = read_json(checkpoint, "chat_template.json").get("chat_template")
        if not isinstance(template, str):
            raise CheckpointError(f"{checkpoint / 'chat_template.json'} has no chat_template")
        tokenizer.chat_template = template
    return tokenizer


def _check_part(part: TextPart | ImagePart, role: str, where: str, param: str) -> None:
    if isinstance(part, ImagePart):
        if role != "user":
            raise RequestError(
                f"{where} is a {role} message and has a picture; pictures belong in user messages", param=param
            )
        return
    try:
        part.text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode: {error}", param=param) from error


def _says_something(part: TextPart | ImagePart) -> bool:
    return isinstance(part, ImagePart) or bool(part.text.strip())


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
