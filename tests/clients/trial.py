"""The trial of a client: run without the debugger and with it, everything compared.

Usage::

    trial = hold(client, folder, sources, cache)
    print(trial.verdict)
"""

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.comparing import Notes, check_statistics, compare_gemms, compare_losses, read_log
from tests.clients.environments import NotInstalledError, prepare
from tests.clients.known import Client, tree_of
from tests.clients.running import LIMIT_SECONDS, Run, run

ANALYSIS = "analyze_and_create_heatmap.py"
ANALYSIS_PACKAGES = ("matplotlib", "numpy", "pandas", "seaborn")
VERSIONS = ("torch", "transformer-engine", "nvdlfw-inspect")
RAN = "runs"


@dataclass
class Trial:
    """Result of a client. Texts are empty without a problem.

    Attributes:
        tree: git's hash of its folder's content.
        versions: of the packages that matter to it.
        ran: "runs", or how a run of the two ended.
        losses: the first difference of losses and parameters.
        gemms: the first difference of a GEMM's operands or result.
        statistics: the first statistics that differ from the spy's.
        analysis: result of BioNeMo's fp8_analysis on the logs, or why it did not run.
        steps, compared, checked, unchecked: steps, GEMMs compared, statistics checked, and statistics the spy could
            not check.
        largest: the largest relative deviation of a statistic.
    """

    client: Client
    tree: str
    versions: dict[str, str] = field(default_factory=dict)
    ran: str = ""
    losses: str = ""
    gemms: str = ""
    statistics: str = ""
    analysis: str = ""
    steps: int = 0
    compared: int = 0
    checked: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def good(self) -> bool:
        """Return whether it ran with known differences only, or failed without the debugger in a known way."""
        if self.client.fails:
            return self.ran.startswith("without the debugger: exit code")
        return self.ran == RAN and not self.statistics and bool(self.losses or self.gemms) == bool(self.client.differs)

    @property
    def verdict(self) -> str:
        if self.ran != RAN:
            return f"{self.ran}; known: {self.client.fails}" if self.client.fails else self.ran
        different = [text for text in (self.losses, self.gemms, self.statistics) if text]
        if self.client.differs:
            different = [*(different or ["nothing differs any more"]), f"known: {self.client.differs}"]
        counts = f"{self.steps} steps, {self.compared} GEMMs, {self.checked} statistics"
        return "; ".join(different) or f"the same with and without: {counts}; fp8_analysis {self.analysis}"


def hold(client: Client, source: Path, sources: Path, cache: Path) -> Trial:
    """Run a client twice, and compare.

    Args:
        client: which one.
        source: its folder.
        sources: the folder of all sources, perhaps with fp8_analysis.
        cache: for environments and runs.
    """
    trial = Trial(client, tree_of(source))
    try:
        environment = prepare(cache, client.environment, client.packages)
    except NotInstalledError as error:
        trial.ran = f"not run: {error}"
        return trial
    folder = runs_of(client, cache)
    trial.versions = {"python": platform.python_version()} | environment.versions([*VERSIONS, *client.said])
    plain = run(client, source, environment, folder / "without", watched=False)
    trial.ran = _how_it_ran("without", plain)
    if trial.ran == RAN:
        watched = run(client, source, environment, folder / "with", watched=True)
        trial.ran = _how_it_ran("with", watched)
    if trial.ran == RAN:
        _compare(trial, plain, watched)
        trial.analysis = _analysis(sources, watched.logs, cache)
    return trial


def runs_of(client: Client, cache: Path) -> Path:
    """The folder of a client's two runs, with their output in ``with*/output.txt``."""
    return cache / "runs" / client.name.replace("/", "-")


def _how_it_ran(which: str, done: Run) -> str:
    if done.code is None:
        return f"{which} the debugger: still running after {LIMIT_SECONDS} s"
    if done.code:
        return f"{which} the debugger: exit code {done.code}: {why_it_failed(done.output)[:300]}"
    return RAN


def why_it_failed(output: str) -> str:
    """The exception that ended a script, from its and its launcher's output; the last line if there is none."""
    exceptions = re.findall(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$", output, re.MULTILINE)
    of_the_script = [line for line in exceptions if not re.match(r"[\w.]*(ChildFailedError|CalledProcessError)", line)]
    return of_the_script[-1] if of_the_script else output.rstrip().split("\n")[-1]


def _compare(trial: Trial, plain: Run, watched: Run) -> None:
    without, having = Notes.read(plain.record), Notes.read(watched.record)
    trial.losses = compare_losses(without, having)
    trial.gemms = compare_gemms(without, having)
    trial.steps, trial.compared = having.count("step"), having.count("gemm")
    checked = check_statistics(having, watched.logs)
    trial.checked, trial.largest, trial.unchecked = checked.equal, checked.largest, dict(checked.unlinked)
    if checked.different:
        name, iteration, value, wanted = checked.different[0]
        trial.statistics = (
            f"{len(checked.different)} statistics differ, first {name} of iteration {iteration}: {value} logged, "
            f"{wanted} computed"
        )
    elif not checked.equal:
        trial.statistics = "no statistic was logged that could be checked"


def _analysis(sources: Path, logs: Path, cache: Path) -> str:
    """Give the logs of the client's first training to BioNeMo's fp8_analysis, if it lies in the folder of sources."""
    script = next(iter(sorted(sources.rglob(ANALYSIS))), None)
    if script is None:
        return "not in the folder of sources"
    log_dir = min(logs.iterdir(), key=lambda path: int(path.name))
    folder = logs.parent / "analysis"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(log_dir, folder / "logs" / "rank_0")
    environment = prepare(cache, "fp8_analysis", ANALYSIS_PACKAGES)
    done = subprocess.run(
        [str(environment.python), str(script), "logs"], cwd=folder, capture_output=True, text=True, check=False
    )
    rows = folder / "analysis_output" / "csv_data" / "rank_0_metrics.csv"
    # Its regular expression takes digits and dots only: no sign, no exponent.
    readable = sum(1 for _, _, value in read_log(log_dir) if set(value) <= set("0123456789."))
    if "No components detected" in done.stderr:
        return f"reads {readable} lines; there are no underflows of gradients to draw"
    if done.returncode or not rows.is_file():
        return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
    count = len(rows.read_text(encoding="utf-8").splitlines()) - 1
    return f"reads {count} lines and draws its heat map" if count == readable else f"reads {count} of {readable} lines"
