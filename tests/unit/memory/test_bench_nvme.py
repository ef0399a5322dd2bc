"""bench.nvme measures what it says, and leaves nothing."""

import json

from bench.nvme import KEYS, main
from plexrl.types import BadInput


def test_a_row_has_figures_and_nothing_is_left(tmp_path, capsys):
    assert main(["--dir", str(tmp_path), "--mib", "1", "--mib", "9", "--repeats", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["where"] == str(tmp_path) and [row["bytes"] for row in found["rows"]] == [1 << 20, 9 << 20]
    for row in found["rows"]:
        assert all(row[key] > 0 for key in (*KEYS, "spill_ratio", "refill_ratio")) and row["repeats"] == 2
    assert err.count("\n") == 4 and list(tmp_path.iterdir()) == []
    assert main(["--dir", str(tmp_path), "--mib", "1", "--repeats", "1"]) == 0
    assert "1,048,576" in capsys.readouterr().out


def test_nonsense_is_refused(tmp_path, capsys):
    for arguments in (["--repeats", "0"], ["--mib", "-1"], ["--dir", str(tmp_path / "none")]):
        assert main(arguments) == BadInput.exit_code
        assert "bench.nvme: " in capsys.readouterr().err
