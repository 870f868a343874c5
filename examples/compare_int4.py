"""Is int4 worth it? Speed and perplexity beside 16 bits: python examples/compare_int4.py [MODEL] [TEXT_FILE]

Needs lm-eval (pip install 'zero-inference[quality]'). Use a longer text of your own for a perplexity that means something.
"""

import sys
import tempfile
from pathlib import Path

import pandas

from zero_inference import run

TEXT = """Rivers carry more than water. In spring they bring down sand and stones from the mountains, and where the land becomes flat
and the current slow, they let it fall. Year after year the river bed rises, until one day the water finds a shorter way to the sea."""

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
with tempfile.TemporaryDirectory() as folder:
    text = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(folder, "text.txt")
    if len(sys.argv) < 3:
        text.write_text(TEXT)
    shape = {"prompt_len": 32, "gen_len": 8, "loops": 1, "warmup": 1}
    score = {"quality": "perplexity", "quality_data": text}
    results = {bits: run(model, engine="stream", quant_bits=bits, log=False, **shape, **score) for bits in (16, 4)}

table = pandas.DataFrame(
    {
        f"{bits} bits": {
            "token/s": result.tokens_per_s,
            "first token (s)": result.prefill_s,
            "weights (GB)": result.record["weight_bytes"] / 1e9,
            "perplexity": result.quality["perplexity"]["perplexity"],
            "+-": result.quality["perplexity"]["stderr"],  # not known for a text of a single window
        }
        for bits, result in results.items()
    }
)
table = table.dropna(how="all")
print(table.to_string(float_format="{:.3g}".format))
if "+-" not in table.index:
    print("The text is too short to say how exact its perplexity is.")
