"""What a ModelRoute becomes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cluster_kit.kube_schemas import complaints

from diptych_operator.api.base import SpecError
from diptych_operator.api.images import Images, PodDefaults, PullSecret
from diptych_operator.api.names import ROUTE_FILE
from diptych_operator.api.parse import parse_route
from diptych_operator.kube.cluster import Cluster
from diptych_operator.render.route import Served, Services, route_objects
from diptych_protocol.router_settings import RouteConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "route.yaml"
HOOKED = {"name": "route", "lifecycle": {"preStop": {}}}
RAW: dict[str, Any] = list(yaml.safe_load_all(EXAMPLE.read_text()))[1]


SERVED = {"smollm2": Served("smol"), "smollm2-next": Served("smollm2-next")}


def rendered(
    images: Images = Images(),  # noqa: B008
    served: Services = SERVED,
    **spec: Any,
) -> dict[str, Any]:
    """By kind; a route has one of each."""
    raw = copy.deepcopy(RAW)
    raw["metadata"] |= {"namespace": "team", "uid": "u"}
    raw["spec"] |= spec
    route = parse_route(raw, images)
    return {obj["kind"]: obj for obj in route_objects(route, served, Cluster())}


def config_of(objects: dict[str, Any]) -> RouteConfig:
    return msgspec.json.decode(objects["ConfigMap"]["data"][ROUTE_FILE], type=RouteConfig)


def test_the_example_is_pods_with_an_address_a_configuration_and_no_rights() -> None:
    objects = rendered()
    assert [words for obj in objects.values() for words in complaints(obj)] == []
    kinds = ["ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment"]
    assert list(objects) == kinds
    assert {obj["metadata"]["name"] for obj in objects.values()} == {"chat-route"}
    labels = [obj["metadata"]["labels"] for obj in objects.values()]
    assert {each["diptych.dev/service"] for each in labels} == {"chat.route"}  # no service's
    spec = objects["Deployment"]["spec"]
    assert spec["replicas"] == 2
    assert objects["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert spec["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_configuration_has_every_name_and_every_service() -> None:
    (model,) = config_of(rendered()).models
    assert model.names == ["chat", "gpt-4o"]
    assert [(each.service, each.model, each.weight) for each in model.targets] == [
        ("smollm2", "smol", 9), ("smollm2-next", "smollm2-next", 1),
        ("smollm2-spare", "smollm2-spare", 0),
    ]  # fmt: skip
    assert model.targets[0].url == "http://smollm2-router.team.svc:8000"


def test_a_model_that_is_named_is_asked_for() -> None:
    services = [{"name": "smollm2", "model": "an-adapter"}]
    objects = rendered(models=[{"name": "m", "services": services}])
    assert config_of(objects).models[0].targets[0].model == "an-adapter"


def test_the_certificates_of_services_are_mounted_without_their_keys() -> None:
    objects = rendered(served=SERVED | {"smollm2-next": Served("smollm2-next", "cert")})
    assert [words for obj in objects.values() for words in complaints(obj)] == []
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (volume,) = (each for each in pod["volumes"] if "projected" in each)
    ((source,),) = (volume["projected"]["sources"],)
    assert source["secret"] == {
        "name": "cert",
        "items": [{"key": "tls.crt", "path": "smollm2-next.crt"}],
        "optional": True,
    }
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    (model,) = config_of(objects).models
    assert [(each.url.partition(":")[0], each.certificate) for each in model.targets] == [
        ("http", ""), ("https", f"{mounts['certificates']}/smollm2-next.crt"), ("http", ""),
    ]  # fmt: skip


def test_both_certificates_are_known_while_a_service_changes_from_one_secret_to_another() -> None:
    objects = rendered(served={"smollm2": Served("smol", "new", "former")})
    assert [words for obj in objects.values() for words in complaints(obj)] == []
    volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
    (sources,) = (each["projected"]["sources"] for each in volumes if "projected" in each)
    files = {each["secret"]["items"][0]["path"]: each["secret"]["name"] for each in sources}
    assert files == {"smollm2.crt": "new", "smollm2.other.crt": "former"}
    target = config_of(objects).models[0].targets[0]
    mounted = [target.certificate, target.other_certificate]
    assert [Path(each).name for each in mounted] == list(files)


def test_keys_and_certificate_are_mounted_as_a_routers() -> None:
    objects = rendered(apiKeys={"secretName": "keys"}, tls={"secretName": "cert"})
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    assert secrets == {"api-keys": "keys", "tls": "cert"}
    arguments = pod["containers"][0]["args"]
    assert {"--api-keys", "--tls"} <= {*arguments}
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert objects["Service"]["spec"]["ports"][0]["name"] == "https"


def test_the_operators_defaults_and_a_pod_template_hold_for_its_pods() -> None:
    images = Images(
        router="mine:1",
        cluster_chooses_user=True,
        pods=PodDefaults(image_pull_secrets=[PullSecret("pull")]),
    )
    objects = rendered(images, podTemplate={"spec": {"priorityClassName": "high"}})
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "mine:1"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["priorityClassName"] == "high"
    assert "runAsUser" not in pod["securityContext"]


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"podTemplate": {"spec": {"containers": [HOOKED]}}},
         "spec.podTemplate.spec.containers[route].lifecycle", "must be as it is"),
        ({"models": [{"name": "a", "services": [{"name": "s"}], "aliases": ["b"]},
                     {"name": "b", "services": [{"name": "s"}]}]},
         "spec.models", "'b' stands there twice; a name leads to one"),
        ({"models": []}, "spec.models", "length >= 1"),
    ],
    ids=["podTemplate", "a name twice", "no model"],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_name(spec: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        rendered(**spec)
    assert caught.value.field == field


def test_fields_of_a_newer_crd_stop_nothing() -> None:
    assert rendered(newer={"x": 1}) == rendered()
