"""Drafts with skipped decoder layers: agreement and tokens per pass."""
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from common import *

KS = (1, 2, 3, 4, 6, 8, 10, 15)
model, names, ids, kv, hidden = ready()
prompt_kv = [(k[:, :PROMPT], v[:, :PROMPT]) for k, v in kv]
inputs, targets = ids[:, PROMPT:-1], ids[:, PROMPT + 1 :]


def agreement(x, own=slice(None)):
    return (model.logits(x).argmax(-1) == targets[own]).float().mean(1)


def forward(skipped, x=None, begin=0, own=slice(None)):
    x = model.embed[inputs[own]] if x is None else x
    for layer in range(begin, model.n):
        if layer not in skipped:
            x, _ = model.block(layer, x, tuple(each[own] for each in prompt_kv[layer]))
    return x


def search(most, own, label):
    """Greedy search: skip the layer whose removal keeps the highest agreement of the texts `own`."""
    skipped, order = set(), []
    while len(order) < most:
        x, scores = model.embed[inputs[own]], {}
        for layer in range(model.n):
            if layer in skipped:
                continue
            scores[layer] = float(agreement(forward(skipped, x, layer + 1, own), own).mean())
            x, _ = model.block(layer, x, tuple(each[own] for each in prompt_kv[layer]))
        best = max(scores, key=scores.get)
        skipped.add(best)
        order.append(best)
        say(f"  {label}: {len(order)} skipped, layer {best}, agreement {scores[best]:.3f} ({clock()})")
    return order


influence = [
    float(1 - F.cosine_similarity(hidden[i][:, :PROMPT], hidden[i + 1][:, :PROMPT], dim=-1).mean())
    for i in range(model.n)
]
say("block influence:", " ".join(f"{i}:{each:.3f}" for i, each in enumerate(influence)))
by_influence = sorted(range(model.n), key=influence.__getitem__)
say("order of block influence:", by_influence[:15])


def even(k):
    return [2 + int((j + 0.5) * 26 / k) for j in range(k)]


def evaluate(method, skipped):
    skipped = set(skipped)
    assert len(skipped) == k
    agreed = agreement(forward(skipped))
    ranks = ranks_from_each_start(model, skipped, ids, kv, 8, 1)
    row = {"method": method, "k": k, "agree": float(agreed.mean()), "a1": float((ranks[..., 0] == 1).float().mean())}
    for n in (4, 8):
        row[f"mean{n}"], row[f"pooled{n}"] = tokens_per_pass(chain_accepted(ranks, n))
    by_kind = [tokens_per_pass(chain_accepted(ranks[i : i + 3], 8))[0] for i in range(0, 12, 3)]
    say(
        f"{method:<10} {k:>2} {row['agree']:.3f} {row['a1']:.3f}  {row['mean4']:.2f} {row['mean8']:.2f}  {row['pooled4']:.2f} {row['pooled8']:.2f}  "
        + " ".join(f"{each:.2f}" for each in by_kind)
        + f"  {sorted(skipped)} ({clock()})"
    )
    return row | {"skipped": sorted(skipped), "texts": agreed.tolist(), "by_kind": by_kind}


say("method k agree a1  tokens/pass(mean of texts) n=4 n=8  pooled n=4 n=8  n=8 by kind: code copying prose questions  skipped")
rows = []
for k in KS:
    rows.append(evaluate("influence", by_influence[:k]))
    rows.append(evaluate("even", even(k)))
order = search(15, slice(None), "search")
for k in KS:
    rows.append(evaluate("search", order[:k]))
Path("skip_layers.json").write_text(json.dumps({"order": order, "influence": influence, "rows": rows}))
