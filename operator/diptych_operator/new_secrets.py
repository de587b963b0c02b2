"""Makes new secrets for a service. Only this module of the package draws random numbers."""

from __future__ import annotations

import secrets

import zmq

from diptych_operator.render.keys import ServiceSecrets
from diptych_protocol import CurveKeys


def new_secrets() -> ServiceSecrets:
    """Return a new CURVE key pair and an admin token of 256 random bits."""
    public, secret = zmq.curve_keypair()
    return ServiceSecrets(CurveKeys(public.decode(), secret.decode()), secrets.token_urlsafe(32))
