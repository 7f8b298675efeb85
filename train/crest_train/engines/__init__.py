"""Rollout engines: what writes for the policy. One file each, all with the interface of protocol.py."""

from transformers import PreTrainedModel

from crest_train.config import RolloutSection
from crest_train.engines.lockstep import LockstepEngine
from crest_train.engines.protocol import Engine


def make_engine(section: RolloutSection, model: PreTrainedModel) -> Engine:
    """The engine that the section names. Raises ValueError or ConnectionError where it is not there."""
    if section.engine == "transformers":
        return LockstepEngine(model)
    if section.engine == "vllm":
        from crest_train.engines.vllm import VLLMEngine

        return VLLMEngine(model)
    from crest_train.engines.vllm_server import VLLMServerEngine

    return VLLMServerEngine(section.server)
