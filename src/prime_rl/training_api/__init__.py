"""The `serve` command: a training API that the `tinker` client uses, with many LoRA adapters over one model."""
