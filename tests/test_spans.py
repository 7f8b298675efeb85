"""Spans: constructors, derived maps, and what they refuse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crest_ops.spans import Spans


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def make(action_of_token, turn_of_action, trajectory_of_turn, group_of_trajectory, turn_index):
    return Spans(
        torch.tensor(action_of_token, dtype=torch.int32),
        ints(*turn_of_action),
        ints(*trajectory_of_turn),
        ints(*group_of_trajectory),
        ints(*turn_index),
    )


def test_from_mask_reads_rows_and_splits_actions_at_gaps_turns_and_rows():
    mask = bools([0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0])
    turn = ints([9, 0, 0, -1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 2, 2, 0])
    spans = Spans.from_mask(mask, group=ints(1, 0, 1), turn=turn)
    assert spans.action_of_token.tolist() == [-1, 0, 0, -1, 1, 2] + [-1] * 6 + [3, -1, -1, 4, 4, -1]
    assert spans.action_of_token.dtype == torch.int32
    assert spans.turn_of_action.tolist() == [0, 0, 1, 2, 3]
    assert spans.trajectory_of_turn.tolist() == [0, 0, 2, 2]
    assert spans.turn_index.tolist() == [0, 1, 0, 2]
    assert spans.group_of_trajectory.tolist() == [1, 0, 1]
    assert spans.mask.tolist() == mask.flatten().tolist()
    assert spans.turn_of_token.tolist() == [-1, 0, 0, -1, 0, 1] + [-1] * 6 + [2, -1, -1, 3, 3, -1]
    assert spans.trajectory_of_token.tolist() == [-1, 0, 0, -1, 0, 0] + [-1] * 6 + [2, -1, -1, 2, 2, -1]
    assert spans.trajectory_of_action.tolist() == [0, 0, 0, 2, 2]
    assert spans.group_of_turn.tolist() == [1, 1, 1, 1]
    assert spans.cohort_of_turn.tolist() == [0, 1, 0, 2]
    assert spans.action_length.tolist() == [2, 1, 1, 1, 2]
    assert spans.turn_length.tolist() == [3, 1, 1, 2]
    assert spans.trajectory_length.tolist() == [4, 0, 3]
    assert spans.group_size.tolist() == [1, 2, 0]
    sizes = (spans.num_tokens, spans.num_actions, spans.num_turns, spans.num_trajectories, spans.num_groups)
    assert sizes == (18, 5, 4, 3, 2)


def test_from_mask_without_turns_makes_one_turn_of_each_row():
    spans = Spans.from_mask(bools([1, 0, 1], [0, 1, 1]), group=ints(0, 0))
    assert spans.action_of_token.tolist() == [0, -1, 1, -1, 2, 2]
    assert spans.turn_of_action.tolist() == [0, 0, 1]
    assert spans.turn_index.tolist() == [0, 0]


def test_full_rows_do_not_run_into_each_other():
    spans = Spans.from_mask(bools([1, 1], [1, 1]), group=ints(0, 0))
    assert spans.action_of_token.tolist() == [0, 0, 1, 1]


def test_from_lengths_keeps_an_action_without_tokens():
    spans = Spans.from_lengths(
        ints(2, 3, 1, 0, 2, 2),
        action=bools(0, 1, 0, 1, 0, 1),
        turn=ints(-1, 0, 0, 1, -1, 0),
        trajectory=ints(0, 0, 0, 0, 1, 1),
        group=ints(0, 0),
    )
    assert spans.action_of_token.tolist() == [-1, -1, 0, 0, 0, -1, -1, -1, 2, 2]
    assert spans.turn_of_action.tolist() == [0, 1, 2]
    assert spans.turn_index.tolist() == [0, 1, 0]
    assert spans.trajectory_of_turn.tolist() == [0, 0, 1]
    assert spans.action_length.tolist() == [3, 0, 2]


def test_adjacent_action_segments_are_two_actions():
    two = ints(2, 1)
    spans = Spans.from_lengths(two, action=bools(1, 1), turn=ints(0, 0), trajectory=ints(0, 0), group=ints(0))
    assert spans.action_of_token.tolist() == [0, 0, 1]
    assert spans.turn_of_action.tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3)])
def test_nothing_written_gives_empty_spans(shape):
    spans = Spans.from_mask(torch.zeros(shape, dtype=torch.bool), group=torch.zeros(shape[0], dtype=torch.int64))
    assert (spans.num_actions, spans.num_turns, spans.num_trajectories) == (0, 0, shape[0])
    assert spans.cohort_of_turn.tolist() == []
    none = ints()
    empty = Spans.from_lengths(none, action=none.bool(), turn=none, trajectory=none, group=none)
    assert (empty.num_tokens, empty.num_groups) == (0, 0)


def test_cohorts_join_equal_places_of_a_group_whatever_the_order_of_groups():
    spans = make([], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 2, 2], [1, 0, 1], [0, 3, 0, 0, 1, 3])
    assert spans.cohort_of_turn.tolist() == [1, 3, 0, 1, 2, 3]


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=7), min_size=1, max_size=5), st.data())
def test_padded_and_packed_agree(rows, data):
    """A padded batch, and the same tokens as a packed stream of segments of one token or whole actions."""
    rows = [[(turn, wrote) for turn, (_, wrote) in zip(sorted(t for t, _ in row), row, strict=True)] for row in rows]
    width = max(len(row) for row in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    turn = torch.zeros(len(rows), width, dtype=torch.int64)
    segments = []
    for i, row in enumerate(rows):
        for j, (place, wrote) in enumerate(row):
            mask[i, j], turn[i, j] = wrote, place
            joins = segments and wrote and j and segments[-1][1:] == [True, place, i]
            if joins:
                segments[-1][0] += 1
            else:
                segments.append([1, wrote, place, i])
    group = torch.zeros(len(rows), dtype=torch.int64)
    padded = Spans.from_mask(mask, group=group, turn=turn)
    columns = list(zip(*segments, strict=True)) or [(), (), (), ()]
    packed = Spans.from_lengths(
        ints(*columns[0]), action=bools(*columns[1]), turn=ints(*columns[2]), trajectory=ints(*columns[3]), group=group
    )
    inside = torch.tensor([j < len(row) for row in rows for j in range(width)], dtype=torch.bool)
    assert torch.equal(padded.action_of_token[inside], packed.action_of_token)
    for name in ("turn_of_action", "trajectory_of_turn", "turn_index", "turn_length", "trajectory_length"):
        assert torch.equal(getattr(padded, name), getattr(packed, name)), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (([0, 1, 0], [0, 0], [0], [0], [0]), r"action_of_token\[2\] goes back"),
        (([0, -1, 0], [0], [0], [0], [0]), r"action_of_token\[2\] continues its action after a gap"),
        (([0, 2], [0, 0], [0], [0], [0]), r"action_of_token\[1\] is 2, no action"),
        (([-2, 0], [0], [0], [0], [0]), r"action_of_token\[0\] is -2"),
        (([0, 1, 2], [0, 1, 0], [0, 0], [0], [0, 1]), r"turn_of_action\[2\] puts its action into an earlier turn"),
        (([0, 1], [0, 2], [0, 0, 0], [0], [0, 1, 2]), r"turn_of_action skips turn 1.*size 0"),
        (([0], [-1], [0], [0], [0]), r"turn_of_action\[0\] is -1"),
        (([0, 1], [0, 1], [1, 0], [0, 0], [0, 0]), r"trajectory_of_turn\[1\] puts its turn into an earlier trajectory"),
        (([0], [0], [1], [0], [0]), r"trajectory_of_turn\[0\] is 1, no trajectory"),
        (([0, 1], [0, 1], [0, 0], [0], [1, 1]), r"turn_index\[1\] does not increase"),
        (([0], [0], [0], [0], [-1]), r"turn_index\[0\] is -1"),
        (([0], [0], [0], [0, 2, 2], [0]), r"group_of_trajectory skips group 1.*size 0"),
        (([0], [0], [0], [-1], [0]), r"group_of_trajectory\[0\] is -1"),
        (([0], [0], [0], [0], [0, 1]), r"turn_index has shape \[2\], want \[1\]"),
    ],
)
def test_invalid_structure_is_refused_naming_the_index(fields, message):
    with pytest.raises(ValueError, match=message):
        make(*fields)


def test_wrong_types_and_shapes_are_refused():
    good = dict(
        action_of_token=ints(0).int(),
        turn_of_action=ints(0),
        trajectory_of_turn=ints(0),
        group_of_trajectory=ints(0),
        turn_index=ints(0),
    )
    for name in good:
        for bad, found in ((torch.zeros(1), "float32"), (ints([0]), r"\[1, 1\]"), ([0], "list")):
            with pytest.raises(ValueError, match=f"{name} .*{found}"):
                Spans(**{**good, name: bad})


def test_constructors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"mask has shape \[2\]"):
        Spans.from_mask(bools(1, 0), group=ints(0))
    with pytest.raises(ValueError, match="mask .*int64"):
        Spans.from_mask(ints([1, 0]), group=ints(0))
    with pytest.raises(ValueError, match="group has shape .*length 1"):
        Spans.from_mask(bools([1, 0]), group=ints(0, 0))
    with pytest.raises(ValueError, match=r"turn has shape \[1, 3\]"):
        Spans.from_mask(bools([1, 0]), group=ints(0), turn=ints([0, 0, 0]))
    with pytest.raises(ValueError, match=r"turn\[1, 2\] is 0"):
        Spans.from_mask(bools([1, 0, 1], [1, 0, 1]), group=ints(0, 0), turn=ints([0, 0, 1], [1, 0, 0]))
    with pytest.raises(ValueError, match=r"turn\[0, 1\] is -1"):
        Spans.from_mask(bools([0, 1]), group=ints(0), turn=ints([0, -1]))
    packed = dict(
        lengths=ints(1, 1, 1), action=bools(1, 0, 1), turn=ints(0, 0, 0), trajectory=ints(0, 0, 0), group=ints(0)
    )

    def refuse(message, **changes):
        changed = {**packed, **changes}
        with pytest.raises(ValueError, match=message):
            Spans.from_lengths(changed.pop("lengths"), **changed)

    refuse(r"lengths\[1\] is -1", lengths=ints(1, -1, 1))
    refuse(r"trajectory\[2\] goes back", trajectory=ints(0, 1, 0), group=ints(0, 0))
    refuse(r"trajectory\[1\] is 1, no trajectory", trajectory=ints(0, 1, 1))
    refuse(r"turn\[2\] is negative or goes back", turn=ints(1, 5, 0))
    refuse("action has shape .*int64.*want .*bool", action=ints(1, 0, 1))
    refuse("turn has shape .*want one dimension of length 3", turn=ints(0, 0))


def test_to_keeps_the_structure():
    spans = make([0, -1, 1], [0, 1], [0, 0], [0], [0, 1])
    moved = spans.to("cpu")
    assert all(torch.equal(getattr(moved, name), getattr(spans, name)) for name in spans.__dataclass_fields__)
