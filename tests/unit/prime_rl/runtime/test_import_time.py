"""A trainer does not import torch's compiler or sympy (half of torch's import time)."""

from __future__ import annotations

import subprocess
import sys

LAZY_MODULES = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "torch.distributed.pipelining")
LAZY_MODULES += ("torch.distributed.fsdp", "transformers", "verifiers", "datasets", "wandb")
MAX_MODULES = 1600
"""torch alone imports 1,100."""
LIST_IMPORTED = """
import sys
import torch
import prime_rl.trainer.rl.train, prime_rl.trainer.run
from prime_rl.trainer.config import AdamConfig
from prime_rl.trainer.optim import build_optimizer

parameter = torch.nn.Parameter(torch.ones(2))
optimizer = build_optimizer(AdamConfig(), {{"weight": parameter}})
parameter.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
print(*(name for name in {modules} if name in sys.modules))
print(len(sys.modules))
"""


def test_a_training_step_skips_torch_compiler() -> None:
    code = LIST_IMPORTED.format(modules=LAZY_MODULES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, num_modules = done.stdout.splitlines()
    assert not imported and int(num_modules) <= MAX_MODULES
