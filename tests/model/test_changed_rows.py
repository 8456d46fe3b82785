"""What a publication takes from dynamic tables: applied in order it gives the keys and rows of the table."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from viviane.config import SGD
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig
from viviane.model.changed_rows import ChangedRows

steps = st.lists(
    st.tuples(st.sampled_from(["use", "erase", "take", "fail"]), st.lists(st.integers(0, 15), min_size=1, max_size=5)),
    max_size=30,
)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = DynamicTableConfig(name="t", dim=2, initial_capacity=8, max_capacity=8, when_full="evict")
        self.emb = EmbeddingCollection([table], [FeatureConfig(name="f", table="t")], SGD(), device="cpu", seed=0)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_rows_and_removed_keys_replay_to_the_table(actions) -> None:
    module = Tables()
    table = module.emb.dynamic_table("t")
    table.find_or_insert(torch.tensor([3, 4]))
    changed = ChangedRows(module)
    layout = changed.layouts["emb.t"]
    server = dict(zip([3, 4], table.find(torch.tensor([3, 4]))[0].tolist(), strict=True))
    unsent: set[int] = set()  # keys of publications that failed
    for number, (what, keys) in enumerate([*actions, ("take", [])]):
        chosen = torch.tensor(keys, dtype=torch.int64)
        if what == "use":
            table.insert_or_assign(chosen, torch.full((len(keys), 2), float(number)))
        elif what == "erase":
            table.erase(chosen)
        else:
            clocks = changed.clocks
            rows, removed = changed.take(), changed.take_removed()
            if what == "fail":
                changed.give_back(rows, clocks, removed)
                unsent.update(*(own.tolist() for own, _ in rows.values()))
                continue
            for own, content in rows.values():
                weight = np.ascontiguousarray(layout.column(content, "weight")).view(np.float32)
                server |= dict(zip(own.tolist(), weight.tolist(), strict=True))
            for own in removed.values():
                # A key may have been new in a publication that failed, and then servers never had it.
                assert set(own.tolist()) <= set(server) | unsent
                for key in own.tolist():
                    server.pop(key, None)
    content = table.export()
    assert server == dict(zip(content.keys.tolist(), content.weight.tolist(), strict=True))
