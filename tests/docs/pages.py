"""The pages, their blocks of code, and which test runs each of them.

A block runs in tests/docs/test_blocks.py unless :data:`RUN_BY` names another test, or the line above it in the page
explains why it does not run at all: ``<!-- not run: needs two GPUs -->``. A block of ``text`` is no code: output of a
program, or a drawing.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]

PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for pattern in ("*.md", "benchmarks/**/README.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}

LANGUAGES = ("python", "yaml", "bash", "text")

RUN_BY = {
    ("CONTRIBUTING.md", "python", ""): "tests/test_package.py",
    ("docs/accelerate.md", "python", ""): "tests/accelerate/test_page.py",
    ("docs/accelerate.md", "bash", ""): "tests/accelerate/test_page.py",
    ("docs/check.md", "python", "# my_models.py"): "tests/check/test_command.py",
    ("docs/check.md", "python", "# hf_models.py"): "tests/check/test_command.py",
    ("docs/check.md", "python", "from te_precision"): "tests/check/test_command.py",
    ("docs/check.md", "python", "# large_model.py"): "tests/docs/test_task_pages.py",
    ("docs/check.md", "bash", "te-precision check config.yaml"): "tests/check/test_command.py",
    ("docs/check.md", "bash", "te-precision check statistics.yaml"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "bash", "te-precision diagnose"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "bash", "te-precision compare bf16 fp8 --noise"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "bash", "te-precision compare bf16 fp8_fixed"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "bash", "te-precision show"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "bash", "te-precision compare logs"): "tests/compare/test_command.py",
    ("docs/diverging.md", "bash", "te-precision compare --a"): "tests/compare/test_seeds.py",
    ("docs/diverging.md", "python", "# train.py"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "python", "from train"): "tests/docs/test_task_pages.py",
    ("docs/diverging.md", "python", "from te_precision"): "tests/compare/test_command.py",
    ("docs/diverging.md", "yaml", ""): "tests/docs/test_task_pages.py",
    ("docs/coverage.md", "python", ""): "tests/docs/test_task_pages.py",
    ("docs/coverage.md", "yaml", ""): "tests/docs/test_task_pages.py",
    ("docs/custom-features.md", "python", "from nvdlfw_inspect"): "tests/features/test_custom.py",
    ("docs/custom-features.md", "python", "InspectSession"): "tests/features/test_custom.py",
    ("docs/custom-features.md", "python", "def inspect"): "tests/features/test_custom.py",
    ("docs/custom-features.md", "python", "from te_precision"): "tests/docs/test_task_pages.py",
    ("docs/custom-features.md", "yaml", ""): "tests/features/test_custom.py",
    ("docs/gemm-error.md", "python", "import torch"): "tests/dumps/test_reading.py",
    ("docs/gemm-error.md", "python", "from te_precision_callbacks import dumps"): "tests/dumps/test_reading.py",
    ("docs/gemm-error.md", "python", "import numpy"): "tests/dumps/test_reading.py",
    ("docs/gemm-error.md", "python", "from safetensors"): "tests/dumps/test_reading.py",
    ("docs/gemm-error.md", "bash", ""): "tests/dumps/test_reading.py",
    ("docs/features.md", "yaml", "# config.yaml"): "tests/docs/test_task_pages.py",
    ("docs/features.md", "yaml", "forward_in_bf16_at"): "tests/docs/test_task_pages.py",
    ("docs/records.md", "python", "from te_precision_callbacks.views"): "tests/report/test_command.py",
    ("docs/records.md", "python", "from te_precision_callbacks.runs"): "tests/runs/test_reading.py",
    ("docs/records.md", "python", "import"): "tests/runs/test_reading.py",
    ("docs/records.md", "python", "for batch"): "tests/runs/test_reading.py",
    ("docs/records.md", "bash", "te-precision report"): "tests/report/test_command.py",
    ("docs/records.md", "bash", "te-precision show"): "tests/compare/test_command.py",
    ("docs/rollout.md", "python", ""): "tests/maps/test_page.py",
    ("docs/rollout.md", "bash", ""): "tests/maps/test_page.py",
    ("docs/rollout.md", "yaml", ""): "tests/maps/test_page.py",
    ("docs/search.md", "python", "# lm_search.py"): "tests/search/test_page.py",
    ("docs/search.md", "python", "from te_precision_callbacks import reference"): "tests/search/test_page.py",
    ("docs/search.md", "python", "from te_precision_callbacks.search"): "tests/search/test_at_step.py",
    ("docs/search.md", "python", "from unittest"): "tests/search/test_at_step.py",
    ("docs/search.md", "python", "class SearchingTrainer"): "tests/search/test_at_step.py",
    ("docs/search.md", "python", "for step"): "tests/search/test_at_step.py",
    ("docs/search.md", "bash", ""): "tests/search/test_page.py",
    ("docs/session.md", "python", ""): "tests/docs/test_task_pages.py",
    ("docs/start.md", "python", ""): "tests/docs/test_pages.py",
    ("docs/start.md", "bash", "python examples/"): "tests/docs/test_pages.py",
    ("docs/start.md", "bash", "te-precision"): "tests/docs/test_pages.py",
    ("docs/start.md", "yaml", ""): "tests/docs/test_pages.py",
    ("docs/transformers.md", "python", ""): "tests/transformers/test_page.py",
    ("docs/transformers.md", "yaml", ""): "tests/transformers/test_page.py",
    ("docs/transformers.md", "bash", "python train.py"): "tests/transformers/test_page.py",
    ("docs/transformers.md", "bash", "accelerate launch"): "tests/transformers/test_page.py",
}
"""Page, language and how the code begins -> the test that runs it, which takes all such blocks by :func:`blocks`."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its path in the repository.
        line: the fence's, from 1.
        language: after the fence.
        code: its content.
        not_run: the page's reason for not running it; empty for all others.
    """

    page: str
    line: int
    language: str
    code: str
    not_run: str = ""

    @property
    def run_by(self) -> str:
        results = {
            test
            for (page, language, begin), test in RUN_BY.items()
            if (page, language) == (self.page, self.language) and self.code.startswith(begin)
        }
        assert len(results) <= 1, self
        return next(iter(results), "")


@functools.cache
def tokens(page: str) -> list[Token]:
    return MarkdownIt().enable("table").parse(PAGES[page].read_text())


def all_blocks(page: str) -> list[Block]:
    results, before = [], ""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            reason = re.fullmatch(r"<!-- not run: (.+) -->", before.strip())
            results.append(Block(page, token.map[0] + 1, token.info, token.content, reason[1] if reason else ""))
        before = token.content if token.type == "html_block" else ""
    return results


def blocks(page: str, language: str, begin: str = "") -> list[str]:
    results = [block for block in all_blocks(page) if block.language == language and not block.not_run]
    return [block.code for block in results if block.code.startswith(begin)]


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run a block with the names that the page leaves to its reader; return the names after it."""
    names["__name__"] = "__main__"
    exec(compile(code, "a block", "exec"), names)
    return names
