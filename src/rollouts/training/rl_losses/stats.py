"""Per-token metrics of a step, aggregated to mean, median, standard deviation, minimum and maximum."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_SENT = 1 << 16
"""Maximum values per metric that a rank sends; beyond that every k-th, with the exact moments of all."""


class _Packed(msgspec.Struct, array_like=True):
    width: int
    """Bytes per value."""
    raw: bytes
    stride: int
    moments: list[float]


class _Message(msgspec.Struct):
    values: dict[str, _Packed]
    ratios: dict[str, list[float]]


@dataclass(frozen=True)
class SubsampledStats:
    """Every `stride`-th value of another rank; `moments` are count, sum, sum of squares, minimum, maximum of all."""

    values: Float[Tensor, " tokens"]
    stride: int
    moments: Float[Tensor, "5"]


@dataclass
class TokenStats:
    """All values of all metrics of a step, on their device, and ratios as sums with counts.

    Merging over micro-batches and ranks is associative: the summary is that of all values, medians included (ranks with
    more than `MAX_SENT` values contribute an even sample to them). Values take 4 bytes each: 60 MB for a million tokens
    and fifteen metrics.
    """

    values: dict[str, list[Float[Tensor, " tokens"]]] = field(default_factory=dict)
    ratios: dict[str, Float[Tensor, "2"]] = field(default_factory=dict)
    subsampled: dict[str, list[SubsampledStats]] = field(default_factory=dict)
    masked: list[tuple[dict[str, Float[Tensor, " tokens"]], Bool[Tensor, " tokens"]]] = field(default_factory=list)
    """Values on a GPU and which of them count. To select them waits for the GPU, so it is done when they are read."""

    @staticmethod
    @torch.no_grad()
    def measure(values: dict[str, Float[Tensor, " tokens"]], mask: Bool[Tensor, " tokens"] | None = None) -> TokenStats:
        """Statistics of each stream over the tokens where `mask` is true; None: over all."""
        values = {name: v.detach() for name, v in values.items()}
        if mask is not None and mask.is_cuda:
            return TokenStats(masked=[(values, mask)])
        return TokenStats({name: [v if mask is None else v[mask]] for name, v in values.items()})

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        return not self.values and not self.masked

    def select(self) -> None:
        """Move the masked values that count to `values`."""
        for values, mask in self.masked:
            rows = mask.nonzero().squeeze(1)
            for name, value in values.items():
                self.values.setdefault(name, []).append(value[rows])
        self.masked.clear()

    def merge(self, other: TokenStats) -> None:
        """Add the values of `other`."""
        self.masked.extend(other.masked)
        for name, parts in other.values.items():
            self.values.setdefault(name, []).extend(parts)
        for name, samples in other.subsampled.items():
            self.subsampled.setdefault(name, []).extend(samples)
        for name, ratio in other.ratios.items():
            self.ratios[name] = self.ratios[name] + ratio if name in self.ratios else ratio

    def set_loss_count(self, count: float) -> None:
        """Divide `loss/policy` by the count that the step divides by, which includes samples that were not computed.

        With several objectives each loss remains the mean over its own samples.
        """
        if "loss/policy" in self.ratios and not any(name.startswith("loss/policy/") for name in self.ratios):
            self.ratios["loss/policy"][1] = count

    def summary(self) -> dict[str, float]:
        """`name/mean`, `/median`, `/std`, `/min`, `/max` of every metric with a value; ratios under their own name.

        `std` is the population's; the median of an even number of values is the mean of the middle two. Importance
        ratios also have `/p05` and `/p95`, the smallest values with 5 and 95 % of the tokens at or below them, and
        `/ess`, the effective sample size (sum of r)^2 / (n sum of r^2) as a share of the n tokens (Kong, 1992).
        """
        self.select()
        names, rows = [], []
        for name, parts in self.values.items():
            seen, others = torch.cat(parts).double(), self.subsampled.get(name, [])
            if len(seen) or others:
                names.append(name)
                row = _describe_sample(seen, others) if others else _describe(seen)
                is_ratio = name.startswith("importance_ratio")
                rows.append(torch.cat((row, _describe_ratios(row, seen, others))) if is_ratio else row)
        out: dict[str, float] = {}
        flat = iter(torch.cat(rows).tolist() if rows else [])
        for name, row in zip(names, rows, strict=True):
            columns = _COLUMNS if len(row) == len(_COLUMNS) else (*_COLUMNS, *_RATIO_COLUMNS)
            out |= {f"{name}/{what}": next(flat) for what in columns}
        for name, ratio in self.ratios.items():
            total, count = ratio.tolist()
            if count:
                out[name] = total / count
        return out

    def mean(self, name: str) -> float | None:
        """Mean of a metric over all values; None without values."""
        self.select()
        pairs = [(float(len(part)), part.double().sum().item()) for part in self.values.get(name, [])]
        pairs += [(part.moments[0].item(), part.moments[1].item()) for part in self.subsampled.get(name, [])]
        count = sum(count for count, _ in pairs)
        return sum(total for _, total in pairs) / count if count else None

    def encode(self, most: int = MAX_SENT) -> bytes:
        """Serialize for another rank; values in fp32, fp64 values in fp64."""
        self.select()
        assert not self.subsampled, "statistics received from other ranks are not forwarded"
        ratios = {name: ratio.tolist() for name, ratio in self.ratios.items()}
        values = {name: _pack(torch.cat(parts), most) for name, parts in self.values.items()}
        return msgspec.msgpack.encode(_Message(values, ratios))

    @staticmethod
    def decode(data: bytes) -> TokenStats:
        """The inverse of `encode`, on the CPU."""
        message = msgspec.msgpack.decode(data, type=_Message)
        stats = TokenStats(
            ratios={name: torch.tensor(ratio, dtype=torch.float64) for name, ratio in message.ratios.items()}
        )
        for name, packed in message.values.items():
            dtype = torch.float64 if packed.width == 8 else torch.float32
            raw = packed.raw
            values = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            stats.values[name] = [values if packed.stride == 1 else values[:0]]
            if packed.stride > 1:
                moments = torch.tensor(packed.moments, dtype=torch.float64)
                stats.subsampled[name] = [SubsampledStats(values, packed.stride, moments)]
        return stats


def _pack(values: Tensor, most: int) -> _Packed:
    wide = values if values.dtype == torch.float64 else values.float()
    stride = max(1, -(-len(wide) // most))
    moments = [] if stride == 1 else _moments(wide.double()).tolist()
    return _Packed(wide.element_size(), wide[::stride].cpu().numpy().tobytes(), stride, moments)


def _moments(values: Float[Tensor, " tokens"]) -> Float[Tensor, "5"]:
    count = values.new_tensor(len(values))
    return torch.stack((count, values.sum(), values.square().sum(), values.min(), values.max()))


_COLUMNS = ("mean", "median", "std", "min", "max")
_RATIO_COLUMNS = ("p05", "p95", "ess")


def _describe(values: Float[Tensor, " tokens"]) -> Float[Tensor, "5"]:
    n = len(values)
    middle = values.kthvalue((n + 1) // 2).values
    if n % 2 == 0:
        middle = (middle + values.kthvalue(n // 2 + 1).values) / 2
    return torch.stack((values.mean(), middle, values.std(correction=0), values.min(), values.max()))


def _describe_ratios(
    row: Float[Tensor, "5"], values: Float[Tensor, " tokens"], others: list[SubsampledStats]
) -> Float[Tensor, "3"]:
    """Quantiles, of the weighted sample if there are `others`, and effective sample size."""
    kept = torch.cat([values, *(part.values.to(values) for part in others)])
    weight = torch.cat([torch.ones_like(values), *(torch.full_like(p.values, p.stride).to(values) for p in others)])
    ordered, order = kept.sort()
    below = weight[order].cumsum(0)
    places = torch.searchsorted(below, below[-1] * below.new_tensor([0.05, 0.95]))
    mean, std = row[0].to(values), row[2].to(values)
    ess = (mean.square() / (mean.square() + std.square())).nan_to_num(0.0).reshape(1)  # 0 if all are 0
    return torch.cat((ordered[places.clamp(max=len(ordered) - 1)], ess)).to(row)


def _describe_sample(values: Float[Tensor, " tokens"], others: list[SubsampledStats]) -> Float[Tensor, "5"]:
    """`_describe` with subsampled parts: exact except for the median, which is that of the weighted sample."""
    rows = [part.moments for part in others] + ([_moments(values).cpu()] if len(values) else [])
    count, total, squares = torch.stack(rows)[:, :3].sum(0)
    mean = total / count
    kept = torch.cat([values.cpu(), *(part.values.double() for part in others)])
    weight = torch.cat([torch.ones(len(values)), *(torch.full((len(p.values),), float(p.stride)) for p in others)])
    order = kept.argsort()
    below = weight[order].double().cumsum(0)
    middle = kept[order[int(torch.searchsorted(below, below[-1:] / 2))]]
    std = (squares / count - mean * mean).clamp(min=0).sqrt()
    low, high = torch.stack(rows)[:, 3].min(), torch.stack(rows)[:, 4].max()
    return torch.stack((mean, middle, std, low, high))
