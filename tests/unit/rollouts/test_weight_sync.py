"""Weight sync against strict fakes of SGLang and vLLM, old and new, under both event loops."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_servers import FakeSGLang, FakeVLLM, serve_fakes
from starlette.requests import Request
from starlette.responses import JSONResponse

from rollouts.training.weight_sync import (
    EngineError,
    FailureKind,
    SGLangEngine,
    VLLMEngine,
    WeightSyncError,
    sync_weights_to_engines,
    update_sglang_weights_from_disk,
    update_vllm_weights_from_disk,
)

both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])


def run(loop: str, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    async def main() -> Any:
        with anyio.fail_after(30):
            return await function(*arguments)

    return anyio.run(main, backend=loop)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    path = tmp_path / "weights" / "step_10"
    path.mkdir(parents=True)
    return str(path)


@both_loops
@pytest.mark.parametrize(
    ("edition", "calls", "version"),
    [
        (
            "new",
            ["/model_info", "/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"],
            "10",
        ),
        (
            "middle",
            [
                "/get_weight_version",
                "/pause_generation",
                "/update_weights_from_disk",
                "/get_weight_version",
                "/continue_generation",
            ],
            "10",
        ),
        ("old", ["/model_info", "/update_weights_from_disk"], None),
    ],
)
def test_sglang_of_every_age(loop: str, edition: str, calls: list[str], version: str | None, checkpoint: str) -> None:
    fake = FakeSGLang(edition=edition)
    with serve_fakes(fake):
        (answer,) = run(loop, sync_weights_to_engines, [SGLangEngine(fake.url + "/v1")], checkpoint)
    assert answer["success"] is True and answer["version"] == version
    assert fake.calls == calls and fake.loaded == checkpoint and not fake.paused
    stamp = {} if edition == "old" else {"weight_version": "10"}
    assert fake.bodies["/update_weights_from_disk"] == {"model_path": checkpoint, **stamp}


@both_loops
@pytest.mark.parametrize(("edition", "version"), [("new", "10"), ("old", None)])
def test_vllm_of_every_age(loop: str, edition: str, version: str | None, checkpoint: str) -> None:
    fake = FakeVLLM(edition=edition)
    with serve_fakes(fake):
        (answer,) = run(loop, sync_weights_to_engines, [VLLMEngine(fake.url)], checkpoint)
    assert answer["success"] is True and answer["version"] == version
    assert fake.loaded == checkpoint and not fake.paused and not fake.cached_prefixes
    order = [call for call in fake.calls if call != "/weight_info"]
    stamp = ["/update_weight_version"] if edition == "new" else []
    assert order == ["/pause", "/collective_rpc", "/reset_prefix_cache", *stamp, "/resume"]


@both_loops
def test_answers_come_in_engine_order_whatever_finishes_first(loop: str, checkpoint: str) -> None:
    gate = threading.Event()

    class Mine:
        """The documented custom engine: one method, no base class. It lets the slow one go on."""

        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            gate.set()
            return {"success": True, "mine": checkpoint_path}

    slow, quick = FakeSGLang(slow=gate), FakeVLLM()
    with serve_fakes(slow, quick):
        engines = [SGLangEngine(slow.url), VLLMEngine(quick.url), Mine()]
        answers = run(loop, sync_weights_to_engines, engines, checkpoint)
    assert "num_paused_requests" in answers[0] and "results" in answers[1] and answers[2]["mine"] == checkpoint


@both_loops
def test_one_error_lists_every_engine_in_order(loop: str, checkpoint: str) -> None:
    class Vague:
        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            return {"ok": True}

    class Broken:
        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            raise OSError("disk gone")

    fine, refusing, lying = FakeSGLang(), FakeSGLang(refuse=True), FakeSGLang(wrong_version=True)
    crashed, forgetful, plain = FakeVLLM(refuse=True), FakeVLLM(wrong_version=True), FakeVLLM(edition="plain")
    stuck = FakeVLLM(slow=threading.Event())
    with socket.socket() as unused, serve_fakes(fine, refusing, lying, crashed, forgetful, plain, stuck):
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        engines = [
            SGLangEngine(fine.url),
            SGLangEngine(refusing.url),
            SGLangEngine(lying.url),
            VLLMEngine(crashed.url),
            VLLMEngine(forgetful.url),
            VLLMEngine(plain.url),
            VLLMEngine(stuck.url, timeout=2.0),
            SGLangEngine(f"http://127.0.0.1:{unused.getsockname()[1]}"),
            Vague(),
            Broken(),
        ]
        with pytest.raises(WeightSyncError) as error:
            run(loop, sync_weights_to_engines, engines, checkpoint)
        assert stuck.slow is not None
        stuck.slow.set()
    assert [name for name, _ in error.value.states] == [*map(str, engines[:8]), "Vague", "Broken"]
    states = [state for _, state in error.value.states]
    assert states[0] == "ok"
    assert states[1].startswith("refused: /update_weights_from_disk answered 400") and "weights iterator" in states[1]
    assert states[2] == "mismatch: expected version 10, the server reports -1 (left paused)"
    assert states[3] == "refused: /collective_rpc answered 500: EngineCore died (left paused)"
    assert states[4] == "mismatch: expected version 10, the server reports -1 (left paused)"
    assert states[5].startswith("refused: /collective_rpc answered 404") and "VLLM_SERVER_DEV_MODE=1" in states[5]
    assert states[6] == "unreachable: /collective_rpc was not answered within 2 s (left paused)"
    assert states[7].startswith("unreachable: /model_info: ConnectError")
    assert states[8] == "answered {'ok': True} without `success`"
    assert states[9] == "OSError: disk gone"
    assert not fine.paused and all(fake.paused for fake in (refusing, lying, crashed, forgetful))


GONE = EngineError(FailureKind.UNREACHABLE, "gone")


@pytest.mark.parametrize(
    ("errors", "is_transient", "is_repeatable"),
    [
        ([GONE, EngineError(FailureKind.REFUSED, "starts", 503), None], True, True),
        ([GONE, EngineError(FailureKind.REFUSED, "no memory", 500)], False, False),
        ([GONE, EngineError(FailureKind.REFUSED, "no file", 400)], False, True),
        ([EngineError(FailureKind.REFUSED, "unreachable: answered 503")], False, False),
        ([OSError("unreachable: ")], False, False),
    ],
)
def test_transient_failures(
    errors: list[Exception | None], is_transient: bool, is_repeatable: bool, checkpoint: str
) -> None:
    """A lost or starting engine is recognized by its answer, not by the text of a message."""

    class Scripted:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            if self.error is not None:
                raise self.error
            return {"success": True}

    with pytest.raises(WeightSyncError) as error:
        anyio.run(sync_weights_to_engines, [Scripted(error) for error in errors], checkpoint)
    assert (error.value.is_transient, error.value.is_repeatable) == (is_transient, is_repeatable)


def test_success_false_in_a_good_reply_is_a_refusal(checkpoint: str) -> None:
    class Polite(FakeSGLang):
        async def update(self, request: Request) -> JSONResponse:
            return JSONResponse({"success": False, "message": "no such directory"})

    fake = Polite()
    with serve_fakes(fake), pytest.raises(EngineError, match=r"refused: .*no such directory \(left paused\)"):
        run("asyncio", update_sglang_weights_from_disk, fake.url, checkpoint)


def test_a_directory_without_a_step_has_no_version(tmp_path: Path) -> None:
    sglang, vllm = FakeSGLang(), FakeVLLM()
    with serve_fakes(sglang, vllm):
        held = run("asyncio", update_sglang_weights_from_disk, sglang.url, str(tmp_path))["version"]
        run("asyncio", update_vllm_weights_from_disk, vllm.url, str(tmp_path))
    assert sglang.bodies["/update_weights_from_disk"] == {"model_path": str(tmp_path)} and held == "default"
    assert "/update_weight_version" not in vllm.calls


def test_server_side_path_is_passed_unchanged() -> None:
    fake = FakeVLLM()
    with serve_fakes(fake):
        run("asyncio", update_vllm_weights_from_disk, fake.url, "remote/step_3")
    assert fake.loaded == "remote/step_3" and fake.version == "3"


def test_fakes_reject_the_original_requests() -> None:
    """The original's `params` was ignored by real servers, which then loaded their first weights again."""
    fake = FakeVLLM()
    with serve_fakes(fake):
        body = json.dumps({"method": "reload_weights", "params": {"model_path": "x"}}).encode()
        request = urllib.request.Request(fake.url + "/collective_rpc", body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=10)


def test_what_cannot_be_an_engine_is_named() -> None:
    with pytest.raises(ValueError, match="'localhost:30000' of an engine must begin with http"):
        SGLangEngine("localhost:30000")
    with pytest.raises(ValueError, match="timeout 0 of an engine"):
        VLLMEngine("http://localhost:30001", timeout=0)
    with pytest.raises(ValueError, match="at least one"):
        anyio.run(sync_weights_to_engines, [], "weights/step_1")
    with pytest.raises(ValueError, match="no checkpoint_path"):
        anyio.run(sync_weights_to_engines, [SGLangEngine("http://localhost:1")], "")
    engine = SGLangEngine("http://localhost:30000")
    assert engine.timeout == VLLMEngine("http://localhost:30001").timeout == 300.0
