"""An environment of your own: environment.name = "own_environment:Sums", for a run that is started in this folder."""

import random

from crest_train.environments.protocol import Step


class Sums:
    system = "Answer with a number."
    num_turns = 3

    def reset(self, seed):  # the same seed is the same session
        rng = random.Random(seed)
        self.questions = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(self.num_turns)]
        self.turn = 0
        return self.request()

    def request(self):
        return "{} + {} =".format(*self.questions[self.turn])

    def gold(self):  # only for methods, teachers and a warm start that read the ground truth
        return str(sum(self.questions[self.turn]))

    def step(self, action):  # an action that makes no sense is answered, not raised on
        reward = float(action.strip() == self.gold())
        self.turn += 1
        over = self.turn == self.num_turns
        return Step(turn_reward=reward, request=None if over else self.request(), info={"error": reward == 0})
