"""Renders a model's own chat template (Jinja) in a sandbox.

The environment is the one Hugging Face templates are written for: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that keeps Unicode, and `{% generation %}` as a no-op.
Reference: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxkv.errors import TokenError


class _TemplateError(jinja2.TemplateError):
    """Raised by a template through `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text; it prints as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's protocol)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise _TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    return environment.from_string(source)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the conversation as the template writes it.

    Args:
      template: Jinja source.
      messages: mappings with at least "role" and "content".
      add_generation_prompt: whether to open the assistant's next turn.
      variables: further names the template may use, such as bos_token or tools.

    Raises:
      TokenError: the template is malformed, refuses the messages, or does what the sandbox forbids.
    """
    try:
        return _compile(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **{"tools": None, "documents": None, **(variables or {})},
        )
    except _TemplateError as error:
        raise TokenError(f"the chat template refuses the messages: {error}") from error
    except jinja2.TemplateError as error:
        raise TokenError(f"the chat template cannot be rendered: {error}") from error
    except Exception as error:  # a template is a program: it can fail in any way
        raise TokenError(f"the chat template fails on these messages: {error}") from error
