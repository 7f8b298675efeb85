"""Sum, mean, centre, z-score, softmax, discounted scan and difference inside spans; one definition for every device.

Every function takes values [N], the segment id of each value [N] (int, -1 = outside every segment) and the number of
segments K, a Python int. Ids need not be sorted: a segment's members are read in the order of their positions, and what
lies between them is stepped over. An outside value is never used, in value or gradient, whatever it holds (NaN, inf);
a NaN inside stays in its segment. Arithmetic and results are float32 (float64 for float64 values); sums are accumulated
in float64, so that a span of 100,000 tokens has the sum of its values. Two runs agree bitwise on every device.

process_group: segments cross the ranks of the group (context parallel; this project's own). Each rank passes the values
and ids of its own tokens, any number of them, none included; ids and num_segments are those of the whole batch; what
rank r holds of a segment comes before what rank r + 1 holds. Each rank gets the result of one process that holds the
values in rank order: all of [K], its own part of [N]. One value and one id per token are gathered, and every rank works
on all of them. All ranks call, and go backward if one does: the gradient is that of the sum of the ranks' losses. A
loss that all ranks compute alike from [K] counts once for each. What one rank refuses raises ValueError on all.

Shape letters: N values, K segments.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import checks_values
from .context import gather_tokens, own_tokens, token_counts
from .shards import agreed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def segment_sum(
    values: Tensor, ids: Tensor, num_segments: int, *, process_group: "ProcessGroup | None" = None
) -> Tensor:
    """Sum of each segment: y_k = sum of x_n over ids_n = k; an empty segment has sum 0.

    values [N] real, ids [N] int in [-1, K), num_segments = K. Returns [K]. Differentiable in values.
    """
    values_N, ids_N, _ = _checked(values, ids, num_segments, process_group)
    return _sum(values_N, ids_N, num_segments)


def segment_mean(
    values: Tensor, ids: Tensor, num_segments: int, *, process_group: "ProcessGroup | None" = None
) -> Tensor:
    """Mean of each segment: y_k = (1/n_k) * sum of x_n over ids_n = k; an empty segment has mean 0.

    values [N] real, ids [N] int in [-1, K), num_segments = K. Returns [K]. Differentiable in values.
    """
    values_N, ids_N, _ = _checked(values, ids, num_segments, process_group)
    return _sum(values_N, ids_N, num_segments) / _size(ids_N, num_segments).clamp(min=1)


def segment_expand(values: Tensor, ids: Tensor, fill: float = 0.0) -> Tensor:
    """Value of each position's segment: y_n = x_k with k = ids_n, and `fill` outside.

    values [K] any dtype, ids [N] int in [-1, K). Returns [N] in the dtype of values. Differentiable in values.
    """
    _check_ids(ids, values.shape[0] if isinstance(values, Tensor) else None)
    return _expand(values, ids, fill)


def segment_center(
    values: Tensor, ids: Tensor, num_segments: int, *, process_group: "ProcessGroup | None" = None
) -> Tensor:
    """Deviation from the segment's mean: y_n = x_n - mean_k(x); 0 outside, exactly 0 where all members are equal.

    values [N] real, ids [N] int in [-1, K), num_segments = K. Returns [N]. Differentiable in values.
    """
    values_N, ids_N, here = _checked(values, ids, num_segments, process_group)
    return _own(_center(values_N, ids_N, num_segments), here)


def segment_std(
    values: Tensor, ids: Tensor, num_segments: int, *, unbiased: bool, process_group: "ProcessGroup | None" = None
) -> Tensor:
    """Standard deviation of each segment: y_k = sqrt(sum (x_n - mean_k)^2 / (n_k - c)), c = 1 if unbiased else 0.

    0 for segments of fewer than two members and, exactly, for equal members (there the gradient is 0 as well).
    values [N] real, ids [N] int in [-1, K), num_segments = K. Returns [K]. Differentiable in values.
    """
    values_N, ids_N, _ = _checked(values, ids, num_segments, process_group)
    return _root_mean_square(_center(values_N, ids_N, num_segments), ids_N, num_segments, unbiased)


def segment_zscore(
    values: Tensor, ids: Tensor, num_segments: int, *, unbiased: bool, eps: float,
    process_group: "ProcessGroup | None" = None,
) -> Tensor:  # fmt: skip
    """Standard score inside the segment: y_n = (x_n - mean_k) / (std_k + eps); 0 outside.

    Exactly 0 where all members of the segment are equal (one member included), also with eps = 0.
    values [N] real, ids [N] int in [-1, K), num_segments = K; unbiased: sample (True) or population (False) std.
    Returns [N]. Differentiable in values. Raises ValueError: eps < 0.
    """
    with agreed(process_group):
        if not eps >= 0:
            raise ValueError(f"eps is {eps}, want eps >= 0")
    values_N, ids_N, here = _checked(values, ids, num_segments, process_group)
    centered_N = _center(values_N, ids_N, num_segments)
    scale_K = _root_mean_square(centered_N, ids_N, num_segments, unbiased) + eps
    return _own(centered_N / _expand(torch.where(scale_K == 0, 1, scale_K), ids_N, fill=1.0), here)


def segment_softmax(
    values: Tensor, ids: Tensor, num_segments: int, *, process_group: "ProcessGroup | None" = None
) -> Tensor:
    """Softmax inside the segment: y_n = exp(x_n) / sum of exp(x_m) over ids_m = ids_n; 0 outside.

    A member of -inf gets 0, also when all members are -inf. values [N] real, ids [N] int in [-1, K), num_segments = K.
    Returns [N]. Differentiable in values.
    """
    values_N, ids_N, here = _checked(values, ids, num_segments, process_group)
    max_K = _max(values_N, ids_N, num_segments)
    max_K = torch.where(max_K == -torch.inf, 0, max_K)
    weight_N = torch.where(ids_N < 0, 0, (values_N - _expand(max_K, ids_N)).exp())
    total_K = _sum(weight_N, ids_N, num_segments)
    return _own(weight_N / _expand(torch.where(total_K == 0, 1, total_K), ids_N, fill=1.0), here)


def segment_discounted_sum(
    values: Tensor, ids: Tensor, gamma: float, *, process_group: "ProcessGroup | None" = None
) -> Tensor:
    """Discounted sum from each member to its segment's end: y_n = x_n + gamma * y_next(n), y = 0 past the end.

    next(n) is the next member of the same segment; 0 outside. Distances double from step to step, so a segment of n
    members takes log2(n) additions and keeps float32's accuracy. values [N] real, ids [N] int (-1 outside), gamma in
    [0, 1]. Returns [N]. Differentiable in values. Raises ValueError: gamma outside [0, 1].
    """
    with agreed(process_group):
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma is {gamma}, want 0 <= gamma <= 1")
    values_N, ids_N, here = _checked(values, ids, None, process_group)
    sorted_ids_N, order_N = torch.sort(ids_N, stable=True)
    sums_N = values_N[order_N]
    distance, factor = 1, float(gamma)
    while distance < ids_N.shape[0]:
        same_n = sorted_ids_N[distance:] == sorted_ids_N[:-distance]
        ahead_n = torch.where(same_n, sums_N[distance:], 0)
        sums_N = torch.cat([sums_N[:-distance] + factor * ahead_n, sums_N[-distance:]])
        distance, factor = 2 * distance, factor * factor
    return _own(_unsorted(torch.where(sorted_ids_N < 0, 0, sums_N), order_N), here)


def segment_difference(
    values: Tensor, ids: Tensor, num_segments: int, *, first: Tensor | None = None, last: Tensor | None = None,
    process_group: "ProcessGroup | None" = None,
) -> Tensor:  # fmt: skip
    """Temporal difference with boundary: y_n = x_next(n) - x_n, so that a segment sums to last_k - first_k; 0 outside.

    first [K] replaces the value of a segment's first member (None: the value stands); last [K] is what follows a
    segment's last member (None: 0). values [N] real, ids [N] int in [-1, K), num_segments = K. Returns [N].
    Differentiable in values, first and last. Raises ValueError: first or last not [K].
    """
    with agreed(process_group):
        for name, bound in (("first", first), ("last", last)):
            if bound is not None and [*bound.shape] != [num_segments]:
                raise ValueError(f"{name} has shape {[*bound.shape]}, want [{num_segments}]")
    values_N, ids_N, here = _checked(values, ids, num_segments, process_group)
    sorted_ids_N, order_N = torch.sort(ids_N, stable=True)
    edge = torch.ones_like(sorted_ids_N[:1], dtype=torch.bool)
    change_n = sorted_ids_N[1:] != sorted_ids_N[:-1]
    here_N = values_N[order_N]
    if first is not None:
        here_N = torch.where(torch.cat([edge, change_n]), _expand(first.to(here_N.dtype), sorted_ids_N), here_N)
    last = values_N.new_zeros(num_segments) if last is None else last.to(here_N.dtype)
    after_N = torch.cat([here_N[1:], here_N[:1]])
    after_N = torch.where(torch.cat([change_n, edge]), _expand(last, sorted_ids_N), after_N)
    return _own(_unsorted(torch.where(sorted_ids_N < 0, 0, after_N - here_N), order_N), here)


def _checked(
    values: Tensor, ids: Tensor, num_segments: int | None, process_group
) -> tuple[Tensor, Tensor, slice | None]:
    """Values in the dtype of the arithmetic with zeros outside and ids as int64, those of all ranks of a group; where
    this rank's own lie among them, None where they are all.
    """
    counts_W = None
    with agreed(process_group):
        _check_values(values, ids, num_segments)
        values_N = torch.where(ids < 0, 0, values if values.dtype == torch.float64 else values.float())
        if process_group is not None and process_group.size() > 1:
            counts_W = token_counts(process_group, values_N, num_segments)
    if counts_W is None:
        return values_N, ids.long(), None
    values_N, ids_N = (gather_tokens(tensor, process_group, counts_W) for tensor in (values_N, ids.long()))
    return values_N, ids_N, own_tokens(process_group, counts_W)


def _own(result_N: Tensor, here: slice | None) -> Tensor:
    return result_N if here is None else result_N[here]


def _check_values(values: Tensor, ids: Tensor, num_segments: int | None) -> None:
    """Raises ValueError: values no real [N] tensor, ids no ids of them."""
    if not isinstance(values, Tensor) or values.dim() != 1 or values.is_complex():
        found = f"{[*values.shape]} {values.dtype}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"values is {found}, want a real tensor [N]")
    _check_ids(ids, num_segments)
    if values.shape != ids.shape:
        raise ValueError(f"values has shape {[*values.shape]} and ids {[*ids.shape]}, want both [N]")
    if values.device != ids.device:
        raise ValueError(f"values is on {values.device} and ids on {ids.device}, want one device")


def _check_ids(ids: Tensor, num_segments: int | None) -> None:
    """Raises ValueError: ids no [N] int tensor, num_segments no count, an id outside [-1, num_segments)."""
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        found = f"has dtype {ids.dtype}, shape {[*ids.shape]}" if isinstance(ids, Tensor) else "is no tensor"
        raise ValueError(f"ids {found}, want [N] int32 or int64")
    if num_segments is not None and (not isinstance(num_segments, int) or num_segments < 0):
        raise ValueError(f"num_segments is {num_segments!r}, want an int >= 0")
    if checks_values(ids):
        bad_N = (ids < -1) if num_segments is None else (ids < -1) | (ids >= num_segments)
        if bad_N.any():
            at = int(bad_N.nonzero()[0])
            raise ValueError(f"ids[{at}] is {int(ids[at])}, want -1 <= id < {num_segments}")


def _expand(values: Tensor, ids: Tensor, fill: float = 0.0) -> Tensor:
    padded = torch.cat([values, values.new_full((1,), fill)])
    return padded[ids.long()]


def _center(values_N: Tensor, ids_N: Tensor, num_segments: int) -> Tensor:
    # Measured from the segment's largest value: equal members are then exact zeros, and a large offset costs no digits.
    shifted_N = values_N - _expand(_max(values_N, ids_N, num_segments), ids_N)
    shifted_N = torch.where(ids_N < 0, 0, shifted_N)
    mean_K = _sum(shifted_N, ids_N, num_segments) / _size(ids_N, num_segments).clamp(min=1)
    return shifted_N - _expand(mean_K, ids_N)


def _size(ids_N: Tensor, num_segments: int) -> Tensor:
    """Members of each segment, [K] int64."""
    bucket_N = torch.where(ids_N < 0, num_segments, ids_N)
    return ids_N.new_zeros(num_segments + 1).index_add(0, bucket_N, torch.ones_like(ids_N))[:num_segments]


def _root_mean_square(centered_N: Tensor, ids_N: Tensor, num_segments: int, unbiased: bool) -> Tensor:
    count_K = (_size(ids_N, num_segments) - int(unbiased)).clamp(min=1)
    mean_square_K = _sum(centered_N.square(), ids_N, num_segments) / count_K
    zero_K = mean_square_K == 0
    return torch.where(zero_K, 0, torch.where(zero_K, 1, mean_square_K).sqrt())


def _max(values_N: Tensor, ids_N: Tensor, num_segments: int) -> Tensor:
    """Largest member of each segment, without gradient; -inf for an empty one."""
    bucket_N = torch.where(ids_N < 0, num_segments, ids_N)
    lowest = values_N.new_full((num_segments + 1,), -torch.inf)
    return lowest.scatter_reduce(0, bucket_N, values_N.detach(), "amax")[:num_segments]


def _sum(values_N: Tensor, ids_N: Tensor, num_segments: int) -> Tensor:
    if values_N.is_cuda:
        return _sum_without_atomics(values_N, ids_N, num_segments)
    bucket_N = torch.where(ids_N < 0, num_segments, ids_N)
    total = torch.zeros(num_segments + 1, dtype=torch.float64, device=values_N.device)
    return total.index_add(0, bucket_N, values_N.double())[:num_segments].to(values_N.dtype)


def _sum_without_atomics(values_N: Tensor, ids_N: Tensor, num_segments: int) -> Tensor:
    """segment_sum without atomics, for CUDA, where index_add adds in an order that changes from run to run."""
    bucket_N = torch.where(ids_N < 0, num_segments, ids_N)
    order_N = torch.argsort(bucket_N, stable=True)
    size = ids_N.new_zeros(num_segments + 1).index_add(0, bucket_N, torch.ones_like(ids_N))
    total = torch.segment_reduce(values_N.double()[order_N], "sum", lengths=size, unsafe=True)
    return total[:num_segments].to(values_N.dtype)


def _unsorted(sorted_N: Tensor, order_N: Tensor) -> Tensor:
    return torch.zeros_like(sorted_N).scatter(0, order_N, sorted_N)
