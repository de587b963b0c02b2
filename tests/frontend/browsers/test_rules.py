"""Which requests of browsers are served, case by case."""

from __future__ import annotations

import contextlib

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.browsers import READ, BrowserRules
from diptych_protocol import InvalidRequestError

RULES = BrowserRules(frozenset({"llm.example.com"}), frozenset({"https://app.example.com"}))
NAVIGATE = b"navigate"
OWN = b"http://127.0.0.1:8080"


@each(
    "host",
    [
        "localhost", "localhost:8080", "LOCALHOST.", "a.localhost:1", "127.0.0.1:8080", "10.1.2.3",
        "[::1]:8080", "[fd00::1]", "svc-router:8080", "svc-router.ns.svc",
        "svc-router.ns.svc.cluster.local:8080", "llm.example.com", "LLM.example.com.:443", "",
    ],
)  # fmt: skip
def test_names_that_no_other_site_can_have_are_the_servers(host: str) -> None:
    RULES.check_host("/ui/api/about", {b"host": host.encode()})
    RULES.check_host("/ui/api/about", {})


@each(
    "host",
    [
        "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example",
        "svc-router.ns.svc.evil.example", "xlocalhost.example", "notllm.example.com",
        "sub.llm.example.com", "evil.example#.localhost.example", "a" * 5000 + ".localhost",
    ],
)  # fmt: skip
def test_other_names_are_refused_with_the_remedy(host: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"allowedHosts.*--allow-host.*API keys"
    ) as caught:
        RULES.check_host("/v1/models", {b"host": host.encode()})
    assert (caught.value.status, caught.value.param) == (421, "Host")


@pytest.mark.parametrize("path", ["/health", "/live", "/ping"])
def test_load_balancers_may_probe_under_any_name(path: str) -> None:
    RULES.check_host(path, {b"host": b"evil.example"})


@each("method", ["GET", "POST", "DELETE", "OPTIONS"])
@each(
    "headers",
    [
        {},
        {b"sec-fetch-site": b"same-origin", b"origin": OWN},
        {b"sec-fetch-site": b"none"},
        {b"origin": OWN},
        {b"origin": b"https://127.0.0.1:8080"},
    ],
    ids=["no browser", "own page", "typed", "old browser", "TLS was taken off"],
)
def test_own_pages_and_other_clients_are_served_and_shared_with_nobody(
    method: str, headers: dict[bytes, bytes]
) -> None:
    assert RULES.shared_with(method, {b"host": b"127.0.0.1:8080", **headers}) is None


OTHERS = [
    {b"sec-fetch-site": b"cross-site"},
    {b"sec-fetch-site": b"cross-site", b"origin": b"null", b"sec-fetch-mode": NAVIGATE},
    {b"sec-fetch-site": b"cross-site", b"sec-fetch-dest": b"image", b"sec-fetch-mode": b"no-cors"},
    {
        b"sec-fetch-site": b"cross-site",
        b"sec-fetch-dest": b"iframe",
        b"sec-fetch-mode": b"navigate",
    },
    {b"sec-fetch-site": b"same-site", b"origin": b"http://127.0.0.1:3000"},
    {b"sec-fetch-site": b"nonsense"},
    {b"origin": b"http://evil.example"},
    {b"origin": b"null"},
    {b"origin": b"http://127.0.0.1:8081"},
    {b"origin": b"https://app.example.com.evil.example"},
]


@each("method", ["GET", "POST", "DELETE", "OPTIONS"])
@each("headers", OTHERS)
def test_pages_of_other_sites_are_refused_with_the_remedy(
    method: str, headers: dict[bytes, bytes]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"allowedOrigins.*--allow-origin") as caught:
        RULES.shared_with(method, {b"host": b"127.0.0.1:8080", **headers})
    assert (caught.value.status, caught.value.param) == (403, "Origin")


@pytest.mark.parametrize("site", [{}, {b"sec-fetch-site": b"cross-site"}])
def test_an_allowed_origin_is_served_and_may_read(site: dict[bytes, bytes]) -> None:
    origin = {b"host": b"127.0.0.1:8080", b"origin": b"https://app.example.com", **site}
    assert RULES.shared_with("POST", origin) == b"https://app.example.com"


@pytest.mark.parametrize(("method", "is_served"), [("GET", True), ("HEAD", True), ("POST", False)])
def test_a_link_of_another_site_leads_here_and_a_form_does_not(
    method: str, is_served: bool
) -> None:
    link = {
        b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": NAVIGATE,
        b"sec-fetch-dest": b"document",
    }  # fmt: skip
    if is_served:
        assert RULES.shared_with(method, link) is None
        return
    with pytest.raises(InvalidRequestError):
        RULES.shared_with(method, link)


@given(st.dictionaries(st.sampled_from(READ), st.binary(max_size=40)), st.text(max_size=8))
def test_whatever_headers_say_a_refusal_is_ours(headers: dict[bytes, bytes], method: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        RULES.check_host("/", headers)
    with contextlib.suppress(InvalidRequestError):
        RULES.shared_with(method, headers)
