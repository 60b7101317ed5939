"""State dicts of models and optimizers, keyed by parameter name: torch's own functions, which no storage concerns."""

from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from milepost.dcp._engine.lent import lend

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

lend(
    __name__,
    "FSDP_WRAPPED_MODULE HYBRID_SHARDING_STRATEGIES _CHECKPOINT_PREFIX _EXTRA_STATE _FLAT_PARAM _PARAMS _PG _STATE "
    "_StateDictInfo _flatten_optim_state_dict _gc_context _get_fqns _get_fsdp_process_group _get_model_state_dict "
    "_get_optim_state_dict _init_optim_state _iterate_valid_model_state _load_model_state_dict "
    "_load_optim_state_dict _maybe_full_or_cpu_state_dict _patch_model_state_dict _patch_optimizer_state_dict "
    "_patched_state_dict _split_optim_state_dict _state_dict_fn _unflatten_model_state_dict "
    "_unflatten_optim_state_dict _verify_options _verify_state_dict",
)
