"""The last release and this version in one service: router, engines and operator in any mixture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_kit.crds import service_of, with_defaults
from free_ports import first_of_free_ports
from last_release import THIS, Version, last_release
from model_kit.questions import QUESTIONS, Question
from prometheus_client.parser import text_string_to_metric_families
from vllm_kit.environment import ENVIRONMENT, SERVE, START_S, needs_vllm
from vllm_kit.tiny_model import save_tiny_model
from waits import PATIENCE_S, wait_until

from diptych.laptop.pods import PACKAGES_FOLDER, LocalPod, local_pods, port_runs
from diptych.laptop.programs import IMPORTED
from diptych_frontend.core_client.curve import new_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

starts_vllm, where_vllm_is = needs_vllm
KEYS = new_keys()
VLLM_BLOCK = 32
VLLM_ARGS = [
    "--dtype=float32", "--enforce-eager", "--num-gpu-blocks-override=64", "--max-model-len=256",
    f"--block-size={VLLM_BLOCK}",
]  # fmt: skip
REPLACED = {"prefill", "decode", "router"}
"""The pods of a revision that an upgrade of the operator replaces: they say what an older operator
left to the API server's defaults, and engines may take longer to start."""
Object = dict[str, Any]


def service(model: str, **spec: Any) -> Object:
    pool = {"replicas": 1, "resources": {"limits": {"cpu": 1}}}
    # Without kernels, which take minutes to compile for another version.
    engine = {"cpuLevel": "none", "kvCacheMemory": "64Mi", "enablePrefixCaching": False}
    return {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "meeting", "namespace": "default"},
        "spec": {
            "model": {"uri": model, "servedName": "smollm2"},
            "engine": engine,
            "prefill": pool,
            "decode": pool,
            **spec,
        },
    }


def stored(raw: Object, version: Version) -> Object:
    """The service as an API server with this version's CRD has stored it: it writes 30.0 as 30."""
    text = json.dumps(with_defaults(raw, version.crd_schema))
    made: Object = json.loads(
        text, parse_float=lambda x: float(x) if float(x) % 1 else int(float(x))
    )
    return made


def render(operator: Version, *raws: Object) -> list[Any]:
    """What an operator makes of services: its objects, or why it refuses one."""
    answers: list[Any] = operator.ask("render", [KEYS.public, KEYS.secret], raws)
    return answers


@dataclass
class Release:
    """The pods that the operator of the other version has rendered, run by this one's programs."""

    version: Version
    folder: Path
    pods: dict[str, LocalPod]

    @classmethod
    def of(cls, version: Version, objects: list[Object], folder: Path) -> Release:
        for item in objects:
            plural = f"{item['kind'].lower()}s"
            place = folder / plural / item["metadata"]["name"]
            for name, text in item.get("data", {}).items():
                place.mkdir(parents=True, exist_ok=True)
                content = base64.b64decode(text) if item["kind"] == "Secret" else text.encode()
                (place / name).write_bytes(content)
        ports: list[int] = []
        for run in port_runs(objects):
            first = first_of_free_ports(run)
            ports += range(first, first + run)
        programs = {"vllm": SERVE[0]}
        pods = local_pods(objects, folder, ports, first_of_free_ports(1), programs=programs)
        (folder / PACKAGES_FOLDER).mkdir()
        for name in IMPORTED:  # by vLLM
            (package,) = version.root.glob(f"*/{name}")
            (folder / PACKAGES_FOLDER / name).symlink_to(package)
        return cls(version, folder, {pod.role: pod for pod in pods})

    @contextlib.contextmanager
    def running(self, role: str, *more: str) -> Iterator[LocalPod]:
        """The pod, from its start until it has ended by itself when it was told to."""
        pod = self.pods[role]
        log = self.folder / f"{role}.log"
        variables = {**ENVIRONMENT, **pod.env} if pod.command[0] == SERVE[0] else pod.env
        process = self.version.start([*pod.command, *more], variables, log)
        try:
            yield pod
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, log.read_text()[-2000:]
            assert "is cut off" not in log.read_text()
        finally:
            process.kill()
            process.wait()

    def address(self, role: str) -> str:
        return f"127.0.0.1:{self.pods[role].ports['core']}"


def is_ready(pod: LocalPod) -> bool:
    assert pod.readiness is not None
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(pod.readiness.url, timeout=PATIENCE_S).status_code == 200
    return False


def received(pod: LocalPod) -> float:
    """Tokens of prompts whose KV the engine has got from another."""
    text = httpx.get(f"http://127.0.0.1:{pod.ports['http']}/metrics", timeout=PATIENCE_S).text
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return sum(float(x.split()[-1]) for x in lines if "external_prefix_cache_hits_total" in x)


def report_of(pod: LocalPod) -> str:
    url = f"http://127.0.0.1:{pod.ports['admin']}/admin/state"
    answer = httpx.get(url, headers={"authorization": "Bearer token"}, timeout=PATIENCE_S)
    assert answer.status_code == 200
    return answer.text


async def ask(client: httpx.AsyncClient, question: Question, *, stream: bool) -> str:
    """The greedy answer."""
    body: Object = {"model": "smollm2", "temperature": 0, "max_tokens": 12, "stream": stream}
    if question.chat:
        body["messages"] = [{"role": "user", "content": question.words}]
    else:
        body["prompt"] = question.words
    path = "/v1/chat/completions" if question.chat else "/v1/completions"
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    texts = [answer.text]
    if stream:
        data = [x.removeprefix("data: ") for x in answer.text.splitlines() if x.startswith("data")]
        assert data.pop() == "[DONE]"
        texts = data
    choices = [choice for text in texts for choice in json.loads(text)["choices"]]
    said = [x.get("delta") or x.get("message") or {"content": x.get("text")} for x in choices]
    return "".join(part.get("content") or "" for part in said)


async def traffic(*routers: LocalPod) -> None:
    """Everything at once through all routers; each answer is the model's own."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{router.ports['http']}", timeout=PATIENCE_S
                )
            )
            for router in routers
        ]
        asked = list(product(clients, QUESTIONS, (False, True)))
        answers = await asyncio.gather(*(ask(c, q, stream=s) for c, q, s in asked))
    for answer, (_, question, _) in zip(answers, asked, strict=True):
        assert answer.startswith(question.answer)


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return last_release(tmp_path_factory.mktemp("last"))


def test_routers_and_engines_of_two_versions_serve_together_as_either_operator_sets_them_up(
    smollm2: str, last: Version, tmp_path: Path
) -> None:
    raw = stored(service(smollm2), last)
    by_last, by_this = (render(operator, raw)[0] for operator in (last, THIS))
    assert by_last["revision"] == by_this["revision"], "an upgrade alone is no new revision"
    old = Release.of(last, by_this["objects"], tmp_path / "last")
    new = Release.of(THIS, by_last["objects"], tmp_path / "this")
    told: list[str] = []
    with contextlib.ExitStack() as stack:
        pools = {
            (release.version.name, role): stack.enter_context(release.running(role))
            for release in (old, new)
            for role in ("prefill", "decode")
        }
        wait_until(lambda: all(map(is_ready, pools.values())), "the engines are ready", 300.0)
        for one, other in product((old, new), (old, new)):
            targets = ("--prefill", one.address("prefill"), "--decode", other.address("decode"))
            decode = pools[other.version.name, "decode"]
            before = received(decode)
            with old.running("router", *targets) as r1, new.running("router", *targets) as r2:
                wait_until(lambda: is_ready(r1) and is_ready(r2), "both trust the pair")
                asyncio.run(traffic(r1, r2))
                told += map(report_of, (r1, r2))
            # The shortest prompt has more than this, and none is computed twice.
            assert received(decode) >= before + 2 * 2 * len(QUESTIONS) * 4
    for operator in (last, THIS):
        for report in operator.ask("read_reports", *told):
            assert report["ready"]
            assert [canary["ok"] for canary in report["canaries"]] == [True]
            for engine in report["engines"]:
                assert engine["usable"]
                assert engine["failures"] == {}
                assert engine["loads_failed"] == engine["stale_reads_refused"] == 0


def vllm_service(model: str) -> Object:
    image = "vllm/vllm-openai:v0.32.0"
    return service(model, engine={"runtime": "vllm", "image": image, "args": VLLM_ARGS})


def fetched(pod: LocalPod) -> float:
    """Tokens of prompts whose KV a vLLM has got from another."""
    url = f"http://127.0.0.1:{pod.ports['http']}/metrics"
    families = text_string_to_metric_families(httpx.get(url, timeout=PATIENCE_S).text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("source") == "external_kv_transfer"
        and sample.name == "vllm:prompt_tokens_by_source_total"
    )


def answer_of(pod: LocalPod, prompt: str) -> str:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    url = f"http://127.0.0.1:{pod.ports['http']}/v1/completions"
    answer = httpx.post(url, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@starts_vllm
@where_vllm_is
def test_vllms_with_packages_of_two_versions_hand_over_by_routers_of_both(
    last: Version, tmp_path: Path
) -> None:
    raw = stored(vllm_service(Path(save_tiny_model(tmp_path / "model")).as_uri()), last)
    by_last, by_this = (render(operator, raw)[0] for operator in (last, THIS))
    old = Release.of(last, by_this["objects"], tmp_path / "last")
    new = Release.of(THIS, by_last["objects"], tmp_path / "this")
    with old.running("prefill") as one, new.running("decode") as other:
        wait_until(lambda: is_ready(one) and is_ready(other), "both vLLMs are ready", START_S)
        at = {one.name: old.address("prefill"), other.name: new.address("decode")}
        for number, (p, d) in enumerate([(one, other), (other, one)]):
            targets = ("--prefill", at[p.name], "--decode", at[d.name])
            for release in (old, new):
                prompt = f"Two panels and a hinge? {number}{release.version.name} " * 8
                before = fetched(d)
                with release.running("router", *targets) as router:
                    wait_until(functools.partial(is_ready, router), "the router trusts the pair")
                    routed = answer_of(router, prompt)
                assert fetched(d) >= before + VLLM_BLOCK
                assert routed == answer_of(p, prompt)


def examples(version: Version, known_by: Version) -> dict[str, Object]:
    """The services of a version's examples as an API server with another's CRD has stored them."""
    files = sorted((version.root / "examples").glob("*.yaml"))
    found = {file.stem: service_of(file) for file in files}
    for raw in found.values():
        raw["metadata"] = {"namespace": "default", **raw["metadata"]}
    return {name: stored(raw, known_by) for name, raw in found.items()}


def templates(rendered: Object) -> dict[str, Object]:
    """The pods of a service by their role."""
    return {
        item["metadata"]["labels"]["diptych.dev/role"]: item["spec"]["template"]
        for item in rendered["objects"]
        if item["kind"] == "Deployment"
    }


def test_an_upgrade_of_the_operator_replaces_the_pods_that_are_named_here(last: Version) -> None:
    services = examples(last, last)
    pairs = zip(*(render(operator, *services.values()) for operator in (last, THIS)), strict=True)
    replaced = set()
    for before, after in pairs:
        assert before["revision"] == after["revision"]
        old, new = templates(before), templates(after)
        replaced |= {role for role in old if old[role] != new[role]}
    assert replaced == REPLACED


def test_an_operator_of_the_last_release_serves_what_was_written_for_this_one(
    last: Version,
) -> None:
    services = examples(THIS, THIS)
    for answer in render(last, *services.values()):
        assert {"decode", "router"} <= set(templates(answer))


def test_no_field_of_the_last_release_was_moved_or_taken_away(last: Version) -> None:
    former, present = (version.ask("fields") for version in (last, THIS))
    for name in former.keys() & present.keys():
        (positional, fields), (_, now) = former[name], present[name]
        if positional:
            assert list(now)[: len(fields)] == list(fields), name
        assert fields.keys() <= now.keys(), name
        added = now.keys() - fields.keys()
        assert not [field for field in added if now[field]], f"{name}: an older writer has none"
