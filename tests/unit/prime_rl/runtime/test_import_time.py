"""Importing the trainer does not import torch's compiler or sympy (half of torch's import time)."""

from __future__ import annotations

import subprocess
import sys

LAZY_MODULES = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "torch.distributed.pipelining")
LAZY_MODULES += ("torch.distributed.fsdp", "transformers", "verifiers", "datasets", "wandb")
MAX_MODULES = 1600
"""torch alone imports 1,100."""
LIST_IMPORTED = """
import sys
import prime_rl.trainer.rl.train, prime_rl.trainer.run
print(*(name for name in {modules} if name in sys.modules))
print(len(sys.modules))
"""


def test_a_trainer_import_skips_torch_compiler() -> None:
    code = LIST_IMPORTED.format(modules=LAZY_MODULES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, num_modules = done.stdout.splitlines()
    assert not imported and int(num_modules) <= MAX_MODULES
