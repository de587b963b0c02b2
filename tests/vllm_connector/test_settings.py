"""What the connector refuses when it starts, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from diptych_protocol import InvalidRequestError
from diptych_vllm.settings import ConnectorSettings, require_tested
from diptych_vllm.versions import series_of


@pytest.mark.parametrize(
    ("found", "series"),
    [("0.32.0", "0.32"), ("0.32", "0.32"), ("0.32.1+cpu", "0.32"), ("0.33.0", "0.33")],
)
def test_a_tested_version_is_known_by_its_series(found: str, series: str) -> None:
    assert series_of(found) == series


@pytest.mark.parametrize("found", ["0.34.0", "0.3", "0.320.1", "1.0", "dev", ""])
def test_another_version_is_refused_with_those_that_were_tested(found: str) -> None:
    sentence = rf"tested with vLLM 0\.32, 0\.33, and this is vLLM {found}"
    with pytest.raises(InvalidRequestError, match=sentence):
        series_of(found)


def test_settings_are_those_of_our_own_hinge_and_two_more() -> None:
    settings = ConnectorSettings.parse(
        {"lease_seconds": 5, "staging": "always", "keys": "/keys", "revision": "r1"}
    )
    assert settings.staging == "always"
    assert (settings.lease_seconds, settings.keys, settings.revision) == (5.0, "/keys", "r1")
    assert settings.listen_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"lease_second": 5}, "lease_second"),
        ({"lease_seconds": 0}, r"\$\.lease_seconds"),
        ({"staging": "never"}, "staging"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(raw: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"kv_connector_extra_config: .*{problem}"):
        ConnectorSettings.parse(raw)


def test_a_configuration_that_was_not_tested_is_refused_with_all_that_is_wrong() -> None:
    require_tested([("pipeline_parallel_size", 1, 1)])
    with pytest.raises(InvalidRequestError) as caught:
        require_tested([("pipeline_parallel_size", 2, 1), ("policy", "recompute", "fail")])
    assert "pipeline_parallel_size is 2, and only 1 was tested; policy is 'recompute'" in str(
        caught.value
    )


def test_each_rank_has_a_port_that_other_engines_can_tell_from_the_first_one_s() -> None:
    settings = ConnectorSettings.parse({"listen_port": 7000})
    settings.require_ports(8)
    assert [settings.of_rank(rank).listen_port for rank in range(3)] == [7000, 7001, 7002]
    anywhere = ConnectorSettings.parse({})
    anywhere.require_ports(1)
    assert anywhere.of_rank(0).listen_port == 0


@pytest.mark.parametrize(("port", "num_ranks"), [(0, 2), (65535, 2), (65530, 8)])
def test_ranks_without_ports_are_refused(port: int, num_ranks: int) -> None:
    settings = ConnectorSettings.parse({"listen_port": port})
    with pytest.raises(InvalidRequestError, match=f"listen_port is {port}, and each of"):
        settings.require_ports(num_ranks)
