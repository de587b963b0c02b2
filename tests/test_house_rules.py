"""What CONTRIBUTING.md demands of code and tests, where a program can see it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "time"}
TESTS_OF_ROWS = re.compile(r"((?:^@.*\n)*)^(?:async )?def test_contract_([A-Z]\d\d)_", re.MULTILINE)
SOURCES = sorted([*TESTS.rglob("*.py"), *TESTS.parent.joinpath("e2e").glob("*.py")])


def sources_with(words: str) -> Iterator[tuple[str, str]]:
    """Names and texts of files that have something in them."""
    for path in SOURCES:
        if words in (source := path.read_text()):
            yield path.name, source


Node = TypeVar("Node", bound=ast.AST)


def parts(kind: type[Node], source: str) -> Iterator[Node]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, kind))


def reads_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in {("time", clock) for clock in CLOCKS}
        for call in ast.walk(node)
    )


def upper_bounds_on_time(source: str) -> list[int]:
    """Lines that assert that something took less than so long: `time.monotonic() - begin < 5`."""
    found = []
    for node in parts(ast.Assert, source):
        for test in parts_of_comparisons(node):
            sides = [test.left, *test.comparators]
            for left, operator, right in zip(sides, test.ops, sides[1:], strict=False):
                less, more = (left, right)
                if isinstance(operator, ast.Gt | ast.GtE):
                    less, more = right, left
                elif not isinstance(operator, ast.Lt | ast.LtE):
                    continue
                if isinstance(less, ast.BinOp) and reads_a_clock(less) and not reads_a_clock(more):
                    found.append(node.lineno)
    return found


def parts_of_comparisons(node: ast.AST) -> Iterator[ast.Compare]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Compare))


def test_the_rule_sees_what_it_forbids() -> None:
    assert upper_bounds_on_time("assert time.monotonic() - begin < 5") == [1]
    assert upper_bounds_on_time("assert 5 > time.perf_counter() - begin") == [1]
    assert upper_bounds_on_time("assert 1 <= time.monotonic() - begin < 2") == [1]
    assert upper_bounds_on_time("assert time.monotonic() - begin >= 5") == []


def test_no_test_asserts_that_something_was_quick() -> None:
    """That is a matter of the machine. What a busy one makes later, it never makes sooner: a test
    may say that something took at least so long."""
    found = {name: upper_bounds_on_time(source) for name, source in sources_with("import time")}
    assert {name: lines for name, lines in found.items() if lines} == {}


REQUESTS = {"delete", "get", "post", "put", "request", "stream", "AsyncClient", "Client"}


def impatient_requests(source: str) -> list[int]:
    """Lines whose request has the limit of httpx, five seconds. One to an app in this process needs
    no limit."""
    calls = {f"httpx.{name}" for name in REQUESTS}
    return [
        call.lineno
        for call in parts(ast.Call, source)
        if ast.unparse(call.func) in calls
        and not {keyword.arg for keyword in call.keywords} & {"timeout", "transport", None}
    ]


def test_that_rule_sees_impatient_requests() -> None:
    assert impatient_requests("httpx.get(url)") == [1]
    assert impatient_requests("httpx.AsyncClient(base_url=url)") == [1]
    assert impatient_requests("httpx.get(url, timeout=PATIENCE_S)") == []
    assert impatient_requests("httpx.AsyncClient(transport=app)") == []


def test_every_request_says_how_long_it_waits() -> None:
    found = {name: impatient_requests(source) for name, source in sources_with("import httpx")}
    assert {name: lines for name, lines in found.items() if lines} == {}


PARTS = {"early", "encoder", "leased", "pool", "prefixes", "stakes"}
"""What other rooms keep up with themselves: each is an object with an interface of its own."""
OF_ADAPTERS = {"max_loras", "pinned_adapters"}
"""Two fields in which the scheduler is told of adapters."""


def test_other_rooms_use_only_the_view_and_the_commands_of_the_scheduler() -> None:
    """Its queues, tables and totals are its own."""
    engine = TESTS.parent / "engine" / "diptych_engine"
    source = (engine / "scheduling" / "scheduler.py").read_text()
    [scheduler] = [node for node in parts(ast.ClassDef, source) if node.name == "Scheduler"]
    offered = {n.name for n in scheduler.body if isinstance(n, ast.FunctionDef)}
    offered = {name for name in offered if not name.startswith("_")} | PARTS | OF_ADAPTERS
    used = {
        (str(path.relative_to(engine)), name)
        for path in engine.rglob("*.py")
        if path.parent.name != "scheduling"
        for name in used_of_schedulers(path.read_text())
    }
    assert {name for _, name in used} >= {"view", "paused", "pause", "leased"}, (
        "else it sees nothing"
    )
    assert {(path, name) for path, name in used if name not in offered} == set()


def used_of_schedulers(source: str) -> Iterator[str]:
    """The attributes of whatever is called a scheduler."""
    for node in parts(ast.Attribute, source):
        if re.search(r"(^|\W)_?scheduler$", ast.unparse(node.value)):
            yield node.attr


def test_that_rule_sees_what_it_forbids() -> None:
    assert [*used_of_schedulers("self._core.scheduler.waiting.peek()")] == ["waiting"]
    assert [*used_of_schedulers("self._scheduler.load_orders = []")] == ["load_orders"]
    assert [*used_of_schedulers("scheduler.stats.steps += 1")] == ["stats"]


def test_there_is_one_profile_of_hypothesis_and_it_looks_at_no_clock() -> None:
    in_force = hypothesis.settings()
    assert in_force.deadline is None
    assert in_force.derandomize
    assert hypothesis.HealthCheck.too_slow in in_force.suppress_health_check
    for name, source in sources_with("from hypothesis import"):
        for call in parts(ast.Call, source):
            if ast.unparse(call.func) == "settings":
                said = {keyword.arg for keyword in call.keywords}
                assert said <= {"max_examples", "stateful_step_count"}, name


def test_a_seed_that_a_test_draws_can_be_given_back() -> None:
    drawing = re.compile(r"\bseed = random\.randrange")  # that of `make chaos` is an option
    found = {name for name, source in sources_with("seed") if drawing.search(source)}
    assert found == {"drawn_seed.py"}


def test_every_request_to_a_real_model_says_how_long_its_answer_may_be() -> None:
    """A wrong answer must not run to the end of the context."""
    endless = []
    for name, source in sources_with("smollm2"):
        for call in parts(ast.Call, source):
            if ast.unparse(call.func).endswith("completions.create"):
                said = {keyword.arg for keyword in call.keywords}
                if not said & {"max_tokens", None}:  # None: `**fields`
                    endless.append(f"{name}:{call.lineno}")
    assert endless == []


def test_every_row_of_the_contract_has_a_quick_test() -> None:
    quick: set[str] = set()
    slow: set[str] = set()
    for _, source in sources_with("def test_contract_"):
        for decorators, row in TESTS_OF_ROWS.findall(source):
            (slow if "@pytest.mark.slow" in decorators else quick).add(row)
    assert slow <= quick
    assert quick


PACKAGES = (
    "protocol", "frontend", "router", "engine", "kv_transfer", "kernels", "operator", "cli",
    "vllm_connector",
)  # fmt: skip
MOST_MODULES = 25


STARTS_VLLM = re.compile(r"^from (vllm_server|vllm_nixl|vllm_kit.real_server) ", re.MULTILINE)


def test_a_test_that_starts_vllm_is_marked() -> None:
    """Else `make test` would start it, where it is installed."""
    sources = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    starts = {path for path, source in sources.items() if STARTS_VLLM.search(source)}
    marked = {path for path, source in sources.items() if "pytestmark = [*needs_" in source}
    assert starts
    assert starts <= marked


def test_no_folder_of_the_product_is_crowded() -> None:
    folders = {path.parent for room in PACKAGES for path in (TESTS.parent / room).rglob("*.py")}
    for folder in folders:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, folder


def test_a_docstring_is_understood_alone() -> None:
    """What begins with "Of" needs the line above it."""
    found = [
        path.name
        for room in (*PACKAGES, "tests", "benchmarks", "e2e")
        for path in (TESTS.parent / room).rglob("*.py")
        if re.search(r'^\s*"""Of ', path.read_text(), re.MULTILINE)
    ]
    assert found == []
