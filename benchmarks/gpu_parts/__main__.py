"""Run a part of gpu_check.py: ``python -m gpu_parts parity --rows FILE --device cuda``."""

from __future__ import annotations

import argparse
import importlib
import logging
import warnings
from pathlib import Path
from typing import get_args

import torch

from gpu_parts.rows import Backend, CannotRunHereError, Rows, Settings, brief

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m gpu_parts")
    parser.add_argument("module", help="a module of gpu_parts, with a function check(settings, rows)")
    parser.add_argument("--part", required=True, help="the name in the rows")
    parser.add_argument("--rows", type=Path, required=True, help="the file that rows are appended to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=get_args(Backend), default="reference")
    parser.add_argument("--capability")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    torch.manual_seed(0)
    rows = Rows(options.part, options.rows)
    try:
        settings = Settings(torch.device(options.device), options.backend, options.capability)
        importlib.import_module(f"gpu_parts.{options.module}").check(settings, rows)
    except CannotRunHereError as why:
        rows.left_out("all", brief(str(why)))
