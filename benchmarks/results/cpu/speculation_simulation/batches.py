"""Simulate decoding of a batch with proposals: how far may rows propose that are ahead of others?

    python batches.py

as many: each row gets as many proposals, and a pass up to 2 n + 1 positions.
same end: rows propose up to the position that the row with the fewest tokens reaches with n proposals (`generate_speculatively`).
Each proposal is accepted with the same probability, if those before it were. 127 tokens a row, mean over 12 seeds. For each rule the best of
0 to 16 proposals, and the gain over no proposals.
"""

from random import Random

from pandas import DataFrame

TOKENS, SEEDS = 127, 12
COUNTS = 0, 1, 2, 3, 4, 6, 8, 12, 16
CASES = {  # ms of a draft step, of a pass, and of each of its tokens
    "smollm2, nothing on the GPU": (1.6, 4.4, 0.0),
    "13B, copied weights": (5.4, 180.0, 0.0),
    "13B, with the CPU": (5.4, 110.0, 1.7),
}


def decode_ms(same_end: bool, rows: int, acceptance: float, count: int, times: tuple[float, float, float], seed: int) -> float:
    random, lengths, total = Random(seed), [1] * rows, 0.0
    step_ms, pass_ms, token_ms = times
    while min(lengths) <= TOKENS:
        shortest = min(lengths)
        most = max(1, min(count + 1 if same_end or rows == 1 else 2 * count + 1, TOKENS - shortest + 1))
        known = [min(length - shortest + 1, most) for length in lengths]
        proposed = [min(count, most - each) for each in known]
        steps = max((length + each - shortest for length, each in zip(lengths, proposed) if each), default=0)
        width = max(one + other for one, other in zip(known, proposed))
        for row, length in enumerate(lengths):
            if length <= TOKENS and length - shortest < width:
                accepted = 0
                while accepted < proposed[row] and random.random() < acceptance:
                    accepted += 1
                lengths[row] += accepted + 1
        total += steps * step_ms + pass_ms + width * rows * token_ms
    return total


found = []
for case, times in CASES.items():
    for rows in (2, 3, 8, 32):
        for acceptance in (0.97, 0.9, 0.76):
            line = {"case": case, "rows": rows, "acceptance": acceptance}
            for rule in ("as many", "same end"):
                took = {
                    count: sum(decode_ms(rule == "same end", rows, acceptance, count, times, seed) for seed in range(SEEDS))
                    for count in COUNTS
                }
                best = min(COUNTS, key=took.__getitem__)
                line |= {f"{rule}: proposals": best, f"{rule}: gain": took[0] / took[best]}
            found.append(line)
print(DataFrame(found).to_string(index=False, float_format=lambda value: f"{value:.2f}"))
