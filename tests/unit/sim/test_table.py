"""Cells as people read them."""

from plexrl.sim.table import Column, cell, show


def test_cells():
    share = Column("s", "share", "%")
    assert cell(share, 0.3136) == "31.36 %"
    assert cell(share, None) == "-"
    assert cell(share, [0.1, 0.2]) == "10.00 % to 20.00 %"
    assert cell(Column("n", "n", ",.0f"), 12345.6) == "12,346"
    assert cell(Column("t", "t", text=True), "spread") == "spread"


def test_show_prints_every_row_and_note(capsys):
    show("Title", [Column("a", "first", text=True), Column("b", "second", ".1f")], [{"a": "[x]", "b": 2}], ["a note"])
    printed = capsys.readouterr().out
    assert "Title" in printed and "[x]" in printed and "2.0" in printed and "a note" in printed
