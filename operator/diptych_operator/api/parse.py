"""Parses YAML, or an API server's object, into an InferenceService, or raises `SpecError`.

The error names the field and the remedy. The remedy comes from the schema that the CRD carries, so
the two cannot disagree.

What a user writes is read strictly: an unknown field is a mistake. What an API server sends is read
leniently: its CRD may be newer than this program, for example while the operator is being upgraded,
and a field that only the newer one knows must not stop the service.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast

import msgspec
import yaml
from msgspec import inspect

from diptych_operator.api.base import Rule, SpecError
from diptych_operator.api.crd import schema_of
from diptych_operator.api.engine import draft_uri
from diptych_operator.api.images import Images, route_with_images, with_images
from diptych_operator.api.names import DRAFT_MODEL_FIELD
from diptych_operator.api.route import ModelRoute
from diptych_operator.api.service import API_VERSION, KIND, InferenceService
from diptych_operator.api.status import Status
from diptych_protocol import InvalidRequestError
from diptych_protocol.model_uri import parse_model_uri

MAX_TEXT_BYTES = 1 << 20
_FREE_FORM = "x-kubernetes-preserve-unknown-fields"
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]+)`")
_WHERE = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}
_TYPE_PHRASES = {
    "object": "an object",
    "array": "a list",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
}

_schema = cache(schema_of)


class _Loader(yaml.SafeLoader):
    """YAML as JSON knows it: string keys, no key twice, no dates."""

    yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise SpecError(f"line {line}", f'key {key!r} must be text; write "{key}"')
            if key in seen:
                raise SpecError(f"line {line}", f"{key!r} stands here twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


class ServiceFile(NamedTuple):
    """What a user's file holds."""

    service: InferenceService
    others: list[dict[str, Any]] = []
    """Further objects, such as autoscalers, in their order. They are for a cluster, and unread."""


def parse(text: str) -> InferenceService:
    """Parse the InferenceService of `parse_file`."""
    return parse_file(text).service


def parse_file(text: str) -> ServiceFile:
    """Parse YAML (or JSON) text with one InferenceService, and perhaps objects of other kinds.

    Raises `SpecError`, in one line. An unknown field is an error. Images that the text does not
    name are the published ones.
    """
    objects = _load(text)
    for raw in objects or [None]:
        if not isinstance(raw, dict):
            problem = f"must hold one {KIND} object, not {_JSON_NAMES.get(type(raw))}"
            raise SpecError("file", problem)
    others = [raw for raw in objects if raw.get("kind") != KIND] if len(objects) > 1 else []
    services = [raw for raw in objects if raw not in others]
    if len(services) != 1:
        kinds = ", ".join(str(raw.get("kind")) for raw in objects)
        problem = f"must hold one {KIND}, not {len(services)}; it has {kinds}"
        raise SpecError("file", problem)
    return ServiceFile(_read(services[0], Images()), others)


def parse_object(raw: Mapping[str, Any], images: Images) -> InferenceService:
    """Parse an InferenceService of an API server; `images` are those that it does not name.

    Raises `SpecError`.

    Unknown fields are dropped, as an API server with this program's CRD would have done. A status
    that cannot be read, perhaps written by another version, counts as empty.
    """
    asked = _pruned(dict(raw), _schema(InferenceService))
    return _read({**asked, "status": raw.get("status")}, images)


def parse_route(raw: Mapping[str, Any], images: Images) -> ModelRoute:
    """Parse a ModelRoute of an API server, as `parse_object` parses a service. The status is left
    out. Raises `SpecError`."""
    asked = {key: value for key, value in raw.items() if key != "status"}
    try:
        route = msgspec.convert(_pruned(asked, _schema(ModelRoute)), ModelRoute)
    except msgspec.ValidationError as exc:
        located = _WHERE.match(str(exc))
        where, problem = located.group("path", "problem") if located else (None, str(exc))
        raise SpecError((where or "spec").removeprefix("$."), problem) from exc
    if route.twice:
        problem = f"{route.twice!r} stands there twice; a name leads to one model"
        raise SpecError("spec.models", problem)
    return route_with_images(route, images)


def _pruned(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value without the fields that the schema does not have.

    Free-form objects (a podTemplate, annotations) are left as they are.
    """
    fields = schema.get("properties")
    if not isinstance(value, dict) or not fields or _FREE_FORM in schema:
        return value
    return {name: _pruned(item, fields[name]) for name, item in value.items() if name in fields}


def _read(raw: Mapping[str, Any], images: Images) -> InferenceService:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if raw.get(field) != wanted:
            found = repr(raw[field]) if field in raw else "nothing"
            raise SpecError(field, f"must be {wanted}, not {found}")
    asked = {key: value for key, value in raw.items() if key != "status"}
    try:
        service = msgspec.convert(asked, InferenceService)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc), asked) from exc
    check_rules(service)
    service = msgspec.structs.replace(service, status=_status(raw.get("status")))
    return with_images(service, images)


def _status(raw: Any) -> Status:
    try:
        return msgspec.convert(raw, Status)
    except msgspec.ValidationError:
        return Status()


def _load(text: str) -> list[Any]:
    """The documents that are not empty."""
    if len(text) > MAX_TEXT_BYTES:
        raise SpecError("file", f"is larger than {MAX_TEXT_BYTES} bytes; is it the right file?")
    try:
        objects = [raw for raw in yaml.load_all(text, Loader=_Loader) if raw is not None]
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        problem = " ".join(part for part in (exc.problem, exc.context) if part)
        raise SpecError(f"line {line}", f"not YAML: {problem}") from exc
    except (yaml.YAMLError, RecursionError, ValueError) as exc:
        if isinstance(exc, SpecError):
            raise
        raise SpecError("file", f"not YAML: {' '.join(str(exc).split())}") from exc
    if "*" in text and _is_longer(objects, MAX_TEXT_BYTES):
        raise SpecError("file", "its aliases repeat too much; write out what they stand for")
    return objects


def _is_longer(objects: list[Any], most: int) -> bool:
    """Whether that many characters could not write it out; what holds itself has no end."""
    left = [iter(objects)]
    while left and most >= 0:
        value = next(left[-1], left)
        if value is left:
            left.pop()
            continue
        most -= len(value) + 1 if isinstance(value, str) else 1
        if isinstance(value, (dict, list)):
            left.append(chain.from_iterable(value.items()) if type(value) is dict else iter(value))
    return bool(left)


def _explain(complaint: str, raw: dict[str, Any]) -> SpecError:
    """Turn msgspec's message into `field: what is wanted, not what was found`."""
    found = _WHERE.match(complaint)
    problem, path = (found["problem"], found["path"]) if found else (complaint, None)
    steps = [name or index for name, index in _STEP.findall((path or "$").removeprefix("$"))]
    schema, value, steps = _walk(steps, raw)
    if missing := _MISSING.match(problem):
        child = schema.get("properties", {}).get(missing["name"], {})
        return SpecError(
            ".".join([*steps, missing["name"]]), f"is missing; it must be {_wanted(child)}"
        )
    if unknown := _UNKNOWN.match(problem):
        name, known = unknown["name"], sorted(schema.get("properties", {}))
        problem = _belongs_to_both(steps, name) or _no_such(name, known)
        return SpecError(".".join([*steps, name]), problem)
    field = ".".join(steps) or "file"
    return SpecError(field, f"must be {_wanted(schema)}, not {_shown(value, schema)}")


def _walk(steps: list[str], raw: Any) -> tuple[dict[str, Any], Any, list[str]]:
    """Follow a path through schema and value; `...` becomes the first key whose value is wrong."""
    schema, value, named = _schema(InferenceService), raw, list[str]()
    for step in steps:
        if step == "..." and isinstance(value, dict):
            schema = schema.get("additionalProperties", {})
            step = next((key for key, item in value.items() if not _fits(item, schema)), step)
        else:
            schema = schema.get("properties", {}).get(step) or schema.get("items", {})
        named.append(step)
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit():
            value = value[int(step)]
    return schema, value, named


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether one value of a map of quantities is right; maps hold nothing else."""
    if isinstance(value, str):
        short = len(value) <= schema.get("maxLength", len(value))
        return short and re.search(schema.get("pattern", ""), value) is not None
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _belongs_to_both(steps: list[str], name: str) -> str | None:
    """The answer to a pool that is given what both pools must have in common."""
    if steps not in (["spec", "prefill"], ["spec", "decode"]):
        return None
    spec = _schema(InferenceService)["properties"]["spec"]["properties"]
    for part in ("engine", "transfer", "model"):
        if name in spec[part]["properties"]:
            return f"unknown field; it stands in spec.{part}, where it holds for both pools"
    return None


def _no_such(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    return f"unknown field; {hint}"


def _wanted(schema: dict[str, Any]) -> str:
    """What a schema node allows, in words."""
    if "enum" in schema:
        *rest, last = map(str, schema["enum"])
        return f"{', '.join(rest)} or {last}" if rest else last
    low, high = schema.get("minimum"), schema.get("maximum")
    if "anyOf" in schema:
        phrase = "a quantity"
    elif schema.get("type") == "string":
        phrase = schema.get("title", "text")
        if "maxLength" in schema:
            phrase += f" (at most {schema['maxLength']} characters)"
    else:
        phrase = _TYPE_PHRASES.get(schema.get("type", ""), "valid")
        if low is not None and high is not None:
            phrase += f" from {low} to {high}"
        if "maxProperties" in schema:
            phrase += f" of at most {schema['maxProperties']} fields"
    if examples := schema.get("examples"):
        shown = (x if isinstance(x, str) else msgspec.json.encode(x).decode() for x in examples)
        phrase += f" such as {' or '.join(shown)}"
    return phrase


def _shown(value: Any, schema: dict[str, Any]) -> str:
    if isinstance(value, dict) and "maxProperties" in schema:
        return f"one of {len(value)}"
    if isinstance(value, (dict, list)) or value is None:
        return _JSON_NAMES[type(value)]
    shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def check_rules(service: InferenceService) -> None:
    """Raise `SpecError` for the first rule that the service breaks."""
    rules = next(rules for name, _, rules in _fields(InferenceService) if name == "spec")
    for where, rule in _broken("spec", service.spec, rules):
        raise SpecError(where + rule.at, rule.message)
    spec = service.spec
    uris = {"spec.model.uri": spec.model.uri, DRAFT_MODEL_FIELD: draft_uri(spec.engine)}
    for field, uri in uris.items():
        try:
            if uri:
                parse_model_uri(uri)
        except InvalidRequestError as exc:
            # Beyond regular expressions, such as a port that does not exist.
            raise SpecError(field, str(exc).removeprefix("model: ")) from exc


def _broken(where: str, value: Any, rules: Sequence[Rule]) -> Iterator[tuple[str, Rule]]:
    """Path of the object at which a rule stands, and the rule; inner objects come first."""
    if isinstance(value, msgspec.Struct):
        for name, written, own in _fields(type(value)):
            child = getattr(value, name)
            if child is not None:
                yield from _broken(f"{where}.{written}", child, own)
    for rule in rules:
        if not rule.kept(value):
            yield where, rule


@lru_cache(64)
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, list[Rule]]]:
    """Each field: its name, as it is written, and the rules that stand at it."""
    info = cast("inspect.StructType", inspect.type_info(kind))
    return [(field.name, field.encode_name, list(_rules(field.type))) for field in info.fields]


def _rules(info: inspect.Type) -> Iterator[Rule]:
    match info:
        case inspect.Metadata(type=inner, extra=extra):
            yield from (extra or {}).get("rules", ())
            yield from _rules(inner)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _rules(each)
