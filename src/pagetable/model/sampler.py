"""From logits to tokens: greedy or drawn, with the filters and in the order of vLLM, by array operations only.

    raw logits -> log-probabilities for the rows that ask
               -> banned tokens -> temperature -> min_p -> top_k -> top_p -> draw

Each filter is a threshold on a row's weights, so tokens of equal weight stay or go together and nothing depends on the
order of a sort. Of what is left the winner of a race is drawn (the Gumbel-max trick): each token has a number of its
own, a hash of (seed, index of the output token, token), so a draw is the same in any batch, at any row, after any
preemption. The rounding of logits, which does depend on the batch, can turn a photo finish only; a search in a
cumulative sum would have as many borders to fall over as there are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagetable.engine.step import SamplingBatch, TokenLogprobs

_RACE_ROWS = 16  # rows whose numbers are in memory at once, 8 bytes a token
_NUCLEUS = 1024  # tokens in which top_p looks first; only a row whose nucleus is larger pays for a full sort


# (logits, largest of each row, batch, rows) -> tokens: see `draw_rows`.
Draw = Callable[[Tensor, Tensor, SamplingBatch, NDArray[np.int64]], Tensor]


class LogitsError(FloatingPointError):
    """Logits from which nothing can be chosen: NaN, infinite, or every token banned. `rows` says where."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            f"no token can be chosen for rows {rows}: their logits are NaN, infinite or all banned. "
            "The weights may be damaged, or the model may overflow in this type: try float32"
        )
        self.rows = rows


def sample(
    logits: Tensor, batch: SamplingBatch, draw: Draw | None = None
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """One token for each row of `logits`, and the log-probabilities that were asked for (None when nobody asked).

    `logits` is (R, V) float32 and is overwritten where tokens are banned. `draw` is how a model draws if not as here.
    Raises `LogitsError` before drawing anything.
    """
    asking = np.flatnonzero(batch.num_logprobs >= 0)
    logprobs = torch.log_softmax(logits[_on(logits, asking)], dim=-1) if len(asking) else None
    known = batch.banned_token_ids < logits.shape[1]  # a stop token need not be in the vocabulary
    if known.any():
        rows, tokens = batch.banned_rows[known].astype(np.int64), batch.banned_token_ids[known].astype(np.int64)
        logits[_on(logits, rows), _on(logits, tokens)] = -torch.inf
    best, chosen = _largest(logits)
    _refuse_unusable(best)
    drawing = np.flatnonzero(batch.temperature > 0)
    if len(drawing):
        chosen[_on(logits, drawing)] = (draw or draw_rows)(logits, best, batch, drawing)
    if logprobs is None:
        return chosen.tolist(), None
    reports: list[TokenLogprobs | None] = [None] * len(batch)
    counts = batch.num_logprobs[asking]
    for row, report in zip(asking, _report(logprobs, chosen[_on(logits, asking)], counts), strict=True):
        reports[row] = report
    return chosen.tolist(), reports


def token_logprobs(logits: Tensor, token_ids: NDArray[np.int32], counts: NDArray[np.int32]) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens (R,), one for each row of `logits` (R, V), and `counts` (R,) alternatives.

    Raises `LogitsError` for rows that are no distribution.
    """
    _refuse_unusable(_largest(logits)[0])
    return _report(torch.log_softmax(logits, dim=-1), _on(logits, token_ids.astype(np.int64)), counts)


def _refuse_unusable(largest: Tensor) -> None:
    """LogitsError unless each row's largest value is a number."""
    bad = torch.nonzero(~torch.isfinite(largest)).flatten().tolist()
    if bad:
        raise LogitsError(bad)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row, NaN if there is one and -inf only if all are, and the first place it stands at."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    places = torch.from_numpy(logits.numpy().argmax(axis=-1))  # 32 rows of 49,152: 0.07 ms, PyTorch's max 0.6
    return logits.gather(1, places[:, None]).squeeze(1), places


def uniform(seeds: NDArray[np.uint64], output_index: NDArray[np.int64], like: Tensor) -> Tensor:
    """Numbers in (0, 1) for each (seed, index) and token: (r, V) as `like`, 52 bits of a counter-based hash.

    SplitMix64 (Steele, Lea and Flood 2014, OOPSLA): a stream of tokens for each pair, entered at a hash of the index
    and a hash of the seed, since neighbouring seeds would otherwise walk the same stream a few steps apart.
    """
    entry = race_entries(seeds, output_index)
    tokens = torch.arange(1, like.shape[1] + 1, device=like.device)
    x = _on(like, entry.astype(np.int64))[:, None] + tokens * int(_GAMMA.astype(np.int64))
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        x = (x ^ _shifted(x, shift)) * int(factor.astype(np.int64))  # int64 wraps around as uint64 does
    return (_shifted(x ^ _shifted(x, 31), 12).double() + 0.5) * 2.0**-52


def race_entries(seeds: NDArray[np.uint64], output_index: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Where each (seed, index) enters its stream of numbers."""
    count = np.asarray(output_index).astype(np.uint64) + np.uint64(1)
    return _mix64(_mix64(np.asarray(seeds, dtype=np.uint64) + _GAMMA) + count * _GAMMA)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of what is meant as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FACTORS[0]
    x = (x ^ (x >> np.uint64(27))) * _FACTORS[1]
    return x ^ (x >> np.uint64(31))


def _on(like: Tensor, array: NDArray[Any]) -> Tensor:
    return torch.tensor(array, device=like.device)


def draw_rows(logits: Tensor, largest: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """Draw a token for each of `rows` of `logits` (R, V), whose largest values are given (R,)."""
    rows_at = _on(logits, rows)
    shifted = logits[rows_at] - largest[rows_at, None]
    vocabulary = shifted.shape[1]
    # 1e39 is infinite in float32, and -inf / inf would be NaN. The largest weight is 1, so nothing overflows.
    temperature = _on(shifted, batch.temperature[rows].clip(max=np.finfo(np.float32).max))
    weights = (shifted / temperature[:, None]).double().exp_()
    min_p, top_k, top_p = batch.min_p[rows], batch.top_k[rows], batch.top_p[rows]
    if (min_p > 0).any():  # relative to the likeliest token, whose weight is 1
        _drop_below(weights, slice(None), _on(shifted, min_p.clip(max=1.0)).double())
    some = np.flatnonzero((top_k > 0) & (top_k < vocabulary))
    if len(some):
        _drop_below(weights, _on(shifted, some), _top_k_cut(weights[_on(shifted, some)], top_k[some]))
    some = np.flatnonzero(top_p < 1)
    if len(some):
        _drop_below(weights, _on(shifted, some), _top_p_cut(weights[_on(shifted, some)], top_p[some]))
    return torch.cat([_race(part, batch, part_rows) for part, part_rows in _parts(weights, rows)])


def _parts(weights: Tensor, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    for begin in range(0, len(rows), _RACE_ROWS):
        yield weights[begin : begin + _RACE_ROWS], rows[begin : begin + _RACE_ROWS]


def _race(weights: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """The winner of each row: a token arrives after -log(u) / weight, so it is first as often as its weight says."""
    return (weights / -uniform(batch.seeds[rows], batch.output_index[rows], weights).log()).argmax(dim=-1)


def _drop_below(weights: Tensor, rows: Tensor | slice, cut: Tensor) -> None:
    """Set to zero, in place, what weighs less than its row's cut."""
    part = weights[rows]
    weights[rows] = part.masked_fill(part < cut[:, None], 0.0)


def _top_k_cut(weights: Tensor, top_k: NDArray[np.int32]) -> Tensor:
    """The k-th largest weight of each row."""
    largest = weights.topk(int(top_k.max()), dim=-1).values
    return largest.gather(1, _on(weights, top_k.astype(np.int64))[:, None] - 1).squeeze(1)


def _top_p_cut(weights: Tensor, top_p: NDArray[np.float32]) -> Tensor:
    """The least weight in each row's nucleus, the fewest tokens that sum to top_p (arXiv:1904.09751)."""
    # The last of a cumulative sum and not sum(): the latter adds a lone row in another order than one of many.
    goal = _on(weights, top_p).double() * weights.cumsum(dim=-1)[:, -1]
    cut, reached = _nucleus_end(weights.topk(min(_NUCLEUS, weights.shape[1]), dim=-1).values, goal)
    wide = torch.nonzero(~reached).flatten()
    if len(wide):
        cut[wide], _ = _nucleus_end(weights[wide].sort(dim=-1, descending=True).values, goal[wide])
    return cut


def _nucleus_end(descending: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The weight at which the running sum of each row reaches `goal`, and whether it does so within `descending`."""
    cumulative = descending.cumsum(dim=-1)
    inside = (cumulative < goal[:, None]).sum(dim=-1, keepdim=True)  # the next one completes the nucleus
    end = inside.clamp(max=descending.shape[1] - 1)
    return descending.gather(1, end).squeeze(1), (inside < descending.shape[1]).squeeze(1)


def _report(logprobs: Tensor, chosen: Tensor, counts: NDArray[np.int32]) -> list[TokenLogprobs]:
    """`TokenLogprobs` of the rows that ask: logprobs (a, V), the tokens that stand there (a,), alternatives (a,)."""
    drawn = logprobs.gather(1, chosen[:, None])
    ranks = ((logprobs > drawn).sum(dim=-1) + 1).tolist()
    top = logprobs.topk(min(int(counts.max()), logprobs.shape[1]), dim=-1)
    token_ids = torch.cat((chosen[:, None], top.indices), dim=1).tolist()
    values = torch.cat((drawn, top.values), dim=1).tolist()
    return [
        TokenLogprobs(tuple(tokens[: count + 1]), tuple(numbers[: count + 1]), rank)
        for tokens, numbers, count, rank in zip(token_ids, values, counts.tolist(), ranks, strict=True)
    ]
