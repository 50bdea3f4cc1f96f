"""The floor plan as a test: who may import whom, which giants enter where, and what no file may contain.

The tables below are those of the design; the sources are only parsed, never imported. A new room gets its row here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# floor -> (its rooms, the floors it may import). A room is a module or package; rooms of a floor do not see each other.
FLOORS: dict[int, tuple[str, set[int]]] = {
    0: (
        "rollouts.training.types rollouts.training.steps rollouts.training.objectives rollouts.training.user_cache "
        "rollouts.agents",
        set(),
    ),
    1: (
        "rollouts.training.advantages rollouts.training.rl_losses rollouts.training.batching rollouts.training.filters "
        "rollouts.training.metrics rollouts.training.datasets rollouts.training.agent_integration "
        "rollouts.training.sampling rollouts.training.linear rollouts.training.native",
        {0},
    ),
    2: (
        "rollouts.training.environments rollouts.training.rollout_gen rollouts.training.backends "
        "rollouts.training.weight_sync",
        {0, 1},
    ),
    3: ("rollouts.training.loops", {0, 1, 2}),
    4: ("nanochat", {0, 1, 2}),
    5: ("prime_rl.utils prime_rl.transport prime_rl.deployment", {0, 1, 2, 4}),
    6: (
        "prime_rl.trainer prime_rl.inference prime_rl.eval prime_rl.synthesize prime_rl.monitor",
        {0, 1, 2, 3, 4, 5},
    ),
    7: ("prime_rl.orchestrator", {0, 1, 2, 3, 4, 5}),
    8: ("prime_rl.rl prime_rl.config prime_rl.config_teacher prime_rl.fleet", {0, 1, 2, 3, 4, 5, 6, 7}),
    9: ("prime_rl.plan", {5, 6, 8}),
}
LEAVES = ("scripts", "dev", "benchmarks", "environments", "tests")
# The faces of packages: they import nothing of ours when they are loaded.
FACES = ("rollouts", "rollouts.training", "prime_rl")
# importer -> what it imports beyond the floors
EXCEPTIONS = {
    "prime_rl.inference.embedded": "prime_rl.trainer.models prime_rl.trainer.lora",  # what is served is what is trained
    "prime_rl.orchestrator": "prime_rl.eval",
    "prime_rl.rl": "prime_rl.config prime_rl.config_teacher prime_rl.fleet",
    "prime_rl.fleet": "prime_rl.config",
    # launchers read configurations and write them
    "prime_rl.deployment": "prime_rl.utils",
    # whole messages over a socket have one home
    "prime_rl.transport": "prime_rl.utils.frames",
    "prime_rl.config": "prime_rl.config_teacher",
    "rollouts.agents": "rollouts.training.types",
    # the product of an output layer has the bits that the layers below it have
    "rollouts.training.rl_losses": "rollouts.training.linear",
    # sums are taken in the order of the product that the trainer multiplies with
    "rollouts.training.native": "rollouts.training.linear",
    # a trajectory whose engine told no tokens is rendered and masked like any conversation
    "rollouts.training.agent_integration": "rollouts.training.datasets",
}

# Where each third-party giant enters, so that an upgrade is a short list of files.
DOORS: dict[str, tuple[str, ...]] = {
    "vllm": ("prime_rl.inference.vllm", "prime_rl.inference.patches"),
    "verifiers": ("rollouts.training.environments",),
    "wandb": ("prime_rl.utils.trackers", "prime_rl.monitor", "nanochat.prime_rl_wandb"),
    "transformers": (
        "prime_rl.trainer.model",
        "prime_rl.trainer.hf_model",
        "prime_rl.trainer.ckpt",
        "rollouts.training.backends.pytorch_factory",
        "prime_rl.utils.tokenizer",
    ),
    "openai": ("prime_rl.utils.client", "rollouts.training.environments.answers"),
    "starlette": ("prime_rl.inference", "prime_rl.monitor"),
    "ray": ("prime_rl.deployment.ray_job",),
    "plotly": ("prime_rl.monitor", "nanochat.prime_rl_figures"),
}

# These never name torch, not even inside a function: the conductor is light, words and arithmetic on lists are too.
TORCH_FREE = (
    *FLOORS[0][0].split(),
    "rollouts.training.filters",
    "rollouts.training.advantages",
    "rollouts.training.metrics",
    "rollouts.training.datasets.data_buffer",
    "rollouts.training.weight_sync",
    "rollouts.training.rollout_gen",
    "prime_rl.orchestrator",
    "prime_rl.rl",
    "prime_rl.config",
    "prime_rl.config_teacher",
    "prime_rl.deployment",
    "prime_rl.fleet",
)
# Importing one of these wakes none of GIANTS, directly or through others: `--help` is instant.
QUICK = (*TORCH_FREE, "prime_rl.utils", "prime_rl.eval")
GIANTS = ("torch", "transformers", "verifiers", "datasets", "vllm", "wandb")

# Published tokenizers come as a pickle: one unpickler there admits one class, as a record that can do nothing.
ADMITS_ONE_CLASS = "nanochat.tokenizer"
PICKLERS = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
# Torch's zip format, for the documented `pytorch_model.bin`, `optimizer.bin` and nanochat's `model.pt` only.
TORCH_ZIP = ("rollouts.training.backends", "nanochat.checkpoint_manager")
VAGUE_NAMES = ("utils", "helpers", "common", "misc", "base")
KEPT_NAMES = ("prime_rl.utils", "nanochat.common", "AsyncRolloutManager", "RolloutManager", "CheckpointManager")


def _inside(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


@dataclass
class Module:
    """One parsed source file; `eager` imports run when the module is loaded, `names` holds all of them."""

    name: str
    tree: ast.Module
    is_package: bool = False
    eager: set[str] = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)  # imported module -> line


def _imported(node: ast.AST, module: Module, known: set[str]) -> Iterator[str]:
    """Absolute names of the modules that an import statement or `import_module("...")` brings in."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
    elif isinstance(node, ast.Call) and node.args and _called(node) == "import_module":
        yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _called(node: ast.Call) -> str:
    """The last part of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, with False inside functions and `if TYPE_CHECKING:`."""
    waiting = [(tree, True)]
    while waiting:
        node, eager = waiting.pop()
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(node, ast.If) and for_types and child not in node.orelse:
                lazy = True
            found = child, eager and not lazy
            yield found
            waiting.append(found)


def read_house(src: Path) -> dict[str, Module]:
    """All modules below `src`, by dotted name, with their imports."""
    house: dict[str, Module] = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        house[name] = Module(name, ast.parse(path.read_text(encoding="utf-8")), is_package)
    known = set(house)
    for module in house.values():
        for node, eager in _walk(module.tree):
            for name in _imported(node, module, known):
                line = getattr(node, "lineno", 0)
                module.names[name] = min(line, module.names.get(name, line))
                if eager:
                    module.eager.add(name)
    return house


def _room(module: str) -> tuple[int, str] | None:
    rooms = [(floor, room) for floor, (names, _) in FLOORS.items() for room in names.split() if _inside(module, room)]
    return max(rooms, key=lambda found: len(found[1]), default=None)


def _excepted(importer: str, imported: str) -> bool:
    return any(_inside(importer, a) and _inside(imported, *b.split()) for a, b in EXCEPTIONS.items())


def check_floors(house: dict[str, Module]) -> list[str]:
    """Imports that go up or sideways, rooms without a floor."""
    faults = []
    for module in house.values():
        here = _room(module.name)
        if here is None and module.name not in FACES:
            faults.append(f"{module.name} stands on no floor: give it a row in FLOORS of tests/unit/test_house.py")
        for name, line in module.names.items():
            if _inside(name, *LEAVES):
                faults.append(f"{module.name}:{line} imports {name}, a leaf: nobody imports leaves, move the code down")
            if name == "rollouts.training":
                faults.append(
                    f"{module.name}:{line} imports the face {name}: take the word from the module it lives in"
                )
            there = _room(name) if name in house else None
            if there is None or here is None or here[1] == there[1] or _excepted(module.name, name):
                continue
            if there[0] not in FLOORS[here[0]][1]:
                faults.append(
                    f"{module.name}:{line} (floor {here[0]}, {here[1]}) imports {name} (floor {there[0]}, {there[1]}), "
                    f"but floor {here[0]} may import only floors {sorted(FLOORS[here[0]][1])}: "
                    "move what both need to a lower floor, or pass it in as an argument"
                )
            elif here[0] == 8 and there[0] in (6, 7) and name.rpartition(".")[2] != "config":
                faults.append(
                    f"{module.name}:{line} imports {name}: the launcher starts processes by command and imports "
                    "only their config.py"
                )
    return faults


def check_doors(house: dict[str, Module]) -> list[str]:
    """Giants that enter elsewhere than by their door."""
    return [
        f"{module.name}:{line} imports {name}: {giant} enters only by {', '.join(doors)}; call a function there instead"
        for module in house.values()
        for name, line in module.names.items()
        for giant, doors in DOORS.items()
        if _inside(name, giant) and not _inside(module.name, *doors)
    ]


def check_torch_free(house: dict[str, Module]) -> list[str]:
    """Rooms that name torch although their work is on lists and files."""
    return [
        f"{module.name}:{line} imports {name}: this room is free of torch; work on plain lists, or move the code to a "
        "room that computes"
        for module in house.values()
        if _inside(module.name, *TORCH_FREE) or module.name.rpartition(".")[2] == "config"
        for name, line in module.names.items()
        if _inside(name, "torch")
    ]


def check_quick(house: dict[str, Module], commands: dict[str, str]) -> list[str]:
    """Configs, commands and light rooms whose import wakes a giant; the sentence shows the way it takes."""
    starts = {name for name in house if _inside(name, *QUICK) or name.rpartition(".")[2] == "config"}
    faults = []
    for start in sorted((starts | {*commands.values(), *FACES}) & set(house)):
        road = _road_to_giant(house, start)
        if road:
            faults.append(
                f"importing {start} wakes {road[-1]}: {' -> '.join(road)}; "
                "import it inside the function that needs it, so that --help stays instant"
            )
    return faults


def _road_to_giant(house: dict[str, Module], start: str) -> list[str]:
    roads, seen = [[start]], {start}
    while roads:
        road = roads.pop(0)
        parents = road[-1].split(".")
        packages = {".".join(parents[:i]) for i in range(1, len(parents))}
        for name in sorted(house[road[-1]].eager | packages):
            if _inside(name, *GIANTS):
                return [*road, name]
            if name in house and name not in seen:
                seen.add(name)
                roads.append([*road, name])
    return []


def check_pickle(house: dict[str, Module]) -> list[str]:
    """Everything that turns bytes into code."""
    cure = "write safetensors, msgpack or JSON instead"
    faults = [
        f"{module.name}:{line} imports {name}: nothing is ever unpickled into code; {cure}"
        for module in house.values()
        for name, line in module.names.items()
        if _inside(name, *PICKLERS) and module.name != ADMITS_ONE_CLASS
    ]
    for module in house.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            where = f"{module.name}:{node.lineno}"
            if call in ("torch.save", "torch.load") and not _inside(module.name, *TORCH_ZIP):
                faults.append(f"{where} calls {call}: only {', '.join(TORCH_ZIP)} may; {cure}")
            elif call == "torch.load" and options.get("weights_only") != "True":
                faults.append(f"{where} calls torch.load without weights_only=True: it would run code from the file")
            elif options.get("allow_pickle") == "True":
                faults.append(f"{where} passes allow_pickle=True: {cure}")
            elif re.search(r"_object(_list)?$", call):
                faults.append(f"{where} calls {call}, which pickles: send tensors, or msgpack bytes in a tensor")
    return faults


def check_names(house: dict[str, Module]) -> list[str]:
    """Modules and classes whose name says nothing."""
    cure = "name it after what it does"
    faults = []
    for module in house.values():
        if module.name.rpartition(".")[2] in VAGUE_NAMES and module.name not in KEPT_NAMES:
            faults.append(f"{module.name}: a module name that says nothing; {cure}")
        faults += [
            f"{module.name}:{node.lineno} class {node.name}: nobody knows what a manager does; {cure}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef) and node.name.endswith("Manager") and node.name not in KEPT_NAMES
        ]
    return faults


def check_circles(house: dict[str, Module]) -> list[str]:
    """Modules that import each other while they are loaded, each circle once."""
    faults = []
    for start in sorted(house):
        reached, todo = {start: [start]}, [start]
        while todo:
            here = todo.pop(0)
            for name in sorted(house[here].eager & set(house)):
                if name == start and start == min(reached[here]):
                    faults.append(
                        f"{' -> '.join([*reached[here], start])} is a circle: move what both need to a third room"
                    )
                if name not in reached:
                    reached[name] = [*reached[here], name]
                    todo.append(name)
    return faults


@cache
def _house() -> dict[str, Module]:
    return read_house(ROOT / "src")


@cache
def _commands() -> dict[str, str]:
    """Console script -> module."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return {name: target.partition(":")[0] for name, target in scripts.items()}


def _files() -> list[Path]:
    """Files under version control and new ones, or all of them in a source archive."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, capture_output=True, text=True, check=True, timeout=30).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        skip = {".venv", "outputs", "build", "dist"}
        return [p for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.relative_to(ROOT).parts)]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def _report(faults: list[str]) -> None:
    assert not faults, "\n\n" + "\n".join(faults) + "\n"


def test_imports_go_down() -> None:
    _report(check_floors(_house()))


def test_nobody_imports_in_circles() -> None:
    _report(check_circles(_house()))


def test_giants_enter_by_their_doors() -> None:
    _report(check_doors(_house()))


def test_light_rooms_do_not_name_torch() -> None:
    _report(check_torch_free(_house()))


def test_commands_and_configs_import_fast() -> None:
    _report(check_quick(_house(), _commands()))


def test_nothing_is_pickled() -> None:
    _report(check_pickle(_house()))


def test_names_say_something() -> None:
    _report(check_names(_house()))


def test_every_command_has_its_main() -> None:
    def has_main(module: Module | None) -> bool:
        return module is not None and any(getattr(node, "name", None) == "main" for node in module.tree.body)

    _report([f"{c}: {m} has no main()" for c, m in _commands().items() if not has_main(_house().get(m))])


def test_every_module_says_what_it_is_for() -> None:
    faults = []
    for path in (p for p in _files() if p.suffix == ".py"):
        text = re.sub(r"\A(#.*\n|\s)*", "", path.read_text(encoding="utf-8"))
        if not re.match(r'[rR]?"""[^\s"]', text):
            faults.append(f"{path.relative_to(ROOT)} opens without a docstring: say in one sentence what it is for")
    _report(faults)


# Split, so that this file does not contain what it looks for.
_FORBIDDEN = {
    r"(?<![\w.])/(wo" + r"rk|ro" + r"ot|op" + r"t)(?=[/\s'\"`:]|$)": "a path of one machine",
    r"(?<![\w.])/ho" + r"me/\w": "a path of one machine",
    r"py" + r"pi\.org|python" + r"hosted\.org|registry\.np" + r"mjs|deb\." + r"debian\.org": "a registry's host",
}


def _forbidden_in(text: str) -> list[str]:
    return [f"{what}: {m.group(0)!r}" for pattern, what in _FORBIDDEN.items() for m in re.finditer(pattern, text, re.M)]


def test_files_know_no_machine() -> None:
    faults = []
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        faults += [f"{path.relative_to(ROOT)} contains {found}; make it relative" for found in _forbidden_in(text)]
    _report(faults)


@pytest.mark.parametrize(
    ("file", "code", "check", "sentence"),
    [
        ("rollouts/training/types.py", "from rollouts.training import metrics", check_floors, "floor 0"),
        ("rollouts/training/filters.py", "from . import metrics", check_floors, "imports rollouts.training.metrics"),
        ("prime_rl/trainer/a.py", "def f():\n    import prime_rl.orchestrator.b", check_floors, "floor 6"),
        ("prime_rl/trainer/a.py", "from prime_rl.inference.embedded import cache", check_floors, "floor 6"),
        ("prime_rl/inference/server.py", "import prime_rl.trainer.models", check_floors, "floor 6"),
        ("prime_rl/rl.py", "import prime_rl.orchestrator.b", check_floors, "only their config.py"),
        ("prime_rl/trainer/a.py", "from rollouts.training import Sample", check_floors, "imports the face"),
        ("prime_rl/trainer/a.py", "from . import a", check_circles, "is a circle"),
        ("prime_rl/attic.py", "", check_floors, "stands on no floor"),
        ("prime_rl/trainer/a.py", "import tests.unit", check_floors, "nobody imports leaves"),
        ("prime_rl/trainer/a.py", "import wandb", check_doors, "prime_rl.utils.trackers"),
        ("prime_rl/orchestrator/b.py", "def f():\n    from openai import OpenAI", check_doors, "prime_rl.utils.client"),
        ("prime_rl/trainer/a.py", "x = importlib.import_module('vllm.engine')", check_doors, "prime_rl.inference.vllm"),
        ("prime_rl/orchestrator/b.py", "def f():\n    import torch.nn", check_torch_free, "free of torch"),
        ("prime_rl/trainer/config.py", "import torch", check_torch_free, "free of torch"),
        ("prime_rl/trainer/a.py", "import pickle", check_pickle, "safetensors"),
        ("prime_rl/trainer/a.py", "torch.save(x, p)", check_pickle, "calls torch.save"),
        ("rollouts/training/backends/step.py", "torch.load(p)", check_pickle, "weights_only=True"),
        ("prime_rl/trainer/a.py", "np.load(p, allow_pickle=True)", check_pickle, "allow_pickle"),
        ("prime_rl/trainer/a.py", "dist.all_gather_object(a, b)", check_pickle, "which pickles"),
        ("prime_rl/trainer/helpers.py", "", check_names, "says nothing"),
        ("prime_rl/trainer/a.py", "class CacheManager: ...", check_names, "CacheManager"),
    ],
)
def test_the_rules_find_what_they_look_for(tmp_path: Path, file: str, code: str, check, sentence: str) -> None:
    others = ("rollouts/training/metrics.py", "prime_rl/orchestrator/b.py", "prime_rl/trainer/models/__init__.py")
    for name in (*others, "prime_rl/inference/embedded/cache.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    if code:
        assert not check(read_house(tmp_path)), "the empty house has no fault"
    (tmp_path / file).write_text(code)
    faults = check(read_house(tmp_path))
    assert len(faults) == 1 and sentence in faults[0], faults


def test_a_giant_behind_three_doors_is_found(tmp_path: Path) -> None:
    files = {
        "prime_rl/rl.py": "from prime_rl.trainer.config import X",
        "prime_rl/trainer/__init__.py": "from prime_rl.utils import a",
        "prime_rl/trainer/config.py": "if TYPE_CHECKING:\n    import verifiers",
        "prime_rl/utils/a.py": "try:\n    import torch\nexcept ImportError:\n    pass",
        "prime_rl/utils/b.py": "def f():\n    import torch",
    }
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    faults = check_quick(read_house(tmp_path), {"rl": "prime_rl.rl"})
    roads = [fault.partition(";")[0] for fault in faults]
    assert "importing prime_rl.utils.a wakes torch: prime_rl.utils.a -> torch" in roads
    assert any(road.startswith("importing prime_rl.rl wakes torch: prime_rl.rl -> prime_rl.trainer") for road in roads)
    assert not any(road.startswith("importing prime_rl.utils.b ") for road in roads)


def test_a_machine_path_is_found() -> None:
    for text in ("cd /wo" + "rk/main", "'/ro" + "ot'", "see https://py" + "pi.org/simple", "/ho" + "me/ann/x"):
        assert _forbidden_in(text), text
    assert not _forbidden_in("some prose/of a kind, $HOME and ./root/x")
