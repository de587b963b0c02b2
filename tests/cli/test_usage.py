"""`diptych usage`: the tokens of keys, once their signatures are checked."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from diptych.main import main
from diptych_frontend.quotas.books import Books
from diptych_frontend.quotas.ledger import Bill

DAY_S = 86_400


def test_days_are_checked_and_added_up(tmp_path: Path) -> None:
    books = Books(tmp_path, lambda: b"secret")
    for day in (20_000, 20_001, 20_002):
        bill = Bill("alice", prompt=day - 19_999, generated=10)
        books.post([bill], [], float(day * DAY_S))
    books.close()
    key = tmp_path / "key"
    key.write_text("secret\n")
    days = sorted(map(str, tmp_path.glob("*.jsonl")))
    assert len(days) == 2
    result = CliRunner().invoke(main, ["usage", "--key", str(key), *days])
    assert result.exit_code == 0, result.output
    assert result.output.split() == [
        *("KEY", "REQUESTS", "PROMPT", "GENERATED"),
        *("alice", "2", "3", "20"),
    ]
    result = CliRunner().invoke(main, ["usage", "--key", str(key), *days, days[0]])
    assert result.exit_code == 2
    assert f"{days[0]}: the same as {days[0]}" in result.output
    key.write_text("another")
    result = CliRunner().invoke(main, ["usage", "--key", str(key), *days])
    assert result.exit_code == 1
    assert "the signature of line 1 is wrong" in result.output
    key.write_text("\n")
    assert CliRunner().invoke(main, ["usage", "--key", str(key), *days]).exit_code == 2
