"""The manager of steps: saves one checkpoint for each step, restores the newest whole one, removes old ones.

Every rank of the job makes the same calls. The coordinator decides what to restore and what to remove.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack

from milepost.api import load, save
from milepost.background.engine import Background, SaveEngine, WhenBusy, check_saver
from milepost.background.errand import Errand
from milepost.background.pending import PendingSave
from milepost.background.saver import SaveRequest, begin_save, close_after
from milepost.background.staging import Way
from milepost.background.ticket import Ticket, unless_interrupted
from milepost.checkpoint import Checkpoint, open_checkpoint
from milepost.comm import TIMEOUT_S, Call, Comm, Meeting, calling, meet, operating_on, together
from milepost.core.agreement import Plans
from milepost.core.option_values import check_values, items_of
from milepost.core.printable import in_one_line
from milepost.core.wire import Wire
from milepost.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
)
from milepost.loading.options import LOAD_OPTIONS, LoadKeywords, make_load_options
from milepost.loading.pipeline import refuse_load
from milepost.planning.protocol import LoadPlanner, SavePlanner
from milepost.saving.options import SAVE_SETTINGS, SaveKeywords, SaveSettings, make_options
from milepost.saving.pipeline import Receipt, refuse
from milepost.steps.choosing import (
    RestoreChoice,
    SkippedSteps,
    allows_another,
    choose,
    is_unhealthy,
    newest_healthy,
    nothing_left,
)
from milepost.steps.names import OWN_NAMES, StepNames
from milepost.steps.notebook import run_html
from milepost.steps.options import (
    NewestStep,
    RunKeywords,
    at_step,
    check_options,
    only,
    refuse_planner,
    root_at,
    unknown_options,
    wrong_save,
    wrong_values,
)
from milepost.steps.retention import Rule
from milepost.steps.shelf import Shelf, checked_step, with_notes
from milepost.steps.storage_checkpointer import ranks_by
from milepost.steps.verify_share import verify_share
from milepost.store import Location

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_log = logging.getLogger("milepost")
_REMOVING = Meeting("removing", Wire(NoneType), Wire(NoneType))
_SWEEPING = Meeting("removing", Wire(NoneType), Wire(list[int]))


class Checkpointer:
    """The checkpoints of a run: one for each step, in the folders `path/step-0000000100` and so on.

    `keep_last`: keep this many of the newest steps. `keep_every`: also keep the multiples of this number. `keep_best`:
    also keep this many of the best steps by the metric named `best`: the smallest values, or with `mode="max"` the
    largest. A step without the metric, or with NaN, is never among the best. The newest step is always kept. Without
    any rule, all steps are kept. "Newest" means the highest number.

    `healthy=True` marks a step with NaN or Inf in it as unhealthy, in its manifest; or pass a rule, a function that
    gets a `HealthCheck`. `restore` passes unhealthy steps over. They hold no place of a healthy step, so that they push
    none out, and are never the best. The newest `keep_last` of them (else one) are kept, too, and those that
    `keep_every` keeps.

    `names`: how the folders are named. `{step}` stands for the step, `{step:06}` for the step with zeros in front.
    `also_read`: patterns of further names, for steps that other programs saved. They are listed and restored, in every
    format that `load` reads, and never removed by a rule. There a `*` stands for any text, and a step may be a file:
    `also_read=["checkpoint-{step}", "epoch=*-step={step}.ckpt"]`.

    `incremental=True`: what did not change since the newest step is not written again, and is shared by both. Each step
    stays whole by itself, whichever others are removed. `max_depth`, `max_waste`: when unchanged data is written again;
    see `save`. After a restore that found damage, only the step that it found whole, and later ones, are shared with.

    `process_group`, `timeout_s`: the ranks that save and restore together, as for `milepost.save`. `coordinator_rank`:
    the rank that decides. `no_dist`: this process alone. `save_planner`, `load_planner`: used for every save and load.
    `background`, `stage`, `staging_bytes`, `when_busy`: how `async_save` works; see `AsyncSaver`. Further options are
    those of `save` and `load` (`transfer`, `types`, `on_difference`, `convert_dtype`, ...), for every call that has
    them. Raises InvalidRequest for a wrong option.

    One job at a time saves to a path. Any number of jobs may read from it meanwhile.

    >>> state = {"w": torch.zeros(2), "step": 0}
    >>> with milepost.Checkpointer("memory://run", keep_last=2) as keeper:
    ...     for step in (1, 2, 3):
    ...         _ = keeper.save({**state, "step": step}, step)
    ...     keeper.steps(), keeper.restore(state), state["step"]
    ([2, 3], 3, 3)
    """

    def __init__(
        self,
        path: Location,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        names: str = OWN_NAMES,
        also_read: Sequence[str] = (),
        incremental: bool = False,
        process_group: "dist.ProcessGroup | Comm | None" = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        timeout_s: float = TIMEOUT_S,
        save_planner: SavePlanner | None = None,
        load_planner: LoadPlanner | None = None,
        background: Background = "thread",
        stage: Way = "auto",
        staging_bytes: int | None = None,
        when_busy: WhenBusy = "wait",
        **options: Unpack[RunKeywords],
    ) -> None:
        self._rule = Rule(keep_last, keep_every, keep_best, best, mode)
        check_options(options.keys())
        check_values({"incremental": incremental})
        check_values({"timeout_s": timeout_s, "coordinator_rank": coordinator_rank, "no_dist": no_dist})
        check_values({"save_planner": save_planner, "load_planner": load_planner})
        check_saver(background, stage, staging_bytes, when_busy)
        if "types" in options:
            options["types"] = items_of("types", options["types"])  # for every call, also if it can be read only once
        self._for_saves: SaveSettings = only(SAVE_SETTINGS, options)
        self._for_loads: LoadKeywords = only(LOAD_OPTIONS, options)
        make_load_options(**self._for_loads)
        found = StepNames(names, also_read)
        self._shelf, self._names, self._incremental = Shelf(root_at(path), found), found, incremental
        make_options(**self._given({}, Plans(), {}, self._base()))
        if incremental and save_planner is not None:
            refuse_planner(self._shelf.root, save_planner)
        self._ranks = ranks_by(process_group, timeout_s, coordinator_rank, no_dist)
        self._make_saver: Callable[[], SaveEngine] = lambda: SaveEngine(
            background=background,
            stage=stage,
            staging_bytes=staging_bytes,
            when_busy=when_busy,
            process_group=self._ranks(),
            timeout_s=timeout_s,
        )
        self._saver: SaveEngine | None = None
        self._making: Errand[SaveEngine] | None = None
        self._save_planner, self._load_planner = save_planner, load_planner
        self._plans = Plans()
        self._closed = False

    @property
    def url(self) -> str:
        """Where the steps are."""
        return self._shelf.root.url

    def __repr__(self) -> str:
        return f"Checkpointer({self.url!r})"

    def _repr_html_(self) -> str:
        return run_html(self._shelf)

    def save(
        self,
        state: Any,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        incremental: bool | None = None,
        planner: SavePlanner | None = None,
        **options: Unpack[SaveSettings],
    ) -> Receipt:
        """Save `state` as this step, on every rank, and then remove the steps that the rules do not keep.

        Returns once the step is committed and survives power loss. An existing step is replaced atomically, or refused
        with `overwrite=False`. `metrics` are kept in the checkpoint's metadata, as `metadata["metrics"]`; those of the
        coordinator count, and other ranks may pass none. `incremental`: for this save, in place of that of the
        Checkpointer; False writes everything, and later saves share that. Further options are those of `milepost.save`.

        Old steps are removed only if the newest step that remains looks whole. If that is the step just saved and it is
        not whole, CheckpointDamaged is raised. A step that cannot be removed is logged, and the next save tries again.
        """
        self._check_open()
        comm = self._ranks()
        with calling(comm, Call("saving to", self.url)):
            place = self._shelf.place(step)
            earlier = self._saver.take_error() if self._saver is not None else None
            wrong = earlier or wrong_save(options, metadata, incremental)
            if wrong is not None:
                refuse(place, comm, wrong)
            metadata = dict(metadata or {})
            if comm.rank == comm.coordinator:
                try:
                    metadata = with_notes(metadata, metrics, self._rule)
                except Exception as error:  # noqa: BLE001  # raised by `refuse`
                    refuse(place, comm, error)
            planner = planner if planner is not None else self._save_planner
            given = self._given(metadata, self._plans, options, self._base(incremental, planner))
            at_step(given, step)
            with operating_on(comm, "save", place.url, step=step, wraps=True):
                receipt = save(state, place, planner=planner, process_group=comm, **given)
                self._retain(comm, step)
            return receipt

    def async_save(
        self,
        state: Any,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
        stage: Way | None = None,
        incremental: bool | None = None,
        planner: SavePlanner | None = None,
        **options: Unpack[SaveSettings],
    ) -> PendingSave:
        """Save `state` as this step while training goes on, on every rank. Returns when the caller may go on.

        The returned save is done once the step is committed and old ones are removed, as in `save`. See `AsyncSaver`
        for how the state is copied, and for `optimizer`. An error of an earlier save that was not asked for is raised
        here, by `save`, `wait` or `close`.
        """
        self._check_open()
        comm = self._ranks()
        planner = planner if planner is not None else self._save_planner

        def begin(ticket: Ticket) -> PendingSave:
            engine = self._background()
            try:
                place = self._shelf.place(step)
            except Exception as error:  # noqa: BLE001  # raised by `refuse`, on the other ranks too
                engine.refuse(ticket, self.url, error)
            wrong = wrong_save(options, metadata, incremental)
            if wrong is not None:
                engine.refuse(ticket, place, wrong)
            made = dict(metadata or {})
            if comm.rank == comm.coordinator:
                try:
                    made = with_notes(made, metrics, self._rule)
                except Exception as error:  # noqa: BLE001  # raised by `refuse`
                    engine.refuse(ticket, place, error)
            given = self._given(made, engine.plans, options, self._base(incremental, planner))
            at_step(given, step)
            request = SaveRequest(state, place, stage, optimizer, planner, None, lambda comm: self._retain(comm, step))
            with operating_on(comm, "save", place.url, step=step, wraps=True):
                return begin_save(engine, ticket, request, given)

        return unless_interrupted(begin)

    def _given(
        self, metadata: dict[str, Any], plans: Plans, options: SaveSettings, base: NewestStep | None
    ) -> SaveKeywords:
        """The options of one save: those of the run, and over them those of the call."""
        return {"metadata": metadata, "plans": plans, "base": base, **self._for_saves, **options}

    def _base(self, incremental: bool | None = None, planner: SavePlanner | None = None) -> NewestStep | None:
        """The base of one save."""
        wanted = self._incremental if incremental is None else incremental
        if wanted or (self._incremental and planner is None):
            # One that shall share nothing has a base that is never found, so that later saves can share with it.
            return NewestStep(self._shelf.root, self._names, self._shelf.trusted if wanted else frozenset())
        return None

    def prewarm(self, state: Any) -> None:
        """Make the memory and the process that `async_save` of this state needs, ahead of time. On every rank."""
        self._check_open()
        unless_interrupted(lambda ticket: self._background().prewarm(ticket, state, **self._for_saves))

    def _background(self) -> SaveEngine:
        if self._saver is None:
            # By a thread that no signal handler interrupts: a saver that is half made would be counted on this rank
            # and not on the others, and later ones would not meet theirs.
            making = self._making = self._making or Errand(self._make_saver)
            making.start("making a saver")
            making.ended.wait()
            self._making = None
            self._saver = making.get()
        return self._saver

    def _retain(self, comm: Comm, step: int) -> None:
        # A meeting, so that all ranks see the same steps when the call returns.
        meet(comm, Call("keeping steps of", self.url), _REMOVING, lambda: None, lambda _: self._remove_old(step))

    def _remove_old(self, step: int) -> None:
        try:
            self._shelf.retain(self._rule, step)
        except CheckpointDamaged:
            raise
        except (CheckpointError, OSError) as error:
            _log.warning("could not remove old steps at %s; the next save will: %s", self.url, error)

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        default: int | None = None,
        verify_first: bool | None = None,
        planner: LoadPlanner | None = None,
        **options: Unpack[LoadKeywords],
    ) -> int:
        """Load the newest healthy and whole checkpoint into `state`, in place, on every rank, and return its step.

        Unhealthy and damaged checkpoints are skipped, with a warning in the log that says why, also if the damage shows
        only while loading. All ranks load the same step. Unfinished saves are not seen. With `step`, exactly that one
        is loaded, healthy or not.

        If nothing was ever saved, `default` is returned; without a default, CheckpointNotFound is raised. If there are
        checkpoints and none is healthy and whole, CheckpointUnhealthy is raised with the reasons, or CheckpointDamaged
        if all are damaged; the state may be partly filled. All other errors are raised at once, StateMismatch among
        them.

        `verify_first`: read and check every byte before the state is touched; the ranks share the work. The default is
        True with `allow_missing`, because an older step may lack keys that a failed attempt has filled; else False.
        Further options are those of `milepost.load`.
        """
        self._check_open()
        self._finish()
        comm = self._ranks()
        with calling(comm, Call("restoring from", self.url)), operating_on(comm, "restore", self.url) as operation:
            if isinstance(state, tuple):
                raise InvalidRequest("a tuple cannot be filled in place; put it into a dict")
            step = None if step is None else checked_step(step)
            given: LoadKeywords = {"allow_unhealthy": step is not None, **self._for_loads, **options}
            wrong = unknown_options(options, LOAD_OPTIONS, "a restore")
            wrong = wrong or wrong_values({"verify_first": verify_first})
            planner = planner if planner is not None else self._load_planner
            wish = bool(given.get("allow_missing") if verify_first is None else verify_first)
            skipped = SkippedSteps()
            while True:
                chosen = choose(comm, self._shelf, step, skipped, wish)
                if wrong is not None:
                    _refuse_restore(self._shelf, comm, chosen, wrong)
                if chosen.step is None:
                    # A meeting: a rank that looks at another place hears of it here.
                    together(comm, Call("restoring from", self.url), "finding nothing", lambda: None)
                    self._shelf.note_damage(skipped.damaged, None)
                    return nothing_left(self.url, skipped, default)
                try:
                    place = self._shelf.within(chosen.folder)
                    if chosen.verify_first:
                        call = Call("restoring from", place.url)
                        with operating_on(comm, "verify", place.url, step=chosen.step):
                            together(comm, call, "verifying", partial(verify_share, comm, place, given))
                    with operating_on(comm, "load", place.url, step=chosen.step, wraps=True):
                        load(state, place, planner=planner, process_group=comm, **given)
                except CheckpointError as error:
                    if not allows_another(error):
                        raise
                    if step is not None:
                        self._shelf.note_damage({} if is_unhealthy(error) else {step: str(error)}, None)
                        raise
                    kind = skipped.unhealthy if is_unhealthy(error) else skipped.damaged
                    kind[chosen.step] = str(error)
                    operation.skip(chosen.step, str(error))
                    if comm.rank == comm.coordinator:
                        _log.warning("skipping step %d: %s", chosen.step, in_one_line(str(error)))
                else:
                    self._shelf.note_damage(skipped.damaged, chosen.step)
                    return chosen.step

    def steps(self) -> list[int]:
        """The committed steps, oldest first. May be called on one rank alone."""
        self._check_open()
        return self._shelf.steps()

    def latest(self) -> int | None:
        """The newest committed step, or None, whole and healthy or not. May be called on one rank alone."""
        self._check_open()
        return self._shelf.latest()

    def latest_healthy(self) -> int | None:
        """The newest committed step that no rule found unhealthy, or None. Does not check whether it is whole.

        This is the step that `restore` tries first. May be called on one rank alone.
        """
        self._check_open()
        return newest_healthy(self._shelf)

    def best(self) -> int | None:
        """The healthy step with the best metric, or None if none has it. May be called on one rank alone.

        Raises InvalidRequest if the Checkpointer was made without `best`.
        """
        self._check_open()
        if self._rule.best is None:
            raise InvalidRequest('say which metric is meant: Checkpointer(..., best="loss", mode="min")')
        return next(iter(self._rule.ranked(self._shelf.scores(self._rule.best))), None)

    def open(self, step: int | None = None) -> Checkpoint:
        """Open a step, by default the newest, to look inside. May be called on one rank alone."""
        self._check_open()
        found = self._shelf.newest() if step is None else (step, self._shelf.folder_of(step))
        if found is None:
            raise CheckpointNotFound(f"nothing was saved at {self.url} yet")
        types, allow_pickle = self._for_loads.get("types", ()), self._for_loads.get("allow_pickle", False)
        return open_checkpoint(self._shelf.within(found[1]), types=types, allow_pickle=allow_pickle)

    def remove(self, step: int) -> None:
        """Remove a step, on every rank, whatever the rules say, even the last one.

        Use it when a run goes back to an older step: the later steps would stay the newest. Raises CheckpointNotFound,
        or CheckpointDamaged if the manifest of the step cannot be read; delete such a folder by hand. Raises
        InvalidRequest for a step in another format than Milepost's.
        """
        self._check_open()
        self._finish()
        comm = self._ranks()

        def remove(_: list[None]) -> None:
            self._shelf.finish()
            self._shelf.remove(step)

        with calling(comm, Call("removing", self.url)):
            meet(comm, Call("removing", self._shelf.place(step).url), _REMOVING, lambda: None, remove)

    def remove_unfinished(self) -> list[int]:
        """Remove, on every rank, what saves left that never finished, in folders without a checkpoint.

        Gives their steps. For the start of a job, after `restore`: no other job may be saving to the path, since its
        save cannot be told from a dead one. Such data is also swept when the same step is saved again.
        """
        self._check_open()
        self._finish()
        comm = self._ranks()
        call = Call("removing unfinished saves from", self.url)
        with calling(comm, call):
            return meet(comm, call, _SWEEPING, lambda: None, lambda _: self._shelf.remove_unfinished())

    def wait(self) -> None:
        """Return once no save is under way. Raises the error of the last one, if it was not asked for."""
        self._check_open()
        error = self._saver.take_error() if self._saver is not None else None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for a save under way and free what is kept between saves. May be called twice; other calls then fail.

        Raises the error of the last save in the background, if it was not asked for.
        """
        self._closed = True
        self._plans = Plans()
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._saver is None:
            self.close()
            return
        close_after(self._saver, error)  # logs its own error; the one that ends the block is raised
        self.close()

    def _finish(self) -> None:
        """Wait for a save under way. Its error is raised elsewhere."""
        if self._saver is not None:
            self._saver.join()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(f"{self!r} is closed")


def _refuse_restore(shelf: Shelf, comm: Comm, chosen: RestoreChoice, wrong: InvalidRequest) -> NoReturn:
    """Join the restore that the other ranks make in order to fail it."""
    if chosen.step is None:
        raise wrong
    place = shelf.within(chosen.folder)
    if chosen.verify_first:
        together(comm, Call("restoring from", place.url), "verifying", lambda: _raise(wrong))
    refuse_load(place, comm, wrong)


def _raise(error: Exception) -> NoReturn:
    raise error
