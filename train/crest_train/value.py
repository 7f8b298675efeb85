"""The value of the state before an action, as FACTOR wants it: what the policy still earns from there, on average.

Any value keeps FACTOR's credit in sum (see crest_ops.methods.factor); a good one puts it where the session was decided.

S = actions of all sessions, B = sessions, T = token positions, H = hidden size, P = states that are played on from.
"""

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from crest_ops import Spans
from crest_ops.advantages import leave_one_out_advantage
from crest_ops.returns import discounted_return
from crest_ops.segments import segment_sum
from crest_train.chat import Chat
from crest_train.config import Config, ValueSection
from crest_train.continuations import Place, choose_places, continued_reward, generator_of_sessions
from crest_train.credit import action_reward
from crest_train.model import policy_hidden
from crest_train.packing import passes
from crest_train.ranks import share, total
from crest_train.sessions import Rollout


class StateValue:
    """V(x_t) of a rollout's states, from what config.value names.

    "head": a network on the policy's hidden states (ValueHead), whose targets are the rollouts' own returns, or, with
    checkpoints, the returns of continuations at those. "continuations": the returns of continuations at the
    checkpoints, and between them what spreads the credit evenly. FACTOR, arXiv 2608.07118, learns a head from
    checkpoints (2 of them, 4 continuations); the rest is this project's choice.

    All that is drawn depends on config.run.seed and on the sessions' seeds alone.
    """

    def __init__(self, model: PreTrainedModel, chat: Chat, config: Config):
        section = config.value
        self.model, self.chat, self.config = model, chat, config
        self.head = None
        if section.source == "head":
            width = model.get_output_embeddings().weight.shape[1]
            self.head = ValueHead(width + 1, section, config.run.seed, model.device)
        self._last: tuple[Rollout, Tensor] | None = None

    def estimate(self, batch: Rollout, spans: Spans) -> Tensor:
        """Value [S] float32 of the state before each action. Learns nothing: a head knows earlier rollouts alone."""
        if self.head is not None:
            return self.head.estimate(self._states(batch, spans)).cpu()
        places, reward_P = self._continue(batch)
        return even_value(places, reward_P, self._reward(batch), spans)

    def learn(self, batch: Rollout, spans: Spans) -> dict[str, float]:
        """Fit the head to the rollout and those before it; returns metrics. To be called before the policy's update.

        value_loss: mean squared error of the averaged head on the new targets, before it learns from them.
        """
        if self.head is None or not spans.num_actions:
            return {}
        states_SH, reward_S = self._states(batch, spans), self._reward(batch)
        target, chosen = discounted_return(reward_S, spans, 1.0), torch.arange(spans.num_actions)
        if self.config.value.checkpoints:
            places, reward_P = self._continue(batch)
            chosen = _action_of(places, spans)
            target = reward_P - earned_before(reward_S, spans)[chosen]
        if not len(chosen):
            return {}
        return {"value_loss": self.head.learn(states_SH[chosen.to(states_SH.device)], target)}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that learning goes on from, as named tensors; empty where nothing is learned."""
        return {} if self.head is None else self.head.state_dict()

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        if self.head is not None:
            self.head.load_state_dict(tensors)

    def _reward(self, batch: Rollout) -> Tensor:
        return action_reward(batch, self.config.method.session_reward)

    def _continue(self, batch: Rollout) -> tuple[list[Place], Tensor]:
        seed = self.config.run.seed
        drawing = generator_of_sessions(seed, batch, "places", torch.device("cpu"))
        places = choose_places(batch, self.config.value.checkpoints, drawing)
        generator = generator_of_sessions(seed, batch, "continuations", self.model.device)
        return places, continued_reward(self.model, self.chat, batch, places, self.config, generator)

    def _states(self, batch: Rollout, spans: Spans) -> Tensor:
        """The hidden states of the rollout, made once for estimate and learn."""
        if self._last is None or self._last[0] is not batch:
            tokens = self.config.training.tokens_per_micro_batch
            states_SH = boundary_states(self.model, batch, spans, tokens_per_micro_batch=tokens)
            self._last = batch, with_place(states_SH, batch)
        return self._last[1]


class ValueHead:
    """A network with one hidden layer (GELU) on what is known of a state, and its running average, which estimates.

    theta' <- theta' + (1 - p) / (1 - p^n) * (theta - theta')  after the n-th step: the mean of theta_1 .. theta_n with
    weights p^(n-i). FACTOR, arXiv 2608.07118: squared error, Polyak p = .995, a replay of 10 steps, width 1024 (of its
    authors' code). This project's choices: the mean's normalisation, so that early steps count in full; Adam; full
    batches; 0 before the first step.
    """

    steps_per_rollout = 30

    def __init__(self, width: int, section: ValueSection, seed: int, device: torch.device):
        self.section, self.num_steps = section, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = nn.Linear(width, section.hidden), nn.GELU(), nn.Linear(section.hidden, 1)
        for weight in layers[2].parameters():
            nn.init.zeros_(weight)
        self.network = nn.Sequential(*layers).to(device)
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=section.rate)
        self.replay: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def estimate(self, states_SH: Tensor) -> Tensor:
        """Value [S] float32 of states [S,H] by the averaged network."""
        return self.average(states_SH).squeeze(-1)

    def learn(self, states_SH: Tensor, target_S: Tensor) -> float:
        """Take steps on these and the replay; returns the mean squared error on the targets [S] before."""
        target_S = target_S.to(states_SH.device, torch.float32)
        before = F.mse_loss(self.estimate(states_SH), target_S)
        self.replay = [*self.replay, (states_SH.detach(), target_S)][-self.section.replay :]
        states_NH, target_N = (torch.cat(part) for part in zip(*self.replay, strict=True))
        for _ in range(self.steps_per_rollout):
            self.optimizer.zero_grad()
            F.mse_loss(self.network(states_NH).squeeze(-1), target_N).backward()
            self.optimizer.step()
            self._follow()
        return float(before)

    @torch.no_grad()
    def _follow(self) -> None:
        self.num_steps += 1
        share = (1 - self.section.polyak) / (1 - self.section.polyak**self.num_steps)
        for average, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
            average.lerp_(weight, share)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, their average, the optimizer's state, the replay and the number of steps."""
        tensors = {"num_steps": torch.tensor(self.num_steps)}
        for name, network in (("network", self.network), ("average", self.average)):
            tensors |= {f"{name}.{key}": value.detach().clone() for key, value in network.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value.clone() for key, value in values.items()}
        for age, (states, target) in enumerate(self.replay):
            tensors |= {f"replay.{age}.states": states.clone(), f"replay.{age}.target": target.clone()}
        return tensors

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        device = self.network[0].weight.device
        optimizer: dict[int, dict[str, Tensor]] = {}
        replay: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, key = name.partition(".")
            index, _, field = key.partition(".")
            if kind == "optimizer":
                optimizer.setdefault(int(index), {})[field] = tensor.clone()
            elif kind == "replay":
                replay.setdefault(int(index), {})[field] = tensor.to(device, copy=True)
        for name, network in (("network", self.network), ("average", self.average)):
            mine = f"{name}."
            network.load_state_dict({k.removeprefix(mine): v for k, v in tensors.items() if k.startswith(mine)})
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": optimizer})
        self.replay = [(replay[age]["states"], replay[age]["target"]) for age in sorted(replay)]
        self.num_steps = int(tensors["num_steps"])


@torch.no_grad()
def boundary_states(model: PreTrainedModel, batch: Rollout, spans: Spans, *, tokens_per_micro_batch: int) -> Tensor:
    """Hidden states [S,H] float32 of the policy where it begins each action; 0 for an action without a token."""
    action_BT = spans.action_of_token.view_as(batch.policy).long()
    first_BT = batch.policy & (action_BT != action_BT.roll(1, 1))
    states_SH = torch.zeros(spans.num_actions, model.get_output_embeddings().weight.shape[1], device=model.device)
    rows = share(batch.policy.any(1).nonzero().flatten().tolist())
    for part, cache in passes(model, batch, rows, tokens_per_micro_batch):
        length = int(batch.lengths[part].max())
        ids_BT, first = (tensor[part, :length] for tensor in (batch.ids, first_BT))
        hidden_RH = policy_hidden(model, ids_BT.to(model.device), first.to(model.device), cache)
        states_SH[action_BT[part, :length][first].to(model.device)] = hidden_RH.float()
    return total(states_SH)


def with_place(states_SH: Tensor, batch: Rollout) -> Tensor:
    """What the head is given of each state [S,H+1]: the hidden state at mean 0 and variance 1, and the place in time.

    The place is the share of the session's turns that are over, scaled to [-2, 2] (this project's addition: a hidden
    state says little of how much is still to come).
    """
    over = [action.turn / session.num_turns for session in batch.sessions for action in session.actions]
    place_S1 = 4 * torch.tensor(over, device=states_SH.device)[:, None] - 2
    return torch.cat([F.layer_norm(states_SH, states_SH.shape[-1:]), place_S1], 1)


def earned_before(reward_S: Tensor, spans: Spans) -> Tensor:
    """Reward [S] of the actions before each one of its session."""
    total_B = segment_sum(reward_S, spans.trajectory_of_action, spans.num_trajectories)
    return total_B[spans.trajectory_of_action] - discounted_return(reward_S, spans, 1.0)


def even_value(places: list[Place], reward_P: Tensor, reward_S: Tensor, spans: Spans) -> Tensor:
    """Value [S] that is known at the places and spreads the credit evenly between them.

    V_t = Q_t - sum over u < t of r_u, Q linear in t through (0, b_i), (t_p, reward_p) for each place, (T_i, R_i): then
    FACTOR's credit r_t + V_{t+1} - V_t = Q_{t+1} - Q_t is the same for all actions between two neighbouring places,
    and A_i / T_i throughout where a session has none. b_i: mean reward of the other rollouts of the group. This
    project's choice; any value keeps the sum.

    reward_P [P]: mean reward of whole sessions played on from the places. reward_S [S]: of the actions as played.
    """
    total_B = segment_sum(reward_S, spans.trajectory_of_action, spans.num_trajectories)
    baseline_B = total_B - leave_one_out_advantage(total_B, spans)
    size_B = torch.bincount(spans.trajectory_of_action, minlength=spans.num_trajectories).tolist()
    ends = zip(baseline_B.tolist(), size_B, total_B.tolist(), strict=True)
    points = [[(0, first), (size, last)] for first, size, last in ends]
    for (row, t), reward in zip(places, reward_P.tolist(), strict=True):
        points[row].insert(-1, (t, reward))
    expected = []
    for own in points:
        for (t, here), (after, there) in pairwise(own):
            expected += [here + (there - here) * step / (after - t) for step in range(after - t)]
    return torch.tensor(expected, dtype=torch.float32) - earned_before(reward_S, spans)


def _action_of(places: list[Place], spans: Spans) -> Tensor:
    """Index [P] among all actions of the one that each place stands before."""
    size_B = torch.bincount(spans.trajectory_of_action, minlength=spans.num_trajectories)
    first_B = size_B.cumsum(0) - size_B
    return torch.tensor([int(first_B[row]) + t for row, t in places], dtype=torch.int64)
