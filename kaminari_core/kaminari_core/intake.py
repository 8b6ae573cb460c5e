"""What can be told of a request before anything is prepared, and so by an engine that has no model in its own process."""

from __future__ import annotations

from typing import get_args

from kaminari_core.errors import DeadlineError, RequestError
from kaminari_core.flow import ImagePart, Priority, Request
from kaminari_core.protocols import ModelShape
from kaminari_core.sampling import validate

LONGEST_TIMEOUT = 86_400
"""Seconds. A clock cannot wait for any number of them."""


def check_request(request: Request, shape: ModelShape, name: str) -> None:
    """Refuse what can never be served, as far as that can be told without preparing it. Raises RequestError."""
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}, but must be at least 1", param="max_tokens")
    if request.timeout is not None and not 0 < request.timeout <= LONGEST_TIMEOUT:
        most = f"{LONGEST_TIMEOUT:,} (a day), or absent"
        raise RequestError(f"timeout is {request.timeout}, but must be above 0 and at most {most}", param="timeout")
    if request.priority not in get_args(Priority):
        raise RequestError(f"priority is {request.priority!r}; choose interactive or batch", param="priority")
    if request.structure is not None and request.ignore_end:
        raise RequestError(
            "a reply that is held to a structure ends with it, so it cannot go on past its end", param="ignore_eos"
        )
    validate(request.sampling, shape.vocabulary)
    if shape.image_unit is None:
        _refuse_pictures(request, name)


def deadline_error(request: Request) -> DeadlineError:
    """The error of a request that took too long."""
    return DeadlineError(f"the request did not end within its timeout of {request.timeout:g} s, so it was stopped")


def _refuse_pictures(request: Request, name: str) -> None:
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, ImagePart):
                raise RequestError(
                    f"{part.name}: the model {name!r} takes no pictures; leave them out or serve a vision model",
                    param=part.name,
                    code="pictures_not_supported",
                )
