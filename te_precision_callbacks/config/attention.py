"""Which attention LogGemmError measures: no layer of nvidia-dlfw-inspect, and so in no plan.

options_of_attention(sections, features, attentions)      # name -> its options
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.planning import NamespacedFeatures, Section
from te_precision_callbacks.config.schemas import LogGemmError, LogGemmErrorItem
from te_precision_callbacks.config.selection import LayerIndex

if TYPE_CHECKING:
    from te_precision_callbacks.layers.naming import Layer


def options_of_attention(
    sections: Iterable[Section], features: Iterable[NamespacedFeatures], attentions: Sequence[Layer]
) -> dict[str, LogGemmErrorItem]:
    """The attention that is measured, by its name; with the options of the first section that selects it.

    Args:
        sections: the enabled sections.
        features: those of each section.
        attentions: the modules of attention, as layers.
    """
    found: dict[str, LogGemmErrorItem] = {}
    index = LayerIndex(attentions)
    for section, of_section in zip(sections, features, strict=True):
        for options in of_section.get(NAMESPACE, {}).values():
            schema = options.schema if isinstance(options, ReadOptions) else None
            item = schema.of_attention if isinstance(schema, LogGemmError) else None
            if item is not None:
                for position in section.selector.select(index):
                    found.setdefault(attentions[position].name, item)
    return found
