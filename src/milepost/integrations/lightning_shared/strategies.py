"""What strategies with sharded state get in place of their own way to save, load and remove checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

import milepost
from milepost.background.engine import Background
from milepost.comm import TIMEOUT_S
from milepost.integrations.lightning_shared.parts import Filling, bare, fill, model_state, optimizer_state, part_of_rank
from milepost.integrations.lightning_shared.reading import (
    MODEL,
    OPTIMIZERS,
    FindParts,
    Keys,
    SavedParts,
    Trusted,
    read_parts,
    trainer_parts,
)
from milepost.integrations.lightning_shared.saves import Place, TrainerSaves, clear_the_way, place_of, place_to_read
from milepost.saving.options import SaveSettings
from milepost.store.spelling import shown

T = TypeVar("T")


class SavesShards:
    """Saves with all ranks, in one commit; the part that is the same for the trainer and for Fabric."""

    broadcast: Callable[[Any], Any]
    global_rank: int
    is_global_zero: bool

    def __init__(
        self,
        *args: Any,
        background: Background | None = None,
        save_timeout_s: float = TIMEOUT_S,
        save_options: SaveSettings | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = save_timeout_s
        self._saves = TrainerSaves(background, None, save_timeout_s, save_options)

    def save_joint(self, state: Mapping[str, Any], shared: list[str], path: Any, storage_options: Any) -> None:
        """Save the state of all ranks at rank 0's path."""
        if storage_options is not None:
            raise milepost.InvalidRequest(
                f"{type(self).__name__} has no storage_options: pass the options of milepost.save as save_options"
            )

        def prepare() -> Place:
            where = place_of(path)
            clear_the_way(where)
            return where

        where = self._by_rank_0(prepare)
        self._saves.save(part_of_rank(state, shared, self.global_rank), where)

    def read_parts(self, path: Any, find: FindParts, weights_only: bool | None) -> SavedParts:
        """What rank 0 finds at its path, on every rank."""
        self._saves.join()
        trusted = self.trusted(weights_only)
        return self._by_rank_0(lambda: read_parts(place_to_read(path), trusted, find))

    def trusted(self, weights_only: bool | None) -> Trusted:
        """What may be made while reading; `weights_only=False` is the user's word that pickles may be run."""
        options = self._saves.options
        pickles = weights_only is False or options.get("allow_pickle", False)
        return Trusted(tuple(options.get("types", ())), pickles)

    def filling(self, weights_only: bool | None, strict: bool) -> Filling:
        """How to load."""
        return Filling(self.trusted(weights_only), strict, self._timeout_s)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of Milepost, once what replaces it is committed."""
        if self.is_global_zero:
            self._saves.remove(filepath)

    def teardown(self) -> None:
        """Wait for a save in the background, and raise its error."""
        try:
            self._saves.close()
        finally:
            super().teardown()  # type: ignore[misc]  # the strategy's

    def _by_rank_0(self, act: Callable[[], T]) -> T:
        """What rank 0's action gives, on every rank. Its error is raised on every rank."""
        result: Any = None
        if self.global_rank == 0:
            try:
                result = act()
            except Exception as error:  # noqa: BLE001  # raised below, on every rank
                result = error
        result = self.broadcast(result)
        if isinstance(result, Exception):
            raise result
        made: T = result
        return made


class TrainerSavesShards(SavesShards):
    """For strategies of the trainer. Everything that the trainer dumps is one checkpoint."""

    model: Module | None
    optimizers: list[Any]
    lightning_module: Any

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards of the model on this rank, where they are."""
        assert self.model is not None
        return model_state(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The shards of an optimizer on this rank, where they are."""
        assert self.model is not None
        return optimizer_state(self.model, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save what the trainer dumped, in one commit of all ranks; or begin to, in the background."""
        self.save_joint(checkpoint, [MODEL, OPTIMIZERS], filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers onto the shards that they have now, and give the rest."""
        assert self.model is not None
        saved = self.read_parts(checkpoint_path, trainer_parts, weights_only)
        fitting = self.lightning_module.trainer.state.fn == "fit"
        optimizers = [bare(optimizer) for optimizer in self.optimizers] if fitting else []
        if optimizers and len(optimizers) != len(saved.optimizers):
            raise milepost.StateMismatch(
                f"{shown(saved.path)} has {len(saved.optimizers)} optimizers, and the trainer has {len(optimizers)}. A "
                "checkpoint of weights only cannot resume `fit`: load it into the module before, or use `validate`"
            )
        owned = {keys: (self.model, each) for keys, each in zip(saved.optimizers, optimizers, strict=False)}
        models = dict.fromkeys(saved.models, self.model)
        fill(saved, models, owned, self.filling(weights_only, self.lightning_module.strict_loading))
        return saved.rest


class FabricSavesShards(SavesShards):
    """For strategies of Fabric: `fabric.save(path, state)`, `fabric.load(path, state)`."""

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  # Fabric's name
    ) -> None:
        """Save modules, optimizers and values, in one commit of all ranks; or begin to, in the background."""
        dumped = {key: _dumped(each, state) for key, each in state.items()}
        for key, keep in (filter or {}).items():
            dumped[key] = {name: value for name, value in dumped[key].items() if keep(name, value)}
        shared = [key for key, each in state.items() if isinstance(each, (Module, Optimizer))]
        self.save_joint(dumped, shared, path, storage_options)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into the modules and optimizers of `state`, put the values there, and give what is left."""
        if not isinstance(state, dict) or not state:
            raise milepost.InvalidRequest(
                "say what to load into: fabric.load(path, {'model': model, 'optimizer': optimizer, ...})"
            )
        models: dict[Keys, Module] = {(key,): each for key, each in state.items() if isinstance(each, Module)}
        optimizers: dict[Keys, Optimizer] = {(k,): each for k, each in state.items() if isinstance(each, Optimizer)}
        saved = self.read_parts(path, lambda _tree: (list(models), list(optimizers)), weights_only)
        missing = [key for key in state if key not in saved.rest and (key,) not in models and (key,) not in optimizers]
        if missing and strict:
            raise milepost.StateMismatch(
                f"{shown(saved.path)} has no {missing}. With strict=False they stay as they are"
            )
        owned = {keys: (_owner(each, state), each) for keys, each in optimizers.items()}
        fill(saved, models, owned, self.filling(weights_only, strict))
        for key in state.keys() & saved.rest.keys():
            value = saved.rest.pop(key)
            if isinstance(state[key], milepost.Stateful):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return saved.rest


def _dumped(each: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(each, Module):
        return model_state(each)
    if isinstance(each, Optimizer):
        return optimizer_state(_owner(each, state), each)
    return each.state_dict() if isinstance(each, milepost.Stateful) else each


def _owner(optimizer: Optimizer, state: Mapping[str, Any]) -> Module:
    """The module whose parameters an optimizer changes."""
    changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for each in state.values():
        if isinstance(each, Module) and changed <= {id(parameter) for parameter in each.parameters()}:
            return each
    raise milepost.InvalidRequest(
        "no module of the state holds all parameters of an optimizer: pass the module too, {'model': model, ...}"
    )
