"""First steps: from ``import raypar`` to a step taken by hand, looked into, rearranged, and a run that is resumed.

Run it as a script, or cell by cell (``# %%``) in an editor or a notebook; it takes less than a minute.
"""

# %% A run is plain data. Nothing starts yet: this draws the schedule of its steps, on paper
from dataclasses import replace
from tempfile import mkdtemp

import raypar as rp
from raypar.schedules.catalog import build

run = replace(rp.recipe("gpt-tiny"), mesh=rp.Mesh(pp=2), schedule="gpipe", microbatches=4, steps=6)
build("gpipe", 2, 4)

# %% Two actors start, each with half of the layers; a compiled step is one call to each
job = rp.launch(run)
first = job.step()
print(f"loss {first.loss:.4f}, bubble {first.bubble:.0%}, activations in flight {first.in_flight}")

# %% The next step by hand. What is done is in upper case
s = job.stepper()
s.run_to("1F1")

# %% What could be done now, in whatever order, and why stage 0 can't go back yet
print(s.ready())
print(s.why("0B0"))
s.do("0F3")

# %% Look inside: an activation, the loss of a microbatch, and what each actor holds
print(s.peek("0F1"))
print(s.peek("1F0").tensor)
print(s.state())

# %% Another order for what is left of the step: it is checked first, together with what is done
s.swap("1f1b")

# %% Stop at the first backward with a gradient
s.break_on(lambda seen: seen.action.op == "B" and seen.norm > 0)
s.run()

# %% From the start once more, with a recording of stage 1; the weights change in the STEP only
s.break_on(None)
s.rewind()
folder = mkdtemp(prefix="raypar-")
s.record(f"{folder}/stage1.rec", stage=1)
by_hand = s.finish()
print(f"loss {by_hand.loss:.4f}")

# %% The recorded stage alone, in this process: set a breakpoint in a model's forward, and it stops there
print(rp.replay(f"{folder}/stage1.rec"))

# %% Save, train on, and go on from the checkpoint with other actors: bit by bit the same
checkpoint = job.save(folder)
went_on = [report.loss for report in job.train(3)]
job.close()
with rp.launch(run, resume=checkpoint) as resumed:
    assert [report.loss for report in resumed.train(3)] == went_on
print(f"resumed from {checkpoint.name}: the same losses, {', '.join(f'{loss:.4f}' for loss in went_on)}")
