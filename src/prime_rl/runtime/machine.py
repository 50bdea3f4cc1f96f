"""Ports, GPUs, cores and memory of this machine."""

from __future__ import annotations

import ctypes
import http.client
import importlib.util
import ipaddress
import math
import mmap
import os
import socket
from pathlib import Path

DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia")
CONTROL_GROUP, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

FEW_CORES = 4
"""Up to this many cores, use one thread: the processes of a run oversubscribe the cores otherwise."""

SHARED_GPU_VARIABLE = "PRIME_RL_SHARED_GPU"
"""Set by `rl` for a process that shares its GPU with another process of the run."""


def check_port_free(host: str | None, port: int, key: str = "inference.server.port") -> None:
    """Raise `ValueError` naming `key` and a fix if `port` is in use."""
    address = host or "localhost"
    try:
        with socket.create_server((address, port), family=find_family(address)):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}: port {port} on {address} cannot be used ({explain_socket_error(error).lower()}); "
            f"stop the server that uses it or choose another one, e.g. --{key} {find_free_port()}"
        ) from error


def find_family(address: str) -> socket.AddressFamily:
    """IPv6 for an address in its notation, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def find_listen_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Where to listen so that other machines reach `host`; `OSError` for an unknown name.

    "", all addresses, for a name of this machine that resolves to 127.0.1.1, as on Debian.
    """
    family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    is_address = ":" in host or host.replace(".", "").isdecimal() or "localhost" in host.lower()  # as ip6-localhost
    return family, "" if not is_address and ipaddress.ip_address(address).is_loopback else str(address)


def explain_socket_error(error: OSError) -> str:
    """The reason alone. Codes of names that cannot be resolved are negative, and no system errors."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def check_interfaces(variable: str) -> None:
    """Raise `ValueError` if a variable such as NCCL_SOCKET_IFNAME names network interfaces, but none of this machine.

    As in NCCL, names are the beginnings of those of interfaces, and may follow "="; those behind "^" are left out.
    """
    value = os.environ.get(variable, "")
    names = [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    if names and not value.startswith("^") and not any(name.startswith(tuple(names)) for name in present):
        raise ValueError(
            f"{variable} = {value!r} is no network interface of this machine ({', '.join(present)}): unset it, or name "
            "one of these"
        )


def find_free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def is_healthy(host: str | None, port: int) -> bool:
    """Whether `GET /health` returns 200 within a second."""
    connection = http.client.HTTPConnection(host or "localhost", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_installed(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def find_gpus() -> list[int]:
    """Ids of the visible NVIDIA GPUs, without loading a driver library. `CUDA_VISIBLE_DEVICES` may also have UUIDs.

    CUDA counts the GPUs that are present: in a container with some of the machine's, ids are no device numbers.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sorted(int(p.name[6:]) for p in DEVICES.glob("nvidia[0-9]*") if p.name[6:].isdigit())
    if visible is None:
        return list(range(len(present)))
    found = []
    for name in filter(None, map(str.strip, visible.split(","))):
        gpu = int(name) if name.isdigit() else _find_uuid(name, present)
        if gpu is None and name != "-1":
            from loguru import logger

            logger.warning(f"CUDA_VISIBLE_DEVICES: {name} is no GPU of this machine; name it by its number or UUID")
        found += [gpu] if gpu is not None and gpu < len(present) else []
    return found


def _find_uuid(name: str, present: list[int]) -> int | None:
    """Id of the GPU whose UUID starts like this, by the driver's list; None if it is not among the `present` ones."""
    for file in DRIVER.glob("gpus/*/information"):
        pairs = (line.partition(":") for line in file.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        minor = facts.get("Device Minor", "")
        if facts.get("GPU UUID", "").startswith(name) and minor.isdigit() and int(minor) in present:
            return present.index(int(minor))
    return None


def num_cores() -> int:
    """CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended, with theirs."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def share_heap() -> None:
    """Let all threads use one heap; for glibc, see mallopt(3). One that has started before keeps its own."""
    libc = _load_libc("mallopt")
    if libc is not None:
        arena_max = -8
        libc.mallopt(arena_max, 1)


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, and take it in huge pages; for glibc, see mallopt(3). `share_heap` comes first.

    By default large tensors are mapped and returned one by one, and Linux clears their pages again each time: measured
    7 % of a training step in fp32 and 18 % in bf16. In huge pages the first steps, whose memory grows, are 8 % faster.
    """
    libc = _load_libc("mallopt")
    if libc is None:
        return
    trim_threshold, mmap_max = -1, -4
    for parameter, value in ((mmap_max, 0), (trim_threshold, -1)):
        libc.mallopt(parameter, value)
    if not _counts_reserved_memory():
        _reserve_heap(libc, int(find_available_memory()))


def _reserve_heap(libc: ctypes.CDLL, size: int) -> None:
    """Give the heap `size` bytes of addresses, which take memory, in huge pages, when they are first written."""
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    block = libc.malloc(size)
    if block is None:  # a limit of the process
        return
    start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(max(block + size - start, 0)), mmap.MADV_HUGEPAGE)
    libc.free(block)


def _counts_reserved_memory() -> bool:
    """Whether Linux grants no more addresses than it has memory for."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    return policy.is_file() and policy.read_text().strip() == "2"


def return_freed_memory() -> None:
    """Return memory that is free in the middle of the heap to the system; for glibc, see malloc_trim(3)."""
    libc = _load_libc("malloc_trim")
    if libc is not None:
        libc.malloc_trim(0)


def _load_libc(function: str) -> ctypes.CDLL | None:
    """The C library, if it has this function."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    return libc if hasattr(libc, function) else None


def find_memory() -> int:
    """Bytes of the machine's memory, at most the limit of this process's control groups, such as a container's."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_read_memory_limits().values()])


def _read_memory_limits() -> dict[Path, int]:
    """Bytes that the control group of this process and its parents, such as those of a job, may use, where limited."""
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.is_file() else []
    own = CONTROL_GROUP / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    limits = {}
    for group in (own, *own.parents):
        file = group / "memory.max"
        if group.is_relative_to(CONTROL_GROUP) and file.is_file() and (limit := file.read_text().strip()) != "max":
            limits[group] = int(limit)
    return limits


def find_available_memory() -> float:
    """Bytes that this process may allocate: free memory of the machine, at most what its control groups leave.

    Half of the physical memory on systems without /proc.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return find_memory() / 2
    [line] = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    available = 1024.0 * int(line.split()[1])
    return min([available, *(_find_rest(group, limit) for group, limit in _read_memory_limits().items())])


def _find_rest(group: Path, limit: int) -> float:
    """Bytes below the limit of a control group."""
    current, stat = group / "memory.current", group / "memory.stat"
    if not current.is_file():
        return math.inf
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    cached = int(counts.get("inactive_file", 0))  # contents of files, which the system drops when memory is short
    return limit - int(current.read_text()) + cached
