"""Compilation of the CPU kernels: once per source and CPU, with torch's threads, refused or left out with a reason."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from product_kernels import compile_products_alone

from rollouts.kernels import native
from rollouts.kernels.cpu import runs_here

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")


@pytest.fixture
def cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where a library is compiled, without optimization, when it is loaded the next time."""
    native.library.cache_clear()
    native._load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ["-O0" if flag == "-O3" else flag for flag in native.FLAGS])
    yield tmp_path / "rollouts"
    monkeypatch.undo()
    native.library.cache_clear()
    native._load.cache_clear()


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source that is compiled at once."""
    monkeypatch.setattr(native, "SOURCE", tmp_path / "kernels.c")
    native.SOURCE.write_text("int kernel(void) { return 1; }\n")


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs /proc/self/maps")
def test_thread_pool_is_shared_with_torch() -> None:
    """A second thread pool would compete for the cores."""
    loaded = {line.split(None, 5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in loaded if "libgomp" in Path(path).name]) == 1
    if any("libgomp" in path and "torch" in path for path in loaded):
        assert "-fopenmp" in native._share_threads()


def test_libgomp_of_torch_is_found_among_several() -> None:
    paths = ["/x/scikit_learn.libs/libgomp-a34b.so.1", "/usr/lib/libgomp.so.1"]
    paths += [f"{Path(torch.__file__).resolve().parent}/lib/libgomp.so.1", "/usr/lib/libc.so.6"]
    lines = [f"7f00-7f01 r-xp 00000000 08:01 17                         {path}" for path in paths]
    assert native._find_pool("\n".join(lines)) == paths[2]
    assert native._find_pool("\n".join(lines[:2])) is None  # which of them is torch's?
    assert native._find_pool(lines[1]) == paths[1]
    assert native._find_pool(lines[3]) is None


@needs_kernels
@pytest.mark.usefixtures("cache_home")
def test_kernels_of_clang_use_one_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its OpenMP needs another library than the one that torch has loaded."""
    compile_products_alone(monkeypatch, tmp_path)
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-U__clang__", "-D__clang__"])
    kernels = native.library()
    assert kernels is not None and not kernels.has_threads()
    assert [record.message for record in caplog.records if "use one thread" in record.message]


def test_compiler_error_falls_back_to_torch(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "my cc"
    broken.write_text("#!/bin/sh\necho it is out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", f"'{broken}'")
    assert native.library() is None
    assert "it is out of order" in caplog.text
    assert not list(cache_home.glob("native*"))


@needs_kernels
def test_gcc_11_can_compile_the_kernels(tmp_path: Path) -> None:
    """Without the name that gcc gave to its shuffles in version 12."""
    header = tmp_path / "gcc_11.h"
    header.write_text("#ifndef __clang__\n#define __builtin_shufflevector not_in_gcc_11\n#endif\n")
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc", "clang"))))
    command = [*compiler, *native.FLAGS, "-include", header, "-E", native.SOURCE]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "decode" in text and "not_in_gcc_11" not in text


@needs_kernels
@pytest.mark.parametrize("call", ["'{folder}/cc'", "'{folder}/ccache' cc"])
@pytest.mark.usefixtures("cache_home", "small_source")
def test_compiler_can_run_by_ccache(call: str, tmp_path: Path) -> None:
    """By a link with the compiler's name, or as its first argument."""
    (tmp_path / "ccache").write_text('#!/bin/sh\ncase "$0" in */ccache) exec "$@";; esac\nexec "${0##*/}" "$@"\n')
    (tmp_path / "ccache").chmod(0o755)
    (tmp_path / "cc").symlink_to("ccache")
    assert native._open_library(shlex.split(call.format(folder=tmp_path))).kernel() == 1


@needs_kernels
@pytest.mark.usefixtures("small_source")
def test_library_is_compiled_once_per_source(cache_home: Path) -> None:
    header = native.SOURCE.with_name("number.h")
    header.write_text("#define NUMBER 1\n")
    native.SOURCE.write_text('#include "number.h"\nint kernel(void) { return NUMBER; }\n')
    native._open_library(["cc"])
    (made,) = cache_home.glob("native-*.so")
    before = made.stat().st_mtime_ns
    assert native._open_library(["cc"]).kernel() == 1
    assert made.stat().st_mtime_ns == before
    assert sorted(path.name for path in cache_home.iterdir()) == ["lock", made.name]
    header.write_text("#define NUMBER 2\n")
    assert native._open_library(["cc"]).kernel() == 2
    assert len(list(cache_home.glob("native-*.so"))) == 2


@needs_kernels
@pytest.mark.usefixtures("small_source")
def test_damaged_library_is_compiled_again(cache_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty file has the name of the library, as after a power loss; hence what is written is flushed first."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_size))
    native._open_library(["cc"])
    (made,) = cache_home.glob("native-*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))  # the system keeps what it has loaded by path
    damaged = tmp_path / "elsewhere" / "rollouts" / made.name
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    assert native._open_library(["cc"]).kernel() == 1
    assert flushed == [made.stat().st_size, damaged.stat().st_size] and 0 not in flushed


@needs_kernels
@pytest.mark.usefixtures("cache_home")
def test_unusable_cache_directory_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.library() is None
    assert "XDG_CACHE_HOME" in caplog.text and str(tmp_path / "file") in caplog.text
    assert "cannot compile" not in caplog.text


@pytest.mark.usefixtures("cache_home")
def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "/nowhere/gcc -m64")
    assert native.library() is None
    assert "no C compiler found (/nowhere/gcc -m64)" in caplog.text


@needs_kernels
def test_threads_wait_for_one_that_loads_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It switches AMX off for a moment: others would find AMX products wrong, or compute other bits."""
    switched: list[int] = []

    def enable_amx(loaded: object) -> None:
        switched.append(threading.get_ident())
        time.sleep(0.2)  # time for the others to load as well

    with monkeypatch.context() as patch:
        patch.setattr(native, "_enable_amx", enable_amx)
        native.library.cache_clear()
        native._load.cache_clear()
        with ThreadPoolExecutor(4) as pool:
            loaded = {id(found.result()) for found in [pool.submit(native.library) for _ in range(4)]}
    native.library.cache_clear()
    native._load.cache_clear()
    assert len(loaded) == len(switched) == 1


@needs_kernels
@pytest.mark.usefixtures("small_source")
def test_kernels_are_compiled_on_file_systems_without_locks(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(native.fcntl, "flock", refuse)
    assert native._open_library(["cc"]).kernel() == 1 and len(list(cache_home.glob("native-*.so"))) == 1


@needs_kernels
@pytest.mark.parametrize("name", native.STRUCTS)
def test_struct_size_mismatch_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = native.STRUCTS[name]

    class Longer(declared):  # type: ignore[misc, valid-type]
        _fields_ = [("one_more", ctypes.c_int64)]

    monkeypatch.setitem(native.STRUCTS, name, Longer)
    size = ctypes.sizeof(declared)
    with pytest.raises(RuntimeError, match=rf"Longer has {size + 8} bytes in Python but {size} in C"):
        native._load.__wrapped__()


def test_cache_key_includes_cpu_features() -> None:
    """A cache directory shared by machines has one library per CPU type (`-march=native`)."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.is_file():
        pytest.skip("needs /proc/cpuinfo")
    features = native.processor()
    assert features.startswith(("flags", "Features")) and features in cpus.read_text().splitlines()


@pytest.mark.usefixtures("cache_home")
def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.OFF, "0")
    assert native.library() is None
    assert not runs_here(torch.ones(3))
