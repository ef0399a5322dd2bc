"""YAML with positions: which line each key of the file stands on."""

from pathlib import Path

import yaml

from plexrl.types import BadInput

Location = tuple[str | int, ...]


class Source:
    """A parsed YAML file. data: plain values. lines: location of each key -> its line, counted from 1."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput when the file cannot be read, is not YAML, names a key twice or is not a mapping."""
        self.path = path
        self.lines: dict[Location, int] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise BadInput(f"{path}: cannot be read: {reason}", "Give a readable plexrl.yaml") from error
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.data = {} if root is None else yaml.load(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            problem = getattr(error, "problem", None) or str(error)
            raise BadInput(f"{path}:{line}: not YAML: {problem}", "Mend the indentation or quoting there") from error
        if not isinstance(self.data, dict):
            raise BadInput(f"{path}:1: the file is not a mapping", "Begin with `state_dir:` and `models:`")
        if root is not None:
            self._walk(root, ())

    def line(self, where: Location) -> int:
        """The line of a key, or of the closest key above it that the file has."""
        for length in range(len(where), 0, -1):
            if where[:length] in self.lines:
                return self.lines[where[:length]]
        return 1

    def _walk(self, node: yaml.Node, where: Location) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = (*where, key.value)
                line = key.start_mark.line + 1
                if below in self.lines:
                    raise BadInput(
                        f"{self.path}:{line}: {spell(below)}: the key stands twice",
                        f"Keep one of lines {self.lines[below]} and {line}",
                    )
                self.lines[below] = line
                self._walk(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self.lines[(*where, index)] = value.start_mark.line + 1
                self._walk(value, (*where, index))


def spell(where: Location) -> str:
    """A location as people read it: `models.smollm2.train.gpus`, `accounts[0]`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
