"""A fit whose recorded steps write into the other GPU's memory, and trouble at one step of it; started by torchrun.

recorded_group.py DATA WHAT RANK STEP
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import test_fixed_sizes_of_fit as fixed
from group_model import Trouble, settings

from viviane.data import Dataset
from viviane.parallel import join_processes
from viviane.training import Callback


class GoesThroughPeers(Callback):
    """Says so, that the test may know what it saw end."""

    def on_fit_start(self, trainer):
        self.trainer = trainer

    def on_step_end(self, step, loss):
        [emb] = self.trainer.stepper.collections.values()
        if step == 8 and all(route.peers.is_taken for route in emb.exchanges.static.values()):
            print(f"rank {self.trainer.group.rank} writes to its peer", flush=True)


if __name__ == "__main__":
    data, what, rank, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    solver = settings(
        device="cuda", cuda_graph=True, peer_memory=True, clip_grad_norm=None, peer_timeout_s=90, epochs=2, eval_every=9
    )
    group = join_processes("cuda", solver.peer_timeout_s)
    notes = [GoesThroughPeers(), Trouble(what, rank, step, group)]
    trainer = fixed.make_trainer(group, solver, fixed.schema_of(fixed.HOTNESS), callbacks=notes)
    trainer.fit(Dataset(data / "said" / "train"), Dataset(data / "said" / "valid"))
    print("the fit has ended", flush=True)
