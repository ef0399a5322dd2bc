"""What bench.publish prints, on a tiny model: an update moves what was published and no more."""

import json

from bench import publish
from plexrl.engines import sizing


def test_an_update_moves_the_adapter_or_all_of_the_weights(tiny_model, capsys):
    assert publish.main(["--model", str(tiny_model), "--repeats", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    full, adapter = told["rows"]
    assert (full["case"], adapter["case"]) == ("full", "adapter")
    for row, rank in ((full, None), (adapter, told["rank"])):
        kind = "full" if rank is None else "lora"
        size = sizing.snapshot_bytes(str(tiny_model), told["dtype"], kind, rank, True, True, True)
        assert row["moved_bytes"] == row["bytes"] == size
        assert row["seconds"] > 0 and row["reference_seconds"] > 0 and row["in_place_seconds"] > 0
    assert 0 < full["unchanged"]["elements"] < 1 and "unchanged" not in adapter


def test_without_a_model_it_says_how_to_get_one(tmp_path, capsys):
    assert publish.main(["--model", str(tmp_path)]) == 2
    assert "Run: plexrl model smollm2" in capsys.readouterr().err
