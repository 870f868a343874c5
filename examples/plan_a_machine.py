"""What can a machine do with a model? python examples/plan_a_machine.py [MODEL] [MACHINE] [HOST_GIB]

No weights and no GPU are needed. `zero-inference plan --machines` lists the typical machines; without a machine it is about this one.
"""

import sys

from zero_inference import plan

given = dict(enumerate(sys.argv))
model, machine, host_gib = given.get(1, "llama-3.1-70b"), given.get(2, "rtx4090"), given.get(3, "128")

found = plan(model, machine=machine, assume={"host": f"{host_gib}GiB"}, batch_size=[1, 8], prompt_len=512, gen_len=128)
print(found)

if found.best is not None:
    print("\nRun it there with:", found.best.command)
    print("or from Python:    run(**", found.best.options, ")", sep="")

    # As a data frame: the fastest configuration for each number of bits, for a single sequence.
    frame = found.frame().query("fits and batch == 1").sort_values("tokens_per_s", ascending=False)
    print(frame.groupby("bits").first()[["engine", "tokens_per_s", "first_token_s", "device_gib", "host_gib"]])
