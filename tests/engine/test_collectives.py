"""What the reductions leave to Gloo's threads when a script ends."""

from __future__ import annotations

import json
from pathlib import Path

from tests.forked import executable
from tests.reference.processes import run

SCRIPT = """
import json, os, signal, sys
from datetime import timedelta
child = os.fork()
signal.alarm(150)  # ends also what hangs in a destructor
import torch
import torch.distributed as dist
from te_precision_callbacks.ranks import all_reduce

folder, rank, wait = sys.argv[1], int(not child), timedelta(seconds=30)
sys.setswitchinterval(1000)  # a thread gets Python's lock only from one that waits for something
torch.set_num_threads(1)
store = dist.FileStore(f"{folder}/store", 2)
found = []
for round in range(20):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(round), store), rank=rank, world_size=2, timeout=wait)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(10):
        tensor = torch.tensor([float(rank)])
        all_reduce(tensor, dist.ReduceOp.SUM, None)
        found.append(tensor.item())
    dist.destroy_process_group()
    del module  # the last owner of the process group: its destructor waits for Gloo's threads
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(json.dumps(found))
"""


def test_a_process_group_can_go_away_right_after_a_reduction(tmp_path: Path) -> None:
    done = run([executable(whole=True), "-W", "ignore", "-c", SCRIPT, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1.0] * 200
