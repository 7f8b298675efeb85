"""Which tokens form which action, turn, trajectory and group: the one structure that every credit function reads.

Shape letters: N token positions, S actions, K turns, B trajectories, G groups, T padded length, M segments of a stream.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import checks_values
from .shards import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Spans:
    """Token positions of a batch, nested as action < turn < trajectory < group.

    An action is one contiguous run of policy-written tokens; a turn is one user request and holds at least one action;
    a trajectory is one rollout of a session; a group is the rollouts that share a task. Ids count from 0 in reading
    order (group ids may come in any order). An action may hold no token (due but never written: so its turn exists and
    is judged); a trajectory may hold no turn (a fully masked row).

    action_of_token [N] int32: action that wrote the token, -1 where the policy did not write it.
    turn_of_action [S], trajectory_of_turn [K], group_of_trajectory [B], turn_index [K]: int64; turn_index is the place
        of the turn in its session, strictly increasing inside a trajectory: turns with equal group and turn_index are
        the ones that are compared.

    Raises ValueError naming the index: ids out of order, skipped or out of range, an action whose tokens are not one
    contiguous run, a turn without an action, a group without a trajectory, a wrong dtype, shape or device. On CUDA
    values are looked at under CREST_DEBUG=1 only.

    The derived maps are computed once, at construction, so that compiled code only reads them.
    """

    action_of_token: Tensor
    turn_of_action: Tensor
    trajectory_of_turn: Tensor
    group_of_trajectory: Tensor
    turn_index: Tensor

    process_group = None  # of a part: the ranks that hold the tokens

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            ids = _vector(name, getattr(self, name), (torch.int32, torch.int64))
            if ids.device != self.action_of_token.device:
                raise ValueError(
                    f"{name} is on {ids.device}, action_of_token on {self.action_of_token.device}: want one device"
                )
            object.__setattr__(self, name, ids.to(torch.int32 if name == "action_of_token" else torch.int64))
        if self.turn_index.shape != self.trajectory_of_turn.shape:
            raise ValueError(
                f"turn_index has shape {[*self.turn_index.shape]}, want {[*self.trajectory_of_turn.shape]} "
                "like trajectory_of_turn"
            )
        if checks_values(self.action_of_token):
            self._check_values()
        for name, member in vars(Spans).items():
            if isinstance(member, cached_property):
                object.__setattr__(self, name, member.func(self))  # past the lock that compiled code cannot enter

    def _check_values(self) -> None:
        S, K, B = self.num_actions, self.num_turns, self.num_trajectories
        _check_range("action_of_token", self.action_of_token, S, "action", lowest=-1)
        place_n = torch.nonzero(self.mask).flatten()
        step_n = _step(self.action_of_token[place_n])
        _check("action_of_token", step_n < 0, "goes back to an earlier action: want ids in order", place_n)
        apart_n = (step_n == 0) & (_step(place_n) > 1)
        _check("action_of_token", apart_n, "continues its action after a gap: want one contiguous run", place_n)
        for name, bound, outer, inner in (
            ("turn_of_action", K, "turn", "action"),
            ("trajectory_of_turn", B, "trajectory", "turn"),
        ):
            _check_range(name, getattr(self, name), bound, outer)
            _check(name, _step(getattr(self, name)) < 0, f"puts its {inner} into an earlier {outer}: want ids in order")
        _check_used("turn_of_action", self.turn_of_action, K, "turn", "action")
        _check_range("turn_index", self.turn_index, 1 << 31, "turn index")
        stuck_K = ~_changes(self.trajectory_of_turn) & (_step(self.turn_index) <= 0)
        _check("turn_index", stuck_K, "does not increase inside its trajectory")
        _check_range("group_of_trajectory", self.group_of_trajectory, B, "group")
        _check_used("group_of_trajectory", self.group_of_trajectory, self.num_groups, "group", "trajectory")

    @classmethod
    def from_mask(cls, mask: Tensor, *, group: Tensor, turn: Tensor | None = None) -> "Spans":
        """Spans of a padded batch read row by row, N = B * T; actions start at rising edges of the mask inside a turn.

        mask [B, T] bool: True where the policy wrote the token. group [B] int: 0..G-1, in any order.
        turn [B, T] int: place of the turn in its session, looked at where the mask is True, never decreasing along a
            row; None makes every trajectory one turn.
        A row without a True has no turn. Raises ValueError: shapes, dtypes, a turn that is negative or goes back
        (naming row and position), and whatever Spans itself refuses.
        """
        if not isinstance(mask, Tensor):
            raise ValueError(f"mask is {type(mask).__name__}, want a tensor [B, T] bool")
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"mask has shape {[*mask.shape]} and dtype {mask.dtype}, want [B, T] bool")
        B, T = mask.shape
        group = _vector("group", group, (torch.int32, torch.int64), B)
        if turn is None:
            turn = torch.zeros_like(mask, dtype=torch.int64)
        if not isinstance(turn, Tensor):
            raise ValueError(f"turn is {type(turn).__name__}, want a tensor {[B, T]}")
        if turn.shape != mask.shape or turn.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"turn has shape {[*turn.shape]} and dtype {turn.dtype}, want {[B, T]} int32 or int64 like mask"
            )
        place_N = torch.nonzero(mask.flatten()).flatten()
        row_n, turn_n = place_N // max(T, 1), turn.flatten()[place_N].long()
        new_row_n = _changes(row_n)
        if checks_values(mask):
            back_n = (turn_n < 0) | (~new_row_n & (_step(turn_n) < 0))
            if back_n.any():
                row, at = divmod(int(place_N[back_n][0]), T)
                found = int(turn[row, at])
                raise ValueError(f"turn[{row}, {at}] is {found}: want turns >= 0 that never decrease along a row")
        new_turn_n = new_row_n | _changes(turn_n)
        new_action_n = new_turn_n | (_step(place_N) > 1)
        action_of_token = torch.full((B * T,), -1, dtype=torch.int32, device=mask.device)
        action_of_token[place_N] = (new_action_n.cumsum(0) - 1).int()
        return cls(
            action_of_token, (new_turn_n.cumsum(0) - 1)[new_action_n], row_n[new_turn_n], group, turn_n[new_turn_n]
        )

    @classmethod
    def from_lengths(
        cls, lengths: Tensor, *, action: Tensor, turn: Tensor, trajectory: Tensor, group: Tensor
    ) -> "Spans":
        """Spans of a packed stream of M consecutive segments (prompt, action, observation, ...), N = sum of lengths.

        lengths [M] int >= 0: tokens of the segment. action [M] bool: the policy wrote it; every such segment is one
            action, also one of length 0. turn [M] int: place of the turn in its session, read where action is True.
        trajectory [M] int: 0..B-1, never decreasing. group [B] int: 0..G-1, in any order.
        Raises ValueError naming the segment: a negative length, a trajectory out of range or going back, a turn that is
        negative or goes back inside its trajectory; shapes and dtypes; and whatever Spans itself refuses.
        """
        integer = (torch.int32, torch.int64)
        lengths = _vector("lengths", lengths, integer)
        M = len(lengths)
        action = _vector("action", action, (torch.bool,), M)
        turn, trajectory = (
            _vector("turn", turn, integer, M).long(),
            _vector("trajectory", trajectory, integer, M).long(),
        )
        group = _vector("group", group, integer)
        if checks_values(lengths):
            _check_range("lengths", lengths, 1 << 31, "length")
            _check_range("trajectory", trajectory, len(group), "trajectory")
            _check("trajectory", _step(trajectory) < 0, "goes back to an earlier trajectory: want ids in order")
        segment_S = torch.nonzero(action).flatten()
        turn_S, trajectory_S = turn[segment_S], trajectory[segment_S]
        new_trajectory_S = _changes(trajectory_S)
        if checks_values(lengths):
            back_S = (turn_S < 0) | (~new_trajectory_S & (_step(turn_S) < 0))
            _check("turn", back_S, "is negative or goes back to an earlier turn of its trajectory", segment_S)
        new_turn_S = new_trajectory_S | _changes(turn_S)
        action_of_segment = torch.where(action, action.cumsum(0) - 1, -1).int()
        return cls(
            action_of_segment.repeat_interleave(lengths.long()),
            new_turn_S.cumsum(0) - 1,
            trajectory_S[new_turn_S],
            group,
            turn_S[new_turn_S],
        )

    def to(self, device: torch.device | str) -> "Spans":
        """The same spans on another device."""
        found = Spans(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))
        return found if self.process_group is None else found._with_the_wholes(self, self.process_group)

    def part(self, place: Tensor, process_group: "ProcessGroup") -> "Spans":
        """This rank's tokens of a batch whose tokens are split over ranks: a_n of the part = a_m, m = place_n.

        Context parallel, this project's own: every rank builds the spans of the whole batch and takes its part. Ids,
        lengths, turns, trajectories and groups stay those of the whole, so that reductions and losses of the parts add
        up to the whole's. Credit is assigned on the whole: methods refuse a part; take `credit.credit_N[place]`.

        place [n] int: positions of this rank's tokens in the whole, increasing; each token is on one rank, and of every
            action rank r holds what comes before rank r + 1's. process_group: of these ranks.
        Raises ValueError: shape or dtype of place, a position outside the batch or out of order, a part of a part.
        """
        check_group(process_group)
        if self.process_group is not None:
            raise ValueError("spans are a part already: take parts of the whole batch's spans")
        place = _vector("place", place, (torch.int32, torch.int64)).long()
        if checks_values(place):
            _check_range("place", place, self.num_tokens, "token of the batch")
            _check("place", ~_changes(place) | (_step(place) < 0), "goes back or repeats: want increasing positions")
        maps = [getattr(self, name) for name in self.__dataclass_fields__]
        return Spans(maps[0][place], *maps[1:])._with_the_wholes(self, process_group)

    def _with_the_wholes(self, whole: "Spans", process_group) -> "Spans":
        for name in ("action_length", "turn_length", "trajectory_length"):
            object.__setattr__(self, name, getattr(whole, name).to(self.action_of_token.device))
        object.__setattr__(self, "process_group", process_group)
        return self

    @property
    def num_tokens(self) -> int:
        """N, all token positions, policy-written or not."""
        return self.action_of_token.shape[0]

    @property
    def num_actions(self) -> int:
        """S, actions without a token included."""
        return self.turn_of_action.shape[0]

    @property
    def num_turns(self) -> int:
        """K, over all trajectories."""
        return self.trajectory_of_turn.shape[0]

    @property
    def num_trajectories(self) -> int:
        """B, trajectories without a turn included."""
        return self.group_of_trajectory.shape[0]

    @property
    def num_groups(self) -> int:
        """G; reads a value back from the device."""
        return int(self.group_of_trajectory.max()) + 1 if self.num_trajectories else 0

    @cached_property
    def mask(self) -> Tensor:
        """[N] bool: the policy wrote the token."""
        return self.action_of_token >= 0

    @cached_property
    def trajectory_of_action(self) -> Tensor:
        """[S] int64."""
        return self.trajectory_of_turn[self.turn_of_action]

    @cached_property
    def group_of_turn(self) -> Tensor:
        """[K] int64."""
        return self.group_of_trajectory[self.trajectory_of_turn]

    @cached_property
    def turn_of_token(self) -> Tensor:
        """[N] int32, -1 where the policy did not write the token."""
        return _compose(self.turn_of_action, self.action_of_token)

    @cached_property
    def trajectory_of_token(self) -> Tensor:
        """[N] int32, -1 where the policy did not write the token."""
        return _compose(self.trajectory_of_action, self.action_of_token)

    @cached_property
    def cohort_of_turn(self) -> Tensor:
        """[K] int64, in [0, K): turns with equal group and turn_index, the ones to compare, share a cohort."""
        key_K, order_K = torch.sort((self.group_of_turn << 31) + self.turn_index)
        rank_K = _changes(key_K).cumsum(0) - 1
        return torch.empty_like(rank_K).scatter(0, order_K, rank_K)

    @cached_property
    def group_size(self) -> Tensor:
        """[B] int64: trajectories of each group; 0 past the last group."""
        return _count(self.group_of_trajectory, self.num_trajectories)

    @cached_property
    def action_length(self) -> Tensor:
        """[S] int64: policy tokens of the action."""
        return _count(self.action_of_token, self.num_actions)

    @cached_property
    def turn_length(self) -> Tensor:
        """[K] int64: policy tokens of the turn."""
        return _count(self.turn_of_token, self.num_turns)

    @cached_property
    def trajectory_length(self) -> Tensor:
        """[B] int64: policy tokens of the trajectory."""
        return _count(self.trajectory_of_token, self.num_trajectories)


def check_length(name: str, values: Tensor, length: int, letters: str) -> None:
    """Raises ValueError naming the argument: no real tensor, or another length than its letters have in the spans."""
    if not isinstance(values, Tensor) or values.is_complex():
        found = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} is {found}, want a real tensor {letters} = [{length}]")
    if [*values.shape] != [length]:
        raise ValueError(f"{name} has shape {[*values.shape]}, want {letters} = [{length}]")


def check_whole(spans: Spans) -> None:
    """Raises ValueError for a part of spans, where tokens of other ranks would be missed."""
    if spans.process_group is not None:
        raise ValueError("spans are a part of a batch, want the whole batch's (and take [place] of the result)")


def _vector(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], length: int | None = None) -> Tensor:
    wanted = "any length" if length is None else f"length {length}"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}, want a tensor of one dimension and {wanted}")
    if tensor.dim() != 1 or tensor.dtype not in dtypes or (length is not None and len(tensor) != length):
        raise ValueError(
            f"{name} has shape {[*tensor.shape]} and dtype {tensor.dtype}, want one dimension of {wanted} and "
            f"dtype {' or '.join(str(dtype) for dtype in dtypes)}"
        )
    return tensor


def _check(name: str, bad: Tensor, problem: str, place: Tensor | None = None) -> None:
    if bad.any():
        at = torch.nonzero(bad).flatten()[0]
        raise ValueError(f"{name}[{int(at if place is None else place[at])}] {problem}")


def _check_range(name: str, ids: Tensor, bound: int, what: str, lowest: int = 0) -> None:
    bad = (ids < lowest) | (ids >= bound)
    if bad.any():
        at = int(torch.nonzero(bad)[0])
        raise ValueError(f"{name}[{at}] is {int(ids[at])}, no {what}: want {lowest} <= id < {bound}")


def _check_used(name: str, ids: Tensor, bound: int, outer: str, inner: str) -> None:
    unused = torch.nonzero(_count(ids, bound) == 0).flatten()
    if len(unused):
        raise ValueError(
            f"{name} skips {outer} {int(unused[0])}: every {outer} must hold at least one {inner} (size 0 found)"
        )


def _step(ids: Tensor) -> Tensor:
    """ids[i] - ids[i - 1], 0 at the first."""
    return ids.diff(prepend=ids[:1])


def _changes(ids: Tensor) -> Tensor:
    """True where the id differs from the one before it, and at the first."""
    return ids.diff(prepend=ids[:1] - 1) != 0


def _compose(outer_of_inner: Tensor, inner_of_token: Tensor) -> Tensor:
    padded = torch.cat([outer_of_inner, outer_of_inner.new_full((1,), -1)])
    return padded[inner_of_token.long()].int()


def _count(ids: Tensor, num: int) -> Tensor:
    """Members of each id in [0, num); ids of -1 count nowhere."""
    buckets = torch.zeros(num + 1, dtype=torch.int64, device=ids.device)
    return buckets.index_add(0, torch.where(ids < 0, num, ids), torch.ones_like(ids, dtype=torch.int64))[:num]
