"""`python -m prime_rl COMMAND ...`: the commands without the PATH, where shells have their own `eval`."""

from __future__ import annotations

import sys
from importlib import import_module

from prime_rl.runtime.interrupts import end_on_signals

COMMANDS = {
    "rl": ("prime_rl.rl:main", "train by asynchronous RL; `rl init NAME` writes a new environment"),
    "sft": ("prime_rl.trainer.sft.train:main", "supervised fine-tuning"),
    "eval": ("prime_rl.eval.eval:main", "evaluate weights, a server or an API"),
    "evolve": ("prime_rl.evolve.evolve:main", "search a context for an environment"),
    "synthesize": ("prime_rl.synthesize.synthesize:main", "generate training conversations"),
    "monitor": ("prime_rl.monitor.wandb_monitor:main", "metrics, rollouts and the live page of a run"),
    "plan": ("prime_rl.plan.plan:main", "estimate memory and time per step on a cluster"),
    "fetch": ("prime_rl.pretrained.fetch_command:main", "download a known model"),
    "convert": ("prime_rl.pretrained.convert:main", "GGUF files to and from Hugging Face directories"),
    "push": ("prime_rl.pretrained.push:main", "upload weights to the hub, with a model card"),
    "inference": ("prime_rl.inference.server:main", "the inference server alone"),
    "serve": ("prime_rl.training_api.serve:main", "train and sample for programs of the tinker client"),
    "trainer": ("prime_rl.trainer.rl.train:main", "the RL trainer alone"),
    "orchestrator": ("prime_rl.orchestrator.orchestrator:main", "the orchestrator alone"),
    "vf-install": ("prime_rl.envs.vf_install:main", "install an environment of verifiers"),
    "vf-rl": ("prime_rl.envs.vf_rl:main", "verifiers' RL command, or a nanochat run"),
}
"""Command -> its function, as in `[project.scripts]` of `pyproject.toml`, and its purpose."""


def main() -> None:
    """Run the command named by the first argument."""
    end_on_signals()
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "--version":
        from prime_rl.configuration.command import show_version

        raise SystemExit(show_version())
    if name in ("--help", "-h"):
        rows = "\n".join(f"  {command:<13} {purpose}" for command, (_, purpose) in COMMANDS.items())
        sys.stdout.write(f"usage: python -m prime_rl COMMAND ...; python -m prime_rl COMMAND --help\n\n{rows}\n")
        return
    if name not in COMMANDS:
        from prime_rl.configuration.schema import suggest

        near = suggest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"commands: {', '.join(COMMANDS)}"
        sys.stderr.write(f"error: unknown command {name!r}\n  {hint}\n")
        raise SystemExit(2)
    module, _, function = COMMANDS[name][0].partition(":")
    sys.argv = [name, *rest]
    getattr(import_module(module), function)()


if __name__ == "__main__":
    main()
