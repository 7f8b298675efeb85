"""Train any causal LM on rollouts of several turns, in plain PyTorch: here a tiny one that learns to echo its user."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from crest_ops import METHODS, Signals, Spans, hidden_states, linear_policy_loss, resolve_head

torch.manual_seed(0)
sizes = dict(vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
method = METHODS["turn_grpo"]  # who gets how much credit: one of 18

B = 256
group = torch.arange(32).repeat_interleave(8)  # 32 tasks, 8 rollouts of each

for step in range(20):
    # Rollouts: twice the user says a token and the policy answers with three.
    ids, mask, turn = (torch.empty(B, 0, dtype=torch.int64) for _ in range(3))
    words, rewards = torch.randint(8, (32, 2))[group], []
    for k in range(2):
        ids = torch.cat([ids, words[:, k : k + 1]], 1)
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=3)
        mask = torch.cat([mask, torch.tensor([0, 1, 1, 1]).expand(B, 4)], 1)  # 1 where the policy wrote the token
        turn = torch.cat([turn, torch.full((B, 4), k)], 1)
        rewards.append((ids[:, -3:] == words[:, k : k + 1]).float().mean(1))  # verified, turn by turn
    reward = torch.stack(rewards, 1)

    # Credit of every token. Targets are the ids moved by one: the state at a position predicts the next token.
    spans = Spans.from_mask(mask[:, 1:].bool(), turn=turn[:, 1:], group=group)
    credit = method.assign(spans, Signals(turn_reward_K=reward.flatten()), method.Config())

    # The loss, from hidden states: a chunk of logits at a time, and none where the policy did not write.
    hidden = hidden_states(model, {"input_ids": ids})[:, :-1]  # model may be wrapped: DDP, FSDP, PEFT, compiled
    head = resolve_head(model)
    result = linear_policy_loss(
        hidden,
        head.weight,
        ids[:, 1:],
        credit.credit_N.view(B, -1),
        token_weight=credit.token_weight_N.view(B, -1),
        surrogate=credit.surrogate,
        spans=spans,
        **head.options,
    )
    result.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  reward {reward.mean():.2f}  entropy {result.metrics['entropy']:.2f}")
