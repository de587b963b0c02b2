"""A service that names no image gets the operator's, and all that is made of it says so."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit.crds import inference_service

from diptych_operator.api.images import REGISTRY, Images, published
from diptych_operator.api.parse import parse_object
from diptych_operator.api.service import InferenceService
from diptych_operator.render import ServiceSecrets, render
from diptych_operator.revision import revision
from diptych_protocol import CurveKeys

OURS = Images("registry.example/engine:1", "registry.example/router:1")
NEXT_ENGINE = Images("registry.example/engine:2", OURS.router)
NEXT_ROUTER = Images(OURS.engine, "registry.example/router:2")
NAMED: dict[str, Any] = {
    "engine": {"image": "example.org/engine:7"},
    "router": {"image": "example.org/router:7"},
}


def service(images: Images = OURS, **spec: Any) -> InferenceService:
    return parse_object(inference_service(spec), images)


def images_of(service: InferenceService) -> set[tuple[str, str]]:
    """(container, image) of all pods; the one that fetches the model included."""
    objects = render(service, ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token"))
    pods = [o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"]
    return {
        (container["name"], container["image"])
        for pod in pods
        for container in [*pod["containers"], *pod.get("initContainers", ())]
    }


def test_a_service_that_names_no_image_runs_on_the_operators() -> None:
    fetched = service(model={"uri": "hf://org/repo"})
    assert images_of(fetched) == {
        *{("engine", OURS.engine), ("router", OURS.router)},
        *{("model", OURS.engine), ("model", OURS.router)},
    }


def test_an_image_that_a_service_names_wins() -> None:
    assert images_of(service(**NAMED)) == {
        ("engine", "example.org/engine:7"),
        ("router", "example.org/router:7"),
    }


@pytest.mark.parametrize("part", ["engine", "router"])
def test_an_empty_image_is_one_that_is_left_out(part: str) -> None:
    """Helm charts and kustomizations of others write such."""
    assert service(**{part: {"image": ""}}) == service()  # type: ignore[arg-type]


def test_another_default_for_engines_is_a_new_revision() -> None:
    """An operator that brings newer engines rolls them out in step, as it would any change."""
    assert revision(service(NEXT_ENGINE)) != revision(service(OURS))


def test_another_default_for_routers_is_none() -> None:
    """Routers exchange no KV; Kubernetes replaces them by itself."""
    assert revision(service(NEXT_ROUTER)) == revision(service(OURS))


def test_a_service_that_names_its_images_does_not_notice_another_default() -> None:
    assert service(NEXT_ENGINE, **NAMED) == service(OURS, **NAMED)


def test_a_revision_is_the_same_whether_the_image_is_named_or_the_default() -> None:
    """Pinning what already runs rolls out nothing."""
    assert revision(service(engine={"image": OURS.engine})) == revision(service())


def test_published_images_have_a_registry_and_a_version() -> None:
    name, _, tag = published("engine").rpartition(":")
    assert name == f"{REGISTRY}/diptych-engine"
    assert tag[0].isdigit()
