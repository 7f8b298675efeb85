"""Random batches with every signal that a method may ask for.

Shape letters: N token positions, S actions, K turns, B trajectories.
"""

import torch
from hypothesis import strategies as st

from crest_ops.signals import Signals
from crest_ops.spans import Spans


@st.composite
def ragged_spans(draw, *, empty: bool = True, shortest_reply: int = 1):
    """Spans of up to five ragged trajectories of one or two groups, groups of one, empty and one-token actions too."""
    groups = sorted(draw(st.lists(st.integers(0, 1), min_size=1, max_size=5)))
    groups = [g - groups[0] for g in groups]
    lengths, written, turns, trajectories = [], [], [], []
    for i in range(len(groups)):
        for k in sorted(draw(st.sets(st.integers(0, 3), max_size=3))):
            for _ in range(draw(st.integers(1, 2))):
                lengths += [draw(st.integers(shortest_reply, 3)), draw(st.integers(0 if empty else 1, 4))]
                written += [False, True]
                turns += [k, k]
                trajectories += [i, i]
    return Spans.from_lengths(
        torch.tensor(lengths, dtype=torch.int64),
        action=torch.tensor(written, dtype=torch.bool),
        turn=torch.tensor(turns, dtype=torch.int64),
        trajectory=torch.tensor(trajectories, dtype=torch.int64),
        group=torch.tensor(groups),
    )


@st.composite
def batches(draw, *, empty: bool = True, dtype=torch.float64):
    """Ragged spans and every signal of them."""
    spans = draw(ragged_spans(empty=empty))
    return spans, random_signals(spans, draw(st.integers(0, 2**31)), dtype)


def random_signals(spans: Spans, seed: int, dtype=torch.float64) -> Signals:
    """Every signal, at random; per-token ones are NaN where the policy did not write."""
    g = torch.Generator().manual_seed(seed)
    N, S, K, B = spans.num_tokens, spans.num_actions, spans.num_turns, spans.num_trajectories

    def normal(n):
        return torch.randn(n, generator=g, dtype=torch.float64).to(dtype)

    def whole(low, high, n):
        return torch.randint(low, high, (n,), generator=g)

    def token(values):
        return torch.where(spans.mask, values, torch.nan)

    first_S = torch.ones(S, dtype=torch.bool)
    first_S[1:] = spans.trajectory_of_action[1:] != spans.trajectory_of_action[:-1]
    linked_S = ~first_S & (torch.rand(S, generator=g) < 0.4)
    return Signals(
        reward_B=whole(0, 3, B).to(dtype) / 2,
        turn_reward_K=whole(0, 3, K).to(dtype) / 2,
        action_reward_S=whole(-1, 2, S).to(dtype),
        value_S=normal(S),
        teacher_gap_N=token(normal(N)),
        skill_gap_N=token(normal(N)),
        surprisal_N=token(normal(N).abs()),
        entropy_N=token(normal(N).abs()),
        gold_logp=-(2 * normal(S + B)).exp(),
        feedback_S=whole(-1, 2, S),
        role_S=whole(0, 4, S),
        clue_score_S=whole(0, 6, S).to(dtype) * 0.4,
        error_S=linked_S | (torch.rand(S, generator=g) < 0.3),
        cause_S=torch.where(linked_S, torch.arange(S) - 1, -1),
        state_key_S=whole(-3, 3, S),
        action_mask_S=torch.rand(S, generator=g) < 0.7,
    )
