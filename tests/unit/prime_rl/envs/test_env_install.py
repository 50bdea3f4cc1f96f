"""Missing environments are installed from the configured package index, and only with `install = true`."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from prime_rl.configuration.sections import EnvConfig
from prime_rl.envs import install as env_install
from prime_rl.utils.vf import check_environments, load_environments

CODE = (
    "def load_environment(word='a'):\n    return {'dataset': [{'prompt': word}], 'rewards': lambda completion: 1.0}\n"
)


def write_wheel(folder: Path, name: str, code: str, metadata: str = "") -> None:
    """A package of one module in a PEP 503 index."""
    folder.mkdir(parents=True)
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    files = {
        f"{module}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text.encode())}\n"
        for path, text in files.items()
    )
    wheel = f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    (folder / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')


@pytest.fixture
def index_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local index of the organisation `someone`; pip installs into a folder of this test."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed; cure: make setup")
    write_wheel(tmp_path / "someone" / "simple" / "fetched-env", "fetched-env", CODE)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PIP_TARGET", str(site))
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.syspath_prepend(str(site))
    return (tmp_path / "{org}" / "simple").as_uri().replace("%7B", "{").replace("%7D", "}") + "/"


def test_install_true_installs_the_environment(index_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"install its package, or set env\.install = true"):
        check_environments([EnvConfig(id="someone/fetched-env", index_url=index_url)])
    config = EnvConfig(id="someone/fetched-env", index_url=index_url, install=True, num_workers=0, args={"word": "b"})
    [environment] = load_environments([config]).values()
    assert environment.rows()[0]["prompt"][0]["content"] == "b"
    monkeypatch.setattr(env_install, "_pip", lambda *arguments: pytest.fail("it is here already"))
    check_environments([config])
    with pytest.raises(ValueError, match="takes no argument 'wort'"):
        check_environments([config.model_copy(update={"args": {"wort": 1}})])


def test_an_environment_without_its_dependencies_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the default index of pip, which does not have them at first."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(env_id: str, *arguments: str) -> None:
        """What pip does with the folders of this test as indexes."""
        *options, package = arguments
        index = options[options.index("--index-url") + 1] if "--index-url" in options else "pypi"
        folder = options[options.index("--target") + 1] if "--target" in options else site
        wheels = list((tmp_path / index / package).glob("*.whl"))
        if not wheels:
            raise ValueError(f"{package} was not installed")
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(folder)

    monkeypatch.setattr(env_install, "_pip", install)
    code = f"import env_dependency\n{CODE}"
    write_wheel(tmp_path / "someone" / "needy-env", "needy-env", code, "Requires-Dist: env-dependency\n")
    config = EnvConfig(id="someone/needy-env", index_url="{org}", install=True, num_workers=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="env-dependency was not installed"):
            check_environments([config])
    write_wheel(tmp_path / "pypi" / "env-dependency", "env-dependency", "")
    [environment] = load_environments([config]).values()
    assert len(environment.rows()) == 1


def test_versions_are_requirements_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    monkeypatch.setattr(env_install, "_pip", lambda env_id, *arguments: requested.append(arguments[-1]))
    for version in ("", "@0.2", "@latest"):
        env_install.ensure_installed(f"someone/no-such-env{version}", "file:///{org}")
    assert list(dict.fromkeys(requested)) == ["no-such-env", "no-such-env==0.2"]


def test_installation_errors_are_one_sentence(index_url: str) -> None:
    config = EnvConfig(id="someone/no-such-env", index_url=index_url, install=True)
    with pytest.raises(ValueError, match=r"'someone/no-such-env' was not installed: .*check env.id and env.index_url"):
        check_environments([config])
    with pytest.raises(ValueError, match=r"write env\.id as org/name"):
        check_environments([EnvConfig(id="no-such-env", install=True)])


def test_unreachable_index_is_not_a_missing_package(index_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    config = EnvConfig(id="someone/no-such-env", index_url="http://127.0.0.1:1/{org}/", install=True)
    with pytest.raises(ValueError, match=r"its index http://127\.0\.0\.1:1/someone/ cannot be reached"):
        check_environments([config])


def test_rl_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    argv = ["--model.name", "tiny-qwen3", "--model.debug.random-init", "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "prime_rl.rl", *argv, "--orchestrator.env.0.id", "revers-text"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[4],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    output = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(output) == 1 and "did you mean 'reverse-text'?" in output[0], done.stderr
    assert not (tmp_path / "out" / "logs").exists() and "inference" not in done.stdout
