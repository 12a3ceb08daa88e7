"""The table of recipes of docs/statistics.md, made from the vocabulary.

python -m tools.recipes_table    # prints the table
"""

from __future__ import annotations

from te_precision_callbacks.base.vocabulary import ELEMENT_FORMATS, RECIPES

SHARES = {
    "fp8_delayed_scaling": "all",
    "fp8_current_scaling": "all",
    "mxfp8": "32",
    "fp8_block_scaling": "128; in a weight 128 x 128",
    "nvfp4": "16; in a weight 16 x 16",
}
"""Recipe -> the number of elements that share a scale."""

_FACTORS = {
    "fp8_delayed_scaling": "float32, from the amaxes of earlier steps",
    "fp8_current_scaling": "float32",
    "mxfp8": "a power of two (E8M0)",
    "fp8_block_scaling": "a power of two (float32)",
    "nvfp4": "E4M3 times one float32 of the tensor",
}
"""Recipe -> the type of its scales."""


def table() -> str:
    """The table, in Markdown."""
    lines = [
        "| recipe | elements that share a factor | factor | elements by default | element format in a name |",
        "|---|---|---|---|---|",
    ]
    for recipe in RECIPES.values():
        formats = ", ".join(f"`{name}`" for name in (() if recipe.fixed else ELEMENT_FORMATS))
        columns = SHARES[recipe.name], _FACTORS[recipe.name], recipe.elements, formats
        lines.append(f"| `{recipe.name}` | {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
