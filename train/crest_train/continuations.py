"""Sessions played on from a point inside them: how a state's value is found without a model of it.

A session is a function of its seed and its actions, so a fresh environment that is told the first actions again stands
where the session stood, and the policy goes on from there.

B = sessions, M = continuations of one state, P = states.
"""

import hashlib

import torch
from transformers import PreTrainedModel

from crest_train.chat import Chat
from crest_train.config import Config
from crest_train.credit import session_reward
from crest_train.environments import make_environment
from crest_train.environments.protocol import Environment, Step
from crest_train.evaluate import sampling_of
from crest_train.rollouts import rollout
from crest_train.sessions import Rollout

Place = tuple[int, int]
"""A session's row and the number of actions before the state."""


def choose_places(batch: Rollout, per_session: int, generator: torch.Generator) -> list[Place]:
    """States to play on from, session by session: one drawn from each of `per_session` equal parts of its inside.

    Inside are the states before action t, 0 < t < T. FACTOR, arXiv 2608.07118 (its authors' code, per_session = 2: one
    from each half, the middle one alone where 1 < T < 4, none where T <= 1); this project's reading for other numbers.
    """
    places = []
    for row, session in enumerate(batch.sessions):
        T = len(session.actions)
        enough = 2 * per_session <= T
        parts = per_session if enough else min(1, T // 2)
        draws = torch.rand(parts, generator=generator, dtype=torch.float64).tolist() if enough else [0.5] * parts
        edges = [1 + part * (T - 1) // parts for part in range(parts + 1)] if parts else [T]
        for draw, first, end in zip(draws, edges[:-1], edges[1:], strict=True):
            places.append((row, first + int(draw * (end - first))))
    return places


def continued_reward(
    model: PreTrainedModel, chat: Chat, batch: Rollout, places: list[Place], config: Config, generator: torch.Generator
) -> torch.Tensor:
    """Mean reward [P] float32 of whole sessions that begin as the places say and that the policy plays on.

    Each is played on config.value.continuations times, for at most config.value.max_turns turns, the one under way
    counted; later turns count as failed, as turns that were not reached do.
    """
    copies = config.value.continuations
    longest_last = sorted(range(len(places)), key=lambda p: _length_before(batch, places[p]))
    environments, seeds, begun = [], [], []
    for row, t in (places[p] for p in longest_last for _ in range(copies)):
        session = batch.sessions[row]
        inner = make_environment(config.environment.name, config.environment.options)
        environments.append(_Limited(inner, session.actions[t].turn + config.value.max_turns))
        seeds.append(session.seed)
        begun.append([action.tokens for action in session.actions[:t]])
    if not places:
        return torch.zeros(0)
    sampling = sampling_of(config)
    played = rollout(model, chat, environments, seeds, generator=generator, sampling=sampling, begun=begun)
    mean_P = session_reward(played, config.method.session_reward).view(len(places), copies).mean(1)
    return torch.empty_like(mean_P).index_copy(0, torch.tensor(longest_last), mean_P)


def generator_of_sessions(seed: int, batch: Rollout, purpose: str, device: torch.device) -> torch.Generator:
    """A random generator that depends on the run's seed, on which sessions were played and on the purpose alone."""
    sessions = [session.seed for session in batch.sessions]
    digest = hashlib.blake2b(f"{seed} {sessions} {purpose}".encode(), digest_size=4).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def _length_before(batch: Rollout, place: Place) -> int:
    """Tokens before a state: rows of like length are played in one lockstep."""
    row, t = place
    return batch.sessions[row].actions[t].start


class _Limited:
    """An environment whose session ends with turn `turns` (counted from 1) at the latest."""

    def __init__(self, inner: Environment, turns: int):
        self.inner, self.turns, self.ended = inner, turns, 0

    @property
    def system(self) -> str:
        return self.inner.system

    @property
    def num_turns(self) -> int:
        return self.inner.num_turns

    def reset(self, seed: int) -> str:
        self.ended = 0
        return self.inner.reset(seed)

    def gold(self) -> str:
        return self.inner.gold()

    def step(self, action: str) -> Step:
        step = self.inner.step(action)
        self.ended += step.turn_reward is not None
        over = self.ended == self.turns and step.turn_reward is not None
        return Step(step.observation, step.turn_reward, None, step.info) if over else step
