"""Deny by default: every path but liveness and readiness wants the key."""

from __future__ import annotations

import base64
import hmac

import httpx
import pytest

from service import auth as auth_module
from service.__main__ import read_key
from service.auth import OPEN_PATHS
from service.config import ConfigError
from tests.service.echo import EchoEngine
from tests.service.served import HTTP

KEY = "correct-horse-battery"


@pytest.fixture
def http(make_running):
    running = make_running(EchoEngine(), api_key=KEY, fault_injection=True)
    with httpx.Client(base_url=running.url) as client:
        client.app = running.app
        yield client


def all_paths(app):
    def walk(routes):
        for route in routes:
            if hasattr(route, "path"):
                yield route
            else:
                inner = getattr(route, "original_router", None) or getattr(route, "router", None)
                if inner is not None:
                    yield from walk(inner.routes)

    return list(walk(app.routes))


def test_every_route_is_closed_without_a_key(http):
    routes = all_paths(http.app)
    assert len(routes) > 15
    assert {r.path for r in routes} >= OPEN_PATHS | {
        "/",
        "/metrics",
        "/events",
        "/trace",
        "/debug/fault",
    }
    for route in routes:
        path = route.path.replace(":path", "").format(model="moe", version="1", name="app.js")
        for method in route.methods:
            answer = http.request(method, path)
            if path in OPEN_PATHS:
                assert answer.status_code in (200, 405), (method, path)
            else:
                assert answer.status_code == 401, (method, path)
                if method != "HEAD":
                    assert list(answer.json()) == ["error"]
    assert http.get("/nothing").status_code == 401  # nor can paths be guessed


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"X-API-Key": KEY},
        {"Authorization": "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()},
    ],
)
def test_the_key_opens(http, headers):
    assert http.get("/v2", headers=headers).status_code == 200
    assert http.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": "Bearer"},
        {"Authorization": KEY},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic " + base64.b64encode(KEY.encode()).decode()},
        {"X-API-Key": ""},
        {"X-API-Key": "\u00e9" * 20},
        {"Authorization": f"Digest {KEY}"},
    ],
)
def test_other_keys_do_not(http, headers):
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = http.get("/v2", headers=encoded)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert KEY not in answer.text


def test_keys_are_compared_in_constant_time(http, monkeypatch):
    calls = []
    real = hmac.compare_digest

    def spy(a, b):
        calls.append((a, b))
        return real(a, b)

    monkeypatch.setattr(auth_module.hmac, "compare_digest", spy)
    http.get("/v2", headers={"X-API-Key": "wrong"})
    assert calls == [(b"wrong", KEY.encode())]


def test_without_a_key_only_loopback_names_are_served(server):
    for host, status in (
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("rebound.example", 403),
        ("127.0.0.1.rebound.example:80", 403),
    ):
        answer = HTTP.get(server.url + "/v2", headers={"Host": host})
        assert answer.status_code == status, host
    assert HTTP.get(server.url + "/ready", headers={"Host": "probe"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1", "null", ""])
def test_pages_of_others_cannot_post(server, http, origin):
    """What a browser sends for ``fetch(..., {method: "POST", mode: "no-cors"})`` of any page."""
    own = f"http://127.0.0.1:{server.port}"
    for url, headers in ((server.url, {}), (str(http.base_url), {"X-API-Key": KEY})):
        path = url.rstrip("/") + "/v2/models/moe/infer"
        answer = HTTP.post(path, content=b"{}", headers={**headers, "Origin": origin})
        assert answer.status_code == 403, origin
        assert "may not post" in answer.json()["error"]
        # Reading says nothing: a page does not get to see it.
        get = HTTP.get(url.rstrip("/") + "/v2", headers={**headers, "Origin": origin})
        assert get.status_code == 200
        assert "access-control-allow-origin" not in get.headers
    mine = HTTP.post(own + "/v2/models/moe/infer", content=b"{}", headers={"Origin": own})
    assert mine.status_code == 400


def test_fault_injection_with_the_flag(http):
    headers = {"X-API-Key": KEY}
    body = {"rank": 9, "action": "kill"}
    assert http.post("/debug/fault", json=body, headers=headers).status_code == 400
    assert http.post("/debug/fault", json={"rank": "x"}, headers=headers).status_code == 400
    body = {"rank": 1, "action": "kill"}
    assert http.post("/debug/fault", json=body, headers=headers).status_code == 200
    assert http.get("/ready").status_code == 503


def test_a_key_file_that_is_no_text(tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(b"\xff" * 32)
    monkeypatch.setenv("MEGAMOE_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="key is no text: give one that holds a key"):
        read_key()
