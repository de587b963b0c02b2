"""Finds a model's files and configuration from its URI."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from diptych_frontend.installation import this_installation
from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_frontend.model_files.gguf_header import (
    GGUFError,
    GGUFHeader,
    GGUFTensor,
    read_floats,
    read_header,
    read_parts,
)
from diptych_frontend.model_files.model_config import (
    ModelConfig,
    config_from_gguf,
    config_from_hf,
    config_from_query,
    family_of,
)
from diptych_frontend.model_files.ordinary import require_ordinary
from diptych_frontend.model_files.quantization import method_of, quantization_from_hf
from diptych_frontend.model_files.rope_scaling import ROPE_VECTORS
from diptych_protocol import UNREADABLE, UNSAID, InvalidRequestError, SamplingDefaults

log = logging.getLogger(__name__)

LLAMA_CPP: Final = SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
"""For a GGUF file that says nothing: what llama.cpp does, for which such files are made and tried.
Their weights are rounded, which lifts the unlikely tokens, and few of them say anything."""
GGUF_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_HINTS: Final = get_type_hints(SamplingDefaults, include_extras=True)
__all__ = ["GGUFTensor", "ModelConfig", "ModelSource", "readable", "resolve_model"]
MAX_JSON_BYTES: Final = 16 << 20
"""Limit, in bytes, of a configuration file."""


def sampling_from_hf(generation: Mapping[str, Any]) -> SamplingDefaults:
    """From generation_config.json, which calls the fields as requests do."""
    return _readable({field: generation.get(field) for field in _HINTS})


def sampling_from_gguf(metadata: Mapping[str, Any], family: FamilySpec) -> SamplingDefaults:
    """From GGUF metadata; where that says nothing, the family's, or else `LLAMA_CPP`."""
    said = {field: metadata.get(key) for field, key in GGUF_KEYS.items()}
    return _readable(said).over(family.gguf_sampling).over(LLAMA_CPP)


def _readable(said: Mapping[str, Any]) -> SamplingDefaults:
    """The values that make sense. A model is not refused for advice that nobody can follow."""
    taken = {}
    for name, value in said.items():
        try:
            taken[name] = msgspec.convert(value, _HINTS[name])
        except msgspec.ValidationError as exc:
            log.warning("the model's %s is left out: %s", name, exc)
    return SamplingDefaults(**taken)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that exists and that this project can run."""

    uri: str
    format: Literal["gguf", "safetensors", "dummy"]
    path: Path | None
    """The GGUF file, or the first of several; the directory of safetensors; None for dummies."""
    config: ModelConfig
    sampling: SamplingDefaults = UNSAID
    """How to sample where a request does not say."""
    stored_as: str = ""
    """`gguf`, or how config.json says that matrices are quantised; empty: they are not."""
    headers: list[GGUFHeader] = field(default_factory=list, compare=False, repr=False)
    """GGUF files as they were found, without metadata: a vocabulary is large."""
    whole: list[GGUFHeader] = field(default_factory=list, compare=False, repr=False)
    """The first of them with its metadata, until `metadata` is asked for it."""

    def metadata(self, path: Path) -> Mapping[str, Any]:
        """Return the GGUF file's metadata, which is at `path`. The vocabulary is not kept here."""
        known = self.whole.pop() if self.whole else None
        return (known if known is not None and known.is_current else read_header(path)).metadata

    def tensors(self) -> dict[str, GGUFTensor]:
        """Return each tensor's position in the GGUF file. Raises `ValueError` for others."""
        if self.format != "gguf" or self.path is None:
            raise ValueError(f"{self.uri} is not a GGUF file")
        with readable(self.path):
            known = self.headers and all(header.is_current for header in self.headers)
            return {
                name: tensor
                for header in (self.headers if known else read_parts(self.path))
                for name, tensor in header.tensors().items()
            }


def resolve_model(uri: str, *, weights: bool = True, vocabulary: bool = False) -> ModelSource:
    """Find the model and read its configuration, but not its weights or vocabulary.

    `package://PKG/FILE` is a file inside an installed Python package (which is not imported),
    `file:///PATH` or a plain path a GGUF file or a directory in Hugging Face's layout, and
    `dummy://?hidden_size=64` a model of random weights. Models from elsewhere are fetched
    (`diptych_frontend.model_files.fetch`) or mounted first.

    Without `weights` a directory need not contain any: a router reads the tokenizer only. With
    `vocabulary`, `load_tokenizer` need not read it again.

    Raises:
        InvalidRequestError: no such model, or not a supported one; the message names a remedy.
    """
    parts = _split(uri)
    if parts.scheme == "dummy":
        query = parse_qsl(parts.query, keep_blank_values=True)
        return ModelSource(uri, "dummy", None, config_from_query(dict(query)))
    path = _locate(uri)
    with readable(path):
        if path.is_dir():
            return _hf_source(uri, path, weights)
        if not path.is_file():
            like_hub = not path.is_absolute() and uri.count("/") == 1
            other = f"write hf://{uri} for the Hub's" if like_hub else "mount the volume it is on"
            raise _refuse(f"{path} does not exist; check the path, or {other}")
        # A router may have the first header only, and computes no logits.
        headers = read_parts(path) if weights else [read_header(path)]
        tensors = {tensor.name: (at, tensor) for at in headers for tensor in at.raw_tensors}
        vectors: dict[str, tuple[float, ...]] = {
            name: read_floats(tensors[name][0].path, tensors[name][1])
            for name in ROPE_VECTORS
            if weights and name in tensors
        }
        metadata = headers[0].metadata
        config = config_from_gguf(metadata, set(tensors), vectors)
        sampling = sampling_from_gguf(metadata, family_of(config.architecture))
        kept = [replace(header, metadata={}) for header in headers if weights]
        whole = headers[:1] if vocabulary else []
        return ModelSource(uri, "gguf", path, config, sampling, "gguf", kept, whole)


def _split(uri: str) -> SplitResult:
    if "\0" in unquote(uri):
        raise _refuse(f"{uri!r} holds a zero byte, which no path has")
    try:
        return urlsplit(uri)
    except ValueError as exc:
        raise _refuse(f"{uri}: {exc}") from exc


def _locate(uri: str) -> Path:
    parts = _split(uri)
    if parts.scheme == "package":
        return _locate_in_package(parts.netloc, unquote(parts.path.lstrip("/")))
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise _refuse(f"{uri} names the host {parts.netloc!r}; write file:///PATH")
        return Path(unquote(parts.path))
    if parts.scheme in ("hf", "s3", "https"):
        raise _refuse(
            f"{uri} is not on this machine; `python -m diptych_frontend.model_files.fetch "
            f"--uri {uri} --cache FOLDER` fetches it and prints the URI to use"
        )
    if parts.scheme in ("pvc", "oci"):
        raise _refuse(f"{uri} can be mounted in a cluster only; here, name a path or an hf:// URI")
    if "://" in uri:
        raise _refuse(
            f"{uri}: unknown scheme; use package://PKG/FILE, file:///PATH, a path, or dummy://"
        )
    try:
        return Path(uri).expanduser()
    except RuntimeError as exc:
        raise _refuse(f"{uri}: {exc}") from exc


def _locate_in_package(package: str, name: str) -> Path:
    if not package.isidentifier() or not name or ".." in Path(name).parts:
        raise _refuse(f"package://{package}/{name} is not of the form package://PKG/FILE")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it is in memory, but from no file
        spec = None
    if spec is None or spec.submodule_search_locations is None:
        remedy = this_installation().add(package, alone=True)
        raise _refuse(f"the Python package {package!r} is not installed: {remedy}")
    for location in map(Path, spec.submodule_search_locations):
        path = location / name
        if path.exists():
            return path
    raise _refuse(f"the Python package {package!r} holds no file {name!r}")


def _hf_source(uri: str, folder: Path, weights: bool) -> ModelSource:
    if weights and not any(folder.glob("*.safetensors")):
        raise _refuse(f"{folder} holds no *.safetensors; convert the weights, or name a GGUF file")
    generation, processor = folder / "generation_config.json", folder / "preprocessor_config.json"
    generating = _read_json(generation) if generation.exists() else {}
    raw = _read_json(folder / "config.json")
    config = config_from_hf(raw, generating, _read_json(processor) if processor.exists() else {})
    if weights:
        quantization = quantization_from_hf(raw)
        config = msgspec.structs.replace(config, quantization=quantization)
    sampling = sampling_from_hf(generating)
    return ModelSource(uri, "safetensors", folder, config, sampling, method_of(raw))


def _read_json(path: Path) -> dict[str, Any]:
    require_ordinary(path)
    with path.open("rb") as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise _refuse(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except UNREADABLE as exc:
        raise _refuse(f"{path} is not a JSON object: {exc}") from exc


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of reading a model's file into `InvalidRequestError`."""
    try:
        yield
    except GGUFError as exc:
        raise _refuse(f"{path} is not a usable GGUF file: {exc}; download it again") from exc
    except OSError as exc:
        raise _refuse(f"{exc.filename or path} cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise _refuse(f"{path} has a file that should be text in UTF-8, and is not: {exc}") from exc
    except RecursionError as exc:
        raise _refuse(f"{path} has a file that is nested too deeply") from exc


def _refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"model: {message}", param="model")
