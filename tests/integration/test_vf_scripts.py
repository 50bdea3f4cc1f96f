"""`vf-install` and `vf-rl`: own arguments, those passed to verifiers' commands, and commands on the PATH."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.envs import vf_install, vf_rl

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "environments" / "nanochatAquaRat"
# Replaces the packages of the called commands and prints each call.
ECHO = "import sys\nprint(__name__ and sys.argv[0].replace('\\\\', '/').split('/')[-3:], sys.argv[1:])\n"


def run(module: str, *argv: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT / "src")])}
    return subprocess.run(
        [sys.executable, "-m", module, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    for name in ("pip/__main__", "verifiers/scripts/install"):
        file = tmp_path / "path" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ECHO)
    (tmp_path / "path" / "pip" / "__main__.py").write_text(
        "import sys\nopen('asked', 'w').write(' '.join(sys.argv[1:]))\nsys.exit('boom' if 'bad' in sys.argv[-1] else 0)"
    )
    (tmp_path / "path" / "verifiers" / "scripts" / "rl.py").write_text(
        "import sys\ndef main():\n    print('their main', sys.argv[1:])"
    )
    for package in ("pip", "verifiers", "verifiers/scripts"):
        (tmp_path / "path" / package / "__init__.py").write_text("")
    return tmp_path / "path"


def test_which_folder_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ENVIRONMENT)
    assert vf_install.find_folder([".", "--from-local"]) == vf_install.find_folder(["."]) == ENVIRONMENT
    assert vf_install.find_folder(["--from-local", "nanochatAquaRat"]) == ENVIRONMENT
    for other in (["gsm8k"], ["org/gsm8k"], ["gsm8k", "-p", "x"], ["--help"], [], [".", "--from-repo"]):
        assert vf_install.find_folder(other) is None
    with pytest.raises(ValueError, match="has no pyproject"):
        vf_install.find_folder(["..", "--from-local"])
    with pytest.raises(ValueError, match="was not found"):
        vf_install.find_folder(["nowhere", "--from-local"])


def test_vf_install(stand_ins: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    done = run("prime_rl.envs.vf_install", ".", "--from-local", cwd=folder, path=stand_ins)
    assert done.returncode == 0 and "editable" in done.stdout, done.stderr
    assert (folder / "asked").read_text().endswith(f"--editable {folder}")
    other = run("prime_rl.envs.vf_install", "gsm8k", "-p", "there", cwd=folder, path=stand_ins)
    assert "['verifiers', 'scripts', 'install.py'] ['gsm8k', '-p', 'there']" in other.stdout, other.stderr
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "pyproject.toml").write_text("")
    failed = run("prime_rl.envs.vf_install", "../bad", cwd=folder, path=stand_ins)
    assert failed.returncode == 2 and failed.stderr.startswith("error: ") and "boom" in failed.stderr


def test_vf_install_of_a_name_without_uv(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    folder = tmp_path / "environments" / "my_env"
    folder.mkdir(parents=True)
    (folder / "my_env.py").write_text("")
    done = run("prime_rl.envs.vf_install", "my-env", cwd=tmp_path, path=stand_ins)
    assert done.returncode == 0 and f"installed {folder}" in done.stdout, done.stderr
    assert (tmp_path / "asked").read_text().endswith(f"--editable {folder}")
    done = run("prime_rl.envs.vf_install", "no-env", cwd=tmp_path, path=stand_ins)
    assert done.returncode == 2 and done.stderr.startswith("error: environment 'no-env' was not found"), done.stderr
    metadata = stand_ins / "hub_env-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: hub-env\nVersion: 1.0\n")
    done = run("prime_rl.envs.vf_install", "someone/hub-env", cwd=tmp_path, path=stand_ins)
    assert done.returncode == 0 and done.stdout == "installed someone/hub-env\n", done.stderr
    assert (tmp_path / "asked").read_text().endswith("https://hub.primeintellect.ai/someone/simple/ hub-env")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").touch(0o755)
    done = run("prime_rl.envs.vf_install", "my-env", cwd=tmp_path, path=stand_ins)
    assert "['verifiers', 'scripts', 'install.py'] ['my-env']" in done.stdout, done.stderr


def test_vf_rl(stand_ins: Path, tmp_path: Path) -> None:
    here = tmp_path / "checkout" / "environments" / "x"
    here.mkdir(parents=True)
    (tmp_path / "checkout" / "scripts").mkdir()
    (tmp_path / "checkout" / "scripts" / "prime_rl_train.py").write_text(ECHO)
    (tmp_path / "ours.toml").write_text('model = "nanochat-sft"\n')
    (tmp_path / "theirs.toml").write_text('model = "Qwen/Qwen3-0.6B"\n')
    ours = str(tmp_path / "ours.toml")
    for argv in (["@", ours], [f"@{ours}"], ["@", ours, "--run=x"]):
        done = run("prime_rl.envs.vf_rl", *argv, cwd=here, path=stand_ins)
        assert f"'scripts', 'prime_rl_train.py'] {argv}" in done.stdout, done.stderr
    for argv in (["@", str(tmp_path / "theirs.toml")], ["--other"]):
        done = run("prime_rl.envs.vf_rl", *argv, cwd=here, path=stand_ins)
        assert done.stdout == f"their main {argv}\n", done.stderr
    for argv in (["--help"], []):
        done = run("prime_rl.envs.vf_rl", *argv, cwd=here, path=stand_ins)
        assert done.returncode == 0 and done.stdout.startswith("usage: vf-rl @ FILE.toml"), done.stderr
    done = run("prime_rl.envs.vf_rl", "@", "none.toml", cwd=here, path=stand_ins)
    assert done.returncode == 2 and done.stderr == "error: none.toml cannot be read: No such file or directory\n"


@pytest.mark.parametrize("file", ["configs/prime_rl/default.toml", "examples/nanochat/tiny/prime_rl.toml"])
def test_files_of_nanochat_are_ours(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ENVIRONMENT)
    assert vf_rl.is_ours(["@", f"../../{file}"])


@pytest.mark.parametrize("name", ["vf-install", "vf-rl"])
def test_ours_are_on_the_path(name: str) -> None:
    """Both packages install commands of these names: the later one wins, and an update of verifiers takes them back."""
    try:
        own = {point.name for point in importlib.metadata.distribution("prime-rl").entry_points}
    except importlib.metadata.PackageNotFoundError:
        own = set()
    if name not in own:
        pytest.skip("this checkout is not installed; cure: make setup")
    command = Path(sys.executable).with_name(name)
    cure = "pip install --force-reinstall --no-deps -e ."
    assert "prime_rl.envs" in command.read_text(), f"{command} is that of verifiers: {cure}"
