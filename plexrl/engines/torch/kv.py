"""Keys and values of live sequences in the region's "kv" bucket, and the transformers cache over it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from plexrl.engines.torch.asample import Sequence

STEP = 16  # rows grow in steps of so many tokens, so that similar requests need no new layout


class KvTable:
    """Live sequences as rows of equal length over a fixed number of tokens.

    Rows are dense: row r holds tokens [r * length, (r + 1) * length) of every layer; a step reads keys in place.
    A row that ends is filled by the last one. When a longer row comes, all are laid out anew.

    Memory outside the rows may hold anything, also of another user; a row is cleared when it is given. A masked key
    weighs nothing, unless what lies there is no number.
    """

    def __init__(self, layers: list[Tensor], max_rows: int) -> None:
        """layers: (2, tokens, kv heads, head size) each, views of the region."""
        self.layers = layers
        self.tokens = layers[0].shape[1]
        self.token_bytes = sum(layer[:, :1].nbytes for layer in layers)
        self.max_rows = max_rows
        self.length = 0
        self.rows: list[Sequence] = []

    def fits(self, need: int) -> bool:
        """Whether one more row of `need` tokens has room now."""
        count = len(self.rows) + 1
        return count <= self.max_rows and count * self._length_for(need) <= self.tokens

    def add(self, sequence: Sequence, need: int) -> None:
        """Give the sequence an empty row; it must fit."""
        length = self._length_for(need)
        if length > self.length or (len(self.rows) + 1) * self.length > self.tokens:
            self._lay_out(length)
        sequence.row = len(self.rows)
        sequence.cached = sequence.parked = 0
        self.rows.append(sequence)
        self._clear(self.place(sequence.row), self.place(sequence.row + 1))

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's row; the last row moves into it. What is left behind is cleared: the next may be
        another user's.
        """
        last = self.rows.pop()
        start = self.place(last.row)
        used = last.cached
        if last is not sequence:
            self._copy(last.row, sequence.row, last.cached)
            stale = self.place(sequence.row)
            self._clear(stale + last.cached, stale + sequence.cached)
            last.row = sequence.row
            last.parked = 0
            self.rows[last.row] = last
        self._clear(start, start + used)
        sequence.row = None

    def replicate(self, source: Sequence, target: Sequence, count: int) -> None:
        """Copy the first `count` tokens of a row."""
        self._copy(source.row, target.row, count)
        target.cached = count

    def scrub(self) -> None:
        """Zero all tokens but those in use."""
        ends = [(self.place(s.row) + s.cached, self.place(s.row + 1)) for s in self.rows]
        for start, end in [*ends, (self.place(len(self.rows)), self.tokens)]:
            self._clear(start, end)

    def place(self, row: int) -> int:
        """The first token of a row."""
        return row * self.length

    def _length_for(self, need: int) -> int:
        longest = max([need, *(s.request.need for s in self.rows)])
        return min(-(-longest // STEP) * STEP, self.tokens)

    def _copy(self, source: int, target: int, count: int) -> None:
        a, b = self.place(source), self.place(target)
        for layer in self.layers:
            layer[:, b : b + count] = layer[:, a : a + count]

    def _clear(self, start: int, end: int) -> None:
        for layer in self.layers:
            layer[:, start:end].zero_()

    def _lay_out(self, length: int) -> None:
        # Growing moves rows up, so from the last one; shrinking moves them down. A row may overlap its own old place.
        order = self.rows[::-1] if length > self.length else self.rows
        for sequence in order:
            a, b, count = sequence.row * self.length, sequence.row * length, sequence.cached
            for layer in self.layers:
                layer[:, b : b + count] = layer[:, a : a + count].clone()
            self._clear(b + count, b + length)
            sequence.parked = 0
        self.length = length


class Prompt(Cache):
    """Writes one prompt's keys and values into a row; attention sees the prompt only."""

    def __init__(self, table: KvTable, row: int) -> None:
        super().__init__(layers=[])
        self._layers = table.layers
        self._start = table.place(row)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple:
        """key, value: (1, heads, prompt, size)."""
        end = self._start + key.shape[2]
        self._layers[layer_idx][0, self._start : end] = key[0].transpose(0, 1)
        self._layers[layer_idx][1, self._start : end] = value[0].transpose(0, 1)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing before the prompt."""
        return 0


class Rows(Cache):
    """One new token for each of some rows, every row at its own position."""

    def __init__(self, table: KvTable, sequences: list[Sequence], dtype: torch.dtype) -> None:
        """mask: additive (rows, 1, 1, keys), None when all rows are equally long. positions: (rows, 1)."""
        super().__init__(layers=[])
        self._table = table
        where = table.layers[0].device
        rows = [s.row for s in sequences]
        used = torch.tensor([s.cached for s in sequences])
        self._write = (torch.tensor([table.place(r) for r in rows]) + used).to(where)
        self._longest = int(used.max()) + 1
        # Rows side by side are read in place; others (several versions at once) are gathered.
        together = rows == list(range(rows[0], rows[-1] + 1))
        self._side = slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=where)
        self.positions = used[:, None].to(where)
        self.mask: Tensor | None = None
        if int(used.min()) + 1 < self._longest:
            outside = torch.arange(self._longest)[None] > used[:, None]
            mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, -torch.inf)[:, None, None]
            self.mask = mask.to(where)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple:
        """key, value: (rows, heads, 1, size) of the new tokens; returns those of all tokens so far, as views."""
        keys, values = self._table.layers[layer_idx]
        keys.index_copy_(0, self._write, key[:, :, 0])
        values.index_copy_(0, self._write, value[:, :, 0])
        return self._read(keys), self._read(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new one, in the longest row."""
        return self._longest - 1

    def _read(self, flat: Tensor) -> Tensor:
        count, length = len(self._table.rows), self._table.length
        rows = flat[: count * length].view(count, length, *flat.shape[1:])
        return rows[self._side, : self._longest].transpose(1, 2)
