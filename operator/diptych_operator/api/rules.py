"""The rules over several fields, in Python: what the CRD's CEL says, for where there is no CEL.

That is on a laptop, and in clusters older than CEL. Texts and places are those of the CEL rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from diptych_operator.api.base import Rule
from diptych_operator.api.errors import SpecError
from diptych_operator.api.model import (
    CHECKSUM_OF_FILE,
    CREDENTIALS_OF_FETCHED,
    ONE_CACHE,
    REVISION_OF_HF,
    URI_PATTERNS,
    URI_RULES,
    Model,
)
from diptych_operator.api.pools import (
    ENGINE_CONTAINER,
    EXTERNAL_AWAKE,
    MIN_BELOW_MAX,
    ONE_IMAGE,
    ONE_SCALE,
    Pool,
)
from diptych_operator.api.service import (
    DRAIN_OUTLIVES_LEASE,
    ROLLOUT_STEP,
    SLEEP_TOGETHER,
    SLEEPERS_WAKE,
    STEP_BUDGET,
    InferenceService,
    Spec,
)
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import parse_model_uri

_Judged = Iterator[tuple[str, Rule, bool]]
"""Path of the object at which a rule stands, the rule, and whether it is kept."""


def check(service: InferenceService) -> None:
    """Raise `SpecError` for the first rule that the service breaks."""
    for where, rule, kept in _judged(service.spec):
        if not kept:
            raise SpecError(where + rule.at, rule.message)
    try:
        parse_model_uri(service.spec.model.uri)
    except InvalidRequestError as exc:
        # Beyond regular expressions, such as a port that does not exist.
        raise SpecError("spec.model.uri", str(exc).removeprefix("model: ")) from exc


def _judged(spec: Spec) -> _Judged:
    yield from _of_model(spec.model)
    yield from _of_pool("spec.prefill", spec.prefill)
    yield from _of_pool("spec.decode", spec.decode)
    engine, rollout = spec.engine, spec.rollout
    yield "spec.engine", STEP_BUDGET, engine.max_num_batched_tokens >= engine.max_num_seqs
    yield "spec.rollout", ROLLOUT_STEP, rollout.max_surge + rollout.max_unavailable > 0
    lease_seconds, drain_seconds = spec.transfer.lease_seconds, spec.availability.drain_seconds
    yield "spec", DRAIN_OUTLIVES_LEASE, drain_seconds >= lease_seconds
    yield "spec", SLEEP_TOGETHER, _sleeps(spec.prefill) == _sleeps(spec.decode)
    yield "spec", SLEEPERS_WAKE, not _sleeps(spec.prefill) or spec.router.hold_seconds > 0


def _of_model(model: Model) -> _Judged:
    for scheme, pattern in URI_PATTERNS.items():
        if model.uri.startswith(f"{scheme}://"):
            well_formed = re.search(pattern, model.uri) is not None
            yield "spec.model.uri", URI_RULES[scheme], well_formed
    cache = model.cache
    given = [place for place in (cache.pvc, cache.host_path, cache.ephemeral) if place is not None]
    yield "spec.model.cache", ONE_CACHE, len(given) <= 1
    fetched = model.uri.startswith(("hf://", "s3://", "https://"))
    one_file = fetched and model.uri.endswith(".gguf")
    yield "spec.model", REVISION_OF_HF, not model.revision or model.uri.startswith("hf://")
    yield "spec.model", CHECKSUM_OF_FILE, not model.sha256 or one_file
    yield "spec.model", CREDENTIALS_OF_FETCHED, model.credentials is None or fetched


def _of_pool(where: str, pool: Pool) -> _Judged:
    scaling = pool.autoscaling
    yield where, ONE_SCALE, pool.replicas is None or scaling is None
    if scaling is not None:
        in_order = scaling.min_replicas <= scaling.max_replicas
        awake = scaling.by != "External" or scaling.min_replicas >= 1
        yield f"{where}.autoscaling", MIN_BELOW_MAX, in_order
        yield f"{where}.autoscaling", EXTERNAL_AWAKE, awake
    yield f"{where}.podTemplate", ONE_IMAGE, not _sets_engine_image(pool.pod_template)


def _sleeps(pool: Pool) -> bool:
    return pool.autoscaling is not None and pool.autoscaling.min_replicas == 0


def _sets_engine_image(template: dict[str, Any]) -> bool:
    """Only looks; what else may be wrong with a podTemplate shows when it is merged."""
    pod_spec = template.get("spec")
    containers = pod_spec.get("containers") if isinstance(pod_spec, dict) else None
    return isinstance(containers, list) and any(
        isinstance(container, dict)
        and container.get("name") == ENGINE_CONTAINER
        and container.get("image") is not None
        for container in containers
    )
