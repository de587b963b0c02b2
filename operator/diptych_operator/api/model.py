"""`spec.model`: the weights, their source, and where pods keep them."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from diptych_operator.api.base import ClaimName, Rule, SecretName, SpecPart, ruled, spec_part
from diptych_protocol import SamplingDefaults
from diptych_protocol.model_uri import FORMS, Scheme


class ModelCredentials(SpecPart, frozen=True):
    secret_name: Annotated[
        SecretName,
        Meta(
            description="A Secret in this namespace with the keys `token` (hf://, https://), or "
            "`access-key-id`, `secret-access-key` and perhaps `session-token`, `region` and "
            "`endpoint` (s3://). Only what fetches sees it."
        ),
    ]


class PersistentVolume(SpecPart, frozen=True):
    claim_name: Annotated[ClaimName, Meta(description="A PersistentVolumeClaim in this namespace.")]
    read_only: Annotated[
        bool, Meta(description="Never write: the model must be there already.")
    ] = False


ONE_CACHE = Rule(
    "(has(self.pvc) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) + (has(self.ephemeral) ? 1 : 0) <= 1",
    lambda cache: (cache.pvc, cache.host_path, cache.ephemeral).count(None) >= 2,
    "give at most one of pvc, hostPath and ephemeral",
)


class ModelCache(SpecPart, frozen=True):
    pvc: Annotated[
        PersistentVolume | None, Meta(description="A volume that all engine pods can mount.")
    ] = None
    host_path: Annotated[
        Annotated[str, Meta(pattern=r"^/.+", max_length=1024, title="an absolute path")] | None,
        Meta(
            description="A directory on each node, with a folder and one download for each "
            "namespace."
        ),
    ] = None
    ephemeral: Annotated[
        Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)$", examples=["20Gi"])] | None,
        Meta(description="Most that a pod's own copy may take on its node's disk."),
    ] = None
    prefetch: Annotated[
        bool,
        Meta(
            description="Have model and images on each node for the pools before an engine comes."
        ),
    ] = False


_WORD = r"[A-Za-z0-9_.-]+"
_SEGMENT = r"(\.{0,2}[^\s/.?#\\][^\s/?#\\]*|\.{3}[^\s/?#\\]*)"
"""One segment of a path: anything but `.` and `..`, which matches in one way only."""
_PATH = rf"{_SEGMENT}(/{_SEGMENT})*"
_GGUF = rf"({_SEGMENT}/)*[^\s/?#\\]*\.gguf"
URI_PATTERNS: dict[Scheme, str] = {
    "hf": rf"^hf://{_WORD}/{_WORD}(/{_GGUF})?$",
    "s3": rf"^s3://{_WORD}/{_PATH}/?$",
    "https": rf"^https://[^\s/?#@\\]+/{_GGUF}$",
    "pvc": rf"^pvc://{_WORD}/{_PATH}/?$",
    "oci": rf"^oci://[^\s#]+@sha256:[0-9a-f]{{64}}(#/?{_PATH})?$",
    "package": rf"^package://[A-Za-z_][A-Za-z0-9_]*/{_PATH}$",
    "file": rf"^file://(localhost)?/{_PATH}$",
}


def _is_well_formed(scheme: Scheme, pattern: str, uri: str) -> bool:
    return not uri.startswith(f"{scheme}://") or re.search(pattern, uri) is not None


URI_RULES = {
    # One rule for each scheme, because one pattern for all would be what people get to read.
    scheme: Rule(
        f"!self.startsWith('{scheme}://') || self.matches(r'{pattern}')",
        partial(_is_well_formed, scheme, pattern),
        f"must be {FORMS[scheme]}",
    )
    for scheme, pattern in URI_PATTERNS.items()
}
_FETCHED = (
    "(self.uri.startsWith('hf://') || self.uri.startsWith('s3://') || "
    "self.uri.startsWith('https://'))"
)


def _is_fetched(model: Model) -> bool:
    return model.uri.startswith(("hf://", "s3://", "https://"))


REVISION_OF_HF = Rule(
    "!has(self.revision) || self.revision == '' || self.uri.startsWith('hf://')",
    lambda model: not model.revision or model.uri.startswith("hf://"),
    "is for hf:// models only",
    ".revision",
)
CHECKSUM_OF_FILE = Rule(
    f"!has(self.sha256) || self.sha256 == '' || {_FETCHED} && self.uri.endsWith('.gguf')",
    lambda model: not model.sha256 or (_is_fetched(model) and model.uri.endswith(".gguf")),
    "is for one fetched file only: a .gguf from hf://, s3:// or https://",
    ".sha256",
)
CREDENTIALS_OF_FETCHED = Rule(
    f"!has(self.credentials) || {_FETCHED}",
    lambda model: model.credentials is None or _is_fetched(model),
    "are for hf://, s3:// and https:// models only",
    ".credentials",
)
PREFETCH_TO_NODES = Rule(
    f"!self.cache.prefetch || has(self.cache.hostPath) && {_FETCHED}",
    lambda model: (
        not model.cache.prefetch or (model.cache.host_path is not None and _is_fetched(model))
    ),
    "needs cache.hostPath and a model of hf://, s3:// or https://",
    ".cache.prefetch",
)
MODEL_RULES = (REVISION_OF_HF, CHECKSUM_OF_FILE, CREDENTIALS_OF_FETCHED, PREFETCH_TO_NODES)


if TYPE_CHECKING:

    class Sampling(SamplingDefaults, SpecPart, frozen=True):
        """The `SamplingDefaults` of a router as a part of the spec."""

else:
    Sampling = spec_part("Sampling", SamplingDefaults)


class Model(SpecPart, frozen=True):
    uri: Annotated[
        str,
        Meta(
            pattern=rf"^({'|'.join(FORMS)})://\S*$",
            max_length=1024,
            description="Where the weights are. hf://ORG/REPO[/FILE.gguf], s3://BUCKET/FOLDER or "
            "FILE.gguf and https://HOST/FILE.gguf are fetched once into the cache; "
            "pvc://CLAIM/PATH and oci://IMAGE@sha256:DIGEST[#/PATH] are mounted; "
            "package://PKG/FILE and file:///PATH are in the "
            "engine's image; dummy://?num_hidden_layers=2 has random weights.",
            title="a URI",
            examples=["hf://ORG/REPO", "pvc://CLAIM/PATH", "package://PKG/FILE"],
            **ruled(*URI_RULES.values()),
        ),
    ]
    revision: Annotated[
        str,
        Meta(
            max_length=128,
            pattern=r"^[A-Za-z0-9._/-]*$",
            description="Commit, tag or branch of an hf:// repository. Pin a commit, or pods may "
            "come to hold different weights.",
        ),
    ] = ""
    sha256: Annotated[
        str,
        Meta(
            pattern=r"^([0-9a-f]{64})?$",
            description="Checksum of a model that is one file; a download that differs is refused.",
            title="64 hexadecimal digits",
        ),
    ] = ""
    credentials: Annotated[
        ModelCredentials | None,
        Meta(description="What it takes to fetch a model that is not public."),
    ] = None
    cache: Annotated[
        ModelCache,
        Meta(
            description="Where fetched models are kept; left out, in each pod.", **ruled(ONE_CACHE)
        ),
    ] = ModelCache()
    sampling: Annotated[
        Sampling,
        Meta(
            description="What requests get that leave these fields out; left out here too, what "
            "the model's files say (generation_config.json, GGUF metadata)."
        ),
    ] = Sampling()
    served_name: Annotated[
        str,
        Meta(
            max_length=253,
            description="The model name clients send; empty takes the name of this object.",
        ),
    ] = ""
