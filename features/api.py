"""The namespace API ``transformer_engine``: Transformer Engine's own, with three faults put right.

    debug_api.initialize(config_file="config.yaml", feature_dirs=[<TE's debug/features>, <this folder>])

nvidia-dlfw-inspect keeps the namespace API that was registered last, so this folder stands last in ``feature_dirs``.

Read from Transformer Engine 2.20.2 (``debug/features/api.py``) and nvidia-dlfw-inspect 0.2.2 (``base.py``). Put right:

- **Caches.** Upstream caches which feature answers ``inspect_tensor_enabled`` under a key that holds the iteration, and
  never evicts: about 5 KB a layer and step. The feature and its options do not depend on the iteration, so here the key
  does not hold it, and the feature is still asked in every step.
- **Errors.** An AttributeError inside of a feature ends the process there (``sys.exit(1)``); here it is an exception.
- **Steps without collectives.** With ``reduce = False`` a step logs each rank's own statistics. What a failed run has
  gathered is logged in the same way, by :meth:`TransformerEngineAPI.log_local_statistics`.
"""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import Registry
from transformer_engine.debug.features.api import TransformerEngineAPI as UpstreamAPI
from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS

from te_precision_callbacks.errors import FeatureError
from te_precision_callbacks.features.registration import NAMESPACE


@Registry.register_namespace_api(namespace=NAMESPACE)
class TransformerEngineAPI(UpstreamAPI):  # type: ignore[misc]  # upstream is untyped
    """Routes the calls of Transformer Engine's modules to features.

    Attributes:
        reduce: whether a step reduces the statistics over ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduce = True
        for keys in self._cacheable_api_kwargs_map.values():
            if "iteration" in keys:
                keys.remove("iteration")

    def route_api(self, layer_name: str, api_name: str, **arguments: Any) -> Any:
        """Route a call of a layer to its features, or to the default.

        Raises:
            FeatureError: a feature raised AttributeError.
        """
        try:
            return super().route_api(layer_name, api_name, **arguments)
        except SystemExit as error:
            if not isinstance(error.__context__, AttributeError):
                raise
            raise FeatureError(
                f"A feature failed in {api_name} for the layer {layer_name!r}: AttributeError: {error.__context__}."
            ) from error.__context__

    def step(self) -> None:
        """Log what was gathered since the last step."""
        if self.reduce:
            super().step()
        else:
            self.log_local_statistics()

    def log_local_statistics(self) -> None:
        """Log what this rank has gathered since the last step, without a collective."""
        buffer: Any
        for buffer in STATS_BUFFERS.buffers.values():
            if buffer.modified[0]:
                buffer.skip_reduction = True
                buffer.log()
        STATS_BUFFERS.at_least_one_layer_fed = False
