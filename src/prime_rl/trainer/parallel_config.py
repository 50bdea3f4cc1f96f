"""Configuration of the parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prime_rl.utils.pydantic_config import BaseConfig


class ParallelDims(BaseConfig):
    """Parallelism sizes: world size = pp * dp * cp * tp, where dp = dp_replicate * dp_shard."""

    dp: int | None = Field(default=None, ge=1)
    """Data parallel size; unset: world size / (pp * cp * tp)."""

    dp_replicate: int = Field(default=1, ge=1)
    """Number of replicas of the sharded model (HSDP); 1: fully sharded over all dp ranks."""

    dp_shard: int | None = Field(default=None, ge=1)
    """Shards per replica; unset: dp / dp_replicate."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size; splits matrices by heads, columns and vocabulary."""

    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size; splits the model by layers."""

    pp_stages: int = Field(default=1, ge=1)
    """Stages per pp rank; 1: 1F1B schedule; more: interleaved 1F1B, with a smaller bubble and more messages."""

    cp: int = Field(default=1, ge=1)
    """Context parallel size; splits a micro-batch by tokens."""

    cp_style: Literal["ulysses", "ring"] = "ulysses"
    """ulysses: all-to-all over heads; ring: ring attention, for more ranks than attention heads."""

    ep: int = Field(default=1, ge=1)
    """Expert parallel size; splits experts over the dp_shard and cp ranks; divides dp_shard * cp."""

    @property
    def num_ranks(self) -> int:
        """World size that follows from this section."""
        return self.model_ranks * (self.dp or self.dp_replicate * (self.dp_shard or 1))

    @property
    def model_ranks(self) -> int:
        """Ranks per data parallel group."""
        return self.pp * self.cp * self.tp

    @property
    def splits_model(self) -> list[str]:
        """The dimensions above 1 that need the native decoder."""
        return [name for name in ("tp", "cp", "pp", "ep") if getattr(self, name) > 1]

    def resolve(self, num_ranks: int) -> ParallelDims:
        """All sizes for `num_ranks` ranks; `ValueError` when they are inconsistent."""
        if num_ranks % self.model_ranks:
            raise ValueError(
                f"parallel: pp {self.pp} * cp {self.cp} * tp {self.tp} = {self.model_ranks} ranks "
                f"per data parallel group does not divide {num_ranks} ranks"
            )
        dp = num_ranks // self.model_ranks
        if self.dp not in (None, dp) or (self.dp is None and self.dp_shard and self.num_ranks != num_ranks):
            given = "parallel.dp" if self.dp else "parallel.dp_shard"
            raise ValueError(
                f"{given} is {self.dp or self.dp_shard} but {num_ranks} ranks were started: leave {given} out, "
                f"or use torchrun --nproc-per-node {self.num_ranks}"
            )
        if dp % self.dp_replicate:
            raise ValueError(f"parallel.dp_replicate is {self.dp_replicate}, which does not divide {dp} ranks")
        if dp // self.dp_replicate * self.cp % self.ep:
            raise ValueError(
                f"parallel.ep {self.ep} does not divide dp_shard {dp // self.dp_replicate} * cp {self.cp}: "
                "experts are split over the dp_shard and cp ranks"
            )
        return self.model_copy(update={"dp": dp, "dp_shard": dp // self.dp_replicate})

    @model_validator(mode="after")
    def _check_sizes(self) -> ParallelDims:
        if self.pp_stages > 1 and self.pp == 1:
            raise ValueError("pp_stages needs pipeline parallelism: set pp above 1, or leave it out")
        if self.cp_style == "ring" and self.cp == 1:
            raise ValueError("cp_style needs context parallelism: set cp above 1, or leave it out")
        if self.dp is not None and self.dp % self.dp_replicate:
            raise ValueError(f"dp_replicate {self.dp_replicate} does not divide dp {self.dp}")
        if self.dp is not None and self.dp_shard not in (None, self.dp // self.dp_replicate):
            raise ValueError(
                f"dp {self.dp} is not dp_replicate {self.dp_replicate} * dp_shard {self.dp_shard}: leave one out"
            )
        return self
