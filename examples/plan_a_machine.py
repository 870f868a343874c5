"""What can a machine do with a model? python examples/plan_a_machine.py [MODEL] [MACHINE] [HOST_GIB] [CORES_GB_PER_S]

No weights and no GPU are needed. `zero-inference plan --machines` lists the typical machines. How fast CPU cores read memory is in no
datasheet: without it, a plan leaves out what they would compute. `zero-inference link` measures it.
"""

import sys

from zero_inference import plan

given = dict(enumerate(sys.argv))
model, machine = given.get(1, "llama-3.1-70b"), given.get(2, "rtx4090")
assume = {"host": f"{given.get(3, '128')}GiB", "cores": f"{given.get(4, '60')}GB/s"}

found = plan(model, machine=machine, assume=assume, batch_size=[1, 8])
print(found)

if found.best is not None:
    print("\nRun it there with:", found.best.command)
    print("or from Python:    run(**", found.best.options, ")", sep="")

    # As a data frame: the fastest configuration for each number of bits, for a single sequence.
    frame = found.frame().query("fits and batch == 1").sort_values("tokens_per_s", ascending=False)
    print(frame.groupby("bits").first()[["engine", "tokens_per_s", "first_token_s", "device_gib", "host_gib"]])
