"""Triton kernels over vocabulary logits and token spans, for reinforcement learning. Imports torch and triton only.

Every function launches one kernel on the current stream and returns without waiting; none is recorded by autograd:
`*_grad` functions write the gradients. Logits are float16, bfloat16 or float32, of any strides with a contiguous last
dimension; arithmetic and what is returned are float32. A row whose target is -1 is not read and gives 0. Targets are
not looked at before a launch: one >= num_columns has the log-prob -inf and its row the gradient 0, without an error.
Tensors that a kernel would misread (dtype, shape, strides, device) raise ValueError. `crest_segments`, whose ends and
turns are addresses, checks their values too: on a GPU by a device-side assert.
"""

from .crest_segments import crest_segments
from .divergence import token_divergence
from .divergence_grad import token_divergence_grad
from .policy_loss import policy_loss
from .teacher_pair import teacher_pair
from .token_stats import token_stats, token_stats_grad

__all__ = [
    "crest_segments",
    "policy_loss",
    "teacher_pair",
    "token_divergence",
    "token_divergence_grad",
    "token_stats",
    "token_stats_grad",
]
