"""Chat templates of a model folder, rendered as transformers renders them: sandboxed, and without torch."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plexrl.attach.openai.refusals import Refusal, bad


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; a prompt is rendered as if it were not there."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Template:
    """What turns messages into one text."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        """config: tokenizer_config.json."""
        source = _source(folder, config)
        self._folder = folder
        self._words = {name: _word(value) for name, value in config.items() if name.endswith("_token")}
        self._words = {name: word for name, word in self._words.items() if word is not None}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source) if source else None
        except jinja2.TemplateError as error:
            raise Refusal(500, f"The chat template of {folder} is broken: {error}. Ask the pool's admin") from error

    def render(self, messages: list[dict[str, Any]], words: dict[str, Any]) -> str:
        """The prompt's text, the assistant's turn begun. Raises Refusal for what the template does not take."""
        if self._template is None:
            raise bad("This model has no chat template", "model", "Use /v1/completions")
        try:
            return self._template.render(
                **self._words, **words, messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise bad(f"The model's chat template does not take these messages: {error}", "messages") from error


def _source(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        found = next((each["template"] for each in found if each.get("name") == "default"), "")
    return found


def _word(value: Any) -> str | None:
    """A special token: a text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
