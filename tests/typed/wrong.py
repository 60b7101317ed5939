"""A user's program with mistakes. `mypy --strict` finds each line that ends with the comment, and no other."""

import milepost

state: dict[str, object] = {}
milepost.save(state, "a", overwite=False)  # wrong
milepost.save(state, "a", on_difference="ignore")  # wrong
milepost.save(state, "a", host_memory_bytes="1 GB")  # wrong
milepost.save(state, "a", allow_missing=True)  # wrong
milepost.load(state, "a", overwrite=True)  # wrong
milepost.load(state, "a", convert_dtype="yes")  # wrong
milepost.explain(state, "a", verify=False)  # wrong
milepost.diff("a", "b", keys=["w"])  # wrong
milepost.async_save(state, "a", stage="later")  # wrong
milepost.async_save(state, "a", background="fork")  # wrong
milepost.async_save(state, "a", colour=1)  # wrong
milepost.prewarm(state, stage="host")  # wrong
milepost.AsyncSaver(when_busy="queue")  # wrong
milepost.AsyncSaver().save(state, "a", verify=True)  # wrong
keeper = milepost.Checkpointer("runs", keep_first=3)  # wrong
milepost.Checkpointer("runs", planner=None)  # wrong
milepost.Checkpointer("runs", plans=None)  # wrong
other = milepost.Checkpointer("runs")
other.save(1, state)  # wrong
other.save(state, 1, metrics={"loss": "low"})  # wrong
other.save(state, 1, allow_missing=True)  # wrong
other.async_save(state, 1, stage="soon")  # wrong
other.restore(state, overwrite=True)  # wrong
milepost.open("a", verify=True)  # wrong
milepost.convert("a", "b", "zip")  # wrong
milepost.copy("a", "b", steps="1-3")  # wrong
milepost.PreemptionGuard(patience_s=3)  # wrong
milepost.Transfer(workers=3)  # wrong
