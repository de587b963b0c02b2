"""Log-probabilities of a prompt are converted by whoever reads them, not by who passes them on."""

from __future__ import annotations

from array import array

from diptych_frontend.text.collector import PromptLogprobs
from diptych_protocol import Logprob, LogprobsTensors
from diptych_protocol.arrays import Array


def tensors(rows: int, columns: int) -> LogprobsTensors:
    cells = rows * columns
    return LogprobsTensors(
        Array("int32", (rows, columns), array("i", range(cells)).tobytes()),
        Array("float32", (rows, columns), array("f", [-float(i) for i in range(cells)]).tobytes()),
        Array("int32", (rows,), array("i", [7] * rows).tobytes()),
    )


def test_a_row_is_made_when_it_is_read() -> None:
    asked: list[int] = []

    def words_of(token_id: int) -> tuple[str, bytes]:
        asked.append(token_id)
        return f"<{token_id}>", b"%d" % token_id

    rows = PromptLogprobs(tensors(1000, 2), words_of)
    assert (len(rows), rows[0], asked) == (1001, None, [])
    assert rows[2] == {2: Logprob(-2.0, 7, "<2>", b"2"), 3: Logprob(-3.0, 1, "<3>", b"3")}
    assert asked == [2, 3]
    assert rows[-1] == rows[1000]
    assert rows[:2] == [None, rows[1]]


def test_a_prompt_of_one_token_has_one_empty_row() -> None:
    assert list(PromptLogprobs(tensors(0, 3), lambda token_id: (str(token_id), b""))) == [None]
