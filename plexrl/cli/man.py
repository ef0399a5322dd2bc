"""`plexrl man`: manual pages out of the help texts, one for plexrl and one for each of its verbs."""

import importlib
import time
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from plexrl import __version__
from plexrl.types import BadInput

app = typer.Typer(add_completion=False)
EXIT_CODES = (
    ("0", "It is done."),
    ("1", "Something else went wrong, or what the verb asks about is not so (each verb says what)."),
    ("2", "The request is wrong, or not yours to make; trying again unchanged is useless."),
    ("3", "A model, a gang or a snapshot does not fit."),
    ("4", "The pool, a daemon or Slurm does not answer; trying again may help."),
    ("5", "A policy's limit or a budget is used up."),
    ("78", "Of a job: it asked for a pool and could not be attached."),
)


@app.command()
def man(
    directory: Path = typer.Argument(..., metavar="DIR", help="Where they go: DIR/plexrl.1, DIR/plexrl-queue.1, .."),
) -> None:
    """Write manual pages, for a folder man1 on MANPATH: plexrl man /usr/local/share/man/man1."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (directory / f"{name}.1").write_text(text, encoding="utf-8")
            print(directory / f"{name}.1")
    except OSError as error:
        raise BadInput(f"{directory} cannot be written ({error.strerror})", "Name a folder of yours") from error


def pages() -> dict[str, str]:
    """name -> page in man(7)'s language."""
    from plexrl.cli.main import COMPLETION, GROUPS
    from plexrl.cli.main import app as root

    found = {}
    verbs = {}
    for name, (_, line) in GROUPS.items():
        command = typer.main.get_command(importlib.import_module(f"plexrl.cli.{name}").app)
        command.params = [each for each in command.params if each.name not in COMPLETION]
        verbs[name] = line
        found[f"plexrl-{name}"] = _page(f"plexrl {name}", line, command)
    whole = typer.main.get_command(root)
    also = [("VERBS", [(f"plexrl {name}", line) for name, line in verbs.items()])]
    return {
        "plexrl": _page("plexrl", "Several RLVR jobs share one resident pool of GPUs under Slurm.", whole, also)
    } | found


def _page(name: str, line: str, command: Any, more: list | None = None) -> str:
    title = name.replace(" ", "-")
    day = time.strftime("%Y-%m-%d", time.gmtime(_built()))
    parts = [f'.TH "{title.upper()}" 1 "{day}" "plexrl {__version__}" "PlexRL"', ".SH NAME"]
    parts.append(f"{_plain(title)} \\- {_plain(line)}")
    context = command.context_class(command, info_name=name)
    parts += [".SH SYNOPSIS", f".B {_plain(name)}", _plain(" ".join(command.collect_usage_pieces(context)))]
    parts += [".SH DESCRIPTION", *_paragraphs(command.help or line)]
    parts += _options(command, context)
    if hasattr(command, "list_commands") and more is None:
        parts.append(".SH VERBS")
        for each in command.list_commands(context):
            verb = command.get_command(context, each)
            if verb is None or verb.hidden:
                continue
            inner = verb.context_class(verb, info_name=each, parent=context)
            parts += [f".SS {_plain(each)}", _plain(" ".join([name, each, *verb.collect_usage_pieces(inner)])), ".PP"]
            parts += [*_paragraphs(verb.help or ""), *_options(verb, inner, heading="")]
    for heading, rows in [*(more or []), ("EXIT STATUS", EXIT_CODES)]:
        parts.append(f".SH {heading}")
        parts += [line for term, text in rows for line in (".TP", f".B {_plain(term)}", _plain(text))]
    return "\n".join([*parts, ""])


def _options(command: Any, context: Any, heading: str = ".SH OPTIONS") -> list[str]:
    rows = []
    for each in command.get_params(context):
        record = None if getattr(each, "hidden", False) else each.get_help_record(context)
        if record is not None and each.name not in ("help", "install_completion", "show_completion"):
            rows += [".TP", f".B {_plain(record[0])}", _plain(record[1] or "")]
            variable = getattr(each, "envvar", None)
            if isinstance(variable, str) and variable not in rows[-1]:
                rows.append(f"(environment: {variable})")
    return [heading, *rows] if rows and heading else rows


def _paragraphs(text: str) -> list[str]:
    found: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        found += [".PP", _plain(" ".join(paragraph.split()))]
    return found


def _plain(text: str) -> str:
    """Without rich's marks, and nothing in it that man(7) would take for its own."""
    text = Text.from_markup(text).plain.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def _built() -> float:
    """When this version was installed, so that the pages of one installation are always the same."""
    return Path(__file__).stat().st_mtime
