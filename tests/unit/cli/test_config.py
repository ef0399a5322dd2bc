"""`plexrl config check`."""

from typer.testing import CliRunner

from plexrl.cli.config import app
from plexrl.types import BadInput


def test_good(tmp_path):
    (tmp_path / "plexrl.yaml").write_text(
        f"state_dir: {tmp_path}/state\nmodels:\n  none: {{path: {tmp_path}, engine: noop, accounts: [ml]}}\n"
    )
    shown = CliRunner().invoke(app, ["check", str(tmp_path / "plexrl.yaml")])
    assert shown.exit_code == 0
    assert "none" in shown.output and "ml" in shown.output and "good" in shown.output


def test_bad(tmp_path):
    (tmp_path / "plexrl.yaml").write_text("state_dir: here\n")
    assert isinstance(CliRunner().invoke(app, ["check", str(tmp_path / "plexrl.yaml")]).exception, BadInput)
