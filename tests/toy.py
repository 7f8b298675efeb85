"""A toy environment, tokenizer and model for the trainer's tests: `say x` wants `x`, in at most two tries."""

import random

import torch
from crest_train.environments.protocol import Step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = ["a", "b", "c", "d"]
WORDS = ["<pad>", "<user>", ">", ";", "<obs>", "<sys>", "say", "no", "hint", "be", "brief", *LETTERS]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<sys> {{ m.content }} {% elif m.role == 'user' %}"
    "<user> {{ m.content }} {% elif m.role == 'tool' %}<obs> {{ m.content }} {% else %}> {{ m.content }} ; {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
HINT = "{text} hint {hint}"


class Toy:
    """A session of `turns` requests; a turn ends with the right letter (reward 1) or a second wrong one (0)."""

    def __init__(self, turns=3, system=""):
        self.num_turns, self.system = turns, system

    def reset(self, seed):
        self.letters = random.Random(seed).choices(LETTERS, k=self.num_turns)
        self.turn, self.tries, self.heard = 0, 0, []
        return f"say {self.letters[0]}"

    def gold(self):
        return self.letters[self.turn]

    def step(self, action):
        self.heard.append(action)
        self.tries += 1
        right = action == self.letters[self.turn]
        if not right and self.tries < 2:
            return Step(observation="no", info={"role": "error"})
        self.turn, self.tries = self.turn + 1, 0
        over = self.turn == self.num_turns
        request = None if over else f"say {self.letters[self.turn]}"
        return Step(None if right else "no", float(right), request, {"role": "finish"})

    def save(self):
        return list(self.letters), self.turn, self.tries, list(self.heard)

    def restore(self, state):
        self.letters, self.turn, self.tries, self.heard = list(state[0]), state[1], state[2], list(state[3])


def toy_tokenizer():
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=";")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def toy_model(seed=0, context=512, **config):
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=context,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=WORDS.index(";"),
    )
    return LlamaForCausalLM(LlamaConfig(**(sizes | config))).eval()
