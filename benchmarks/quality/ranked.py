"""Figures of models that rank: films held out on MovieLens 1M, the next item on Amazon's sets."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import mean

import item_neighbours
import leave_one_out
import next_item
import numpy as np
import pair_ranking
import two_stage

from record import record

Figures = dict[str, float]


def _neumf(seed: int, device: str) -> Figures:
    data = leave_one_out.load()
    return pair_ranking.ncf_figures(pair_ranking.train_ncf(data, seed, device), data, "test")


def _towers(seed: int, device: str) -> Figures:
    data = leave_one_out.load()
    return pair_ranking.tower_figures(pair_ranking.Towers(data, seed, device), "test")


def _beauty(seed: int, device: str) -> Figures:
    ranks = two_stage.evaluate(item_neighbours.read_users(), seed, device)["test"]
    figures = {}
    for way, found in ranks.items():
        figures[f"HR@10, {way}"] = leave_one_out.hit_rate(found, 10)
        figures[f"NDCG@10, {way}"] = leave_one_out.ndcg(found, 10)
    return figures


def _film_neighbours() -> Figures:
    data = leave_one_out.load()
    scores = leave_one_out.neighbours(data)
    user, item = data.sampled_rows("test")
    sampled = leave_one_out.sampled_ranks(scores[user, item])
    whole = data.rank_in_catalogue(scores, "test")
    return {
        "HR@10 of 100": leave_one_out.hit_rate(sampled, 10),
        "NDCG@10 of 100": leave_one_out.ndcg(sampled, 10),
        **{f"recall@{k}": leave_one_out.hit_rate(whole, k) for k in (10, 50, 100)},
    }


WITHOUT_TRAINING = " (item neighbours and DIN)"
HSTU_ALONE = " (HSTU alone)"  # the same figures of HSTU that the whole case has

RANKED: dict[str, Callable[[int, str], Figures]] = {
    "ml1m, NeuMF (every rating an event, one film of each user held out by a hash)": _neumf,
    "ml1m, two-tower (the same, all films that the user has not rated)": _towers,
    "amazon_seq Beauty, two-tower and DIN (last item, all items that the user has not had)": _beauty,
    **{name: partial(next_item.figures, name) for name in next_item.CASES},
    **{f"{name}{WITHOUT_TRAINING}": partial(next_item.neighbour_figures, name) for name in next_item.CASES},
    **{f"{name}{HSTU_ALONE}": partial(next_item.hstu_figures, name) for name in next_item.CASES},
}


def run(name: str, seeds: Sequence[int], jobs: int, device: str) -> None:
    """Train with each seed, and record the means of the test figures."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(RANKED[name], seeds, [device] * len(seeds)))
    shape = {"seeds": len(seeds), "device": device}
    name = name.removesuffix(HSTU_ALONE)
    if name.removesuffix(WITHOUT_TRAINING) in next_item.CASES:
        keep_next_item(name, found, shape)
        return
    for metric in found[0]:
        values = [one[metric] for one in found]
        print(f"{name}, {metric}: {', '.join(f'{value:.4f}' for value in values)}", flush=True)
    beauty = RANKED[name] is _beauty
    peers = {} if beauty else _film_neighbours()
    for metric in found[0]:
        values = [one[metric] for one in found]
        more: dict[str, object] = {}
        if metric in peers:
            more = {"peer": "item neighbours (cosine)", "peer_value": peers[metric]}
        elif metric == "HR@10, two stages":
            more = {"goal": 0.0778, "peer": "item neighbours alone", "peer_published": "SASRec .0605",
                    "peer_value": mean(one["HR@10, item neighbours alone"] for one in found)}  # fmt: skip
        record(
            bench="quality", case=name, metric=f"test {metric}", value=mean(values), unit="", better="higher",
            spread=(float(np.min(values)), float(np.max(values))), shape=shape, **more,  # type: ignore[arg-type]
        )  # fmt: skip


def keep_next_item(name: str, found: Sequence[Figures], shape: dict[str, object]) -> None:
    """Record the means over seeds; SASRec and HSTU beside the published SASRec, two stages beside the best one."""
    goal = next_item.CASES[name.removesuffix(WITHOUT_TRAINING)].published
    ways = [way for way in ("SASRec", "item neighbours", "popularity") if f"HR@10, {way}" in found[0]]
    single = {way: mean(one[f"HR@10, {way}"] for one in found) for way in ways}
    best = max(single, key=lambda way: single[way])
    for metric in found[0]:
        values = [one[metric] for one in found]
        more: dict[str, object] = {}
        if metric.startswith("epochs"):
            continue
        if metric in ("HR@10, SASRec", "HR@10, HSTU"):
            more = {"goal": goal, "peer": "item neighbours", "peer_value": single["item neighbours"]}
            if goal is not None:
                more["peer_published"] = f"SASRec in S3-Rec's paper, HR@10 {goal}"
        elif metric == "HR@10, two stages":
            more = {"goal": single[best], "peer": f"{best} alone", "peer_value": single[best]}
        record(
            bench="quality", case=name, metric=metric if metric.startswith(("val", "dec")) else f"test {metric}",
            value=mean(values), unit="", better="higher", spread=(min(values), max(values)), shape=shape,
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
