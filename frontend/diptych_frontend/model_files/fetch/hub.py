"""hf://ORG/REPO: a model on the Hugging Face hub, or on a mirror with its API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import httpx2
from huggingface_hub import HfApi, close_session, get_token, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from diptych_frontend.model_files.fetch.http_ranges import HttpRanges, refusal
from diptych_frontend.model_files.fetch.source import (
    CREDENTIALS,
    REVISION,
    URI,
    BadSourceError,
    Checksum,
    Credentials,
    FetchError,
    RemoteFile,
    UnreachableError,
)
from diptych_protocol.model_uri import ModelUri

LISTING_TIMEOUT_S: Final = 30.0


class HubSource:
    """See `Source`. The hub's client lists and resolves files, which are read in HTTP ranges."""

    def __init__(self, uri: ModelUri, revision: str, credentials: Credentials) -> None:
        self._repo = uri.host
        self._revision = revision or "main"
        # On a laptop the user may have logged in.
        self._token = credentials.token or get_token() or ""
        self._api = HfApi(
            endpoint=credentials.endpoint or None,
            token=self._token or False,
            library_name="diptych",
        )
        self._ranges = HttpRanges(self._token)

    def files(self) -> Sequence[RemoteFile]:
        """This fixes the commit: later parts cannot come from another one."""
        info = self._model_info()
        if not info.sha:
            raise FetchError(f"{self._api.endpoint} does not say which commit it speaks of")
        return [self._remote_file(item, info.sha) for item in info.siblings or ()]

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        return self._ranges.read(file.locator, start, end)

    def close(self) -> None:
        """The hub's client has one session a process, made on demand."""
        self._ranges.close()
        close_session()

    def _remote_file(self, item: RepoSibling, commit: str) -> RemoteFile:
        if item.size is None or not item.blob_id:
            raise FetchError(f"{self._api.endpoint} does not describe {item.rfilename}")
        checksum = (
            Checksum("sha256", item.lfs.sha256) if item.lfs else Checksum("git-sha1", item.blob_id)
        )
        url = hf_hub_url(self._repo, item.rfilename, revision=commit, endpoint=self._api.endpoint)
        return RemoteFile(item.rfilename, item.size, item.blob_id, url, checksum)

    def _model_info(self) -> ModelInfo:
        where = self._api.endpoint
        try:
            return self._api.model_info(
                self._repo, revision=self._revision, files_metadata=True, timeout=LISTING_TIMEOUT_S
            )
        except GatedRepoError:
            raise BadSourceError(
                CREDENTIALS,
                f"{self._repo} is gated; accept its terms at {where}/{self._repo} and give the "
                "token of an account that did",
            ) from None
        except RepositoryNotFoundError as exc:
            raise self._not_found(exc) from None
        except RevisionNotFoundError:
            raise BadSourceError(
                REVISION, f"{self._repo} has no {self._revision!r}; give a commit, tag or branch"
            ) from None
        except DisabledRepoError:
            raise BadSourceError(URI, f"{self._repo} has been disabled by {where}") from None
        except OfflineModeIsEnabled:
            raise UnreachableError("HF_HUB_OFFLINE is set, so the hub is not asked") from None
        except HFValidationError:
            problem = f"{self._repo} cannot be the name of a repository; check it"
            raise BadSourceError(URI, problem) from None
        except HfHubHTTPError as exc:
            if exc.response is None:
                raise UnreachableError(f"{where} gives no answer") from None
            raise refusal(exc.response, where) from None
        except httpx2.UnsupportedProtocol:
            raise FetchError(
                f"the hub's address is {where!r}; HF_ENDPOINT, or `endpoint` of the credentials, "
                "must begin with https:// or http://"
            ) from None
        except (httpx2.TransportError, ValueError) as exc:
            # ValueError: an answer that is no JSON, as from a captive portal.
            raise UnreachableError(f"{where} cannot be reached ({type(exc).__name__})") from None

    def _not_found(self, exc: HfHubHTTPError) -> BadSourceError:
        # The hub does not tell strangers whether a private repository exists.
        known = exc.response is not None and exc.response.status_code == httpx2.codes.UNAUTHORIZED
        if known and self._token:
            return BadSourceError(
                CREDENTIALS, f"the token is not valid at {self._api.endpoint}; give another"
            )
        return BadSourceError(
            URI,
            f"{self._api.endpoint} has no {self._repo}; check the name, or give the token of an "
            "account that may read it in spec.model.credentials",
        )
