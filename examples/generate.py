"""Generate text with weights that wait in host memory: python examples/generate.py [MODEL] [PROMPT]"""

import sys

from zero_inference import load

model_name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
prompt = sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"

# Layers come to the GPU one after the other. What GPU memory holds stays there; quant_bits=4 makes the rest four times smaller.
with load(model_name, engine="stream", batch_size=2, max_length=128) as model:
    print("\n".join(model.placement))
    inputs = model.tokenizer([prompt, "Water boils at"], return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    for text in model.tokenizer.batch_decode(output, skip_special_tokens=True):
        print(repr(text))
