"""One session being played: what the environment shows, what the policy writes, and when it is over."""

import hashlib
import json

from crest_train.chat import Chat
from crest_train.engines.protocol import Answer
from crest_train.environments.protocol import Environment
from crest_train.environments.protocol_checks import checked_gold, checked_opening, checked_step
from crest_train.sampling import Sampling
from crest_train.sessions import Action, Session


class Row:
    """A session being played: the tokens that are to be read next (`pending`), and the action being written."""

    def __init__(self, chat: Chat, environment: Environment, seed: int, sampling: Sampling, context: int):
        self.chat, self.environment, self.sampling = chat, environment, sampling
        request = checked_opening(environment, seed)
        prompt, opening = chat.open(environment.system, request)
        self.room = context - len(prompt)
        self.session = Session(seed, environment.system, prompt, environment.num_turns, [], [], [], [], [], cut=False)
        self.pending: list[int] = []
        self.over = False
        self._ask(request)
        self._force(opening)
        self._begin_action()

    @property
    def limit(self) -> int:
        """How many tokens the action may still get."""
        written, most = len(self.action.tokens), self.sampling.max_action_tokens
        return min(most, self.room - self.taken) - written

    def take(self) -> list[int]:
        """The tokens behind what was taken and answered before; they are pending no more."""
        pending, self.pending = self.pending, []
        return pending

    def hear(self, answer: Answer) -> None:
        """Take what the policy wrote; play the action when it ends."""
        for written in zip(answer.tokens, answer.logp, answer.entropy, answer.sampler_logp, strict=True):
            self._write(*written)

    def write_all(self, tokens: list[int]) -> None:
        """Take an action that is known in advance, as far as the context reaches."""
        for token in tokens:
            if not self.over:
                self.pending.append(token)
                self._write(token, 0.0, 0.0, 0.0)

    def _write(self, token: int, logp: float, entropy: float, sampler_logp: float) -> None:
        action = self.action
        action.tokens.append(token)
        action.logp.append(logp)
        action.entropy.append(entropy)
        action.sampler_logp.append(sampler_logp)
        ended = token == self.chat.end_token
        if ended or len(action.tokens) == self.sampling.max_action_tokens:
            self._play_action(action, ended)
        elif self.taken + len(action.tokens) >= self.room:
            action.cut = True
            self._cut()

    def gold(self) -> str:
        """The ground truth of the turn under way."""
        return checked_gold(self.environment, self.session.seed, len(self.session.turn_reward))

    def _begin_action(self) -> None:
        session = self.session
        self.action = Action(len(session.turn_reward), len(session.ids))
        self.action.state_key = self._digest_of_texts()
        self.taken = len(session.ids)
        if self.taken >= self.room:
            self._cut()
        else:
            session.actions.append(self.action)

    def _play_action(self, action: Action, ended: bool) -> None:
        session, end = self.session, self.chat.end_token
        action.text = self.chat.decode(action.tokens[:-1] if ended else action.tokens)
        action.cut = not ended
        step = checked_step(self.environment, session.seed, action.text, action.turn, session.num_turns)
        action.observation, action.info = step.observation, step.info
        action.state_key = step.info.get("state_key", action.state_key)
        session.ids += action.tokens
        if step.turn_reward is not None:
            session.turn_reward.append(float(step.turn_reward))
        if step.done:
            self.over = True
            return
        closing = [] if ended else [end]
        if step.request is not None:
            self._ask(step.request)
        self._force(closing + self.chat.reply(step.observation, step.request))
        self._begin_action()

    def _digest_of_texts(self) -> int:
        turn = self.action.turn
        shown = [action.observation for action in self.session.actions if action.turn == turn]
        texts = json.dumps([turn, self.session.requests[turn], *shown])
        return int.from_bytes(hashlib.blake2b(texts.encode(), digest_size=8).digest(), "little") >> 1

    def _force(self, ids: list[int]) -> None:
        self.pending += ids
        self.session.ids += ids

    def _ask(self, request: str) -> None:
        self.session.requests.append(request)
        if self.sampling.gold:
            self.session.gold.append(self.gold())

    def _cut(self) -> None:
        """The context is full: the turn under way fails, finished turns stay, nothing stays behind the last action."""
        session = self.session
        self.over = session.cut = True
        last = session.actions[-1] if session.actions else Action(0, 0)
        session.ids[last.start :] = last.tokens
        if any(action.turn == len(session.turn_reward) for action in session.actions):
            session.turn_reward.append(0.0)
