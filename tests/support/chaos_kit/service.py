"""A service of real processes that chaos may befall: two prefill and two decode engines, a router.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_kit.bad_news import BadNews
from chaos_kit.faulty_network import FaultyNetwork
from chaos_kit.fetching import order_fetches
from free_ports import free_port
from service_kit import engine_config, make_router

from diptych_frontend.core_client.client import CoreClient
from diptych_frontend.core_client.curve import new_keys, read_keys
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_protocol import (
    CurveKeys,
    EngineConfig,
    EngineCoreOutputs,
    EngineDeadError,
    KVTransferConfig,
    SchedulerStats,
    UtilityError,
)
from diptych_protocol.wire import FOLLOW_PREFIXES, PrefixChanges
from diptych_router.requests.pool_client import PoolClient

LEASE_S = 2.0
LOAD_TIMEOUT_S = 3.0
HOLD_S = 20.0
READY_S = 120.0
"""Until a busy machine has started what was killed, and a canary went through it."""
NUM_BLOCKS, BLOCK_SIZE = 128, 16
MAX_RUNNING, MAX_WAITING = 8, 24
REST_S = LEASE_S + LOAD_TIMEOUT_S + 10.0
"""Until everything that ended badly has been given back."""
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@dataclass(frozen=True, order=True)
class Steering:
    """How a router chooses engines."""

    policy: str = "least_loaded"
    disaggregate: str = "always"

    @property
    def follows(self) -> bool:
        """It listens to what engines tell of their prefixes."""
        return self.policy == "prefix_aware"

    def __str__(self) -> str:
        return f"{self.policy}/{self.disaggregate}"


LEAST_LOADED = Steering()
PREFIX_AWARE, PREFIX_AUTO = Steering("prefix_aware"), Steering("prefix_aware", "auto")


@dataclass(frozen=True)
class Footprint:
    """What a process holds of the machine."""

    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        return cls(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


@dataclass
class Engine:
    """One engine core at an address that it keeps when it is started again."""

    name: str
    host: int
    config: EngineConfig
    address: str
    """host:port for routers."""
    keys_dir: Path
    network: FaultyNetwork | None
    log: Path
    starts: int = 0
    age: int = 0
    """Runs that this process has seen to their ends."""
    first: Footprint | None = None
    """When it was first at rest."""
    process: CoreProcess = field(init=False)
    _probe: CoreClient | None = None
    _told: PrefixChanges | None = None
    """What it remembers, as it told our own line last."""

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def hinge(self) -> tuple[str, int]:
        """Where its hinge listens."""
        transfer = self.config.kv_transfer
        if transfer is None:
            raise RuntimeError(f"{self.name} has no hinge")
        return transfer.listen_host, transfer.listen_port

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def start(self) -> None:
        """Begin to start it; a router finds it when it is ready."""
        with environment(self.ucx_settings(self.host)), _output_to(self.log):
            if self.network is None:
                self.process = self._launch()
            else:
                self.process = self.network.run(self.host, self._launch)
        self.starts += 1
        self.age, self.first = 0, None

    def _launch(self) -> CoreProcess:
        return CoreProcess(self.config, f"tcp://{self.address}", self.keys_dir)

    def ucx_settings(self, host: int) -> dict[str, str]:
        """How a process on that host is to speak to this engine's hinge."""
        if self.network is None:
            return {}
        # Namespaces of one machine share its memory, and UCX would go that way.
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self.network.device(host)}

    def signal(self, number: signal.Signals) -> None:
        self.process.process.send_signal(number)

    def kill(self) -> None:
        self._forget()
        self.signal(signal.SIGKILL)
        self.process.stop()

    @property
    def probe(self) -> CoreClient:
        """A line of our own to it, which no network fault touches."""
        if self._probe is None:
            self._probe = CoreClient(
                self.process.endpoint,
                None,
                on_outputs=self._hear,
                on_lost=lambda _: None,
                patience_s=60.0,
            )
        return self._probe

    def _forget(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _hear(self, message: EngineCoreOutputs) -> None:
        changes = message.prefix_changes
        if changes is not None and changes.whole:
            self._told = changes

    async def remembered(self) -> PrefixChanges:
        """All that it remembers. Raises `EngineDeadError`, `TimeoutError`."""
        await self.stats()  # now there is a connection
        self._told = None
        self.probe.tell(FOLLOW_PREFIXES)
        async with asyncio.timeout(10.0):
            while self._told is None:
                await asyncio.sleep(0.01)
        return self._told

    async def stats(self) -> SchedulerStats:
        return await self.probe.fetch_stats(10.0)

    def fail_if_dead(self) -> None:
        """Raises `EngineDeadError` if it ended by itself."""
        cause = self.process.ended()
        if cause is not None:
            raise EngineDeadError(f"{self.name}: {cause}")


class Service:
    """See `running`."""

    def __init__(
        self,
        model: str,
        folder: Path,
        network: FaultyNetwork | None,
        names: Sequence[str],
        steering: Steering,
    ) -> None:
        self.model = model
        self.steering = steering
        self.news = BadNews()
        self.folder = folder
        self.network = network
        self.keys: CurveKeys = new_keys()
        (folder / "curve-public").write_text(self.keys.public)
        (folder / "curve-secret").write_text(self.keys.secret)
        self.engines = [self._engine(host, name) for host, name in enumerate(names, start=1)]
        self.router: PoolClient | None = None

    def _engine(self, host: int, name: str) -> Engine:
        ip = "127.0.0.1" if self.network is None else self.network.address(host)
        config = engine_config(
            name,
            self.model,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=64,
            max_num_waiting=MAX_WAITING,
            kv_transfer=KVTransferConfig(
                listen_host=ip,
                listen_port=free_port(),
                lease_seconds=LEASE_S,
                load_timeout_s=LOAD_TIMEOUT_S,
            ),
        )
        log = self.folder / f"{name}.log"
        return Engine(name, host, config, f"{ip}:{free_port()}", self.folder, self.network, log)

    def of(self, role: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.role == role]

    def open_router(self) -> PoolClient:
        prefill, decode = (",".join(e.address for e in self.of(r)) for r in ("prefill", "decode"))
        self.router = make_router(
            self.model,
            prefill,
            decode,
            lambda: [read_keys(self.folder)],
            hold_seconds=HOLD_S,
            policy=self.steering.policy,
            disaggregate=self.steering.disaggregate,
        )
        self.news.attach(self.router.pools)
        order_fetches(self.router.pools, random.Random(0), BLOCK_SIZE)
        self.router.start()
        return self.router

    def close_router(self) -> None:
        if self.router is not None:
            self.router.shutdown()
            self.router = None

    async def ready(self) -> None:
        """Wait until every engine may get requests."""
        async with asyncio.timeout(READY_S):
            while not self.is_ready:
                for engine in self.engines:
                    engine.fail_if_dead()
                await asyncio.sleep(0.02)

    @property
    def is_ready(self) -> bool:
        """The router has verified every engine, and may send it requests."""
        if self.router is None:
            return False
        pools = self.router.pools
        links = [x for x in pools.links.values() if pools.usable(x) and pools.verified(x)]
        return len(links) == len(self.engines)

    async def at_rest(self, within_s: float) -> list[str]:
        """Wait until no engine holds anything for anybody; what is not so after that time."""
        deadline = time.monotonic() + within_s
        while True:
            problems = [p for engine in self.engines for p in await unrest(engine)]
            if not problems or time.monotonic() > deadline:
                return problems
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.close_router()
        for engine in self.engines:
            if hasattr(engine, "process"):
                engine.kill()


async def unrest(engine: Engine) -> list[str]:
    """What an engine without requests should not have, in words."""
    try:
        stats = await engine.stats()
    except (EngineDeadError, UtilityError, TimeoutError) as exc:
        return [f"{engine.name}: {exc or 'does not answer'}"]
    hinge = stats.kv_transfer
    if hinge is None:
        return [f"{engine.name} has no hinge"]
    ended = hinge.leases_released + hinge.leases_revoked + hinge.leases_expired
    fetches_ended = hinge.prefix_fetches_completed + hinge.prefix_fetches_failed
    amounts = {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "waiting for KV": stats.num_waiting_for_remote_kv,
        "held blocks": stats.blocks_total - stats.blocks_free,
        "leases": hinge.leases_held,
        "leased blocks": hinge.blocks_held,
        "loads": hinge.loads_in_flight + hinge.prefix_fetches_now,
        "leases without an end": hinge.leases_granted - ended,
        "fetches without an end": hinge.prefix_fetches - fetches_ended,
    }
    return [f"{engine.name}: {count} {what}" for what, count in amounts.items() if count]


@contextlib.asynccontextmanager
async def running(
    model: str,
    folder: Path,
    network: FaultyNetwork | None = None,
    names: Sequence[str] = NAMES,
    steering: Steering = LEAST_LOADED,
) -> AsyncIterator[Service]:
    """A service that is ready. `network`: host 0 has the router, hosts 1 to 4 the engines."""
    service = Service(model, folder, network, names, steering)
    try:
        for engine in service.engines:
            engine.start()
        service.open_router()
        await service.ready()
        yield service
    finally:
        service.close()


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Variables for what is read meanwhile."""
    former = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Processes that start meanwhile write their logs there."""
    sys.stdout.flush()
    sys.stderr.flush()
    own = [os.dup(descriptor) for descriptor in (1, 2)]
    with path.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, former in zip((1, 2), own, strict=True):
            os.dup2(former, descriptor)
            os.close(former)
