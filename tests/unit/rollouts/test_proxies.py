"""Proxies and certificates of the environment: all requests to a server use the same."""

from __future__ import annotations

import ssl
from typing import Any

import anyio
import httpx
import pytest
from fake_servers import FakeVLLM, serve_fakes

from rollouts.training.proxies import KEEP_ALIVE, build_http_client, exclude_from_proxies, needs_proxy
from rollouts.training.weight_sync import VLLMEngine


def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    assert needs_proxy("http://far.example/v1") and not needs_proxy("http://near.example:8000/v1")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_no_proxy_is_used_for_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert not needs_proxy(f"http://{host}:8000/v1")


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "near.example"}, "near.example,127.0.0.1"),
        ({"NO_PROXY": "old.example", "no_proxy": "near.example"}, "near.example,127.0.0.1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_a_host_is_added_to_those_without_a_proxy(variables: dict[str, str], hosts: str) -> None:
    assert exclude_from_proxies("127.0.0.1", variables) == {"NO_PROXY": hosts, "no_proxy": hosts}


def test_weight_updates_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FakeVLLM()
    with serve_fakes(proxy):
        address, _, path = proxy.url.rpartition("/")
        monkeypatch.setenv("http_proxy", address)
        monkeypatch.setenv("no_proxy", "near.example")
        anyio.run(VLLMEngine(f"http://far.example/{path}").update_weights_from_checkpoint, "weights/step_1")
    assert proxy.loaded == "weights/step_1"


def test_https_uses_certificates_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    context, built = ssl.create_default_context(), list[dict[str, Any]]()
    monkeypatch.setattr(ssl, "create_default_context", lambda: context)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: built.append(options))
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.delenv("http_proxy", raising=False)
    for scheme in ("https", "http"):
        build_http_client(f"{scheme}://far.example", {})
    assert [(options["verify"], options["trust_env"]) for options in built] == [(context, True), (False, False)]


def test_an_update_notices_that_the_machine_is_gone() -> None:
    """It closes no connection, and loading may take long: the system asks whether it is still there."""

    async def read_options(url: str) -> list[int]:
        async with build_http_client(url, {}) as client:
            reply = await client.get(f"{url}/weight_info")
            connection = reply.extensions["network_stream"].get_extra_info("socket")
            return [connection.getsockopt(level, name) for level, name, _ in KEEP_ALIVE]

    server = FakeVLLM()
    with serve_fakes(server):
        assert anyio.run(read_options, server.url) == [value for *_, value in KEEP_ALIVE]
