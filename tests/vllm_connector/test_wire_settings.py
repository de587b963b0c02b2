"""Where a vLLM server's wire listens, from the environment of a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych_frontend.core_client.curve import new_keys
from diptych_protocol import InvalidRequestError
from diptych_vllm.settings import ServedPort


def test_a_port_alone_is_on_loopback() -> None:
    settings = ServedPort.of({"DIPTYCH_CORE_PORT": "5557"})
    assert settings.endpoint == "tcp://127.0.0.1:5557"
    assert settings.keys is None


def test_a_pod_s_port_has_the_service_s_keys(tmp_path: Path) -> None:
    keys = new_keys()
    (tmp_path / "curve-public").write_text(keys.public)
    (tmp_path / "curve-secret").write_text(keys.secret)
    settings = ServedPort.of(
        {
            "DIPTYCH_CORE_PORT": "5557", "DIPTYCH_BIND_HOST": "fd00::7",
            "DIPTYCH_KEYS_DIR": str(tmp_path), "DIPTYCH_REVISION": "r1", "POD_NAME": "pod-0",
        }
    )  # fmt: skip
    assert settings.endpoint == "tcp://[fd00::7]:5557"
    assert settings.keys == keys
    assert (settings.revision, settings.engine_id) == ("r1", "pod-0")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"DIPTYCH_CORE_PORT": ""}, "DIPTYCH_CORE_PORT"),
        ({"DIPTYCH_CORE_PORT": "0"}, "DIPTYCH_CORE_PORT"),
        ({"DIPTYCH_CORE_PORT": "65536"}, "DIPTYCH_CORE_PORT"),
        ({"DIPTYCH_BIND_HOST": "engine.example"}, "DIPTYCH_BIND_HOST"),
        ({"DIPTYCH_BIND_HOST": "0.0.0.0"}, "DIPTYCH_KEYS_DIR"),
        ({"DIPTYCH_KEYS_DIR": "/nowhere"}, "keys"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ServedPort.of({"DIPTYCH_CORE_PORT": "5557", **changed})
    assert refused.value.param == named
