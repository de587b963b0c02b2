"""How vLLM itself reads its arguments, where it is installed."""

from __future__ import annotations

import fnmatch
import json
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from vllm_kit.environment import START_S, VENV, needs_vllm

from diptych_operator.api.base import Rule
from diptych_operator.api.vllm_arguments import (
    ARGUMENT_RULES,
    EQUAL_ARGUMENTS,
    EQUAL_IN_BOTH,
    OWNED_ARGUMENTS,
)

pytestmark = [*needs_vllm, pytest.mark.timeout(START_S)]

OURS = '--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
"""As the operator gives it, behind the arguments of a service."""
SCRIPT = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
read = []
for arguments in json.load(sys.stdin):
    got = vars(parser.parse_args(["model", *arguments]))
    transfer = got["kv_transfer_config"]
    read.append({
        "role": transfer and transfer.kv_role,
        "ranks": got["tensor_parallel_size"],
        "host": got["host"],
    })
print("RESULT", json.dumps({"options": sorted(parser._option_string_actions), "read": read}))
"""


def ask_vllm(*commands: list[str]) -> dict[str, Any]:
    """`options`: all names; `read`: what vLLM understands of each command."""
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", SCRIPT],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [""]
    assert result, done.stderr
    answer: dict[str, Any] = json.loads(result.removeprefix("RESULT "))
    return answer


def breaks(rules: Sequence[Rule], argument: str) -> bool:
    return not all(rule.kept([argument]) for rule in rules)


def test_beginnings_and_parts_reach_what_the_operator_gives_so_they_are_refused() -> None:
    """A part of a JSON argument wins although the whole one comes behind it."""
    commands = [
        ["--kv-t.kv_role=kv_both", OURS],
        ["--kv-transfer-config.kv_role=kv_both", OURS],
        ["--kv_transfer_config.kv_role=kv_both", OURS],
        ["--tensor-par=2"],
        ["--ho=192.0.2.1"],
        ["--additional-config.a", "--host=127.0.0.1"],
    ]
    read = ask_vllm(*commands)["read"]
    assert [each["role"] for each in read[:3]] == ["kv_both"] * 3
    assert read[3]["ranks"] == 2
    assert read[4]["host"] == "192.0.2.1"
    assert read[5]["host"] is None, "the next argument was taken for a value"
    dashed = (command[0].replace("_", "-", 2) for command in commands[:5])
    assert all(breaks(ARGUMENT_RULES, argument) for argument in dashed)


def test_no_name_of_vllm_is_taken_for_the_beginning_of_another() -> None:
    options = {option for option in ask_vllm()["options"] if option.startswith("--")}
    for rules, groups in ((ARGUMENT_RULES, OWNED_ARGUMENTS), (EQUAL_IN_BOTH, EQUAL_ARGUMENTS)):
        names = [name for group in groups.values() for name in group]
        refused = {option for option in options if breaks(rules, option)}
        plain = (f"--{negated}{name}" for name in names for negated in ("", "no-"))
        listed = {option for name in plain for option in fnmatch.filter(options, name)}
        assert refused, "else the names are no longer vLLM's"
        assert refused <= listed
