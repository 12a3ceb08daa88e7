"""An environment for each client: this project's packages, and in addition the client's own requirements.

Usage::

    environment = prepare(cache, "esm2_native_te", ("datasets", "hydra-core"))
    environment.python, environment.command("te-precision")

A client's packages come first on its path, so that it may have another version of a library than the project.
"""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Commands of installed packages that clients are started with; pip writes none for a package that it only sees through.
COMMANDS = {
    "te-precision": "te_precision_callbacks.cli:main",
    "torchrun": "torch.distributed.run:main",
    "accelerate": "accelerate.commands.accelerate_cli:main",
}


class NotInstalledError(Exception):
    """An environment cannot be made."""


@dataclass(frozen=True)
class Environment:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def command(self, name: str) -> Path:
        return self.folder / "bin" / name

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """The versions of packages as the client sees them, if they are installed."""
        code = (
            "import importlib.metadata as m, sys\n"
            "for name in sys.argv[1:]:\n"
            "    try: print(name, m.version(name))\n"
            "    except m.PackageNotFoundError: pass"
        )
        done = subprocess.run([str(self.python), "-c", code, *packages], check=True, capture_output=True, text=True)
        return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def prepare(cache: Path, name: str, packages: Sequence[str]) -> Environment:
    """Make the environment, or find it as an earlier call has left it.

    Raises:
        NotInstalledError: pip cannot install the packages.
    """
    wanted = hashlib.sha256("\n".join([sys.executable, *packages]).encode()).hexdigest()
    environment = Environment(cache / "environments" / name)
    made = environment.folder / "made-of"
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return environment
    shutil.rmtree(environment.folder, ignore_errors=True)
    venv.create(environment.folder, symlinks=True)
    own = environment.folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (own / "project.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )
    for command, entry in COMMANDS.items():
        module, function = entry.split(":")
        path = environment.command(command)
        path.write_text(f"#!{environment.python}\nfrom {module} import {function}\n{function}()\n", encoding="utf-8")
        path.chmod(0o755)
    if packages:
        pip = [str(environment.python), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalledError(f"{name}: pip install {' '.join(packages)}: {done.stderr.strip()[-2000:]}")
    made.write_text(wanted, encoding="utf-8")
    return environment
