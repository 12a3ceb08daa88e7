"""The classes of Transformer Engine's namespace API, to inherit from.

Importing this module imports Transformer Engine, which registers its namespace API in nvidia-dlfw-inspect.
"""

from transformer_engine.debug.features.api import TEDefaultFeatures, TransformerEngineAPI
