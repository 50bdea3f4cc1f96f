"""Architecture rules: layers, heavy dependencies, import time, pickling, names and language.

The layers are data in `dev/architecture.toml`. The sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dev.architecture_page import PAGE, PICTURE, render_page, render_picture
from dev.code_report import find_banned_words
from dev.source_tree import (
    Module,
    Package,
    find_cycles,
    find_package,
    is_inside,
    list_packages,
    module_edges,
    read_architecture,
    read_modules,
)

ROOT = Path(__file__).parents[3]
ARCHITECTURE = read_architecture()
PACKAGES = list_packages(ARCHITECTURE)
ENTRY: dict[str, list[str]] = ARCHITECTURE["entry"]
TORCH_FREE: list[str] = ARCHITECTURE["torch_free"]

LEAVES = ("scripts", "dev", "benchmarks", "environments", "tests")
# Package roots: they import nothing of ours when they are loaded.
PACKAGE_ROOTS = ("rollouts", "rollouts.training", "prime_rl", "prime_rl.utils")
# Importing one of these loads none of HEAVY, directly or through others, so that `--help` is quick.
LIGHT = (
    *TORCH_FREE,
    *(
        f"prime_rl.{name}"
        for name in ("utils", "configuration", "client", "envs", "runtime", "telemetry", "generation", "eval")
    ),
)
HEAVY = ("torch", "transformers", "verifiers", "datasets", "vllm", "wandb")

# Published nanochat tokenizers are pickles: the unpickler there admits one class, which can do nothing.
ADMITS_ONE_CLASS = "nanochat.tokenizer"
PICKLERS = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
# Torch's zip format, for the documented `pytorch_model.bin`, `optimizer.bin` and nanochat's `model.pt` only.
TORCH_ZIP = ("rollouts.training.backends", "nanochat.checkpoint_manager")
VAGUE_NAMES = ("utils", "helpers", "common", "misc", "base")
DOCUMENTED_NAMES = (
    *("prime_rl.utils", "nanochat.common", "AsyncRolloutManager", "RolloutManager", "CheckpointManager"),
    "BlockManager",  # the standard name of the field
)
MAX_TEST_NAME = 60 + len("test_")


def check_layers(modules: dict[str, Module]) -> list[str]:
    """Imports that go up or across, and modules without a layer."""
    errors = []
    for module in modules.values():
        here = find_package(module.name, PACKAGES)
        if here is None and module.name not in PACKAGE_ROOTS:
            errors.append(f"{module.name} has no layer: add its package to dev/architecture.toml")
        for name, line in module.imports.items():
            if is_inside(name, *LEAVES):
                errors.append(f"{module.name}:{line} imports {name}: src never imports it, move the code down")
            if name == "rollouts.training":
                errors.append(f"{module.name}:{line} imports the package root {name}: import the defining module")
            there = find_package(name, PACKAGES) if name in modules else None
            if there is None or here is None or here == there:
                continue
            if there.layer > here.layer or (there.layer == here.layer and here.is_independent):
                errors.append(
                    f"{module.name}:{line} (layer {here.layer_name!r}) imports {name} (layer {there.layer_name!r}): "
                    "move what both need to a lower layer, or pass it in as an argument"
                )
            elif _starts_processes(here) and there.layer_name in ("applications", "evaluation"):
                if name.rpartition(".")[2].endswith("config"):
                    continue
                errors.append(f"{module.name}:{line} imports {name}: launchers import only an application's config")
    return errors


def _starts_processes(package: Package) -> bool:
    """Whether a package starts applications as processes and so needs only their configuration."""
    return package.layer_name == "launch" and package.name != "prime_rl.plan"


def check_cycles(modules: dict[str, Module]) -> list[str]:
    """Circles of modules and of packages; imports inside functions and for types count."""
    edges = module_edges(modules)
    packages: dict[str, set[str]] = {}
    for name, targets in edges.items():
        here = find_package(name, PACKAGES)
        for there in (find_package(target, PACKAGES) for target in targets):
            if here and there and here != there:
                packages.setdefault(here.name, set()).add(there.name)
    return [
        f"{' <-> '.join(cycle)} import each other: move what both need to a third module"
        for cycle in [*find_cycles(edges), *find_cycles(packages)]
    ]


def check_entries(modules: dict[str, Module]) -> list[str]:
    """Heavy dependencies imported elsewhere than in their modules."""
    return [
        f"{module.name}:{line} imports {name}: only {', '.join(entries)} may; call a function there instead"
        for module in modules.values()
        for name, line in module.imports.items()
        for dependency, entries in ENTRY.items()
        if is_inside(name, dependency) and not is_inside(module.name, *entries)
    ]


def check_torch_free(modules: dict[str, Module]) -> list[str]:
    """Modules that import torch although they work on lists and files."""
    return [
        f"{module.name}:{line} imports {name}: this package must not depend on torch; work on lists, or move the code"
        for module in modules.values()
        if is_inside(module.name, *TORCH_FREE) or module.name.rpartition(".")[2] == "config"
        for name, line in module.imports.items()
        if is_inside(name, "torch")
    ]


def check_import_time(modules: dict[str, Module], commands: dict[str, str]) -> list[str]:
    """Configurations, commands and light packages that load a heavy dependency; the message shows the chain."""
    starts = {name for name in modules if is_inside(name, *LIGHT) or name.rpartition(".")[2] == "config"}
    errors = []
    for start in sorted((starts | {*commands.values(), *PACKAGE_ROOTS}) & set(modules)):
        chain = _chain_to_heavy(modules, start)
        if chain:
            errors.append(
                f"importing {start} loads {chain[-1]}: {' -> '.join(chain)}; "
                "import it inside the function that needs it"
            )
    return errors


def _chain_to_heavy(modules: dict[str, Module], start: str) -> list[str]:
    chains, seen = [[start]], {start}
    while chains:
        chain = chains.pop(0)
        parts = chain[-1].split(".")
        parents = {".".join(parts[:i]) for i in range(1, len(parts))}
        for name in sorted(modules[chain[-1]].eager | parents):
            if is_inside(name, *HEAVY):
                return [*chain, name]
            if name in modules and name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    return []


def check_pickle(modules: dict[str, Module]) -> list[str]:
    """Everything that turns bytes into code."""
    cure = "write safetensors, msgpack or JSON instead"
    errors = [
        f"{module.name}:{line} imports {name}: nothing is unpickled; {cure}"
        for module in modules.values()
        for name, line in module.imports.items()
        if is_inside(name, *PICKLERS) and module.name != ADMITS_ONE_CLASS
    ]
    for module in modules.values():
        if not re.search(r"torch\.(load|save)\b|allow_pickle|_object", module.text):  # quick: few have any
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            where = f"{module.name}:{node.lineno}"
            if call in ("torch.save", "torch.load") and not is_inside(module.name, *TORCH_ZIP):
                errors.append(f"{where} calls {call}: only {', '.join(TORCH_ZIP)} may; {cure}")
            elif call == "torch.load" and options.get("weights_only") != "True":
                errors.append(f"{where} calls torch.load without weights_only=True: it would run code from the file")
            elif options.get("allow_pickle") == "True":
                errors.append(f"{where} passes allow_pickle=True: {cure}")
            elif re.search(r"_object(_list)?$", call):
                errors.append(f"{where} calls {call}, which pickles: send tensors, or msgpack bytes in a tensor")
    return errors


def check_names(modules: dict[str, Module]) -> list[str]:
    """Modules and classes with vague names."""
    errors = []
    for module in modules.values():
        if module.name.rpartition(".")[2] in VAGUE_NAMES and module.name not in DOCUMENTED_NAMES:
            errors.append(f"{module.name}: a vague module name; name it after what it does")
        errors += [
            f"{module.name}:{node.lineno} class {node.name}: a vague class name; name it after what it does"
            for node in module.classes
            if node.name.endswith("Manager") and node.name not in DOCUMENTED_NAMES
        ]
    return errors


def check_class_names(modules: dict[str, Module]) -> list[str]:
    """Class names that exist more than once."""
    homes: dict[str, list[str]] = {}
    for module in modules.values():
        for node in module.classes:
            homes.setdefault(node.name, []).append(module.name)
    allowed: dict[str, str] = ARCHITECTURE["same_class_name"]
    return [f"class {n} exists in {', '.join(m)}" for n, m in homes.items() if len(m) > 1 and n not in allowed]


@cache
def _modules() -> dict[str, Module]:
    return read_modules(ROOT / "src")


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


def _fail_with(errors: list[str]) -> None:
    assert not errors, "\n\n" + "\n".join(errors) + "\n"


def test_imports_follow_the_layers() -> None:
    _fail_with(check_layers(_modules()))


def test_no_import_cycles() -> None:
    _fail_with(check_cycles(_modules()))


def test_heavy_dependencies_enter_by_named_modules() -> None:
    _fail_with(check_entries(_modules()))


def test_light_packages_do_not_import_torch() -> None:
    _fail_with(check_torch_free(_modules()))


def test_commands_and_configs_import_quickly() -> None:
    _fail_with(check_import_time(_modules(), _commands()))


def test_nothing_is_pickled() -> None:
    _fail_with(check_pickle(_modules()))


def test_names_are_specific() -> None:
    _fail_with(check_names(_modules()))


def test_class_names_are_unique() -> None:
    _fail_with(check_class_names(_modules()))


def test_no_banned_words() -> None:
    found = find_banned_words(ROOT, ARCHITECTURE["language"])
    _fail_with([f"{path.relative_to(ROOT)}:{line} {word!r}" for path, line, word in found])


def test_test_names_are_short() -> None:
    errors = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r"\s*(?:async )?def (test_\w+)", line)
            if match and len(match[1]) > MAX_TEST_NAME:
                errors.append(f"{path.relative_to(ROOT)}:{number} {match[1]} has {len(match[1])} characters")
    _fail_with(errors)


def test_test_files_have_names_of_their_own() -> None:
    """Else pytest collects one of them, and fails with the others."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    _fail_with([f"{name}: there are {num}" for name, num in counts.items() if num > 1])


def test_architecture_page_is_current() -> None:
    cure = "run `python dev/architecture_page.py`"
    assert PAGE.read_text(encoding="utf-8") == render_page(ARCHITECTURE), cure
    assert PICTURE.read_text(encoding="utf-8") == render_picture(ARCHITECTURE), cure


def test_every_command_has_a_main() -> None:
    def has_main(module: Module | None) -> bool:
        return module is not None and any(getattr(node, "name", None) == "main" for node in module.tree.body)

    _fail_with([f"{c}: {m} has no main()" for c, m in _commands().items() if not has_main(_modules().get(m))])


def test_every_module_has_a_docstring() -> None:
    errors = []
    for path in (p for p in _files() if p.suffix == ".py"):
        text = re.sub(r"\A(#.*\n|\s)*", "", path.read_text(encoding="utf-8"))
        if not re.match(r'[rR]?"""[^\s"]', text):
            errors.append(f"{path.relative_to(ROOT)} has no module docstring: add one sentence")
    _fail_with(errors)


# Split, so that this file does not contain what it looks for. A pattern with a literal beginning is found quickly.
_FORBIDDEN = {
    r"/(?<![\w.]/)(wo" + r"rk|ro" + r"ot|op" + r"t)(?=[/\s'\"`:]|$)": "a path of one machine",
    r"/(?<![\w.]/)ho" + r"me/\w": "a path of one machine",
    r"py" + r"pi\.org|python" + r"hosted\.org|registry\.np" + r"mjs|deb\." + r"debian\.org": "a registry's host",
}


def _forbidden_in(text: str) -> list[str]:
    return [f"{what}: {m.group(0)!r}" for pattern, what in _FORBIDDEN.items() for m in re.finditer(pattern, text, re.M)]


def test_files_contain_no_machine_paths() -> None:
    errors = []
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        errors += [f"{path.relative_to(ROOT)} contains {found}; make it relative" for found in _forbidden_in(text)]
    _fail_with(errors)


@pytest.mark.parametrize(
    ("file", "code", "check", "message"),
    [
        ("rollouts/training/types.py", "from rollouts.training import metrics", check_layers, "layer 'types'"),
        ("rollouts/training/types.py", "from . import metrics", check_layers, "imports rollouts.training.metrics"),
        (
            "prime_rl/trainer/a.py",
            "def f():\n    import prime_rl.orchestrator.b",
            check_layers,
            "imports prime_rl.orch",
        ),
        ("prime_rl/trainer/a.py", "from prime_rl.inference.embedded import kv_cache", check_layers, "applications"),
        ("prime_rl/rl.py", "import prime_rl.orchestrator.b", check_layers, "only an application's config"),
        ("prime_rl/trainer/a.py", "from rollouts.training import Sample", check_layers, "imports the package root"),
        ("prime_rl/attic.py", "", check_layers, "has no layer"),
        ("prime_rl/trainer/a.py", "import tests.unit", check_layers, "src never imports it"),
        ("prime_rl/orchestrator/b.py", "def f():\n    import prime_rl.orchestrator.c", check_cycles, "each other"),
        ("prime_rl/trainer/a.py", "import wandb", check_entries, "prime_rl.telemetry.trackers"),
        (
            "prime_rl/orchestrator/b.py",
            "def f():\n    from openai import OpenAI",
            check_entries,
            "prime_rl.utils.client",
        ),
        (
            "prime_rl/trainer/a.py",
            "x = importlib.import_module('vllm.engine')",
            check_entries,
            "prime_rl.inference.vllm",
        ),
        ("prime_rl/orchestrator/b.py", "def f():\n    import torch.nn", check_torch_free, "not depend on torch"),
        ("prime_rl/trainer/config.py", "import torch", check_torch_free, "not depend on torch"),
        ("prime_rl/trainer/a.py", "import pickle", check_pickle, "safetensors"),
        ("prime_rl/trainer/a.py", "torch.save(x, p)", check_pickle, "calls torch.save"),
        ("rollouts/training/backends/step.py", "torch.load(p)", check_pickle, "weights_only=True"),
        ("prime_rl/trainer/a.py", "np.load(p, allow_pickle=True)", check_pickle, "allow_pickle"),
        ("prime_rl/trainer/a.py", "dist.all_gather_object(a, b)", check_pickle, "which pickles"),
        ("prime_rl/trainer/helpers.py", "", check_names, "vague"),
        ("prime_rl/trainer/a.py", "class CacheManager: ...", check_names, "CacheManager"),
        ("prime_rl/trainer/a.py", "class A: ...\nclass B:\n    class A: ...", check_class_names, "class A exists"),
    ],
)
def test_each_rule_reports_a_violation(tmp_path: Path, file: str, code: str, check: Any, message: str) -> None:
    others = {
        "rollouts/training/metrics.py": "",
        "prime_rl/orchestrator/b.py": "",
        "prime_rl/orchestrator/c.py": "from prime_rl.orchestrator import b",
        "prime_rl/inference/embedded/kv_cache.py": "",
    }
    for name, text in {**others, file: others.get(file, "")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if code:
        assert not check(read_modules(tmp_path)), "the tree without the violation is clean"
    (tmp_path / file).write_text(code)
    errors = check(read_modules(tmp_path))
    assert len(errors) == 1 and message in errors[0], errors


def test_indirect_heavy_imports_are_reported(tmp_path: Path) -> None:
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
    errors = check_import_time(read_modules(tmp_path), {"rl": "prime_rl.rl"})
    chains = [error.partition(";")[0] for error in errors]
    assert "importing prime_rl.utils.a loads torch: prime_rl.utils.a -> torch" in chains
    assert any(
        chain.startswith("importing prime_rl.rl loads torch: prime_rl.rl -> prime_rl.trainer") for chain in chains
    )
    assert not any(chain.startswith("importing prime_rl.utils.b ") for chain in chains)


def test_machine_paths_are_found() -> None:
    for text in ("cd /wo" + "rk/main", "'/ro" + "ot'", "see https://py" + "pi.org/simple", "/ho" + "me/ann/x"):
        assert _forbidden_in(text), text
    assert not _forbidden_in("some prose/of a kind, $HOME and ./root/x")
