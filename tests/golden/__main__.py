"""Rewrite the golden files that have changed: python -m tests.golden"""

import tempfile
from pathlib import Path

from tests.preparing import prepare


def main() -> None:
    prepare()
    from tests.golden.outputs import golden, outputs
    from tools.tour import alike

    with tempfile.TemporaryDirectory() as folder:
        made = outputs(Path(folder))
    kept = golden()
    for name in kept.keys() - made.keys():
        Path(__file__).with_name(f"{name}.txt").unlink()
    changed = [name for name, text in made.items() if name not in kept or not alike(kept[name], text)]
    for name in changed:
        Path(__file__).with_name(f"{name}.txt").write_text(made[name], encoding="utf-8")
    print("\n".join(changed or ["all outputs are as they were"]))


if __name__ == "__main__":
    main()
