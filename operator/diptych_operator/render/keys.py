"""The Secret of a service: the CURVE key pair of its pods and the token of its admin ports.

A rotation makes a Secret of another name. Engines get the new one with their new revision. Routers
hold both while engines of both exist, so that every engine can be reached.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_operator.api.base import Raw
from diptych_operator.api.names import (
    KEYS_LABEL,
    KEYS_VOLUME,
    PUBLIC_KEY_FILE,
    SECRET_KEY_FILE,
    metadata,
    object_name,
)
from diptych_operator.api.service import InferenceService
from diptych_protocol import CurveKeys
from diptych_protocol.admin import ADMIN_TOKEN_FILE

_FILES = (PUBLIC_KEY_FILE, SECRET_KEY_FILE, ADMIN_TOKEN_FILE)


class ServiceSecrets(msgspec.Struct, frozen=True):
    """The secrets of one service, made once and kept."""

    curve: CurveKeys
    admin_token: str


@dataclass(frozen=True, slots=True)
class KeySets:
    """Names of the keys in use; see `revision.key_set`."""

    current: str
    previous: str = ""
    """Keys that engines of an older revision may still have; empty if there are none."""


def secret_name(service: InferenceService, keys: str) -> str:
    return object_name(service, "keys", keys)


def secret(service: InferenceService, keys: str, secrets: ServiceSecrets) -> dict[str, Any]:
    """The Secret that all pods with these keys share."""
    values = (secrets.curve.public, secrets.curve.secret, secrets.admin_token)
    named = metadata(service, "keys", "keys")
    named["name"] = secret_name(service, keys)
    named["labels"][KEYS_LABEL] = keys
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": named,
        "data": {
            name: base64.b64encode(text.encode()).decode()
            for name, text in zip(_FILES, values, strict=True)
        },
    }


def admin_token(raw: Raw) -> str | None:
    """Return the admin token of a Secret; None if it lacks any of what `secret` put there."""
    token = None
    for name in _FILES:
        try:
            token = base64.b64decode((raw.get("data") or {})[name], validate=True).decode("ascii")
        except (KeyError, ValueError):
            return None
        if not token or not token.isprintable():
            return None
    return token


def hinge_keys_volume(service: InferenceService, keys: str) -> dict[str, Any]:
    """Return a volume for a program that only transfers KV: without the admin token."""
    items = [{"key": file, "path": file} for file in (PUBLIC_KEY_FILE, SECRET_KEY_FILE)]
    source = {"secretName": secret_name(service, keys), "defaultMode": 0o440, "items": items}
    return {"name": KEYS_VOLUME, "secret": source}


def keys_volume(service: InferenceService, keys: KeySets) -> dict[str, Any]:
    """Return a volume that the group of the pod (fsGroup) and nobody else can read."""
    current = secret_name(service, keys.current)
    if not keys.previous:
        return {"name": KEYS_VOLUME, "secret": {"secretName": current, "defaultMode": 0o440}}
    older = {
        "name": secret_name(service, keys.previous),
        "optional": True,  # it goes when the last engine that held it is gone
        "items": [{"key": file, "path": f"previous-{file}"} for file in _FILES],
    }
    sources = [{"secret": {"name": current}}, {"secret": older}]
    return {"name": KEYS_VOLUME, "projected": {"defaultMode": 0o440, "sources": sources}}
