"""The table of recipes of docs/statistics.md, made from the vocabulary.

python -m tools.recipes_table    # prints the table
"""

from __future__ import annotations

from te_precision_callbacks.base.vocabulary import ELEMENT_FORMATS, RECIPES


def table() -> str:
    """The table, in Markdown."""
    lines = [
        "| recipe | elements that share a factor | factor | elements by default | element format in a name |",
        "|---|---|---|---|---|",
    ]
    for recipe in RECIPES.values():
        formats = ", ".join(f"`{name}`" for name in (() if recipe.fixed else ELEMENT_FORMATS))
        lines.append(f"| `{recipe.name}` | {recipe.shares} | {recipe.factor} | {recipe.elements} | {formats} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
