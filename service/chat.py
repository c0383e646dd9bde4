"""Conversations to prompts, by the Jinja template that a model's container carries, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

Message = Mapping[str, str]


class ChatError(ValueError):
    """The template is unusable or refused the conversation; says why."""


class _Refused(Exception):
    """The template itself said no (raise_exception)."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        import jinja2  # here, since it takes longer to import than the rest of the service, and not every model has a template
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the model's chat template cannot be compiled: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises ChatError with the template's own words if it refuses."""
        turns = [dict(message) for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=add_generation_prompt, **self._tokens)
        except _Refused as error:
            raise ChatError(f"the model's chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template can fail in every way Python can
            raise ChatError(f"the model's chat template failed: {type(error).__name__}: {error}") from error


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, indent: int | None = None) -> str:
    """As templates expect it: without Jinja's HTML escaping."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
