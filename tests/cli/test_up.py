"""`diptych up` with real processes: they start, restart and end, and none is ever left."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from free_ports import free_port
from waits import FOR_EVER_S, PATIENCE_S, wait_until

Service = dict[str, Any]


PATIENT = """
import sys
from diptych.laptop import supervisor
from diptych.main import main
supervisor.MAX_GRACE_S = float(sys.argv.pop(1))
main()
"""
"""The program, but that it gives pods other than ten seconds."""

EARLY = """
import os, signal
from diptych import up
from diptych.main import main
up.free_ports = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM)
main()
"""
"""The program, told to end when it has a directory and no pod."""


class Up:
    """One `diptych` command that runs in the background."""

    def __init__(
        self,
        directory: Path,
        command: str,
        file: Path,
        port: int,
        grace_s: float | None,
        host: str | None,
        as_installed: bool,
        before: tuple[str, ...],
    ) -> None:
        """as_installed: as users start it, and not by a fork. before: a program that starts it."""
        self.directory = directory
        self.port = port
        self.output_path = directory / "output"
        self.environment = os.environ | {
            "XDG_RUNTIME_DIR": str(directory),
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }
        program = [sys.executable, "-m", "diptych.main"]
        if grace_s is not None:
            program = [sys.executable, "-c", PATIENT, str(grace_s)]
        if as_installed:
            program = [str(Path(sys.executable).parent / "diptych")]
        where = () if host is None else ("--host", host)
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*before, *program, command, str(file), "--port", str(port), *where],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def state(self) -> dict[str, Any]:
        for path in self.directory.glob("diptych-*/state.json"):
            return msgspec.json.decode(path.read_bytes(), type=dict)
        return {}

    def pod(self, name: str) -> dict[str, Any]:
        return next((pod for pod in self.state().get("pods", []) if pod["name"] == name), {})

    def wait_ready(self) -> None:
        wait_until(lambda: "ready in" in self.output or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `diptych` command beside this one."""
        command = [sys.executable, "-m", "diptych.main", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=self.environment
        )


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path, service_file: Callable[[Service], Path]) -> Iterator[Start]:
    """Start a command on a service; whatever it left is killed, and that fails the test."""
    started: list[Up] = []

    def begin(
        service: Service,
        command: str = "up",
        port: int | None = None,
        grace_s: float | None = None,
        host: str | None = None,
        as_installed: bool = False,
        before: tuple[str, ...] = (),
    ) -> Up:
        file = service_file(service)
        started.append(
            Up(tmp_path, command, file, port or free_port(), grace_s, host, as_installed, before)
        )
        return started[-1]

    yield begin
    for up in started:
        left = up.processes() if up.process.poll() is None else []
        up.process.kill()
        up.process.wait()
        clean = ended(left)
        for process in filter(lives, left):
            process.kill()
        assert clean


def ended(processes: list[psutil.Process]) -> bool:
    """Whether all end soon; a zombie has ended, however slowly its new parent reaps."""
    deadline = time.monotonic() + 60
    while any(map(lives, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_service_runs_until_ctrl_c_and_leaves_nothing(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    up = start(small_service(decode=small_pod("engine", "--child")), as_installed=True)
    up.wait_ready()
    assert httpx.get(f"http://127.0.0.1:{up.port}/health", timeout=PATIENCE_S).status_code == 200
    state = up.state()
    assert state["ready"]
    assert {pod["name"]: pod["phase"] for pod in state["pods"]} == {
        "small-prefill-0": "ready",
        "small-decode-0": "ready",
        "small-router-0": "ready",
    }
    assert all(Path(pod["log"]).read_text().startswith("pod small") for pod in state["pods"])
    run_dir = next(up.directory.glob("diptych-small-*"))
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    (keys,) = (run_dir / "secrets").glob("small-keys-*/curve-secret")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert len(keys.read_text()) == 40

    processes = up.processes()
    # The nursery's two, leash and program of each pod, and one program's child.
    assert len(processes) == 9
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0
    assert ended(processes)
    assert not run_dir.exists()


def test_pods_die_with_a_supervisor_that_was_killed(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    up = start(small_service(prefill=small_pod("engine", "--child", "--stubborn")))
    up.wait_ready()
    processes = up.processes()
    up.process.kill()
    assert ended(processes)


def test_a_signal_before_the_first_pod_leaves_nothing(
    tmp_path: Path, service_file: Callable[[Service], Path], small_service: Callable[..., Service]
) -> None:
    """Least of all keys."""
    (base := tmp_path / "runs").mkdir()
    command = [sys.executable, "-c", EARLY, "up", str(service_file(small_service()))]
    answer = subprocess.run(
        [*command, "--port", str(free_port())],
        capture_output=True, timeout=PATIENCE_S, env=os.environ | {"XDG_RUNTIME_DIR": str(base)},
    )  # fmt: skip
    assert (answer.returncode, [*base.iterdir()]) == (128 + signal.SIGTERM, []), answer.stderr


def test_a_service_that_nohup_started_outlives_its_terminal(
    start: Start, small_service: Callable[..., Service]
) -> None:
    up = start(small_service(), before=("nohup",))
    up.wait_ready()
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{up.process.pid}/status").read_text())
    assert ignored is not None
    assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0


def test_a_service_ends_in_order_when_nobody_reads_what_it_says(
    tmp_path: Path, service_file: Callable[[Service], Path], small_service: Callable[..., Service]
) -> None:
    """As `diptych up --plain | tee up.log`, whose `tee` Ctrl-C ends first."""
    command = [sys.executable, "-m", "diptych.main", "up", str(service_file(small_service()))]
    process = subprocess.Popen(
        [*command, "--port", str(free_port())],
        stdout=subprocess.PIPE, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        with process.stdout as told:
            assert any(b"Ctrl-C ends it" in line for line in told)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert [*tmp_path.glob("diptych-*")] == []
    finally:
        process.kill()
        process.wait()


def test_more_pods_than_a_machine_takes_are_refused(
    start: Start, small_service: Callable[..., Service]
) -> None:
    service = small_service()
    service["spec"]["decode"]["replicas"] = 65
    up = start(service)
    assert up.process.wait(PATIENCE_S) == 2
    assert "lower replicas" in up.output


def test_a_pod_dies_with_its_leash(start: Start, small_service: Callable[..., Service]) -> None:
    up = start(small_service())
    up.wait_ready()
    program = psutil.Process(up.pod("small-prefill-0")["pid"])
    leash = program.parent()
    assert leash is not None
    leash.kill()
    assert ended([program])
    wait_until(lambda: up.pod("small-prefill-0")["restarts"] == 1)


def test_a_second_ctrl_c_does_not_wait_for_stubborn_pods(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    stubborn = small_pod("engine", "--stubborn")
    stubborn["spec"]["terminationGracePeriodSeconds"] = int(FOR_EVER_S)
    up = start(small_service(prefill=stubborn), grace_s=FOR_EVER_S)
    up.wait_ready()
    processes = up.processes()
    up.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in up.output)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0
    assert ended(processes)


def test_a_pod_that_still_works_is_told_again_before_it_is_killed(
    start: Start,
    small_service: Callable[..., Service],
    small_pod: Callable[..., Service],
    tmp_path: Path,
) -> None:
    file = tmp_path / "told twice"
    up = start(small_service(decode=small_pod("engine", "--slow-to-end", str(file))), grace_s=5.0)
    up.wait_ready()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(PATIENCE_S) == 0
    assert file.exists()


def test_a_crashed_pod_is_restarted_at_the_same_port(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    up = start(small_service(decode=small_pod("engine", "--child")))
    up.wait_ready()
    before = up.pod("small-decode-0")
    family = psutil.Process(before["pid"]).children()
    os.kill(before["pid"], signal.SIGKILL)
    assert ended(family)
    wait_until(lambda: up.pod("small-decode-0")["restarts"] == 1)
    wait_until(lambda: up.pod("small-decode-0")["phase"] == "ready")
    after = up.pod("small-decode-0")
    assert after["ports"] == before["ports"]
    assert after["pid"] != before["pid"]
    assert "small-decode-0 ended with code 137" in up.output


def test_a_full_disk_ends_no_service_that_runs(
    start: Start, small_service: Callable[..., Service]
) -> None:
    up = start(small_service())
    up.wait_ready()
    partial = next(up.directory.glob("diptych-small-*")) / ".state.json.partial"
    partial.symlink_to("/dev/full")
    os.kill(up.pod("small-decode-0")["pid"], signal.SIGKILL)
    wait_until(lambda: "state cannot be written: [Errno 28]" in up.output)
    wait_until(lambda: "restarts 1" in up.output)
    partial.unlink()
    os.kill(up.pod("small-prefill-0")["pid"], signal.SIGKILL)
    wait_until(lambda: up.pod("small-prefill-0")["phase"] == "ready")
    wait_until(lambda: up.pod("small-decode-0")["restarts"] == 1)


def test_a_pod_may_fail_at_first(
    start: Start,
    small_service: Callable[..., Service],
    small_pod: Callable[..., Service],
    tmp_path: Path,
) -> None:
    up = start(small_service(prefill=small_pod("engine", "--crash-once", str(tmp_path / "mark"))))
    up.wait_ready()
    assert re.search(
        r"small-prefill-0 ended with code 1: came too early \(restart in 1 s", up.output
    )
    assert up.pod("small-prefill-0")["restarts"] == 1


def test_a_pod_that_cannot_start_ends_the_run_with_its_last_lines(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    up = start(small_service(prefill=small_pod("engine", "--crash")))
    assert up.process.wait(PATIENCE_S) == 1
    assert "small-prefill-0 ended with code 1: error: no such model" in up.output
    assert "Error: small-prefill-0 cannot start: error: no such model\nthe end" in up.output
    assert up.output.endswith("log:\n" + "  error: no such model\n  1 thread was busy\n" * 3)
    assert up.state() == {}


def test_a_run_that_cannot_keep_its_files_says_what_to_do(
    service_file: Callable[[Service], Path], small_service: Callable[..., Service], tmp_path: Path
) -> None:
    deep = tmp_path.joinpath(*["x" * 200] * 20)
    deep = Path(str(deep)[: os.pathconf("/", "PC_PATH_MAX") - 10])  # nothing fits into it
    deep.mkdir(parents=True)
    command = [sys.executable, "-m", "diptych.main", "up", str(service_file(small_service()))]
    done = subprocess.run(
        [*command, "--port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": str(deep)},
    )
    assert done.returncode == 1
    assert "Error: this machine does not allow it: [Errno 36] File name too long" in done.stderr
    assert "TMPDIR can name another place" in done.stderr
    assert "Traceback" not in done.stderr


def test_in_a_folder_that_is_no_more_nothing_is_begun(
    service_file: Callable[[Service], Path], small_service: Callable[..., Service], tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    leave = f"import os, sys; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())"
    run = "from diptych.main import main; main()"
    file = str(service_file(small_service()))
    done = subprocess.run(
        [sys.executable, "-c", f"{leave}; {run}", "up", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: the folder you are in has been deleted; go to another one\n"


def test_a_core_that_ended_is_told_by_its_own_words(
    start: Start, small_service: Callable[..., Service]
) -> None:
    said = (
        "diptych engine core: error: no room for the KV cache",
        "diptych small-prefill-0: error: the engine core (pid 7) exited with code 2",
    )
    command = ["sh", "-c", f"echo '{said[0]}'; echo '{said[1]}'; exit 2"]
    template = {"spec": {"containers": [{"name": "engine", "command": command, "args": []}]}}
    up = start(small_service(prefill=template))
    assert up.process.wait(PATIENCE_S) == 1
    assert "small-prefill-0 ended with code 2: no room for the KV cache (restart" in up.output
    assert "Error: small-prefill-0 cannot start: no room for the KV cache\nthe end" in up.output


def test_a_program_that_is_not_there_is_named(
    start: Start, small_service: Callable[..., Service]
) -> None:
    template = {"spec": {"containers": [{"name": "engine", "command": ["/no/such/program"]}]}}
    up = start(small_service(prefill=template))
    assert up.process.wait(PATIENCE_S) == 1
    assert "cannot start '/no/such/program': No such file or directory" in up.output


def test_a_pod_that_does_not_come_up_in_time_is_killed(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    probe = {"periodSeconds": 0.2, "failureThreshold": 1, "httpGet": {"path": "/nothing"}}
    up = start(small_service(prefill=small_pod("engine", startupProbe=probe)))
    assert up.process.wait(PATIENCE_S) == 1
    told = r"small-prefill-0 cannot start: no answer at http://127.0.0.1:\d+/nothing within 0.2 s"
    assert re.search(told, up.output)


def test_a_sick_pod_shows_as_not_ready_and_heals(
    start: Start, small_service: Callable[..., Service], small_pod: Callable[..., Service]
) -> None:
    quick = {"periodSeconds": 0.1, "failureThreshold": 2}
    up = start(small_service(decode=small_pod("engine", readinessProbe=quick)))
    up.wait_ready()
    pid = up.pod("small-decode-0")["pid"]
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: up.pod("small-decode-0")["phase"] == "not ready")
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: up.pod("small-decode-0")["phase"] == "ready")
    assert up.pod("small-decode-0")["pid"] == pid


def test_a_port_in_use_is_named_with_the_remedy(
    start: Start, small_service: Callable[..., Service]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        up = start(small_service(), port=taken.getsockname()[1])
        assert up.process.wait(PATIENCE_S) == 1
    assert (
        f"Error: port {up.port} is in use; stop what listens there, or choose another --port"
        in (up.output)
    )


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///no/such/model.gguf", "spec.model.uri: /no/such/model.gguf does not exist"),
        (
            "package://no_such_package/x.gguf",
            "the Python package 'no_such_package' is not installed",
        ),
    ],
)
def test_a_missing_model_is_found_before_anything_starts(
    start: Start, small_service: Callable[..., Service], uri: str, message: str
) -> None:
    up = start(small_service(model={"uri": uri}))
    assert up.process.wait(PATIENCE_S) == 2
    assert message in up.output


def test_chat_and_status_find_the_running_service(
    start: Start, small_service: Callable[..., Service]
) -> None:
    up = start(small_service())
    up.wait_ready()
    states = msgspec.json.decode(up.run("status", "--json").stdout)
    assert [state["url"] for state in states] == [f"http://127.0.0.1:{up.port}/v1"]
    assert "small-router-0" in up.run("status").stdout

    answer = up.run("chat", "--once", "What is the capital of France?")
    assert (answer.returncode, answer.stdout) == (0, "The capital of France is Paris.\n")
    by_url = up.run("chat", "--url", f"http://127.0.0.1:{up.port}", "--once", "again")
    assert by_url.stdout == answer.stdout
    refused = up.run("chat", "--once", "refuse")
    assert (refused.returncode, refused.stderr) == (1, "Error: HTTP 400: too long\n")
    broken = up.run("chat", "--once", "break")
    assert broken.returncode == 1
    assert "the stream broke off before its end" in broken.stderr

    up.process.terminate()
    up.process.wait(PATIENCE_S)
    assert "no service runs here" in up.run("status").stdout


def test_the_demo_asks_shows_what_it_took_and_ends(
    start: Start, small_service: Callable[..., Service]
) -> None:
    up = start(small_service(), command="demo")
    assert up.process.wait(PATIENCE_S) == 0, up.output
    assert "The capital of France is Paris." in up.output
    rows = dict(re.findall(r"│ (.+?) +│ +(.+?) │", up.output))
    assert rows["tokens"] == "7"
    assert rows["KV blocks handed off"] == "3"
    assert rows["KV bytes handed off"] == "2,211,800"
    assert rows["waited for them (ms)"] == "2.0"
    assert rows["transport"] == "tcp"
    assert float(rows["time to first token (ms)"]) > 0
    assert up.state() == {}


def test_it_says_in_a_line_who_may_use_the_api(
    start: Start, small_service: Callable[..., Service]
) -> None:
    router = {**small_service()["spec"]["router"], "apiKeys": {"secretName": "clients"}}
    up = start(small_service(router=router))
    up.wait_ready()
    line = "the API: open on loopback, no keys; no TLS"
    wait_until(lambda: line in up.output)
    assert line in up.run("status").stdout


def test_an_order_of_the_page_kills_an_engine_which_starts_again(
    start: Start, small_service: Callable[..., Service]
) -> None:
    up = start(small_service())
    up.wait_ready()
    page = f"http://127.0.0.1:{up.port}"
    control = httpx.get(f"{page}/control", timeout=PATIENCE_S).json()
    (file,) = up.directory.glob("diptych-small-*/page-control.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    order = f"{control['url']}/engines/small-decode-0/kill"
    token = {"authorization": f"Bearer {control['token']}"}
    with httpx.Client(timeout=PATIENCE_S) as http:
        elsewhere = token | {"origin": "https://elsewhere.example"}
        assert http.post(order, headers=elsewhere).status_code == 403
        assert http.post(order, headers={"origin": page}).status_code == 401
        assert up.pod("small-decode-0")["restarts"] == 0
        assert http.post(order, headers=token | {"origin": page}).status_code == 200
    wait_until(lambda: up.pod("small-decode-0")["restarts"] == 1)
    wait_until(lambda: up.pod("small-decode-0")["phase"] == "ready")


def test_a_page_for_other_machines_can_kill_nothing(
    start: Start, small_service: Callable[..., Service]
) -> None:
    up = start(small_service(), host="0.0.0.0")
    up.wait_ready()
    assert httpx.get(f"http://127.0.0.1:{up.port}/control", timeout=PATIENCE_S).json() is None
