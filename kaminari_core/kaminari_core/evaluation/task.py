"""Which task may be asked of every page of a set."""

from __future__ import annotations

from kaminari_core.errors import UnknownNameError, UsageError
from kaminari_core.registry import unknown_name
from kaminari_core.specs import ModelSpec
from kaminari_core.tasks import FIELD


def check_task(spec: ModelSpec, task: str) -> None:
    """Raise UsageError for a task that the model lacks, or that needs a template, which is another one for each page."""
    if task not in spec.tasks:
        raise UnknownNameError(unknown_name(f"task of {spec.name}", task, spec.tasks))
    if FIELD in spec.tasks[task]:
        raise UsageError(f"the task {task!r} needs a template, which is another one for each page; choose another task")
