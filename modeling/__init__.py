"""Models and their configurations, in one flat folder, because the Hub runs these files without the rest of the package.

Files in this folder import only torch, transformers and, as `from .sibling import name`, each other.
"""

from .configuration_cot_mote import CoTMoTEConfig
from .configuration_imprag import ImpRAGConfig
from .configuration_nvembed import LatentAttentionConfig, NVEmbedConfig
from .configuration_retromae import RetroMAEConfig
from .configuration_revela import RevelaConfig
from .modeling_cot_mote import CoTMoTEForPreTraining, CoTMoTEModel, CoTMoTEOutput, CoTMoTEPreTrainingOutput
from .modeling_imprag import ImpRAGForCausalLM, ImpRAGOutput
from .modeling_nvembed import NVEmbedModel, NVEmbedOutput
from .modeling_retromae import RetroMAEForPreTraining, RetroMAEOutput
from .modeling_revela import RevelaForCausalLM, RevelaOutput
from .passage_attention import PassageStates
from .reading_decoder import ImpRAGModel

__all__ = [
    "ImpRAGConfig",
    "ImpRAGForCausalLM",
    "ImpRAGModel",
    "ImpRAGOutput",
    "CoTMoTEConfig",
    "CoTMoTEForPreTraining",
    "CoTMoTEModel",
    "CoTMoTEOutput",
    "CoTMoTEPreTrainingOutput",
    "LatentAttentionConfig",
    "NVEmbedConfig",
    "NVEmbedModel",
    "NVEmbedOutput",
    "PassageStates",
    "RetroMAEConfig",
    "RetroMAEForPreTraining",
    "RetroMAEOutput",
    "RevelaConfig",
    "RevelaForCausalLM",
    "RevelaOutput",
]
