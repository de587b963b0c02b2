"""Configurations say what is wrong with them: the field, and what it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import each

from diptych_protocol import (
    EngineConfig,
    EngineSettings,
    InvalidRequestError,
    KVTransferConfig,
    RouterConfig,
)
from diptych_protocol.command_line import config_in
from diptych_protocol.field_ranges import descriptions, ranges


@pytest.mark.parametrize("kind", [EngineConfig, KVTransferConfig, RouterConfig])
def test_every_setting_has_a_meaning_and_a_range(kind: type[msgspec.Struct]) -> None:
    fields = set(kind.__struct_fields__)
    assert set(descriptions(kind)) == set(ranges(kind)) == fields
    assert "of its type" not in " ".join(ranges(kind).values())


@each(
    ("changes", "message"),
    [
        ({"block_size": 3}, "block_size must be 1, 2, 4, 8, "),
        ({"model": ""}, "model must be set, not ''"),
        ({"max_num_seqs": True}, "max_num_seqs must be between 1 and 4096, not True"),
        ({"drain_seconds": float("nan")}, "drain_seconds must be between 0 and 86400, not nan"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens must be at least max_num_seqs, not 512"),
        ({"data_parallel_rank": 1}, "data_parallel_rank must be below data_parallel_size, not 1"),
        ({"kv_transfer": {}}, "kv_transfer must be a KVTransferConfig or left out, not {}"),
        (
            {"kv_transfer": KVTransferConfig(lease_seconds=-1.0)},
            "lease_seconds must be between 0.001 and 3600, not -1.0",
        ),
        (
            {"kv_transfer": KVTransferConfig(listen_port=65536)},
            "listen_port must be between 0 and 65535, not 65536",
        ),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = EngineConfig(**{"model": "dummy://", **changes})
    with pytest.raises(InvalidRequestError) as refusal:
        config.check()
    assert str(refusal.value).startswith(message)
    assert refusal.value.param == message.partition(" ")[0]


def test_what_routers_have_of_engines_has_one_meaning_range_and_default() -> None:
    engines, routers = (
        {field.name: field for field in msgspec.structs.fields(kind)}
        for kind in (EngineSettings, RouterConfig)
    )
    shared = engines.keys() & routers.keys()
    assert len(shared) == 5
    for name in shared:
        assert (routers[name].type, routers[name].default) == (
            engines[name].type,
            engines[name].default,
        )


def test_a_router_refuses_what_an_engine_would() -> None:
    with pytest.raises(InvalidRequestError, match="max_held must be at least 0, not -1"):
        RouterConfig(model="m", max_held=-1).check()


def test_settings_of_a_newer_operator_are_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "router.json").write_text('{"model": "m", "later": 1, "slo": {"joules": 2}}')
    assert config_in(tmp_path / "router.json", RouterConfig) == RouterConfig("m")
    assert "settings that this version does not have: later, slo.joules" in caplog.text
